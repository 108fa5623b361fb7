"""Exploration: route a small share of requests to candidates with few samples, where it costs nobody.

Rules: a lot of the request's own seed says when, so a replay says the same; nothing is tried on a request that a hint,
a session or an authority placed, that failed before, or that nothing good is left for; the row tried is warm, idle, not
known to be clearly slower, no looser a match, no more pressed, no dearer, and both it and the chosen one are all but sure to keep the targets.
Nothing is ranked here.
"""

from collections.abc import Sequence

from router_core.placement.record import AuthorityNote
from router_core.placement.selection.choose import S, Standing, seed_of
from router_core.policy.placement import PlacementPolicy

SLOWER_MOST = 1.3
"""A row that was tried and is slower by more than this would cost the one who waits."""
_LOTS = 2**32


def explored(
    chosen: S,
    rows: Sequence[S],
    policy: PlacementPolicy,
    seed: bytes,
    request_id: str,
    degraded: Sequence[str],
    note: AuthorityNote,
) -> S | None:
    """The best of ``rows`` to try in place of ``chosen``; None nearly always: it stands.

    The lot is the lower half of ``seed``, of which the draw among near ties reads the upper one.
    """
    if int.from_bytes(seed[4:]) >= policy.explore_share * _LOTS:
        return None
    if degraded or note.leads or seed != seed_of(request_id, 1):
        return None
    if chosen.hint_bonus or chosen.affinity_bonus or chosen.slo >= policy.explore_risk:
        return None
    return next((row for row in rows if row is not chosen and _costs_nobody(row, chosen, policy)), None)


def _costs_nobody(row: Standing, chosen: Standing, policy: PlacementPolicy) -> bool:
    return (
        row.samples is not None
        and row.samples < policy.explore_samples
        and (row.samples == 0 or row.est.ect <= SLOWER_MOST * chosen.est.ect)
        and row.resident
        and row.fill == 0.0
        and row.slo < policy.explore_risk
        and row.adj <= chosen.adj
        and row.spill <= chosen.spill
        and row.pressure <= chosen.pressure + policy.pareto_eps
        and row.worst <= policy.veto_above
    )
