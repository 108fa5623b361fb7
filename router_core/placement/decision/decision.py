"""The decision that routes a request, and the record told from it when somebody wants it.

Rules: a decision owns all it stood on, so its record tells exactly what routed, however late it is asked for; it keeps
only the rows its record shows, never a whole fleet. Nothing is decided anew here.
"""

from collections.abc import Iterable, Mapping
from operator import attrgetter

from msgspec import Struct

from router_core.ids import NodeId
from router_core.placement.candidates.passed import Exclusion
from router_core.placement.filters.eligibility import Need, detail_of
from router_core.placement.queueing.terms import HoldTerms
from router_core.placement.reasons import Action, Reason
from router_core.placement.record import (
    BACKUP,
    NO_AUTHORITY,
    Alternative,
    AuthorityNote,
    Candidate,
    Choice,
    DecisionRecord,
    Excluded,
    Factors,
    RequestFacts,
    ViewFacts,
)
from router_core.placement.request.request import HintNote, PlacementRequest
from router_core.placement.scoring.estimates import capacity
from router_core.placement.scoring.factors import slo_cost
from router_core.placement.scoring.spill import price_of
from router_core.placement.scoring.weighing import Scored
from router_core.placement.selection.choose import Field, alternatives_of
from router_core.policy.placement import PlacementPolicy
from router_core.record.spelling import capability_names, dialect_name

EXCLUDED_KEPT = 64
ALTERNATIVES = 3
_SCORE = attrgetter("score")


class Evidence(Struct, frozen=True, gc=False, kw_only=True):
    """What the record of a decision is made of.

    ``chosen`` is the row that serves, if one does, ``others`` those beside it in the running, by score, ``reserves`` those
    behind them. If the record tells them all, ``field`` is what was chosen from, else they are only the best.
    ``excluded`` are the first of those left out. ``resolved`` is empty if nobody offers the model.
    """

    request: PlacementRequest
    need: Need
    policy: PlacementPolicy
    router: NodeId
    at_ms: int
    seed: bytes
    view: ViewFacts
    resolved: str
    chosen: Scored | None
    others: tuple[Scored, ...]
    reserves: tuple[Scored, ...]
    excluded: tuple[Exclusion, ...]
    field: Field[Scored] | None


class Decision(Struct, frozen=True, gc=False, kw_only=True):
    """The answer to one request.

    ``chosen`` is set exactly if ``action`` is ``route``, ``route_cold`` or ``spill``. Else ``reason`` carries the
    status and, if it asks to come back, ``retry_after_s`` when; ``hold`` the terms of a ``queue``. ``counts`` tells how
    many rows each filter left out, ``hints`` what became of every hint. ``nearest`` holds offered names close to an
    absent one. ``spill_on`` is whether requests of this class leave the mesh from now on, None if this one tells
    nothing about it.
    """

    id: str
    request_id: str
    action: Action
    reason: Reason
    chosen: Choice | None
    hints: tuple[HintNote, ...]
    counts: Mapping[Reason, int]
    degraded: tuple[str, ...]
    evidence: Evidence
    authority: AuthorityNote = NO_AUTHORITY
    hold: HoldTerms | None = None
    retry_after_s: int | None = None
    nearest: tuple[str, ...] = ()
    spill_on: bool | None = None

    @property
    def record(self) -> DecisionRecord:
        """The record of this decision, made anew at each call: work for after the request, not for its own step."""
        return record_of(self)


def record_of(decision: Decision) -> DecisionRecord:
    """Why ``decision`` came out as it did."""
    seen, choice = decision.evidence, decision.chosen
    chosen, others, reserves, excluded = seen.chosen, seen.others, seen.reserves, seen.excluded
    need, policy, field = seen.need, seen.policy, seen.field
    in_running = others if chosen is None else (chosen, *others)
    if field is not None and in_running:
        running = field.ranking(in_running[0])
    else:
        running = [(row, None) for row in in_running]
    names: dict[str, str] = {}
    candidates = _candidates(running, need, policy, names)
    if reserves:
        candidates += _candidates([(row, None) for row in reserves], need, policy, names)
    for gone in excluded:
        names[gone.row.key] = gone.row.label
    margin: float | None = None
    alternatives: tuple[Alternative, ...] = ()
    if chosen is not None and (others or reserves):
        nearest = sorted((*others, *reserves), key=_SCORE) if reserves else others
        margin = nearest[0].score - chosen.score
        alternatives = alternatives_of(nearest[:ALTERNATIVES], chosen, policy.weights)
    return DecisionRecord(
        decision.id,
        decision.request_id,
        seen.router,
        policy.name,
        seen.seed.hex(),
        seen.view,
        _request_facts(seen),
        decision.hints,
        tuple([_excluded(gone, need) for gone in excluded]) if excluded else (),
        {code.value: count for code, count in decision.counts.items()} if decision.counts else {},
        tuple(candidates),
        field is not None,
        decision.action,
        choice.endpoint if choice is not None else None,
        decision.reason,
        margin,
        decision.degraded,
        alternatives,
        boot_ms=seen.at_ms,
        policy_hash=policy.hash,
        names=names,
        authority=decision.authority,
    )


def _candidates(
    running: Iterable[tuple[Scored, str | None]], need: Need, policy: PlacementPolicy, names: dict[str, str]
) -> list[Candidate]:
    """What is told of scored rows and why each is out; ``names`` gets how people call them."""
    told = []
    for scored, out in running:
        row, est, slo = scored.row, scored.est, scored.slo
        penalty, hint, affinity = scored.adj, scored.hint_bonus, scored.affinity_bonus
        if hint or affinity:
            penalty += hint + affinity
            hint = hint and hint / policy.hint_bonus
            affinity = affinity and affinity / policy.affinity_bonus
        queue_risk = 0.0
        if est.wait:
            queue_risk = slo - slo_cost(row, need, est.ttft - est.wait, est.sd, est.tpot)
        names[row.key] = row.label
        told.append(
            Candidate(
                row.key,
                row.model,
                scored.resident,
                scored.free,
                scored.age_ms,
                row.period_ms,
                est,
                Factors(slo, scored.memory, scored.switch, scored.pressure, scored.speed, scored.spill),
                scored.adj,
                penalty,
                hint,
                affinity,
                capacity(row, need),
                queue_risk,
                scored.score,
                BACKUP if scored.reserve is not None else out,
                scored.match.level,
                price_of(row, need) if row.cloud else None,
                scored.busy / row.k,
                row.samples,
            )
        )
    return told


def _excluded(gone: Exclusion, need: Need) -> Excluded:
    detail = gone.detail or detail_of(gone.row, need, gone.reason)
    return Excluded(row=gone.row.key, code=gone.reason, detail=detail)


def _request_facts(seen: Evidence) -> RequestFacts:
    request, need, hints = seen.request, seen.need, seen.request.hints
    return RequestFacts(
        request.model if seen.resolved else "",
        seen.resolved,
        need.digest.hex() if need.digest is not None else None,
        need.match._value_,
        dialect_name(need.dialect),
        capability_names(need.inferred | need.explicit),
        stream=request.stream,
        prompt_tokens=need.prompt,
        output_tokens=need.output,
        ctx_need=need.ctx,
        images=request.images,
        request_class=hints.request_class._value_,
        slo_ttft_ms=round(1000.0 * need.ttft_s),
        slo_tpot_ms=round(1000.0 * need.tpot_s) if need.tpot_s is not None else None,
        deadline_ms=need.until_ms - request.arrival_ms,
        locality=need.locality._value_,
        caller=request.caller,
        session=request.session.hex() if request.session is not None else None,
    )
