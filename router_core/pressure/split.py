"""Whose work keeps the CPUs busy: ours (engines and this process) or somebody else's.

External = busy cores - engine cores - own cores, never below 0, in percent of the cores this host may use.
Where the engines' counters are missing, everything busy is external while nothing of ours is in flight; while
something is, the last figure is held for 60 s and then unknown. Our own load is not pressure.
"""

from typing import Final

from router_core.pressure.samples import HostSample, Reading, measured, missing

HELD_MS: Final = 60_000
TAIL_MS: Final = 1_000
"""How long after its last end our own work still counts as in flight."""
GAP_MS: Final = 10_000


class CpuSplit:
    """Folds successive samples. Figures are unknown until two samples were seen."""

    def __init__(self) -> None:
        self._last: HostSample | None = None
        self._ours_ms: int | None = None
        self.busy_pct: Reading[float] = missing(0)
        self.steal_pct: Reading[float] = missing(0)
        self.external_pct: Reading[float] = missing(0)

    def clear(self) -> None:
        """Drop the last sample, so that the next difference spans no suspend."""
        self._last = None

    def note_work(self, in_flight: bool, now: int) -> None:
        """Tell whether a request, load or unload of ours is in flight at a local engine."""
        if in_flight:
            self._ours_ms = now

    def fold(self, sample: HostSample, *, engines_up: int) -> None:
        """Take the next sample. ``engines_up`` is how many local engines run; all of them must be counted in
        ``sample.engines`` for their share to be known. A sample already seen changes nothing."""
        last, now = self._last, sample.taken_ms
        if last is not None and now <= last.taken_ms:
            return
        self._last = sample
        times, before = sample.cpu_times.value, None if last is None else last.cpu_times.value
        if last is None or times is None or before is None or now - last.taken_ms > GAP_MS:
            return
        busy = sum(max(0.0, b - a) for a, b in zip(before.busy, times.busy, strict=False))
        steal = max(0.0, times.steal - before.steal)
        total = busy + steal + max(0.0, times.idle - before.idle)
        if total <= 0:
            return
        self.busy_pct = measured(100 * busy / total, now)
        self.steal_pct = measured(100 * steal / total, now)
        self._fold_external(last, sample, sample.cpus * busy / total, engines_up)

    def _fold_external(
        self, last: HostSample, sample: HostSample, busy_cores: float, engines_up: int
    ) -> None:
        now = sample.taken_ms
        span_us = (now - last.taken_ms) * 1_000
        own_us = _grown(last.own_cpu_us.value, sample.own_cpu_us.value)
        engines_us = _engines_grown(last, sample, engines_up)
        foreign = busy_cores - (own_us or 0) / span_us
        if engines_us is not None:
            foreign -= engines_us / span_us
        elif self._ours_ms is not None and now - self._ours_ms <= TAIL_MS + (now - last.taken_ms):
            if now - self.external_pct.taken_ms > HELD_MS:
                self.external_pct = missing(self.external_pct.taken_ms)
            return
        percent = 100 * max(0.0, foreign) / sample.cpu_capacity
        self.external_pct = measured(min(100.0, percent), now)


def _engines_grown(last: HostSample, sample: HostSample, engines_up: int) -> int | None:
    """CPU microseconds of all engines between two samples; None if one of them is not counted."""
    before = {engine.unit: engine.cpu_us for engine in last.engines}
    grown = [_grown(before.get(engine.unit), engine.cpu_us) for engine in sample.engines]
    counted = [us for us in grown if us is not None]
    return sum(counted) if len(counted) >= engines_up else None


def _grown(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else max(0, after - before)
