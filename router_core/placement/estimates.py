"""How long one row would take for one request, in seconds, and how sure that is.

Rules: old good news fades towards the row's usual load, old bad news does not; queue depth, pending work and own
reservations act through the wait alone. Refuses to rank.
"""

import math
from collections.abc import Iterable

from router_core.placement.eligibility import Need
from router_core.placement.record import Estimate
from router_core.placement.rows import Row

_FADE_PERIODS = 3.0
_SPREAD_WAIT = 0.3
_SPREAD_PER_PERIOD = 0.1


def estimate(
    row: Row, need: Need, work_s: float, in_flight: int, age_ms: int, owed_s: float, hit: int
) -> Estimate:
    """Predicted times of ``row``.

    ``work_s`` is the outstanding work as last told, ``age_ms`` how long ago that was, ``owed_s`` own uncovered work
    with the herd multiplier applied, ``hit`` the prompt tokens that are probably cached there.
    """
    k = row.k
    periods = age_ms / row.period_ms
    if work_s < row.work_mean_s:
        work_s += (1.0 - math.exp2(-periods / _FADE_PERIODS)) * (row.work_mean_s - work_s)
    wait = work_s / k - age_ms / 1000.0
    if wait < 0.0:
        wait = 0.0
    wait += owed_s / k
    load = row.load_s if need.num_ctx is None else reload_s(row, need) or row.load_s
    prefill = (need.prompt - hit) * row.prefill_s_per_token
    tpot = (1.0 + row.beta * (k - 1 if in_flight >= k else in_flight)) * row.token_s
    net = 0.0 if row.is_self else need.transfer_s
    ttft = net + wait + load + prefill
    spread = _SPREAD_WAIT + _SPREAD_PER_PERIOD * periods
    if row.s_speed > spread:
        spread = row.s_speed
    if load and row.s_load > spread:
        spread = row.s_load
    return Estimate(
        wait=wait,
        load=load,
        prefill=prefill,
        net=net,
        tpot=tpot,
        ttft=ttft,
        ect=ttft + need.output * tpot,
        sd=1.0 if spread > 1.0 else spread,
    )


def completions(rows: Iterable[Row], need: Need, now: int) -> list[float]:
    """Seconds until each of ``rows`` would be done, by their records alone: as ``estimate`` without own work, cached
    prompts and other contexts."""
    found = []
    prompt, output = need.prompt, need.output
    for row in rows:
        age_ms = now - row.taken_ms
        if age_ms < 0:
            age_ms = 0
        k, work_s, in_flight = row.k, row.work_s, row.in_flight
        if work_s < row.work_mean_s:
            faded = 1.0 - math.exp2(-age_ms / row.period_ms / _FADE_PERIODS)
            work_s += faded * (row.work_mean_s - work_s)
        wait = work_s / k - age_ms / 1000.0
        found.append(
            (wait if wait > 0.0 else 0.0)
            + row.load_s
            + prompt * row.prefill_s_per_token
            + output * (1.0 + row.beta * (k - 1 if in_flight >= k else in_flight)) * row.token_s
        )
    return found


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
