"""The JSON documents of the admin API, and how they follow from a view.

Pure: a view, what the links say and ``now`` in, documents out. Unknown is null. A node's ages are in ms, its
work in seconds, speeds in tokens per second. Nothing here carries a prompt, an answer or an address a peer
did not publish about itself.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from router_core.ids import Id16, short_id
from router_core.record.membership import Liveness, Member
from router_core.record.state import (
    EngineState,
    Flag,
    Level,
    ModelState,
    ResidentModel,
    ResourceCode,
    Role,
    Static,
    Volatile,
)
from router_core.view.cluster import ClusterView, NodeView

Number = TypeVar("Number", int, float)


class LinkDoc(Struct, frozen=True, kw_only=True):
    """This node's own link to a member. ``state`` is the mesh's word for it; ``fault`` says why it is not up:
    how the last dial ended (``lost``, ``refused`` ...) or what the last BYE said (``wrong_mesh`` ...)."""

    state: str
    rtt_ms: float | None = None
    fault: str | None = None


class BlockedDoc(Struct, frozen=True, kw_only=True):
    """Why a member gets no requests: for ``restarts``, so many so fast that it may be one identity in two places, because
    its records are ``behind`` those of another life of it, or for a ``malformed`` record. It ends in ``left_ms``, if
    nothing of the kind comes again."""

    why: str
    left_ms: int


class RequestsDoc(Struct, frozen=True, kw_only=True):
    """Whether a member takes requests from here, by what connecting to it showed: ``state`` is ``ok``, ``unreachable`` or
    ``unknown``; ``why`` in a word, for ``for_ms`` already, at ``port`` of the addresses ``at``. ``left_out`` are addresses
    that it tells and that are not dialled, by reason: ``not_allowed``, ``own`` or ``not_dialable``."""

    state: str
    why: str | None = None
    for_ms: int | None = None
    at: tuple[str, ...] = ()
    port: int | None = None
    left_out: dict[str, tuple[str, ...]] = {}


class ResidentDoc(Struct, frozen=True, kw_only=True):
    """One model that an engine has in memory, or is loading or unloading. ``ctx`` is the tokens one request
    may use."""

    model: str
    engine: str | None
    state: str
    running: int
    waiting: int
    mem_mib: int | None
    ctx: int | None


class EngineDoc(Struct, frozen=True, kw_only=True):
    """One endpoint. ``running`` and ``queued`` are the engine's numbers, ``ours`` went through pairmesh."""

    name: str
    kind: str
    version: str | None
    state: str
    running: int | None
    queued: int | None
    slots: int | None
    ours: int | None
    work_s: float | None
    age_ms: int | None
    models: tuple[str, ...]


class MemberDoc(Struct, frozen=True, kw_only=True):
    """One node. ``in_flight`` sums the engines' running (else ours); ``gen_tps`` is the fastest learned
    single-stream speed of what is resident; ``age_ms`` is the age of its newest state here; ``blocked_until``: it gets
    no requests, whatever it says, and why. ``label`` is the name, marked by the first characters of the id where others have it too;
    ``pressed`` are the resources behind a level of ``high`` or ``critical``, ``requests`` is None of the own node."""

    name: str
    id: str
    short_id: str
    me: bool
    roles: tuple[str, ...]
    liveness: str
    routable: bool
    flags: tuple[str, ...]
    age_ms: int | None
    epoch: int | None
    link: LinkDoc | None
    version: str | None
    level: str | None
    engines: tuple[EngineDoc, ...]
    residents: tuple[ResidentDoc, ...]
    in_flight: int | None
    work_s: float | None
    gen_tps: float | None
    blocked_until: BlockedDoc | None = None
    label: str = ""
    pressed: tuple[str, ...] = ()
    requests: RequestsDoc | None = None

    @property
    def called(self) -> str:
        """How to tell it from all others."""
        return self.label or self.name


class PolicyDoc(Struct, frozen=True, kw_only=True):
    """The placement policy in force: the preset it starts from, and the hash of all its numbers."""

    preset: str
    hash: str


