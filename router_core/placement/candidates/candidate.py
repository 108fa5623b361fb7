"""One row: everything about (endpoint, served model) that no single request changes.

Owns: reading positions of S and V, memory fit, eviction debt. Rules: unknown stays None or
costs the stated amount. It knows nothing of requests, other rows and the index.
"""

import math
from collections.abc import Callable, Iterable

from msgspec import Struct

from router_core.ids import Id16, NodeId, NodeName
from router_core.placement.candidates.admission import Gate, Squeeze
from router_core.placement.request.names import parse_model_name
from router_core.placement.request.request import Endpoint
from router_core.policy.placement import PlacementPolicy
from router_core.profile.bits import nominal_bits
from router_core.profile.estimate import Abilities, abilities
from router_core.profile.outcome import ProfileKey
from router_core.profile.priors import Prior, prior_of, weight_bytes
from router_core.profile.profiles import Profiles
from router_core.record.membership import Liveness
from router_core.record.state import (
    EngineFacts,
    EngineFlag,
    EngineLoad,
    EngineState,
    GpuState,
    LoadPolicy,
    ModelFacts,
    ModelState,
    ProfileFacts,
    ResidentModel,
    Role,
    Static,
    Volatile,
)
from router_core.view.cluster import NodeView

_MIB = 2**20
_GIB = 2**30
_RUNTIME_BYTES = 300 * _MIB
_WEIGHTS_MARGIN = 1.05
_PRICES = 10_000
_REMOTE = int(EngineFlag.REMOTE_HOST)
_CLOUD = int(EngineFlag.CLOUD)
_OFFLOAD = int(EngineFlag.ALLOW_OFFLOAD)
_OFFLOADING_ENGINE = "ollama"
"""The kind of engine that by itself puts into the host's memory what its GPU has no room for."""
_NODE = int(Role.NODE)
ALIVE = frozenset({Liveness.FRESH, Liveness.LATE})


RowKey = tuple[Endpoint, str]
"""Endpoint and served model: what tells one row from all others."""


class Row(Struct, frozen=True, gc=False, kw_only=True):
    """One served model at one endpoint: constants of the filters, the estimates and the factors.

    ``key`` is ``<node_id>/<endpoint>``, ``label`` is ``@name/endpoint``, the name
    marked where it is shared: how people see it. ``down`` and ``backup`` say
    why it is out or only a reserve. Speeds are kept as seconds per token; ``load_s`` is the time until the model could
    serve (0 if resident), ``reload_s`` that of loading it with another context. ``base`` stands for the weights
    whatever their quantisation, ``family`` for what they descend from. ``need_bytes`` is what a load probably takes of
    ``room_bytes``, on a scale of ``fit_scale``, and ``debt_s`` what that costs other models later, in seconds of loading; ``weight_bytes`` what it takes for certain (0: not told) of the most that it
    can get, ``reach_bytes``. ``foreign`` counts requests at the engine that did not come through pairmesh, ``k`` is the
    useful batch size,
    ``token_s`` are seconds per token alone, ``full_token_s`` in a batch of that size,
    ``samples`` how many answers own experience with its speeds stands on, ``way_s`` what the way there was seen to take
    beyond the policy's ``rtt_s``, ``first_s`` what passes before the first token however short the prompt.
    """

    key: Endpoint
    label: str
    node: Id16
    node_id: NodeId
    node_name: NodeName
    endpoint: str
    engine: str
    model: str
    digest: bytes | None
    profile_key: ProfileKey
    names: tuple[str, ...]
    is_self: bool
    labels: frozenset[tuple[str, str]]
    dialects: int
    cap_no: int
    cap_yes: int
    ctx: int | None
    ctx_most: int | None
    resident_ctx: int | None
    params_m: int | None
    bits: float | None
    base: bytes | None = None
    family: str | None = None
    price_in: float = 0.0
    price_out: float = 0.0
    untrusted: bool
    cloud: bool
    down: str | None
    draining: bool
    backup: str | None
    resident: bool
    loading: bool
    loadable: bool
    gate: Gate
    loads: bool
    squeeze_detail: str | None
    need_bytes: int
    room_bytes: float | None
    weight_bytes: int = 0
    reach_bytes: float | None = None
    fit_scale: float = 1.0
    taken_ms: int
    period_ms: int
    slots: int
    ceiling: int
    in_flight: int
    queued: int
    foreign: int
    k: int
    prefill_s_per_token: float
    token_s: float
    full_token_s: float
    beta: float
    load_s: float
    reload_s: float
    s_speed: float
    s_gen: float
    s_load: float
    success: float
    samples: int
    pressure: float
    memory: float
    switch: float
    debt_s: float = 0.0
    way_s: float = 0.0
    first_s: float = 0.0


