"""What of a ``Sampled`` goes into V and S records: percent and hundredths rounded half up, MiB rounded down, ages
counted to the moment of sealing.

A value older than 10 s is sent as None with its age running on; a resource never known is not listed.
"""

from typing import Final

from router_core.pressure.samples import UNKNOWN_PUBLISHED_MS, HostSample, ResourceState, Sampled
from router_core.record.state import U16_MAX, U32_MAX, HostFacts, HostLoad, Level, Platform, ResourceLevel

MIB: Final = 1024 * 1024
PROFILE_CODES: Final = {"desktop": 1, "server": 2}
OS_CODES: Final = {"linux": 1, "darwin": 2, "win32": 3}
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


def half_up(value: float) -> int:
    return int(value + 0.5)


def mib(size_bytes: int) -> int:
    return min(size_bytes // MIB, U32_MAX)


def age_ds(taken_ms: int, now: int) -> int:
    """Whole tenths of a second since ``taken_ms``, as far as the wire can tell."""
    return min(max(0, now - taken_ms) // 100, U16_MAX)


def _fresh(taken_ms: int, now: int) -> bool:
    return now - taken_ms <= UNKNOWN_PUBLISHED_MS
