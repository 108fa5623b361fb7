"""The GPUs of a host from tick to tick: whose use it is, the inputs it makes, and what is published of it.

One track per GPU key, dropped with the GPU. Levels are the pressure machine's; readings are the sampler's.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from router_core.pressure.machine import GpuPressure, GpuSignals
from router_core.pressure.samples import GpuSample, GpuStanding, aged
from router_core.pressure.signals import OwnUse, gpu_inputs
from router_core.pressure.split import GpuSplit, OwnTrace, VramGrowth

UNRATED: Final = GpuPressure(resources=(), level=None, score=None)


@dataclass(slots=True)
class _Track:
    sample: GpuSample
    time: GpuSplit = field(default_factory=GpuSplit)
    memory: VramGrowth = field(default_factory=VramGrowth)


class GpuTracks:
    """Folds the samples of all GPUs; ``standings`` are in the order of the last samples."""

    def __init__(self) -> None:
        self._tracks: dict[str, _Track] = {}

    def fold(
        self, samples: Iterable[GpuSample], trace: OwnTrace, own: OwnUse, now: int, period_ms: int
    ) -> dict[str, GpuSignals]:
        """The inputs of every GPU as they stand at ``now``; ``trace`` tells when work of ours ran."""
        kept, self._tracks = self._tracks, {}
        signals = {}
        for sample in samples:
            key = sample.identity.key
            track = self._tracks[key] = kept.get(key) or _Track(sample)
            track.sample = sample
            track.time.fold(sample.util_pct, trace, cooling=own.cooling)
            track.memory.fold(sample.vram_free_bytes, cooling=own.cooling)
            signals[key] = GpuSignals(
                inputs=gpu_inputs(
                    sample, track.time.external_pct, track.memory.bytes, now, period_ms, own=own
                ),
                usable=sample.usable,
                unified=sample.identity.unified,
            )
        return signals

    def standings(
        self, rated: Mapping[str, GpuPressure], now: int, period_ms: int
    ) -> tuple[GpuStanding, ...]:
        """What to publish of each GPU at ``now``, ``rated`` by the pressure machine."""
        return tuple(
            _standing(track, rated.get(key, UNRATED), now, period_ms) for key, track in self._tracks.items()
        )


def _standing(track: _Track, rated: GpuPressure, now: int, period_ms: int) -> GpuStanding:
    external = aged(track.time.external_pct, now, period_ms, published=True)
    return GpuStanding(
        sample=replace(
            track.sample,
            util_pct=aged(track.sample.util_pct, now, period_ms, published=True),
            vram_free_bytes=aged(track.sample.vram_free_bytes, now, period_ms, published=True),
        ),
        external_pct=external,
        source=track.time.source if external.value is not None else 0,
        level=rated.level,
        score=rated.score,
    )
