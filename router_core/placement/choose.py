"""Which of the scored rows serves: veto, dominance, sum, near ties; and what spoke for it.

Rules: no bonus beats the veto; a cold row never wins against a warm one that is free and would be done sooner; rows
that are nearly as good share the load in proportion to what they can sustain. The draw is a hash of the request, so
the same inputs give the same choice.

Where the policy packs, the fullest of the rows that meet their target serves instead, and idle ones stay idle.
Dominance is that of Pareto, relaxed by a small eps so that noise decides nothing.

Refuses to know where rows come from: those of a survey and those of a record are chosen from by the same steps.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import pairwise
from operator import attrgetter
from typing import Protocol, TypeVar

from router_core.placement.reasons import Reason
from router_core.placement.record import Alternative, AuthorityNote, Estimate, Factors
from router_core.placement.request import Endpoint
from router_core.policy.placement import PlacementPolicy, Weights

_SCORE = attrgetter("score")
_FILL = attrgetter("fill")


class Standing(Protocol):
    """A scored row as the choice sees it. ``reserve`` says why it only backs up the others, ``out`` (set while
    choosing) why it left the choice; ``fill`` is how many requests are there for each it serves at a time; ``age_ms`` is
    that of its picture, ``period_ms`` how often a new one comes."""

    out: str | None

    @property
    def key(self) -> Endpoint: ...
    @property
    def model(self) -> str: ...
    @property
    def est(self) -> Estimate: ...
    @property
    def f(self) -> Factors: ...
    @property
    def adj(self) -> float: ...
    @property
    def hint_bonus(self) -> float: ...
    @property
    def affinity_bonus(self) -> float: ...
    @property
    def score(self) -> float: ...
    @property
    def age_ms(self) -> int: ...
    @property
    def period_ms(self) -> int: ...
    @property
    def fill(self) -> float: ...
    @property
    def free(self) -> bool: ...
    @property
    def resident(self) -> bool: ...
    @property
    def reserve(self) -> str | None: ...


S = TypeVar("S", bound=Standing)


def seed_of(request_id: str, attempt: int) -> bytes:
    """Eight bytes that stand for the chance of one attempt."""
    return blake2b(f"{request_id}:{attempt}".encode(), digest_size=8).digest()


def choose(
    scored: list[S], policy: PlacementPolicy, seed: bytes, capacity: Callable[[S], float], *, full: bool
) -> list[S]:
    """``scored`` in the order in which rows would be tried, the chosen one first; empty stays empty. The order they come
    in says nothing: rows of equal score go by endpoint and model. ``capacity`` is what a row can sustain, in requests like this one per second.

    Marks every row that left the choice (``out``). Unless ``full``, rows that are too far behind the best to win
    are left unmarked.
    """
    if not scored:
        return []
    by_score = sorted(scored, key=_SCORE)
    if any(row.score == after.score for row, after in pairwise(by_score)):
        by_score.sort(key=_place)
    _veto(by_score, policy)
    _drop_slow_loads(by_score)
    packed = _packed(by_score, policy.pack_below) if policy.pack_below else None
    if packed is None:
        _drop_dominated(by_score, policy, full=full)
    standing = [row for row in by_score if row.out is None]
    if not standing:
        best = next(row for row in by_score if row.out not in ("veto", "cold"))
        best.out = None
        standing = [best]
    chosen = packed or _draw(standing, policy, seed, capacity)
    rest = [row for row in standing if row is not chosen]
    out = [row for row in by_score if row.out is not None]
    out.sort(key=_out_rank)
    return [chosen, *rest, *out]


def _place(scored: Standing) -> tuple[float, Endpoint, str]:
    return scored.score, scored.key, scored.model


def _out_rank(scored: Standing) -> int:
    if scored.out == "veto":
        return 2
    return 1 if scored.out == "cold" else 0


def _veto(rows: Sequence[Standing], policy: PlacementPolicy) -> None:
    above, below = policy.veto_above, policy.veto_needs_below
    costs = [worst(row) for row in rows]
    if max(costs) > above and min(costs) < below:
        for row, cost in zip(rows, costs, strict=True):
            if cost > above:
                row.out = "veto"


def worst(scored: Standing) -> float:
    """The largest factor, ``speed`` aside, which is relative and vetoes nothing."""
    f = scored.f
    return max(f.slo, f.pressure, f.memory, f.switch)


def _drop_slow_loads(rows: Sequence[Standing]) -> None:
    warm = [row.est.ect for row in rows if row.resident and row.free and row.out is None]
    if not warm:
        return
    soonest = min(warm)
    for row in rows:
        if not row.resident and row.out is None and row.est.ect > soonest:
            row.out = "cold"


def _packed(rows: Sequence[S], below: float) -> S | None:
    """The fullest row that keeps its promise all the same, the best of equals; warm ones first."""
    good = [row for row in rows if row.out is None and row.f.slo < below]
    warm = [row for row in good if row.resident]
    return max(warm or good, key=_FILL, default=None)


def _drop_dominated(rows: Sequence[Standing], policy: PlacementPolicy, *, full: bool) -> None:
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
                row.out = f"dominated:{other.key}"
                break
        else:
            if until is None:
                until = row.score + policy.tie_fixed + policy.tie_per_period


def dominates(other: Standing, row: Standing, eps: float) -> bool:
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


def near_ties(standing: list[S], policy: PlacementPolicy) -> list[S]:
    """The rows that share the draw: those within the margin of the best, without cold ones if any is resident."""
    best = standing[0]
    periods = min(1.0, best.age_ms / best.period_ms)
    limit = best.score + policy.tie_fixed + policy.tie_per_period * periods
    tied = [row for row in standing if row.score <= limit]
    warm = [row for row in tied if row.resident]
    return warm or tied


def draw_weights(tied: Sequence[S], capacity: Callable[[S], float]) -> list[float]:
    """Chances of tied rows, not normalised: what each can sustain, less the longer one waits there."""
    return [capacity(row) / (1.0 + row.est.wait) for row in tied]


def _draw(standing: list[S], policy: PlacementPolicy, seed: bytes, capacity: Callable[[S], float]) -> S:
    tied = near_ties(standing, policy)
    if len(tied) == 1:
        return tied[0]
    weights = draw_weights(tied, capacity)
    point = int.from_bytes(seed, "big") / 2**64 * sum(weights)
    for row, weight in zip(tied, weights, strict=True):
        point -= weight
        if point < 0.0:
            return row
    return tied[-1]


def reason_of(
    chosen: Standing, others: Sequence[Standing], degraded: Sequence[str], note: AuthorityNote
) -> Reason:
    """What made ``chosen`` win over ``others``: a bonus only if another row would win without it."""
    if degraded and any(kind != "digest_conflict" for kind in degraded):
        return Reason.DEGRADED
    if note.leads:
        return Reason.AUTHORITY
    if not (chosen.hint_bonus or chosen.affinity_bonus):
        return Reason.NATIVE
    rival = min([other.score for other in others if other.reserve is None], default=None)
    if rival is None:
        return Reason.NATIVE
    if chosen.hint_bonus and rival < chosen.score + chosen.hint_bonus:
        return Reason.HINT if note.first is None else Reason.AUTHORITY
    if chosen.affinity_bonus and rival < chosen.score + chosen.affinity_bonus:
        return Reason.SESSION
    return Reason.NATIVE


def alternative_of(row: Standing, chosen: Standing, weights: Weights) -> Alternative:
    """``row`` with the factor that speaks most against it."""
    theirs, ours = row.f, chosen.f
    gap, name = max(
        (weights.slo * (theirs.slo - ours.slo), "slo"),
        (weights.memory * (theirs.memory - ours.memory), "memory"),
        (weights.switch * (theirs.switch - ours.switch), "switch"),
        (weights.pressure * (theirs.pressure - ours.pressure), "pressure"),
        (weights.speed * (theirs.speed - ours.speed), "speed"),
        (row.adj - chosen.adj, "adj"),
    )
    return Alternative(row=row.key, score=row.score, top_factor=name if gap > 0.0 else "draw")
