"""What an adapter says about one engine, and what the rest of the shell reads of one endpoint.

An adapter turns one engine's dialect of facts into these types. Rules: unknown is ``None``, never 0; looking
changes nothing (no call may load, wake, keep alive or evict a model, or run a token through it);
``native_id`` is kept as the engine spells it and is the only model name ever sent to it. What changes an engine
is an ``EngineControl``, which no adapter is. Relaying requests and judging nodes are somebody else's work.
"""

from collections.abc import AsyncGenerator, Mapping
from enum import Enum, StrEnum
from functools import cached_property
from typing import Protocol, runtime_checkable

from msgspec import Struct

from agent.settings.manifest import Caps, EngineKind, Manifest
from router_core.errors import RemoteFault
from router_core.record.state import Capability, Dialect, EngineState, LoadPolicy

FOREVER_S = 2**31 - 1
"""``expires_s`` of a model that is never unloaded by itself."""


PROMPT_LEAST = 128
RESERVE_MIB = 1_024
RESERVE_SHARE = 20
GENERATED_LEAST = 32


class EngineUnreachable(RemoteFault):
    """No usable answer. ``reason`` is the phase that failed: ``guard`` (the address is not this engine's, nothing
    was sent), ``connect``, ``timeout`` (no whole answer in time), ``read`` (broken answer)."""


class EngineMisspoke(RemoteFault):
    """An answer that does not mean what it must. ``reason`` is one of ``status`` ``auth`` ``loading``
    ``redirect`` ``too_large`` ``not_json`` ``shape``; ``status`` the HTTP status, if there was one."""

    def __init__(self, reason: str, detail: str = "", status: int | None = None) -> None:
        super().__init__(reason, detail)
        self.status = status


class EngineBusy(RemoteFault):
    """An order that was not given because somebody uses the model. ``reason`` is ``in_use`` or ``silent``."""


class EndpointHealth(Enum):
    """State of an endpoint as its monitor sees it. ``SILENT`` answers nothing although it used to with as much to do,
    ``DEAF`` answers nothing with more to do than ever before, ``STUCK`` answers questions and does no work: none of this
    is proof of anything, so they take requests if nobody else can."""

    UNREACHABLE = "unreachable"
    STARTING = "starting"
    READY = "ready"
    DEGRADED = "degraded"
    SILENT = "silent"
    DEAF = "deaf"
    STUCK = "stuck"
    UNAUTHORISED = "unauthorised"
    REFUSED = "refused"

    @property
    def takes_requests(self) -> bool:
        return self in _SERVES

    @property
    def is_sound(self) -> bool:
        return self in (EndpointHealth.READY, EndpointHealth.DEGRADED)

    @property
    def code(self) -> EngineState:
        """The state as it is published in V."""
        return _CODES[self]


_SERVES = frozenset(
    {
        EndpointHealth.READY,
        EndpointHealth.DEGRADED,
        EndpointHealth.SILENT,
        EndpointHealth.DEAF,
        EndpointHealth.STUCK,
    }
)
_CODES: dict[EndpointHealth, EngineState] = {
    EndpointHealth.UNREACHABLE: EngineState.DOWN,
    EndpointHealth.STARTING: EngineState.STARTING,
    EndpointHealth.READY: EngineState.READY,
    EndpointHealth.DEGRADED: EngineState.READY,
    EndpointHealth.SILENT: EngineState.FAILING,
    EndpointHealth.DEAF: EngineState.FAILING,
    EndpointHealth.STUCK: EngineState.FAILING,
    EndpointHealth.UNAUTHORISED: EngineState.DOWN,
    EndpointHealth.REFUSED: EngineState.DOWN,
}


class EngineRefusal(StrEnum):
    """Why an endpoint is ``Health.REFUSED`` until its manifest changes."""

    SELF_LOOP = "self_loop"
    PAIR_NOT_ADOPTED = "pair_not_adopted"
    URL_REFUSED = "url_refused"
    IDENTITY_CHANGED = "identity_changed"
    UNSUPPORTED = "unsupported"