class DrainDoc(Struct, frozen=True, kw_only=True):
    """What takes nothing new: ``endpoint``, or the whole node if None. ``stage`` is ``active``, ``draining`` or
    ``drained``; ``in_flight`` are the requests still there."""

    endpoint: str | None
    stage: str
    in_flight: int
    why: str = ""


class HeldDoc(Struct, frozen=True, kw_only=True):
    """One model that this node may load or unload: ``state`` is ``present`` (to be loaded), ``loading``, ``resident``,
    ``draining``, ``unloading`` or ``failed``, ``for_ms`` already. ``left_ms``: before it is loaded, tried
    again or may be unloaded, or at most draining or loading; None where that is open. ``room_for`` is the ENDPOINT/MODEL it
    makes room for."""

    endpoint: str
    model: str
    state: str
    for_ms: int
    left_ms: int | None
    room_for: str | None


class ResidencyDoc(Struct, frozen=True, kw_only=True):
    """Models as this node moves them. ``loads_left`` may still begin within the hour, ``movable`` models are there to be
    moved."""

    loads_left: int
    movable: int
    models: tuple[HeldDoc, ...]


class PressedDoc(Struct, frozen=True, kw_only=True):
    """A signal that holds ``resource`` (of ``gpu``, by its key) at ``level``; ``threshold`` is the bound it passed."""

    resource: str
    signal: str
    level: str
    value: float | None
    threshold: float | None
    unit: str
    gpu: str | None = None


class CardDoc(Struct, frozen=True, kw_only=True):
    """An NVIDIA card on the bus, and the kernel driver it is bound to."""

    bus_id: str
    driver: str | None
    in_vm: bool = False


class LibraryDoc(Struct, frozen=True, kw_only=True):
    """One library of the GPU driver that was tried: where it lies (None: the linker found none) and the driver's code,
    0 for a good start, None if its process ended or hung."""

    path: str | None
    code: int | None


class GpuDoc(Struct, frozen=True, kw_only=True):
    """One GPU that answers or did. ``unread`` are the readings it does not tell, with their code; ``unified``: its memory
    is the host's."""

    name: str
    state: str
    unified: bool
    memory_mib: int | None
    unread: tuple[str, ...] = ()


class NvmlDoc(Struct, frozen=True, kw_only=True):
    """NVIDIA's driver here. ``off``: the settings say not to ask. ``present``: there is something to ask. ``state`` is
    that of the process that asks; ``kernel`` and ``on_disk`` are versions of the driver."""

    off: bool = False
    present: bool = False
    state: str = "off"
    kernel: str | None = None
    on_disk: str | None = None
    wsl: bool = False
    cards: tuple[CardDoc, ...] = ()
    libraries: tuple[LibraryDoc, ...] = ()
    gpus: tuple[GpuDoc, ...] = ()


class HostDoc(Struct, frozen=True, kw_only=True):
    """This host as it was measured last. ``arc_mib`` of the available memory are held by the cache of ZFS, which gives
    them back on demand; ``pressed`` are the signals behind a level of ``high`` or ``critical``."""

    memory_mib: int | None = None
    available_mib: int | None = None
    arc_mib: int = 0
    pressed: tuple[PressedDoc, ...] = ()
    nvml: NvmlDoc = NvmlDoc()


class OwnDoc(Struct, frozen=True, kw_only=True):
    """The daemon that answers. ``mesh`` is the mesh id in hex, ``addresses`` are its listeners by name as
    ``HOST:PORT``, ``faults`` what its operator must see; ``isolated``: no link is up although members are alive,
    so the view of them has stopped; ``unfit_names``: by endpoint, how many of its models have a name that others
    cannot be told, so that nobody is offered them, ``more_models`` how many of its list are not looked at,
    ``hidden_models`` how many more this node has than it can tell;
    ``engine_errors``: by endpoint, in a word what is wrong with it; ``withdrawn``: by endpoint, what it lately did not know;
    ``told``: the addresses others are told to reach it at.
    ``residency`` is None where models are not moved. ``label`` is as that of a member, ``log_lines_lost`` are those that
    nobody got, ``host`` is what was measured here, ``waits_for_restart`` the settings whose value in the file is another
    one by now."""

    name: str
    id: str
    mesh: str
    version: str
    pid: int
    uptime_ms: int
    epoch: int
    roles: tuple[str, ...]
    addresses: dict[str, str]
    faults: tuple[str, ...] = ()
    isolated: bool = False
    policy: PolicyDoc | None = None
    drains: tuple[DrainDoc, ...] = ()
    unfit_names: dict[str, int] = {}
    more_models: dict[str, int] = {}
    hidden_models: int = 0
    engine_errors: dict[str, str] = {}
    withdrawn: dict[str, tuple[str, ...]] = {}
    residency: ResidencyDoc | None = None
    label: str = ""
    log_lines_lost: int = 0
    waits_for_restart: tuple[str, ...] = ()
    host: HostDoc = HostDoc()
    told: tuple[str, ...] = ()


