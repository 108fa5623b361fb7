"""Whole fleets at virtual time: nothing leaks, one seed is one history, and old pictures behave like old pictures."""

import gc
import os
import subprocess
import sys
import weakref
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from router_core.placement.decision.decide import decide
from router_core.policy.placement import PlacementPolicy
from router_core.sim.placement.engine import Job
from router_core.sim.placement.fleet_world import Ask, FleetWorld
from router_core.sim.placement.routed import Routed
from router_core.sim.placement.scenario import LoadLine, NodeLine, Scenario
from router_core.sim.placement.trial import POLICIES, Result, play, requests_of
from scripts.shared_data import built_in
from scripts.simulate_placement import ROOT, SCENARIOS, read_scenario

SUPPLY = built_in()


def small(name: str, requests: int = 200, **load: object) -> Scenario:
    """A shipped scenario, shortened."""
    scenario = read_scenario(name)
    return replace(scenario, load=replace(scenario.load, requests=requests, **load))


def played(scenario: Scenario, policy: str, seed: int = 1, rho: float = 0.7) -> Result:
    return play(scenario, policy, rho, seed, SUPPLY)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["herd", "multi-model", "sessions"])
def test_every_request_ends_and_nothing_stays_booked(name: str, policy: str) -> None:
    result = played(small(name, 120), policy, rho=0.5)
    assert result.leaks == 0
    assert result.requests > 80


@pytest.mark.parametrize("policy", ["balanced", "pair-1.0", "pair-1.0-choice"])
def test_one_seed_is_one_history_whatever_the_hash_seed(policy: str) -> None:
    told = []
    for hash_seed in ("0", "1"):
        command = [sys.executable, str(ROOT / "scripts" / "simulate.py"), "placement", "multi-model", "herd"]
        options = ["--built-in", "--seeds=1", "--requests=100", "--jobs=1", "--json", f"--policies={policy}"]
        done = subprocess.run(
            command + options,
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
            timeout=60,
        )
        told.append(done.stdout)
    assert told[0] == told[1]
    assert b'"herd.70.' in told[0]


def test_other_seeds_are_other_histories() -> None:
    scenario = small("herd")
    assert played(scenario, "balanced", 1) != replace(played(scenario, "balanced", 2), seed=1)


def test_all_policies_of_one_seed_see_the_same_requests() -> None:
    scenario = small("multi-model")
    specs = scenario.specs(SUPPLY.measured)
    first = requests_of(scenario, specs, 0.5, 3, SUPPLY)
    assert first == requests_of(scenario, specs, 0.5, 3, SUPPLY)
    assert {one.model for one in first} == {model.name for model in scenario.model}


def test_routers_with_old_pictures_stay_near_an_oracle_and_far_ahead_of_pair() -> None:
    scenario = small("herd", 700)
    ours, oracle, pair = (played(scenario, policy) for policy in ("balanced", "oracle", "pair-1.0"))
    assert ours.ttft_p95 <= 0.9 * oracle.ttft_p95
    assert ours.ttft_p95 <= 0.5 * pair.ttft_p95


def test_a_fleet_short_of_memory_loads_far_less_than_under_pair() -> None:
    scenario = small("multi-model", 400)
    ours, pair = played(scenario, "balanced", rho=0.5), played(scenario, "pair-1.0", rho=0.5)
    assert ours.cold_loads <= 0.5 * pair.cold_loads
    assert ours.slo_misses < pair.slo_misses


def test_pair_loses_two_minutes_to_a_silent_host_and_ours_loses_no_request() -> None:
    frozen = read_scenario("frozen")
    healthy = replace(frozen, frozen=())
    assert played(frozen, "pair-1.0").makespan_s - played(healthy, "pair-1.0").makespan_s >= 110.0
    ours = played(frozen, "balanced")
    assert (ours.failed, ours.leaks, ours.retries) == (0, 0, 0)
    assert ours.makespan_s <= 2.1 * played(healthy, "balanced").makespan_s


