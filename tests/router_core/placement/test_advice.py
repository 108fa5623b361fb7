"""An authority ranks what may serve anyway; it adds no row, excuses none, and is told nothing of what was said."""

import dataclasses
import json
import math
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from router_core import limits
from router_core.placement.candidates.candidate import Row
from router_core.placement.candidates.fleet import Fleet
from router_core.placement.decision.authority import (
    AnswerFault,
    Question,
    coarse,
    led_by,
    parse_answer,
    power_of_two,
    question_of,
)
from router_core.placement.decision.decision import Decision
from router_core.placement.reasons import Action, AuthorityOutcome, HintOutcome, Reason
from router_core.placement.record import NO_AUTHORITY, AuthorityNote
from router_core.placement.request.request import Advice, Counsel, Hints, Locality, Pin, PlacementRequest
from router_core.placement.scoring.survey import survey
from router_core.policy.authority import AuthorityMode
from router_core.policy.placement import PlacementPolicy
from tests.router_core.placement.test_decide import NAMES, fleets, open_rows, requests
from tests.support.fleets import (
    NOW,
    POLICY,
    a_fleet,
    a_request,
    a_row,
    after_failure,
    choice_of,
    chosen_node,
    decided,
    parsed_hints,
)

KEYS = [a_row(name).key for name in (*NAMES, "stranger")]


def a_counsel(
    *order: str,
    mode: AuthorityMode = AuthorityMode.AUTHORITATIVE,
    weights: tuple[float, ...] | None = None,
    **over: Any,
) -> Counsel:
    """The authority answered ``order``, names of nodes."""
    advice = Advice(order=tuple(a_row(name).key for name in order), weights=weights, ttl_ms=1_000)
    fields: dict[str, Any] = {
        "outcome": AuthorityOutcome.USED,
        "decision_id": "d1",
        "ms": 7,
        "advice": advice,
    }
    return Counsel(mode=mode, **(fields | over))


def order_of(decision: Decision) -> list[str]:
    """The endpoints in the order of trying; fleets here are small enough to be shown whole."""
    assert decision.record.full
    return [row.row for row in decision.record.candidates]


RANKS = ("", "dominated", "cold", "veto", "backup")
modes = st.sampled_from([AuthorityMode.ADVISORY, AuthorityMode.AUTHORITATIVE])
advices = (st.lists(st.sampled_from(KEYS), max_size=7, unique=True) | st.permutations(KEYS)).flatmap(
    lambda order: st.builds(
        Advice,
        order=st.just(tuple(order)),
        weights=st.none() | st.tuples(*(st.floats(1e-300, 1e300) for _ in order)),
        ttl_ms=st.just(1_000),
    )
)
counsels = st.builds(
    Counsel,
    mode=modes,
    outcome=st.sampled_from([AuthorityOutcome.USED, AuthorityOutcome.CACHED]),
    decision_id=st.just("d1"),
    advice=advices,
)


# --- what an answer means ------------------------------------------------------------------------------------


