"""How fast a candidate works through requests, by its record alone."""

from math import erf, exp, sqrt

from msgspec import Struct

from router_core.placement.candidates.candidate import Row
from router_core.policy.placement import PlacementPolicy
from router_core.profile.profiles import Profiles

_UNLIKELY = 16.0
"""Squared standard deviations below which nobody is expected to wait."""
_CERTAIN = 36.0
"""... above which the mean alone tells how many are, to a part in a billion."""
DENSITY = 1.0 / sqrt(2.0 * 3.141592653589793)
_HALF = sqrt(0.5)

HOPE = 0.8
"""What a row that was never tried from here is hoped to take, in parts of what its like take: more than an older record
speaks against it."""


class Pace(Struct, frozen=True, gc=False):
    """A row with what follows from its record alone, for any request, so that it is worked out once per snapshot.

    ``usual_s`` is what a usual request of its model takes there beside as many as it serves at a time, ``turn_s`` how
    often one of these ends then. ``told`` counts the requests that its record tells of, ``ahead`` how many one more would
    wait for if none of them waited and nothing had changed since; ``is_free`` if that is so however old the record is:
    there is nobody, or more than one place is left. ``tpot_s`` are the seconds per token beside those in flight, ``spread`` that of its speed and, where it would have to load, of loading. ``worst`` is
    the largest of its factors that no request moves, ``fixed`` what these add to its score.
    """

    row: Row
    usual_s: float
    turn_s: float
    told: int
    ahead: float
    is_free: bool
    tpot_s: float
    spread: float
    worst: float
    fixed: float


def pace_of(row: Row, profiles: Profiles, policy: PlacementPolicy) -> Pace:
    """The pace of ``row`` by its record."""
    weights, memory, switch, pressure = policy.weights, row.memory, row.switch, row.pressure
    spread = row.s_load if row.load_s and row.s_load > row.s_speed else row.s_speed
    usual = profiles.usual(row.profile_key.model)
    usual_s = usual.prompt * row.prefill_s_per_token + usual.output * row.full_token_s
    told = row.in_flight + row.queued
    over = told - row.k + 1.0
    worst = max(memory, switch, pressure)
    fixed = weights.memory * memory + weights.switch * switch + weights.pressure * pressure
    return Pace(
        row,
        usual_s,
        usual_s / row.k,
        told,
        excess(over if over < 0.0 else 0.0, policy.wait_doubt),
        not told or over <= -1.0,
        tpot_s(row, row.in_flight),
        spread,
        worst,
        fixed,
    )


def tpot_s(row: Row, in_flight: int) -> float:
    """Seconds per token of one more request beside ``in_flight`` others; where nobody tried it yet a little less, so that it
    is tried."""
    beside = row.k - 1
    return (1.0 + row.beta * (in_flight if in_flight < beside else beside)) * (
        row.token_s if row.samples else HOPE * row.token_s
    )


def excess(mean: float, variance: float) -> float:
    """The mean of what is above 0 of a normal variable."""
    if mean < 0.0:
        if mean * mean > _UNLIKELY * variance:
            return 0.0
    elif mean * mean > _CERTAIN * variance:
        return mean
    sd = sqrt(variance)
    z = mean / sd
    return sd * DENSITY * exp(-0.5 * z * z) + mean * 0.5 * (1.0 + erf(z * _HALF))
