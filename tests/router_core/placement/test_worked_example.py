"""The worked example of the scoring formulas, number by number, and the two-node case that must never go wrong."""

import math
from dataclasses import replace
from random import Random

import pytest

from router_core.placement.candidates.candidate import Row, logistic
from router_core.placement.candidates.fleet import Fleet, Live
from router_core.placement.decision.decide import decide
from router_core.placement.decision.decision import Decision
from router_core.placement.record import Candidate
from router_core.placement.scoring.survey import survey
from router_core.placement.selection.choose import draw_weights, near_ties, seed_of
from tests.support.fleets import (
    GIB,
    NOW,
    POLICY,
    a_choice,
    a_fleet,
    a_ledger,
    a_request,
    a_row,
    chosen_node,
    decided,
    sustained,
)

NET = replace(POLICY, rtt_s=0.010)
REQUEST = a_request(text_bytes=round(1200 * 3.6))


def row_a() -> Row:
    return a_row("a", pp=6000, tg=120, taken_ms=NOW - 600, in_flight=4, queued=2, pressure=0.10)


def row_b() -> Row:
    return a_row("b", pp=1500, tg=10, taken_ms=NOW - 400)


def row_c() -> Row:
    return a_row(
        "c",
        pp=3500,
        tg=70,
        slots=2,
        resident=False,
        load_s=8.0,
        s_speed=0.5,
        s_gen=0.5,
        s_load=0.5,
        taken_ms=NOW - 800,
        pressure=0.10,
        need_bytes=9 * GIB,
        room_bytes=11.0 * GIB,
        memory=logistic((9 - 11) / (0.05 * 24)),
        switch=1 - math.exp(-6 / 20),
        debt_s=6.0,
    )


def row_d(pressure: float = 0.10) -> Row:
    return a_row("d", pp=4000, tg=90, pressure=pressure)


def row_e() -> Row:
    return a_row("e", pp=3900, tg=84)


def the_fleet(pressure_of_d: float = 0.10) -> Fleet:
    ledger = a_ledger()
    ledger.reserve(a_choice(a_row("a"), prefill_s=0.5, decode_s=0.5), NOW)
    return a_fleet(row_a(), row_b(), row_c(), row_d(pressure_of_d), row_e(), live=Live(ledger=ledger))


def by_name(decision: Decision) -> dict[str, Candidate]:
    order = {row.key: row.node_name for row in the_fleet().rows}
    return {order[candidate.row]: candidate for candidate in decision.record.candidates}


EXPECTED = {
    "a": (2.971, 1.733, 1.943, 0.0108, 4.717, 8.847, 0.466, 0.0, 0.0, 0.10, 0.865, 1.148),
    "b": (0.0, 0.0, 0.810, 0.1000, 26.410, 3.370, 0.500, 0.0, 0.0, 0.05, 0.683, 0.958),
    "c": (0.0, 0.0, 8.353, 0.0143, 12.010, 14.719, 1.000, 0.159, 0.259, 0.10, 0.916, 1.537),
    "d": (0.0, 0.0, 0.310, 0.0111, 3.154, 0.594, 0.000, 0.0, 0.0, 0.10, 0.0, 0.050),
    "e": (0.0, 0.0, 0.318, 0.0119, 3.365, 0.622, 0.000, 0.0, 0.0, 0.05, 0.021, 0.046),
}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_number_of_the_worked_example_comes_out(name: str) -> None:
    candidate = by_name(decided(REQUEST, the_fleet(), NET))[name]
    est, f = candidate.est, candidate.f
    found = (
        est.ahead,
        est.wait,
        est.ttft,
        est.tpot,
        est.ect,
        est.cost,
        f.slo,
        f.memory,
        f.switch,
        f.pressure,
        f.speed,
        candidate.score,
    )
    assert found == pytest.approx(EXPECTED[name], abs=0.001)


def test_c_is_vetoed_and_e_dominates_a_and_b() -> None:
    found = by_name(decided(REQUEST, the_fleet(), NET))
    assert found["c"].out == "veto"
    assert found["a"].out == found["b"].out == f"dominated:{row_e().key}"
    assert found["d"].out is None
    assert found["e"].out is None


def test_d_and_e_share_the_draw_by_what_they_sustain() -> None:
    seen = survey(REQUEST, the_fleet(), NET, NOW)
    tied = near_ties(
        sorted((row for row in seen.scored if row.row.node_name in "de"), key=lambda s: s.score), NET
    )
    weights = dict(
        zip([str(row.row.node_name) for row in tied], draw_weights(tied, sustained(seen)), strict=True)
    )
    assert weights["d"] == pytest.approx(1.001, abs=0.001)
    assert weights["e"] == pytest.approx(0.937, abs=0.001)
    assert weights["d"] / sum(weights.values()) == pytest.approx(0.517, abs=0.001)


def test_the_draw_follows_its_weights_over_many_requests() -> None:
    fleet, drawn = the_fleet(), 0
    for number in range(2000):
        decision = decided(a_request(request_id=f"r{number}", text_bytes=4320), fleet, NET)
        assert chosen_node(decision) in ("d", "e")
        drawn += chosen_node(decision) == "d"
    assert drawn / 2000 == pytest.approx(0.517, abs=0.035)


def test_alternatives_name_what_spoke_against_them() -> None:
    fleet = the_fleet()
    decision = next(
        routed
        for number in range(50)
        if chosen_node(routed := decided(a_request(request_id=f"r{number}"), fleet, NET)) == "d"
    )
    names = {row.key: row.node_name for row in fleet.rows}
    found = [(names[other.row], other.top_factor) for other in decision.record.alternatives]
    assert found == [("e", "speed"), ("b", "speed"), ("a", "speed")]
    assert decision.record.margin == pytest.approx(0.046 - 0.050, abs=0.001)


def test_a_busy_video_node_leaves_the_choice_to_e_alone() -> None:
    fleet = the_fleet(pressure_of_d=0.70)
    for number in range(50):
        decision = decided(a_request(request_id=f"r{number}"), fleet, NET)
        assert chosen_node(decision) == "e"
        assert by_name(decision)["d"].score == pytest.approx(0.350, abs=0.001)


def test_of_two_idle_nodes_the_fast_one_is_taken_in_a_thousand_of_a_thousand() -> None:
    fleet = a_fleet(a_row("slow", tg=10.34, pp=10.34 * 30), a_row("fast", tg=57.69, pp=57.69 * 30))
    rng = Random(3)
    for number in range(1000):
        request = a_request(request_id=f"seed-{number}", text_bytes=200)
        assert chosen_node(decide(request, fleet, POLICY, NOW, rng)) == "fast"


def test_the_seed_is_a_hash_of_request_and_attempt() -> None:
    assert seed_of("r1", 1) == seed_of("r1", 1)
    assert len({seed_of("r1", 1), seed_of("r1", 2), seed_of("r2", 1)}) == 3
