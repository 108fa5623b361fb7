"""Properties of the decision that hold for any fleet, any load and any request."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from random import Random
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from msgspec.structs import replace

from router_core.placement.candidates.admission import Gate
from router_core.placement.candidates.candidate import Row
from router_core.placement.candidates.fleet import Live
from router_core.placement.decision.decide import decide
from router_core.placement.reasons import Action, Reason
from router_core.placement.record import DecisionRecord
from router_core.placement.request.request import Pin, PlacementRequest
from router_core.placement.scoring.survey import survey
from router_core.placement.selection.choose import choose, field_of, seed_of
from router_core.policy.placement import PlacementPolicy, Weights
from router_core.router.lateness import COST
from tests.support.fleets import (
    NOW,
    POLICY,
    a_choice,
    a_fleet,
    a_ledger,
    a_request,
    a_row,
    after_failure,
    choice_of,
    chosen_node,
    decided,
    parsed_hints,
    sustained,
)

NAMES = ("a", "b", "c", "d", "e", "f")
_seconds = st.floats(0, 60)
_unit = st.floats(0, 1)
T = TypeVar("T")


def mostly(usual: SearchStrategy[T], odd: SearchStrategy[T]) -> SearchStrategy[T]:
    """What nearly every request looks like, and now and then anything: else a filter would end most examples."""
    return st.integers(0, 9).flatmap(lambda dice: odd if dice == 9 else usual)


@st.composite
def rows(draw: st.DrawFn, /, name: str = "a", **over: Any) -> Row:
    resident = draw(st.booleans())
    fields: dict[str, Any] = {
        "pp": draw(st.floats(1, 200_000)),
        "tg": draw(st.floats(0.5, 2_000)),
        "slots": draw(st.integers(1, 8)),
        "in_flight": draw(st.integers(0, 6)),
        "queued": draw(st.integers(0, 6)),
        "taken_ms": NOW - draw(st.integers(-100, 20_000)),
        "period_ms": draw(st.integers(1, 10_000)),
        "resident": resident,
        "load_s": 0.0 if resident else draw(_seconds),
        "loadable": draw(st.booleans()),
        "gate": draw(st.sampled_from([*[Gate.OPEN] * 9, Gate.SOFT, Gate.SHUT])),
        "loads": draw(st.booleans()),
        "beta": draw(_unit),
        "s_speed": draw(st.floats(0.1, 0.7)),
        "s_gen": draw(st.floats(0.1, 0.7)),
        "success": draw(_unit),
        "pressure": draw(_unit),
        "memory": 0.0 if resident else draw(_unit),
        "switch": 0.0 if resident else draw(_unit),
        "debt_s": 0.0 if resident else draw(_seconds),
        "ctx": draw(st.sampled_from([None, 1, 2_000, 10_000, 10**6])),
        "room_bytes": draw(st.none() | st.floats(0, 2**36)),
        "down": draw(st.sampled_from([*[None] * 9, "engine"])),
        "draining": draw(st.sampled_from([*[False] * 9, True])),
        "backup": draw(st.sampled_from([*[None] * 9, "failing"])),
        "samples": draw(st.sampled_from([0, 4, 30])),
    }
    return a_row(name, **(fields | over))


def fleets(**over: Any) -> SearchStrategy[tuple[Row, ...]]:
    return st.integers(0, len(NAMES)).flatmap(
        lambda count: st.tuples(*(rows(name, **over) for name in NAMES[:count]))
    )


requests = st.builds(
    lambda **over: a_request(**over),
    request_id=st.text("abcdef0123456789", min_size=1, max_size=8),
    text_bytes=mostly(st.integers(0, 10_000), st.integers(0, 2**25)),
    images=st.sampled_from([*[0] * 8, 1, 20]),
    output_cap=mostly(st.none() | st.integers(0, 500), st.integers(0, 10**6)),
    choices=st.sampled_from([*[0, 1] * 4, 2, 8]),
    attempt=st.integers(1, 3),
    hints=st.sampled_from(
        [
            parsed_hints(),
            parsed_hints(prefer="@b"),
            parsed_hints(require="!node=@a"),
            parsed_hints(expect_tokens="0"),
        ]
    ),
)

# A fleet in which no filter interferes: every row is scored.
open_rows: dict[str, Any] = {
    "gate": Gate.OPEN,
    "loads": True,
    "loadable": True,
    "down": None,
    "draining": False,
    "backup": None,
    "ctx": None,
    "room_bytes": None,
    "taken_ms": NOW,
    "in_flight": 0,
    "queued": 0,
}


@pytest.mark.promise("equal inputs and seed give one decision")
@settings(max_examples=80, deadline=None)
@given(fleets(), requests)
def test_equal_inputs_give_equal_decisions(found: tuple[Row, ...], request: PlacementRequest) -> None:
    fleet = a_fleet(*found)
    one, two = (decide(request, fleet, POLICY, NOW, Random(5)) for _ in range(2))
    assert one == two
    assert one.record == one.record == two.record
    assert one == decide(request, fleet, POLICY, NOW, Random(5)), "telling it changes nothing"


@settings(max_examples=80, deadline=None)
@given(fleets(), requests)
def test_the_choice_does_not_depend_on_the_generator(
    found: tuple[Row, ...], request: PlacementRequest
) -> None:
    fleet = a_fleet(*found)
    one = decide(request, fleet, POLICY, NOW, Random(1))
    two = decide(request, fleet, POLICY, NOW, Random(2))
    assert (one.action, one.reason) == (two.action, two.reason)
    assert (one.chosen and one.chosen.endpoint) == (two.chosen and two.chosen.endpoint)
    assert one.id != two.id


@pytest.mark.promise("factors are numbers from 0 to 1")
@settings(max_examples=100, deadline=None)
@given(fleets(), requests)
def test_factors_stay_in_bounds_and_the_record_can_be_written(
    found: tuple[Row, ...], request: PlacementRequest
) -> None:
    decision = decided(request, a_fleet(*found))
    for candidate in decision.record.candidates:
        assert all(0.0 <= value <= 1.0 for value in msgspec.structs.astuple(candidate.f))
        assert all(math.isfinite(value) for value in msgspec.structs.astuple(candidate.est))
        assert 0.0 <= candidate.queue_risk <= 1.0
        assert candidate.capacity > 0.0
    text = msgspec.json.encode(decision.record)
    assert msgspec.json.decode(text, type=DecisionRecord) == decision.record
    packed = msgspec.msgpack.encode(decision.record)
    assert msgspec.msgpack.decode(packed, type=DecisionRecord) == decision.record


@settings(max_examples=40, deadline=None)
@given(fleets(), requests)
def test_the_record_tells_every_factor_of_a_scored_candidate(
    found: tuple[Row, ...], request: PlacementRequest
) -> None:
    decision = decided(request, a_fleet(*found))
    seen = decision.evidence
    scored = [row for row in (seen.chosen, *seen.others, *seen.reserves) if row is not None]
    told = {(candidate.row, candidate.model): candidate.f for candidate in decision.record.candidates}
    assert told == {(each.key, each.model): each.f for each in scored}


@pytest.mark.promise("an excluded candidate is never chosen, and empty is never all")
@settings(max_examples=80, deadline=None)
@given(fleets(), requests)
def test_an_excluded_row_is_never_chosen_and_empty_stays_empty(
    found: tuple[Row, ...], request: PlacementRequest
) -> None:
    decision = decided(request, a_fleet(*found))
    gone = {row.row for row in decision.record.excluded}
    tried = [row.row for row in decision.record.candidates]
    assert gone.isdisjoint(tried)
    if decision.chosen is None:
        assert decision.action is Action.REJECT
        assert tried == []
        assert decision.reason.status >= 400
    else:
        assert tried[0] == decision.chosen.endpoint
        assert len(tried) + len(gone) == len(found)


def test_a_load_that_other_models_pay_for_is_chosen_later_than_one_that_nobody_misses() -> None:
    def served(debt_s: float) -> str | None:
        full = a_row("full", in_flight=4, queued=2, taken_ms=NOW)
        cold = a_row("cold", resident=False, load_s=4.0, debt_s=debt_s, taken_ms=NOW)
        return chosen_node(decided(a_request(), a_fleet(full, cold)))

    assert served(debt_s=0.0) == "cold"
    assert served(debt_s=20.0) == "full"


@pytest.mark.promise("a worse candidate never ranks better")
@settings(max_examples=80, deadline=None)
@given(
    fleets(**open_rows),
    st.sampled_from(
        ["pressure", "in_flight", "queued", "owed", "success", "load_s", "debt_s", "way_s", "taken_ms"]
    ),
    st.data(),
)
def test_a_worse_row_never_ranks_better(found: tuple[Row, ...], field: str, data: st.DataObject) -> None:
    assume(len(found) >= 2)
    victim = data.draw(st.integers(0, len(found) - 1))
    rows = list(found)
    owed = data.draw(st.integers(0, 6))
    if field == "taken_ms":
        served = data.draw(st.integers(0, rows[victim].k - 1))
        rows[victim] = replace(rows[victim], in_flight=served, queued=0)
        owed = data.draw(st.integers(0, rows[victim].k - 1 - served))
    old = rows[victim]
    if field in ("load_s", "debt_s"):
        assume(not old.resident)
    worse = {
        "pressure": min(1.0, old.pressure + 0.3),
        "in_flight": old.in_flight + 1,
        "queued": old.queued + 1,
        "success": old.success / 2,
        "load_s": old.load_s + 5.0,
        "debt_s": old.debt_s + 5.0,
        "way_s": old.way_s + 5.0,
        "taken_ms": old.taken_ms - data.draw(st.integers(1, 8)) * old.period_ms,
    }
    changed = list(rows)
    if field != "owed":
        changed[victim] = replace(old, **{field: worse[field]})

    def judged(these: Iterable[Row], more: int = 0) -> tuple[int, float]:
        ledger = a_ledger()
        for _ in range(owed + more):
            ledger.reserve(a_choice(a_row(old.node_name)), NOW)
        fleet = a_fleet(*these, m_r=1.0, live=Live(ledger=ledger))
        scores = {row.row.key: row.score for row in survey(a_request(), fleet, POLICY, NOW).scored}
        mine = scores.pop(old.key, math.inf)
        return sum(score < mine - 1e-12 for score in scores.values()), mine

    (rank, score), (new_rank, new_score) = judged(found), judged(changed, int(field == "owed"))
    assert new_rank >= rank
    assert new_score >= score - 1e-12


@pytest.mark.promise("with speed alone the unit of time leaves the order")
@settings(max_examples=40, deadline=None)
@given(fleets(**open_rows), st.floats(0.1, 10))
def test_with_speed_alone_the_unit_of_time_changes_no_order(found: tuple[Row, ...], factor: float) -> None:
    policy = PlacementPolicy(weights=Weights(slo=0, memory=0, switch=0, pressure=0, speed=1), rtt_s=1e-9)

    def scores(scale: float) -> dict[str, float]:
        scaled = [
            replace(
                row,
                prefill_s_per_token=row.prefill_s_per_token * scale,
                token_s=row.token_s * scale,
                full_token_s=row.full_token_s * scale,
                load_s=row.load_s * scale,
                debt_s=row.debt_s * scale,
            )
            for row in found
        ]
        seen = survey(a_request(hints=parsed_hints(deadline_ms="3600000")), a_fleet(*scaled), policy, NOW)
        return {row.row.key: row.score for row in seen.scored}

    plain, scaled = scores(1.0), scores(factor)
    for one, other in itertools.permutations(plain.keys() & scaled.keys(), 2):
        if plain[one] < plain[other] - 1e-4:
            assert scaled[one] <= scaled[other] + 1e-4


@pytest.mark.promise("no bonus beats the veto")
@settings(max_examples=80, deadline=None)
@given(fleets(**open_rows), st.sampled_from(NAMES), st.floats(0.981, 1.0), st.floats(0.0, 0.8))
def test_no_bonus_beats_the_veto(
    found: tuple[Row, ...], wished: str, too_much: float, bearable: float
) -> None:
    pressed = a_row("wished", tg=2_000, pressure=too_much)
    calm = a_row("calm", tg=30, pressure=bearable)
    for these, name in ((found, wished), ((*found, pressed, calm), "wished")):
        request = a_request(hints=parsed_hints(prefer=f"@{name}"))
        seen = survey(request, a_fleet(*these), POLICY, NOW)
        field = field_of(seen.scored, POLICY)
        chosen = choose(field, seed_of("r", 1), sustained(seen))
        if any(row.worst < POLICY.veto_needs_below for row in field.rows):
            assert chosen is not None
            assert chosen.worst <= POLICY.veto_above


@settings(max_examples=80, deadline=None)
@given(fleets(**open_rows), requests)
def test_a_cold_row_never_wins_against_a_free_warm_one_that_is_done_sooner(
    found: tuple[Row, ...], request: PlacementRequest
) -> None:
    seen = survey(request, a_fleet(*found), POLICY, NOW)
    field = field_of(seen.scored, POLICY)
    chosen = choose(field, seed_of(request.request_id, 1), sustained(seen))
    if chosen is None or chosen.resident:
        reject()
    for row, out in field.ranking(chosen):
        if row.resident and row.free and out != "veto":
            assert row.est.ect >= chosen.est.ect


def test_a_cold_row_does_not_win_by_dominating_the_warm_one_that_is_done_sooner() -> None:
    failing = {"success": 0.0, "taken_ms": NOW}
    cold = a_row("cold", resident=False, load_s=2.1, pressure=0.0, **failing)
    warm = a_row("warm", tg=40, pressure=1.0, **failing)
    decision = decided(a_request(), a_fleet(cold, warm))
    assert {row.row: row.out for row in decision.record.candidates} == {warm.key: None, cold.key: "cold"}
    assert chosen_node(decision) == "warm"


@pytest.mark.lesson("sgl-project/sglang#27547: a burst all to the first worker")
def test_a_burst_in_one_turn_spreads_over_equal_nodes() -> None:
    fleet = a_fleet(*(a_row(name, slots=30, tg=50) for name in "abcd"), live=Live(ledger=a_ledger()))
    spread: Counter[str | None] = Counter()
    for number in range(100):
        decision = decided(a_request(request_id=f"r{number}"), fleet)
        fleet.live.ledger.reserve(choice_of(decision), NOW)
        spread[chosen_node(decision)] += 1
    assert max(spread.values()) - min(spread.values()) <= 2


def test_a_burst_spills_from_the_own_host_as_its_live_load_grows() -> None:
    fleet = a_fleet(a_row("me", is_self=True, slots=2), a_row("b", slots=2), m_r=1.0)
    spread: Counter[str | None] = Counter()
    for number in range(8):
        decision = decided(a_request(request_id=f"r{number}"), fleet)
        fleet.live.ledger.reserve(choice_of(decision), NOW)
        spread[chosen_node(decision)] += 1
    assert spread == {"me": 4, "b": 4}


def test_of_near_ties_that_are_all_busy_the_warm_ones_share_the_draw() -> None:
    policy = PlacementPolicy(tie_fixed=0.5)
    busy = {"in_flight": 4, "queued": 1, "tg": 200.0}
    fleet = a_fleet(a_row("warm", **busy), a_row("other", **busy), a_row("cold", resident=False, load_s=2.0))
    chosen = Counter(
        chosen_node(decided(a_request(request_id=f"r{number}"), fleet, policy)) for number in range(60)
    )
    assert set(chosen) == {"warm", "other"}
    assert {row.out for row in decided(a_request(), fleet, policy).record.candidates} == {None}, "all stood"


@pytest.mark.lesson("sgl-project/sglang#14305: affinity that ignores load")
def test_a_pinned_session_stays_until_its_row_is_busy() -> None:
    pin = Pin(endpoint=a_row("a").key, model="tiny", tokens=1100, at_ms=NOW - 1000)
    request = a_request(pin=pin, text_bytes=4320)
    calm = a_fleet(a_row("a", tg=30, pressure=0.8), a_row("b"))
    decision = decided(request, calm)
    assert chosen_node(decision) == "a"
    assert decision.reason is Reason.SESSION
    assert choice_of(decision).est.prefill == pytest.approx(0.1)
    deep = a_row("a", tg=45, in_flight=4, queued=7)
    assert chosen_node(decided(request, a_fleet(deep, a_row("b")))) == "b"
    old = replace(pin, at_ms=NOW - 600_001)
    assert chosen_node(decided(replace(request, pin=old), calm)) == "b"


def test_nothing_of_a_session_is_cached_any_more_where_its_model_would_be_loaded_anew() -> None:
    fleet = a_fleet(a_row("a", engine="ollama"))
    pin = Pin(endpoint=fleet.rows[0].key, model="tiny", tokens=1100, at_ms=NOW - 1000)
    for num_ctx, load, prefill, warm in ((8192, 0.0, 0.1, True), (4096, 5.0, 1.2, False)):
        (row,) = decided(a_request(pin=pin, num_ctx=num_ctx), fleet).record.candidates
        assert (row.est.load, row.affinity > 0.0) == (load, warm)
        assert row.est.prefill == pytest.approx(prefill)


def test_a_failed_attempt_goes_elsewhere_and_says_so() -> None:
    fleet = a_fleet(a_row("a", tg=500), a_row("b", tg=20))
    first = decided(a_request(), fleet)
    assert chosen_node(first) == "a"
    second = decided(after_failure(a_request(), choice_of(first).endpoint), fleet)
    assert chosen_node(second) == "b"
    assert second.record.excluded[0].code is Reason.TRIED
    third = decided(after_failure(a_request(), choice_of(first).endpoint, choice_of(second).endpoint), fleet)
    assert (third.action, third.reason, third.reason.status) == (Action.REJECT, Reason.TRIED, 502)


def test_a_row_is_told_how_many_are_expected_to_wait_there() -> None:
    fleet = a_fleet(a_row("a", in_flight=4, queued=1, taken_ms=NOW), a_row("b", pp=10, tg=1))
    assert choice_of(decided(a_request(), fleet)).ahead == pytest.approx(2.0)
    assert choice_of(decided(a_request(), a_fleet(a_row("a"), a_row("b")))).ahead == 0.0


def test_a_row_that_declined_is_chosen_again_where_it_is_the_best_and_may_let_it_wait_then() -> None:
    fleet = a_fleet(a_row("a", tg=500), a_row("b", tg=20), a_row("c", tg=1))
    again = decided(a_request(attempt=2, declined=frozenset({a_row("a").key})), fleet)
    assert (chosen_node(again), choice_of(again).ahead) == ("a", None)
    elsewhere = decided(a_request(attempt=2, declined=frozenset({a_row("b").key})), fleet)
    assert (chosen_node(elsewhere), choice_of(elsewhere).ahead) == ("a", 0.0)


def test_after_four_refusals_whoever_comes_next_may_let_it_wait() -> None:
    fleet = a_fleet(a_row("a"), a_row("b"))
    for refusals in range(6):
        declined = frozenset(f"n{number}" for number in range(refusals))
        chosen = choice_of(decided(a_request(attempt=refusals + 1, declined=declined), fleet))
        assert (chosen.ahead is None) is (refusals >= POLICY.patient_after)


def test_a_row_that_refused_is_left_out_and_waited_for_where_it_is_all_there_is() -> None:
    gone = frozenset({a_row("a").key})
    live = Live(ledger=a_ledger(), hold=Endless())
    decision = decided(a_request(attempt=2, refused=gone), a_fleet(a_row("a", tg=500), a_row("b"), live=live))
    assert chosen_node(decision) == "b"
    assert decision.record.excluded[0].code is Reason.REFUSED
    alone = decided(a_request(attempt=2, refused=gone), a_fleet(a_row("a"), live=live))
    assert (alone.action, alone.reason) == (Action.QUEUE, Reason.REFUSED)


class Endless:
    """Room for everybody who waits."""

    def has_room(self, body_bytes: int, share: float) -> bool:
        return True


def test_the_only_row_left_may_let_it_wait() -> None:
    alone = decided(a_request(), a_fleet(a_row("a")))
    assert choice_of(alone).ahead is None
    failed = decided(after_failure(a_request(), choice_of(alone).endpoint), a_fleet(a_row("a"), a_row("b")))
    assert (chosen_node(failed), choice_of(failed).ahead) == ("b", None)


def test_a_warm_node_beats_a_cold_one_of_equal_speed() -> None:
    decision = decided(a_request(), a_fleet(a_row("a", resident=False), a_row("b")))
    assert (chosen_node(decision), decision.action) == ("b", Action.ROUTE)


def test_rank_follows_speed_load_and_pressure() -> None:
    assert chosen_node(decided(a_request(), a_fleet(a_row("a", tg=20), a_row("b", tg=80)))) == "b"
    busy = a_row("b", tg=80, in_flight=4, queued=4)
    assert chosen_node(decided(a_request(), a_fleet(a_row("a", tg=60), busy))) == "a"
    assert (
        chosen_node(decided(a_request(), a_fleet(a_row("a", tg=70), a_row("b", tg=80, pressure=0.9)))) == "a"
    )


def wait_of(row: Row, *, owed: int = 0, m_r: float = 1.0) -> float:
    ledger = a_ledger()
    for _ in range(owed):
        ledger.reserve(a_choice(row), NOW)
    (candidate,) = decided(a_request(), a_fleet(row, m_r=m_r, live=Live(ledger=ledger))).record.candidates
    return candidate.est.wait


TURN_S = (1.0 + 200 * 0.02 * 1.3) / 4
"""How often one of four usual requests ends on the row of these tests."""


def test_a_place_that_is_free_is_nearly_free_and_each_request_beyond_costs_a_turn() -> None:
    fresh: dict[str, Any] = {"taken_ms": NOW}
    assert wait_of(a_row(**fresh)) == 0.0
    assert wait_of(a_row(in_flight=2, **fresh)) < 0.001
    assert wait_of(a_row(in_flight=3, **fresh)) == pytest.approx(0.0892 * TURN_S, abs=0.001)
    for queued in range(5):
        assert wait_of(a_row(in_flight=4, queued=queued, **fresh)) == pytest.approx((queued + 1) * TURN_S)


def test_own_work_that_no_record_shows_counts_for_itself_and_for_what_others_sent() -> None:
    fresh: dict[str, Any] = {"taken_ms": NOW}
    one, four = (wait_of(a_row(in_flight=4, **fresh), owed=owed) for owed in (1, 4))
    assert one == pytest.approx(2 * TURN_S, rel=0.01)
    assert four == pytest.approx(5 * TURN_S, rel=0.01)
    crowd = wait_of(a_row(in_flight=4, **fresh), owed=4, m_r=10.0)
    assert crowd == pytest.approx((1 + 4 * 1.5) * TURN_S, rel=0.01)


def test_of_those_who_wait_some_are_done_by_now_and_how_many_is_not_sure() -> None:
    def aged(age_ms: int, **over: Any) -> float:
        return wait_of(a_row(taken_ms=NOW - age_ms, **over))

    full = {"in_flight": 4, "queued": 4}
    assert aged(3_100, **full) == pytest.approx((5 - 4 * 3.1 / 6.2) * TURN_S, rel=0.02)
    assert aged(60_000, **full) == pytest.approx(aged(6_200, **full)), "no more than were served"
    assert aged(6_200, in_flight=3) == aged(0, in_flight=3), "where nobody waits, old news is no good news"
    assert aged(6_200, in_flight=4, queued=4) > aged(6_200, in_flight=4)


def test_a_record_holds_full_candidates_when_few_and_the_top_ones_when_many() -> None:
    few = decided(a_request(), a_fleet(*(a_row(f"n{i}") for i in range(16))))
    assert (few.record.full, len(few.record.candidates)) == (True, 16)
    many = a_fleet(*(a_row(f"n{i}") for i in range(40)))
    sizes = Counter(
        len(decided(a_request(request_id=f"r{number}"), many).record.candidates) for number in range(200)
    )
    assert set(sizes) == {4, 40}
    assert sizes[4] > sizes[40] > 0
    assert len(decided(a_request(attempt=2), many).record.candidates) == 40


def test_64_concurrent_decisions_carry_their_own_records() -> None:
    fleet = a_fleet(*(a_row(name) for name in NAMES), live=Live(ledger=a_ledger()))
    rng = Random(9)
    decisions = [decide(a_request(request_id=f"r{i}"), fleet, POLICY, NOW, rng) for i in range(64)]
    assert len({decision.id for decision in decisions}) == 64
    for number, decision in enumerate(decisions):
        assert decision.id == decision.record.id
        assert len(decision.id) == 26
        assert decision.record.request_id == f"r{number}"
        assert decision.record.chosen == choice_of(decision).endpoint


def test_deciding_changes_nothing() -> None:
    fleet = a_fleet(a_row("a"), a_row("me", is_self=True), live=Live(ledger=a_ledger()))
    fleet.live.ledger.reserve(a_choice(fleet.rows[0]), NOW)
    before = (
        len(fleet.live.ledger),
        dict(fleet.live.ledger.owed),
        fleet.live.ledger.local.in_flight("llamacpp"),
    )
    for number in range(20):
        decided(a_request(request_id=f"r{number}"), fleet)
    after = (
        len(fleet.live.ledger),
        dict(fleet.live.ledger.owed),
        fleet.live.ledger.local.in_flight("llamacpp"),
    )
    assert before == after


def test_the_record_keeps_sizes_and_codes_and_no_bytes_of_the_request() -> None:
    decision = decided(a_request(text_bytes=7_777, images=2), a_fleet(a_row("a", ctx=None)))
    facts = decision.record.req
    assert (facts.prompt_tokens, facts.images, facts.dialect) == (math.ceil(7_777 / 3.6) + 1600, 2, "chat")
    heard = decided(a_request(text_bytes=7_777, audio_parts=3), a_fleet(a_row("a", ctx=None)))
    assert heard.record.req.prompt_tokens == math.ceil(7_777 / 3.6) + 1500
    assert decision.record.seed == seed_of("r1", 1).hex()


def test_what_is_kept_of_the_kinds_of_requests_is_bounded() -> None:
    fleet = a_fleet(*(a_row(f"n{number}", model=f"model{number}") for number in range(100)))
    for number in range(100):
        assert chosen_node(decided(a_request(model=f"model{number}"), fleet)) == f"n{number}"
    assert len(fleet.sifted) == 64


def test_an_endpoint_that_is_late_costs_more_and_is_never_refused_for_it() -> None:
    rows = a_row("a", tg=50), a_row("b", tg=45)
    assert chosen_node(decided(a_request(), a_fleet(*rows))) == "a"
    late = Live(ledger=a_ledger(), late={rows[0].key: COST})
    told = decided(a_request(), a_fleet(*rows, live=late))
    assert chosen_node(told) == "b"
    adj = {each.row: each.adj for each in told.record.candidates}
    assert (adj[rows[0].key], adj[rows[1].key]) == (COST, 0.0)
    assert chosen_node(decided(a_request(), a_fleet(rows[0], live=late))) == "a"


def test_a_second_attempt_goes_only_where_a_warm_place_of_the_mesh_is_free() -> None:
    spare = a_request(attempt=2, tried=frozenset({a_row("z").key}), spare=True)
    for other in (
        a_row("b", tg=5_000, in_flight=4),
        a_row("b", tg=5_000, resident=False),
        a_row("b", tg=5_000, cloud=True),
    ):
        assert decided(spare, a_fleet(other)).chosen is None
        assert chosen_node(decided(spare, a_fleet(other, a_row("c", tg=1)))) == "c"
    assert decided(spare, a_fleet(a_row("z"))).chosen is None
