"""What a request may ask that cannot be had: each has its outcome and its code, and changes nothing for the others."""

from typing import Any

import msgspec
import pytest

from router_core.placement.decision.decision import Decision
from router_core.placement.reasons import Action, HintOutcome, Reason
from tests.support.fleets import a_fleet, a_request, a_row, chosen_node, decided, parsed_hints

STRANGER = a_row("stranger").node_id
ROWS = (
    a_row("me", is_self=True, tg=20.0),
    a_row("a", labels=frozenset({("room", "attic")}), params_m=8_000, bits=4.9),
    a_row("b", engine="vllm", tg=30.0),
)
NATIVE = "a"

REFUSED: list[tuple[dict[str, str], Reason]] = [
    ({"require": "node=@nobody"}, Reason.NOT_IN_SUBSET),
    ({"require": f"node={STRANGER}"}, Reason.NOT_IN_SUBSET),
    ({"require": "node=@a/elsewhere"}, Reason.NOT_IN_SUBSET),
    ({"require": "node=@a,!node=@a"}, Reason.NOT_IN_SUBSET),
    ({"require": "engine=vllm,engine=llamacpp"}, Reason.NOT_IN_SUBSET),
    ({"require": "node=@a,engine=vllm"}, Reason.NOT_IN_SUBSET),
    ({"require": "label=room:attic,!label=room:attic"}, Reason.NOT_IN_SUBSET),
    ({"require": "node=@b", "locality": "host"}, Reason.NOT_IN_SUBSET),
    ({"require": "node=@nobody", "prefer": "@a"}, Reason.NOT_IN_SUBSET),
    ({"require": "cap=vision"}, Reason.CAPABILITY),
    ({"require": "params>=70"}, Reason.CAPABILITY),
    ({"require": "bits>=16", "match": "any"}, Reason.CAPABILITY),
    ({"require": "ctx>=999999999"}, Reason.CONTEXT_TOO_SMALL),
]
"""What cannot be had, and the code of its refusal."""

IGNORED: list[tuple[dict[str, str], str, HintOutcome]] = [
    ({"prefer": "@nobody"}, "prefer", HintOutcome.IGNORED_UNKNOWN),
    ({"prefer": STRANGER}, "prefer", HintOutcome.IGNORED_UNKNOWN),
    ({"prefer": "@a/elsewhere"}, "prefer", HintOutcome.IGNORED_UNKNOWN),
    ({"prefer": "everybody"}, "prefer", HintOutcome.IGNORED_MALFORMED),
    ({"class": "urgent"}, "class", HintOutcome.IGNORED_MALFORMED),
    ({"match": "loose"}, "match", HintOutcome.IGNORED_MALFORMED),
    ({"slo_ttft_ms": "0"}, "slo_ttft_ms", HintOutcome.IGNORED_MALFORMED),
    ({"deadline_ms": "soon"}, "deadline_ms", HintOutcome.IGNORED_MALFORMED),
    ({"locality": "any"}, "locality", HintOutcome.CLAMPED),
    ({"colour": "blue"}, "header", HintOutcome.IGNORED_UNKNOWN),
]
"""What changes nothing, and what is said of it."""


def asked(**hints: str) -> Decision:
    fleet = a_fleet(*ROWS)
    decision = decided(a_request(hints=parsed_hints(**hints)), fleet)
    assert len(fleet.live.ledger) == 0
    msgspec.json.encode(decision.record)
    return decision


@pytest.mark.parametrize(("hints", "reason"), REFUSED)
def test_what_cannot_be_had_is_refused_with_its_code_and_every_row_is_accounted_for(
    hints: dict[str, Any], reason: Reason
) -> None:
    decision = asked(**hints)
    assert (decision.action, decision.reason, decision.chosen) == (Action.REJECT, reason, None)
    assert sum(decision.record.excluded_counts.values()) == len(ROWS)
    assert reason.value in decision.record.excluded_counts
    assert (decision.retry_after_s is not None) is (reason.status in (429, 503))
    narrowing = {"require", "locality"} & hints.keys()
    told = {note.hint: (note.outcome, note.detail) for note in decision.record.hints}
    assert all(told[hint] == (HintOutcome.EXCLUDED, reason.value) for hint in narrowing)


@pytest.mark.parametrize(("hints", "hint", "outcome"), IGNORED)
def test_advice_that_cannot_be_taken_is_told_and_the_choice_is_the_native_one(
    hints: dict[str, Any], hint: str, outcome: HintOutcome
) -> None:
    decision = asked(**hints)
    assert (chosen_node(decision), decision.reason) == (NATIVE, Reason.NATIVE)
    assert [(note.hint, note.outcome) for note in decision.record.hints] == [(hint, outcome)]


def test_targets_that_nobody_can_meet_refuse_nobody_and_the_record_says_how_far_they_are() -> None:
    decision = asked(slo_ttft_ms="1", slo_tpot_ms="1")
    assert (chosen_node(decision), decision.reason) == (NATIVE, Reason.NATIVE)
    assert all(candidate.f.slo > 0.99 for candidate in decision.record.candidates)
    assert (decision.record.req.slo_ttft_ms, decision.record.req.slo_tpot_ms) == (1, 1)


def test_who_asks_too_much_of_every_context_is_not_told_to_come_back() -> None:
    decision = decided(a_request(text_bytes=2**25, sure_tokens=2**21), a_fleet(*ROWS))
    assert (decision.action, decision.reason) == (Action.REJECT, Reason.CONTEXT_TOO_SMALL)
    assert decision.retry_after_s is None