def test_an_answer_is_read_whole() -> None:
    raw = b'{"v":1,"order":["n/a","n/b"],"weights":[3,0.5],"ttl_ms":0,"reason":"cheap first","more":[{}]}'
    assert parse_answer(raw) == Advice(
        order=("n/a", "n/b"), weights=(3.0, 0.5), ttl_ms=0, reason="cheap first"
    )
    assert parse_answer(b'{"v":1,"order":[],"weights":null,"reason":null}') == Advice(order=(), ttl_ms=1_000)


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        (b" " * (16 * 1024 + 1), AnswerFault.TOO_LARGE),
        (b"", AnswerFault.NOT_JSON),
        (b"\xff\xfe", AnswerFault.NOT_JSON),
        (b"[" * 16_000, AnswerFault.NOT_JSON),
        (b'{"x":' * 3_000, AnswerFault.NOT_JSON),
        (b"[]", AnswerFault.NOT_JSON),
        (b'{"v":1,"order":[]} again', AnswerFault.NOT_JSON),
        (b'{"order":[]}', AnswerFault.VERSION),
        (b'{"v":2,"order":[]}', AnswerFault.VERSION),
        (b'{"v":"1","order":[]}', AnswerFault.VERSION),
        (b'{"v":true,"order":[]}', AnswerFault.VERSION),
        (b'{"v":1}', AnswerFault.ORDER),
        (b'{"v":1,"order":"n/a"}', AnswerFault.ORDER),
        (b'{"v":1,"order":[1]}', AnswerFault.ORDER),
        (b'{"v":1,"order":["n/a","n/a"]}', AnswerFault.ORDER),
        (json.dumps({"v": 1, "order": [f"n/{i}" for i in range(65)]}).encode(), AnswerFault.ORDER),
        (b'{"v":1,"order":["n/a"],"weights":[]}', AnswerFault.WEIGHTS),
        (b'{"v":1,"order":["n/a"],"weights":[1,1]}', AnswerFault.WEIGHTS),
        (b'{"v":1,"order":["n/a"],"weights":[0]}', AnswerFault.WEIGHTS),
        (b'{"v":1,"order":["n/a"],"weights":[-1]}', AnswerFault.WEIGHTS),
        (b'{"v":1,"order":["n/a"],"weights":[1e999]}', AnswerFault.WEIGHTS),
        (b'{"v":1,"order":["n/a"],"weights":[true]}', AnswerFault.WEIGHTS),
        (b'{"v":1,"order":["n/a"],"weights":["1"]}', AnswerFault.WEIGHTS),
        (b'{"v":1,"order":["n/a"],"weights":[NaN]}', AnswerFault.NOT_JSON),
        (b'{"v":1,"order":[],"ttl_ms":10001}', AnswerFault.TTL),
        (b'{"v":1,"order":[],"ttl_ms":-1}', AnswerFault.TTL),
        (b'{"v":1,"order":[],"ttl_ms":0.5}', AnswerFault.TTL),
        (b'{"v":1,"order":[],"reason":"' + b"x" * 129 + b'"}', AnswerFault.REASON),
        (b'{"v":1,"order":[],"reason":"a\\nb"}', AnswerFault.REASON),
        (b'{"v":1,"order":[],"reason":"\\u001b[2J"}', AnswerFault.REASON),
        ('{"v":1,"order":[],"reason":"é"}'.encode(), AnswerFault.REASON),
    ],
)
def test_an_answer_is_wholly_valid_or_a_fault(raw: bytes, fault: AnswerFault) -> None:
    assert parse_answer(raw) is fault


def _bounded(answer: object) -> None:
    assert isinstance(answer, Advice | AnswerFault)
    if isinstance(answer, Advice):
        assert len(answer.order) <= limits.AUTHORITY_IDS
        assert answer.weights is None or len(answer.weights) == len(answer.order)
        assert all(0 < weight < math.inf for weight in answer.weights or ())
        assert 0 <= answer.ttl_ms <= limits.AUTHORITY_TTL
        assert len(answer.reason or "") <= limits.AUTHORITY_REASON


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=200),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.binary(max_size=300))
def test_no_bytes_make_the_reader_stumble(raw: bytes) -> None:
    _bounded(parse_answer(raw))


@given(
    st.dictionaries(
        st.sampled_from(["v", "order", "weights", "ttl_ms", "reason", "x"]), st.just(1) | _values, max_size=6
    )
)
def test_no_json_makes_the_reader_stumble(tree: dict[str, Any]) -> None:
    _bounded(parse_answer(json.dumps(tree).encode()))


@given(advices)
def test_what_is_written_as_an_answer_is_read_back(advice: Advice) -> None:
    raw = msgspec.json.encode({"v": 1, **msgspec.structs.asdict(advice)})
    read = parse_answer(raw)
    assert isinstance(read, Advice)
    assert (read.order, read.ttl_ms) == (advice.order, advice.ttl_ms)
    assert (read.weights is None) is (advice.weights is None)


# --- what it changes -----------------------------------------------------------------------------------------


