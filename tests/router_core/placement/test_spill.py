"""When a request leaves the mesh: only if it may, only if it gains much, and without flapping."""

import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_core.placement.candidates.candidate import Row
from router_core.placement.candidates.fleet import Live
from router_core.placement.decision.decide import decide
from router_core.placement.decision.decision import Decision
from router_core.placement.decision.replay import replay
from router_core.placement.reasons import Action, Reason
from router_core.placement.request.request import Hints, Locality, Match, RequestClass
from router_core.policy.placement import PlacementPolicy
from tests.support.fleets import (
    NOW,
    POLICY,
    a_fleet,
    a_ledger,
    a_request,
    a_row,
    chosen_node,
    decided,
    parsed_hints,
)

FREE = replace(POLICY, spill_cap=Locality.ANY)
ANY = parsed_hints(locality="any")
HELD = {"in_flight": 4, "queued": 7, "pp": 500, "tg": 15}


def cloud(name: str = "c", **over: Any) -> Row:
    return a_row(name, **{"cloud": True, "price_in": 0.5, "price_out": 2.0, "slots": 16} | over)


def asked(
    *rows: Row, hints: Hints = ANY, policy: PlacementPolicy = FREE, on: bool = False, **over: Any
) -> Decision:
    live = Live(ledger=a_ledger(), spilling={RequestClass.INTERACTIVE} if on else ())
    return decided(a_request(hints=hints, **over), a_fleet(*rows, live=live), policy)


def mesh_row(slo: float) -> Row:
    """A warm row of the mesh whose chance to miss its target is about ``slo``."""
    low, high = 0.0, 100.0
    row = a_row("m", way_s=low, taken_ms=NOW)
    for _ in range(60):
        wait = (low + high) / 2
        row = a_row("m", way_s=wait, taken_ms=NOW)
        (candidate,) = decided(a_request(), a_fleet(row)).record.candidates
        low, high = (wait, high) if candidate.f.slo < slo else (low, wait)
    return row


def test_a_crowded_mesh_spills_and_the_record_tells_the_price() -> None:
    decision = asked(a_row("m", **HELD), cloud())
    assert (chosen_node(decision), decision.action) == ("c", Action.SPILL)
    out, kept = sorted(decision.record.candidates, key=lambda row: row.price is None)
    assert out.price is not None
    assert out.price == pytest.approx((1200 * 0.5 + 256 * 2.0) / 1e6)
    assert out.f.spill == pytest.approx(1 - math.exp(-(out.price / 0.01 + 0.5)))
    assert (kept.price, kept.f.spill) == (None, 0.0)
    assert decision.record.full


@pytest.mark.parametrize(
    ("hints", "policy"),
    [
        (Hints(), FREE),
        (parsed_hints(locality="mesh"), FREE),
        (parsed_hints(locality="host"), FREE),
        (ANY, POLICY),
        (ANY, replace(POLICY, spill_cap=Locality.HOST)),
    ],
)
def test_nothing_leaves_the_mesh_unless_caller_and_operator_both_permit_it(
    hints: Hints, policy: PlacementPolicy
) -> None:
    for rows in ((cloud(),), (cloud(is_self=True),), (a_row("m", **HELD), cloud())):
        decision = asked(*rows, hints=hints, policy=policy)
        assert decision.action is not Action.SPILL
        assert decision.spill_on is None
        assert decision.record.excluded_counts["locality"] >= 1


def test_asking_for_a_row_outside_by_name_does_not_open_the_way_there() -> None:
    decision = asked(a_row("m"), cloud(), hints=parsed_hints(prefer="@c", require="node=@c"))
    assert (decision.action, decision.reason) == (Action.REJECT, Reason.NOT_IN_SUBSET)
    assert decision.record.excluded_counts == {"not_in_subset": 1, "locality": 1}


def test_a_mesh_that_does_well_keeps_its_requests() -> None:
    decision = asked(a_row("m"), cloud(pp=1e5, tg=1e4))
    assert (chosen_node(decision), decision.action) == ("m", Action.ROUTE)
    (gone,) = decision.record.excluded
    assert (gone.code, gone.detail) == (Reason.LOCALITY, "not_needed")


@pytest.mark.parametrize(
    ("slo", "on", "out"), [(0.2, False, False), (0.2, True, True), (0.5, False, True), (0.05, True, False)]
)
def test_once_out_requests_return_only_when_the_mesh_is_nearly_as_good(
    slo: float, on: bool, out: bool
) -> None:
    decision = asked(mesh_row(slo), cloud(pp=1e5, tg=1e4), on=on)
    assert decision.spill_on is out
    assert len(decision.record.candidates) == (2 if out else 1)
    assert decision.record.view.spill_on is on