def test_a_node_that_is_alive_and_sixty_times_slower_than_learned_loses_nothing() -> None:
    scenario = read_scenario("frozen")
    specs, supply = scenario.specs(built_in().measured), built_in()
    world = FleetWorld(specs, scenario.wire, 1)
    dispatch = POLICIES["balanced"](world, Random(1))
    dropped: list[Job] = []

    def start(ask: Ask) -> None:
        if ask.number == scenario.load.before:
            (slow,) = [node for node in world.nodes if node.spec.name == "b"]
            models = slow.engine.models.items()
            slow.engine.models = {
                name: replace(model, pp=model.pp / 60, tg=model.tg / 60) for name, model in models
            }
            stop: Any = dropped.append
            slow.engine.cancel = stop  # type: ignore[method-assign]  # this one engine only notes it
        dispatch.start(ask)

    asks = world.run(requests_of(scenario, specs, 0.0, 1, supply), start)
    assert {ask.status for ask in asks} == {200}
    assert (dropped, world.leaks()) == ([], 0)


def test_a_burst_beyond_all_room_waits_in_the_router_and_nobody_is_sent_away() -> None:
    healthy = replace(read_scenario("frozen"), frozen=())
    burst = replace(healthy, load=replace(healthy.load, requests=40))
    result = played(burst, "balanced")
    assert (result.failed, result.retries, result.leaks) == (0, 0, 0)
    assert result.refusals <= 3, "of those who were let out and came a moment late"
    assert result.makespan_s == pytest.approx(5 / 3 * played(healthy, "balanced").makespan_s, rel=0.05)


def test_a_request_that_got_no_answer_makes_the_whole_as_long_as_its_patience() -> None:
    frozen = read_scenario("frozen")
    result = played(replace(frozen, frozen=("a", "b")), "pair-1.0")
    assert result.failed == frozen.load.requests
    assert result.makespan_s == result.ttft_p50 == PlacementPolicy().interactive.deadline_ms / 1000.0


SLOW = NodeLine(name="slow", pp=1_000, tg=50, slots=1, memory_gib=10.0, max_queue=0)
FAST = replace(SLOW, name="fast", pp=100_000, tg=5_000)


def at_once(*nodes: NodeLine, requests: int = 1, prompt: int = 1_000, output: int = 51) -> Scenario:
    """Requests that all come at the first of some hosts in one moment."""
    load = LoadLine(arrivals="at_once", requests=requests, prompt=prompt, output=output, rhos=(0.0,))
    return Scenario(name="x", node=nodes, load=load)


def test_figures_of_a_single_request_are_those_that_can_be_reckoned_by_hand() -> None:
    result = played(at_once(SLOW), "oracle")
    assert (result.ttft_p95, result.total_p95, result.makespan_s) == (1.0, 2.0, 2.0)
    assert (result.away, result.failed, result.cold_loads) == (0.0, 0, 0)
    assert result.memory == pytest.approx((1.05 * 4.58 + 300 / 1_024) / 10.0, rel=1e-3)
    assert 0.2 <= result.utilisation <= 0.25, "2 s of work, 6 s before it, and not a second after"
    assert played(at_once(SLOW, FAST), "oracle").away == 1.0


def test_who_is_turned_away_comes_back_when_it_was_told_to() -> None:
    result = played(at_once(SLOW, requests=300, prompt=10, output=11), "balanced")
    assert result.retries > 0, "the router holds 256 of them at most"
    assert (result.failed, result.leaks) == (0, 0)


def a_world(scenario: Scenario, seed: int = 1) -> FleetWorld:
    return FleetWorld(scenario.specs(SUPPLY.measured), scenario.wire, seed)


@pytest.mark.parametrize("how", ["urgent", "replies"])
def test_pictures_travel_at_events_or_with_answers_if_the_wire_says_so(how: str) -> None:
    records = {}
    for on in (False, True):
        scenario = small("herd")
        scenario = replace(scenario, wire=replace(scenario.wire, **{how: on}))
        world = a_world(scenario)
        requests = requests_of(scenario, [node.spec for node in world.nodes], 0.7, 1, SUPPLY)
        world.run(requests, Routed(world, [decide] * len(world.nodes)).start)
        records[on] = sum(node.seq for node in world.nodes)
    assert records[True] > 1.2 * records[False]


def test_an_ingress_that_knows_better_refuses_and_the_router_decides_once_more() -> None:
    scenario = small("herd", 400, routers=(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.5, 0.5))
    scenario = replace(scenario, wire=replace(scenario.wire, period_ms=8_000))
    result = played(scenario, "balanced", rho=0.6)
    assert result.refusals > 0
    assert result.failed == 0


