"""What a router sends out: a total and two rates, for the node's volatile record."""

import math

from router_core.record.state import U32_MAX, Dispatch

_TAU_MS = 30_000.0


class DispatchRate:
    """A total, and rates smoothed over 30 s. Times are boot ms."""

    def __init__(self, now: int) -> None:
        self._at_ms = now
        self._rps = 0.0
        self._work = 0.0
        self.total = 0

    def note(self, service_s: float, now: int) -> None:
        """A request of ``service_s`` predicted seconds was dispatched."""
        self._decay(now)
        self.total += 1
        self._rps += 1000.0 / _TAU_MS
        self._work += service_s * 1000.0 / _TAU_MS

    def row(self, now: int) -> Dispatch:
        """The figures as a record tells them."""
        self._decay(now)
        return Dispatch(
            total=min(self.total, U32_MAX),
            rps_c=min(round(self._rps * 100), U32_MAX),
            work_c=min(round(self._work * 100), U32_MAX),
        )

    def _decay(self, now: int) -> None:
        if now <= self._at_ms:
            return
        kept = math.exp(-(now - self._at_ms) / _TAU_MS)
        self._at_ms = now
        self._rps *= kept
        self._work *= kept
