"""Estimates turned into costs in 0..1, and costs into one score; lower is better.

The risk of missing a target is the normal tail of the log ratio, with the logistic approximation of the normal
distribution at scale 1.702 (Bowling et al., 2009). Rules: correlated inputs are merged before they get here; every
factor is in 0..1 for any input.
"""

from math import exp, inf, log

from router_core.placement.eligibility import Need
from router_core.placement.rows import Row

_NORMAL = 1.702
_SPREAD_ABOVE = 0.3
"""Above its target a time has a fixed spread, so that a vague estimate never excuses a late row."""
_CERTAIN = 20.0


def slo_cost(row: Row, need: Need, ttft: float, spread: float, tpot: float) -> float:
    """Chance that the row misses a target or fails, with ``ttft`` as its time to first token and ``tpot`` as that per
    token, which counts only if a pace was asked and something is generated."""
    target = need.ttft_s
    worst = log(ttft / target) / (spread if ttft <= target else _SPREAD_ABOVE) if ttft > 0.0 else -inf
    goal = need.tpot_s
    if goal is not None and tpot > 0.0 and need.output:
        pace = log(tpot / goal) / (row.s_gen if tpot <= goal else _SPREAD_ABOVE)
        if pace > worst:
            worst = pace
    if worst > _CERTAIN:
        return 1.0
    kept = 1.0 if worst < -_CERTAIN else 1.0 - 1.0 / (1.0 + exp(-_NORMAL * worst))
    return 1.0 - kept * row.success


def speed_cost(ect: float, least: float) -> float:
    """0 for the row that completes first, towards 1 for rows that take far longer."""
    return (ect - least) / (ect + least) if ect > least else 0.0


def affinity(hit: int, prompt: int, queued: int, mean_queued: float, bonus: float) -> float:
    """Bonus for a row that probably holds the session's last turn; it shrinks with the queue and ends when the row is
    clearly longer queued than the others."""
    if hit <= 0 or prompt <= 0 or (queued > 4.0 + mean_queued and queued > 1.5 * mean_queued):
        return 0.0
    return bonus * (hit / prompt) / (1.0 + queued / 2.0)
