"""Which of the scored rows serves: veto, dominance, sum, near ties.

Rules: no bonus beats the veto; a cold row never wins against a warm one that is free and would be done sooner; rows
that are nearly as good share the load in proportion to what they can sustain. The draw is a hash of the request, so
the same inputs give the same choice.

Dominance is that of Pareto, relaxed by a small eps so that noise decides nothing.
"""

from hashlib import blake2b
from operator import attrgetter

from router_core.placement.eligibility import Need
from router_core.placement.estimates import capacity
from router_core.placement.survey import Scored
from router_core.policy.placement import PlacementPolicy, Weights

_SCORE = attrgetter("score")


def seed_of(request_id: str, attempt: int) -> bytes:
    """Eight bytes that stand for the chance of one attempt."""
    return blake2b(f"{request_id}:{attempt}".encode(), digest_size=8).digest()


def choose(
    scored: list[Scored], need: Need, policy: PlacementPolicy, seed: bytes, *, full: bool
) -> list[Scored]:
    """``scored`` in the order in which rows would be tried, the chosen one first; empty stays empty. Rows of equal
    score keep their order.

    Marks every row that left the choice (``out``). Unless ``full``, rows that are too far behind the best to win
    are left unmarked.
    """
    if not scored:
        return []
    by_score = sorted(scored, key=_SCORE)
    _veto(by_score, policy)
    _drop_slow_loads(by_score)
    _drop_dominated(by_score, policy, full=full)
    standing = [row for row in by_score if row.out is None]
    if not standing:
        best = next(row for row in by_score if row.out != "veto")
        best.out = None
        standing = [best]
    chosen = _draw(standing, need, policy, seed)
    rest = [row for row in standing if row is not chosen]
    out = [row for row in by_score if row.out is not None]
    out.sort(key=_out_rank)
    return [chosen, *rest, *out]


def _out_rank(scored: Scored) -> int:
    if scored.out == "veto":
        return 2
    return 1 if scored.out == "cold" else 0


def _veto(rows: list[Scored], policy: PlacementPolicy) -> None:
    above, below = policy.veto_above, policy.veto_needs_below
    costs = [worst(row) for row in rows]
    if max(costs) > above and min(costs) < below:
        for row, cost in zip(rows, costs, strict=True):
            if cost > above:
                row.out = "veto"


def worst(scored: Scored) -> float:
    """The largest factor, ``speed`` aside, which is relative and vetoes nothing."""
    row = scored.row
    return max(scored.slo, row.pressure, row.memory, row.switch)


def _drop_slow_loads(rows: list[Scored]) -> None:
    warm = [row.est.ect for row in rows if row.resident and row.free and row.out is None]
    if not warm:
        return
    soonest = min(warm)
    for row in rows:
        if not row.resident and row.out is None and row.est.ect > soonest:
            row.out = "cold"


def _drop_dominated(rows: list[Scored], policy: PlacementPolicy, *, full: bool) -> None:
    eps = policy.pareto_eps
    reach = eps * total(policy.weights)
    until = None
    for row in rows:
        if row.out is not None:
            continue
        if until is not None and row.score > until and not full:
            break
        limit = row.score + reach
        for other in rows:
            if other.score > limit:
                break
            if other is not row and dominates(other, row, eps):
                row.out = f"dominated:{other.row.key}"
                break
        else:
            if until is None:
                until = row.score + policy.tie_fixed + policy.tie_per_period


def dominates(other: Scored, row: Scored, eps: float) -> bool:
    """True if ``other`` is nowhere worse than ``row`` by more than ``eps``, somewhere better by more, and pays no
    more besides."""
    a, b = row.f, other.f
    return (
        b.slo <= a.slo + eps
        and b.memory <= a.memory + eps
        and b.switch <= a.switch + eps
        and b.pressure <= a.pressure + eps
        and b.speed <= a.speed + eps
        and other.adj <= row.adj
        and (
            b.slo < a.slo - eps
            or b.memory < a.memory - eps
            or b.switch < a.switch - eps
            or b.pressure < a.pressure - eps
            or b.speed < a.speed - eps
        )
    )


def total(weights: Weights) -> float:
    """Sum of all weights: the most that scores can differ by, bonuses aside."""
    return weights.slo + weights.memory + weights.switch + weights.pressure + weights.speed


def near_ties(standing: list[Scored], policy: PlacementPolicy) -> list[Scored]:
    """The rows that share the draw: those within the margin of the best, without cold ones if any is resident."""
    best = standing[0]
    periods = min(1.0, best.age_ms / best.row.period_ms)
    limit = best.score + policy.tie_fixed + policy.tie_per_period * periods
    tied = [row for row in standing if row.score <= limit]
    warm = [row for row in tied if row.resident]
    return warm or tied


def draw_weights(tied: list[Scored], need: Need) -> list[float]:
    """Chances of tied rows, not normalised: what each can sustain, less the longer one waits there."""
    return [capacity(row.row, need) / (1.0 + row.est.wait) for row in tied]


def _draw(standing: list[Scored], need: Need, policy: PlacementPolicy, seed: bytes) -> Scored:
    tied = near_ties(standing, policy)
    if len(tied) == 1:
        return tied[0]
    weights = draw_weights(tied, need)
    point = int.from_bytes(seed, "big") / 2**64 * sum(weights)
    for row, weight in zip(tied, weights, strict=True):
        point -= weight
        if point < 0.0:
            return row
    return tied[-1]
