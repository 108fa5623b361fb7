"""What of a ``Sampled`` goes into V and S records: percent and hundredths rounded half up, MiB rounded down, ages
counted to the moment of sealing.

A value older than 10 s is sent as None with its age running on; a resource never known is not listed.
"""

from collections.abc import Iterable
from typing import Final

from router_core import limits
from router_core.pressure.samples import (
    UNKNOWN_PUBLISHED_MS,
    USABLE,
    GpuIdentity,
    GpuStanding,
    HostSample,
    ResourceState,
    Sampled,
)
from router_core.record.state import (
    U16_MAX,
    U32_MAX,
    GpuFacts,
    GpuLoad,
    GpuState,
    HostFacts,
    HostLoad,
    Level,
    Platform,
    ResourceLevel,
)

MIB: Final = 1024 * 1024
PROFILE_CODES: Final = {"desktop": 1, "server": 2}
OS_CODES: Final = {"linux": 1, "darwin": 2, "win32": 3}
NVIDIA: Final = 1
GPU_NAME: Final = 64
DISPLAY, PERSISTENCE_OFF, REBOOT_PENDING, MORE_GPUS = 1, 4, 8, 64
"""Flags of one GPU in S."""
ARCH_CODES: Final = {"x86_64": 1, "amd64": 1, "aarch64": 2, "arm64": 2}


def host_load(sampled: Sampled, now: int) -> HostLoad:
    """V.host: available memory, external CPU and the age of the older one."""
    available, external = sampled.mem_avail_bytes, sampled.cpu_external_pct
    taken = [reading.taken_ms for reading in (available, external) if reading.taken_ms]
    memory = available.value if _fresh(available.taken_ms, now) else None
    cpu = external.value if _fresh(external.taken_ms, now) else None
    return HostLoad(
        ram_available_mib=None if memory is None else mib(memory),
        cpu_external_pct=None if cpu is None else half_up(cpu),
        age_ds=age_ds(min(taken), now) if taken else U16_MAX,
    )


def resource_levels(sampled: Sampled, now: int) -> tuple[ResourceLevel, ...]:
    """V.resources: level, score and the deciding signal's age of every resource that was ever known."""
    return tuple(_resource_level(state, now) for state in sampled.resources if state.taken_ms)


def _resource_level(state: ResourceState, now: int) -> ResourceLevel:
    known = state.level is not None and _fresh(state.taken_ms, now)
    return ResourceLevel(
        code=int(state.code),
        level=int(state.level) if known and state.level is not None else None,
        score_c=half_up(100 * state.score) if known and state.score is not None else None,
        age_ds=age_ds(state.taken_ms, now),
    )


def node_level(sampled: Sampled, now: int) -> Level | None:
    """V.level: the highest level of what ``resource_levels`` lists as known."""
    known = [s.level for s in sampled.resources if s.level is not None and _fresh(s.taken_ms, now)]
    return max(known, default=None)


def host_facts(sample: HostSample) -> HostFacts:
    """S.host. Unknown total memory is sent as 0, the layout's word for it."""
    limit, quota = sample.mem_limit_bytes, sample.cpu_quota
    return HostFacts(
        cpus=min(sample.cpus, U16_MAX),
        ram_total_mib=mib(sample.mem_total_bytes.value or 0),
        cpu_quota_c=None if quota is None else min(half_up(100 * quota), U32_MAX),
        mem_limit_mib=None if limit is None else mib(limit),
    )


def platform_facts(*, system: str, machine: str, profile: str, router: bool) -> Platform:
    """S.platform, from the names ``sys.platform`` and ``platform.machine()`` use; 0 is what an unknown one gets."""
    return Platform(
        os=OS_CODES.get(system, 0),
        arch=ARCH_CODES.get(machine.lower(), 0),
        profile=PROFILE_CODES.get(profile, 0),
        router=int(router),
    )


def gpu_facts(sampled: Sampled) -> tuple[GpuFacts, ...]:
    """S.gpus, in the order of the sample; a flag on the last one says that there are more."""
    listed = sampled.gpus[: limits.GPUS]
    more = len(sampled.gpus) > len(listed)
    return tuple(
        _gpu_facts(
            gpu.sample.identity,
            (REBOOT_PENDING if sampled.reboot_pending else 0)
            | (MORE_GPUS if more and position == len(listed) - 1 else 0),
        )
        for position, gpu in enumerate(listed)
    )


