"""Host samples for tests: a plausible idle machine, and what a test changes about it."""

from typing import Any

from msgspec.structs import replace

from router_core.policy.pressure import GIB
from router_core.pressure.samples import CpuTimes, HostSample, measured


def host(at_ms: int, **changes: Any) -> HostSample:
    """An idle 8-core host of 64 GiB as read at ``at_ms``."""
    seconds = at_ms / 1_000
    sample = HostSample(
        taken_ms=at_ms,
        mem_avail_bytes=measured(40 * GIB, at_ms),
        mem_whole_bytes=measured(64 * GIB, at_ms),
        mem_total_bytes=measured(64 * GIB, at_ms),
        cpu_times=measured(CpuTimes(busy=(0.0, 0.0), idle=8 * seconds), at_ms),
        own_cpu_us=measured(0, at_ms),
        memory_some_us=measured(0, at_ms),
        memory_full_us=measured(0, at_ms),
        swapped_bytes=measured(0, at_ms),
        oom_kills=measured(0, at_ms),
        cpu_some_us=measured(0, at_ms),
        io_some_us=measured(0, at_ms),
        cpus=8,
        cpu_capacity=8.0,
    )
    return replace(sample, **changes)
