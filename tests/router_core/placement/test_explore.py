"""A row of which little is known is tried now and then, and nobody pays for it."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from router_core.placement.candidates.candidate import Row
from router_core.placement.candidates.fleet import Fleet
from router_core.placement.decision.decision import Decision
from router_core.placement.decision.replay import replay
from router_core.placement.reasons import AuthorityOutcome, Reason
from router_core.placement.request.request import Advice, Counsel, Pin
from router_core.placement.selection.choose import seed_of
from router_core.policy.authority import AuthorityMode
from router_core.policy.placement import PRESETS, Locality, PlacementPolicy
from tests.support.fleets import NOW, a_fleet, a_request, a_row, chosen_node, decided, parsed_hints

OFTEN = PlacementPolicy(explore_share=1.0)
NEVER = PlacementPolicy(explore_share=0.0)


def known(name: str = "known", **over: Any) -> Row:
    """A row that keeps its promise and was used a lot."""
    return a_row(name, **({"pp": 8_000, "tg": 100} | over))


def untried(name: str = "untried", **over: Any) -> Row:
    """A row that keeps its promise, too, if its estimates do, and is clearly the second best by them."""
    return known(
        name,
        **({"tg": 60, "pressure": 0.06, "samples": 0, "success": 0.95, "s_speed": 0.7, "s_gen": 0.7} | over),
    )


def explored(fleet: Fleet, policy: PlacementPolicy = OFTEN, **over: Any) -> Decision:
    return decided(a_request(**over), fleet, policy=policy)


def test_an_untried_idle_row_is_tried_where_it_costs_nobody_and_the_record_says_so() -> None:
    decision = explored(a_fleet(known(), untried()))
    assert (chosen_node(decision), decision.reason) == ("untried", Reason.EXPLORE)
    record = decision.record
    assert record.candidates[0].samples == 0
    assert (record.margin or 0.0) < 0.0
    assert [other.row for other in record.alternatives] == [known().key]
    assert replay(record, OFTEN) == record
    assert replay(record, NEVER).chosen == known().key


def test_about_one_request_in_fifty_tries_one() -> None:
    fleet = a_fleet(known(), untried())
    tried = sum(
        decided(a_request(request_id=f"r{number}"), fleet).reason is Reason.EXPLORE for number in range(4_000)
    )
    assert 50 <= tried <= 110


def test_nothing_is_tried_if_the_policy_says_never() -> None:
    fleet = a_fleet(known(), untried())
    for number in range(500):
        decision = explored(fleet, NEVER, request_id=f"r{number}")
        assert (chosen_node(decision), decision.reason) == ("known", Reason.NATIVE)


def test_a_host_that_packing_keeps_idle_is_not_woken_to_be_tried() -> None:
    assert PRESETS["pack"].explore_share == 0.0


@pytest.mark.parametrize(
    "over",
    [
        {"samples": 5},
        {"resident": False, "load_s": 0.1},
        {"in_flight": 1},
        {"queued": 1},
        {"backup": "failing"},
        {"taken_ms": NOW - 60_000},
        {"pressure": 0.99},
        {"pressure": 0.3},
        {"tg": 11},
        {"success": 0.8},
        {"draining": True},
    ],
)
def test_a_row_that_might_cost_somebody_is_not_tried(over: dict[str, Any]) -> None:
    decision = explored(a_fleet(known(), untried(**over)))
    assert (chosen_node(decision), decision.reason) == ("known", Reason.NATIVE)


def test_a_request_that_nobody_serves_in_time_is_no_trial() -> None:
    assert explored(a_fleet(known(pp=500), untried(pp=400))).reason is Reason.NATIVE


def test_a_request_whose_best_row_may_be_late_is_no_trial_however_safe_the_other_is() -> None:
    """The best one is much faster, and fails now and then."""
    frail: dict[str, Any] = {"tg": 200, "success": 0.88}
    slow: dict[str, Any] = {"tg": 40, "success": 0.97}
    decision = explored(a_fleet(known(**frail), untried(**slow)))
    assert (chosen_node(decision), decision.reason) == ("known", Reason.NATIVE)
    told = {decision.record.names[row.row]: row.f.slo for row in decision.record.candidates}
    assert told["@known/llamacpp"] >= OFTEN.explore_risk > told["@untried/llamacpp"]
    assert explored(a_fleet(known(**frail | {"success": 0.93}), untried(**slow))).reason is Reason.EXPLORE


def test_a_request_that_failed_before_is_no_trial() -> None:
    assert explored(a_fleet(known(), untried()), attempt=2).reason is Reason.NATIVE


def test_what_a_hint_placed_stays_there() -> None:
    decision = explored(a_fleet(known(), untried()), hints=parsed_hints(prefer="@known"))
    assert chosen_node(decision) == "known"
    required = explored(a_fleet(known(), untried()), hints=parsed_hints(require="node=@known"))
    assert chosen_node(required) == "known"


def test_a_session_stays_where_its_prompt_is() -> None:
    pin = Pin(endpoint=known().key, model="tiny", tokens=1_000, at_ms=NOW - 1_000)
    assert chosen_node(explored(a_fleet(known(), untried()), pin=pin)) == "known"


def test_an_authority_is_not_overruled_by_curiosity() -> None:
    counsel = Counsel(
        decision_id="d",
        mode=AuthorityMode.AUTHORITATIVE,
        outcome=AuthorityOutcome.USED,
        ms=1,
        advice=Advice(order=(known().key,), weights=None, ttl_ms=0, reason=None),
    )
    decision = explored(a_fleet(known(), untried()), advice=counsel)
    assert (chosen_node(decision), decision.reason) == ("known", Reason.AUTHORITY)


def test_a_looser_alias_is_not_tried_in_place_of_the_first() -> None:
    policy = PlacementPolicy(explore_share=1.0, aliases=(("chat", ("tiny", "other")),))
    fleet = a_fleet(known(), untried(model="other"))
    assert chosen_node(decided(a_request(model="chat"), fleet, policy=policy)) == "known"


def test_nothing_leaves_the_mesh_or_its_price_class_to_be_tried() -> None:
    policy = PlacementPolicy(
        explore_share=1.0, explore_risk=0.99, spill_cap=Locality.ANY, spill_on_above=0.0, spill_off_below=0.0
    )
    request = a_request(hints=parsed_hints(locality="any"))
    cloud = untried(cloud=True, price_in=0.5, price_out=2.0)
    shaky = known(success=0.9)
    decision = decided(request, a_fleet(shaky, cloud), policy=policy)
    assert {row.price is None for row in decision.record.candidates} == {True, False}
    assert (chosen_node(decision), decision.reason) == ("known", Reason.NATIVE)


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    rows = [
        known(
            name,
            pp=draw(st.sampled_from([300, 2_000, 8_000])),
            tg=draw(st.sampled_from([8, 40, 100])),
            samples=draw(st.integers(0, 8)),
            in_flight=draw(st.sampled_from([0, 0, 2])),
            pressure=draw(st.sampled_from([0.0, 0.05, 0.5, 0.99])),
            resident=draw(st.sampled_from([True, True, False])),
            load_s=draw(st.floats(0.1, 20)),
            backup=draw(st.sampled_from([None, None, None, "failing"])),
            success=draw(st.floats(0.9, 1.0)),
        )
        for name in draw(st.lists(st.sampled_from("abcdef"), min_size=1, unique=True))
    ]
    return a_fleet(*rows)


@settings(max_examples=300, deadline=None)
@given(fleets(), st.integers(0, 10**6), st.sampled_from([0.02, 0.5, 1.0]))
def test_trying_never_costs_a_request_its_targets_and_replays(
    fleet: Fleet, number: int, share: float
) -> None:
    policy = PlacementPolicy(explore_share=share)
    decision = explored(fleet, policy, request_id=f"r{number}")
    record = decision.record
    if record.full:
        assert replay(record, policy) == record
    otherwise = explored(fleet, NEVER, request_id=f"r{number}")
    if decision.reason is not Reason.EXPLORE:
        assert chosen_node(decision) == chosen_node(otherwise)
        return
    tried, instead = record.candidates[0], otherwise.record.candidates[0]
    assert tried.row != instead.row
    assert max(tried.f.slo, instead.f.slo) < policy.explore_risk
    assert tried.samples is not None
    assert tried.samples < policy.explore_samples
    assert (tried.resident, tried.fill) == (True, 0.0)
    vetoed = {c.row for c in otherwise.record.candidates if c.out in ("veto", "backup")}
    assert tried.row not in vetoed


def test_a_record_that_does_not_tell_how_often_a_row_was_tried_replays_without_trying() -> None:
    record = explored(a_fleet(known(), untried()), NEVER).record
    old = replace(record, candidates=tuple(replace(one, samples=None) for one in record.candidates))
    assert replay(old, OFTEN).chosen == record.chosen


def test_the_draw_among_near_ties_and_the_lot_read_different_halves_of_the_seed() -> None:
    lots = [int.from_bytes(seed_of(f"r{n}", 1)[4:]) / 2**32 < 0.1 for n in range(4_000)]
    draws = [int.from_bytes(seed_of(f"r{n}", 1)) / 2**64 < 0.5 for n in range(4_000)]
    both = sum(lot and draw for lot, draw in zip(lots, draws, strict=True))
    assert both == pytest.approx(sum(lots) / 2, rel=0.2)