class ResidencyState(Enum):
    """State of one model in an engine. Values 1 to 5 are ``record.state.ModelState``; ``FAILED`` stays local."""

    LOADING = 1
    RESIDENT = 2
    UNLOADING = 3
    SLEEPING = 4
    DOWNLOADING = 5
    FAILED = 6


class LoadSource(Enum):
    """Who counted the requests: the engine itself, or nobody but ourselves."""

    ENGINE = "engine"
    OWN = "own"


class TimingSource(Enum):
    """``ENGINE``: token counts are the engine's own; ``COUNTED``: content events were counted on the way."""

    ENGINE = "engine"
    COUNTED = "counted"


class FinishReason(Enum):
    """Why an engine ended its answer."""

    STOP = "stop"
    LENGTH = "length"
    TOOL = "tool"
    ERROR = "error"


class Identity(Struct, frozen=True, gc=False, kw_only=True):
    """What answers at an endpoint. ``instance`` is an opaque token of one process life, compared for equality
    only. ``dialects`` and ``caps`` are the engine's own; a manifest may overrule the former. ``tried`` are dialects that
    are assumed by its kind alone: nobody told of them.
    ``loads_on_demand``: a request loads, or wakes, a model that is not resident. ``models_most`` is how many models it
    holds at a time before it evicts one by itself, None where it does not tell."""

    engine: EngineKind
    flavour: str
    version: str | None = None
    instance: str | None = None
    dialects: Dialect = Dialect(0)
    tried: Dialect = Dialect(0)
    caps: Caps = Caps()
    metrics: bool = False
    pushes_state: bool = False
    loads_on_demand: bool = False
    models_most: int | None = None


class OwnedModel(Struct, frozen=True, gc=False, kw_only=True):
    """A model an engine could serve. ``ctx_max`` is what the weights allow, ``ctx_served`` what one request
    may use as configured, both in tokens. ``name`` is what others call it, ``native_id`` never leaves the
    host where it differs."""

    native_id: str
    name: str
    aliases: tuple[str, ...] = ()
    digest: bytes | None = None
    size_bytes: int | None = None
    params_b: float | None = None
    active_b: float | None = None
    kv_bytes_per_token: int | None = None
    ctx_max: int | None = None
    ctx_served: int | None = None
    parallel: int | None = None
    quant: str | None = None
    base: str | None = None
    family: str | None = None
    format: str | None = None
    caps: Caps = Caps()
    parent: str | None = None
    local: bool = True
    modified_at: str | None = None
    keep: bool = False


class ObservedModel(Struct, frozen=True, gc=False, kw_only=True):
    """A model in an engine's memory, or on its way in or out. ``ctx`` is the tokens one request may use;
    ``kv_used`` and ``progress`` (loading only) are 0..1; ``expires_s`` counts from the observation."""

    native_id: str
    state: ResidencyState
    ctx: int | None = None
    total_bytes: int | None = None
    vram_bytes: int | None = None
    slots: int | None = None
    running: int | None = None
    waiting: int | None = None
    kv_used: float | None = None
    expires_s: int | None = None
    progress: float | None = None

    def held_bytes(self, of_gpus: bool) -> int | None:
        """What unloading it gives back; ``of_gpus``: only what lies in a GPU's own memory counts."""
        return self.vram_bytes if of_gpus and self.vram_bytes is not None else self.total_bytes


class ObservedLoad(Struct, frozen=True, gc=False, kw_only=True):
    """Requests that an engine works on and queues, and its recent speeds (tokens/s, from counter deltas)."""

    source: LoadSource
    running: int | None = None
    waiting: int | None = None
    pp_tps: float | None = None
    tg_tps: float | None = None


class ResponseMarks(Struct, frozen=True, gc=False, kw_only=True):
    """The relay's marks on one response (boot clock, ms). ``content_events`` counts the events that carried
    content, ``None`` if the response was not a stream."""

    sent_ms: float
    head_ms: float
    last_byte_ms: float
    first_byte_ms: float | None = None
    first_content_ms: float | None = None
    content_events: int | None = None


