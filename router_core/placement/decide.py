"""The decision: survey, admission, choice, and the record of all three. Pure: no clock, no await, nothing reserved.

``rng`` gives the decision its id and jitters ``Retry-After``; the choice itself draws from a hash of the request, so
equal inputs choose equally. Refuses to dispatch: whoever routes reserves in the ledger in the same step.
"""

from collections.abc import Iterable
from functools import lru_cache
from operator import attrgetter
from random import Random

from router_core.placement.admission import retry_after_s
from router_core.placement.choose import choose, seed_of
from router_core.placement.eligibility import Need, detail_of, matches
from router_core.placement.estimates import capacity
from router_core.placement.factors import slo_cost
from router_core.placement.fleet import Fleet
from router_core.placement.hints import NARROWING
from router_core.placement.names import nearest
from router_core.placement.reasons import Action, HintOutcome, Reason
from router_core.placement.record import (
    Alternative,
    Candidate,
    Choice,
    Decision,
    DecisionRecord,
    Excluded,
    RequestFacts,
    ViewFacts,
)
from router_core.placement.request import HintNote, NodeRef, PlacementRequest
from router_core.placement.survey import Scored, Survey, survey
from router_core.policy.placement import PlacementPolicy
from router_core.record.state import Capability, Dialect

_EXCLUDED_KEPT = 64
_ALTERNATIVES = 3
_FULL_ONE_IN = 16
_WAIT_LEAST_MS = 500
_RETRIED = frozenset({429, 503})
_SCORE = attrgetter("score")
_BASE32 = "abcdefghijklmnopqrstuvwxyz234567"
_BASE32_PAIRS = [first + second for first in _BASE32 for second in _BASE32]


def decide(
    request: PlacementRequest, fleet: Fleet, policy: PlacementPolicy, now: int, rng: Random
) -> Decision:
    """Who serves ``request``, or why nobody can. ``now`` is boot ms."""
    seen = survey(request, fleet, policy, now)
    seed = seed_of(request.request_id, request.attempt)
    few = len(seen.scored) + len(seen.reserves) <= policy.candidates_kept
    full = few or request.attempt > 1 or seed[-1] % _FULL_ONE_IN == 0
    order = choose(seen.scored, seen.need, policy, seed, full=full)
    decision_id = _new_id(rng)
    if not order:
        return _rejection(decision_id, request, seen, fleet, policy, now, rng, seed)
    chosen = order[0]
    ranked = sorted([row for row in (*order, *seen.reserves) if row is not chosen], key=_SCORE)
    action = Action.ROUTE if chosen.resident else Action.ROUTE_COLD
    reason = _reason(chosen, ranked, seen)
    full = full or action is not Action.ROUTE
    shown = (*order, *seen.reserves) if full else (chosen, *ranked[:_ALTERNATIVES])
    return Decision(
        id=decision_id,
        request_id=request.request_id,
        action=action,
        reason=reason,
        chosen=_choice(chosen, request, seen, now),
        order=tuple([row.row.key for row in order] + [row.row.key for row in seen.reserves]),
        record=DecisionRecord(
            id=decision_id,
            request_id=request.request_id,
            at_ms=now,
            router=fleet.node_id,
            policy=policy.name,
            seed=seed.hex(),
            view=_view_facts(fleet, seen),
            req=_request_facts(request, seen),
            hints=_hint_notes(request, seen, chosen, fleet, reason),
            excluded=_excluded(seen),
            excluded_counts={code.value: count for code, count in seen.counts.items()},
            candidates=tuple([_candidate(row, seen.need) for row in shown]),
            full=full,
            action=action,
            chosen=chosen.row.key,
            reason=reason,
            margin=ranked[0].score - chosen.score if ranked else None,
            degraded=seen.degraded,
            alternatives=tuple([_alternative(row, chosen, policy) for row in ranked[:_ALTERNATIVES]]),
            names=_names(shown, seen),
        ),
    )