def _gpu_facts(gpu: GpuIdentity, flags: int) -> GpuFacts:
    total, bandwidth = gpu.vram_total_bytes, gpu.mem_bw_gbs
    return GpuFacts(
        uuid8=bytes.fromhex(gpu.key),
        name=gpu.name[:GPU_NAME],
        vram_total_mib=None if total is None else mib(total),
        memory=int(gpu.unified),
        vendor=NVIDIA,
        cc10=gpu.cc10,
        flags=flags | (DISPLAY if gpu.display else 0) | (PERSISTENCE_OFF if gpu.persistence is False else 0),
        mem_bw_gbs=None if bandwidth is None else min(bandwidth, U16_MAX),
    )


def gpu_loads(facts: Iterable[GpuFacts], sampled: Sampled | None, now: int) -> tuple[GpuLoad, ...]:
    """V.gpus in the order of ``facts``; a GPU that is no longer sampled is unknown."""
    standing = {} if sampled is None else {gpu.sample.identity.key: gpu for gpu in sampled.gpus}
    return tuple(_gpu_load(standing.get(entry.uuid8.hex()), now) for entry in facts)


def _gpu_load(gpu: GpuStanding | None, now: int) -> GpuLoad:
    if gpu is None:
        return GpuLoad(age_ds=U16_MAX)
    sample = gpu.sample
    readings = (sample.util_pct, gpu.external_pct, sample.vram_free_bytes)
    taken = [reading.taken_ms for reading in readings if reading.value is not None]
    oldest = min(taken, default=max(reading.taken_ms for reading in readings))
    age, state = age_ds(oldest, now), sample.state
    if state in (GpuState.LOST, GpuState.DRAIN):
        return GpuLoad(score_c=100, level=int(Level.CRITICAL), age_ds=age, state=state)
    if state not in USABLE:
        return GpuLoad(age_ds=age, state=state)
    util, external, free = (reading.value if _fresh(reading.taken_ms, now) else None for reading in readings)
    return GpuLoad(
        util_pct=None if util is None else min(100, half_up(util)),
        external_util_pct=None if external is None else min(100, half_up(external)),
        vram_free_mib=None if free is None else mib(int(free)),
        score_c=None if gpu.score is None else half_up(100 * gpu.score),
        level=None if gpu.level is None else int(gpu.level),
        age_ds=age,
        state=state,
        source=gpu.source,
    )


def load_memory_mib(sampled: Sampled | None, now: int) -> int | None:
    """Free memory that a cold load would go to: that of the usable GPUs, where there is no GPU (or where its memory
    is the host's) the host's; None where it is unknown."""
    if sampled is None:
        return None
    ram = sampled.mem_avail_bytes
    if not sampled.gpus:
        unknown = sampled.gpu_expected or ram.value is None or not _fresh(ram.taken_ms, now)
        return None if unknown or ram.value is None else mib(ram.value)
    free = 0
    usable = [gpu.sample for gpu in sampled.gpus if gpu.sample.usable]
    for sample in usable:
        held = sample.vram_free_bytes
        if held.value is None or not _fresh(held.taken_ms, now):
            return None
        free = max(free, held.value) if sample.identity.unified else free + held.value
    return mib(free) if usable else None


def half_up(value: float) -> int:
    """A number >= 0 rounded to the nearest whole one, halves upwards."""
    return int(value + 0.5)


def mib(size_bytes: int) -> int:
    """Bytes as whole MiB, at most what the wire can carry."""
    return min(size_bytes // MIB, U32_MAX)


def age_ds(taken_ms: int, now: int) -> int:
    """Whole tenths of a second since ``taken_ms``, as far as the wire can tell."""
    return min(max(0, now - taken_ms) // 100, U16_MAX)


def _fresh(taken_ms: int, now: int) -> bool:
    return now - taken_ms <= UNKNOWN_PUBLISHED_MS
