"""Estimates turned into costs in 0..1, and costs into one score; lower is better.

The risk of missing a target is the normal tail of the log ratio, with the logistic approximation of the normal
distribution at scale 1.702 (Bowling et al., 2009). Rules: correlated inputs are merged before they get here; every
factor is in 0..1 for any input.
"""

import math

from router_core.placement.eligibility import Need
from router_core.placement.rows import Row

_NORMAL = 1.702
_SPREAD_ABOVE = 0.3


def risk(predicted: float, target: float, spread: float) -> float:
    """Chance that a quantity predicted as ``predicted`` with relative ``spread`` exceeds ``target``.

    Above the target the spread is fixed, so that a vague estimate never excuses a late row.
    """
    return _tail(_deviation(predicted, target, spread))


def slo_cost(row: Row, need: Need, ttft: float, spread: float, tpot: float) -> float:
    """Chance that the row misses a target or fails, with ``ttft`` as its time to first token and ``tpot`` as that per
    token, which counts only if a pace was asked and something is generated."""
    worst = _deviation(ttft, need.ttft_s, spread)
    target = need.tpot_s
    if target is not None and need.output:
        pace = _deviation(tpot, target, row.s_gen)
        if pace > worst:
            worst = pace
    return 1.0 - (1.0 - _tail(worst)) * row.success


def _deviation(predicted: float, target: float, spread: float) -> float:
    """By how many spreads ``predicted`` is above ``target``, in logs."""
    if predicted > target:
        return math.log(predicted / target) / _SPREAD_ABOVE
    return math.log(predicted / target) / spread if predicted > 0.0 else -math.inf


def _tail(deviation: float) -> float:
    if deviation > 20.0:
        return 1.0
    return 0.0 if deviation < -20.0 else 1.0 / (1.0 + math.exp(-_NORMAL * deviation))


def speed_cost(ect: float, least: float) -> float:
    """0 for the row that completes first, towards 1 for rows that take far longer."""
    total = ect + least
    return max(0.0, 2.0 * ect / total - 1.0) if total > 0.0 else 0.0


def affinity(hit: int, prompt: int, queued: int, mean_queued: float, bonus: float) -> float:
    """Bonus for a row that probably holds the session's last turn; it shrinks with the queue and ends when the row is
    clearly longer queued than the others."""
    if hit <= 0 or prompt <= 0 or (queued > 4.0 + mean_queued and queued > 1.5 * mean_queued):
        return 0.0
    return bonus * (hit / prompt) / (1.0 + queued / 2.0)