class RosterDoc(Struct, frozen=True, kw_only=True):
    """One member as the roster has it, removed ones included."""

    id: str
    short_id: str
    name: str
    roles: tuple[str, ...]
    admission: int
    removed: bool


class StatusDoc(Struct, frozen=True, kw_only=True):
    """The answer of ``/v1/status``: the own node and every member it knows, as of ``at_ms``."""

    at_ms: int
    own: OwnDoc
    members: tuple[MemberDoc, ...]


def members_of(
    view: ClusterView,
    roster: Sequence[Member],
    links: Mapping[Id16, LinkDoc],
    now: int,
    blocked: Mapping[Id16, BlockedDoc] = {},
    requests: Mapping[Id16, RequestsDoc] = {},
) -> tuple[MemberDoc, ...]:
    """One document per node of the view and per roster member not in it; own node first, then by name."""
    docs = [
        member_doc(
            node,
            links.get(node.id16),
            now,
            blocked.get(node.id16),
            None if node.is_self else requests.get(node.id16),
        )
        for node in view.nodes.values()
    ]
    unseen = [m for m in roster if m.id16 not in view.nodes and m.id16 != view.me]
    docs += [
        _unseen_doc(m, view.labels.get(m.node_id, m.name), links.get(m.id16), requests.get(m.id16))
        for m in unseen
    ]
    return tuple(sorted(docs, key=lambda doc: (not doc.me, doc.name, doc.id)))


def member_doc(
    node: NodeView,
    link: LinkDoc | None,
    now: int,
    blocked_until: BlockedDoc | None = None,
    requests: RequestsDoc | None = None,
) -> MemberDoc:
    """What this node believes about ``node``. Positions in V are read only against a matching S."""
    static, volatile = node.static, node.volatile
    engines = _engines(static, volatile)
    counts = [e.running if e.running is not None else e.ours for e in engines]
    works = [e.work_s for e in engines]
    return MemberDoc(
        name=node.name,
        id=node.node_id,
        short_id=short_id(node.node_id),
        me=node.is_self,
        roles=names_of(Role, node.roles),
        liveness=node.liveness.value,
        routable=node.routable,
        flags=() if volatile is None else names_of(Flag, volatile.flags),
        age_ms=None if volatile is None else node.age_ms(now),
        epoch=None if volatile is None else node.epoch,
        link=link,
        version=None if static is None else (static.software.version or None),
        level=None if volatile is None else _level(volatile.level),
        engines=engines,
        residents=_residents(static, volatile),
        in_flight=_total(counts),
        work_s=_total(works),
        gen_tps=_fastest(static, volatile),
        blocked_until=blocked_until,
        label=node.label,
        pressed=() if volatile is None else _pressed(volatile),
        requests=requests,
    )


def view_doc(view: ClusterView, now: int) -> dict[str, Any]:
    """The whole view with its records spelled out, for people and scripts."""
    return {
        "gen": view.gen,
        "me": view.node_id,
        "nodes": [
            {
                "id": node.node_id,
                "name": node.name,
                "label": node.label,
                "liveness": node.liveness.value,
                "routable": node.routable,
                "quarantined": node.quarantined,
                "epoch": node.epoch,
                "inst": node.inst,
                "seq": node.seq,
                "age_ms": None if node.volatile is None else node.age_ms(now),
                "due_ms": node.due_ms,
                "volatile": spelled(node.volatile),
                "static": spelled(node.static),
            }
            for node in view.nodes.values()
        ],
    }