def test_every_class_spills_by_itself() -> None:
    live = Live(ledger=a_ledger(), spilling={RequestClass.BATCH})
    fleet = a_fleet(mesh_row(0.2), cloud(pp=1e5, tg=1e4), live=live)
    assert decided(a_request(hints=ANY), fleet, FREE).spill_on is False


def test_where_no_row_of_the_mesh_is_left_requests_leave_it() -> None:
    decision = asked(a_row("m", in_flight=12), cloud())
    assert (decision.action, decision.spill_on) == (Action.SPILL, True)
    assert decision.record.excluded_counts == {"queue_full": 1}
    assert asked(a_row("m", taken_ms=NOW - 60_000), cloud()).action is Action.SPILL


def test_a_stale_mesh_goes_before_a_stale_row_outside() -> None:
    old: dict[str, Any] = {"taken_ms": NOW - 60_000}
    decision = asked(a_row("m", **old), cloud(**old))
    assert (chosen_node(decision), decision.action) == ("m", Action.ROUTE)


@pytest.mark.parametrize(
    "special", [{"attempt": 2}, {"hints": parsed_hints(locality="any", require="engine=llamacpp")}]
)
def test_a_retry_or_a_narrowed_request_tells_nothing_about_the_others(special: dict[str, Any]) -> None:
    assert asked(a_row("m", **HELD), cloud(), **special).spill_on is None


def test_a_model_that_only_the_outside_has_tells_nothing_about_the_mesh() -> None:
    decision = asked(cloud())
    assert (decision.action, decision.spill_on) == (Action.SPILL, None)


def test_a_dear_answer_stays_at_home_while_home_is_bearable() -> None:
    dear = cloud(price_in=50.0, price_out=200.0)
    home = mesh_row(0.6)
    assert asked(home, cloud(pp=1e5, tg=1e4)).action is Action.SPILL
    decision = asked(home, dear)
    assert decision.action is Action.ROUTE
    assert decision.record.alternatives[0].top_factor in ("spill", "slo")


def test_a_stand_in_at_home_is_tried_before_leaving() -> None:
    twin = a_row("b", model="tiny:q8", base=b"base", bits=8.5)
    here = a_row("m", base=b"base", down="engine")
    hints = Hints(locality=Locality.ANY, match=Match.QUANT)
    decision = asked(here, twin, cloud(), hints=hints)
    assert (chosen_node(decision), decision.action) == ("b", Action.ROUTE)


def test_retry_after_counts_no_row_that_the_request_may_not_reach() -> None:
    full = a_row("m", in_flight=12, taken_ms=NOW, pp=500, tg=25)
    assert (asked(full, cloud(), hints=Hints()).retry_after_s or 0) >= 15


def test_a_stored_spill_is_replayed_to_the_same_choice() -> None:
    record = asked(a_row("m", **HELD), cloud()).record
    again = replay(record, FREE)
    assert (again.action, again.chosen, again.margin) == (record.action, record.chosen, record.margin)
    assert again.candidates == record.candidates


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "cloud": st.booleans(),
                "is_self": st.booleans(),
                "queued": st.integers(0, 12),
                "price_in": st.floats(0, 400),
                "price_out": st.floats(0, 400),
                "in_flight": st.integers(0, 12),
            }
        ),
        max_size=6,
    ),
    st.sampled_from(Locality),
    st.sampled_from(Locality),
    st.booleans(),
)
def test_mesh_and_host_always_win_and_factors_stay_in_bounds(
    fields: list[dict[str, Any]], locality: Locality, cap: Locality, on: bool
) -> None:
    rows = tuple(a_row(f"n{i}", **each) for i, each in enumerate(fields))
    live = Live(ledger=a_ledger(), spilling=set(RequestClass) if on else ())
    policy = replace(POLICY, spill_cap=cap)
    decision = decide(
        a_request(hints=Hints(locality=locality)), a_fleet(*rows, live=live), policy, NOW, Random(1)
    )
    record = decision.record
    assert all(0.0 <= row.f.spill <= 1.0 for row in record.candidates)
    left = any(row.price is not None for row in record.candidates)
    if (locality, cap) != (Locality.ANY, Locality.ANY):
        assert not left
        assert decision.spill_on is None
    assert (decision.action is Action.SPILL) <= left
