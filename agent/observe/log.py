"""Log lines: an event code and typed fields, one line each, nothing anybody else wrote in full.

Rules: control characters are escaped, so one event is one line whatever a peer put into a name; text is cut
at ``limits.LOG_TEXT`` characters; an exception is its class, never its message, since messages quote what
clients and peers sent; lines that say the same of the same one, whatever numbers they hold, are written
``limits.LOG_LINES_PER_MIN`` times a minute, then counted and summed up in one line. Objects the log does not know are
named by their class.
"""

import itertools
import json
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from enum import Enum, IntEnum
from pathlib import PurePath
from typing import Final, TextIO

from agent.effects.clock import Clock
from agent.observe.metrics import Family, Labels, Number, Shape, gauge_family
from agent.observe.writer import LineWriter
from router_core import limits

Scalar = str | int | float | bool | None
Field = Scalar | tuple[Scalar, ...]

ITEMS: Final = 16
WINDOW_MS: Final = 60_000
REMEMBERED: Final = 1_024
ORIGINS: Final = ("origin", "peer", "node")
"""Fields that name whom a line is about: what else another node's lines hold may be of its making."""
_ENCODE: Final = json.JSONEncoder(ensure_ascii=True, separators=(",", ":")).encode
_OWN_KEYS: Final = frozenset({"at", "level", "event"})


class Severity(IntEnum):
    """How serious a log line is."""

    DEBUG = 10
    INFO = 20
    WARNING = 30
    ERROR = 40


class Log:
    """Writes lines through ``write``; safe from any thread.

    ``write`` gets finished lines without the last one's newline and must return at once; ``dropped`` tells how many it
    lost, by why. ``human`` chooses ``HH:MM:SS level event key=value`` over JSON. A sink that fails is dropped for that
    line: losing a log line must not stop the service.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        clock: Clock,
        *,
        human: bool = False,
        least: Severity = Severity.INFO,
        dropped: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._write = write
        self._clock = clock
        self.is_human = human
        self._render = human_line if human else json_line
        self._least = least
        self._dropped = dropped
        self._lock = threading.RLock()
        self._seen: OrderedDict[tuple[object, ...], _Window] = OrderedDict()
        self._refused = 0

    @property
    def is_debugging(self) -> bool:
        """Whether lines of ``debug`` are written: to be asked first where a request would pay for their fields."""
        return self._least <= Severity.DEBUG

    def debug(self, event: str, /, **fields: object) -> None:
        self.event(Severity.DEBUG, event, fields)

    def info(self, event: str, /, **fields: object) -> None:
        self.event(Severity.INFO, event, fields)

    def warning(self, event: str, /, **fields: object) -> None:
        self.event(Severity.WARNING, event, fields)

    def error(self, event: str, /, **fields: object) -> None:
        self.event(Severity.ERROR, event, fields)

    def event(self, severity: Severity, event: str, fields: Mapping[str, object]) -> None:
        """Write one line, unless ``severity`` is below the threshold or the line was said often enough."""
        if severity < self._least:
            return
        clean = {(f"{k}_" if k in _OWN_KEYS else k): plain(v) for k, v in fields.items()}
        key = (severity, event, *(clean if severity is Severity.DEBUG else _telling(clean)).items())
        now = self._clock.boot_ms()
        with self._lock:
            self._sum_up(now - WINDOW_MS)
            window = self._seen.get(key)
            if window is None:
                window = self._seen[key] = _Window(now, severity, event, clean)
                if len(self._seen) > REMEMBERED:
                    self._close(self._seen.popitem(last=False)[1])
            window.count += 1
            if window.count <= limits.LOG_LINES_PER_MIN:
                self._emit(severity, event, clean)

    def lines(self, text: str) -> None:
        """Write lines that somebody else has made, each with its end."""
        self._put(text.removesuffix("\n"))

    def sum_up(self) -> None:
        """Write the summaries that are due; each event does, but there may be none for long."""
        with self._lock:
            self._sum_up(self._clock.boot_ms() - WINDOW_MS)

    def flush(self) -> None:
        """Write the pending summaries now, as at the end of the process."""
        with self._lock:
            while self._seen:
                self._close(self._seen.popitem(last=False)[1])

    @property
    def lost(self) -> int:
        """Lines that nobody got."""
        return self._refused + sum(self._dropped().values())

    def collect(self) -> Iterable[Family]:
        counts: dict[Labels, Number | None] = {(why,): count for why, count in self._dropped().items()}
        counts["unwritable",] = (counts.get(("unwritable",)) or 0) + self._refused
        yield gauge_family(
            "pairmesh_log_lines_dropped_total",
            "Log lines, those of requests included, that nobody got.",
            ("why",),
            counts,
            shape=Shape.COUNTER,
        )

    def _sum_up(self, ended_at: int) -> None:
        while self._seen and next(iter(self._seen.values())).since <= ended_at:
            self._close(self._seen.popitem(last=False)[1])

    def _close(self, window: "_Window") -> None:
        suppressed = window.count - limits.LOG_LINES_PER_MIN
        if suppressed > 0:
            fields = {name: value for name, value in window.fields.items() if not _is_number(value)}
            self._emit(window.severity, window.event, {**fields, "suppressed": suppressed})

    def _emit(self, severity: Severity, event: str, fields: Mapping[str, Field]) -> None:
        at = datetime.fromtimestamp(self._clock.wall_ms() / 1000, UTC)
        try:
            text = self._render(at, severity, event, fields)
        except ValueError:
            self._refused += 1
        else:
            self._put(text)

    def _put(self, text: str) -> None:
        try:
            self._write(text)
        except (OSError, ValueError):
            self._refused += 1


class _Window:
    __slots__ = ("count", "event", "fields", "severity", "since")

    def __init__(self, since: int, severity: Severity, event: str, fields: Mapping[str, Field]) -> None:
        self.since = since
        self.severity = severity
        self.event = event
        self.fields = fields
        self.count = 0


def _telling(fields: Mapping[str, Field]) -> Mapping[str, Field]:
    """What makes one line another's repetition: who it is about, else all it says but numbers."""
    about = {name: fields[name] for name in ORIGINS if isinstance(fields.get(name), str)}
    return about or {name: value for name, value in fields.items() if not _is_number(value)}