def spelled(value: object) -> Any:
    """A record with the names of its fields, bytes as hex."""
    if isinstance(value, Struct):
        return {field: spelled(getattr(value, field)) for field in value.__struct_fields__}
    if isinstance(value, tuple | list):
        return [spelled(item) for item in value]
    return value.hex() if isinstance(value, bytes) else msgspec.to_builtins(value)


def names_of(kind: type[Role] | type[Flag], bits: int) -> tuple[str, ...]:
    """The lower-case names of the known bits set in ``bits``."""
    return tuple(str(flag.name).lower() for flag in kind if bits & flag)


def _unseen_doc(member: Member, label: str, link: LinkDoc | None, requests: RequestsDoc | None) -> MemberDoc:
    return MemberDoc(
        name=member.name,
        id=member.node_id,
        short_id=short_id(member.node_id),
        me=False,
        roles=names_of(Role, member.roles),
        liveness=Liveness.GONE.value,
        routable=False,
        flags=(),
        age_ms=None,
        epoch=None,
        link=link,
        version=None,
        level=None,
        engines=(),
        residents=(),
        in_flight=None,
        work_s=None,
        gen_tps=None,
        requests=requests,
        label=label,
    )


def _engines(static: Static | None, volatile: Volatile | None) -> tuple[EngineDoc, ...]:
    if static is None:
        return ()
    loads = () if volatile is None else volatile.engines
    docs = []
    for index, facts in enumerate(static.engines):
        load = loads[index] if index < len(loads) else None
        docs.append(
            EngineDoc(
                name=facts.name,
                kind=facts.kind,
                version=facts.version or None,
                state=_word(EngineState, None if load is None else load.state),
                running=None if load is None else load.running,
                queued=None if load is None else load.queued,
                slots=facts.slots if load is None or load.slots is None else load.slots,
                ours=None if load is None else load.ours,
                work_s=None if load is None else load.work_ds / 10,
                age_ms=None if load is None else load.age_ds * 100,
                models=tuple(model.name for model in static.models if model.engine == index),
            )
        )
    return tuple(docs)


def _residents(static: Static | None, volatile: Volatile | None) -> tuple[ResidentDoc, ...]:
    if static is None or volatile is None:
        return ()
    return tuple(
        ResidentDoc(
            model=static.models[row.model].name,
            engine=static.engines[row.engine].name if row.engine < len(static.engines) else None,
            state=_word(ModelState, row.state),
            running=row.running,
            waiting=row.waiting,
            mem_mib=row.mem_mib,
            ctx=row.ctx,
        )
        for row in _held(static, volatile)
    )


def _held(static: Static, volatile: Volatile) -> list[ResidentModel]:
    return [row for row in volatile.residents if row.model < len(static.models)]


def _fastest(static: Static | None, volatile: Volatile | None) -> float | None:
    if static is None or volatile is None:
        return None
    warm = {(row.model, row.engine) for row in _held(static, volatile) if row.state == ModelState.RESIDENT}
    speeds = [p.gen_dtps / 10 for p in static.profiles if p.gen_dtps and (p.model, p.engine) in warm]
    return max(speeds, default=None)


def _level(code: int | None) -> str | None:
    return None if code is None else _word(Level, code)


def _pressed(volatile: Volatile) -> tuple[str, ...]:
    if volatile.level is None or volatile.level < Level.HIGH:
        return ()
    known = set(ResourceCode)
    found = [
        ResourceCode(row.code).name.lower().replace("_", " ")
        for row in volatile.resources
        if row.level == volatile.level and row.code in known
    ]
    return tuple(dict.fromkeys(found))


def _word(kind: type[EngineState] | type[ModelState] | type[Level], code: int | None) -> str:
    return kind(code).name.lower() if code is not None and code in set(kind) else "unknown"


def _total(values: Sequence[Number | None]) -> Number | None:
    known = [value for value in values if value is not None]
    return sum(known[1:], known[0]) if known else None
