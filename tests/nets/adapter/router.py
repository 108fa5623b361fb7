"""Plain data of ``draw`` as a router of the core that decides and reserves, with the numbers of ``policies.json``.

``tests/nets/adapter`` is the one folder of the nets that names the product's modules, classes and fields. Whoever moves
or renames something mends it here, and ``tests/vectors/nets/names.toml`` where a name shows in a document.
"""

import json
from collections.abc import Mapping
from dataclasses import fields
from random import Random
from typing import Any, Final

from router_core.ids import Id8, Id16, Id32, NodeName, id8_of, id16_of, node_id_of
from router_core.placement.candidates.fleet import Fleet, Live, fold_fleet
from router_core.placement.decision.decide import decide
from router_core.placement.decision.decision import Decision
from router_core.placement.filters.eligibility import targets_of, until_ms_of
from router_core.placement.ledger import Ledger, Reservation
from router_core.placement.local import LocalWork
from router_core.placement.queueing.hold import after_wait
from router_core.placement.reasons import AuthorityOutcome
from router_core.placement.request.hints import HintFault, parse_hints
from router_core.placement.request.request import Advice, Counsel, Pin, PlacementRequest, RequestClass
from router_core.policy.authority import AuthorityMode
from router_core.policy.exchange import ExchangePolicy, Hedge
from router_core.policy.placement import ClassTargets, Locality, Match, PlacementPolicy, Weights
from router_core.policy.profile import ProfilePolicy
from router_core.profile.outcome import Outcome, Result
from router_core.profile.profiles import Profiles
from router_core.record.membership import Liveness, Member, ViewChange
from router_core.record.state import (
    Capability,
    Dialect,
    Dispatch,
    EngineFacts,
    EngineLoad,
    GpuFacts,
    GpuLoad,
    HostFacts,
    HostLoad,
    Label,
    ModelDemand,
    ModelFacts,
    ProfileFacts,
    ResidentModel,
    ResourceLevel,
    SeenRouter,
    Static,
    Volatile,
)
from router_core.router.breaker import Breakers
from router_core.router.lateness import Lateness
from router_core.view.fold import empty, fold
from tests.nets.canonical import VECTORS, plain
from tests.nets.draw import NOW, OWN, name_bytes

INST: Final = 7
_NUMBERS: Final[dict[str, Any]] = json.loads((VECTORS / "policies.json").read_text())
_ENUMS: Final[dict[str, Any]] = {"match_cap": Match, "spill_cap": Locality, "hedge": Hedge}
OF_IDS: Final = frozenset({"id", "policy_hash", "v", "gen"})
"""What of a record is no result: ids, versions, the hash over all numbers of a policy."""

# --- numbers given in the vectors ------------------------------------------------------------------------------