@pytest.mark.promise("nor is it by an authority")
@settings(max_examples=100, deadline=None)
@given(fleets(), requests, counsels)
def test_an_authority_never_gets_an_excluded_row_chosen_and_adds_none(
    found: tuple[Row, ...], request: PlacementRequest, counsel: Counsel
) -> None:
    fleet = a_fleet(*found)
    native = decided(request, fleet)
    led = decided(replace(request, advice=counsel), fleet)
    assert led.action in ({native.action} if native.chosen is None else {Action.ROUTE, Action.ROUTE_COLD})
    assert set(order_of(led)) == set(order_of(native))
    assert led.record.excluded == native.record.excluded
    assert led.record.excluded_counts == native.record.excluded_counts
    if led.chosen is not None:
        assert led.chosen.endpoint == order_of(led)[0]
        assert led.chosen.endpoint not in {gone.row for gone in led.record.excluded}


@settings(max_examples=50, deadline=None)
@given(fleets(), requests, counsels)
def test_equal_questions_and_answers_give_equal_decisions(
    found: tuple[Row, ...], request: PlacementRequest, counsel: Counsel
) -> None:
    fleet = a_fleet(*found)
    advised = replace(request, advice=counsel)
    assert decided(advised, fleet) == decided(advised, fleet)


@settings(max_examples=100, deadline=None)
@given(fleets(**open_rows), requests, st.permutations(KEYS))
def test_the_first_eligible_id_of_an_authoritative_answer_serves_and_the_native_order_follows(
    found: tuple[Row, ...], request: PlacementRequest, keys: list[str]
) -> None:
    fleet = a_fleet(*found)
    native = decided(request, fleet)
    running = {scored.row.key for scored in survey(request, fleet, POLICY, NOW).scored}
    counsel = replace(a_counsel(), advice=Advice(order=tuple(keys), ttl_ms=0))
    led = decided(replace(request, advice=counsel), fleet)
    if not running:
        assert order_of(led) == order_of(native)
        return
    first = next(key for key in keys if key in running)
    assert order_of(led)[0] == first
    assert sorted(order_of(led)) == sorted(order_of(native))
    ranks = [(RANKS.index((row.out or "").partition(":")[0]), row.score) for row in led.record.candidates[1:]]
    assert ranks == sorted(ranks)
    assert led.record.authority.first == first
    assert led.reason is (Reason.DEGRADED if led.record.degraded else Reason.AUTHORITY)


@settings(max_examples=100, deadline=None)
@given(
    fleets(),
    requests,
    modes,
    st.sampled_from([one for one in AuthorityOutcome if one.value not in ("used", "cached")]),
)
def test_without_an_answer_that_counts_the_choice_is_the_native_one(
    found: tuple[Row, ...], request: PlacementRequest, mode: AuthorityMode, outcome: AuthorityOutcome
) -> None:
    fleet = a_fleet(*found)
    native = decided(request, fleet)
    advice = Advice(order=(a_row("stranger").key,), ttl_ms=0)
    if outcome is not AuthorityOutcome.EMPTY_INTERSECTION:
        counsel = Counsel(mode=mode, outcome=outcome, decision_id=native.id)
    else:
        counsel = Counsel(mode=mode, outcome=AuthorityOutcome.USED, decision_id=native.id, advice=advice)
    led = decided(replace(request, advice=counsel, attempt=1), fleet)
    native = decided(replace(request, attempt=1), fleet)
    assert (led.action, led.reason, order_of(led)) == (native.action, native.reason, order_of(native))
    assert led.record.authority.outcome is outcome
    assert led.record.authority.first is None
    assert led.record.margin == native.record.margin


@settings(max_examples=80, deadline=None)
@given(fleets(**open_rows), st.permutations(KEYS))
def test_advice_beats_the_veto_no_more_than_a_hint_does(found: tuple[Row, ...], keys: list[str]) -> None:
    fleet = a_fleet(*found)
    counsel = replace(a_counsel(mode=AuthorityMode.ADVISORY), advice=Advice(order=tuple(keys), ttl_ms=0))
    led = decided(a_request(advice=counsel), fleet)
    rows = {scored.row.key: scored for scored in survey(a_request(), fleet, POLICY, NOW).scored}
    if any(scored.worst < POLICY.veto_needs_below for scored in rows.values()):
        assert led.chosen is not None
        assert rows[led.chosen.endpoint].worst <= POLICY.veto_above


