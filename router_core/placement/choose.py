"""Which of the scored rows serves: veto, dominance, sum, near ties; and what spoke for it.

Rules: no bonus beats the veto; a cold row never wins against a warm one that is free and would be done sooner; rows
that are nearly as good share the load in proportion to what they can sustain. The draw is a hash of the request, so
the same inputs give the same choice.

Where the policy packs, the fullest of the rows that meet their target serves instead, and idle ones stay idle.
Dominance is that of Pareto, relaxed by a small eps so that noise decides nothing. Rows are judged from the best on, and
only as far as a draw could reach; what became of the others is found out for who asks (``ranking``).

Refuses to know where rows come from: those of a survey and those of a record are chosen from by the same steps.
"""

import math
from collections.abc import Callable, Sequence
from hashlib import blake2b
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

from router_core.placement.reasons import Action, Reason
from router_core.placement.record import Alternative, AuthorityNote, Estimate
from router_core.placement.request import Endpoint
from router_core.policy.placement import PlacementPolicy, Weights

_SCORE = attrgetter("score")
_FILL = attrgetter("fill")
_VETO, _COLD = "veto", "cold"
_FEW = 2
_factors = attrgetter("slo", "memory", "switch", "pressure", "speed", "spill")


class Standing(Protocol):
    """A scored row as the choice sees it. ``reserve`` says why it only backs up the others; ``fill`` is how many
    requests are there for each it serves at a time; ``age_ms`` is that of its picture, ``period_ms`` how often a new
    one comes; ``samples`` is how often it was tried from here, None if that is not told."""

    @property
    def key(self) -> Endpoint: ...
    @property
    def model(self) -> str: ...
    @property
    def est(self) -> Estimate: ...
    @property
    def slo(self) -> float: ...
    @property
    def memory(self) -> float: ...
    @property
    def switch(self) -> float: ...
    @property
    def pressure(self) -> float: ...
    @property
    def speed(self) -> float: ...
    @property
    def spill(self) -> float: ...
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
    def samples(self) -> int | None: ...
    @property
    def reserve(self) -> str | None: ...


S = TypeVar("S", bound=Standing)


def seed_of(request_id: str, attempt: int) -> bytes:
    """Eight bytes that stand for the chance of one attempt."""
    return blake2b(f"{request_id}:{attempt}".encode(), digest_size=8).digest()


def choose(
    scored: Sequence[S], policy: PlacementPolicy, seed: bytes, capacity: Callable[[S], float]
) -> list[S]:
    """``scored`` by score, but the chosen one first; empty stays empty. The order they come in says nothing: rows of
    equal score go by endpoint and model. ``capacity`` is what a row can sustain, in requests like this one per
    second."""
    by_score = _by_score(scored)
    if len(by_score) < 2:
        return by_score
    field = _Field(by_score, policy)
    chosen = field.packed or _draw(_standing(field, policy), policy, seed, capacity)
    if chosen is by_score[0]:
        return by_score
    return [chosen, *[row for row in by_score if row is not chosen]]


def ranking(order: Sequence[S], policy: PlacementPolicy) -> list[tuple[S, str | None]]:
    """Rows as ``choose`` ordered them, in the order in which they would be tried, each with the reason for which it
    left the choice: ``veto``, ``cold``, ``dominated:<row>``, None if it did not. The first is the chosen one, come what
    may."""
    if len(order) < 2:
        return [(row, None) for row in order]
    field, first = _Field(_by_score(order), policy), order[0]
    rest = [(row, field.out(row)) for row in order[1:]]
    if None not in [out for _, out in rest] and field.out(first) is not None:
        stays = next(row for row in field.rows if field.out(row) not in (_VETO, _COLD))
        rest = [(row, None if row is stays else out) for row, out in rest]
    rest.sort(key=_rank)
    return [(first, None), *rest]


def _rank(judged: tuple[Standing, str | None]) -> int:
    out = judged[1]
    if out is None:
        return 0
    return 3 if out == _VETO else 2 if out == _COLD else 1


def _by_score(scored: Sequence[S]) -> list[S]:
    rows = sorted(scored, key=_SCORE)
    if len({row.score for row in rows}) < len(rows):
        rows.sort(key=_place)
    return rows


def _place(scored: Standing) -> tuple[float, Endpoint, str]:
    return scored.score, scored.key, scored.model


def _standing(field: "_Field[S]", policy: PlacementPolicy) -> list[S]:
    """The rows that did not leave the choice, as far behind the best of them as a draw could reach; if all left, the
    best of those that only others dominate."""
    standing: list[S] = []
    until = math.inf
    for row in field.rows:
        if row.score > until:
            break
        if field.stands(row):
            if not standing:
                until = row.score + policy.tie_fixed + policy.tie_per_period
            standing.append(row)
    return standing or [next(row for row in field.rows if field.out(row) not in (_VETO, _COLD))]


