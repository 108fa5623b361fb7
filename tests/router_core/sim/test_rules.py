"""The simple rules that ours is compared with: each picks as its name says, behind the same filters."""

from collections import Counter
from random import Random

import pytest

from router_core.placement.candidates.candidate import Row
from router_core.placement.candidates.fleet import Fleet, Live
from router_core.placement.reasons import Action, Reason
from router_core.sim.placement.arrivals import Arrival
from router_core.sim.placement.baselines.oracle import Oracle
from router_core.sim.placement.baselines.rules import (
    Pick,
    RoundRobin,
    Rule,
    least_count,
    p2c,
    p2c_by_capacity,
)
from router_core.sim.placement.engine import EngineSpec, ModelSpec
from router_core.sim.placement.fleet_node import NodeSpec
from router_core.sim.placement.fleet_world import FleetWorld, WireSpec
from tests.support.fleets import NOW, POLICY, a_fleet, a_ledger, a_request, a_row, choice_of

RULES = [least_count, p2c, p2c_by_capacity]


def picks(rule: Rule, fleet: Fleet, count: int = 300, model: str = "tiny") -> Counter[str]:
    """How often which node was picked, nothing being sent meanwhile."""
    rng = Random(1)
    found: Counter[str] = Counter()
    for number in range(count):
        decision = rule(a_request(request_id=f"r{number}", model=model), fleet, POLICY, NOW, rng)
        found[choice_of(decision).node_name] += 1
    return found


def test_least_count_picks_the_fewest_requests_however_slow_and_counts_its_own() -> None:
    ledger = a_ledger()
    rows = (a_row("a", tg=1), a_row("b", in_flight=1), a_row("c", in_flight=1, queued=1))
    fleet = a_fleet(*rows, live=Live(ledger=ledger))
    assert picks(Rule(least_count), fleet, 20) == {"a": 20}
    sent = Rule(least_count)(a_request(), fleet, POLICY, NOW, Random(1)).chosen
    assert sent is not None
    ledger.reserve(sent, NOW)
    assert picks(Rule(least_count), fleet) == {
        "a": pytest.approx(150, abs=40),
        "b": pytest.approx(150, abs=40),
    }
    ledger.reserve(sent, NOW)
    assert picks(Rule(least_count), fleet, 20) == {"b": 20}


def test_round_robin_takes_turns_for_each_model_by_itself() -> None:
    rule = Rule(RoundRobin())
    fleet = a_fleet(*(a_row(name) for name in "abc"), *(a_row(name, model="other") for name in "ab"))
    assert picks(rule, fleet, 30) == {"a": 10, "b": 10, "c": 10}
    assert picks(rule, fleet, 30, model="other") == {"a": 15, "b": 15}


def test_the_better_of_two_is_never_the_worst_of_all() -> None:
    found = picks(Rule(p2c), a_fleet(a_row("slow", tg=5), a_row("mid", tg=50), a_row("fast", tg=100)))
    assert set(found) == {"mid", "fast"}
    assert found["fast"] == pytest.approx(200, abs=30), "it is in two of three pairs"


def test_two_draws_by_capacity_leave_a_slow_row_its_share_of_the_fleet_squared() -> None:
    fleet = a_fleet(a_row("slow", tg=10, pp=200), a_row("fast", tg=20, pp=400))
    assert picks(Rule(p2c_by_capacity), fleet, 900)["slow"] == pytest.approx(100, abs=30)


@pytest.mark.parametrize("pick", [*RULES, RoundRobin()])
def test_a_rule_picks_nothing_that_a_filter_left_out(pick: Pick) -> None:
    def down(name: str) -> Row:
        return a_row(name, down="engine", tg=1_000)

    assert picks(Rule(pick), a_fleet(down("a"), a_row("b", tg=5, in_flight=2)), 20) == {"b": 20}
    decision = Rule(pick)(a_request(), a_fleet(down("a")), POLICY, NOW, Random(1))
    assert (decision.action, decision.reason) == (Action.REJECT, Reason.UNREACHABLE)


def test_an_oracle_sends_each_request_where_it_ends_first_by_the_true_lengths() -> None:
    def node(name: str, tg: float) -> NodeSpec:
        model = ModelSpec(name="m", size_bytes=2**30, pp=1_000.0, tg=tg)
        engine = EngineSpec(slots=1, models=(model,), memory_bytes=2**33, beta=0.0)
        return NodeSpec(name=name, engine=engine, max_queue=8, warm=("m",))

    world = FleetWorld([node("slow", 20.0), node("fast", 100.0)], WireSpec(), 1)
    long, short = (
        Arrival(at_ms=at, router=0, model="m", prompt=1, output=out) for at, out in ((0, 2_000), (1, 101))
    )
    asks = world.run([long, short], Oracle(world).start)
    assert [ask.node for ask in asks] == [1, 0], "the short one does not wait 20 s behind the long one"
    assert asks[1].total_s == pytest.approx(5.0, abs=0.1)
