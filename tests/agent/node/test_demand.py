"""What routers are asked for, as this node sees it in their records."""

from msgspec.structs import replace

from router_core.placement.demand import demand_key, rate_of, rates_of
from router_core.record.membership import Liveness
from router_core.record.state import ModelDemand
from tests.agent.node.rig import World, an_endpoint
from tests.support.fleets import a_row


def test_the_rate_is_that_of_all_routers_that_are_there() -> None:
    world = World()
    key = demand_key(None, "tiny")
    world.own(an_endpoint(), demand=(ModelDemand(key8=key, rpm=60, work_c=0),))
    world.peer("near", an_endpoint(), demand=(ModelDemand(key8=key, rpm=30, work_c=0),))
    world.peer(
        "gone", an_endpoint(), demand=(ModelDemand(key8=key, rpm=600, work_c=0),), state=Liveness.SUSPECT
    )
    rates = rates_of(world.viewing.fleet)
    assert rate_of(a_row("a"), rates) == 1.5
    assert rate_of(replace(a_row("a"), names=("other",)), rates) == 0.0
