"""From samples to the inputs of the pressure machine: one line per signal, with what makes it count.

Our own work is no pressure: stalls of the CPU count only where others use it, stalls of the disk and free video
memory stand still around our own loads, and a GPU full of our own models is not pressed.
"""

from typing import Final

from msgspec import Struct

from router_core.policy.pressure import MIB
from router_core.pressure.level import Input
from router_core.pressure.samples import GpuSample, HostSample, Reading, aged, missing, unsupported
from router_core.record.state import GpuState

ZRAM_SCALE: Final = 0.25
"""Swapping to compressed memory hurts a quarter as much."""

CPU_OTHERS_PCT: Final = 25.0
"""External CPU use from which stalls of the CPU are others' doing."""

VRAM_OTHERS_BYTES: Final = 512 * MIB
"""Growth of others' video memory from which little free memory is their doing."""


class OwnUse(Struct, frozen=True, gc=False, kw_only=True):
    """What of the load may be ours: ``working`` while a request, load or unload of ours is in flight at a local
    engine or just was; ``cooling`` from the start of an own load or unload until some time after its end."""

    working: bool = False
    cooling: bool = False


IDLE: Final = OwnUse()
_NIL_STATES: Final = frozenset({GpuState.LOST, GpuState.DRAIN, GpuState.DENIED, GpuState.RELEASED})


def host_inputs(
    sample: HostSample,
    now: int,
    period_ms: int,
    *,
    external: Reading[float] | None = None,
    external_mean: Reading[float] | None = None,
    own: OwnUse = IDLE,
) -> dict[str, Input]:
    """The host's signals as they stand at ``now``, read every ``period_ms``. ``external`` is others' CPU use in
    percent, as last measured and smoothed; None where nobody works it out."""
    others = aged(missing(now) if external is None else external, now, period_ms, published=True)
    mean = aged(missing(now) if external_mean is None else external_mean, now, period_ms, published=True)
    theirs = not own.working if mean.value is None else mean.value >= CPU_OTHERS_PCT

    def standing(reading: Reading[int], *, published: bool = False) -> Reading[int]:
        return aged(reading, now, period_ms, published=published)

    return {
        "memory.avail": Input(
            reading=standing(sample.mem_avail_bytes, published=True), whole=sample.mem_whole_bytes.value
        ),
        "memory.some": Input(reading=standing(sample.memory_some_us)),
        "memory.full": Input(reading=standing(sample.memory_full_us)),
        "memory.oom": Input(reading=standing(sample.oom_kills)),
        "swap.rate": Input(
            reading=standing(sample.swapped_bytes), scale=ZRAM_SCALE if sample.swap_on_zram else 1.0
        ),
        "cpu.some": Input(reading=standing(sample.cpu_some_us), counts=theirs),
        "cpu.ext": Input(reading=others, counts=standing(sample.cpu_some_us).value is None),
        "io.some": Input(reading=standing(sample.io_some_us), frozen=own.cooling),
    }


def gpu_inputs(
    sample: GpuSample,
    external: Reading[float],
    growth_bytes: int | None,
    now: int,
    period_ms: int,
    *,
    own: OwnUse = IDLE,
) -> dict[str, Input]:
    """The signals of one GPU. ``external`` is others' share of its time in percent, ``growth_bytes`` how much more
    of its memory others hold than when things last were settled, None while they are not."""
    if sample.state in _NIL_STATES:
        return {"gpu_time.ext": Input(reading=unsupported(now)), "vram.free": Input(reading=unsupported(now))}
    others = growth_bytes is not None and growth_bytes > VRAM_OTHERS_BYTES
    total = sample.identity.vram_total_bytes
    return {
        "gpu_time.ext": Input(reading=aged(external, now, period_ms, published=True)),
        "vram.free": Input(
            reading=unsupported(now)
            if sample.identity.unified
            else aged(sample.vram_free_bytes, now, period_ms, published=True),
            whole=None if total is None else float(total),
            counts=others,
            frozen=own.cooling,
        ),
    }