class Draft(Struct, kw_only=True):
    """One row before anything fleet-wide is known about it."""

    node: NodeView
    static: Static
    volatile: Volatile
    position: int
    engine: EngineFacts
    model: ModelFacts
    load: EngineLoad
    resident: ResidentModel | None
    key: Endpoint
    names: tuple[str, ...]
    group: str
    profile_key: ProfileKey
    prior: Prior
    claim: ProfileFacts | None


def drafts_of(node: NodeView, profiles: Profiles) -> Iterable[Draft]:
    """The rows that ``node`` offers, by the positions of its S and V. Lists of unlike length read as unknown."""
    static, volatile = node.static, node.volatile
    if static is None or volatile is None:
        return
    aligned = len(volatile.engines) == len(static.engines)
    residents = {(row.engine, row.model): row for row in volatile.residents} if aligned else {}
    claims = {} if node.is_self else {(row.engine, row.model): row for row in static.profiles}
    for position, model in enumerate(static.models):
        if model.engine >= len(static.engines):
            continue
        engine = static.engines[model.engine]
        asked = [parse_model_name(name) for name in (model.name, *model.aliases)]
        forms = [name.tagged if engine.kind == "ollama" else name.name for name in asked if name is not None]
        if asked[0] is None:
            continue
        group = model.digest.hex() if model.digest is not None else forms[0]
        yield Draft(
            node=node,
            static=static,
            volatile=volatile,
            position=position,
            engine=engine,
            model=model,
            load=volatile.engines[model.engine] if aligned else EngineLoad(),
            resident=residents.get((model.engine, position)),
            key=f"{node.node_id}/{engine.name}",
            names=tuple(dict.fromkeys(forms)),
            group=group,
            profile_key=ProfileKey(
                node=node.id16,
                endpoint=engine.name,
                model=group,
                quant=model.quant,
                ctx=model.ctx_served or 0,
                parallel=model.parallel or 0,
                offload_pct=model.offload_pct,
            ),
            prior=prior_of(static, engine, model, profiles.policy),
            claim=claims.get((model.engine, position)),
        )


def redrafted(drafts: Iterable[Draft], node: NodeView) -> Iterable[Draft]:
    """``drafts`` after a new V of their node, whose S and name are what they were."""
    static, volatile = node.static, node.volatile
    if static is None or volatile is None:
        return
    aligned = len(volatile.engines) == len(static.engines)
    residents = {(row.engine, row.model): row for row in volatile.residents} if aligned else {}
    for old in drafts:
        engine = old.model.engine
        yield Draft(
            node=node,
            static=static,
            volatile=volatile,
            position=old.position,
            engine=old.engine,
            model=old.model,
            load=volatile.engines[engine] if aligned else EngineLoad(),
            resident=residents.get((engine, old.position)),
            key=old.key,
            names=old.names,
            group=old.group,
            profile_key=old.profile_key,
            prior=old.prior,
            claim=old.claim,
        )