def _is_number(value: Field) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def stream_log(
    stream: TextIO | None, clock: Clock, *, least: Severity = Severity.INFO
) -> tuple[Log, LineWriter]:
    """A log on ``stream`` and what writes it: for people when it is a terminal, JSON lines otherwise. Without a stream,
    as where a supervisor closed it, it goes nowhere: its number may be another file's by now."""
    human = stream is not None and stream.isatty()
    render = human_line if human else json_line

    def told(lines: int) -> str:
        at = datetime.fromtimestamp(clock.wall_ms() / 1000, UTC)
        return render(at, Severity.WARNING, "log.dropped", {"lines": lines})

    fd = os.open(os.devnull, os.O_WRONLY) if stream is None else os.dup(stream.fileno())
    writer = LineWriter(fd, told)
    log = Log(writer.put, clock, human=human, least=least, dropped=lambda: writer.dropped)
    return log, writer


def plain(value: object) -> Field:
    """``value`` as something a line can hold."""
    if isinstance(value, list | tuple | set | frozenset):
        return tuple(_scalar(item) for item in itertools.islice(value, ITEMS))
    return _scalar(value)


def _scalar(value: object) -> Scalar:
    if type(value) is str:
        return cut(value)
    match value:
        case Enum():
            return value.name.lower()
        case float() if not math.isfinite(value):
            return None
        case None | bool() | int() | float():
            return value
        case str():
            return cut(value)
        case PurePath():
            return cut(str(value))
        case bytes():
            return cut(value.hex())
        case BaseException():
            return class_name(value)
        case _:
            return f"<{type(value).__name__}>"


def class_name(exc: BaseException) -> str:
    """The class of an error, with its module unless built in: all a log may say about it."""
    kind = type(exc)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def cut(text: str) -> str:
    """At most ``limits.LOG_TEXT`` characters of ``text``."""
    return text if len(text) <= limits.LOG_TEXT else text[: limits.LOG_TEXT - 1] + "…"


def json_line(at: datetime, severity: Severity, event: str, fields: Mapping[str, Field]) -> str:
    """A log line as one JSON object."""
    line = {"at": _stamp(at), "level": severity.name.lower(), "event": event, **fields}
    return _ENCODE(line).replace("\x7f", "\\u007f")


def human_line(at: datetime, severity: Severity, event: str, fields: Mapping[str, Field]) -> str:
    """A log line for a terminal: local time, severity, event and fields."""
    pairs = "".join(f" {key}={_shown(value)}" for key, value in fields.items())
    return f"{at.astimezone():%H:%M:%S} {severity.name.lower():7} {event}{pairs}"


def _stamp(at: datetime) -> str:
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _shown(value: Field) -> str:
    match value:
        case None:
            return "-"
        case tuple():
            return "[" + ",".join(_shown(item) for item in value) + "]"
        case str():
            quoted = "".join(ch if ch.isprintable() else ch.encode("unicode_escape").decode() for ch in value)
            return quoted if quoted.isalnum() or _is_word(quoted) else f'"{quoted}"'
        case _:
            return str(value)


def _is_word(text: str) -> bool:
    return bool(text) and all(ch.isalnum() or ch in "._:/@+-" for ch in text)
