"""How long one row would take for one request, in seconds, and how sure that is.

Rules: old good news fades towards the row's usual load, old bad news does not; queue depth, pending work and own
reservations act through the wait alone. Refuses to rank.
"""

from collections.abc import Iterable
from math import exp2

from msgspec import Struct

from router_core.placement.eligibility import Need
from router_core.placement.ledger import Ledger
from router_core.placement.record import Estimate
from router_core.placement.rows import Row
from router_core.policy.placement import Weights

_FADE_PERIODS = 3.0
_SPREAD_WAIT = 0.3
_SPREAD_PER_PERIOD = 0.1


class Pace(Struct, frozen=True, gc=False):
    """A row with what follows from its record alone, for any request, so that it is worked out once per snapshot.

    ``wait_s`` is its outstanding work per useful slot, ``fade_s`` how much more is usual (0 if less), ``tpot_s`` the
    seconds per token beside those in flight, ``spread`` that of its speed and, where it would have to load, of loading.
    ``worst`` is the largest of its factors that no request moves, ``fixed`` what these add to its score.
    """

    row: Row
    wait_s: float
    fade_s: float
    tpot_s: float
    spread: float
    worst: float
    fixed: float


def pace_of(row: Row, weights: Weights) -> Pace:
    """The pace of ``row`` by its record."""
    k, memory, switch, pressure = row.k, row.memory, row.switch, row.pressure
    spread = row.s_load if row.load_s and row.s_load > row.s_speed else row.s_speed
    fade_s = (row.work_mean_s - row.work_s) / k if row.work_mean_s > row.work_s else 0.0
    worst = max(memory, switch, pressure)
    fixed = weights.memory * memory + weights.switch * switch + weights.pressure * pressure
    return Pace(row, row.work_s / k, fade_s, tpot_s(row, row.in_flight), spread, worst, fixed)


def tpot_s(row: Row, in_flight: int) -> float:
    """Seconds per token of one more request beside ``in_flight`` others."""
    beside = row.k - 1
    return (1.0 + row.beta * (in_flight if in_flight < beside else beside)) * row.token_s


def estimate(
    pace: Pace, need: Need, wait_s: float, tpot: float, age_ms: int, owed_s: float, hit: int
) -> Estimate:
    """Predicted times of a row.

    ``wait_s`` and ``tpot`` are as last told, ``age_ms`` how long ago that was, ``owed_s`` own uncovered work with the herd
    multiplier applied, ``hit`` the prompt tokens that are probably cached there.
    """
    row = pace.row
    periods = age_ms / row.period_ms
    if pace.fade_s:
        wait_s += (1.0 - exp2(periods / -_FADE_PERIODS)) * pace.fade_s
    wait_s -= age_ms / 1000.0
    if wait_s < 0.0:
        wait_s = 0.0
    if owed_s:
        wait_s += owed_s / row.k
    load, sd = row.load_s, _SPREAD_WAIT + _SPREAD_PER_PERIOD * periods
    if pace.spread > sd:
        sd = pace.spread
    if need.num_ctx is not None and (again_s := reload_s(row, need)):
        load, sd = again_s, max(sd, row.s_load)
    if sd > 1.0:
        sd = 1.0
    prefill = (need.prompt - hit) * row.prefill_s_per_token
    net = 0.0 if row.is_self else need.transfer_s + row.way_s
    ttft = net + wait_s + load + prefill
    return Estimate(wait_s, load, prefill, net, tpot, ttft, ttft + need.output * tpot, sd)


def completions(paces: Iterable[Pace], need: Need, now: int) -> list[float]:
    """Seconds until each row would be done, by their records alone: as ``estimate`` without own work, cached prompts and
    other contexts."""
    found = []
    prompt, output = need.prompt, need.output
    for pace in paces:
        row = pace.row
        age_ms = now - row.taken_ms
        if age_ms < 0:
            age_ms = 0
        wait_s = pace.wait_s - age_ms / 1000.0
        if pace.fade_s:
            wait_s += (1.0 - exp2(age_ms / row.period_ms / -_FADE_PERIODS)) * pace.fade_s
        found.append(
            (wait_s if wait_s > 0.0 else 0.0)
            + row.way_s
            + row.load_s
            + prompt * row.prefill_s_per_token
            + output * pace.tpot_s
        )
    return found


def waiting_s(row: Row, ledger: Ledger, now: int) -> float:
    """Seconds of work before a request that is sent to ``row`` now, whatever it asks: what is told there and is left of it,
    and own work that no record shows yet; on the own host what is in hand."""
    if row.is_self:
        return ledger.local.work_s(row.endpoint, row.slots, now, row.foreign) / row.k
    told_s = max(0.0, row.work_s / row.k - max(0, now - row.taken_ms) / 1000.0)
    owed = ledger.owed.get(row.key)
    return told_s if owed is None else told_s + owed.work_s / row.k


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