def test_an_authoritative_answer_wins_over_cost_veto_and_preference() -> None:
    fleet = a_fleet(a_row("a", tg=500), a_row("b", tg=80), a_row("c", tg=0.5, pressure=0.99))
    wish = a_request(hints=parsed_hints(prefer="@b"))
    led = decided(replace(wish, advice=a_counsel("c", "a")), fleet)
    assert (chosen_node(led), led.reason) == ("c", Reason.AUTHORITY)
    assert [note.outcome for note in led.record.hints] == [HintOutcome.OUTSCORED]
    note = led.record.authority
    assert (note.mode.value, note.outcome.value, note.ms) == ("authoritative", "used", 7)
    assert led.id == "d1"
    assert (led.record.margin or 0.0) < 0
    chosen = next(each for each in led.record.candidates if each.row == led.record.chosen)
    assert chosen.out is None


def test_advice_is_a_hint_ranked_by_its_order_and_takes_the_place_of_preference() -> None:
    fleet = a_fleet(a_row("a", tg=70), a_row("b", tg=60), a_row("c", tg=50))
    assert chosen_node(decided(a_request(), fleet)) == "a"
    advised = a_request(hints=parsed_hints(prefer="@b"), advice=a_counsel("c", mode=AuthorityMode.ADVISORY))
    led = decided(advised, fleet)
    assert (chosen_node(led), led.reason) == ("c", Reason.AUTHORITY)
    far = a_fleet(a_row("a", tg=70), a_row("c", tg=2, pressure=0.8))
    led = decided(advised, far)
    assert (chosen_node(led), led.reason) == ("a", Reason.NATIVE)
    assert led.record.authority.outcome is AuthorityOutcome.USED


@pytest.mark.parametrize("mode", [AuthorityMode.ADVISORY, AuthorityMode.AUTHORITATIVE])
@pytest.mark.parametrize(
    ("hints", "code"),
    [
        (parsed_hints(require="!node=@b"), Reason.NOT_IN_SUBSET),
        (replace(parsed_hints(), locality=Locality.HOST), Reason.LOCALITY),
    ],
)
def test_an_authority_beats_neither_a_requirement_nor_locality(
    mode: AuthorityMode, hints: Hints, code: Reason
) -> None:
    fleet = a_fleet(a_row("me", is_self=True), a_row("b", tg=500))
    led = decided(a_request(hints=hints, advice=a_counsel("b", mode=mode)), fleet)
    assert chosen_node(led) == "me"
    assert led.record.excluded_counts == {code.value: 1}
    assert led.record.authority.outcome is AuthorityOutcome.EMPTY_INTERSECTION


def test_an_authority_gives_no_trust() -> None:
    fleet = a_fleet(a_row("a"), a_row("b", untrusted=True))
    led = decided(a_request(advice=a_counsel("b", "stranger")), fleet)
    assert (chosen_node(led), led.record.excluded[0].code) == ("a", Reason.UNTRUSTED)


def test_a_row_that_is_only_a_backup_is_nothing_to_name() -> None:
    fleet = a_fleet(a_row("a"), a_row("b", backup="failing"))
    led = decided(a_request(advice=a_counsel("b")), fleet)
    assert (chosen_node(led), led.record.authority.outcome.value) == ("a", "empty_intersection")


def test_after_a_failure_the_answer_still_counts_for_what_is_left() -> None:
    fleet = a_fleet(a_row("a", tg=500), a_row("b", tg=20), a_row("c", tg=10))
    request = a_request(advice=a_counsel("c", "b"))
    first = decided(request, fleet)
    second = decided(after_failure(request, choice_of(first).endpoint), fleet)
    third = decided(after_failure(request, choice_of(first).endpoint, choice_of(second).endpoint), fleet)
    assert [chosen_node(one) for one in (first, second, third)] == ["c", "b", "a"]
    assert [one.record.authority.outcome.value for one in (second, third)] == ["used", "empty_intersection"]
    assert first.id == "d1" != second.id


