"""Estimates turned into costs in 0..1, and costs into one score; lower is better.

The risk of missing a target is the normal tail of the log ratio, with the logistic approximation of the normal
distribution at scale 1.702 (Bowling et al., 2009): at ratio ``x`` and spread ``s`` the odds are ``x ** (1.702 / s)``.
Rules: correlated inputs are merged before they get here; every factor is in 0..1 for any input.
"""

from router_core.placement.candidates.candidate import Row
from router_core.placement.filters.eligibility import Need

_NORMAL = 1.702
_LATE = _NORMAL / 0.3
"""Above its target a time has a fixed spread, so that a vague estimate never excuses a late row."""
_HOPELESS = 400.0


def slo_cost(row: Row, need: Need, ttft: float, spread: float, tpot: float) -> float:
    """Chance that the row misses a target or fails, with ``ttft`` as its time to first token and ``tpot`` as that per
    token, which counts only if there is a target for it and something is generated."""
    late, goal = ttft / need.ttft_s, need.tpot_s
    if late > _HOPELESS:
        return 1.0
    odds: float = late ** (_NORMAL / spread if late <= 1.0 else _LATE)
    if goal is not None and need.output:
        slow = tpot / goal
        if slow > _HOPELESS:
            return 1.0
        slow **= _NORMAL / row.s_gen if slow <= 1.0 else _LATE
        if slow > odds:
            odds = slow
    return 1.0 - row.success / (1.0 + odds)


def affinity(hit: int, prompt: int, queued: int, mean_queued: float, bonus: float) -> float:
    """Bonus for a row that probably holds the session's last turn; it shrinks with the queue and ends when the row is
    clearly longer queued than the others."""
    if hit <= 0 or prompt <= 0 or (queued > 4.0 + mean_queued and queued > 1.5 * mean_queued):
        return 0.0
    return bonus * (hit / prompt) / (1.0 + queued / 2.0)