class Timings(Struct, frozen=True, gc=False, kw_only=True):
    """What one finished response taught. ``prompt_tokens`` excludes cached ones; ``gen_ms`` is the time of the
    ``gen_tokens - 1`` gaps after the first token. All times in ms."""

    source: TimingSource
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    prompt_ms: float | None = None
    gen_tokens: int | None = None
    gen_ms: float | None = None
    queue_ms: float | None = None
    load_ms: float | None = None
    finish: FinishReason | None = None

    @property
    def pp_tps(self) -> float | None:
        """Prompt tokens/s, or None below ``PROMPT_LEAST`` uncached tokens, where the figure is noise."""
        if self.prompt_tokens is None or self.prompt_tokens < PROMPT_LEAST or not self.prompt_ms:
            return None
        return 1_000 * self.prompt_tokens / self.prompt_ms

    @property
    def tg_tps(self) -> float | None:
        """Generated tokens/s over the gaps, or None below ``GENERATED_LEAST`` tokens."""
        if self.gen_tokens is None or self.gen_tokens < GENERATED_LEAST or not self.gen_ms:
            return None
        return 1_000 * (self.gen_tokens - 1) / self.gen_ms


class Credential:
    """A key for one engine. It prints as dots, so that it cannot end up in a log by accident."""

    __slots__ = ("_key",)

    def __init__(self, key: str) -> None:
        self._key = key

    @property
    def authorization(self) -> str:
        """Value of the ``Authorization`` header."""
        return f"Bearer {self._key}"

    def __repr__(self) -> str:
        return "Credential(...)"


