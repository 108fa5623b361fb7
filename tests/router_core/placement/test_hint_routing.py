"""What hints do to a decision: they narrow or nudge, never more, and every one is accounted for."""

from random import Random
from typing import Any

import pytest

from router_core.placement.candidates.candidate import Row
from router_core.placement.decision.decide import decide
from router_core.placement.decision.decision import Decision
from router_core.placement.reasons import Action, HintOutcome, Reason
from router_core.placement.request.hints import HintFault, parse_hints
from router_core.placement.request.request import NO_HINTS, Hints
from tests.support.fleets import (
    NOW,
    POLICY,
    a_fleet,
    a_request,
    a_row,
    choice_of,
    chosen_node,
    decided,
    parsed_hints,
)


def preferring(text: str, *rows: Row, **over: Any) -> Decision:
    return decided(a_request(hints=parsed_hints(prefer=text), **over), a_fleet(*rows))


def outcome_of(decision: Decision, hint: str = "prefer") -> tuple[HintOutcome, str | None]:
    (note,) = (note for note in decision.record.hints if note.hint == hint)
    return note.outcome, note.detail


SLOWER = {"tg": 40.0}


def test_a_preferred_node_is_used_only_if_reachable_trusted_and_owner_of_the_model() -> None:
    other = a_row("b")
    good = preferring("@a", a_row("a", **SLOWER), other)
    assert chosen_node(good) == "a"
    assert good.reason is Reason.HINT
    assert outcome_of(good) == (HintOutcome.HONOURED, None)

    for over, code in (
        ({"down": "gone"}, "unreachable"),
        ({"untrusted": True}, "untrusted"),
        ({"draining": True}, "draining"),
        ({"model": "small"}, "model_absent"),
    ):
        decision = preferring("@a", a_row("a", **over), other)
        assert chosen_node(decision) == "b", over
        assert decision.reason is Reason.NATIVE
        assert outcome_of(decision) == (HintOutcome.EXCLUDED, code)


def test_a_preference_does_not_buy_a_far_worse_row() -> None:
    decision = preferring("@a", a_row("a", tg=5.0), a_row("b"))
    assert chosen_node(decision) == "b"
    assert outcome_of(decision) == (HintOutcome.OUTSCORED, None)


def test_of_nodes_that_share_a_name_a_marked_reference_means_one() -> None:
    """gpustack/gpustack#2046: two hosts called ``ubuntu``."""
    one, other = (a_row(key, node_name="ubuntu") for key in ("a", "b"))
    for row in (one, other):
        mark = row.node_id[:4]
        assert one.node_id[:4] != other.node_id[:4]
        for hints in ({"prefer": f"@ubuntu~{mark}"}, {"require": f"node=@ubuntu~{mark}"}):
            decision = decided(a_request(hints=parsed_hints(**hints)), a_fleet(one, other))
            assert decision.chosen is not None
            assert decision.chosen.node_id == row.node_id, hints
    nobody = decided(a_request(hints=parsed_hints(prefer="@ubuntu~2222")), a_fleet(one, other))
    assert outcome_of(nobody) == (HintOutcome.IGNORED_UNKNOWN, None)
    either = decided(a_request(hints=parsed_hints(require="node=@ubuntu")), a_fleet(one, other))
    assert either.chosen is not None


def test_ranked_preferences_fall_back_in_order() -> None:
    rows = (a_row("a"), a_row("b"), a_row("c"))
    assert chosen_node(preferring("@c,@b", *rows)) == "c"
    assert chosen_node(preferring("@gone,@b", *rows)) == "b"
    decision = preferring("@gone,@b", *rows)
    assert [note.outcome for note in decision.record.hints] == [
        HintOutcome.IGNORED_UNKNOWN,
        HintOutcome.HONOURED,
    ]


def test_a_preference_may_name_one_endpoint_or_a_node_id() -> None:
    slow, fast = a_row("a", endpoint="ollama"), a_row("a", endpoint="llamacpp", tg=60)
    assert choice_of(preferring("@a/ollama", slow, fast)).endpoint_name == "ollama"
    assert chosen_node(preferring(a_row("b").node_id, a_row("a"), a_row("b", **SLOWER))) == "b"
    assert outcome_of(preferring("@a/vllm", slow, fast)) == (HintOutcome.IGNORED_UNKNOWN, None)


