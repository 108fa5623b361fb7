"""Requests on their whole way: a real relay, real placing, real sockets; what a client sends is what is decided on."""

import asyncio
import base64
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.engines.contract import Identity
from agent.relay.dialects.relayed import RELAYED, SHOW
from agent.settings.manifest import EngineKind
from router_core.record.state import Dialect
from tests.agent.node.rig import an_endpoint, key_of
from tests.agent.node.test_observing import Watched
from tests.agent.relay.client import Client, ask, post
from tests.agent.relay.rig import running
from tests.agent.relay.test_failover import EVENT, broken, busy, eof, reset
from tests.support.ports import HeldPort
from tests.support.recorder import Exchange, Recorder, Script, say_ok
from tests.support.until import until

INFERRING = sorted(path for path in RELAYED if path != SHOW)
EVERYTHING = Identity(
    engine=EngineKind.LLAMACPP, flavour="single", version="b1", dialects=Dialect((1 << len(Dialect)) - 1)
)
PICTURE_BYTES = 1_900_000
STREAM = b'{"model":"tiny","stream":true,"messages":[]}'


@pytest.mark.lesson("thushan/olla#139: stickiness that is silently off")
@pytest.mark.parametrize("path", INFERRING)
async def test_every_path_keeps_a_session_where_it_was_and_says_so(path: bytes) -> None:
    watched = Watched()
    world = watched.world
    world.own(*(an_endpoint(f"e{number}", identity=EVERYTHING) for number in range(3)))
    body = json.dumps(
        {"model": "tiny", "prompt": "hi", "input": "hi", "messages": [{"role": "user", "content": "hi"}]}
    ).encode()
    async with (
        Recorder() as e0,
        Recorder() as e1,
        Recorder() as e2,
        running(
            e0.port, e1.port, e2.port, clock=world.clock, place=world.placing, observer=watched.observing
        ) as relay,
    ):
        replies = [
            await ask(relay.port, post(relay.port, body, path=path, headers=b"X-Session-Id: s1\r\n"))
            for _ in range(6)
        ]
    assert [reply.headers["x-pairmesh-session"] for reply in replies] == ["miss"] + ["hit"] * 5
    assert len({reply.headers["x-pairmesh-node"] for reply in replies}) == 1


@pytest.mark.lesson("pictures counted as text")
async def test_a_picture_costs_its_800_tokens_however_many_bytes_it_has() -> None:
    watched = Watched()
    world = watched.world
    world.own(an_endpoint("e0"))
    url = "data:image/png;base64," + base64.b64encode(bytes(PICTURE_BYTES)).decode()
    text = "what is this? " * 20
    parts = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}]
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": parts}]}).encode()
    async with (
        Recorder() as up,
        running(up.port, clock=world.clock, place=world.placing, observer=watched.observing) as relay,
    ):
        assert (await ask(relay.port, post(relay.port, body))).status == 200
        assert up.requests[0].body == body
    watched.observing.settle()
    (record,) = world.kept.records
    assert record.req.images == 1
    assert record.req.prompt_tokens == math.ceil(len(text) / 3.6) + 800


@pytest.mark.lesson("vllm-project/production-stack#420: a dead node dialled again and again")
async def test_an_endpoint_that_refuses_is_dialled_once_and_then_left_alone() -> None:
    watched = Watched()
    world = watched.world
    world.own(an_endpoint("e0"), an_endpoint("e1"))
    wish = post(
        0, json.dumps({"model": "tiny", "messages": []}).encode(), headers=b"X-Pairmesh-Prefer: @me/e0\r\n"
    )
    closed = HeldPort()
    async with (
        Recorder() as good,
        running(
            closed.port,
            good.port,
            clock=world.clock,
            place=world.placing,
            observer=watched.observing,
            router=world.router,
        ) as relay,
    ):
        hints = []
        for later_ms in (0, 0, 2_000, 2_999):
            world.clock.now += later_ms
            reply = await ask(relay.port, wish.replace(b"127.0.0.1:0", b"127.0.0.1:%d" % relay.port))
            assert (reply.status, reply.headers["x-pairmesh-node"]) == (200, "@me/e1")
            hints.append(reply.headers["x-pairmesh-hints"])
    watched.observing.settle()
    dialled = [attempt.row for record in world.kept.records for attempt in record.attempts]
    assert dialled == ["@me/e0", "@me/e1", "@me/e1", "@me/e1", "@me/e1"]
    assert hints[1:] == ["prefer=excluded(breaker_open)"] * 3
    assert world.kept.records[0].chosen == key_of("me", "e1")


async def begun_then_cut(exchange: Exchange) -> None:
    await exchange.begin_stream()
    await exchange.chunk(EVENT)
    exchange.reset()


async def begun_and_silent(exchange: Exchange) -> None:
    await exchange.begin_stream()
    await exchange.chunk(EVENT)
    await exchange.gone()


async def silent(exchange: Exchange) -> None:
    await exchange.gone()


ENDINGS = (say_ok, eof, reset, busy, broken, begun_then_cut)
LEFT = (silent, begun_and_silent)
"""Of these only the client makes an end."""


@pytest.mark.promise("nothing is in flight after any mix of endings")
@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from([*ENDINGS, *LEFT]), min_size=1, max_size=16), st.booleans())
def test_any_mix_of_success_error_cancel_and_kill_leaves_nothing_in_flight(
    scripts: list[Script], dead: bool
) -> None:
    """``dead``: one of two endpoints is a process that was killed."""
    asyncio.run(mixed(scripts, dead=dead))


async def mixed(scripts: list[Script], *, dead: bool) -> None:
    watched = Watched()
    world = watched.world
    world.own(an_endpoint("e0", slots=64), an_endpoint("e1", slots=64))

    async def scripted(exchange: Exchange) -> None:
        number, _, _ = (exchange.request.value(b"x-request-id") or b"").decode()[1:].partition("-a")
        await scripts[int(number)](exchange)

    closed = HeldPort()
    async with (
        Recorder(scripted) as one,
        Recorder(scripted) as two,
        running(
            closed.port if dead else one.port,
            two.port,
            clock=world.clock,
            place=world.placing,
            observer=watched.observing,
            router=world.router,
        ) as relay,
    ):

        async def client(number: int) -> None:
            begun = len(one.requests) + len(two.requests)
            asking = await Client.to(relay.port)
            await asking.send(post(relay.port, STREAM, headers=b"x-request-id: r%d\r\n" % number))
            if scripts[number] is silent:
                await until(lambda: len(one.requests) + len(two.requests) > begun)
            elif scripts[number] is begun_and_silent:
                await asking.head()
            else:
                await asking.heard()
            asking.close()

        await asyncio.gather(*(client(number) for number in range(len(scripts))))
        await until(lambda: not relay.wiring.in_hand)
        relay.assert_idle()
    watched.observing.settle()
    assert (len(world.router.ledger), world.router.ledger.owed, world.placing.open) == (0, {}, {})
    assert (world.work.in_flight("e0"), world.work.in_flight("e1")) == (0, 0)
    assert len(world.kept.records) == len(scripts)
    assert all(record.outcome is not None for record in world.kept.records)
