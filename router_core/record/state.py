"""Typed bodies of the state records: V (volatile), S (static), L (leave).

The field order of each array-like struct *is* the wire layout; fields are only ever appended, each with a
default. ``None`` means unknown, never 0. Positions in V refer to the S that V's ``sref`` names.
Suffixes: ``_ds`` 0.1 s, ``_c`` hundredths (0..100 = 0..1), ``_mib`` MiB rounded down, ``_pct`` 0..100 %.
"""

from enum import IntEnum, IntFlag
from typing import Annotated

from msgspec import Meta, Struct

from router_core import limits

U8 = Annotated[int, Meta(ge=0, le=0xFF)]
U16 = Annotated[int, Meta(ge=0, le=0xFFFF)]
U32 = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]
U63 = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Pct = Annotated[int, Meta(ge=0, le=100)]
Cent = Annotated[int, Meta(ge=0, le=100)]
LevelCode = Annotated[int, Meta(ge=0, le=3)]
Bytes8 = Annotated[bytes, Meta(min_length=8, max_length=8)]
Bytes16 = Annotated[bytes, Meta(min_length=16, max_length=16)]
Port = Annotated[int, Meta(ge=1024, le=65_535)]

U16_MAX = 0xFFFF
U32_MAX = 0xFFFF_FFFF


class Kind(IntEnum):
    """Record kinds on the wire."""

    V = 1
    S = 2
    L = 3
    E = 4
    X = 5


class Flag(IntFlag):
    """V flags; unknown bits are ignored."""

    DRAINING = 1
    LONELY = 2
    DEGRADED = 4
    CONFLICT = 8
    SENSOR_STALE = 16
    NO_LOAD = 32
    URGENT = 64
    RELAY_ALL = 128


class Level(IntEnum):
    """Pressure levels."""

    NONE = 0
    ELEVATED = 1
    HIGH = 2
    CRITICAL = 3


class ResourceCode(IntEnum):
    """The resources of a host that pressure is measured for."""

    CPU = 0
    MEMORY = 1
    SWAP = 2
    IO = 3
    GPU_TIME = 4
    VRAM = 5
    THERMAL = 6
    POWER = 7
    ACTIVITY = 8
    STEAL = 9


class GpuState(IntEnum):
    """Whether a GPU can be measured and used, or why not."""

    OK = 0
    UNKNOWN = 1
    UNRESPONSIVE = 2
    ASLEEP = 3
    RELEASED = 4
    DENIED = 5
    LOST = 6
    DRAIN = 7
    QUARANTINED = 8
    UNSUPPORTED = 9


class EngineState(IntEnum):
    """Whether an engine serves requests."""

    UNKNOWN = 0
    DOWN = 1
    STARTING = 2
    READY = 3
    DRAINING = 4
    FAILING = 5


class ModelState(IntEnum):
    """State of a resident model; not listed means not resident. 0 is what an unknown code reads as."""

    UNKNOWN = 0
    LOADING = 1
    RESIDENT = 2
    UNLOADING = 3
    SLEEPING = 4
    DOWNLOADING = 5


class LeaveReason(IntEnum):
    """Why a node leaves."""

    SHUTDOWN = 1
    RESTART = 2
    SUSPEND = 3
    LEFT_MESH = 4


class LoadPolicy(IntEnum):
    """Who decides which models an engine loads: nobody (the list is fixed), the engine on demand, or this
    project."""

    FIXED = 0
    ON_DEMAND = 1
    TOLD_BY_US = 2


class Dialect(IntFlag):
    """API dialects an engine speaks, the one list of names."""

    CHAT = 1 << 0
    COMPLETION = 1 << 1
    RESPONSES = 1 << 2
    EMBED = 1 << 3
    OLLAMA_CHAT = 1 << 4
    OLLAMA_GENERATE = 1 << 5
    OLLAMA_EMBED = 1 << 6
    MESSAGES = 1 << 7
    RERANK = 1 << 8


class Capability(IntFlag):
    """Capabilities of engines and models, the one list of names. ``has`` counts only where ``known``."""

    STREAMING = 1 << 0
    TOOLS = 1 << 1
    VISION = 1 << 2
    AUDIO_IN = 1 << 3
    EMBEDDINGS = 1 << 4
    JSON_SCHEMA = 1 << 5
    REASONING = 1 << 6
    LOGPROBS = 1 << 7
    COUNT_TOKENS = 1 << 8
    RERANK = 1 << 9


class EngineFlag(IntFlag):
    """What the owner's manifest says of an endpoint: served by a cloud, may offload to the CPU, runs on
    another host."""

    CLOUD = 1
    ALLOW_OFFLOAD = 2
    REMOTE_HOST = 4