def _numbers(cls: type, told: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``told`` that are still numbers of ``cls``; the others have become constants."""
    known = {each.name for each in fields(cls) if each.init}
    return {name: _enum_or_tuple(name, value) for name, value in told.items() if name in known}


def _enum_or_tuple(name: str, value: Any) -> Any:
    if name == "weights":
        return Weights(**_numbers(Weights, value))
    if name in ("interactive", "batch", "background"):
        return ClassTargets(**_numbers(ClassTargets, value))
    if name in _ENUMS:
        return _ENUMS[name](value)
    return tuple(map(_tuple, value)) if isinstance(value, list) else value


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value


def placement_policy(variant: str) -> PlacementPolicy:
    """The numbers of the vectors, varied as ``variant`` says."""
    return PlacementPolicy(**_numbers(PlacementPolicy, _NUMBERS["placement"] | _NUMBERS["variants"][variant]))


def exchange_policy() -> ExchangePolicy:
    return ExchangePolicy(**_numbers(ExchangePolicy, _NUMBERS["exchange"]))


def profile_policy() -> ProfilePolicy:
    return ProfilePolicy(**_numbers(ProfilePolicy, _NUMBERS["profile"]))


POLICIES: Final = {name: placement_policy(name) for name in _NUMBERS["variants"]}

# --- nodes and their records -----------------------------------------------------------------------------------


def id32(name: str) -> Id32:
    return Id32(name_bytes(name))


def id16(name: str) -> Id16:
    return id16_of(id32(name))


def endpoint_key(at: tuple[str, str]) -> str:
    """How requests and ledgers name an endpoint: node, endpoint name."""
    return f"{node_id_of(id32(at[0]))}/{at[1]}"


def a_member(name: str, roles: int = 3) -> Member:
    return Member(id32=id32(name), der=name.encode(), roles=roles, admission=1, name=NodeName(name))


def static(told: Mapping[str, Any]) -> Static:
    """S from plain data in the words of the wire."""
    return Static(
        host=HostFacts(**told["host"]),
        gpus=tuple(GpuFacts(**gpu) for gpu in told["gpus"]),
        engines=tuple(
            EngineFacts(
                **{**engine, "labels": tuple(Label(key=key, value=value) for key, value in engine["labels"])}
            )
            for engine in told["engines"]
        ),
        models=tuple(ModelFacts(**model) for model in told["models"]),
        models_total=len(told["models"]),
        profiles=tuple(ProfileFacts(**claim) for claim in told["profiles"]),
    )


def volatile(told: Mapping[str, Any]) -> Volatile:
    """V from plain data in the words of the wire."""
    disp = told.get("disp")
    return Volatile(
        flags=told["flags"],
        level=told["level"],
        host=HostLoad(**told["host"]),
        gpus=tuple(GpuLoad(**gpu) for gpu in told["gpus"]),
        resources=tuple(ResourceLevel(**each) for each in told["resources"]),
        engines=tuple(EngineLoad(**each) for each in told["engines"]),
        residents=tuple(ResidentModel(**each) for each in told["residents"]),
        seen=tuple(SeenRouter(**each) for each in told.get("seen", ())),
        disp=None if disp is None else Dispatch(**disp),
        demand=tuple(ModelDemand(**each) for each in told.get("demand", ())),
    )


def change_of(node: Mapping[str, Any], seq: int, now: int) -> ViewChange:
    """What the mesh hands on when this node's newest records arrive."""
    return ViewChange(
        origin=id16(node["name"]),
        state=Liveness(node["liveness"]),
        confirmed=node["confirmed"],
        epoch=1,
        inst=1,
        seq=seq,
        mono_ms=now - node["age_ms"],
        base_ms=0,
        due_ms=2 * node["period_ms"],
        volatile=volatile(node["volatile"]),
        static=static(node["static"]),
        quarantined=node["quarantined"],
        rtt_ms=node["rtt_ms"],
    )


class _Sent:
    """An attempt under way, as those who watch for late ones see it."""

    last_byte_ms: float | None = None


class _Room:
    """Room for those that wait, or none."""

    def __init__(self, is_there: bool) -> None:
        self._is_there = is_there

    def has_room(self, body_bytes: int, share: float) -> bool:
        return self._is_there


# --- decisions -------------------------------------------------------------------------------------------------


class DecidingRouter:
    """A router with the knowledge of ``told``, plain data of ``draw.a_fleet``."""

    def __init__(self, told: Mapping[str, Any], policy: str) -> None:
        self.policy = POLICIES[policy]
        self.local = LocalWork()
        self.ledger = Ledger(Id8(id8_of(id16(OWN))), INST, self.local)
        self.rng = Random(1)
        breakers, lateness = Breakers(exchange_policy()), Lateness(exchange_policy())
        for fault in told["faults"]:
            at = endpoint_key(fault["at"])
            breakers.failed(at, fault["ms"], connection_refused=True)
            if fault["trial"]:
                breakers.dispatched(at, NOW - 1)
        for at in told["late"]:
            lateness.overdue(endpoint_key(at), _Sent(), NOW - 500)
        for at in told["suspects"]:
            for _ in range(2):
                lateness.overdue(endpoint_key(at), _Sent(), NOW - 500)
        for at in told["full"]:
            lateness.full(endpoint_key(at), NOW - 500)
        for job in told["foreign"]:
            self.local.start(job["endpoint"], job["seconds"], NOW - 300, job["model"])
        self.profiles = Profiles(profile_policy())
        live = Live(
            ledger=self.ledger,
            started_ms=told["started_ms"],
            breakers=breakers,
            hold=_Room(told["has_room"]),
            suspects=lateness.suspects,
            late=lateness.costs,
            spilling=frozenset(RequestClass(each) for each in told["spilling"]),
            leaving=frozenset(map(tuple, told["leaving"])),
        )
        members = {id16(node["name"]): a_member(node["name"], node["roles"]) for node in told["nodes"]}
        for number in range(told["silent"]):
            members[id16(f"silent{number}")] = a_member(f"silent{number}")
        cut_off = frozenset(id16(name) for name in told["unreachable"])
        changes = [change_of(node, 1, NOW) for node in told["nodes"]]
        view = fold(empty(id32(OWN), NodeName(OWN)), changes, members, NOW, cut_off)
        fleet = fold_fleet(None, view, self.profiles, self.policy, live, NOW)
        for outcome in told["outcomes"]:
            self._learn(fleet, outcome)
        self.fleet: Fleet = fold_fleet(fleet, view, self.profiles, self.policy, live, NOW, news=True)

    def _learn(self, fleet: Fleet, told: Mapping[str, Any]) -> None:
        node, endpoint, model = told["offer"]
        row = fleet.row(endpoint_key((node, endpoint)), model)
        if row is None:
            return
        more = {name: value for name, value in told.items() if name not in ("offer", "ago_ms", "result")}
        self.profiles.learn(
            Outcome(key=row.profile_key, at_ms=NOW - told["ago_ms"], result=Result(told["result"]), **more)
        )

    def decided(self, told: Mapping[str, Any], now: int) -> dict[str, Any]:
        """Decide on one request of ``draw.a_request`` and reserve what was chosen: all that came of it."""
        hints = parse_hints([(f"x-pairmesh-{name}", value) for name, value in told["hints"].items()])
        if isinstance(hints, HintFault):
            return {"fault": plain(hints)}
        pin, advice, arrival_ms = told["pin"], told["advice"], now - told["waited_ms"]
        request = PlacementRequest(
            request_id=told["id"],
            dialect=Dialect.EMBED if told["embeds"] else Dialect.CHAT,
            model=told["model"],
            arrival_ms=arrival_ms,
            stream=told["stream"],
            text_bytes=told["text_bytes"],
            prompt_tokens=told["prompt_tokens"],
            body_bytes=told["body_bytes"],
            images=told["images"],
            audio_parts=told["audio_parts"],
            output_cap=told["output_cap"],
            choices=told["choices"],
            num_ctx=told["num_ctx"],
            requires=Capability(told["requires"]),
            hints=hints,
            caller=told["caller"],
            session=None if pin is None else b"session1",
            pin=None
            if pin is None
            else Pin(
                endpoint=endpoint_key(pin["offer"][:2]),
                model=pin["offer"][2],
                tokens=pin["tokens"],
                at_ms=now - pin["ago_ms"],
            ),
            advice=None if advice is None else _counsel(advice),
            attempt=told["attempt"],
            tried=frozenset(map(endpoint_key, told["tried"])),
            refused=frozenset(map(endpoint_key, told["refused"])),
            declined=frozenset(map(endpoint_key, told["declined"])),
            spare=told["spare"],
            token_numbers=told["token_numbers"],
            item_bytes=told["item_bytes"],
            sure_tokens=told["sure_tokens"],
        )
        if told["held_ms"] is not None:
            request = after_wait(request, self.policy, now, since_ms=now - told["held_ms"], waits=True)
        decision = decide(request, self.fleet, self.policy, now, self.rng)
        until = until_ms_of(request, targets_of(request.hints.request_class, self.policy))
        return decision_told(decision) | {"until_ms": until, "reserved": self._reserved(decision, now)}

    def _reserved(self, decision: Decision, now: int) -> dict[str, Any] | None:
        choice = decision.chosen
        if choice is None:
            return None
        made: Reservation = self.ledger.reserve(choice, now, 2)
        owed = self.ledger.owed.get(choice.endpoint)
        return {
            "seq": made.seq,
            "route_seq": made.route_seq,
            "owed_s": None if owed is None else plain(owed.work_s),
            "owed_requests": None if owed is None else owed.requests,
            "loading_bytes": self.ledger.loading.get(choice.node),
            "own_in_flight": self.local.in_flight(choice.endpoint_name) if choice.is_self else None,
        }

    def ended(self, seq: int, *, well: bool) -> None:
        """A reserved request has ended."""
        self.ledger.end(seq)


def _counsel(told: Mapping[str, Any]) -> Counsel:
    outcome = AuthorityOutcome(told["outcome"])
    advice = Advice(order=tuple(map(endpoint_key, told["order"])), ttl_ms=1_000, reason="because")
    return Counsel(
        mode=AuthorityMode(told["mode"]),
        outcome=outcome,
        decision_id="asked",
        ms=told["ms"],
        advice=advice if outcome is AuthorityOutcome.USED else None,
    )


def decision_told(decision: Decision) -> dict[str, Any]:
    """All that a decision says, with its record."""
    choice = decision.chosen
    return {
        "action": plain(decision.action),
        "reason": plain(decision.reason),
        "choice": None if choice is None else plain(choice),
        "record": plain(decision.record, without=OF_IDS),
        "hold": plain(decision.hold),
        "retry_after_s": decision.retry_after_s,
        "nearest": plain(decision.nearest),
        "spill_on": decision.spill_on,
    }
