"""The serving node's last word: may this request of a peer's router come in, judged on what this node knows now.

Rules: it judges before the body is read, by what is there and never by how long that may take; a dispatch that may wait
is refused for hard causes alone; it never routes on. It does not know whom it answers.
"""

from msgspec import Struct

from router_core.placement.candidates.admission import Gate
from router_core.placement.candidates.candidate import Row
from router_core.placement.candidates.fleet import Fleet
from router_core.placement.filters.eligibility import targets_of
from router_core.placement.reasons import Cause
from router_core.placement.request.request import RequestClass

_HALF = 0.5
"""Of the first that waits half is over, in the mean."""


class IngressAsk(Struct, frozen=True, gc=False, kw_only=True):
    """What a router says of the request it sends. ``resident`` tells that it expects a warm model, ``ahead`` how many
    requests it expects to wait here before this one (None: it does not say), ``patient`` that it knows no better
    place."""

    endpoint: str
    model: str
    dialect: int
    resident: bool
    ahead: float | None
    patient: bool
    request_class: RequestClass = RequestClass.INTERACTIVE


def admit(ask: IngressAsk, fleet: Fleet) -> Cause | None:
    """None to let the request in, else the cause of the refusal."""
    row = _open_row(ask, fleet)
    if isinstance(row, Cause):
        return row
    if (row.endpoint, row.model) in fleet.live.leaving:
        return Cause.COLD
    warm = row.resident or row.loading
    if not warm and not row.loadable:
        return Cause.MODEL_ABSENT
    busy = fleet.live.ledger.local.in_flight(row.endpoint) + row.foreign
    if busy >= targets_of(ask.request_class, fleet.policy).share * row.ceiling:
        return Cause.QUEUE_FULL
    if row.gate is Gate.SHUT or (row.gate is Gate.SOFT and not ask.patient) or not (warm or row.loads):
        return Cause.PRESSURE
    if not ask.patient and not row.resident and (ask.resident or _loads_another(row, fleet)):
        return Cause.COLD
    if ask.ahead is None or busy < row.slots:
        return None
    expected = max(ask.ahead, fleet.policy.ahead_least)
    return Cause.QUEUE_FULL if busy - row.slots + _HALF > expected else None


def asked_about(ask: IngressAsk, fleet: Fleet) -> Cause | None:
    """As ``admit``, for a mere question about the model: it is no work, so only owning the model counts."""
    row = _open_row(ask, fleet)
    return row if isinstance(row, Cause) else None


def _open_row(ask: IngressAsk, fleet: Fleet) -> Row | Cause:
    row = own_row(fleet, ask.endpoint, ask.model)
    if row is not None and row.draining:
        return Cause.DRAINING
    if row is None or row.down is not None or not row.dialects & ask.dialect:
        return Cause.MODEL_ABSENT
    return row


def _loads_another(row: Row, fleet: Fleet) -> bool:
    """Whether its engine loads something else now. Engines load one model after the other, or all of them more slowly:
    either way a further load is not done before."""
    return not row.loading and any(each.loading and each.key == row.key for each in fleet.rows)


def own_row(fleet: Fleet, endpoint: str, model: str) -> Row | None:
    """The row of this node that serves ``model`` at ``endpoint``, under the name it publishes."""
    return fleet.row(f"{fleet.node_id}/{endpoint}", model)


def service_s(row: Row, prompt_tokens: int, output_tokens: int) -> float:
    """Seconds a request of this size takes on ``row`` alone: what to book in ``LocalWork`` when it comes in."""
    return prompt_tokens * row.prefill_s_per_token + output_tokens * row.token_s
