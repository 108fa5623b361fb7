"""What this node says about itself: samples, engines, own work and profiles folded into S and V.

Pure. S is built first and cut to its cap; V's positions refer to exactly that S. Unknown stays None. Refuses to
know who publishes the result and when.
"""

import hashlib
import platform as host_platform
import sys
from collections.abc import Collection, Mapping, Sequence, Set
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from agent.engines.contract import (
    EndpointHealth,
    EndpointStatus,
    LoadSource,
    ObservedModel,
    OwnedModel,
    ResidencyState,
)
from router_core import limits
from router_core.pressure import wire
from router_core.pressure.samples import Sampled
from router_core.record import state
from router_core.record.fit import fit_static
from router_core.record.state import (
    Capability,
    EngineFacts,
    EngineFlag,
    EngineState,
    Flag,
    GpuState,
    ModelFacts,
    ModelState,
    ProfileFacts,
    Static,
    Volatile,
)

_MIB = 1024 * 1024
_DOUBTFUL = frozenset({EndpointHealth.DEAF, EndpointHealth.STUCK})
"""Of a silent engine the age tells for how long: a doubt is no silence."""
_SERVING = frozenset({EngineState.READY, EngineState.FAILING})


class EndpointWork(Struct, frozen=True, gc=False, kw_only=True):
    """Work at one endpoint: requests in flight through pairmesh, requests of others, predicted seconds left of both."""

    ours: int = 0
    foreign: int = 0
    work_s: float = 0.0


class ModelTimes(Struct, frozen=True, gc=False, kw_only=True):
    """When a model began to load, and since when it is idle: when a request of ours last used it, else when it was
    first seen (boot ms, None if not seen)."""

    loading_ms: int | None = None
    used_ms: int | None = None


class _LoadMemory(NamedTuple):
    """Free memory that a cold load would go to (None: unknown), and whether it is that of GPUs alone."""

    free_mib: int | None
    of_gpus: bool


IDLE = EndpointWork()
UNSEEN = ModelTimes()


def static_statement(
    *,
    sampled: Sampled | None,
    addrs: tuple[state.Address, ...],
    version: str,
    router: bool,
    endpoints: Sequence[EndpointStatus],
    profiles: Sequence[tuple[str, str, ProfileFacts]],
    keep: Set[tuple[str, str]] = frozenset(),
) -> Static:
    """S of this node, cut to its cap.

    ``profiles`` are (endpoint name, model name, facts without positions); those whose model is not published are
    left out. ``keep`` names the models (endpoint, model) that are cut last.
    """
    host = sampled.host if sampled is not None else None
    served = list(endpoints)[: limits.ENGINES]
    models = [
        _model_facts(position, owned)
        for position, endpoint in enumerate(served)
        for owned in endpoint.owned
        if owned.local
    ]
    positions = {(served[m.engine].name, m.name): (index, m.engine) for index, m in enumerate(models)}
    placed = [
        _placed(facts, positions[endpoint, model])
        for endpoint, model, facts in profiles
        if (endpoint, model) in positions
    ]
    return fit_static(
        Static(
            addrs=addrs[: limits.ADDRESSES],
            software=state.Software(version=version[:32]),
            platform=wire.platform_facts(
                system=sys.platform,
                machine=host_platform.machine(),
                profile=sampled.profile if sampled is not None else "",
                router=router,
            ),
            host=wire.host_facts(host) if host is not None else state.HostFacts(),
            gpus=wire.gpu_facts(sampled) if sampled is not None else (),
            engines=tuple(_engine_facts(endpoint, gpus_in_use(sampled)) for endpoint in served),
            models=tuple(models),
            models_total=len(models),
            profiles=tuple(placed),
        ),
        ranked=[index for index, m in enumerate(models) if (served[m.engine].name, m.name) in keep],
    )


