"""``pair-1.0`` in a simulated fleet hears what its description says, no later: else beating it would prove nothing."""

from collections.abc import Iterator
from random import Random

import pytest

from router_core.sim.placement.arrivals import Arrival
from router_core.sim.placement.baselines.pair_choice import PairChoice
from router_core.sim.placement.baselines.pair_dispatch import PairDispatch
from router_core.sim.placement.engine import EngineSpec, Job, ModelSpec
from router_core.sim.placement.fleet_node import NodeSpec
from router_core.sim.placement.fleet_world import FleetWorld, WireSpec

LINK_MS = 20
UP_MS, DOWN_MS = 2, 3


def a_world(*, models: tuple[str, ...] = ("m", "m", "m")) -> tuple[FleetWorld, PairDispatch]:
    """Three hosts that each own one model, and PAIR on them."""
    specs = [
        NodeSpec(
            name=f"n{index}",
            engine=EngineSpec(
                slots=4,
                models=(ModelSpec(name=name, size_bytes=2**30, pp=1_000.0, tg=50.0),),
                memory_bytes=2**33,
            ),
            max_queue=8,
            warm=(name,),
        )
        for index, name in enumerate(models)
    ]
    world = FleetWorld(specs, WireSpec(link_ms=LINK_MS), 1)
    return world, PairDispatch(world, Random(1))


def pending(dispatch: PairDispatch, of: int) -> list[int]:
    """How many jobs each host's proxy counts at host ``of``."""
    uuid = dispatch.hosts[of].uuid
    snapshots = [host.proxy.snapshot for host in dispatch.hosts]
    return [0 if snapshot is None else snapshot.pending[uuid] for snapshot in snapshots]


def test_a_job_counts_at_once_where_it_was_placed_from_and_a_link_later_everywhere() -> None:
    world, dispatch = a_world()
    world.timeline.run_until(10_000)
    dispatch.tell(0, 7, "queued", dispatch.hosts[2].uuid)
    told = {}
    for later_ms in (UP_MS + DOWN_MS - 1, UP_MS + DOWN_MS, LINK_MS + 1 + DOWN_MS - 1, LINK_MS + 1 + DOWN_MS):
        world.timeline.run_until(10_000 + later_ms)
        told[later_ms] = pending(dispatch, of=2)
    assert list(told.values()) == [[0, 0, 0], [1, 0, 0], [1, 0, 0], [1, 1, 1]]
    dispatch.tell(0, 7, "completed", dispatch.hosts[2].uuid)
    world.timeline.run_until(11_000)
    assert pending(dispatch, of=2) == [0, 0, 0]


def test_a_gpu_that_works_is_known_to_every_host_within_a_sample_and_a_poll() -> None:
    world, dispatch = a_world()
    world.timeline.run_until(10_000)
    busy = dispatch.hosts[1].uuid

    def bands() -> list[int]:
        return [host.scheduler.telemetry.pressure(busy, world.now) for host in dispatch.hosts]

    assert bands() == [0, 0, 0], "sampled as idle, which is better than unknown"
    world.nodes[1].engine.submit(
        Job(model="m", prompt=1, output=5_000, on_first=lambda: None, on_end=lambda: None)
    )
    for later_s in range(1, 20):
        world.timeline.run_until(10_000 + 1_000 * later_s)
    assert bands() == [3, 3, 3]


def arrivals(model: str, times: int, every_ms: int = 0) -> Iterator[Arrival]:
    return (
        Arrival(at_ms=every_ms * number, router=0, model=model, prompt=10, output=100)
        for number in range(times)
    )


def test_a_burst_at_one_host_is_spread_over_the_owners_by_its_own_reservations() -> None:
    world, dispatch = a_world(models=("m", "m", "other"))
    asks = world.run(arrivals("m", 8), dispatch.start)
    assert sorted(ask.node for ask in asks if ask.node is not None) == [0] * 4 + [1] * 4
    assert {ask.status for ask in asks} == {200}


def test_without_an_owner_a_request_fails_at_once() -> None:
    world, dispatch = a_world()
    (ask,) = world.run(arrivals("nowhere", 1), dispatch.start)
    assert (ask.status, ask.end_ms) == (502, ask.arrival.at_ms)


@pytest.mark.parametrize("dispatch", [PairDispatch, PairChoice])
def test_a_job_of_another_host_moves_a_request_away_from_where_it_runs(
    dispatch: type[PairDispatch] | type[PairChoice],
) -> None:
    world, _ = a_world()
    pair = [Arrival(at_ms=200 * router, router=router, model="m", prompt=10, output=100) for router in (0, 1)]
    first, second = world.run(pair, dispatch(world, Random(1)).start)
    assert {first.status, second.status} == {200}
    assert first.node != second.node


@pytest.mark.parametrize("silent", [0, 1])
def test_a_silent_host_is_tried_again_after_two_minutes_somewhere_else(silent: int) -> None:
    world, dispatch = a_world(models=("m", "m", "other"))
    world.nodes[silent].engine.frozen = True
    asks = world.run(arrivals("m", 4), dispatch.start)
    assert {ask.status for ask in asks} == {200}
    assert {ask.node for ask in asks} == {1 - silent}
    late = [ask for ask in asks if (ask.ttft_s or 0.0) >= 120.0]
    assert len(late) == 2
