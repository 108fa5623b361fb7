"""The decision: survey, admission, choice. Pure: no clock, no await, nothing reserved.

``rng`` gives the decision its id and jitters ``Retry-After``; the choice itself draws from a hash of the request, so
equal inputs choose equally. It dispatches nothing: the router reserves in the ledger in the same step.
"""

from operator import attrgetter
from random import Random

from router_core.placement.candidates.admission import retry_after_s
from router_core.placement.candidates.fleet import Fleet
from router_core.placement.decision.authority import heed, led_by
from router_core.placement.decision.decision import ALTERNATIVES, EXCLUDED_KEPT, Decision, Evidence
from router_core.placement.decision.ids import new_id
from router_core.placement.filters.eligibility import matches
from router_core.placement.queueing.room import is_put_off, put_off, waits_s, without_row
from router_core.placement.reasons import Action, HintOutcome, Reason
from router_core.placement.record import NO_AUTHORITY, Choice, ViewFacts
from router_core.placement.request.hints import NARROWING
from router_core.placement.request.names import nearest
from router_core.placement.request.request import NO_HINTS, HintNote, NodeRef, PlacementRequest
from router_core.placement.scoring.estimates import capacity
from router_core.placement.scoring.survey import Survey, survey
from router_core.placement.scoring.weighing import Scored
from router_core.placement.selection.choose import action_of, choose, field_of, reason_of, seed_of
from router_core.placement.selection.exploration import explored
from router_core.policy.placement import PlacementPolicy

_FULL_ONE_IN = 16
_RETRIED = frozenset({429, 503})
_SCORE = attrgetter("score")
_ROUTE = Action.ROUTE


def decide(
    request: PlacementRequest,
    fleet: Fleet,
    policy: PlacementPolicy,
    now: int,
    rng: Random,
    *,
    full: bool = False,
    called: str | None = None,
) -> Decision:
    """Who serves ``request``, or why nobody can. ``now`` is boot ms. ``full``: the record shall tell all candidates,
    however many. ``called``: the id that the decision gets unless an authority was asked under another."""
    seen = survey(request, fleet, policy, now)
    seed = seed_of(request.request_id, request.attempt)
    counsel = request.advice
    note = NO_AUTHORITY if counsel is None else heed(counsel, seen, policy, seed)
    waits = is_put_off(request, seen, policy, seed, now)
    field = field_of([] if waits else seen.scored, policy)
    rows = field.rows
    chosen = led_by(note, rows) or choose(field, seed, lambda row: capacity(row.row, seen.need))
    if counsel is None or request.attempt > 1:
        decision_id = called or new_id(rng)
    else:
        decision_id = counsel.decision_id
    spilling = fleet.live.spilling
    retry_s = hold = None
    nearby: tuple[str, ...] = ()
    if chosen is not None:
        tried = explored(chosen, rows, policy, seed, request.request_id, seen.degraded, note)
        chosen = tried or chosen
        action = action_of(is_cloud=chosen.row.cloud, resident=chosen.resident)
        full = (
            full
            or len(rows) + len(seen.reserves) <= policy.candidates_kept
            or action is not _ROUTE
            or request.attempt > 1
            or tried is not None
            or seed[-1] % _FULL_ONE_IN == 0
        )
        reason = Reason.EXPLORE if tried is not None else reason_of(chosen, field, seen.degraded, note)
        others = rows[1:] if chosen is rows[0] else [row for row in rows if row is not chosen]
        if not full:
            del others[ALTERNATIVES:]
    else:
        action, reason, hold = (put_off if waits else without_row)(request, seen, fleet, policy, now)
        field, full = field_of(seen.scored, policy), True
        others = field.rows
        if reason.status in _RETRIED and reason is not Reason.DOES_NOT_FIT:
            retry_s = retry_after_s(waits_s(seen, reason, fleet, now), rng)
        if reason is Reason.MODEL_ABSENT and not seen.offered:
            nearby = nearest(seen.resolved, fleet.names(), policy.nearest_names)
    return Decision(
        id=decision_id,
        request_id=request.request_id,
        action=action,
        reason=reason,
        chosen=_choice(chosen, request, seen, policy) if chosen is not None else None,
        hints=() if request.hints is NO_HINTS else _hint_notes(request, seen, chosen, fleet, reason),
        counts=seen.counts,
        degraded=seen.degraded,
        authority=note,
        evidence=Evidence(
            request=request,
            need=seen.need,
            policy=policy,
            router=fleet.node_id,
            at_ms=now,
            seed=seed,
            view=ViewFacts(
                gen=fleet.gen,
                max_age_ms=seen.max_age_ms,
                m_r=fleet.m_r,
                rows=len(seen.rows),
                cut=seen.cut,
                spill_on=len(spilling) > 0 and request.hints.request_class in spilling,
            ),
            resolved=seen.resolved if seen.offered else "",
            chosen=chosen,
            others=tuple(others),
            field=field if full else None,
            reserves=tuple(seen.reserves if full else sorted(seen.reserves, key=_SCORE)[:ALTERNATIVES]),
            excluded=seen.excluded[:EXCLUDED_KEPT],
        ),
        hold=hold,
        retry_after_s=retry_s,
        nearest=nearby,
        spill_on=seen.spill_on,
    )


def _choice(scored: Scored, request: PlacementRequest, seen: Survey, policy: PlacementPolicy) -> Choice:
    row, est, need = scored.row, scored.est, seen.need
    patient = not request.spare and (
        row.key in request.declined
        or len(request.declined) + len(request.refused) >= policy.patient_after
        or "pressure" in seen.degraded
        or len(seen.scored) + len(seen.reserves) == 1
    )
    return Choice(
        row.key,
        row.node,
        row.node_id,
        row.node_name,
        row.label,
        endpoint_name=row.endpoint,
        engine=row.engine,
        model=row.model,
        is_self=row.is_self,
        resident=scored.resident,
        prompt_tokens=need.prompt,
        output_tokens=need.output,
        ahead=None if patient else est.ahead,
        prefill_s=est.prefill,
        decode_s=need.output * row.token_s,
        need_bytes=0 if row.resident or row.loading else row.need_bytes,
        est=est,
        match=scored.match,
    )


def _hint_notes(
    request: PlacementRequest, seen: Survey, chosen: Scored | None, fleet: Fleet, reason: Reason
) -> tuple[HintNote, ...]:
    """What became of every hint: those noted while parsing, each preference, and the rest, which held if routed."""
    hints, need = request.hints, seen.need
    if not hints.told and not hints.notes:
        return ()
    notes = list(hints.notes)
    noted = {note.hint for note in notes}
    notes.extend(_preference_note(ref, seen, chosen, fleet) for ref in hints.prefer)
    for hint in hints.told:
        if hint == "prefer" or hint in noted:
            continue
        if (hint == "match" and hints.match is not need.match) or (
            hint == "locality" and hints.locality is not need.locality
        ):
            notes.append(HintNote(hint=hint, outcome=HintOutcome.CLAMPED))
        elif chosen is None and hint in NARROWING:
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
