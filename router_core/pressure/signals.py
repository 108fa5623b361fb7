"""From a host sample to the inputs of the pressure machine: one line per signal."""

from typing import Final

from router_core.pressure.level import Input
from router_core.pressure.samples import HostSample, Reading, aged

ZRAM_SCALE: Final = 0.25
"""Swapping to compressed memory hurts a quarter as much."""


def host_inputs(sample: HostSample, now: int, period_ms: int) -> dict[str, Input]:
    """The host's signals as they stand at ``now``, read every ``period_ms``."""

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
    }
