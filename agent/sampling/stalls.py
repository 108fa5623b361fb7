"""Pressure stall files of the kernel: how long some or all tasks waited for CPU, memory or disk, as counters.

A kernel without them, or one that has them switched off, makes a signal unsupported; it is tried again every hour.
Averages the kernel keeps are not used: they lag.
"""

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from agent.sampling.files import KeptFile, whole
from router_core.pressure.samples import Reading, measured, missing, unsupported

RETRY_MS: Final = 3_600_000
"""How often an unsupported source is tried again."""
NEVER: Final = (errno.ENOENT, errno.EOPNOTSUPP, errno.ENOTDIR)


class StallCounter:
    """One line (``some`` or ``full``) of a pressure file, as a counter of microseconds.

    With a cgroup beside the host the counter grows by the greater of both growths.
    """

    def __init__(self, line: str) -> None:
        self._line = line
        self._last: dict[str, int] = {}
        self._total = 0

    def read(self, texts: Mapping[str, str | None]) -> int | None:
        """The counter after these texts (by source); None if no text has the line."""
        totals = {
            source: total for source, text in texts.items() if (total := self._stalled(text)) is not None
        }
        if not totals:
            return None
        self._total += max(max(0, total - self._last.get(source, total)) for source, total in totals.items())
        self._last = totals
        return self._total

    def _stalled(self, text: str | None) -> int | None:
        for line in (text or "").splitlines():
            if line.startswith(f"{self._line} "):
                return whole(line.rpartition("total=")[2])
        return None


class StallFile:
    """One pressure file of the host and the counters read from its lines."""

    def __init__(self, path: Path, *lines: str) -> None:
        self._file = KeptFile(path)
        self._retry_ms: int | None = None
        self._counters = tuple(StallCounter(line) for line in lines)

    def read(self, now: int, beside: Mapping[str, str | None]) -> list[Reading[int]]:
        """One reading per line. ``beside`` are texts of cgroups to count along, by source."""
        if self._retry_ms is not None and now < self._retry_ms:
            return [unsupported(now, self._file.error) for _ in self._counters]
        text, code = self._file.read(), self._file.error
        if text is None and code in NEVER:
            self._retry_ms = now + RETRY_MS
            return [unsupported(now, code) for _ in self._counters]
        if text is None:
            return [missing(now, code) for _ in self._counters]
        self._retry_ms = None
        texts = {"host": text, **beside}
        return [counted(counter.read(texts), now) for counter in self._counters]


def counted(total: int | None, now: int) -> Reading[int]:
    """A counter's reading; one that its source lacks is unsupported."""
    return unsupported(now) if total is None else measured(total, now)
