"""What was chosen for an attempt, as tests of the relay need it: a choice, and a decision that says so."""

from typing import Any

from agent.relay.ports import Routed
from router_core.ids import Id16, NodeId, NodeName
from router_core.placement.decision.decision import Decision, Evidence
from router_core.placement.filters.eligibility import need_of
from router_core.placement.ledger import Reservation
from router_core.placement.reasons import Action, Reason
from router_core.placement.record import Choice, Estimate, ViewFacts
from router_core.placement.request.request import HintNote, PlacementRequest
from router_core.policy.placement import PlacementPolicy
from router_core.record.state import Dialect


def an_estimate(**over: Any) -> Estimate:
    """All in seconds: a first token after 0.1, the end after 0.2."""
    fields = {
        "wait": 0.0,
        "load": 0.0,
        "prefill": 0.0,
        "net": 0.0,
        "tpot": 0.0,
        "ttft": 0.1,
        "ect": 0.2,
        "sd": 0.0,
    }
    return Estimate(**(fields | over))


def a_choice(endpoint: str = "e", *, node: str = "", key: str | None = None, **over: Any) -> Choice:
    """``endpoint`` of this host, or of ``node``."""
    fields: dict[str, Any] = {
        "endpoint": f"{node}/{endpoint}" if key is None else key,
        "node": Id16(node.encode()[:16]),
        "node_id": NodeId(node),
        "node_name": NodeName(node[:8] or "here"),
        "label": f"@{node[:8] or 'here'}/{endpoint}",
        "endpoint_name": endpoint,
        "engine": "llamacpp",
        "model": "m",
        "is_self": not node,
        "resident": True,
        "prompt_tokens": 10,
        "output_tokens": 20,
        "ahead": None,
        "prefill_s": 0.05,
        "decode_s": 0.05,
        "need_bytes": 0,
        "est": an_estimate(),
    }
    return Choice(**(fields | over))


def a_decision(choice: Choice, *, called: str = "d1", hints: tuple[HintNote, ...] = ()) -> Decision:
    """``choice`` was made for a request of one model that nothing else is known of."""
    policy = PlacementPolicy()
    request = PlacementRequest("r1", Dialect.CHAT, choice.model, 0)
    evidence = Evidence(
        request=request,
        need=need_of(request, 4.0, None, policy),
        policy=policy,
        router=NodeId(""),
        at_ms=0,
        seed=bytes(8),
        view=ViewFacts(gen=0, max_age_ms=0, m_r=1.0, rows=1),
        resolved=choice.model,
        chosen=None,
        others=(),
        reserves=(),
        excluded=(),
        field=None,
    )
    return Decision(
        id=called,
        request_id="r1",
        action=Action.ROUTE,
        reason=Reason.NATIVE,
        chosen=choice,
        hints=hints,
        counts={},
        degraded=(),
        evidence=evidence,
    )


def a_route(
    choice: Choice | None = None,
    *,
    attempt: int = 1,
    called: str = "d1",
    seq: int = 1,
    hints: tuple[HintNote, ...] = (),
    **over: Any,
) -> Routed:
    """An attempt at ``choice``, reserved for under ``seq``."""
    choice = choice or a_choice()
    fields: dict[str, Any] = {
        "attempt": attempt,
        "decision_id": called,
        "choice": choice,
        "reservation": Reservation(seq=seq, route_seq=seq),
        "inst": 7,
        "request_class": "interactive",
        "left_ms": 60_000,
        "decision": a_decision(choice, called=called, hints=hints),
    }
    return Routed(**(fields | over))