def test_the_label_of_a_row_can_be_pasted_into_prefer() -> None:
    row = a_row("b", **SLOWER)
    assert chosen_node(preferring(row.label, a_row("a"), row)) == "b"


def test_two_concurrent_requests_with_opposite_hints_never_mix() -> None:
    """A thousand interleavings of deciding, reserving and ending, on one fleet and one ledger."""
    fleet = a_fleet(a_row("left", slots=200), a_row("right", slots=200))
    ledger = fleet.live.ledger
    order, rng = Random(11), Random(12)
    wishes = {"left": parsed_hints(prefer="@left"), "right": parsed_hints(prefer="@right")}
    open_work: list[tuple[str, int]] = []
    for turn in range(1000):
        sides = ["left", "right"]
        order.shuffle(sides)
        decisions = {}
        for side in sides:
            request = a_request(request_id=f"{side}-{turn}", hints=wishes[side])
            decisions[side] = decide(request, fleet, POLICY, NOW, rng)
            if order.random() < 0.5:
                open_work.append((side, ledger.reserve(choice_of(decisions[side]), NOW).seq))
        while open_work and order.random() < 0.6:
            ledger.end(open_work.pop(order.randrange(len(open_work)))[1])
        for side, decision in decisions.items():
            assert decision.request_id == decision.record.request_id == f"{side}-{turn}"
            assert [note.ref for note in decision.record.hints] == [f"@{side}"]
            assert decision.record.hints[0].outcome in (HintOutcome.HONOURED, HintOutcome.OUTSCORED)
            own = next(row for row in fleet.rows if row.node_name == side)
            adjusted = {row.row: row.adj for row in decision.record.candidates}
            assert adjusted == {row.key: (-POLICY.hint_bonus if row is own else 0.0) for row in fleet.rows}
    for _, seq in open_work:
        ledger.end(seq)
    assert not ledger.owed


def test_opposite_requirements_always_land_on_their_own_node() -> None:
    fleet = a_fleet(a_row("left"), a_row("right"))
    for turn in range(200):
        for side in ("left", "right") if turn % 2 else ("right", "left"):
            request = a_request(request_id=f"{side}{turn}", hints=parsed_hints(require=f"node=@{side}"))
            assert chosen_node(decided(request, fleet)) == side


def test_a_request_without_hints_behaves_as_if_the_feature_were_not_there() -> None:
    fleet = a_fleet(a_row("a", tg=30), a_row("b"), a_row("c", tg=70, in_flight=4, queued=4))
    hints = parse_hints([("accept", "*/*"), ("x-request-id", "r1")], None)
    assert hints == NO_HINTS
    for number in range(50):
        bare = decided(a_request(request_id=f"r{number}"), fleet)
        with_parser = decided(a_request(request_id=f"r{number}", hints=hints), fleet)
        assert bare == with_parser
        assert bare.record.hints == ()
        assert bare.reason is Reason.NATIVE
        assert all(candidate.adj == 0.0 for candidate in bare.record.candidates)


@pytest.mark.parametrize(
    ("headers", "body", "outcome"),
    [
        ([("x-pairmesh-prefer", "not a ref")], None, ("prefer", HintOutcome.IGNORED_MALFORMED)),
        ([("x-pairmesh-prefer", "@nobody")], None, ("prefer", HintOutcome.IGNORED_UNKNOWN)),
        ([("x-pairmesh-future", "1")], None, ("header", HintOutcome.IGNORED_UNKNOWN)),
        ([], b'{"future": 1}', ("pairmesh", HintOutcome.IGNORED_UNKNOWN)),
        ([("x-pairmesh-match", "family")], None, ("match", HintOutcome.HONOURED)),
        ([("x-pairmesh-match", "similar")], None, ("match", HintOutcome.IGNORED_MALFORMED)),
        ([("x-pairmesh-locality", "any")], None, ("locality", HintOutcome.CLAMPED)),
        ([("x-pairmesh-class", "urgent")], None, ("class", HintOutcome.IGNORED_MALFORMED)),
    ],
)
def test_an_unknown_or_malformed_hint_is_handled_counted_and_explained(
    headers: list[tuple[str, str]], body: bytes | None, outcome: tuple[str, HintOutcome]
) -> None:
    fleet = a_fleet(a_row("a", tg=30), a_row("b"))
    hints = parse_hints(headers, body)
    assert isinstance(hints, Hints)
    decision = decided(a_request(hints=hints), fleet)
    assert chosen_node(decision) == chosen_node(decided(a_request(), fleet))
    assert [(note.hint, note.outcome) for note in decision.record.hints] == [outcome]


