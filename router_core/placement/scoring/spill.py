"""When a request that may leave the mesh does: only where the mesh has no row left, or would serve it much worse.

Rules: a row in the mesh always has the first word; once requests spill they go on spilling until the mesh is nearly as
good again, so that none of them flaps. Which requests may leave was decided by a filter.
"""

import math
from collections.abc import Sequence
from typing import Protocol

from router_core.placement.candidates.candidate import Row
from router_core.placement.filters.eligibility import Need
from router_core.policy.placement import PlacementPolicy

_MILLION = 1e6


class Spillable(Protocol):
    """A row that could serve; ``slo`` is its chance to miss the request's targets."""

    slo: float

    @property
    def row(self) -> Row: ...


def spills(
    mesh: Sequence[Spillable], cloud: Sequence[Spillable], is_on: bool, policy: PlacementPolicy
) -> bool:
    """True if rows outside the mesh take part. ``is_on`` tells that requests of this class spill already."""
    if not mesh or not cloud:
        return bool(cloud)
    gain = min([scored.slo for scored in mesh]) - min([scored.slo for scored in cloud])
    return gain > (policy.spill_off_below if is_on else policy.spill_on_above)


def price_of(row: Row, need: Need) -> float:
    """What the request is expected to cost at ``row``, in the currency of its prices per 10^6 tokens."""
    return (need.prompt * row.price_in + need.output * row.price_out) / _MILLION


def spill_cost(price: float, policy: PlacementPolicy) -> float:
    """The factor ``spill`` of a row outside the mesh: leaving it costs something even for free."""
    return 1.0 - math.exp(-(price / policy.spill_price + policy.spill_privacy))