class Role(IntFlag):
    """What a member may do: serve, send requests, read telemetry, endorse and remove."""

    NODE = 1
    ROUTER = 2
    OBSERVER = 4
    INTRODUCER = 8


# --- V -------------------------------------------------------------------------------------------------------


class HostLoad(Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """``ram_available_mib`` is the lower of host and cgroup; ``cpu_external_pct`` counts all cores."""

    ram_available_mib: U32 | None = None
    cpu_external_pct: Pct | None = None
    age_ds: U16 = 0


class GpuLoad(Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """Load, free memory and pressure of one GPU."""

    util_pct: Pct | None = None
    external_util_pct: Pct | None = None
    vram_free_mib: U32 | None = None
    score_c: Cent | None = None
    level: LevelCode | None = None
    age_ds: U16 = 0
    state: U8 = GpuState.UNKNOWN
    source: U8 = 0


class ResourceLevel(Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """Pressure of one resource of the host."""

    code: U8
    level: LevelCode | None = None
    score_c: Cent | None = None
    age_ds: U16 = 0


class EngineLoad(Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """Load of one endpoint.

    ``ours`` is in flight through pairmesh; ``work_ds`` the predicted service seconds outstanding, summed over
    requests, foreign ones included, not divided by slots; ``obtainable_mib`` what a cold load could use.
    """

    state: U8 = EngineState.UNKNOWN
    running: U16 | None = None
    queued: U16 | None = None
    slots: U16 | None = None
    ours: U16 = 0
    work_ds: U32 = 0
    kv_c: Cent | None = None
    age_ds: U16 = 0
    obtainable_mib: U32 | None = None


class ResidentModel(Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """``model`` and ``engine`` are indices into S; ``ctx`` is the tokens one request may use."""

    model: U8
    engine: U8
    state: U8
    running: U16 = 0
    waiting: U16 = 0
    load_left_ds: U16 | None = None
    idle_s: U16 = 0
    mem_mib: U32 | None = None
    vram_share_pct: Pct | None = None
    ctx: U32 | None = None


class SeenRouter(Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """Highest request number seen from one router's process life, and how many were accepted this epoch."""

    router: Bytes8
    inst: U32
    seq: U32
    accepted: U32


class Dispatch(Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """What this node's router sends out: total this epoch, requests/s and work-seconds/s in 0.01, EWMA 30 s."""

    total: U32
    rps_c: U32
    work_c: U32


class LostLink(Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """ "My link to it broke abnormally; this was its newest V I held"."""

    id16: Bytes16
    epoch: U63
    seq: U63


class ModelDemand(Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """How often one model is asked for: requests per minute, and work-seconds per second in 0.01."""

    key8: Bytes8
    rpm: U32
    work_c: U32


class Volatile(Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """Body of V: load, pressure, residency, flags."""

    flags: U16 = 0
    level: LevelCode | None = None
    host: HostLoad = HostLoad()
    gpus: Annotated[tuple[GpuLoad, ...], Meta(max_length=limits.GPUS)] = ()
    resources: Annotated[tuple[ResourceLevel, ...], Meta(max_length=limits.RESOURCES)] = ()
    engines: Annotated[tuple[EngineLoad, ...], Meta(max_length=limits.ENGINES)] = ()
    residents: Annotated[tuple[ResidentModel, ...], Meta(max_length=limits.RESIDENTS)] = ()
    seen: Annotated[tuple[SeenRouter, ...], Meta(max_length=limits.SEEN)] = ()
    disp: Dispatch | None = None
    lost: Annotated[tuple[LostLink, ...], Meta(max_length=limits.LOST)] = ()
    unlinked: Annotated[tuple[Bytes8, ...], Meta(max_length=limits.UNLINKED)] = ()
    demand: Annotated[tuple[ModelDemand, ...], Meta(max_length=limits.DEMAND)] = ()


# --- S -------------------------------------------------------------------------------------------------------

Text24 = Annotated[str, Meta(max_length=24)]
Text32 = Annotated[str, Meta(max_length=32)]
Text48 = Annotated[str, Meta(max_length=48)]
Text64 = Annotated[str, Meta(max_length=64)]
EngineName = Annotated[str, Meta(max_length=32, pattern=r"\A[a-z0-9][a-z0-9-]{0,31}\Z")]
ModelName = Annotated[str, Meta(max_length=limits.MODEL_NAME)]


class Address(Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """A hint where a node may be dialled: 4 or 16 bytes of IP, the mesh port, the ingress port."""

    ip: Annotated[bytes, Meta(min_length=4, max_length=16)]
    mesh_port: Port
    ingress_port: Port


class Software(Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """The program that a node runs: its name, version, protocol version and features."""

    name: Text32 = "pairmesh"
    version: Text32 = ""
    protocol: U16 = 1
    features: U32 = 0


class Platform(Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """``os`` 1 linux 2 macos 3 windows; ``arch`` 1 x86_64 2 aarch64; ``profile`` 1 desktop 2 server."""

    os: U8 = 0
    arch: U8 = 0
    profile: U8 = 0
    router: U8 = 0


class HostFacts(Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """Size of the host, and the limits of its cgroup in 0.01 cores and MiB."""

    cpus: U16 = 0
    ram_total_mib: U32 = 0
    cpu_quota_c: U32 | None = None
    mem_limit_mib: U32 | None = None


class GpuFacts(Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """``memory`` 0 dedicated 1 unified; ``vendor`` 1 nvidia 2 amd 3 intel 4 apple; ``cc10`` is the CUDA
    compute capability x 10; ``flags`` 1 display 2 rtd3 4 persistence off 8 reboot pending 16 MIG slice 32 numa
    64 more GPUs exist."""

    uuid8: Bytes8
    name: Text64
    vram_total_mib: U32 | None = None
    memory: U8 = 0
    vendor: U8 = 0
    cc10: U16 | None = None
    flags: U16 = 0
    mem_bw_gbs: U16 | None = None


class Label(Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """One label that the operator gave a node."""

    key: Text32
    value: Text32


class EngineFacts(Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """One endpoint. Prices are 10^-4 currency units per 10^6 tokens."""

    name: EngineName
    kind: Text24
    version: Text32 = ""
    dialects: U16 = 0
    cap_known: U32 = 0
    cap_has: U32 = 0
    slots: U16 | None = None
    max_queue: U16 = 0
    gpus: Annotated[tuple[U8, ...], Meta(max_length=limits.GPUS)] = ()
    load_policy: U8 = LoadPolicy.FIXED
    flags: U16 = 0
    price_in: U32 = 0
    price_out: U32 = 0
    labels: Annotated[tuple[Label, ...], Meta(max_length=limits.LABELS)] = ()


class ModelFacts(Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """One model an endpoint owns. ``params_m`` and ``active_m`` are in 10^6; ``ctx_served`` is per request."""

    name: ModelName
    engine: U8
    digest: Annotated[bytes, Meta(max_length=32)] | None = None
    base8: Bytes8 | None = None
    family: Text48 | None = None
    params_m: U32 | None = None
    active_m: U32 | None = None
    quant: Text24 | None = None
    size_mib: U32 | None = None
    ctx_max: U32 | None = None
    ctx_served: U32 | None = None
    parallel: U16 | None = None
    kv_bytes_per_token: U32 | None = None
    offload_pct: Pct | None = None
    cap_known: U32 = 0
    cap_has: U32 = 0
    flags: U16 = 0
    aliases: Annotated[tuple[ModelName, ...], Meta(max_length=limits.ALIASES)] = ()


class ProfileFacts(Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """What experience taught about one model in one engine configuration. Speeds are in 0.1 tok/s."""

    model: U8
    engine: U8
    ctx: U32 = 0
    parallel: U16 = 0
    offload_pct: Pct | None = None
    n: U16 = 0
    prompt_dtps: U32 | None = None
    gen_dtps: U32 | None = None
    beta_m: U16 | None = None
    prompt_sd_c: U16 | None = None
    gen_sd_c: U16 | None = None
    load_p75_ds: U16 | None = None
    vram_mib: U32 | None = None
    ram_mib: U32 | None = None
    success_c: Cent = 95
    idle_h: U16 = 0


class Static(Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """Body of S: addresses, host, engines, models, profiles."""

    addrs: Annotated[tuple[Address, ...], Meta(max_length=limits.ADDRESSES)] = ()
    software: Software = Software()
    platform: Platform = Platform()
    host: HostFacts = HostFacts()
    gpus: Annotated[tuple[GpuFacts, ...], Meta(max_length=limits.GPUS)] = ()
    engines: Annotated[tuple[EngineFacts, ...], Meta(max_length=limits.ENGINES)] = ()
    models: Annotated[tuple[ModelFacts, ...], Meta(max_length=limits.MODELS)] = ()
    models_total: U32 = 0
    profiles: Annotated[tuple[ProfileFacts, ...], Meta(max_length=limits.PROFILES)] = ()

    def loads_into_gpus(self, engine: EngineFacts) -> bool:
        """Whether models of ``engine`` go into GPUs with memory of their own."""
        return bool(engine.gpus) and not any(gpu.memory for gpu in self.gpus)


class Leave(Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """Body of L."""

    reason: U8 = LeaveReason.SHUTDOWN