def _rejection(
    decision_id: str,
    request: PlacementRequest,
    seen: Survey,
    fleet: Fleet,
    policy: PlacementPolicy,
    now: int,
    rng: Random,
    seed: bytes,
) -> Decision:
    if seen.invalid:
        reason = Reason.MODEL_NAME_INVALID
    else:
        reason = max(seen.counts, key=lambda code: code.order, default=Reason.MODEL_ABSENT)
    retry = nearby = None
    if reason.status in _RETRIED:
        retry = retry_after_s(_waits_s(seen, now), rng)
    if reason is Reason.MODEL_ABSENT and not seen.rows:
        nearby = nearest(seen.resolved, fleet.names(), policy.nearest_names)
    return Decision(
        id=decision_id,
        request_id=request.request_id,
        action=Action.REJECT,
        reason=reason,
        chosen=None,
        order=(),
        retry_after_s=retry,
        nearest=nearby or (),
        record=DecisionRecord(
            id=decision_id,
            request_id=request.request_id,
            at_ms=now,
            router=fleet.node_id,
            policy=policy.name,
            seed=seed.hex(),
            view=_view_facts(fleet, seen),
            req=_request_facts(request, seen),
            hints=_hint_notes(request, seen, None, fleet, reason),
            excluded=_excluded(seen),
            excluded_counts={code.value: count for code, count in seen.counts.items()},
            candidates=(),
            full=True,
            action=Action.REJECT,
            chosen=None,
            reason=reason,
            margin=None,
            degraded=seen.degraded,
            alternatives=(),
            names=_names((), seen),
        ),
    )


def _waits_s(seen: Survey, now: int) -> list[float]:
    return [
        row.work_s / row.k - max(0, now - row.taken_ms) / 1000.0
        for row in seen.rows
        if row.down is None and not row.untrusted
    ]


def _new_id(rng: Random) -> str:
    """130 random bits as 26 characters of base32."""
    bits = rng.getrandbits(130)
    return "".join([_BASE32_PAIRS[bits >> shift & 1023] for shift in range(0, 130, 10)])


def _reason(chosen: Scored, others: list[Scored], seen: Survey) -> Reason:
    if seen.degraded and seen.degraded != ("digest_conflict",):
        return Reason.DEGRADED
    if not (chosen.hint_bonus or chosen.affinity_bonus) or not others:
        return Reason.NATIVE
    rival = min([other.score for other in others if other.reserve is None], default=None)
    if rival is None:
        return Reason.NATIVE
    if chosen.hint_bonus and rival < chosen.score + chosen.hint_bonus:
        return Reason.HINT
    if chosen.affinity_bonus and rival < chosen.score + chosen.affinity_bonus:
        return Reason.SESSION
    return Reason.NATIVE


def _choice(scored: Scored, request: PlacementRequest, seen: Survey, now: int) -> Choice:
    row, est, need = scored.row, scored.est, seen.need
    wait_ms = max(_WAIT_LEAST_MS, round(2000.0 * est.wait + 250.0 * need.ttft_s))
    if request.refused or "pressure" in seen.degraded:
        wait_ms = max(wait_ms, need.until_ms - now)
    return Choice(
        endpoint=row.key,
        node=row.node,
        node_id=row.node_id,
        node_name=row.node_name,
        endpoint_name=row.endpoint,
        engine=row.engine,
        model=row.model,
        is_self=row.is_self,
        resident=scored.resident,
        prompt_tokens=need.prompt,
        output_tokens=need.output,
        max_wait_ms=wait_ms,
        prefill_s=est.prefill,
        decode_s=need.output * row.token_s,
        need_bytes=0 if row.resident or row.loading else row.need_bytes,
        est=est,
    )


def _candidate(scored: Scored, need: Need) -> Candidate:
    row, est = scored.row, scored.est
    return Candidate(
        row=row.key,
        model=row.model,
        resident=scored.resident,
        free=scored.free,
        age_ms=scored.age_ms,
        est=est,
        f=scored.f,
        adj=scored.adj,
        capacity=capacity(row, need),
        queue_risk=scored.slo - slo_cost(row, need, est.ttft - est.wait, est.sd, scored.pace)
        if est.wait
        else 0.0,
        score=scored.score,
        out="backup" if scored.reserve is not None else scored.out,
    )


