"""The choice of a stored decision again, from the factors in its record.

What a policy says about the choice applies: weights, bonuses, veto, dominance, near ties. What led up to it stays as it
was: sizes, filters, estimates, factors, an authority's answer, and the seed of the draw. The same policy chooses the
same row. Refuses to judge a row anew: it needs no fleet, and what was refused, shed or held stays so.
"""

from operator import attrgetter

from msgspec import Struct
from msgspec.structs import replace

from router_core.errors import PairmeshError
from router_core.placement.advice import led_by
from router_core.placement.choose import action_of, alternative_of, choose, ranking, reason_of
from router_core.placement.decision import ALTERNATIVES
from router_core.placement.explore import explored
from router_core.placement.reasons import Action, Reason
from router_core.placement.record import BACKUP, Candidate, DecisionRecord, Estimate, Factors
from router_core.placement.request import Endpoint
from router_core.policy.placement import PlacementPolicy, Weights

_ROUNDING = 1e-9
_SCORE = attrgetter("score")
_CAPACITY = attrgetter("candidate.capacity")
_ROUTED = frozenset({Action.ROUTE, Action.ROUTE_COLD, Action.SPILL})


class NotReplayable(PairmeshError):
    """The record does not hold all rows that were chosen from."""


class _Row(Struct, gc=False, kw_only=True):
    """A candidate back in the running."""

    candidate: Candidate
    key: Endpoint
    model: str
    est: Estimate
    slo: float
    memory: float
    switch: float
    pressure: float
    speed: float
    spill: float
    adj: float
    hint_bonus: float
    affinity_bonus: float
    score: float
    age_ms: int
    period_ms: int
    fill: float
    samples: int | None
    free: bool
    resident: bool
    reserve: str | None


def replay(record: DecisionRecord, policy: PlacementPolicy) -> DecisionRecord:
    """``record`` as it would read if ``policy`` had made the choice, without attempts and outcome. Raises
    ``NotReplayable``."""
    if not record.full:
        raise NotReplayable("the record tells only the rows nearest to the chosen one")
    bare = replace(record, policy=policy.name, policy_hash=policy.hash, attempts=(), outcome=None)
    if record.action not in _ROUTED:
        return bare
    rows = [_row(candidate, policy) for candidate in record.candidates]
    running = [row for row in rows if row.reserve is None]
    reserves = [row for row in rows if row.reserve is not None] if running else []
    seed = bytes.fromhex(record.seed)
    order = led_by(record.authority, choose(running or rows, policy, seed, _CAPACITY))
    tried = explored(order, policy, seed, record.request_id, record.degraded, record.authority)
    order = tried or order
    chosen = order[0]
    others = sorted([*order[1:], *reserves], key=_SCORE)
    return replace(
        bare,
        candidates=tuple(
            [_told(row, out) for row, out in (*ranking(order, policy), *[(row, None) for row in reserves])]
        ),
        action=action_of(is_cloud=chosen.candidate.price is not None, resident=chosen.resident),
        chosen=chosen.key,
        reason=Reason.EXPLORE
        if tried is not None
        else reason_of(chosen, others, record.degraded, record.authority),
        margin=others[0].score - chosen.score if others else None,
        alternatives=tuple([alternative_of(row, chosen, policy.weights) for row in others[:ALTERNATIVES]]),
    )


def _row(candidate: Candidate, policy: PlacementPolicy) -> _Row:
    hint_bonus = policy.hint_bonus * candidate.hint
    affinity_bonus = policy.affinity_bonus * candidate.affinity
    adj = _unless_rounded(candidate.adj, candidate.penalty - hint_bonus - affinity_bonus)
    return _Row(
        candidate=candidate,
        key=candidate.row,
        model=candidate.model,
        est=candidate.est,
        slo=candidate.f.slo,
        memory=candidate.f.memory,
        switch=candidate.f.switch,
        pressure=candidate.f.pressure,
        speed=candidate.f.speed,
        spill=candidate.f.spill,
        adj=adj,
        hint_bonus=hint_bonus,
        affinity_bonus=affinity_bonus,
        score=_unless_rounded(candidate.score, _weighed(candidate.f, policy.weights) + adj),
        age_ms=candidate.age_ms,
        period_ms=candidate.period_ms,
        fill=candidate.fill,
        samples=candidate.samples,
        free=candidate.free,
        resident=candidate.resident,
        reserve=candidate.out if candidate.out == BACKUP else None,
    )


def _weighed(f: Factors, weights: Weights) -> float:
    return (
        weights.slo * f.slo
        + weights.memory * f.memory
        + weights.switch * f.switch
        + weights.pressure * f.pressure
        + weights.speed * f.speed
        + weights.spill * f.spill
    )


def _unless_rounded(stored: float, computed: float) -> float:
    """``computed``, or what was stored if nothing but the order of additions tells them apart."""
    return stored if abs(computed - stored) < _ROUNDING else computed


def _told(row: _Row, out: str | None) -> Candidate:
    return replace(row.candidate, adj=row.adj, score=row.score, out=row.reserve or out)