def test_a_picture_is_at_its_own_router_at_once_and_at_the_others_after_its_delay() -> None:
    world = a_world(small("herd"))
    world.publish(0)
    world.timeline.run_until(1_000)
    origin = world.nodes[0].member.id16
    world.publish(0)
    told = {}
    for later_ms in (0, world.wire.record_ms - 1, world.wire.record_ms):
        world.timeline.run_until(1_000 + later_ms)
        told[later_ms] = [router.fleet(world.now).parts[origin].node.seq for router in world.routers[:3]]
    assert list(told.values()) == [[2, 1, 1], [2, 1, 1], [2, 2, 2]]


def test_a_picture_that_was_overtaken_changes_nothing() -> None:
    scenario = small("herd")
    world = a_world(scenario)
    world.publish(0)
    old = world.newest[0]
    world.timeline.run_until(500)
    world.publish(0)
    world.timeline.run_until(1_000)
    router = world.routers[1]
    assert old is not None
    assert router.fleet(1_000).parts[old.origin].node.seq == 2
    router.heard(old)
    assert router.fleet(1_001).parts[old.origin].node.seq == 2


def test_speeds_that_are_measured_wrong_stay_wrong_however_often_they_are_measured() -> None:
    scenario = replace(small("herd", 200), misread=0.3)
    specs = scenario.specs(SUPPLY.measured)
    world = FleetWorld(specs, scenario.wire, 1)
    world.run(requests_of(scenario, specs, 0.7, 1, SUPPLY), Routed(world, [decide] * len(specs)).start)
    for router in world.routers[:2]:
        rows = {str(row.node_name): row for row in router.fleet(world.now).rows}
        for number, spec in enumerate(specs[:4]):
            wrong = 1.3 if number % 2 == 0 else 0.7
            taken_for = 1.0 / rows[spec.name].prefill_s_per_token / spec.engine.models[0].pp
            assert taken_for == pytest.approx(wrong, rel=0.5)
            assert (taken_for > 1.0) is (wrong > 1.0)


@pytest.mark.parametrize("untold", [False, True])
def test_how_long_answers_are_is_learned_from_engines_that_tell_it_alone(untold: bool) -> None:
    scenario = replace(small("herd", 60), untold=untold)
    specs = scenario.specs(SUPPLY.measured)
    world = FleetWorld(specs, scenario.wire, 1)
    world.run(requests_of(scenario, specs, 0.7, 1, SUPPLY), Routed(world, [decide] * len(specs)).start)
    learned = [router.core.profiles.output_tokens("chat", "interactive") for router in world.routers]
    assert any(learned) is not untold


def test_every_shipped_scenario_is_one() -> None:
    names = sorted(path.stem for path in SCENARIOS.glob("*.toml"))
    assert {"herd", "multi-model", "frozen"} <= set(names)
    for name in names:
        scenario = read_scenario(name)
        assert scenario.name == name
        assert set(scenario.policies) <= set(POLICIES)
        requests_of(small(name, 10), scenario.specs(SUPPLY.measured), 0.5, 1, SUPPLY)


def test_the_shipped_decision_is_what_is_simulated() -> None:
    world = a_world(small("herd"))
    dispatch = POLICIES["balanced"](world, Random(1))
    assert isinstance(dispatch, Routed)
    assert all(router.core.decider is decide for router in world.routers)


def test_clients_that_all_use_one_router_wait_hardly_longer_than_spread_ones() -> None:
    even, skew = (played(small(name, 500), "balanced", seed=2) for name in ("herd-slots", "skew"))
    assert skew.ttft_p95 <= 1.3 * even.ttft_p95


def test_a_run_that_is_over_takes_no_memory() -> None:
    def once() -> weakref.ref[FleetWorld]:
        scenario = small("herd", 40)
        specs = scenario.specs(SUPPLY.measured)
        world = FleetWorld(specs, scenario.wire, 1)
        dispatch = POLICIES["balanced"](world, Random(1))
        world.run(requests_of(scenario, specs, 0.7, 1, SUPPLY), dispatch.start)
        return weakref.ref(world)

    world = once()
    gc.collect()
    assert world() is None
