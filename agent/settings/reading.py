"""One settings file against its schema: from bytes on disk to typed values, or every fault.

Files are TOML, not writable by everybody, and bounded. Values come in layers, later ones beat earlier ones, and each
remembers where it came from. Knows no key by name.
"""

import errno
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from agent.settings.fault import Fault, shown
from agent.settings.removed import RemovedKey
from agent.settings.values import WHOLE, Parse, Refuse, nearest

FILE_BYTES: Final = 1024 * 1024
DEPTH_MOST: Final = 16
"""So many tables and lists may lie in each other."""
GUESSED_FAULTS: Final = 16
"""With so many faults before it nobody is told what a key may have been meant to be: guessing takes a while."""

_NO_KEYS: Final = re.compile(
    rb'"""(?:[^"\\]++|\\.|"(?!""))*+"{0,5}+'
    rb"|'''(?:[^']++|'(?!''))*+'{0,5}+"
    rb'|"(?:[^"\\\n]++|\\[^\n])*+"?'
    rb"|'[^'\n]*+'?"
    rb"|#[^\n]*+",
    re.DOTALL,
)
"""Strings and comments."""
_DEEP_KEY: Final = re.compile(rb"\.(?:[\w \t-]*+\.){%d}" % (DEPTH_MOST - 1))
"""A dotted key of more than ``DEPTH_MOST`` parts: reading it takes a time that grows with their square."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key. ``default`` is written as in the file; None means that it is found out at start, as ``meaning``
    tells. ``parse`` turns the written value into the typed one. ``secret``: what is written there is never told, as it
    may be a key where the name of its file belongs."""

    path: str
    takes: str
    parse: Parse
    default: object
    meaning: str
    secret: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """One setting as it is in force: the value in TOML's terms and where it came from."""

    value: object
    source: str


class Schema:
    """The keys of one file, and those that earlier versions knew. ``tables`` are the dotted names of the tables that
    hold either, ``names`` what a misspelt key may have been meant to be."""

    def __init__(self, keys: Iterable[Key], removed: Iterable[RemovedKey] = ()) -> None:
        self.keys = tuple(keys)
        self.by_path: dict[str, Key] = {key.path: key for key in self.keys}
        self.removed = {key.path: key for key in removed}
        tables = _tables(self.by_path)
        self.names = (*self.by_path, *tables)
        self.tables = frozenset((*tables, *_tables(self.removed)))


def _tables(paths: Iterable[str]) -> tuple[str, ...]:
    """The tables that hold keys of these paths, in their order."""
    heads = [path.split(".")[:-1] for path in paths]
    return tuple(dict.fromkeys(".".join(head[: n + 1]) for head in heads for n in range(len(head))))


class Layers:
    """Values of one schema, laid one over the other. ``faults`` is everything wrong with them, ``warnings`` are the keys
    that have no effect any more."""

    def __init__(self, schema: Schema, faults: list[Fault]) -> None:
        self._schema = schema
        self.faults = faults
        self.warnings: list[Fault] = []
        self.values: dict[str, Any] = {}
        self.written: dict[str, Written] = {}

    def default(self, key: Key, written: object, source: str) -> None:
        """The value of a key nobody sets."""
        self.values[key.path] = key.parse(written, self._reporter(key, "default", written))
        self.written[key.path] = Written(value=written, source=source)

    def lay(self, source: str, values: Mapping[str, object]) -> None:
        """Values by dotted key; those that are not known are faults, those that are known no more are warnings."""
        for path, written in values.items():
            gone = self._schema.removed.get(path)
            if gone is not None:
                told = self.warnings if gone.loads(written) else self.faults
                told.append(Fault(file=source, key=path, problem=gone.problem))
                continue
            key = self._schema.by_path.get(path)
            if key is None:
                meant = nearest(path, self._schema.names) if len(self.faults) < GUESSED_FAULTS else None
                self.faults.append(Fault(file=source, key=path, problem="unknown key", nearest=meant))
                continue
            self.values[path] = key.parse(written, self._reporter(key, source, written))
            self.written[path] = Written(value=written, source=source)

    def _reporter(self, key: Key, source: str, written: object) -> Refuse:
        def refuse(
            problem: str,
            *,
            value: object = WHOLE,
            allowed: str | None = None,
            at: str = "",
            meant: str | None = None,
        ) -> None:
            offending = written if value is WHOLE else value
            self.faults.append(
                Fault(
                    file=source,
                    key=f"{key.path}.{at}" if at else key.path,
                    problem=problem,
                    value=None if offending is None or key.secret else shown(offending),
                    allowed=allowed or key.takes,
                    nearest=meant,
                )
            )

        return refuse


