"""Rows, fleets and requests for tests of placement: readable defaults, any field overridable."""

from collections.abc import Callable
from random import Random
from typing import Any

from msgspec.structs import replace

from router_core.ids import Id8, Id16, Id32, NodeName, node_id_of
from router_core.placement.candidates.admission import Gate
from router_core.placement.candidates.candidate import Row
from router_core.placement.candidates.fleet import Fleet, Live, fold_fleet
from router_core.placement.candidates.index import index_of
from router_core.placement.decision.decide import decide
from router_core.placement.decision.decision import Decision
from router_core.placement.ledger import Ledger
from router_core.placement.local import LocalWork
from router_core.placement.record import Choice
from router_core.placement.request.hints import parse_hints
from router_core.placement.request.names import parse_model_name
from router_core.placement.request.request import Endpoint, Hints, PlacementRequest
from router_core.placement.scoring.estimates import capacity
from router_core.placement.scoring.survey import Survey
from router_core.placement.scoring.weighing import Scored
from router_core.policy.placement import PlacementPolicy
from router_core.policy.profile import ProfilePolicy
from router_core.profile.outcome import ProfileKey
from router_core.profile.profiles import Profiles
from router_core.record.state import Capability, Dialect
from router_core.view.fold import empty

NOW = 1_000_000
ME = Id32(bytes(32))
POLICY = PlacementPolicy()
ALL_DIALECTS = int(Dialect.CHAT | Dialect.COMPLETION | Dialect.EMBED)
GIB = 2**30


def id32(name: str) -> Id32:
    """A stable, made-up node identity for ``name``."""
    return Id32(name.encode().ljust(32, b"\x01"))


def a_row(name: str = "a", **over: Any) -> Row:
    """A warm, idle, unpressed chat row of node ``name``: 1,000 tok/s prompt, 50 tok/s output, 4 slots, period 1 s."""
    speeds = {"pp": 1000.0, "tg": 50.0} | {key: over.pop(key) for key in ("pp", "tg") if key in over}
    endpoint = over.get("endpoint", "llamacpp")
    model = over.get("model", "tiny")
    node_id = node_id_of(id32(name))
    asked = parse_model_name(model)
    assert asked is not None
    engine = over.get("engine", "llamacpp")
    slots = over.get("slots", 4)
    fields: dict[str, Any] = {
        "key": f"{node_id}/{endpoint}",
        "node": Id16(id32(name)[:16]),
        "node_id": node_id,
        "node_name": NodeName(name),
        "endpoint": endpoint,
        "engine": engine,
        "model": model,
        "digest": None,
        "profile_key": ProfileKey(node=Id16(id32(name)[:16]), endpoint=endpoint, model=model),
        "names": (asked.tagged if engine == "ollama" else asked.name,),
        "is_self": False,
        "label": f"@{name}/{endpoint}",
        "labels": frozenset(),
        "dialects": ALL_DIALECTS,
        "cap_no": 0,
        "cap_yes": int(Capability.STREAMING),
        "ctx": 8192,
        "ctx_most": 32_768,
        "resident_ctx": 8192,
        "params_m": None,
        "bits": None,
        "untrusted": False,
        "cloud": False,
        "down": None,
        "draining": False,
        "backup": None,
        "resident": True,
        "loading": False,
        "loadable": True,
        "gate": Gate.OPEN,
        "loads": True,
        "squeeze_detail": None,
        "need_bytes": 4 * GIB,
        "room_bytes": 16.0 * GIB,
        "taken_ms": NOW - 500,
        "period_ms": 1000,
        "slots": slots,
        "ceiling": slots + 2 * slots,
        "in_flight": 0,
        "queued": 0,
        "foreign": 0,
        "k": slots,
        "prefill_s_per_token": 1.0 / speeds["pp"],
        "token_s": 1.0 / speeds["tg"],
        "beta": 0.1,
        "load_s": 0.0 if over.get("resident", True) else 5.0,
        "reload_s": 5.0 if engine == "ollama" else 0.0,
        "s_speed": 0.2,
        "s_gen": 0.2,
        "s_load": 0.5,
        "success": 1.0,
        "samples": 30,
        "pressure": 0.05,
        "memory": 0.0,
        "switch": 0.0,
    }
    fields |= over
    batch = 1.0 + fields["beta"] * (fields["k"] - 1)
    return Row(**({"full_token_s": fields["token_s"] * batch} | fields))