def row_of(
    draft: Draft,
    prior: Prior,
    squeeze: Squeeze,
    alone: bool,
    profiles: Profiles,
    policy: PlacementPolicy,
    now: int,
    reload_s: Callable[[int], float | None] = lambda position: None,
) -> Row:
    """The row of ``draft``, given its corrected ``prior`` and the pressure on its endpoint; ``alone`` if no other node
    is fresh or late. ``reload_s`` tells what a model of its node, by its position in S, was seen to take to load."""
    node, engine, model, load = draft.node, draft.engine, draft.model, draft.load
    able = abilities(profiles.find(draft.profile_key), prior, draft.claim, now, profiles.policy)
    remote = bool(engine.flags & _REMOTE)
    state = draft.resident.state if draft.resident is not None else None
    resident, loading = state == ModelState.RESIDENT, state == ModelState.LOADING
    need = _need_bytes(model, load)
    room = None if load.obtainable_mib is None else float(load.obtainable_mib * _MIB)
    slots = max(1, load.slots or engine.slots or 1)
    k = slots if able.beta < 1.0 else 1
    load_s = 0.0 if resident else _load_s(draft, able)
    caps = _capabilities(engine, model)
    resident_ctx = draft.resident.ctx if resident and draft.resident is not None else None
    tuned = remote or resident or loading
    debt_s = 0.0 if tuned else _debt_s(draft, need, able, policy, reload_s)
    scale = _fit_scale(draft, policy)
    return Row(
        key=draft.key,
        label=f"@{node.label}/{engine.name}",
        node=node.id16,
        node_id=node.node_id,
        node_name=node.name,
        endpoint=engine.name,
        engine=engine.kind,
        model=model.name,
        digest=model.digest,
        profile_key=draft.profile_key,
        names=draft.names,
        is_self=node.is_self,
        labels=frozenset((label.key, label.value) for label in engine.labels),
        dialects=engine.dialects,
        cap_no=caps[0],
        cap_yes=caps[1],
        ctx=resident_ctx or model.ctx_served or model.ctx_max,
        ctx_most=model.ctx_max,
        resident_ctx=resident_ctx,
        params_m=model.params_m,
        bits=nominal_bits(model.quant),
        base=model.base8,
        family=model.family.casefold() if model.family is not None else None,
        price_in=engine.price_in / _PRICES,
        price_out=engine.price_out / _PRICES,
        untrusted=not node.is_self and not node.roles & _NODE,
        cloud=bool(engine.flags & _CLOUD),
        down=_down(node, load, alone),
        draining=node.draining or load.state == EngineState.DRAINING,
        backup=_backup(node, load) or ("unknown" if squeeze.unsure and not (resident or loading) else None),
        resident=resident,
        loading=loading,
        loadable=loading or engine.load_policy == LoadPolicy.ON_DEMAND,
        gate=squeeze.gate,
        loads=squeeze.loads,
        squeeze_detail=squeeze.detail or squeeze.no_loads,
        need_bytes=0 if remote or need is None else round(need),
        room_bytes=None if remote or room is None else room + _offload_bytes(draft, wanted=False),
        weight_bytes=0 if remote else (model.size_mib or 0) * _MIB,
        reach_bytes=None if remote or room is None else _reach_bytes(draft, room),
        fit_scale=scale,
        taken_ms=node.taken_ms,
        period_ms=node.period_ms,
        slots=slots,
        ceiling=max(1, slots + engine.max_queue),
        in_flight=load.running if load.running is not None else load.ours,
        queued=load.queued or 0,
        foreign=max(0, (load.running or 0) + (load.queued or 0) - load.ours),
        k=k,
        first_s=able.first_s,
        prefill_s_per_token=1.0 / able.prompt,
        token_s=1.0 / able.gen,
        beta=able.beta,
        full_token_s=(1.0 + able.beta * (k - 1)) / able.gen,
        load_s=load_s,
        reload_s=able.load_s if engine.kind == "ollama" else 0.0,
        s_speed=able.s_prompt,
        s_gen=able.s_gen,
        s_load=able.s_load,
        success=able.success,
        samples=able.n,
        pressure=squeeze.score,
        memory=0.0 if tuned else _memory(need, room, scale, policy),
        switch=1.0 - math.exp(-debt_s / policy.debt_scale_s),
        debt_s=debt_s,
        way_s=max(0.0, (node.rtt_ms or 0) / 1000.0 - policy.rtt_s),
    )


def _down(node: NodeView, load: EngineLoad, alone: bool) -> str | None:
    if load.state == EngineState.DOWN or load.state == EngineState.STARTING:
        return "engine"
    if node.is_self:
        return None
    if node.unreachable:
        return "requests"
    if node.lonely or node.conflict or node.quarantined:
        return "node"
    if node.liveness in ALIVE or (node.liveness is Liveness.SUSPECT and alone):
        return None
    return node.liveness.value


def _backup(node: NodeView, load: EngineLoad) -> str | None:
    if load.state == EngineState.FAILING:
        return "failing"
    return "suspect" if node.liveness is Liveness.SUSPECT and not node.is_self else None


def _capabilities(engine: EngineFacts, model: ModelFacts) -> tuple[int, int]:
    known = engine.cap_known | model.cap_known
    has = known & (engine.cap_has | ~engine.cap_known) & (model.cap_has | ~model.cap_known)
    return known & ~has, has


def _need_bytes(model: ModelFacts, load: EngineLoad) -> float | None:
    weights = weight_bytes(model)
    if weights is None:
        return None
    ctx = model.ctx_served or model.ctx_max or 0
    cache = (model.kv_bytes_per_token or 0) * ctx * (model.parallel or load.slots or 1)
    return _WEIGHTS_MARGIN * weights + cache + _RUNTIME_BYTES


