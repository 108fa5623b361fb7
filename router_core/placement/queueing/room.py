"""What becomes of a request that the fleet has no room for: put off, held, or refused, and when to ask again.

Rules: only ``background`` is put off by a saturation that is expected, by a lot that its seed draws, until that passes or
its hold is over; it is shed only where the queue cannot take it. A request is held exactly if some row would serve it but
for being full, by its record or its own word, or is just being tried after failures, whatever failed it before; when to
ask again is told by the rows that alone are in the way. It neither ranks rows nor keeps what is held.
"""

from collections.abc import Sequence
from hashlib import blake2b

from router_core.placement.candidates.admission import shed_share
from router_core.placement.candidates.candidate import Row
from router_core.placement.candidates.fleet import Fleet
from router_core.placement.filters.eligibility import targets_of
from router_core.placement.queueing.terms import HoldTerms
from router_core.placement.reasons import Action, Reason
from router_core.placement.request.request import PlacementRequest, RequestClass
from router_core.placement.scoring.estimates import waiting_s
from router_core.placement.scoring.survey import FULL, Survey
from router_core.policy.placement import PlacementPolicy

_LOTS = 2.0**64
_PASSING = frozenset({Reason.BREAKER_OPEN, Reason.PRESSURE, Reason.QUEUE_FULL})
"""What keeps a row out until some of its work is done, as far as anybody can tell."""
_UNHEARD = frozenset({Reason.MODEL_ABSENT, Reason.NOT_IN_SUBSET, Reason.UNREACHABLE})
"""What a member that was not heard yet may change."""
_BACKGROUND = RequestClass.BACKGROUND


def is_put_off(
    request: PlacementRequest, seen: Survey, policy: PlacementPolicy, seed: bytes, now: int
) -> bool:
    """Whether saturation (the least wait and load in units of the target) lets the request wait although rows are left.
    How long they take is a guess, so it goes on once its hold is over, or half of the time until its deadline."""
    if request.hints.request_class is not _BACKGROUND or request.attempt > 1 or not seen.scored:
        return False
    since_ms = request.held_since_ms
    if since_ms is not None:
        hold_ms = min(targets_of(_BACKGROUND, policy).hold_ms, (seen.need.until_ms - since_ms) // 2)
        if now - since_ms >= hold_ms:
            return False
    least_s = min([scored.est.wait + scored.est.load for scored in seen.scored])
    lot = int.from_bytes(blake2b(seed, digest_size=8, person=b"shed").digest()) / _LOTS
    return lot < shed_share(least_s / seen.need.ttft_s, policy)


def put_off(
    request: PlacementRequest, seen: Survey, fleet: Fleet, policy: PlacementPolicy, now: int
) -> tuple[Action, Reason, HoldTerms | None]:
    """Held until its deadline at most, or shed where the queue is full."""
    if seen.need.until_ms <= now or not _fits(request, fleet, policy):
        return Action.SHED, Reason.SHED, None
    terms = _terms(request, seen, [scored.row for scored in seen.scored], seen.need.until_ms, now)
    return Action.QUEUE, Reason.SHED, terms


def without_row(
    request: PlacementRequest, seen: Survey, fleet: Fleet, policy: PlacementPolicy, now: int
) -> tuple[Action, Reason, HoldTerms | None]:
    """What is done if no row is left, and why."""
    if seen.invalid:
        return Action.REJECT, Reason.MODEL_NAME_INVALID, None
    full = [gone for gone in seen.excluded if gone.reason in FULL and gone.row.key not in request.tried]
    if not full and (breakers := fleet.breakers) is not None:
        full = [
            gone
            for gone in seen.excluded
            if gone.reason is Reason.BREAKER_OPEN
            and gone.row.key not in request.tried
            and breakers.is_on_trial(gone.row.key)
        ]
    if not full:
        reason = max(seen.counts, key=_order, default=Reason.MODEL_ABSENT)
        if reason in _UNHEARD and (until_ms := fleet.hears_until(now)) is not None:
            return _await_members(request, seen, fleet, policy, now, until_ms)
        if reason is Reason.NOT_IN_SUBSET and any(map(fleet.is_silent, request.hints.requires_node)):
            reason = Reason.UNREACHABLE
        return Action.REJECT, reason, None
    need, reason = seen.need, min([gone.reason for gone in full], key=_order)
    since_ms = now if request.held_since_ms is None else request.held_since_ms
    until_ms = min(since_ms + targets_of(request.hints.request_class, policy).hold_ms, need.until_ms)
    if until_ms <= now or not _fits(request, fleet, policy):
        return Action.REJECT, reason, None
    return Action.QUEUE, reason, _terms(request, seen, [gone.row for gone in full], until_ms, now)


def _fits(request: PlacementRequest, fleet: Fleet, policy: PlacementPolicy) -> bool:
    share = targets_of(request.hints.request_class, policy).share
    return request.waits or fleet.live.hold.has_room(request.body_bytes, share)


def _terms(
    request: PlacementRequest, seen: Survey, rows: Sequence[Row], until_ms: int, now: int
) -> HoldTerms:
    need = seen.need
    return HoldTerms(
        since_ms=now if request.held_since_ms is None else request.held_since_ms,
        until_ms=until_ms,
        deadline_ms=need.until_ms,
        rows=frozenset([(row.key, row.model) for row in rows]),
        seconds=min([need.prompt * row.prefill_s_per_token + need.output * row.token_s for row in rows]),
    )


def _await_members(
    request: PlacementRequest, seen: Survey, fleet: Fleet, policy: PlacementPolicy, now: int, until_ms: int
) -> tuple[Action, Reason, HoldTerms | None]:
    """This node has just started: whoever has the model may not have been heard yet."""
    until_ms = min(until_ms, seen.need.until_ms)
    if until_ms <= now or not _fits(request, fleet, policy):
        return Action.REJECT, Reason.STARTING, None
    terms = HoldTerms(
        since_ms=now if request.held_since_ms is None else request.held_since_ms,
        until_ms=until_ms,
        deadline_ms=seen.need.until_ms,
        rows=frozenset([("", request.model)]),
        seconds=0.0,
    )
    return Action.QUEUE, Reason.STARTING, terms


def waits_s(seen: Survey, reason: Reason, fleet: Fleet, now: int) -> list[float]:
    """Seconds until each row that a refusal is about would serve one more. Empty where waiting is no help: the rows are
    out for what work does not change."""
    if reason is Reason.SHED:
        return [scored.est.wait for scored in seen.scored]
    if reason not in _PASSING:
        return []
    ledger, profiles, policy = fleet.live.ledger, fleet.profiles, fleet.policy
    return [
        waiting_s(gone.row, ledger, profiles, policy, now) for gone in seen.excluded if gone.reason is reason
    ]


def _order(reason: Reason) -> int:
    return reason.order
