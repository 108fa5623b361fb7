"""A decision in words: what was chosen and why, the runners-up, who was left out, and how it went. Pure.

Every sentence is drawn from the record that routed; nothing is computed anew. The words of each code stand in
one table, and a code without words is shown as it is.
"""

import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Final

from agent.cli.columns import columns, count, printable, seconds
from router_core.placement.reasons import Action, AuthorityOutcome, HintOutcome, Reason
from router_core.placement.record import (
    Alternative,
    Candidate,
    DecisionRecord,
    Ending,
    Estimate,
    Excluded,
    Factors,
)
from router_core.placement.request.request import HintNote

EXCLUSIONS: Final = {
    Reason.UNTRUSTED: "is not a member that may serve",
    Reason.LOCALITY: "is further away than the request may go",
    Reason.NOT_IN_SUBSET: "does not meet what the request demanded",
    Reason.UNREACHABLE: "is not reachable, or its engine is not running",
    Reason.BREAKER_OPEN: "failed lately and is being left alone for a while",
    Reason.DRAINING: "is draining and takes no new work",
    Reason.MODEL_ABSENT: "does not have that very model, or may not load it",
    Reason.CAPABILITY: "does not support what the request needs",
    Reason.CONTEXT_TOO_SMALL: "has too small a context for it",
    Reason.DOES_NOT_FIT: "has not enough free memory to load the model",
    Reason.PRESSURE: "is under pressure",
    Reason.QUEUE_FULL: "has no free slot, and its queue is full",
    Reason.DEADLINE: "could not have started before the deadline",
    Reason.TRIED: "failed this very request before",
    Reason.REFUSED: "declined this very request before",
}
NOBODY: Final = {
    Reason.UNTRUSTED: "no endpoint is on a member that may serve",
    Reason.LOCALITY: "no endpoint is within the locality that the request allows",
    Reason.NOT_IN_SUBSET: "no endpoint matches x-pairmesh-require",
    Reason.UNREACHABLE: "no endpoint is reachable with its engine running",
    Reason.BREAKER_OPEN: "no endpoint is left that has not failed lately",
    Reason.DRAINING: "no endpoint is left that is not draining",
    Reason.MODEL_ABSENT: "no endpoint has that very model or may load it",
    Reason.CONTEXT_TOO_SMALL: "no endpoint has a context that is large enough",
    Reason.DOES_NOT_FIT: "no endpoint has enough free memory to load the model",
    Reason.PRESSURE: "no endpoint is left that is not under load",
    Reason.QUEUE_FULL: "no endpoint has a free slot or room in its queue",
    Reason.DEADLINE: "no endpoint could have started before the deadline",
    Reason.TRIED: "no endpoint is left that has not failed this request",
    Reason.REFUSED: "no endpoint is left that has not declined this request",
}
"""Why a request was refused, by the check that removed the last candidate."""
CHOICES: Final = {
    Reason.NATIVE: "it costs least by its estimates",
    Reason.HINT: "the request preferred it; without that another would have won",
    Reason.AUTHORITY: "the authority asked about it said so",
    Reason.SESSION: "it holds this session's prompt; without that another would have won",
    Reason.EXPLORE: "it was hardly ever tried, is idle, and trying it costs nobody",
    Reason.DEGRADED: "no better candidate was left",
}
DEGRADED: Final = {
    "pressure": "all candidates are under load",
    "stale_view": "the state of all candidates is too old to rank by",
    "probe": "all candidates failed lately, and this request tries one again",
    "digest_conflict": "endpoints have different files under this model's name",
}
DRAWN: Final = "it was drawn among those that cost least by their estimates"
REFUSALS: Final = {
    Reason.HINT_MALFORMED: "a hint that narrows the choice could not be understood",
    Reason.MODEL_NAME_INVALID: "the model's name is not a valid one",
    Reason.STARTING: "this node has just started, and who has the model was not heard yet",
    Reason.SHED: "all candidates are so busy that background requests are refused",
}
AGAINST: Final = {
    "slo": "slower or less certain to answer in time",
    "memory": "tight on memory",
    "switch": "loading there would push out other models in use",
    "pressure": "under more pressure",
    "speed": "slower overall",
    "spill": "outside the mesh, at a price",
    "adj": "no bonus from hint or session, a looser match, or a context that may be too small",
    "draw": "as good: the draw went the other way",
}
DETAILS: Final = {
    "requests": "cannot be reached for requests, whatever its link says: see 'pairmesh doctor'",
    "better_match": "has another model, and the one asked for did well enough",
    "not_needed": "is outside the mesh, which did well enough",
}
STAND_INS: Final = {
    1: "the same weights in another quantisation",
    2: "a model of the same family, no smaller",
    3: "a model that the operator lets stand in for any other",
}
OUTS: Final = {
    "veto": "set aside: one factor is as bad as can be",
    "cold": "set aside: a warm one is as good",
    "backup": "kept back: its state is too old to rank by",
}
HINTS: Final = {
    HintOutcome.HONOURED: "honoured",
    HintOutcome.OUTSCORED: "considered, but another was better by more than the bonus",
    HintOutcome.EXCLUDED: "not possible",
    HintOutcome.IGNORED_UNKNOWN: "ignored: nothing of that name is known",
    HintOutcome.IGNORED_UNAUTHORISED: "ignored: this caller may not say that",
    HintOutcome.IGNORED_MALFORMED: "ignored: could not be understood",
    HintOutcome.CLAMPED: "taken, down to what is allowed",
}
AUTHORITY: Final = {
    AuthorityOutcome.USED: "its answer counted",
    AuthorityOutcome.CACHED: "an answer it gave before counted",
    AuthorityOutcome.TIMEOUT: "no answer in time",
    AuthorityOutcome.ERROR: "not reached, or it refused",
    AuthorityOutcome.INVALID: "its answer was not a valid one",
    AuthorityOutcome.BREAKER_OPEN: "not asked: it failed lately",
    AuthorityOutcome.EMPTY_INTERSECTION: "it named nobody who could serve",
}
_COLD: Final = "cold"
_CONFLICT: Final = "digest_conflict"
FACTORS: Final = Factors.__struct_fields__
LEAST_SHOWN: Final = 0.0005
SHOWN_HASH: Final = 8
SHOWN_WEIGHED: Final = 16
SHOWN_EXCLUDED: Final = 16
AS_PREDICTED: Final = 0.05