def _offload_bytes(draft: Draft, *, wanted: bool) -> float:
    """Memory of the host that a load may take besides; ``wanted`` False: only where the operator says so."""
    if not draft.engine.flags & _OFFLOAD and not (wanted and draft.engine.kind == _OFFLOADING_ENGINE):
        return 0.0
    return (draft.volatile.host.ram_available_mib or 0) * float(_MIB)


def _reach_bytes(draft: Draft, room: float) -> float:
    """The most that a load could ever get: what is obtainable now, and what models in use will give back."""
    engine = draft.model.engine
    in_use = [row.mem_mib or 0 for row in draft.volatile.residents if row.engine == engine and _is_kept(row)]
    return room + sum(in_use) * float(_MIB) + _offload_bytes(draft, wanted=True)


def _is_kept(row: ResidentModel) -> bool:
    return row.running > 0 or row.state != ModelState.RESIDENT


def _fit_scale(draft: Draft, policy: PlacementPolicy) -> float:
    """How many bytes too much or too little are beyond doubt."""
    gpus = [draft.static.gpus[i] for i in draft.engine.gpus if i < len(draft.static.gpus)]
    total_mib = sum(gpu.vram_total_mib or 0 for gpu in gpus) or draft.static.host.ram_total_mib
    return max(policy.least_fit_gib * _GIB, 0.05 * total_mib * _MIB)


def _memory(need: float | None, room: float | None, scale: float, policy: PlacementPolicy) -> float:
    return policy.unknown_factor if need is None or room is None else logistic((need - room) / scale)


def logistic(x: float) -> float:
    """1 / (1 + e^-x), without overflow."""
    if x < -40.0:
        return 0.0
    return 1.0 / (1.0 + math.exp(-x)) if x < 40.0 else 1.0


def _load_s(draft: Draft, able: Abilities) -> float:
    left = draft.resident.load_left_ds if draft.resident is not None else None
    if left is not None and draft.resident is not None and draft.resident.state == ModelState.LOADING:
        return left / 10.0
    return able.load_s


def _debt_s(
    draft: Draft,
    need: float | None,
    able: Abilities,
    policy: PlacementPolicy,
    reload_s: Callable[[int], float | None],
) -> float:
    """Seconds of loading that a load here would cause later, by evicting models that will probably be asked for.

    What an evicted one takes to load again is its own (``reload_s``, by its position in S); one of which nothing is known
    takes as long for its size as the incoming one. Residents go longest idle first until the need fits into free memory. A model's demand is not told per node, so the
    chance that it is wanted within the horizon is that of one request per its present idle time.
    """
    free = _free_bytes(draft)
    if need is None or free is None:
        return 0.0
    lacking, debt = need - free, 0.0
    here = [
        row
        for row in draft.volatile.residents
        if row.state == ModelState.RESIDENT and row.engine == draft.model.engine and row.mem_mib
    ]
    for row in sorted(here, key=lambda row: -row.idle_s):
        if lacking <= 0:
            break
        size = float((row.mem_mib or 0) * _MIB)
        lacking -= size
        wanted = 1.0 - math.exp(-policy.debt_horizon_s / max(1, row.idle_s))
        own_s = reload_s(row.model)
        debt += wanted * (own_s if own_s is not None else able.load_s * size / need)
    return debt


def seen_load_s(draft: Draft, profiles: Profiles) -> float | None:
    """What the model of ``draft`` takes to load, by own or claimed experience; None without any."""
    profile = profiles.find(draft.profile_key)
    if profile is None and draft.claim is None:
        return None
    able = abilities(profile, draft.prior, draft.claim, 0, profiles.policy)
    return able.load_s if able.load_known else None


def _free_bytes(draft: Draft) -> float | None:
    static, volatile = draft.static, draft.volatile
    if not draft.engine.gpus or len(volatile.gpus) != len(static.gpus):
        ram = volatile.host.ram_available_mib
        return None if ram is None else float(ram * _MIB)
    free = 0.0
    for index in draft.engine.gpus:
        if index >= len(volatile.gpus):
            continue
        gpu = volatile.gpus[index]
        if gpu.state == GpuState.ASLEEP or gpu.vram_free_mib is None:
            return None
        free += gpu.vram_free_mib * _MIB
    return free