class EndpointStatus(Struct, frozen=True, kw_only=True, dict=True):
    """One endpoint as its monitor saw it last; what V and S are built from and how the relay reaches it.

    ``owned`` already holds the manifest's facts (manifest before engine before unknown; of two context limits
    the smaller). ``observed_ms`` is the boot-clock time of the last good answer about residency and load. ``reason``
    is a short code for a health that is not sound. ``withdrawn`` are dialects whose route the engine lately did
    not know, ``lacking`` says so in words, embeddings of single models included; ``unfit_names`` counts models left out
    for their name, ``more_models`` those of a list too long to be looked at. ``measured_slots`` is what an engine that batches and does not tell was seen to take at a time.
    """

    name: str
    manifest: Manifest
    health: EndpointHealth
    detected: bool = False
    reason: str | None = None
    identity: Identity | None = None
    owned: tuple[OwnedModel, ...] = ()
    resident: tuple[ObservedModel, ...] = ()
    load: ObservedLoad | None = None
    observed_ms: int | None = None
    credential: Credential | None = None
    withdrawn: Dialect = Dialect(0)
    lacking: tuple[str, ...] = ()
    unfit_names: int = 0
    more_models: int = 0
    measured_slots: int | None = None

    @property
    def base(self) -> tuple[str, int]:
        """IP literal (or, for ``cloud`` alone, host name) and port of the engine."""
        return self.manifest.url.host, self.manifest.url.port

    @property
    def slots(self) -> int | None:
        """Requests the engine works on at a time: the manifest's word, else the engine's, else as measured, else
        unknown."""
        if self.manifest.slots is not None:
            return self.manifest.slots
        told = [model.slots for model in self.resident if model.slots is not None]
        if told:
            return sum(told)
        parallel = [model.parallel for model in self.owned if model.parallel is not None]
        return max(parallel, default=self.measured_slots)

    @property
    def max_queue(self) -> int:
        """Requests allowed to wait at this endpoint."""
        return 2 * (self.slots or 1) if self.manifest.max_queue is None else self.manifest.max_queue

    @property
    def dialects(self) -> Dialect:
        """The manifest's word, else the engine's, with ``EMBED`` unless every model is known not to embed: a
        llama-server in single mode does not tell whether it was started with ``--embedding``."""
        if self.manifest.dialects is not None:
            return self.manifest.dialects
        found = self.identity.dialects if self.identity is not None else Dialect(0)
        if found and any(
            Capability.EMBEDDINGS in model.caps.has or Capability.EMBEDDINGS not in model.caps.known
            for model in self.owned
        ):
            found |= Dialect.EMBED
        return found & ~self.withdrawn

    @property
    def load_policy(self) -> LoadPolicy:
        """Whether a request for a model that is not resident makes the engine load it."""
        if self.manifest.jit_load is not None:
            return LoadPolicy.ON_DEMAND if self.manifest.jit_load else LoadPolicy.FIXED
        loads = self.identity is not None and self.identity.loads_on_demand
        return LoadPolicy.ON_DEMAND if loads else LoadPolicy.FIXED

    def reserve_mib(self, free_mib: int) -> int:
        """Memory that loads leave free: the manifest's word, else a share of what is free, at least 1 GiB."""
        told = self.manifest.reserve_vram_mib
        return max(RESERVE_MIB, free_mib // RESERVE_SHARE) if told is None else told

    def native_id(self, name: str) -> str | None:
        """The engine's own spelling of an owned model's published name or alias, or None."""
        return self._native_ids.get(name)

    @cached_property
    def _native_ids(self) -> dict[str, str]:
        return {name: model.native_id for model in self.owned for name in (model.name, *model.aliases)}


class Observation(Struct, frozen=True, gc=False, kw_only=True):
    """One fast look: what is in memory and how busy the engine is. ``owned`` is what it could serve, if the look told it
    and it is not what it was."""

    resident: tuple[ObservedModel, ...]
    load: ObservedLoad
    owned: tuple[OwnedModel, ...] | None = None


class EngineAdapter(Protocol):
    """Reads one engine. One instance per endpoint and process life of the engine, polled by one task.

    Raises nothing but :class:`EngineUnreachable` and :class:`EngineMisspoke`.
    """

    @property
    def instance(self) -> str | None:
        """The newest instance token seen, None where the engine tells none."""

    @property
    def restarts(self) -> int:
        """How often a changed token or a fallen counter told of a restart."""

    @property
    def more_models(self) -> int:
        """How many more models its last list had than are looked at."""

    async def inventory(self) -> tuple[OwnedModel, ...]:
        """What it could serve."""

    async def observe(self, now_ms: int, period_ms: int) -> Observation:
        """Residency and load. ``period_ms`` is the usual time between two looks: a speed is only told
        between looks at most three periods apart."""


class EngineControl(Protocol):
    """Orders one engine what to hold, on the word of this node's own residency alone.

    Raises :class:`EngineUnreachable`, :class:`EngineMisspoke` and :class:`EngineBusy`. An order that was taken may
    still be under way: whether a model is resident is told by looking.
    """

    async def load(self, native_id: str, within_s: float) -> None:
        """Bring a model into memory; gives up after ``within_s``."""

    async def unload(self, native_id: str) -> None:
        """Take a model out of memory, unless its engine says that it is in use."""


@runtime_checkable
class PushingAdapter(EngineAdapter, Protocol):
    """An adapter whose engine pushes changes of residency as they happen."""

    def changes(self) -> AsyncGenerator[Observation, None]:
        """The first item when the stream is open, then one for every change. Ends by raising."""


@runtime_checkable
class InferringAdapter(EngineAdapter, Protocol):
    """An adapter whose engine lists a model that still loads like any other: it infers which one loads."""

    def awaits(self, since_ms: Mapping[str, int]) -> None:
        """By native id, when the oldest request of ours was sent that has not got a byte yet (boot ms). Told
        before every ``observe``."""


def own_load(in_flight: int, slots: int | None) -> ObservedLoad:
    """Load of an engine that reports none: our own requests over its ``slots`` (unknown counts as 1)."""
    places = slots or 1
    return ObservedLoad(
        source=LoadSource.OWN, running=min(in_flight, places), waiting=max(0, in_flight - places)
    )
