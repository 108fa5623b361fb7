"""Whose work keeps the CPUs and GPUs busy: ours (engines and this process) or somebody else's.

CPU: external = busy cores - engine cores - own cores, never below 0, in percent of the cores this host may use.
Where the engines' counters are missing, everything busy is external while nothing of ours is in flight; while
something is, the last figure is held for 60 s and then unknown.
GPU, without lists of processes: while nothing of ours is in flight, use of 15 % and more is all external, less is
none; while something is, the last figure is held in the same way. Our own load is not pressure.
"""

from typing import Final

from router_core.pressure.filters import Ewma
from router_core.pressure.samples import HostSample, Reading, ReadingStatus, measured, missing, unsupported

HELD_MS: Final = 60_000
TAIL_MS: Final = 1_000
"""How long after its last end our own work still counts as in flight."""
GAP_MS: Final = 10_000
COOLDOWN_MS: Final = 15_000
BUSY_PCT: Final = 15
"""GPU use below this is nobody's work."""
IDLE_WINDOW, HELD = 4, 5
"""The evidence behind a figure, as V records number it."""


class OwnTrace:
    """When work of ours was last seen in flight at a local engine."""

    def __init__(self) -> None:
        self._seen_ms: int | None = None

    def note(self, now: int) -> None:
        """Something of ours is in flight at ``now``, or ended just then."""
        self._seen_ms = now

    def within(self, now: int, span_ms: int) -> bool:
        """Whether something of ours ran within ``span_ms`` before ``now``, its tail included."""
        return self._seen_ms is not None and now - self._seen_ms <= TAIL_MS + span_ms


class Cooldown:
    """Whether an own load or unload runs or ended within 15 s: by what engines report as loading, and by models
    that came or went."""

    def __init__(self) -> None:
        self._until_ms: int | None = None
        self._residents: frozenset[tuple[str, str]] | None = None

    def fold(self, loading: bool, residents: frozenset[tuple[str, str]], now: int) -> bool:
        """``residents`` are the models in memory, as (engine, model)."""
        before, self._residents = self._residents, residents
        if loading or (before is not None and before != residents):
            self._until_ms = now + COOLDOWN_MS
        return self._until_ms is not None and now < self._until_ms


class CpuSplit:
    """Folds successive samples. Figures are unknown until two samples were seen. ``external_mean_pct`` is the
    external share, smoothed."""

    def __init__(self, trace: OwnTrace | None = None) -> None:
        self._last: HostSample | None = None
        self._trace = trace or OwnTrace()
        self._told_ms: int | None = None
        self._mean = Ewma()
        self.busy_pct: Reading[float] = missing(0)
        self.steal_pct: Reading[float] = missing(0)
        self.external_pct: Reading[float] = missing(0)
        self.external_mean_pct: Reading[float] = missing(0)

    def clear(self) -> None:
        """Drop the last sample, so that the next difference spans no suspend."""
        self._last = None

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
        elif self._trace.within(now, now - last.taken_ms):
            self.external_pct = _held(self.external_pct, self._told_ms, now)
            self.external_mean_pct = _held(self.external_mean_pct, self._told_ms, now)
            return
        percent = min(100.0, 100 * max(0.0, foreign) / sample.cpu_capacity)
        self._told_ms = now
        self.external_pct = measured(percent, now)
        self.external_mean_pct = measured(self._mean.feed(percent, now), now)


class GpuSplit:
    """External use of one GPU's time, from its use alone. ``source`` is the evidence behind ``external_pct``."""

    def __init__(self) -> None:
        self._read_ms: int | None = None
        self._told_ms: int | None = None
        self.external_pct: Reading[float] = missing(0)
        self.source = 0

    def fold(self, util_pct: Reading[int], trace: OwnTrace, *, cooling: bool = False) -> None:
        """Take the next reading of the GPU's use; one seen before, or none, changes nothing. While ``cooling``,
        its time is ours."""
        now, last = util_pct.taken_ms, self._read_ms
        if util_pct.status is ReadingStatus.UNSUPPORTED:
            self.external_pct, self.source = unsupported(now), 0
        if util_pct.value is None:
            return
        if last is not None and now <= last:
            return
        self._read_ms = now
        span_ms = 0 if last is None else min(now - last, GAP_MS)
        if cooling or trace.within(now, span_ms):
            self.external_pct = _held(self.external_pct, self._told_ms, now)
            self.source = 0 if self.external_pct.value is None else HELD
            return
        self._told_ms = now
        self.external_pct = measured(float(util_pct.value) if util_pct.value >= BUSY_PCT else 0.0, now)
        self.source = IDLE_WINDOW


class VramGrowth:
    """How much more of a GPU's memory others hold than when things were last settled: at first, and after each own
    load or unload. ``bytes`` is None while an own load makes it unknowable."""

    def __init__(self) -> None:
        self._settled: int | None = None
        self.bytes: int | None = None

    def fold(self, free_bytes: Reading[int], *, cooling: bool) -> None:
        if cooling:
            self._settled = self.bytes = None
        elif free_bytes.value is not None:
            if self._settled is None:
                self._settled = free_bytes.value
            self.bytes = max(0, self._settled - free_bytes.value)


def _held(last: Reading[float], told_ms: int | None, now: int) -> Reading[float]:
    """The last figure as still standing at ``now``, for ``HELD_MS`` after it was told."""
    if told_ms is None or last.value is None or now - told_ms > HELD_MS:
        return missing(last.taken_ms)
    return measured(last.value, now)


def _engines_grown(last: HostSample, sample: HostSample, engines_up: int) -> int | None:
    """CPU microseconds of all engines between two samples; None if one of them is not counted."""
    before = {engine.unit: engine.cpu_us for engine in last.engines}
    grown = [_grown(before.get(engine.unit), engine.cpu_us) for engine in sample.engines]
    counted = [us for us in grown if us is not None]
    return sum(counted) if len(counted) >= engines_up else None


def _grown(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else max(0, after - before)