def read(folder: Path, name: str, schema: Schema, faults: list[Fault]) -> dict[str, object]:
    """The keys of file ``name`` by dotted path; empty if there is no file or it cannot be read."""
    raw = _bytes(folder, name, faults)
    return {} if raw is None else parse(raw, name, schema, faults)


def parse(raw: bytes, name: str, schema: Schema, faults: list[Fault]) -> dict[str, object]:
    """The keys of the text ``raw`` by dotted path; empty if it is none. Faults call it ``name``."""
    try:
        tree = toml_of(raw)
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        faults.append(Fault(file=f"{name}:{line}", key="", problem="not UTF-8"))
        return {}
    except ValueError as error:
        faults.append(_broken(name, str(error)))
        return {}
    return _flat(tree, "", name, schema, faults)


def toml_of(raw: bytes) -> dict[str, Any]:
    """The tree in the text ``raw``. Raises ``ValueError`` for what is no TOML, is nested too deeply, or holds a whole
    number of more than the 64 bits that TOML promises: no program of ours could print it."""
    if _DEEP_KEY.search(_NO_KEYS.sub(b"", raw)):
        raise ValueError("nested too deeply")
    try:
        tree = tomllib.loads(raw.decode("utf-8"))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    level: list[Any] = [tree]
    for _ in range(DEPTH_MOST):
        held = [value for each in level for value in (each.values() if isinstance(each, dict) else each)]
        if not all(-(2**63) <= value < 2**63 for value in held if isinstance(value, int)):
            raise ValueError("a whole number of more than 64 bits")
        level = [value for value in held if isinstance(value, dict | list)]
        if not level:
            return tree
    raise ValueError("nested too deeply")


def open_to_all(*places: Path) -> list[str]:
    """In words, which of ``places`` everybody may write. Raises ``OSError`` for one that cannot be looked at."""
    return [
        f"{place} is writable by everybody; chmod o-w it"
        for place in places
        if place.stat().st_mode & stat.S_IWOTH
    ]


def regular(path: Path, most: int) -> bytes:
    """The first ``most`` bytes of a file that ``opened`` opens."""
    with opened(path) as file:
        return file.read(most)


def opened(path: Path, flags: int = 0) -> BinaryIO:
    """A regular file, open to be read, also with ``flags`` of ``open(2)``. Raises ``OSError``; never waits, whatever
    else the path leads to."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a file")
    return os.fdopen(fd, "rb")


def _bytes(folder: Path, name: str, faults: list[Fault]) -> bytes | None:
    path = folder / name
    try:
        for place in (folder, path):
            faults += [Fault(file=name, key="", problem=problem) for problem in open_to_all(place)]
        raw = regular(path, FILE_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        faults.append(Fault(file=name, key="", problem=f"unreadable: {error.strerror}"))
        return None
    if len(raw) > FILE_BYTES:
        faults.append(Fault(file=name, key="", problem=f"larger than {FILE_BYTES} bytes"))
        return None
    return raw


def _broken(name: str, message: str) -> Fault:
    """The TOML reader tells the place at the end of its message only."""
    match = re.fullmatch(
        r"(?P<problem>.*) \(at (line (?P<line>\d+), column (?P<column>\d+)|(?P<end>.*))\)", message, re.S
    )
    if match is None:
        return Fault(file=name, key="", problem=f"not TOML: {message}")
    place = f"{name}:{match['line']}:{match['column']}" if match["line"] else f"{name}, {match['end']}"
    problem = match["problem"]
    return Fault(file=place, key="", problem=f"not TOML: {problem[:1].lower()}{problem[1:]}")


def _flat(
    tree: Mapping[str, object], above: str, file: str, schema: Schema, faults: list[Fault]
) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in tree.items():
        path = above + name
        if path not in schema.tables:
            found[path] = value
        elif isinstance(value, dict):
            found |= _flat(value, f"{path}.", file, schema, faults)
        else:
            faults.append(Fault(file=file, key=path, problem="not a table", allowed=f"[{path}]"))
    return found
