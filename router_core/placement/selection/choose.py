"""Which of the scored rows serves: veto, dominance, sum, near ties; and what spoke for it.

Rules: no bonus beats the veto; a cold row never wins against a warm one that is free and would be done sooner; rows
that are nearly as good share the load in proportion to what they can sustain. The draw is a hash of the request, so
the same inputs give the same choice.

Of near ties that are free and warm those go first that were never tried: what one answer there tells is worth more than
the little that one could be better. Where the policy packs, the fullest of the rows that meet their target serves instead, and idle ones stay idle.
Dominance is that of Pareto, relaxed by a small eps so that noise decides nothing. Rows are judged from the best on, and
only as far as a draw could reach; what became of the others is found out for who asks (``ranking``).

It does not matter where rows come from: those of a survey and those of a record are chosen from by the same
steps.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

from router_core.placement.reasons import Action, Reason
from router_core.placement.record import Alternative, AuthorityNote, Estimate
from router_core.placement.request.request import Endpoint
from router_core.policy.placement import PlacementPolicy, Weights

ROUNDING = 1e-9
"""Scores that differ by less do so by the order of additions alone."""
_SCORE = attrgetter("score")
_FILL = attrgetter("fill")
_VETO, _COLD = "veto", "cold"
_FEW = 2
_LOTS = 2.0**64
_ROUTE, _NATIVE = Action.ROUTE, Reason.NATIVE
_SPOKE = ("slo", "memory", "switch", "pressure", "speed", "spill", "adj")
_factors = attrgetter("slo", "memory", "switch", "pressure", "speed", "spill")


class Standing(Protocol):
    """A scored row as the choice sees it. ``reserve`` says why it only backs up the others; ``fill`` is how many
    requests are there for each it serves at a time; ``age_ms`` is that of its picture, ``period_ms`` how often a new
    one comes; ``samples`` is how often it was tried from here, None if that is not told; ``worst`` is the largest factor,
    ``speed`` aside, which is relative and vetoes nothing."""

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
    def worst(self) -> float: ...
    @property
    def reserve(self) -> str | None: ...


S = TypeVar("S", bound=Standing)


def seed_of(request_id: str, attempt: int) -> bytes:
    """Eight bytes that stand for the chance of one attempt."""
    return blake2b(f"{request_id}:{attempt}".encode(), digest_size=8).digest()


class Field(Struct, Generic[S]):
    """Scored rows by score, and what became of each.

    Rows with a factor ``above`` are vetoed, those within ``reach`` of a row's score may dominate it, by more than ``eps``.
    ``packed`` is the row that a packing policy takes, whatever dominates it. The rest is found out when it is first
    asked for: why the first rows are out, whether the veto holds, how soon a free warm row would be done, the least of
    each factor, and how often no row was dominated that looked as if.
    """

    rows: list[S]
    policy: PlacementPolicy
    above: float
    eps: float
    reach: float
    packed: S | None = None
    outs: list[str | None] = []
    vetoes: bool | None = None
    soonest_s: float | None = None
    least: tuple[float, ...] | None = None
    vain: int = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Field) and self.rows == other.rows and self.policy == other.policy

    def standing(self) -> list[S]:
        """The rows that did not leave the choice, as far behind the best of them as a draw could reach; if all left, the
        best of those that only others dominate."""
        policy, until, outs = self.policy, math.inf, self.outs
        standing: list[S] = []
        outs.clear()
        for row in self.rows:
            if row.score > until:
                break
            outs.append(out := self._out(row))
            if out is None:
                if not standing:
                    until = row.score + policy.tie_fixed + policy.tie_per_period
                standing.append(row)
        return standing or [self._best_beaten()]

    def ranking(self, first: S) -> list[tuple[S, str | None]]:
        """All rows in the order in which they would be tried, each with the reason for which it left the choice: ``veto``,
        ``cold``, ``dominated:<row>``, None if it did not. ``first`` is the chosen one, come what may."""
        stand: list[tuple[S, str | None]] = [(first, None)]
        beaten: list[tuple[S, str | None]] = []
        cold: list[tuple[S, str | None]] = []
        vetoed: list[tuple[S, str | None]] = []
        stays = None
        outs = [*self.outs, *[self._out(row) for row in self.rows[len(self.outs) :]]]
        for row, out in zip(self.rows, outs, strict=True):
            if row is first:
                stays = out
            elif out is None:
                stand.append((row, None))
            else:
                (vetoed if out is _VETO else cold if out is _COLD else beaten).append((row, out))
        if len(stand) == 1 and beaten and stays is not None:
            best = self._best_beaten()
            stand += [(row, None) for row, _ in beaten if row is best]
            beaten = [each for each in beaten if each[0] is not best]
        return [*stand, *beaten, *cold, *vetoed]

    def _out(self, row: S) -> str | None:
        """Why ``row`` leaves the choice, None if it stands."""
        if row.worst > self.above and self._are_vetoed():
            return _VETO
        if not row.resident and row.est.ect > self._soonest_warm_s():
            return _COLD
        beater = self._beater(row) if self.packed is None else None
        return None if beater is None else f"dominated:{beater.key}"

    def _best_beaten(self) -> S:
        """The best of the rows that neither veto nor cold keeps out."""
        return next(row for row in self.rows if self._out(row) not in (_VETO, _COLD))

    def _beater(self, row: S) -> S | None:
        """The best row that dominates ``row``: that is nowhere worse by more than eps, somewhere better by more, and pays
        no more besides. None if no row does."""
        eps, limit = self.eps, row.score + self.reach
        slo, speed, pressure = row.slo + eps, row.speed + eps, row.pressure + eps
        for other in self.rows:
            if other.score > limit:
                break
            if (
                other.slo <= slo
                and other.speed <= speed
                and other.pressure <= pressure
                and other.memory <= row.memory + eps
                and other.switch <= row.switch + eps
                and other.spill <= row.spill + eps
                and other.adj <= row.adj
                and other is not row
            ):
                if (
                    other.speed < row.speed - eps
                    or other.slo < row.slo - eps
                    or other.pressure < row.pressure - eps
                    or other.memory < row.memory - eps
                    or other.switch < row.switch - eps
                    or other.spill < row.spill - eps
                ):
                    return other
                self.vain += 1
                if self.vain > _FEW and self._is_unbeaten(row, eps):
                    break
        return None

    def _is_unbeaten(self, row: S, eps: float) -> bool:
        """True if no row at all is better than ``row`` by more than ``eps`` in any factor, as among alike rows."""
        if self.least is None:
            columns = zip(*[_factors(other) for other in self.rows], strict=True)
            self.least = tuple([min(column) for column in columns])
        slo, memory, switch, pressure, speed, spill = self.least
        return (
            slo >= row.slo - eps
            and speed >= row.speed - eps
            and pressure >= row.pressure - eps
            and memory >= row.memory - eps
            and switch >= row.switch - eps
            and spill >= row.spill - eps
        )

    def fillable(self, below: float) -> list[S]:
        """The rows that keep their promise however full they are; cold ones only if no warm one does."""
        most = self._highest()
        good = [row for row in self.rows if row.slo < below and row.worst <= most]
        warm = [row for row in good if row.resident]
        return warm or [row for row in good if row.est.ect <= self._soonest_warm_s()]

    def is_tipped(self, chosen: S, bonus: float) -> bool:
        """Whether a row that could have been chosen has a better score than ``chosen`` without this ``bonus``, beyond
        rounding."""
        limit, rivals = chosen.score + bonus - ROUNDING, self.rows
        if self.packed is not None:
            rivals = [row for row in self.fillable(self.policy.pack_below) if row.fill == chosen.fill]
        return any(
            row.score < limit and row is not chosen and self._out(row) not in (_VETO, _COLD) for row in rivals
        )

    def _are_vetoed(self) -> bool:
        """Whether rows with a factor above the veto leave, because another row is far enough below it."""
        if self.vetoes is None:
            below = self.policy.veto_needs_below
            self.vetoes = any(other.worst < below for other in self.rows)
        return self.vetoes

    def _highest(self) -> float:
        """The largest factor that no veto falls on."""
        return self.above if self._are_vetoed() else math.inf

    def _soonest_warm_s(self) -> float:
        if self.soonest_s is None:
            most = self._highest()
            warm = [row.est.ect for row in self.rows if row.resident and row.free and row.worst <= most]
            self.soonest_s = min(warm, default=math.inf)
        return self.soonest_s


def field_of(scored: Iterable[S], policy: PlacementPolicy) -> Field[S]:
    """``scored`` by score, those of equal score by endpoint and model, so that the order they come in says nothing."""
    eps = policy.pareto_eps
    field = Field(_by_score(scored), policy, policy.veto_above, eps, eps * policy.weights.total)
    if policy.pack_below:
        field.packed = max(field.fillable(policy.pack_below), key=_FILL, default=None)
    return field


def choose(field: Field[S], seed: bytes, capacity: Callable[[S], float]) -> S | None:
    """The row of ``field`` that serves, None if there is none. ``capacity`` is what a row can sustain, in requests like this
    one per second."""
    rows = field.rows
    if len(rows) < 2:
        return rows[0] if rows else None
    return field.packed or _draw(field.standing(), field.policy, seed, capacity)


def _by_score(scored: Iterable[S]) -> list[S]:
    rows, last = sorted(scored, key=_SCORE), None
    for row in rows:
        if row.score == last:
            rows.sort(key=_place)
            break
        last = row.score
    return rows


def _place(scored: Standing) -> tuple[float, Endpoint, str]:
    return scored.score, scored.key, scored.model


def near_ties(standing: list[S], policy: PlacementPolicy) -> list[S]:
    """The rows that share the draw: those within the margin of the best, without cold ones if any is resident. Of those
    that would share it were the best one's record a period old, the resident ones with a place left that were never tried
    come before all others."""
    best = standing[0]
    periods = best.age_ms / best.period_ms if best.age_ms < best.period_ms else 1.0
    limit = best.score + policy.tie_fixed + policy.tie_per_period * periods
    tied, warm = [], []
    for row in standing:
        if row.score > limit:
            break
        tied.append(row)
        if row.resident:
            warm.append(row)
    widest = best.score + policy.tie_fixed + policy.tie_per_period
    fresh = [
        row for row in standing if row.samples == 0 and row.free and row.resident and row.score <= widest
    ]
    return fresh or warm or tied


def draw_weights(tied: Sequence[S], capacity: Callable[[S], float]) -> list[float]:
    """Chances of tied rows, not normalised: what each can sustain, less the longer one waits there."""
    return [capacity(row) / (1.0 + row.est.wait) for row in tied]


def _draw(standing: list[S], policy: PlacementPolicy, seed: bytes, capacity: Callable[[S], float]) -> S:
    if len(standing) == 1:
        return standing[0]
    tied = near_ties(standing, policy)
    weights = draw_weights(tied, capacity)
    point = int.from_bytes(seed) / _LOTS * sum(weights)
    for row, weight in zip(tied, weights, strict=True):
        point -= weight
        if point < 0.0:
            return row
    return tied[-1]


def action_of(*, is_cloud: bool, resident: bool) -> Action:
    """What serving by such a row means."""
    if is_cloud:
        return Action.SPILL
    return _ROUTE if resident else Action.ROUTE_COLD


def reason_of(chosen: S, field: Field[S], degraded: Sequence[str], note: AuthorityNote) -> Reason:
    """What made ``chosen`` win in ``field``: a bonus only if another row would win without it."""
    if degraded and any(kind != "digest_conflict" for kind in degraded):
        return Reason.DEGRADED
    if note.first is not None and note.leads:
        return Reason.AUTHORITY
    if chosen.hint_bonus and field.is_tipped(chosen, chosen.hint_bonus):
        return Reason.HINT if note.first is None else Reason.AUTHORITY
    if chosen.affinity_bonus and field.is_tipped(chosen, chosen.affinity_bonus):
        return Reason.SESSION
    return _NATIVE


def alternatives_of(
    others: Iterable[Standing], chosen: Standing, weights: Weights
) -> tuple[Alternative, ...]:
    """``others`` with the factor that speaks most against each."""
    slo, memory, switch, pressure = chosen.slo, chosen.memory, chosen.switch, chosen.pressure
    speed, spill, adj = chosen.speed, chosen.spill, chosen.adj
    told = []
    for row in others:
        gaps = (
            weights.slo * (row.slo - slo),
            weights.memory * (row.memory - memory),
            weights.switch * (row.switch - switch),
            weights.pressure * (row.pressure - pressure),
            weights.speed * (row.speed - speed),
            weights.spill * (row.spill - spill),
            row.adj - adj,
        )
        most = max(gaps)
        told.append(Alternative(row.key, row.score, _SPOKE[gaps.index(most)] if most > ROUNDING else "draw"))
    return tuple(told)