def _alternative(scored: Scored, chosen: Scored, policy: PlacementPolicy) -> Alternative:
    weights, theirs, ours = policy.weights, scored.f, chosen.f
    gaps = (
        (weights.slo * (theirs.slo - ours.slo), "slo"),
        (weights.memory * (theirs.memory - ours.memory), "memory"),
        (weights.switch * (theirs.switch - ours.switch), "switch"),
        (weights.pressure * (theirs.pressure - ours.pressure), "pressure"),
        (weights.speed * (theirs.speed - ours.speed), "speed"),
        (scored.adj - chosen.adj, "adj"),
    )
    gap, name = max(gaps)
    return Alternative(row=scored.row.key, score=scored.score, top_factor=name if gap > 0.0 else "draw")


def _names(shown: Iterable[Scored], seen: Survey) -> dict[str, str]:
    names = {scored.row.key: scored.row.label for scored in shown}
    for gone in seen.excluded[:_EXCLUDED_KEPT]:
        names[gone.row.key] = gone.row.label
    return names


def _excluded(seen: Survey) -> tuple[Excluded, ...]:
    return tuple(
        [
            Excluded(row=gone.row.key, code=gone.reason, detail=detail_of(gone.row, seen.need, gone.reason))
            for gone in seen.excluded[:_EXCLUDED_KEPT]
        ]
    )


def _view_facts(fleet: Fleet, seen: Survey) -> ViewFacts:
    return ViewFacts(gen=fleet.gen, max_age_ms=seen.max_age_ms, m_r=fleet.m_r, rows=len(seen.rows))


def _request_facts(request: PlacementRequest, seen: Survey) -> RequestFacts:
    need, hints = seen.need, request.hints
    return RequestFacts(
        model_asked=request.model if seen.rows else "",
        model_resolved=seen.resolved if seen.rows else "",
        digest=need.digest.hex() if need.digest is not None else None,
        match=hints.match.value,
        dialect=_dialect_name(need.dialect),
        requires=_capability_names(need.inferred | need.explicit),
        stream=request.stream,
        prompt_tokens=need.prompt,
        output_tokens=need.output,
        ctx_need=need.ctx,
        images=request.images,
        request_class=hints.request_class.value,
        slo_ttft_ms=round(1000.0 * need.ttft_s),
        slo_tpot_ms=round(1000.0 * need.tpot_s) if need.tpot_s is not None else None,
        deadline_ms=need.until_ms - request.arrival_ms,
        locality=hints.locality.value,
        caller=request.caller,
        session=request.session.hex() if request.session is not None else None,
    )


@lru_cache(maxsize=64)
def _dialect_name(bits: int) -> str:
    return (Dialect(bits).name or "unknown").lower()


@lru_cache(maxsize=1024)
def _capability_names(bits: int) -> tuple[str, ...]:
    return tuple((cap.name or "").lower() for cap in Capability if cap & bits)


def _hint_notes(
    request: PlacementRequest, seen: Survey, chosen: Scored | None, fleet: Fleet, reason: Reason
) -> tuple[HintNote, ...]:
    """What became of every hint: those noted while parsing, each preference, and the rest, which held if routed."""
    hints = request.hints
    if not hints.told and not hints.notes:
        return ()
    notes = list(hints.notes)
    noted = {note.hint for note in notes}
    notes.extend(_preference_note(ref, seen, chosen, fleet) for ref in hints.prefer)
    for hint in hints.told:
        if hint == "prefer" or hint in noted:
            continue
        if chosen is None and hint in NARROWING:
            notes.append(HintNote(hint=hint, outcome=HintOutcome.EXCLUDED, detail=reason.value))
        else:
            notes.append(HintNote(hint=hint, outcome=HintOutcome.HONOURED))
    return tuple(notes)


def _preference_note(ref: NodeRef, seen: Survey, chosen: Scored | None, fleet: Fleet) -> HintNote:
    if chosen is not None and matches(ref, chosen.row):
        return HintNote(hint="prefer", ref=ref.text, outcome=HintOutcome.HONOURED)
    if not fleet.knows(ref):
        return HintNote(hint="prefer", outcome=HintOutcome.IGNORED_UNKNOWN)
    if any(matches(ref, row.row) for row in (*seen.scored, *seen.reserves)):
        return HintNote(hint="prefer", ref=ref.text, outcome=HintOutcome.OUTSCORED)
    why = next((gone.reason for gone in seen.excluded if matches(ref, gone.row)), Reason.MODEL_ABSENT)
    return HintNote(hint="prefer", ref=ref.text, outcome=HintOutcome.EXCLUDED, detail=why.value)
