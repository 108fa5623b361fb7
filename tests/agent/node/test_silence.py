"""An endpoint that falls silent in mid-answer is avoided until it says something; clients that pause it are no reason."""

import asyncio
from typing import Any

import pytest

from agent.relay.forwarding.context import sweep_lateness, watch_lateness
from router_core.router.patience import silence_limit_ms
from tests.agent.node.rig import World, an_endpoint, key_of
from tests.agent.relay.client import Client, post
from tests.agent.relay.rig import at, running
from tests.support.recorder import Exchange, Recorder
from tests.support.until import until


async def test_an_endpoint_is_suspect_from_its_silence_to_its_next_byte() -> None:
    go = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.chunk(b"data: 1\n\n")
        await go.wait()
        await exchange.chunk(b"data: 2\n\n")
        await exchange.gone()

    async with Recorder(script) as up, running(up.port) as relay:
        client = await Client.to(relay.port)
        await client.send(post(relay.port, b'{"model":"m","stream":true}'))
        await client.head()
        await client.chunk()
        lateness = relay.wiring.router.lateness
        suspects = lateness.suspects
        sweep_lateness(relay.wiring.in_hand, relay.wiring.router, relay.clock.boot_ms() + 9_000)
        assert suspects == set()
        sweep_lateness(relay.wiring.in_hand, relay.wiring.router, relay.clock.boot_ms() + 10_500)
        assert suspects == {at("e0")}
        go.set()
        await client.chunk()
        sweep_lateness(relay.wiring.in_hand, relay.wiring.router, relay.clock.boot_ms() + 9_000)
        assert suspects == set()
        sweep_lateness(relay.wiring.in_hand, relay.wiring.router, relay.clock.boot_ms() + 10_500)
        client.close()
        await until(lambda: not relay.wiring.in_hand)
        sweep_lateness(relay.wiring.in_hand, relay.wiring.router, relay.clock.boot_ms() + 10_500)
        assert suspects == set()


async def test_what_was_not_begun_and_what_the_client_holds_up_is_no_silence() -> None:
    async def script(exchange: Exchange) -> None:
        if b"stream" in exchange.request.body:
            await exchange.begin_stream()
            await exchange.chunk(b"data: 1\n\n")
        await exchange.gone()

    async with Recorder(script) as up, running(up.port) as relay:
        waiting, streaming = await Client.to(relay.port), await Client.to(relay.port)
        await waiting.send(post(relay.port))
        await streaming.send(post(relay.port, b'{"model":"m","stream":true}'))
        await streaming.head()
        for request in relay.wiring.in_hand:
            if request.silent_at(relay.clock.boot_ms() + 20_000) is not None:
                request.pause()  # type: ignore[attr-defined]
        lateness = relay.wiring.router.lateness
        sweep_lateness(relay.wiring.in_hand, relay.wiring.router, relay.clock.boot_ms() + 20_000)
        assert lateness.suspects == set()
        for client in (waiting, streaming):
            client.close()


def test_a_slow_model_is_given_five_gaps() -> None:
    assert silence_limit_ms(100.0) == 10_000
    assert silence_limit_ms(4_000.0) == 20_000


@pytest.mark.lesson("ollama/ollama#17408: a list that is green while generation hangs")
def test_a_suspect_serves_only_if_nobody_else_can() -> None:
    world = World()
    world.own(an_endpoint())
    world.peer("beta", an_endpoint())
    world.router.lateness.sweep(0, frozenset({key_of("me")}))
    served = set()
    for number in range(20):
        choosing = world.ask(f"r{number}")
        routed = world.route(choosing)
        choosing.end(routed.attempt)
        served.add(routed.choice.endpoint)
    assert served == {key_of("beta")}
    world.admit()
    last = world.route(world.ask())
    assert last.decision is not None
    assert (last.choice.endpoint, last.decision.reason.value) == (key_of("me"), "degraded")


class Mute:
    """A request that hears nothing from an endpoint."""

    def silent_at(self, now: int) -> str:
        return at("e0")


async def test_the_watch_sleeps_without_requests_and_wakes_with_the_first() -> None:
    async with running(0) as relay:
        suspects = relay.wiring.router.lateness.suspects
        relay.wiring.router.lateness.sweep(0, frozenset({at("gone-by")}))
        watching = asyncio.create_task(watch_lateness(relay.wiring))
        await until(lambda: suspects == set())
        request: Any = Mute()
        relay.wiring.in_hand.add(request)
        await until(lambda: suspects == {at("e0")})
        relay.wiring.in_hand.discard(request)
        await until(lambda: suspects == set())
        watching.cancel()
