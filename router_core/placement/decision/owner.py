"""Whom to ask about a model. Whoever has it can tell, so nothing is scored, reserved or drawn.

Order: the mesh first; in it this node, then where the model is resident, then the nearest node. Filters that say whether
an endpoint may be used at all hold as for any request; how busy it is does not count.
"""

from collections.abc import Mapping

from router_core.ids import Id16
from router_core.placement.candidates.candidate import Row
from router_core.placement.candidates.fleet import Fleet
from router_core.placement.filters.eligibility import Need, closed, need_of
from router_core.placement.filters.model_match import offer_of, settled
from router_core.placement.reasons import Reason
from router_core.placement.request.request import PlacementRequest
from router_core.policy.placement import PlacementPolicy

_FAR_MS = 2**31


def choose_owner(
    request: PlacementRequest, fleet: Fleet, policy: PlacementPolicy, rtts: Mapping[Id16, int], now: int
) -> Row | Reason:
    """The row to ask, or why there is none: the furthest filter any row reached. ``rtts`` are ms; ``now`` boot ms."""
    offer = offer_of(request.model, fleet, policy)
    if offer is None:
        return Reason.MODEL_NAME_INVALID
    meant = settled(offer, need_of(request, 1.0, None, policy), fleet, now)
    judged = [(row, _excluded(row, request, meant.need, fleet, now)) for row in meant.rows]
    open_rows = [row for row, reason in judged if reason is None]
    if not open_rows:
        reasons = [reason for _, reason in judged if reason is not None]
        return max(reasons, key=lambda reason: reason.order, default=Reason.MODEL_ABSENT)
    return min(
        open_rows,
        key=lambda row: (row.cloud, not row.is_self, not row.resident, rtts.get(row.node, _FAR_MS), row.key),
    )


def _excluded(row: Row, request: PlacementRequest, need: Need, fleet: Fleet, now: int) -> Reason | None:
    reason = closed(row, need, fleet.breakers, now)
    if reason is not None:
        return reason
    if not row.dialects & need.dialect or (
        need.digest is not None and row.digest is not None and row.digest != need.digest
    ):
        return Reason.MODEL_ABSENT
    if row.key in request.tried:
        return Reason.TRIED
    return Reason.REFUSED if row.key in request.refused else None
