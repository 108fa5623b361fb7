"""What the relay is told of a decision that chose nobody, and of sessions. Pure functions."""

from agent.node.routing.refusal_texts import words_of
from agent.relay.frontends.replies import hints_header
from agent.relay.ports import Turned
from router_core.placement.decision.decision import Decision
from router_core.placement.record import Choice
from router_core.placement.request.request import PlacementRequest
from router_core.policy.placement import PlacementPolicy


def turned(decision: Decision, known_as: str | None) -> Turned:
    """The refusal; ``known_as`` is the decision under which the journal keeps the request."""
    return Turned(
        decision_id=known_as,
        status=decision.reason.status,
        code=decision.reason.value,
        retry_after_s=decision.retry_after_s,
        counts=tuple([(code.value, rows) for code, rows in decision.counts.items()]),
        nearest=decision.nearest,
        hints=hints_header(decision.hints),
        words=words_of(decision),
    )


def session_word(request: PlacementRequest | None, choice: Choice, policy: PlacementPolicy) -> str | None:
    """What becomes of the client's session by this choice; None if it named none."""
    if request is None or request.session is None:
        return None
    if not policy.affinity_bonus:
        return "off"
    pin = request.pin
    if pin is None:
        return "miss"
    return "hit" if (pin.endpoint, pin.model) == (choice.endpoint, choice.model) else "moved"
