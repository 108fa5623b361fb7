"""How long one row would take for one request, in seconds, and how sure that is.

Waiting is a matter of counts: how many requests are there, how many of them one may expect to be done by now, and how
sure that is. Others' requests that no record shows yet are guessed from own ones. Rules: more requests, an older record
or more own work never make a row look better; queue depth, pending work and own reservations act through the wait
alone. Nothing is ranked here.
"""

from collections.abc import Iterable
from math import erf, exp, sqrt

from msgspec import Struct

from router_core.placement.eligibility import Need
from router_core.placement.ledger import Ledger
from router_core.placement.record import Estimate
from router_core.placement.rows import Row
from router_core.policy.placement import PlacementPolicy
from router_core.profile.profiles import Profiles

_SPREAD_WAIT = 0.3
_SPREAD_PER_PERIOD = 0.1
_UNLIKELY = 16.0
"""Squared standard deviations below which nobody is expected to wait."""
_CERTAIN = 36.0
"""... above which the mean alone tells how many are, to a part in a billion."""
_DENSITY = 1.0 / sqrt(2.0 * 3.141592653589793)
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


def ahead_of(pace: Pace, added: float, age_ms: int, policy: PlacementPolicy) -> float:
    """How many requests have to end, in the mean, before one that is sent now is served: what is there beyond the places
    that are left for it.

    ``added`` are those that the record, ``age_ms`` old, does not show yet. Those that ended since are at most as many as
    were served, and how many is the less sure the more it may be. Where nobody waits by what is known, an older record is
    never better news.
    """
    told, k, fresh, variance = pace.told, pace.row.k, pace.ahead, policy.wait_doubt
    if pace.is_free and not added:
        return fresh
    each, over = policy.wait_doubt_each, told + added - k + 1.0
    if added:
        variance += each * added
        fresh = excess(over, variance) if over < 0.0 else _DENSITY * sqrt(variance)
    gone = told + 0.5 * added
    if gone > k:
        gone = k
    since = age_ms / (1000.0 * pace.usual_s)
    if since < 1.0:
        gone *= since
    aged = excess(over - gone, variance + each * gone)
    return aged if aged > fresh else fresh


def excess(mean: float, variance: float) -> float:
    """The mean of what is above 0 of a normal variable."""
    if mean < 0.0:
        if mean * mean > _UNLIKELY * variance:
            return 0.0
    elif mean * mean > _CERTAIN * variance:
        return mean
    sd = sqrt(variance)
    z = mean / sd
    return sd * _DENSITY * exp(-0.5 * z * z) + mean * 0.5 * (1.0 + erf(z * _HALF))


def herd_of(m_r: float, policy: PlacementPolicy) -> float:
    """By how much own work that no record shows counts: for itself, and for what other routers probably sent."""
    return max(1.0, policy.herd_share * m_r)


def estimate(
    pace: Pace,
    need: Need,
    ahead: float,
    tpot: float,
    age_ms: int,
    hit: int,
    decode_share: float,
    wait_by_size: float,
) -> Estimate:
    """Predicted times of a row.

    ``ahead`` is how many have to end there before, ``tpot`` as last told ``age_ms`` ago, ``hit`` the prompt tokens that
    are probably cached there. What others pay is part of the cost: a request that is larger than usual pays more for
    waiting, as it keeps others waiting longer, and a load pays for those who
    want the models that it evicts.
    """
    row = pace.row
    wait_s = ahead * pace.turn_s
    load, sd = row.load_s, _SPREAD_WAIT + _SPREAD_PER_PERIOD * age_ms / row.period_ms
    if pace.spread > sd:
        sd = pace.spread
    if need.num_ctx is not None and (again_s := reload_s(row, need)):
        load, sd = again_s, max(sd, row.s_load)
    if sd > 1.0:
        sd = 1.0
    prompt, output = need.prompt, need.output
    prefill = row.first_s + (prompt - hit) * row.prefill_s_per_token
    net = 0.0 if row.is_self else need.transfer_s + row.way_s
    ttft = net + wait_s + load + prefill
    decode = output * tpot
    cost = ttft + row.debt_s + decode_share * decode
    if ahead:
        own_s = prompt * row.prefill_s_per_token + output * row.full_token_s
        cost += wait_by_size * ahead * own_s / row.k
    return Estimate(wait_s, load, prefill, net, tpot, ttft, ttft + decode, sd, ahead, cost)


def costs_of(paces: Iterable[Pace], need: Need, now: int, policy: PlacementPolicy) -> list[float]:
    """What each row would cost, nearly, by their records alone: without own work, cached prompts, other contexts, and
    without doubt about how many are done by now."""
    found = []
    prompt, output, share, by_size = need.prompt, need.output, policy.decode_share, policy.wait_by_size
    for pace in paces:
        row = pace.row
        prefill_s = prompt * row.prefill_s_per_token
        cost = row.way_s + row.load_s + row.debt_s + row.first_s + prefill_s + share * output * pace.tpot_s
        k, told = row.k, pace.told
        if told >= k:
            since = (now - row.taken_ms) / (1000.0 * pace.usual_s)
            over = told + 1.0 - k * (1.0 + (since if since < 1.0 else 1.0))
            if over > 0.0:
                cost += over * (pace.turn_s + by_size * (prefill_s + output * row.full_token_s) / k)
        found.append(cost)
    return found


def waiting_s(row: Row, ledger: Ledger, profiles: Profiles, policy: PlacementPolicy, now: int) -> float:
    """Seconds before a request that is sent to ``row`` now is served, whatever it asks: by what is told there, and by own
    work that no record shows yet; on the own host by what is in hand."""
    pace, added = pace_of(row, profiles, policy), 0.0
    if row.is_self:
        busy = ledger.local.in_flight(row.endpoint) + row.foreign
        return pace.turn_s * excess(busy - row.k + 1.0, policy.wait_doubt)
    if (owed := ledger.owed.get(row.key)) is not None:
        added = float(owed.requests)
    return pace.turn_s * ahead_of(pace, added, max(0, now - row.taken_ms), policy)


def reload_s(row: Row, need: Need) -> float:
    """Seconds that the engine would spend on loading a resident model anew, because the request asks for another
    context; 0 if it would not."""
    if need.num_ctx is None or not row.resident or row.resident_ctx in (None, need.num_ctx):
        return 0.0
    return row.reload_s


def capacity(row: Row, need: Need) -> float:
    """Requests like this one per second that the row can sustain with its batch full."""
    busy = need.prompt * row.prefill_s_per_token + need.output * row.full_token_s
    return row.k / (busy if busy > 1e-6 else 1e-6)
