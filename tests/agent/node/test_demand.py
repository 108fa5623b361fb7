"""What routers are asked for, as this node sees it in their records."""

from pathlib import Path

from msgspec.structs import replace

from agent.relay.ports import Turned
from router_core.placement.demand import demand_key, rate_of, rates_of
from router_core.record.membership import Liveness
from router_core.record.state import ModelDemand
from tests.agent.node.rig import World, an_endpoint, an_owned
from tests.support.fleets import a_row


def test_the_rate_is_that_of_all_routers_that_are_there() -> None:
    world = World()
    key = demand_key(None, "tiny")
    world.own(an_endpoint(), demand=(ModelDemand(key8=key, rpm=60, work_c=0),))
    world.peer("near", an_endpoint(), demand=(ModelDemand(key8=key, rpm=30, work_c=0),))
    world.peer(
        "gone", an_endpoint(), demand=(ModelDemand(key8=key, rpm=600, work_c=0),), state=Liveness.SUSPECT
    )
    rates = rates_of(world.router.fleet)
    assert rate_of(a_row("a"), rates) == 1.5
    assert rate_of(replace(a_row("a"), names=("other",)), rates) == 0.0


def asked(world: World) -> dict[bytes, int]:
    return {row.key8: row.rpm for row in world.router.demand.rows(world.clock.now)}


def test_a_request_counts_once_as_demand_for_what_serves_it_however_often_it_is_decided() -> None:
    world = World()
    world.peer("near", an_endpoint(slots=50, owned=(an_owned(digest=bytes(32)),)))
    for n in range(10):
        choosing = world.ask(f"r{n}")
        world.route(choosing)
        choosing.decide(attempt=2, tried=frozenset(), refused=frozenset(), now=world.clock.now)
    assert asked(world) == {demand_key(bytes(32), ""): 2}, "ten in five minutes"


def test_a_request_for_a_model_that_cannot_serve_now_is_demand_and_one_nobody_owns_is_none() -> None:
    world = World()
    world.peer("near", an_endpoint(resident=(), jit_load=False))
    for n in range(10):
        refused = world.ask(f"r{n}").decide(
            attempt=1, tried=frozenset(), refused=frozenset(), now=world.clock.now
        )
        assert isinstance(refused, Turned)
        world.ask(f"s{n}", model="nobodys").decide(
            attempt=1, tried=frozenset(), refused=frozenset(), now=world.clock.now
        )
    assert asked(world) == {demand_key(None, "tiny"): 2}


def test_requests_count_under_what_the_model_is_known_by_in_the_newest_picture() -> None:
    world = World()
    for digest in (None, bytes(32)):
        world.peer("near", an_endpoint(slots=50, owned=(an_owned(digest=digest),)))
        for n in range(10):
            world.route(world.ask(f"r{n}"))
    assert asked(world) == {demand_key(None, "tiny"): 2, demand_key(bytes(32), ""): 2}


def test_many_names_that_nobody_offers_leave_no_trace_and_hide_no_model() -> None:
    world = World()
    for n in range(200):
        world.ask(f"s{n}", model=f"nobodys{n}").decide(
            attempt=1, tried=frozenset(), refused=frozenset(), now=world.clock.now
        )
    world.peer("near", an_endpoint(slots=50))
    for n in range(200):
        world.ask(f"s{n}", model=f"nobodys{n}").decide(
            attempt=1, tried=frozenset(), refused=frozenset(), now=world.clock.now
        )
    for n in range(10):
        world.route(world.ask(f"r{n}"))
    assert asked(world) == {demand_key(None, "tiny"): 2}


def test_a_load_that_was_ordered_teaches_how_long_loads_take(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.own(an_endpoint(resident=()))
    world.learning.loaded("llama", "tiny", 7.0)
    world.learning.loaded("llama", "unknown", 1.0)
    world.own(an_endpoint(resident=()))
    (row,) = world.router.fleet.rows
    assert row.load_s == 7.0