@pytest.mark.parametrize("weights", [(3.0, 1.0), (3e300, 1e300), (3e-300, 1e-300)])
def test_weights_draw_in_proportion_and_the_same_request_draws_the_same(weights: tuple[float, float]) -> None:
    fleet = a_fleet(a_row("a"), a_row("b"), a_row("c", tg=500))
    counsel = a_counsel("stranger", "a", "b", weights=(weights[0], *weights))

    def drawn(number: int) -> str | None:
        return chosen_node(decided(a_request(request_id=f"r{number}", advice=counsel), fleet))

    spread = Counter(drawn(number) for number in range(2_000))
    assert spread.keys() == {"a", "b"}
    assert spread["a"] / 2_000 == pytest.approx(0.75, abs=0.04)
    assert [drawn(number) for number in range(20)] == [drawn(number) for number in range(20)]


def test_a_request_without_an_authority_says_so() -> None:
    assert decided(a_request(), a_fleet(a_row("a"))).record.authority is NO_AUTHORITY
    refused = decided(a_request(model="absent"), a_fleet(a_row("a")))
    assert refused.record.authority is NO_AUTHORITY
    assert (NO_AUTHORITY.mode.value, NO_AUTHORITY.outcome.value) == ("off", "off")


def test_an_order_without_rows_is_led_by_nobody() -> None:
    note = AuthorityNote(
        mode=AuthorityMode.AUTHORITATIVE, outcome=AuthorityOutcome.USED, first=a_row("a").key
    )
    assert led_by(note, []) is None


# --- what is asked -------------------------------------------------------------------------------------------


def asked(request: PlacementRequest, fleet: Fleet) -> tuple[Question, Any]:
    seen = coarse(survey(request, fleet, POLICY, NOW), request, fleet, POLICY, NOW)
    question = question_of(request, seen, "d1", 50)
    return question, json.loads(msgspec.json.encode(question))


def test_the_question_has_the_members_of_its_contract() -> None:
    request = a_request(
        hints=parsed_hints(**{"class": "batch"}, require="cap=tools"),
        text_bytes=4_320,
        request_id="secret-id",
    )
    fleet = a_fleet(a_row("a", tg=20, cap_yes=0xFFFF), a_row("b", cap_yes=0xFFFF), a_row("c", cap_yes=0))
    _, tree = asked(request, fleet)
    rows = tree.pop("candidates")
    assert tree == {
        "v": 1,
        "decision_id": "d1",
        "budget_ms": 50,
        "class": "batch",
        "dialect": "chat",
        "requires": ["tools"],
        "model": "tiny",
        "match": "exact",
        "locality": "mesh",
        "size": {"prompt_tokens_le": 2_048, "output_tokens_le": 256},
        "slo": {"ttft_ms": 60_000, "tpot_ms": None},
    }
    assert [row["id"] for row in rows] == [a_row("b").key, a_row("a").key]
    assert rows[0].keys() == {"id", "model", "level", "resident", "est_ms", "ahead", "factors", "score"}
    assert rows[0]["est_ms"].keys() == {"wait", "load", "prefill", "ttft", "ect", "cost"}
    assert rows[0]["factors"].keys() == {"slo", "memory", "switch", "pressure", "spill", "speed"}


def test_the_question_names_no_request_session_caller_or_node() -> None:
    request = a_request(request_id="canary-id", caller="key:canary", session=b"canary-s", text_bytes=4_321)
    question, _ = asked(request, a_fleet(a_row("a", node_name="canary-node", label="@canary-node/llamacpp")))
    text = msgspec.json.encode(question).decode()
    assert "canary" not in text
    assert b"canary-s".hex() not in text
    assert "4321" not in text


@settings(max_examples=60, deadline=None)
@given(fleets(), requests)
def test_only_rows_in_the_running_are_asked_about_best_first(
    found: tuple[Row, ...], request: PlacementRequest
) -> None:
    fleet = a_fleet(*found)
    question, _ = asked(request, fleet)
    running = {scored.row.key for scored in survey(request, fleet, POLICY, NOW).scored}
    scores = {row.id: row.score for row in question.candidates}
    assert scores.keys() == running
    assert [row.score for row in question.candidates] == sorted(scores.values())
    for size in (question.size.prompt_tokens_le, question.size.output_tokens_le):
        assert size & (size - 1) == 0


