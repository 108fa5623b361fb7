"""What the relay is told of a decision: the endpoint chosen, or why there is none. Pure functions."""

from agent.node.refusals import words_of
from agent.relay.ports import Routed, Turned
from router_core.placement.decision import Decision
from router_core.placement.ledger import Reservation
from router_core.placement.reasons import HintOutcome
from router_core.placement.record import Choice
from router_core.placement.request import HintNote, PlacementRequest
from router_core.policy.placement import Match, PlacementPolicy

_EXACT = Match.EXACT


def routed(
    decision: Decision,
    choice: Choice,
    reservation: Reservation,
    *,
    inst: int,
    left_ms: int,
    held_ms: int | None,
    session: str | None,
) -> Routed:
    """The endpoint that was chosen. ``left_ms`` is what the request has left, ``held_ms`` how long it waited for room,
    ``session`` what became of its session."""
    est, request = choice.est, decision.evidence.request
    return Routed(
        decision.id,
        choice.endpoint,
        None if choice.is_self else choice.node_id,
        choice.label,
        choice.endpoint_name,
        choice.model,
        decision.reason.value,
        reservation.seq,
        inst,
        reservation.route_seq,
        choice.prompt_tokens,
        choice.output_tokens,
        request.hints.request_class.value,
        choice.ahead,
        left_ms,
        choice.resident,
        1000.0 * est.ttft,
        1000.0 * est.load,
        1000.0 * est.ect,
        1000.0 * (choice.prefill_s + choice.decode_s),
        queue_ms=1000.0 * est.wait,
        net_ms=1000.0 * est.net,
        hints=hints_header(decision.hints),
        match=choice.match.value if choice.match is not _EXACT else None,
        session=session,
        held_ms=held_ms,
        stands_as=None if request.stands_as is None else request.stands_as.value,
    )


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


def hints_header(notes: tuple[HintNote, ...]) -> str | None:
    """What became of each hint, as ``x-pairmesh-hints``; None if there was none."""
    if not notes:
        return None
    said = []
    for note in notes:
        outcome = note.outcome.value
        if note.outcome is HintOutcome.EXCLUDED and note.detail is not None:
            outcome = f"{outcome}({note.detail})"
        said.append(f"{note.hint}={outcome}")
    return ", ".join(said)
