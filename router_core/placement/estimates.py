"""How long one row would take for one request, in seconds, and how sure that is.

Rules: old good news fades towards the row's usual load, old bad news does not; queue depth, pending work and own
reservations act through the wait alone. Refuses to rank.
"""

import math

from router_core.placement.eligibility import Need
from router_core.placement.record import Estimate
from router_core.placement.rows import Row

_FADE_PERIODS = 3.0
_SPREAD_LEAST = 0.1
_SPREAD_WAIT = 0.3
_SPREAD_PER_PERIOD = 0.1


def estimate(
    row: Row, need: Need, *, work_s: float, in_flight: int, age_s: float, owed_s: float, hit: int
) -> Estimate:
    """Predicted times of ``row``.

    ``work_s`` is the outstanding work as last told, ``age_s`` how long ago that was, ``owed_s`` own uncovered work
    with the herd multiplier applied, ``hit`` the prompt tokens that are probably cached there.
    """
    periods = 1000.0 * age_s / row.period_ms
    if work_s < row.work_mean_s:
        work_s += (1.0 - math.exp2(-periods / _FADE_PERIODS)) * (row.work_mean_s - work_s)
    k = row.k
    wait = max(0.0, work_s / k - age_s) + owed_s / k
    load = reload_s(row, need) or row.load_s
    prefill = (need.prompt - hit) * row.prefill_s_per_token
    tpot = (1.0 + row.beta * (min(k, in_flight + 1) - 1)) * row.token_s
    net = 0.0 if row.is_self else need.transfer_s
    ttft = net + wait + load + prefill
    spread = max(_SPREAD_WAIT + _SPREAD_PER_PERIOD * periods, row.s_speed, row.s_load if load else 0.0)
    return Estimate(
        wait=wait,
        load=load,
        prefill=prefill,
        net=net,
        tpot=tpot,
        ttft=ttft,
        ect=ttft + need.output * tpot,
        sd=min(1.0, max(_SPREAD_LEAST, spread)),
    )


def reload_s(row: Row, need: Need) -> float:
    """Seconds that the engine would spend on loading a resident model anew, because the request asks for another
    context; 0 if it would not."""
    if need.num_ctx is None or not row.resident or row.resident_ctx in (None, need.num_ctx):
        return 0.0
    return row.reload_s


def capacity(row: Row, need: Need) -> float:
    """Requests like this one per second that the row can sustain with its batch full."""
    busy = need.prompt * row.prefill_s_per_token + need.output * row.token_s * (1.0 + row.beta * (row.k - 1))
    return row.k / max(busy, 1e-6)
