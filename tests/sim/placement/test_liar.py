"""A host that boasts is believed for a few requests, and a fleet with it is hardly worse off than with an honest one."""

from random import Random

import pytest
from msgspec.structs import replace

from router_core.errors import LocalMisuse
from router_core.placement.decide import decide
from router_core.sim.arrivals import Arrival
from router_core.sim.fleet_world import FleetWorld
from router_core.sim.routed import Routed
from router_core.sim.scenario import NodeLine, Scenario, parse_scenario
from router_core.sim.trial import play
from scripts.shared_data import built_in
from scripts.simulate_placement import read_scenario

SUPPLY = built_in()
pytestmark = pytest.mark.threat("T12")


@pytest.mark.parametrize("boast", [1.5, 3.0, 10.0, 1_000.0])
def test_after_twenty_requests_a_boaster_is_ranked_by_what_was_observed(boast: float) -> None:
    scenario = Scenario(
        name="boaster",
        node=(
            NodeLine(name="mine", pp=100, tg=5, slots=1),
            NodeLine(name="honest", pp=1_500, tg=50, slots=4),
            NodeLine(name="liar", pp=1_200, tg=40, slots=4),
        ),
        liars=("liar",),
        boast=boast,
    )
    world = FleetWorld(scenario.specs(SUPPLY.measured), scenario.wire, 1)
    rng = Random(1)
    arrivals = [
        Arrival(at_ms=20_000 * turn, router=0, model="chat", prompt=rng.randint(200, 900), output=200)
        for turn in range(80)
    ]
    asks = world.run(arrivals, Routed(world, [decide] * 3).start)
    at_the_liar = [turn for turn, ask in enumerate(asks) if ask.node == 2]
    assert len(at_the_liar) <= 20 + 0.1 * len(asks)
    assert sum(ask.node == 1 for ask in asks[-40:]) >= 30
    rows = {str(row.node_name): row for row in world.fleet(0).rows}
    assert 1 / rows["liar"].token_s == pytest.approx(40.0, rel=0.25)
    assert rows["honest"].token_s < rows["liar"].token_s


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
    ("over", "why"), [({"liars": ["nobody"]}, "'nobody'"), ({"boast": 0.0}, "a boast of 0.0")]
)
def test_a_lie_that_cannot_be_told_is_refused(over: dict[str, object], why: str) -> None:
    table = {"name": "x", "node": [{"name": "a", "pp": 1, "tg": 1, "slots": 1}]} | over
    with pytest.raises(LocalMisuse, match=why):
        parse_scenario(table)
