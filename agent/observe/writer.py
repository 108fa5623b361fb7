"""Lines on their way to a descriptor, written by a thread of their own.

Whoever reads a log may stand still, be gone, or have its disk full: a write then waits for ever or fails, and neither
may be felt by whoever had something to say. What finds the queue full is dropped, what cannot be written is lost; both
are counted, and one line tells how many as soon as lines get through again.
"""

import os
import select
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from router_core import limits

CLOSE_S: Final = 0.5
_AT_ONCE: Final = 64 * limits.KIB
_RETRY_MS: Final = 1_000
_LINE_END: Final = 10


class LineWriter:
    """Writes to ``fd``, which it owns. ``put`` never waits and may be called from any thread; ``close`` writes what
    waits, for as long as it may take. ``told`` makes a line of how many were lost."""

    def __init__(
        self,
        fd: int,
        told: Callable[[int], str],
        *,
        most_lines: int = limits.LOG_QUEUE,
        most_bytes: int = limits.LOG_QUEUE_BYTES,
    ) -> None:
        self._fd = fd
        self._told = told
        self._most_lines = most_lines
        self._most_bytes = most_bytes
        self._wake = threading.Condition()
        self._queue: deque[tuple[bytes, int]] = deque()
        self._lines = 0
        self._bytes = 0
        self._closing = False
        self._is_torn = False
        self._full = 0
        self._unwritable = 0
        self._untold = 0
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> Mapping[str, int]:
        """Lines that were lost so far, by why."""
        return {"full": self._full, "unwritable": self._unwritable}

    def put(self, text: str) -> None:
        """Take one line or several, without the last line's end."""
        raw = text.encode("utf-8", "backslashreplace") + b"\n"
        count = raw.count(b"\n")
        with self._wake:
            if self._fits(raw, count):
                self._take(raw, count)
            else:
                for line in raw.splitlines(keepends=True):
                    if self._fits(line, 1):
                        self._take(line, 1)
                    else:
                        self._full += 1
                        self._untold += 1
            self._wake.notify()

    def close(self, within_s: float = CLOSE_S) -> bool:
        """Take nothing more and write what waits; False if that is not done in time."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _fits(self, raw: bytes, count: int) -> bool:
        return (
            not self._closing
            and self._lines + count <= self._most_lines
            and self._bytes + len(raw) <= self._most_bytes
        )

    def _take(self, raw: bytes, count: int) -> None:
        self._queue.append((raw, count))
        self._lines += count
        self._bytes += len(raw)

    # --- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while batch := self._next():
            raw = b"".join(each for each, _ in batch)
            left = self._write(raw)
            lost = raw[len(raw) - left :].count(b"\n")
            with self._wake:
                self._lines -= sum(count for _, count in batch)
                self._bytes -= len(raw)
                self._unwritable += lost
                self._untold += lost
                missing = 0 if left else self._untold
            if missing and not self._write(self._told(missing).encode() + b"\n"):
                with self._wake:
                    self._untold -= missing
        os.close(self._fd)

    def _next(self) -> list[tuple[bytes, int]]:
        """What is to be written next, not much at a time; empty at the end."""
        with self._wake:
            while not self._queue and not self._closing:
                self._wake.wait()
            batch: list[tuple[bytes, int]] = []
            size = 0
            while self._queue and (not batch or size + len(self._queue[0][0]) <= _AT_ONCE):
                batch.append(self._queue.popleft())
                size += len(batch[-1][0])
            return batch

    def _write(self, raw: bytes) -> int:
        """Write all of ``raw``, however long it takes; how many bytes could not be."""
        rest = memoryview(b"\n" + raw if self._is_torn else raw)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll(_RETRY_MS)
            except OSError:
                left = len(rest)
                if left <= len(raw):
                    self._is_torn = left < len(raw) and raw[-left - 1] != _LINE_END
                return min(left, len(raw))
        self._is_torn = False
        return 0