class _Field(Generic[S]):
    """Scored rows by score, and what hangs on all of them, found out when a row first asks. ``packed`` is the row that a
    packing policy takes, whatever dominates it."""

    def __init__(self, by_score: Sequence[S], policy: PlacementPolicy) -> None:
        self.rows = by_score
        self.packed: S | None = None
        self._policy = policy
        self._reach = policy.pareto_eps * total(policy.weights)
        self._vetoes: bool | None = None
        self._soonest_s: float | None = None
        self._least: tuple[float, ...] | None = None
        self._asked = 0
        if policy.pack_below:
            self.packed = self._fullest(policy.pack_below)

    def out(self, row: S) -> str | None:
        """Why ``row`` leaves the choice, None if it stands."""
        if self._vetoed(row):
            return _VETO
        if self._too_cold(row):
            return _COLD
        beater = self._beater(row)
        return None if beater is None else f"dominated:{beater.key}"

    def stands(self, row: S) -> bool:
        """Whether ``row`` does not leave the choice."""
        return not self._vetoed(row) and not self._too_cold(row) and self._beater(row) is None

    def _too_cold(self, row: S) -> bool:
        return not row.resident and row.est.ect > self._soonest_warm_s()

    def _beater(self, row: S) -> S | None:
        """The best row that dominates ``row``, None if no row does or all that counts is how full they are."""
        if self.packed is not None:
            return None
        eps, limit = self._policy.pareto_eps, row.score + self._reach
        self._asked += 1
        if self._asked > _FEW and self._is_unbeaten(row, eps):
            return None
        for other in self.rows:
            if other.score > limit:
                return None
            if other is not row and dominates(other, row, eps):
                return other
        return None

    def _is_unbeaten(self, row: S, eps: float) -> bool:
        """True if no row at all is better than ``row`` by more than ``eps`` in any factor, as among alike rows."""
        if self._least is None:
            columns = zip(*[_factors(other) for other in self.rows], strict=True)
            self._least = tuple([min(column) for column in columns])
        slo, memory, switch, pressure, speed, spill = self._least
        return (
            slo >= row.slo - eps
            and speed >= row.speed - eps
            and pressure >= row.pressure - eps
            and memory >= row.memory - eps
            and switch >= row.switch - eps
            and spill >= row.spill - eps
        )

    def _fullest(self, below: float) -> S | None:
        """The fullest row that keeps its promise all the same, the best of equals; warm ones first."""
        good = [row for row in self.rows if row.slo < below and not self._vetoed(row)]
        warm = [row for row in good if row.resident]
        cold = [row for row in good if row.est.ect <= self._soonest_warm_s()] if not warm else []
        return max(warm or cold, key=_FILL, default=None)

    def _vetoed(self, row: S) -> bool:
        if self._vetoes is False or worst(row) <= self._policy.veto_above:
            return False
        if self._vetoes is None:
            below = self._policy.veto_needs_below
            self._vetoes = any(worst(other) < below for other in self.rows)
        return self._vetoes

    def _soonest_warm_s(self) -> float:
        if self._soonest_s is None:
            warm = [row.est.ect for row in self.rows if row.resident and row.free and not self._vetoed(row)]
            self._soonest_s = min(warm, default=math.inf)
        return self._soonest_s


def worst(scored: Standing) -> float:
    """The largest factor, ``speed`` aside, which is relative and vetoes nothing."""
    return max(scored.slo, scored.pressure, scored.memory, scored.switch, scored.spill)


def dominates(b: Standing, a: Standing, eps: float) -> bool:
    """True if ``b`` is nowhere worse than ``a`` by more than ``eps``, somewhere better by more, and pays no more
    besides."""
    return (
        b.slo <= a.slo + eps
        and b.speed <= a.speed + eps
        and b.pressure <= a.pressure + eps
        and b.memory <= a.memory + eps
        and b.switch <= a.switch + eps
        and b.spill <= a.spill + eps
        and b.adj <= a.adj
        and (
            b.slo < a.slo - eps
            or b.speed < a.speed - eps
            or b.pressure < a.pressure - eps
            or b.memory < a.memory - eps
            or b.switch < a.switch - eps
            or b.spill < a.spill - eps
        )
    )


def total(weights: Weights) -> float:
    """Sum of all weights: the most that scores can differ by, bonuses aside."""
    return weights.slo + weights.memory + weights.switch + weights.pressure + weights.spill + weights.speed


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


def action_of(*, is_cloud: bool, resident: bool) -> Action:
    """What serving by such a row means."""
    if is_cloud:
        return Action.SPILL
    return Action.ROUTE if resident else Action.ROUTE_COLD


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
    gap, name = max(
        (weights.slo * (row.slo - chosen.slo), "slo"),
        (weights.memory * (row.memory - chosen.memory), "memory"),
        (weights.switch * (row.switch - chosen.switch), "switch"),
        (weights.pressure * (row.pressure - chosen.pressure), "pressure"),
        (weights.speed * (row.speed - chosen.speed), "speed"),
        (weights.spill * (row.spill - chosen.spill), "spill"),
        (row.adj - chosen.adj, "adj"),
    )
    return Alternative(row=row.key, score=row.score, top_factor=name if gap > 0.0 else "draw")
