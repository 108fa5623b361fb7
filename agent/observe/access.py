"""The access log: one line per request, written in batches off the request's path.

A line is a flat struct of codes, sizes, times and ids from closed or checked sets; it is encoded when the batch is
written. Past the ceiling lines are dropped and counted: losing a line must not slow the service.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

import msgspec
from msgspec import Struct

from agent.effects.clock import Clock
from agent.observe.log import Severity, human_line
from agent.observe.metrics import Family, Shape, gauge_family
from router_core import limits

BATCH_S: Final = 0.1
_ENCODER: Final = msgspec.json.Encoder()


class AccessLog:
    """``put`` returns at once; ``flush`` writes what waits, as at the end of the process."""

    def __init__(self, write: Callable[[str], object], clock: Clock, *, human: bool = False) -> None:
        self._write = write
        self._clock = clock
        self._human = human
        self._lines: deque[tuple[int, Struct]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._dropped = 0

    def put(self, line: Struct) -> None:
        """Take one finished request; call it on the event loop."""
        if len(self._lines) >= limits.JOURNAL_QUEUE:
            self._dropped += 1
            return
        self._lines.append((self._clock.wall_ms(), line))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(BATCH_S, self.flush)

    def flush(self) -> None:
        """Write every line that waits, in one piece."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        lines, self._lines = self._lines, deque()
        if not lines:
            return
        text = "".join(self._rendered(wall_ms, line) for wall_ms, line in lines)
        try:
            self._write(text)
        except (OSError, ValueError):
            self._dropped += len(lines)

    def collect(self) -> Iterable[Family]:
        yield gauge_family(
            "pairmesh_access_lines_dropped_total",
            "Access lines that found the queue full or no room to be written.",
            (),
            {(): self._dropped},
            shape=Shape.COUNTER,
        )

    def _rendered(self, wall_ms: int, line: Struct) -> str:
        if self._human:
            at = datetime.fromtimestamp(wall_ms / 1000, UTC)
            return human_line(at, Severity.INFO, "request", msgspec.structs.asdict(line)) + "\n"
        second, ms = divmod(wall_ms, 1000)
        fields = _ENCODER.encode(line)[1:].decode()
        return f'{{"at":"{_to_the_second(second)}.{ms:03}Z","level":"info","event":"request",{fields}\n'


@lru_cache(maxsize=4)
def _to_the_second(wall_s: int) -> str:
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%dT%H:%M:%S")