def test_a_malformed_narrowing_hint_is_refused_with_its_code() -> None:
    fault = parse_hints([("x-pairmesh-require", "node=")])
    assert isinstance(fault, HintFault)
    assert (Reason.HINT_MALFORMED.value, Reason.HINT_MALFORMED.status) == ("hint_malformed", 400)


def test_an_unknown_node_in_a_requirement_matches_nothing_never_everything() -> None:
    decision = decided(a_request(hints=parsed_hints(require="node=@nobody")), a_fleet(a_row("a"), a_row("b")))
    assert decision.action is Action.REJECT
    assert decision.reason is Reason.NOT_IN_SUBSET
    assert outcome_of(decision, "require") == (HintOutcome.EXCLUDED, "not_in_subset")


def test_several_required_nodes_mean_any_of_them_and_other_terms_all() -> None:
    rows = (a_row("a", tg=500), a_row("b", tg=5), a_row("c", tg=6, engine="vllm"))
    either = decided(a_request(hints=parsed_hints(require="node=@b,node=@c")), a_fleet(*rows))
    assert chosen_node(either) in ("b", "c")
    both = decided(a_request(hints=parsed_hints(require="node=@b,node=@c,engine=vllm")), a_fleet(*rows))
    assert chosen_node(both) == "c"


def test_locality_host_stays_on_this_node() -> None:
    rows = (a_row("me", is_self=True, tg=5), a_row("b", tg=500))
    assert chosen_node(decided(a_request(hints=parsed_hints(locality="host")), a_fleet(*rows))) == "me"
    assert chosen_node(decided(a_request(), a_fleet(*rows))) == "b"


@pytest.mark.lesson("BerriAI/litellm#33214: 0 read as not told")
def test_a_told_output_of_zero_stays_zero() -> None:
    decision = decided(a_request(hints=parsed_hints(expect_tokens="0")), a_fleet(a_row("a")))
    assert choice_of(decision).output_tokens == 0
    assert choice_of(decided(a_request(output_cap=0), a_fleet(a_row("a")))).output_tokens == 0
    assert choice_of(decided(a_request(), a_fleet(a_row("a")))).output_tokens == 256


@pytest.mark.parametrize("pressure", [0.05, 0.1, 0.3, 0.7])
def test_a_hint_did_not_decide_between_rows_that_nothing_else_tells_apart(pressure: float) -> None:
    fleet = a_fleet(a_row("a", pressure=pressure), a_row("b", pressure=pressure))
    for number in range(20):
        request = a_request(request_id=f"r{number}", hints=parsed_hints(prefer="@a"), text_bytes=100 * number)
        decision = decided(request, fleet)
        assert (chosen_node(decision), decision.reason) == ("a", Reason.NATIVE)


@pytest.mark.parametrize(
    ("cap", "expected", "tokens"),
    [(None, None, 256), (50, None, 50), (4_096, None, 256), (50, "10", 10), (50, "100", 50), (None, "9", 9)],
)
def test_an_answer_is_as_long_as_usual_or_as_told_and_never_longer_than_its_cap(
    cap: int | None, expected: str | None, tokens: int
) -> None:
    hints = NO_HINTS if expected is None else parsed_hints(expect_tokens=expected)
    decision = decided(a_request(output_cap=cap, hints=hints), a_fleet(a_row("a")))
    assert choice_of(decision).output_tokens == tokens


def test_a_hint_did_not_decide_against_a_row_that_could_not_have_been_chosen() -> None:
    warm = a_row("a", pp=300, tg=100, pressure=0.9)
    cold = a_row("b", resident=False, load_s=6.0, memory=0.1, pp=3_000, tg=100)
    request = a_request(hints=parsed_hints(prefer="@a"), output_cap=100)
    decision = decided(request, a_fleet(warm, cold))
    scores = {told.row: told.score - told.adj for told in decision.record.candidates}
    assert scores[cold.key] < scores[warm.key]
    assert (chosen_node(decision), decision.reason) == ("a", Reason.NATIVE)