def explain(record: DecisionRecord) -> str:
    """``record`` as text that ends with a newline."""
    return _text([_head(record, "decision"), *_body(record), list(_attempts(record)), list(_ended(record))])


def explain_dry(record: DecisionRecord) -> str:
    """What would have been decided: nothing was sent, so nothing came of it."""
    return _text([_head(record, "dry run"), *_body(record)])


def explain_again(before: DecisionRecord, record: DecisionRecord) -> str:
    """``before`` as ``record`` has it, which is the same decision replayed."""
    if _outcome(record) == _outcome(before):
        came = f"to the same: {_outcome(record)}"
    else:
        came = f"to something else: {_outcome(record)} instead of {_outcome(before)}"
    by = (
        "the policy that made it" if record.policy_hash == before.policy_hash else f"policy {_policy(record)}"
    )
    head = [f"replay of decision {record.id}, by {by}, comes {came}", _asked(record)]
    return _text([head, *_body(record)])


def _text(blocks: list[list[str]]) -> str:
    lines = [line for block in blocks if block for line in ("", *block)][1:]
    return "\n".join(printable(line) for line in lines) + "\n"


def _head(record: DecisionRecord, what: str) -> list[str]:
    made = "" if record.at_ms is None else f" at {_moment(record.at_ms)}"
    return [
        f"{what} {record.id} for request {record.request_id}{made}, by policy {_policy(record)}",
        _asked(record),
    ]