alike_sizes = st.integers(0, 14).flatmap(
    lambda power: st.tuples(*[st.integers(2**power // 2 + 1, 2**power)] * 2)
)


@pytest.mark.threat("T39")
@settings(max_examples=200, deadline=None)
@given(fleets(), alike_sizes, alike_sizes, alike_sizes, alike_sizes, st.booleans())
def test_requests_of_the_same_rounded_sizes_are_asked_about_alike(
    found: tuple[Row, ...],
    prompts: tuple[int, ...],
    outputs: tuple[int, ...],
    bodies: tuple[int, ...],
    pinned: tuple[int, ...],
    is_pinned: bool,
) -> None:
    fleet, questions, running = a_fleet(*found), [], []
    for prompt, output, body, tokens in zip(prompts, outputs, bodies, pinned, strict=True):
        pin = Pin(endpoint=KEYS[0], model="tiny", tokens=tokens, at_ms=NOW) if is_pinned else None
        request = a_request(prompt_tokens=prompt, output_cap=output, body_bytes=body, pin=pin)
        running.append({scored.key for scored in survey(request, fleet, POLICY, NOW).scored})
        questions.append(msgspec.json.encode(asked(request, fleet)[0]))
    assume(running[0] == running[1])
    assert questions[0] == questions[1]


def test_the_question_tells_the_times_of_the_rounded_sizes() -> None:
    fleet = a_fleet(a_row("a", pp=1_000, tg=50, taken_ms=NOW), a_row("b", pp=500, tg=50, taken_ms=NOW))
    question, _ = asked(a_request(prompt_tokens=1_100, output_cap=150), fleet)
    told = {row.id: (row.est_ms.prefill, row.est_ms.ect - row.est_ms.ttft) for row in question.candidates}
    assert told == {a_row("a").key: (2_048, 5_120), a_row("b").key: (4_096, 5_120)}


def test_what_is_cached_of_a_session_is_told_by_its_rounded_length() -> None:
    fleet = a_fleet(a_row("a", pp=1_000, taken_ms=NOW), a_row("b", pp=1_000, taken_ms=NOW))
    pin = Pin(endpoint=a_row("a").key, model="tiny", tokens=600, at_ms=NOW)
    question, _ = asked(a_request(prompt_tokens=1_100, pin=pin), fleet)
    told = {row.id: row.est_ms.prefill for row in question.candidates}
    assert told == {a_row("a").key: 1_024, a_row("b").key: 2_048}


@pytest.mark.parametrize("row", [{}, {"backup": "failing"}])
def test_a_row_that_only_rounding_makes_late_and_a_backup_are_told_too(row: dict[str, Any]) -> None:
    fleet = a_fleet(*(a_row(name, pp=1_000, taken_ms=NOW, **row) for name in "ab"))
    question, _ = asked(a_request(prompt_tokens=1_100, hints=parsed_hints(deadline_ms="1500")), fleet)
    assert [each.est_ms.prefill for each in question.candidates] == [2_048, 2_048]


def test_a_name_that_nobody_offers_is_not_passed_on() -> None:
    policy = dataclasses.replace(POLICY, match_any_pool=("tiny",))
    request = a_request(model="canary", hints=parsed_hints(match="any"))
    seen = survey(request, a_fleet(a_row("a"), a_row("b")), policy, NOW)
    question = question_of(request, seen, "d1", 50)
    assert (question.model, question.match) == ("", "any")
    assert [(row.model, row.level) for row in question.candidates] == [("tiny", 3), ("tiny", 3)]


def test_at_most_64_rows_are_asked_about() -> None:
    fleet = a_fleet(*(a_row(f"n{i}") for i in range(100)))
    seen = survey(a_request(), fleet, PlacementPolicy(scored_all=100), NOW)
    question = question_of(a_request(), seen, "d1", 50)
    assert len(seen.scored) == 100
    assert len(question.candidates) == 64


@given(st.integers(0, 2**40))
def test_sizes_are_rounded_up_to_powers_of_two(count: int) -> None:
    rounded = power_of_two(count)
    assert rounded >= count
    assert rounded & (rounded - 1) == 0
    assert rounded < 2 * count or count == rounded == 0
