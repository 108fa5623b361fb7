"""What was measured: one reading per field, one sample per tick, and how readings age.

Unknown is a value with an age, per field: never 0, never a dropped field. ``UNSUPPORTED`` (cannot be known here)
and ``UNKNOWN`` (should be known, is not) differ. Times are boot-clock milliseconds.
"""

from enum import Enum
from typing import Final, Generic, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from router_core.record.state import Flag, GpuState, Level, ResourceCode

T = TypeVar("T")

STALE_PERIODS: Final = 1.5
STALE_LEAST_MS: Final = 3_000
UNKNOWN_PUBLISHED_MS: Final = 10_000
UNKNOWN_PERIODS: Final = 10


class ReadingStatus(Enum):
    """How far a reading may be trusted, and why not."""

    OK = "ok"
    STALE = "stale"
    UNKNOWN = "unknown"
    UNSUPPORTED = "unsupported"


class Reading(Struct, Generic[T], frozen=True, gc=False, kw_only=True):
    """``value`` is None unless the status is OK or STALE. ``taken_ms`` is when the value was measured, or since
    when there is none. ``code`` is the source's error number, 0 for none."""

    value: T | None = None
    taken_ms: int = 0
    status: ReadingStatus = ReadingStatus.UNKNOWN
    code: int = 0


def measured(value: T, taken_ms: int) -> Reading[T]:
    """A value that was just measured."""
    return Reading(value=value, taken_ms=taken_ms, status=ReadingStatus.OK)


def missing(taken_ms: int, code: int = 0) -> Reading[T]:
    """A value that should be there and is not."""
    return Reading(taken_ms=taken_ms, status=ReadingStatus.UNKNOWN, code=code)


def unsupported(taken_ms: int, code: int = 0) -> Reading[T]:
    """A value this platform cannot give."""
    return Reading(taken_ms=taken_ms, status=ReadingStatus.UNSUPPORTED, code=code)


def aged(reading: Reading[T], now: int, period_ms: int, *, published: bool) -> Reading[T]:
    """``reading`` as it stands at ``now``: STALE after 1.5 periods (at least 3 s), UNKNOWN after 10 s if it is
    published, else after 10 periods."""
    if reading.status not in (ReadingStatus.OK, ReadingStatus.STALE):
        return reading
    age = now - reading.taken_ms
    if age > (UNKNOWN_PUBLISHED_MS if published else UNKNOWN_PERIODS * period_ms):
        return replace(reading, value=None, status=ReadingStatus.UNKNOWN)
    if age > max(STALE_LEAST_MS, STALE_PERIODS * period_ms):
        return replace(reading, status=ReadingStatus.STALE)
    return reading


class CpuTimes(Struct, frozen=True, gc=False, kw_only=True):
    """Cumulative seconds over all CPUs. ``busy`` holds the parts that are neither idle (idle, iowait) nor steal;
    guest time is part of user time and does not count twice."""

    busy: tuple[float, ...]
    idle: float
    steal: float = 0.0


class EngineCgroup(Struct, frozen=True, gc=False, kw_only=True):
    """What the cgroup of one engine's unit says: memory left below its limits and its CPU counter."""

    unit: str
    mem_left_bytes: int | None = None
    cpu_us: int | None = None


class HostSample(Struct, frozen=True, gc=False, kw_only=True):
    """One reading of the host. ``mem_avail`` and ``mem_whole`` are the lower of host and cgroup; of the former
    ``arc_bytes`` are held by the cache of ZFS, which gives them back on demand; ``cpu_capacity`` counts cores this
    process may use; counters count from boot."""

    taken_ms: int
    mem_avail_bytes: Reading[int]
    mem_whole_bytes: Reading[int]
    mem_total_bytes: Reading[int]
    cpu_times: Reading[CpuTimes]
    own_cpu_us: Reading[int]
    memory_some_us: Reading[int]
    memory_full_us: Reading[int]
    swapped_bytes: Reading[int]
    oom_kills: Reading[int]
    cpu_some_us: Reading[int]
    io_some_us: Reading[int]
    cpus: int
    cpu_capacity: float
    cpu_quota: float | None = None
    mem_limit_bytes: int | None = None
    swap_on_zram: bool = False
    arc_bytes: int = 0
    engines: tuple[EngineCgroup, ...] = ()


class GpuIdentity(Struct, frozen=True, gc=False, kw_only=True):
    """What does not change about one GPU. ``key`` is the hex of the first 8 bytes of its UUID's SHA-256; the UUID
    itself never leaves the process that reads it. ``unified``: its memory is the host's."""

    key: str
    name: str
    bus_id: str = ""
    vram_total_bytes: int | None = None
    unified: bool = False
    cc10: int | None = None
    display: bool | None = None
    persistence: bool | None = None
    mem_bw_gbs: int | None = None


class GpuSample(Struct, frozen=True, gc=False, kw_only=True):
    """The newest readings of one GPU; ``state`` says whether it answers."""

    identity: GpuIdentity
    state: GpuState
    util_pct: Reading[int]
    vram_free_bytes: Reading[int]

    @property
    def usable(self) -> bool:
        """Whether work can go to it."""
        return self.state in USABLE


USABLE: Final = frozenset({GpuState.OK, GpuState.ASLEEP, GpuState.UNSUPPORTED})


class GpuStanding(Struct, frozen=True, gc=False, kw_only=True):
    """One GPU as published: its sample aged to the moment, what others use of it, and its level.

    ``source`` is the evidence behind ``external_pct``: 4 an idle window, 5 a value held while own work ran, 0 none.
    """

    sample: GpuSample
    external_pct: Reading[float]
    source: int
    level: Level | None
    score: float | None


class ResourceState(Struct, frozen=True, gc=False, kw_only=True):
    """Level and score of one resource; ``level`` is None while no signal of it is known. ``taken_ms`` is the time
    of the deciding signal's last value."""

    code: ResourceCode
    level: Level | None
    score: float | None
    taken_ms: int


class Sampled(Struct, frozen=True, gc=False, kw_only=True):
    """What one tick came to: the newest readings as they stand at ``at_ms``, and the levels they add up to.

    ``host`` is None until the host was read once. ``flags`` are the sampler's part of a V record's flags.
    ``gpus`` are in the order of their bus ids; ``gpu_expected`` is True where a GPU driver is installed,
    ``host_silent`` while the host thread has not answered for long.
    """

    at_ms: int
    profile: str
    host: HostSample | None
    mem_avail_bytes: Reading[int]
    cpu_busy_pct: Reading[float]
    cpu_external_pct: Reading[float]
    resources: tuple[ResourceState, ...]
    flags: Flag
    gpus: tuple[GpuStanding, ...] = ()
    gpu_expected: bool = False
    reboot_pending: bool = False
    host_silent: bool = False
