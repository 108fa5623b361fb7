"""A host that boasts is believed for a few requests, and a fleet with it is hardly worse off than with an honest one."""

from random import Random

import pytest
from msgspec.structs import replace

from router_core.errors import LocalMisuse
from router_core.placement.decision.decide import decide
from router_core.policy.placement import PlacementPolicy
from router_core.sim.placement.arrivals import Arrival
from router_core.sim.placement.fleet_world import FleetWorld
from router_core.sim.placement.routed import Routed
from router_core.sim.placement.scenario import NodeLine, Scenario, parse_scenario
from router_core.sim.placement.trial import play
from scripts.shared_data import built_in
from scripts.simulate_placement import read_scenario

SUPPLY = built_in()
pytestmark = pytest.mark.threat("T12")


def chats_beside(liar: NodeLine, boast: float, policy: PlacementPolicy | None = None) -> FleetWorld:
    """80 chats, one after the other, at a slow host that knows an honest one and ``liar``."""
    mine = NodeLine(name="mine", pp=100, tg=5, slots=1)
    honest = NodeLine(name="honest", pp=1_500, tg=50, slots=4)
    scenario = Scenario(name="lies", node=(mine, honest, liar), liars=(liar.name,), boast=boast)
    world = FleetWorld(scenario.specs(SUPPLY.measured), scenario.wire, 1, policy=policy)
    rng = Random(1)
    arrivals = [
        Arrival(at_ms=20_000 * turn, router=0, model="chat", prompt=rng.randint(200, 900), output=200)
        for turn in range(80)
    ]
    world.run(arrivals, Routed(world, [decide] * 3).start)
    return world


@pytest.mark.parametrize("boast", [1.5, 3.0, 10.0, 1_000.0])
def test_after_twenty_requests_a_boaster_is_ranked_by_what_was_observed(boast: float) -> None:
    world = chats_beside(NodeLine(name="liar", pp=1_200, tg=40, slots=4), boast)
    asks = world.asks
    at_the_liar = [turn for turn, ask in enumerate(asks) if ask.node == 2]
    assert len(at_the_liar) <= 20 + 0.1 * len(asks)
    assert sum(ask.node == 1 for ask in asks[-40:]) >= 30
    rows = {str(row.node_name): row for row in world.fleet(0).rows}
    assert 1 / rows["liar"].token_s == pytest.approx(40.0, rel=0.25)
    assert rows["honest"].token_s < rows["liar"].token_s


@pytest.mark.parametrize(("share", "found"), [(0.0, False), (0.1, True)])
def test_a_host_that_is_better_than_it_says_is_found_out_by_trying_it(share: float, found: bool) -> None:
    policy = PlacementPolicy(explore_share=share)
    world = chats_beside(NodeLine(name="modest", pp=6_000, tg=200, slots=4), 0.2, policy)
    last = [ask.node for ask in world.asks[-20:]]
    assert (last.count(2) > 15) is found
    assert all(ask.ttft_s is not None and ask.ttft_s <= 2.0 for ask in world.asks)


def test_a_fleet_with_a_boaster_answers_about_as_soon_as_an_honest_one() -> None:
    scenario = read_scenario("liar")
    scenario = replace(scenario, load=replace(scenario.load, requests=700))
    honest = replace(scenario, liars=())
    lied, told = (
        [play(one, "balanced", 0.7, seed, SUPPLY) for seed in (1, 2, 3)] for one in (scenario, honest)
    )
    assert sum(one.ttft_p95 for one in lied) <= 1.25 * sum(one.ttft_p95 for one in told)
    assert [one.failed for one in lied] == [0, 0, 0]


@pytest.mark.parametrize(
    ("over", "why"), [({"liars": ["nobody"]}, "'nobody'"), ({"boast": 0.0}, r"\$\.boast")]
)
def test_a_lie_that_cannot_be_told_is_refused(over: dict[str, object], why: str) -> None:
    table = {"name": "x", "node": [{"name": "a", "pp": 1, "tg": 1, "slots": 1}]} | over
    with pytest.raises(LocalMisuse, match=why):
        parse_scenario(table)