def a_fleet(
    *rows: Row, m_r: float = 3.0, live: Live | None = None, profiles: Profiles | None = None
) -> Fleet:
    """A fleet of exactly these rows, in the order a fold would give them."""
    rows = tuple(sorted(rows, key=lambda row: row.key))
    profiles = profiles or Profiles(ProfilePolicy())
    bare = fold_fleet(None, empty(ME, NodeName("me")), profiles, POLICY, live or Live(ledger=a_ledger()), NOW)
    index = index_of(rows, [(row.node_name, row.node_id) for row in rows])
    return replace(bare, rows=rows, index=index, m_r=m_r)


class Broken:
    """Breakers of some endpoints: 1 half-open, 2 open; those named first failed first."""

    def __init__(self, on_trial: str = "", **states: int) -> None:
        self.on_trial = on_trial
        self._states = {a_row(name).key: state for name, state in states.items()}
        self._order = list(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def state(self, endpoint: str, now: int) -> int:
        return self._states.get(endpoint, 0)

    def last_fault_ms(self, endpoint: str) -> int | None:
        return self._order.index(endpoint) if endpoint in self._states else None

    def is_on_trial(self, endpoint: str) -> bool:
        return bool(self.on_trial) and endpoint == a_row(self.on_trial).key


def a_ledger() -> Ledger:
    return Ledger(Id8(ME[:8]), 7, LocalWork())


def a_choice(row: Row, *, prefill_s: float = 0.5, decode_s: float = 0.5, need_bytes: int = 0) -> Choice:
    """A decision for ``row``, as the ledger takes it."""
    decision = decided(a_request(model=row.model), a_fleet(row))
    assert decision.chosen is not None
    return replace(decision.chosen, prefill_s=prefill_s, decode_s=decode_s, need_bytes=need_bytes)


def a_request(**over: Any) -> PlacementRequest:
    """A chat for ``tiny``: about 1,200 prompt tokens, default output."""
    fields: dict[str, Any] = {
        "request_id": "r1",
        "dialect": Dialect.CHAT,
        "model": "tiny",
        "arrival_ms": NOW,
        "text_bytes": 4320,
        "body_bytes": 0,
    }
    return PlacementRequest(**(fields | over))


def after_failure(request: PlacementRequest, *endpoints: Endpoint) -> PlacementRequest:
    """The next attempt of ``request``, which failed at ``endpoints``."""
    return replace(request, attempt=request.attempt + len(endpoints), tried=request.tried | set(endpoints))


def decided(
    request: PlacementRequest, fleet: Fleet, policy: PlacementPolicy = POLICY, now: int = NOW
) -> Decision:
    return decide(request, fleet, policy, now, Random(1))


def sustained(seen: Survey) -> Callable[[Scored], float]:
    """What each row of a survey can sustain."""
    return lambda scored: capacity(scored.row, seen.need)


def choice_of(decision: Decision) -> Choice:
    """The choice of a decision that routes."""
    assert decision.chosen is not None, decision
    return decision.chosen


def chosen_node(decision: Decision) -> str | None:
    return None if decision.chosen is None else decision.chosen.node_name


def parsed_hints(**headers: str) -> Hints:
    """Hints as their headers say: ``require="node=@a"``."""
    hints = parse_hints([(f"x-pairmesh-{name.replace('_', '-')}", value) for name, value in headers.items()])
    assert isinstance(hints, Hints), hints
    return hints
