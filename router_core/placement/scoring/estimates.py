"""How long one row would take for one request, in seconds, and how sure that is.

Waiting is a matter of counts: how many requests are there, how many of them one may expect to be done by now, and how
sure that is. Others' requests that no record shows yet are guessed from own ones. Rules: more requests, an older record
or more own work never make a row look better; queue depth, pending work and own reservations act through the wait
alone. Nothing is ranked here.
"""

from collections.abc import Iterable
from math import sqrt

from router_core.placement.candidates.candidate import Row
from router_core.placement.candidates.pace import DENSITY, Pace, excess, pace_of
from router_core.placement.filters.eligibility import Need
from router_core.placement.ledger import Ledger
from router_core.placement.record import Estimate
from router_core.policy.placement import PlacementPolicy
from router_core.profile.profiles import Profiles

_SPREAD_WAIT = 0.3
_SPREAD_PER_PERIOD = 0.1


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
        fresh = excess(over, variance) if over < 0.0 else DENSITY * sqrt(variance)
    gone = told + 0.5 * added
    if gone > k:
        gone = k
    since = age_ms / (1000.0 * pace.usual_s)
    if since < 1.0:
        gone *= since
    aged = excess(over - gone, variance + each * gone)
    return aged if aged > fresh else fresh


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
    waiting, as it keeps others waiting longer, and a load pays what the models that it evicts take to load again.
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
