"""The serving node's last word: may this request of a peer's router come in, judged on what this node knows now.

Rules: it judges before the body is read; a dispatch that may wait as long as the request has left is refused for hard
causes alone; it never routes on. Refuses to know whom it answers.
"""

from msgspec import Struct

from router_core.placement.admission import Gate
from router_core.placement.eligibility import targets_of
from router_core.placement.fleet import Fleet
from router_core.placement.reasons import Cause
from router_core.placement.request import RequestClass
from router_core.placement.rows import Row


class IngressAsk(Struct, frozen=True, gc=False, kw_only=True):
    """What a router says of the request it sends. ``resident`` tells that it expects a warm model, ``wait_ms`` how long
    the request may wait here, ``left_ms`` how long it has left altogether."""

    endpoint: str
    model: str
    dialect: int
    resident: bool
    wait_ms: int
    left_ms: int
    request_class: RequestClass = RequestClass.INTERACTIVE


def admit(ask: IngressAsk, fleet: Fleet, now: int) -> Cause | None:
    """None to let the request in, else the cause of the refusal. ``now`` is boot ms."""
    row = _open_row(ask, fleet)
    if isinstance(row, Cause):
        return row
    if (row.endpoint, row.model) in fleet.live.leaving:
        return Cause.COLD
    warm = row.resident or row.loading
    if not warm and not row.loadable:
        return Cause.MODEL_ABSENT
    local = fleet.live.ledger.local
    share = targets_of(ask.request_class, fleet.policy).share
    if local.in_flight(row.endpoint) + row.foreign >= share * row.ceiling:
        return Cause.QUEUE_FULL
    patient = ask.wait_ms >= ask.left_ms
    if row.gate is Gate.SHUT or (row.gate is Gate.SOFT and not patient) or not (warm or row.loads):
        return Cause.PRESSURE
    if patient:
        return None
    if ask.resident and not row.resident and 1000.0 * row.load_s > ask.wait_ms:
        return Cause.COLD
    if not warm and 1000.0 * _other_load_s(row, fleet) > ask.wait_ms:
        return Cause.COLD
    wait_s = local.work_s(row.endpoint, row.slots, now, row.foreign) / row.k
    return Cause.WAIT_EXCEEDED if 1000.0 * wait_s > ask.wait_ms else None


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


def _other_load_s(row: Row, fleet: Fleet) -> float:
    """Seconds until what its engine loads now is in memory. Engines load one model after the other, or all of them more
    slowly: either way a further load is not done before."""
    return max([each.load_s for each in fleet.rows if each.loading and each.key == row.key], default=0.0)


def own_row(fleet: Fleet, endpoint: str, model: str) -> Row | None:
    """The row of this node that serves ``model`` at ``endpoint``, under the name it publishes."""
    return fleet.row(f"{fleet.node_id}/{endpoint}", model)


def service_s(row: Row, prompt_tokens: int, output_tokens: int) -> float:
    """Seconds a request of this size takes on ``row`` alone: what to book in ``LocalWork`` when it comes in."""
    return prompt_tokens * row.prefill_s_per_token + output_tokens * row.token_s
