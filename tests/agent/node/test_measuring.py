"""Figures read when somebody asks: they are of this moment, and of endpoints as people call them."""

from agent.node.status.figures import LiveFigures
from agent.observe.metrics import Registry
from router_core.placement.queueing.hold import Waiting
from router_core.placement.request.request import RequestClass
from router_core.policy.placement import PlacementPolicy
from tests.agent.node.rig import World, an_endpoint, key_of


def text_of(world: World, held: int = 0) -> str:
    failures: list[BaseException] = []
    registry = Registry(failures.append)
    registry.add(
        LiveFigures(
            router=world.router,
            connections=lambda: {"api": 2, "ingress": 0},
            held_bytes=lambda: held,
            now=world.clock.boot_ms,
        )
    )
    text = registry.render()
    assert not failures
    return text


def of(name: str) -> str:
    """The labels of an endpoint's series."""
    node_id = key_of(name).partition("/")[0]
    return f'{{endpoint="llama",node="{node_id}",name="{name}"}}'


def two_nodes() -> World:
    world = World()
    world.own(an_endpoint())
    world.peer("beta", an_endpoint())
    return world


def test_who_waits_is_counted_by_class() -> None:
    world = two_nodes()
    waiting = Waiting(
        ticket=1,
        request_class=RequestClass.BATCH,
        caller="local",
        kind="m",
        seconds=1.0,
        body_bytes=1,
        since_ms=0,
        deadline_ms=9,
    )
    world.router.queue.join(waiting, lambda: None, 0)
    text = text_of(world)
    assert 'pairmesh_queue_depth{class="batch"} 1\n' in text
    assert 'pairmesh_queue_depth{class="interactive"} 0\n' in text


def test_work_in_hand_is_that_of_own_endpoints_whoever_sent_it() -> None:
    world = two_nodes()
    world.route(world.ask(headers=(("x-pairmesh-locality", "host"),)))
    world.work.start("llama", 1.0, world.clock.now)
    text = text_of(world)
    assert f"pairmesh_in_flight{of('me')} 2\n" in text
    assert f"pairmesh_in_flight{of('beta')}" not in text


def test_a_breaker_is_closed_open_or_half_open() -> None:
    world = two_nodes()
    assert f"pairmesh_breaker_state{of('beta')} 0\n" in text_of(world)
    world.router.breakers.failed(key_of("beta"), world.clock.now, connection_refused=True)
    assert f"pairmesh_breaker_state{of('beta')} 1\n" in text_of(world)
    world.clock.now += 60_000
    assert f"pairmesh_breaker_state{of('beta')} 2\n" in text_of(world)
    assert f"pairmesh_breaker_state{of('me')} 0\n" in text_of(world)


def test_connections_and_held_bytes_are_told_as_they_are() -> None:
    text = text_of(World(), held=5)
    assert 'pairmesh_relay_connections{side="api"} 2\n' in text
    assert 'pairmesh_relay_connections{side="ingress"} 0\n' in text
    assert "pairmesh_relay_buffered_bytes 5\n" in text


def test_the_policy_in_force_is_named_with_its_hash() -> None:
    policy = PlacementPolicy()
    assert f'pairmesh_policy_info{{preset="balanced",hash="{policy.hash}"}} 1\n' in text_of(two_nodes())
