"""What sampling tells people: lines about levels and about a host that does not answer, and the age of samples.

It decides nothing and keeps only what it needs to stay quiet: how often each signal was told within a minute,
and since when the host is silent.
"""

from collections.abc import Callable, Iterable
from typing import Final

from agent.observe.log import Log
from agent.observe.metrics import Family, Labels, gauge_family
from router_core.pressure.machine import NotifyLevel
from router_core.pressure.samples import GpuStanding, Sampled
from router_core.record.state import Level

LINES_PER_MIN: Final = 6
MINUTE_MS: Final = 60_000
REPEAT_MS: Final = 3_600_000


class SamplingReport:
    """``now`` gives boot milliseconds. Also a collector of the samples' age and of what GPUs tell."""

    def __init__(self, log: Log, now: Callable[[], int]) -> None:
        self._log = log
        self._now = now
        self._told: dict[tuple[str, str | None], tuple[int, int]] = {}
        self._silent_told_ms: int | None = None
        self._latest: Sampled | None = None

    def notify(self, note: NotifyLevel) -> None:
        """A level changed: one line, at most six a minute for one signal, the rest counted in the next line. That
        a signal was first seen at rest is not told."""
        change = note.transition
        if change.reason == "first" and change.after is Level.NONE:
            return
        now = self._now()
        told = change.signal, change.gpu
        since, lines = self._told.get(told, (now, 0))
        suppressed = 0
        if now - since >= MINUTE_MS:
            suppressed, since, lines = max(0, lines - LINES_PER_MIN), now, 0
        self._told[told] = since, lines + 1
        if lines >= LINES_PER_MIN:
            return
        fields: dict[str, object] = {
            "resource": change.resource,
            "signal": change.signal,
            "gpu": change.gpu,
            "from": _word(change.before),
            "to": _word(change.after),
            "value": change.value,
            "threshold": change.threshold,
            "unit": change.unit,
            "held_ms": change.held_ms,
            "profile": note.profile,
            "reason": change.reason or None,
            "suppressed": suppressed or None,
        }
        known = {name: value for name, value in fields.items() if value is not None}
        self._log.info("sampling.level_changed", **known)

    def sampled(self, sampled: Sampled) -> None:
        """A tick was published: tell, once an hour, that the host thread is silent, and once that it is back."""
        self._latest = sampled
        if not sampled.host_silent:
            if self._silent_told_ms is not None:
                self._log.info("sampling.host_back")
            self._silent_told_ms = None
        elif self._silent_told_ms is None or sampled.at_ms - self._silent_told_ms >= REPEAT_MS:
            self._silent_told_ms = sampled.at_ms
            self._log.warning("sampling.host_stuck", since_ms=sampled.host.taken_ms if sampled.host else None)

    def failed(self, error: Exception) -> None:
        """A read of the host raised."""
        self._log.warning("sampling.read_failed", error=error)

    def collect(self) -> Iterable[Family]:
        now, latest = self._now(), self._latest
        host = None if latest is None else latest.host
        gpus = () if latest is None else latest.gpus
        taken = [gpu.sample.util_pct.taken_ms for gpu in gpus if gpu.sample.util_pct.value is not None]
        ages: dict[Labels, float | None] = {
            ("host",): None if host is None else max(0, now - host.taken_ms) / 1_000,
            ("gpu",): max(0, now - min(taken)) / 1_000 if taken else None,
        }
        yield gauge_family("pairmesh_sample_age_seconds", "Age of the newest sample.", ("source",), ages)
        for name, text, of in GPU_GAUGES:
            values: dict[Labels, int | float | None] = {(gpu.sample.identity.key,): of(gpu) for gpu in gpus}
            yield gauge_family(f"pairmesh_gpu_{name}", text, ("gpu",), values)


GPU_GAUGES: Final[tuple[tuple[str, str, Callable[[GpuStanding], int | float | None]], ...]] = (
    ("utilization_percent", "Use of a GPU.", lambda gpu: gpu.sample.util_pct.value),
    ("external_percent", "Use of a GPU by others.", lambda gpu: gpu.external_pct.value),
    ("memory_free_bytes", "Free memory of a GPU.", lambda gpu: gpu.sample.vram_free_bytes.value),
    ("state", "State of a GPU, as its node publishes it.", lambda gpu: int(gpu.sample.state)),
)


def _word(level: Level | None) -> str:
    return "unknown" if level is None else level.name.lower()
