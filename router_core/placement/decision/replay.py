"""The choice of a stored decision again, from the factors in its record.

What a policy says about the choice applies: weights, bonuses, veto, dominance, near ties. What led up to it stays as it
was: sizes, filters, estimates, factors, an authority's answer, and the seed of the draw. The same policy chooses the
same row. No row is judged anew: replay needs no fleet, and what was refused, shed or held stays so.
"""

from collections.abc import Mapping
from operator import attrgetter

from msgspec import Struct
from msgspec.structs import replace

from router_core.errors import PairmeshError
from router_core.placement.decision.authority import led_by
from router_core.placement.decision.decision import ALTERNATIVES
from router_core.placement.reasons import Action, HintOutcome, Reason
from router_core.placement.record import BACKUP, Candidate, DecisionRecord, Estimate, Factors
from router_core.placement.request.hints import parse_ref
from router_core.placement.request.request import Endpoint, HintNote
from router_core.placement.selection.choose import (
    ROUNDING,
    action_of,
    alternatives_of,
    choose,
    field_of,
    reason_of,
)
from router_core.placement.selection.exploration import explored
from router_core.policy.placement import PlacementPolicy, Weights

_SCORE = attrgetter("score")
_CAPACITY = attrgetter("candidate.capacity")
_RUNNING = frozenset({HintOutcome.HONOURED, HintOutcome.OUTSCORED})
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
    worst: float
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
    field = field_of(running or rows, policy)
    drawn = led_by(record.authority, field.rows) or choose(field, seed, _CAPACITY)
    if drawn is None:
        raise NotReplayable("the record tells no row that was chosen from")
    tried = explored(drawn, field.rows, policy, seed, record.request_id, record.degraded, record.authority)
    chosen = tried or drawn
    others = sorted([*[row for row in field.rows if row is not chosen], *reserves], key=_SCORE)
    return replace(
        bare,
        hints=tuple([_noted(note, chosen.key, record.names) for note in record.hints]),
        candidates=tuple(
            [_told(row, out) for row, out in (*field.ranking(chosen), *[(row, None) for row in reserves])]
        ),
        action=action_of(is_cloud=chosen.candidate.price is not None, resident=chosen.resident),
        chosen=chosen.key,
        reason=Reason.EXPLORE
        if tried is not None
        else reason_of(chosen, field, record.degraded, record.authority),
        margin=others[0].score - chosen.score if others else None,
        alternatives=alternatives_of(others[:ALTERNATIVES], chosen, policy.weights),
    )


def _row(candidate: Candidate, policy: PlacementPolicy) -> _Row:
    hint_bonus = policy.hint_bonus * candidate.hint
    affinity_bonus = policy.affinity_bonus * candidate.affinity
    f = candidate.f
    adj = _unless_rounded(candidate.adj, candidate.penalty - hint_bonus - affinity_bonus)
    return _Row(
        candidate=candidate,
        key=candidate.row,
        model=candidate.model,
        est=candidate.est,
        slo=f.slo,
        memory=f.memory,
        switch=f.switch,
        pressure=f.pressure,
        speed=f.speed,
        spill=f.spill,
        worst=max(f.slo, f.memory, f.switch, f.pressure, f.spill),
        adj=adj,
        hint_bonus=hint_bonus,
        affinity_bonus=affinity_bonus,
        score=_unless_rounded(candidate.score, _weighed(f, policy.weights) + adj),
        age_ms=candidate.age_ms,
        period_ms=candidate.period_ms,
        fill=candidate.fill,
        samples=candidate.samples,
        free=candidate.free,
        resident=candidate.resident,
        reserve=candidate.out if candidate.out == BACKUP else None,
    )


def _noted(note: HintNote, chosen: Endpoint, names: Mapping[Endpoint, str]) -> HintNote:
    """What became of a hint; of a preference for a row in the running that is whether ``chosen`` is what it names."""
    if note.hint != "prefer" or note.outcome not in _RUNNING:
        return note
    met = note.ref is not None and _means(note.ref, chosen, names.get(chosen, ""))
    return replace(note, outcome=HintOutcome.HONOURED if met else HintOutcome.OUTSCORED)


def _means(ref: str, row: Endpoint, label: str) -> bool:
    """True if ``ref`` names ``row``, which people call ``label``."""
    meant = parse_ref(ref)
    node, _, endpoint = row.partition("/")
    if meant is None or meant.endpoint not in (None, endpoint):
        return False
    if meant.node_id is not None:
        return meant.node_id == node
    name = label.removeprefix("@").partition("/")[0].partition("~")[0]
    return meant.name == name and node.startswith(meant.mark)


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
    return stored if abs(computed - stored) < ROUNDING else computed


def _told(row: _Row, out: str | None) -> Candidate:
    return replace(row.candidate, adj=row.adj, score=row.score, out=row.reserve or out)
