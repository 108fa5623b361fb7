"""The table of nodes that ``pairmesh status`` prints. Pure: documents in, text out."""

from collections.abc import Mapping, Sequence
from typing import Final

from agent.admin.documents import EngineDoc, HeldDoc, MemberDoc, ResidencyDoc, StatusDoc
from agent.cli.columns import UNKNOWN, columns, count, duration, printable, seconds
from agent.cli.drain import said
from agent.cli.pressure_lines import pressed_lines
from router_core.ids import NodeId, short_id

_HEAD: Final = ("NODE", "STATE", "AGE", "LEVEL", "ENGINES", "WARM", "IN FLIGHT", "TOK/S", "LINK")
_RIGHT: Final = frozenset({2, 6, 7})
STANDINGS_MOST: Final = 16
_PRESENT: Final = frozenset({"fresh", "late"})
_LINK_FAULTS: Final = {
    "wrong_mesh": "in another mesh",
    "lost": "peer closed the connection",
    "tls_failed": "certificates do not match",
    "identity_mismatch": "another node answers",
    "removed": "peer removed this node",
    "refused": "connection refused",
    "unreachable": "no way to its addresses",
    "timed_out": "no answer",
    "no_address": "no known address",
    "rejected": "peer takes no link",
    "version": "another protocol version",
    "dup_identity": "identity used twice",
}
"""By how a dial ended or what a BYE said; another is told by its code."""
_SHOWN_FLAGS: Final = frozenset({"draining", "lonely", "degraded", "conflict", "sensor_stale", "no_load"})


def status_text(status: StatusDoc) -> str:
    """Who answers, then one line per node, then what its operator must see."""
    own = status.own
    listening = ", ".join(f"{what} {where}" for what, where in own.addresses.items())
    lines = [
        f"{own.label or own.name} ({short_id(NodeId(own.id))}), pairmesh {own.version}, up {duration(own.uptime_ms)}, "
        f"mesh {own.mesh}",
        f"listening: {listening or UNKNOWN}",
        f"others are told: {', '.join(own.told) or 'no address'}",
        f"policy: {UNKNOWN if own.policy is None else f'{own.policy.preset} ({own.policy.hash})'}",
        "",
        *nodes_table(status.members, own.engine_errors),
    ]
    if own.residency is not None:
        lines += ["", *residency_lines(own.residency)]
    if own.drains:
        lines += ["", *(said(drain) for drain in own.drains)]
    if own.unfit_names:
        lines += ["", *(unfit(name, how_many) for name, how_many in own.unfit_names.items())]
    if own.host.pressed:
        lines += ["", *pressed_lines(own.host.pressed)]
    if own.waits_for_restart:
        lines += ["", f"waits for a restart: {', '.join(own.waits_for_restart)} (see pairmesh config show)"]
    if own.faults:
        lines += ["", *(f"fault: {fault}" for fault in own.faults)]
    return "\n".join(printable(line) for line in lines) + "\n"


def residency_lines(residency: ResidencyDoc) -> list[str]:
    """How far this node may load models on its own, and a line per model that it holds, moves, or failed to load."""
    if not residency.movable:
        return ["models move by demand, but no engine that is up here can be told what to hold"]
    shown = [_standing(model) for model in residency.models[:STANDINGS_MOST]]
    more = len(residency.models) - len(shown)
    return [
        f"models move by demand: {count(residency.loads_left, 'more load')} within this hour",
        *(f"  {line}" for line in shown),
        *([f"  and {more:,} more: see --json"] if more else []),
    ]


def _standing(held: HeldDoc) -> str:
    left = None if held.left_ms is None else duration(held.left_ms)
    match held.state:
        case "present":
            said = "to be loaded " + (
                "when there is room" if left is None else f"in {left}, if it still should be"
            )
        case "resident":
            said = (
                "resident" if not held.left_ms else f"resident, and not unloaded by pairmesh for {left} more"
            )
        case "failed":
            said = f"could not be loaded, not tried again for {left}"
        case state:
            said = state if left is None else f"{state}, for {left} more at most"
    room = "" if held.room_for is None else f", to make room for {held.room_for}"
    return f"{held.endpoint}/{held.model}: {said}{room}"


def unfit(endpoint: str, how_many: int) -> str:
    """One line about models of an endpoint that nobody is offered."""
    models = "1 model whose name is" if how_many == 1 else f"{how_many:,} models whose names are"
    return f"{endpoint} has {models} unfit to be offered"


def nodes_table(members: Sequence[MemberDoc], errors: Mapping[str, str] = {}) -> list[str]:
    """One aligned line per node under a line of heads; the own node is marked with ``*``, and its engines with what is
    wrong with them."""
    rows = [_row(member, errors if member.me else {}) for member in members]
    return columns([_HEAD, *rows], right=_RIGHT)


def _row(member: MemberDoc, errors: Mapping[str, str]) -> tuple[str, ...]:
    return (
        f"{member.called}{'*' if member.me else ''}",
        state_of(member),
        UNKNOWN if member.age_ms is None else seconds(member.age_ms / 1_000),
        _level(member),
        ", ".join(_engine(engine, errors) for engine in member.engines) or UNKNOWN,
        ", ".join(warm_models(member)) or UNKNOWN,
        UNKNOWN if member.in_flight is None else str(member.in_flight),
        UNKNOWN if member.gen_tps is None else f"{member.gen_tps:.0f}",
        _link(member),
    )


def _level(member: MemberDoc) -> str:
    pressed = f" ({', '.join(member.pressed)})" if member.pressed else ""
    return f"{member.level or UNKNOWN}{pressed}"


def state_of(member: MemberDoc) -> str:
    """Liveness and what keeps requests away: ``fresh``, ``fresh, draining``, ``fresh, blocked``."""
    blocked = ("blocked",) if member.blocked_until is not None else ()
    return ", ".join((member.liveness, *(flag for flag in member.flags if flag in _SHOWN_FLAGS), *blocked))


def warm_models(member: MemberDoc) -> list[str]:
    """Models in memory, each once; one that is still being loaded is marked."""
    marks = {"resident": "", "loading": " (loading)"}
    shown = [f"{r.model}{marks[r.state]}" for r in member.residents if r.state in marks]
    return list(dict.fromkeys(shown))


def _engine(engine: EngineDoc, errors: Mapping[str, str]) -> str:
    if engine.state == "ready":
        return engine.name
    error = errors.get(engine.name, engine.state)
    return f"{engine.name} ({error.replace('_', ' ')})"


def _link(member: MemberDoc) -> str:
    link = member.link
    if member.me or link is None:
        return UNKNOWN
    said = None
    if link.rtt_ms is not None:
        said = "under 1 ms" if link.rtt_ms == 0 else seconds(link.rtt_ms / 1_000)
    shown = link.state if said is None else f"{link.state} ({said})"
    if link.fault is not None:
        shown = f"{link.state}: {_LINK_FAULTS.get(link.fault, link.fault.replace('_', ' '))}"
    requests = member.requests
    if requests is None or not takes_no_requests(member):
        return shown
    return f"{shown}, requests: unreachable ({'no address' if requests.port is None else f'port {requests.port}'})"


def takes_no_requests(member: MemberDoc) -> bool:
    """True if a member is there, and yet cannot be connected for requests."""
    requests = member.requests
    return requests is not None and requests.state == "unreachable" and member.liveness in _PRESENT