def volatile_statement(
    static: Static,
    *,
    sampled: Sampled | None,
    endpoints: Sequence[EndpointStatus],
    work: Mapping[str, EndpointWork],
    times: Mapping[tuple[str, str], ModelTimes],
    seen: tuple[state.SeenRouter, ...],
    disp: state.Dispatch | None,
    flags: Flag,
    load_memory_mib: int | None,
    now: int,
    demand: tuple[state.ModelDemand, ...] = (),
    leaving: Collection[tuple[str, str]] = (),
    draining: Collection[str] = (),
) -> Volatile:
    """V of this node, in the positions of ``static``.

    ``work`` is by endpoint, ``times`` by endpoint and model; ``load_memory_mib`` is the free memory a cold load
    would go to (None: unknown); ``leaving`` are the models (endpoint, model) that are being unloaded,
    ``draining`` the endpoints that take nothing new.
    """
    by_name = {endpoint.name: endpoint for endpoint in endpoints}
    engines = []
    residents: list[state.ResidentModel] = []
    for position, facts in enumerate(static.engines):
        endpoint = by_name.get(facts.name)
        if endpoint is None:
            engines.append(state.EngineLoad())
            continue
        memory = _LoadMemory(load_memory_mib, static.loads_into_gpus(facts))
        load = _engine_load(endpoint, work.get(facts.name, IDLE), memory, now)
        if facts.name in draining and load.state in _SERVING:
            load = replace(load, state=EngineState.DRAINING)
        engines.append(load)
        residents += _residents(static, position, endpoint, times, leaving, now)
    return Volatile(
        flags=flags | (sampled.flags if sampled is not None else Flag.SENSOR_STALE | Flag.NO_LOAD),
        level=wire.node_level(sampled, now) if sampled is not None else None,
        host=wire.host_load(sampled, now) if sampled is not None else state.HostLoad(),
        gpus=wire.gpu_loads(static.gpus, sampled, now),
        resources=wire.resource_levels(sampled, now) if sampled is not None else (),
        engines=tuple(engines),
        residents=tuple(residents),
        seen=seen,
        disp=disp,
        demand=demand,
    )


def gpus_in_use(sampled: Sampled | None) -> tuple[int, ...]:
    """The positions of the GPUs that a local engine may use: which of them it does use, nobody tells; one that is
    lost only counts if there is no other."""
    gpus = () if sampled is None else sampled.gpus[: limits.GPUS]
    present = tuple(i for i, gpu in enumerate(gpus) if gpu.sample.state is not GpuState.LOST)
    return present or tuple(range(len(gpus)))


def foreign_requests(endpoint: EndpointStatus, most_ours: int) -> int:
    """Requests the engine itself reports beyond ours; ``most_ours`` is the most we had there since the last report,
    so that an own request that has just ended is not taken for somebody else's."""
    load = endpoint.load
    if load is None or load.running is None or load.source is LoadSource.OWN:
        return 0
    return max(0, load.running + (load.waiting or 0) - most_ours)


def _engine_facts(endpoint: EndpointStatus, gpus: tuple[int, ...]) -> EngineFacts:
    manifest, identity = endpoint.manifest, endpoint.identity
    flags = EngineFlag(0)
    for on, flag in (
        (manifest.cloud, EngineFlag.CLOUD),
        (manifest.allow_offload, EngineFlag.ALLOW_OFFLOAD),
        (manifest.remote_host, EngineFlag.REMOTE_HOST),
    ):
        flags |= flag if on else EngineFlag(0)
    return EngineFacts(
        name=endpoint.name,
        kind=manifest.engine.value,
        version=(identity.version or "") if identity is not None else "",
        dialects=int(endpoint.dialects),
        cap_known=int(identity.caps.known) if identity is not None else 0,
        cap_has=int(identity.caps.has) if identity is not None else 0,
        slots=endpoint.slots,
        max_queue=endpoint.max_queue,
        gpus=() if manifest.remote_host else gpus,
        load_policy=endpoint.load_policy,
        flags=int(flags),
        price_in=round(manifest.price_in * 10_000),
        price_out=round(manifest.price_out * 10_000),
        labels=tuple(state.Label(key=key, value=value) for key, value in manifest.labels),
    )


def _model_facts(engine: int, owned: OwnedModel) -> ModelFacts:
    return ModelFacts(
        name=owned.name,
        engine=engine,
        digest=owned.digest,
        base8=hashlib.sha256(owned.base.casefold().encode()).digest()[:8] if owned.base else None,
        family=owned.family,
        params_m=round(owned.params_b * 1000) if owned.params_b is not None else None,
        active_m=round(owned.active_b * 1000) if owned.active_b is not None else None,
        quant=owned.quant,
        size_mib=owned.size_bytes // _MIB if owned.size_bytes is not None else None,
        ctx_max=owned.ctx_max,
        ctx_served=owned.ctx_served,
        parallel=owned.parallel,
        kv_bytes_per_token=owned.kv_bytes_per_token,
        cap_known=int(owned.caps.known),
        cap_has=int(owned.caps.has & owned.caps.known & ~Capability(0)),
        flags=int(owned.keep),
        aliases=owned.aliases,
    )