def _moment(wall_ms: int) -> str:
    """UTC, as the log has it but for fractions of a second."""
    return datetime.fromtimestamp(wall_ms // 1_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _policy(record: DecisionRecord) -> str:
    return f"{record.policy} {record.policy_hash[:SHOWN_HASH]}".rstrip()


def _outcome(record: DecisionRecord) -> str:
    won = record.winner
    if record.action is Action.QUEUE:
        return "a wait for room"
    return "a refusal" if won is None else f"{won.model} at {_called(record, won.row)}"


def _body(record: DecisionRecord) -> list[list[str]]:
    return [
        list(_chosen(record)),
        list(_weighed(record)),
        list(_runners_up(record)),
        list(_left_out(record)),
        [f"hint {_hint(note)}" for note in record.hints],
        list(_authority(record)),
    ]


def _asked(record: DecisionRecord) -> str:
    req = record.req
    parts = [f"about {count(req.prompt_tokens, 'prompt token')}", f"{req.output_tokens:,} expected back"]
    if req.images:
        parts.append(count(req.images, "image"))
    if req.requires:
        parts.append("needs " + ", ".join(req.requires))
    if req.session is not None:
        parts.append("part of a session")
    named = req.model_asked or "a model that nobody offers"
    if req.model_resolved not in (req.model_asked, ""):
        named += f", that is {req.model_resolved}"
    how = "streamed" if req.stream else "in one piece"
    return f"asked for {named} ({req.dialect}, {req.request_class}, {how}): {'; '.join(parts)}"


_WAITS: Final = {
    Reason.STARTING: "this node has just started, so it waits for members that were not heard yet",
    Reason.SHED: "all candidates are so busy that background requests wait until there is less to do",
}
"""Why a request is queued, where it is not for want of room."""


def _chosen(record: DecisionRecord) -> Iterator[str]:
    if record.action is Action.QUEUE:
        why = _WAITS.get(record.reason, "no candidate has room for its class, so it waits in the router")
        yield f"queued ({record.reason.value}): {why}"
        return
    if record.chosen is None:
        said = REFUSALS.get(record.reason) or _nobody(record)
        if not record.view.rows and record.reason is Reason.MODEL_ABSENT:
            said = "no node offers the model"
        yield f"refused ({record.reason.value}, status {record.reason.status}): {said}"
        return
    worse = [kind for kind in record.degraded if record.reason is Reason.DEGRADED and kind != _CONFLICT]
    why = " and ".join(_degraded(record, kind) for kind in worse)
    why = why or (DRAWN if _was_drawn(record) else CHOICES.get(record.reason, record.reason.value))
    yield f"chosen: {_called(record, record.chosen)}, because {why}"
    chosen = record.winner
    if chosen is not None:
        if chosen.level:
            yield f"  as {chosen.model}: {STAND_INS[chosen.level]}"
        if chosen.price is not None:
            yield f"  outside the mesh, at a price of about {chosen.price:.4f}"
        yield "  " + (
            "warm: the model is in memory" if chosen.resident else "cold: the model must be loaded first"
        )
        yield f"  expected: {_estimate(chosen.est)}"
        yield f"  based on state {seconds(chosen.age_ms / 1_000)} old"
    yield from (f"  note: {_degraded(record, kind)}" for kind in record.degraded if kind not in worse)


def _nobody(record: DecisionRecord) -> str:
    """Why no candidate was left."""
    if record.reason is Reason.CAPABILITY:
        needs = record.req.requires
        return f"no endpoint supports {'all of ' if len(needs) > 1 else ''}{', '.join(needs) or 'what the request needs'}"
    return NOBODY.get(record.reason, f"no endpoint passed the check {record.reason.value}")


def _degraded(record: DecisionRecord, kind: str) -> str:
    said = DEGRADED.get(kind, kind)
    loaded = {row.detail for row in record.excluded if row.code is Reason.PRESSURE and row.detail}
    return f"{said} ({', '.join(sorted(loaded))})" if kind == "pressure" and loaded else said


def _estimate(est: Estimate) -> str:
    parts = {"wait": est.wait, "load": est.load, "prompt": est.prefill, "network": est.net}
    spelled = ", ".join(f"{name} {seconds(value)}" for name, value in parts.items() if value >= 0.0005)
    speed = f", {1 / est.tpot:.0f} tokens/s" if est.tpot > 0 else ""
    first = f"first token in {seconds(est.ttft)}" + (f" ({spelled})" if spelled else "")
    return f"{first}, all in {seconds(est.ect)}{speed}, give or take {est.sd:.0%}"


def _weighed(record: DecisionRecord) -> Iterator[str]:
    if len(record.candidates) < 2:
        return
    rows = sorted(record.candidates, key=lambda candidate: candidate.score)
    mixed = len({row.model for row in rows}) > 1
    which = "" if record.full else f"; the nearest of {record.view.rows} only"
    yield f"scores, lowest first{which}:"
    factors = [name for name in FACTORS if name != "spill" or any(row.f.spill for row in rows)]
    heads = ("", "", "score", *factors, "adj", "ahead", "wait", "load", "first token", "all in", "cost", "")
    table = [heads, *(_weights(record, row, factors, mixed=mixed) for row in rows[:SHOWN_WEIGHED])]
    yield from columns(table, right=frozenset(range(2, len(heads) - 1)))
    if len(rows) > SHOWN_WEIGHED:
        yield f"  and {len(rows) - SHOWN_WEIGHED} more"
    if record.view.cut:
        yield f"  {count(record.view.cut, 'candidate')} besides could serve, but would be done later than all of these"


def _weights(
    record: DecisionRecord, row: Candidate, factors: Sequence[str], *, mixed: bool
) -> tuple[str, ...]:
    est, chosen = row.est, row is record.winner
    costs = (row.score, *(getattr(row.f, name) for name in factors), row.adj)
    times = (est.wait, est.load, est.ttft, est.ect, est.cost)
    state = [] if row.resident else [_COLD]
    if row.out not in (None, _COLD) and not chosen:
        state.append(row.out.partition(":")[0])
    return (
        "*" if chosen else "",
        f"{row.model} at {_called(record, row.row)}" if mixed else _called(record, row.row),
        *(f"{cost:.3f}" for cost in costs),
        f"{est.ahead:.1f}",
        *map(seconds, times),
        ", ".join(state),
    )


def _authority(record: DecisionRecord) -> Iterator[str]:
    note = record.authority
    if note.outcome is not AuthorityOutcome.OFF:
        said = f", saying: {note.reason}" if note.reason else ""
        yield f"authority ({note.mode.value}): {AUTHORITY[note.outcome]}, after {note.ms} ms{said}"


def _runners_up(record: DecisionRecord) -> Iterator[str]:
    if not record.alternatives:
        if record.chosen is not None:
            yield "nothing else could have served it"
        return
    yield "runner-up:" if len(record.alternatives) == 1 else "runners-up:"
    yield from columns([("", *_alternative(record, alternative)) for alternative in record.alternatives])


def _was_drawn(record: DecisionRecord) -> bool:
    """True if a row that stood to the end cost even less: chance picked among those that are as good."""
    return any(_costs_less(record, alternative, 0.0) for alternative in record.alternatives)


def _costs_less(record: DecisionRecord, alternative: Alternative, than_chosen_and: float) -> bool:
    chosen, row = record.winner, _row_of(record, alternative)
    return (
        record.reason is Reason.NATIVE
        and chosen is not None
        and row is not None
        and row.out is None
        and alternative.score < chosen.score + than_chosen_and
    )


def _row_of(record: DecisionRecord, alternative: Alternative) -> Candidate | None:
    place = alternative.row, alternative.score
    return next((row for row in record.candidates if (row.row, row.score) == place), None)


def _alternative(record: DecisionRecord, alternative: Alternative) -> tuple[str, str, str]:
    """An alternative that costs as much, as far as that is shown, has nothing against it that is worth a word."""
    factor = "draw" if _costs_less(record, alternative, LEAST_SHOWN) else alternative.top_factor
    against = AGAINST.get(factor, factor)
    said = f"score {alternative.score:.3f}"
    chosen = record.winner
    if chosen is not None:
        said += f" against {chosen.score:.3f}"
    row = _row_of(record, alternative)
    if row is not None and row.out is not None:
        against += f"; {_out(record, row.out)}"
    return _called(record, alternative.row), said, against


def _out(record: DecisionRecord, out: str) -> str:
    kind, _, better = out.partition(":")
    return (
        f"{_called(record, better)} is at least as good in everything"
        if kind == "dominated"
        else OUTS.get(kind, out)
    )


def _left_out(record: DecisionRecord) -> Iterator[str]:
    if not record.excluded_counts:
        return
    yield f"left out: {count(sum(record.excluded_counts.values()), 'candidate')}"
    shown = record.excluded[:SHOWN_EXCLUDED]
    if shown:
        yield from columns([("", _called(record, row.row), _exclusion(row)) for row in shown])
    for code, number in sorted(record.excluded_counts.items()):
        rest = number - sum(1 for row in shown if row.code.value == code)
        if rest > 0:
            yield f"  and {rest} more that {_plural(code)}"


def _exclusion(row: Excluded) -> str:
    if row.detail in DETAILS:
        return DETAILS[row.detail]
    said = EXCLUSIONS.get(row.code, row.code.value)
    return f"{said} ({row.detail})" if row.detail else said


def _plural(code: str) -> str:
    said = next((words for reason, words in EXCLUSIONS.items() if reason.value == code), None)
    return f"were left out as {code}" if said is None else f"each {said}"


def _hint(note: HintNote) -> str:
    what = note.hint if note.ref is None else f"{note.hint} {note.ref}"
    said = HINTS[note.outcome]
    if note.outcome is HintOutcome.EXCLUDED and note.detail is not None:
        reason = next((r for r in EXCLUSIONS if r.value == note.detail), None)
        said += f": it {EXCLUSIONS[reason]}" if reason is not None else f": {note.detail}"
    elif note.detail is not None:
        said += f" ({note.detail})"
    return f"{what}: {said}"


def _attempts(record: DecisionRecord) -> Iterator[str]:
    for number, attempt in enumerate(record.attempts, start=1):
        steps = [f"sent to {attempt.row} after {attempt.start_ms} ms"]
        if attempt.connect_ms is not None:
            steps.append(f"connected after {attempt.connect_ms} ms")
        if attempt.first_byte_ms is not None:
            steps.append(f"first byte after {attempt.first_byte_ms} ms")
        if attempt.refused is not None:
            steps.append(f"declined there: {attempt.refused}")
        if attempt.result:
            steps.append(attempt.result)
        yield f"attempt {number}: {', '.join(steps)}"


def _ended(record: DecisionRecord) -> Iterator[str]:
    end = record.outcome
    if end is None:
        yield "outcome: not known yet"
        return
    said = [f"status {end.status} after {seconds(end.total_ms / 1_000)}"]
    if end.held_ms is not None:
        said.append(f"waited {seconds(end.held_ms / 1_000)} for room")
    if end.ttft_ms is not None:
        said.append(f"first token after {seconds(end.ttft_ms / 1_000)}")
    if end.out_tokens is not None:
        said.append(count(end.out_tokens, "token"))
    if end.cancelled_by is not None:
        said.append(f"cancelled by {end.cancelled_by}")
    yield f"outcome: {', '.join(said)}"
    yield from (f"  {line}" for line in _errors(record, end))


def _errors(record: DecisionRecord, end: Ending) -> Iterator[str]:
    """Predicted against actual; an error is ln(actual / predicted)."""
    chosen = record.winner
    if chosen is None:
        return
    for name, predicted, error in (
        ("first token", chosen.est.ttft, end.err_ttft),
        ("whole answer", chosen.est.ect, end.err_ect),
    ):
        if error is not None:
            actual = predicted * math.exp(error)
            yield f"{name}: predicted {seconds(predicted)}, was {seconds(actual)} ({_off_by(error)})"


def _off_by(error: float) -> str:
    ratio = math.exp(error)
    if abs(error) < AS_PREDICTED:
        return "as predicted"
    if ratio >= 2:
        return f"{ratio:.1f} times as long"
    return f"{ratio - 1:.0%} longer" if error > 0 else f"{1 - ratio:.0%} shorter"


def _called(record: DecisionRecord, row: str) -> str:
    return record.names.get(row, row)