def _placed(facts: ProfileFacts, position: tuple[int, int]) -> ProfileFacts:
    model, engine = position
    return ProfileFacts(
        **{field: getattr(facts, field) for field in facts.__struct_fields__}
        | {"model": model, "engine": engine}
    )


def _engine_load(
    endpoint: EndpointStatus, own: EndpointWork, memory: _LoadMemory, now: int
) -> state.EngineLoad:
    busy = own.ours + own.foreign
    slots = endpoint.slots
    places = slots or 1
    age_ms = now - endpoint.observed_ms if endpoint.observed_ms is not None else 0
    known = endpoint.health.takes_requests
    return state.EngineLoad(
        state=endpoint.health.code if endpoint.observed_ms is not None else _unseen(endpoint.health),
        running=min(busy, places) if known else None,
        queued=max(0, busy - places) if known else None,
        slots=slots,
        ours=own.ours,
        work_ds=round(10 * own.work_s),
        kv_c=_kv_used(endpoint),
        age_ds=0 if endpoint.health in _DOUBTFUL else max(0, age_ms // 100),
        obtainable_mib=_obtainable(endpoint, memory),
    )


def _unseen(health: EndpointHealth) -> EngineState:
    """An endpoint whose load was never read is as its health says, but not ready."""
    return EngineState.UNKNOWN if health.code == EngineState.READY else health.code


def _kv_used(endpoint: EndpointStatus) -> int | None:
    used = [model.kv_used for model in endpoint.resident if model.kv_used is not None]
    return round(100 * max(used)) if used else None


def _obtainable(endpoint: EndpointStatus, memory: _LoadMemory) -> int | None:
    """What a cold load could use: free memory and what idle residents would give back, less a reserve."""
    memory_mib = memory.free_mib
    if memory_mib is None:
        return None
    evictable = sum(
        (model.held_bytes(memory.of_gpus) or 0) // _MIB
        for model in endpoint.resident
        if model.state is ResidencyState.RESIDENT and not model.running
    )
    return max(0, memory_mib + evictable - endpoint.reserve_mib(memory_mib))


def _residents(
    static: Static,
    position: int,
    endpoint: EndpointStatus,
    times: Mapping[tuple[str, str], ModelTimes],
    leaving: Collection[tuple[str, str]],
    now: int,
) -> list[state.ResidentModel]:
    names = {owned.native_id: owned.name for owned in endpoint.owned}
    indices = {m.name: index for index, m in enumerate(static.models) if m.engine == position}
    listed = []
    for model in endpoint.resident:
        name = names.get(model.native_id)
        index = indices.get(name) if name is not None else None
        if name is None or index is None or model.state is ResidencyState.FAILED:
            continue
        row = _resident(static, index, model, times.get((endpoint.name, name), UNSEEN), now)
        if row.state == ModelState.RESIDENT and (endpoint.name, name) in leaving:
            row = replace(row, state=ModelState.UNLOADING)
        listed.append(row)
    return listed


def _resident(
    static: Static, index: int, model: ObservedModel, times: ModelTimes, now: int
) -> state.ResidentModel:
    facts = static.models[index]
    total, vram = model.total_bytes, model.vram_bytes
    idle_ms = now - times.used_ms if times.used_ms is not None and not model.running else 0
    loading = model.state is ResidencyState.LOADING
    return state.ResidentModel(
        model=index,
        engine=facts.engine,
        state=ModelState(model.state.value),
        running=model.running or 0,
        waiting=model.waiting or 0,
        load_left_ds=_load_left_ds(static, index, times.loading_ms, now) if loading else None,
        idle_s=max(0, idle_ms // 1000),
        mem_mib=-(-total // _MIB) if total is not None else facts.size_mib,
        vram_share_pct=min(100, round(100 * vram / total)) if vram is not None and total else None,
        ctx=model.ctx,
    )


def _load_left_ds(static: Static, index: int, since: int | None, now: int) -> int | None:
    """Tenths of a second a load still takes by what earlier loads took; None if none was seen."""
    learned = [p.load_p75_ds for p in static.profiles if p.model == index]
    if since is None or not learned or learned[0] is None:
        return None
    return max(0, learned[0] - (now - since) // 100)
