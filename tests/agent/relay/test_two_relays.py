"""A router and a peer's ingress: one hop, byte for byte, and whatever can end it."""

import asyncio
import hashlib
import os
from pathlib import Path

import pytest

from agent.relay.ports import PeerRoute
from router_core.policy.exchange import ExchangePolicy
from router_core.record.membership import Liveness
from router_core.router.failure import Cause
from tests.agent.relay.client import BODY, Client, ask, post
from tests.agent.relay.ingress_rig import EVENT, STATE, STREAM, ingress, pair
from tests.agent.relay.rig import Local, running
from tests.support.ports import HeldPort
from tests.support.recorder import Exchange, Recorder
from tests.support.until import until


async def test_a_request_goes_through_router_and_ingress_byte_for_byte(tmp_path: Path) -> None:
    filler = os.urandom(1 << 20).hex().encode()
    body = b'{"model":"m", "seed":12345678901234567890,"x":"\\u00e9\\/","p":"' + filler + b'"}'
    answer = os.urandom(3 << 20)

    async def script(exchange: Exchange) -> None:
        await exchange.answer(answer)

    async with Recorder(script) as up, pair(tmp_path, up.port) as (router, peer):
        for _ in range(2):
            heard = await ask(router.port, post(router.port, body))
            assert hashlib.sha256(heard.body).digest() == hashlib.sha256(answer).digest()
            assert up.requests[-1].body == body
            assert heard.headers["x-pairmesh-node"] == f"@{peer.id[:8]}/e0"
            assert not [name for name in heard.headers if name in ("x-pairmesh-state", "x-pairmesh-route")]
        assert router.states == [STATE, STATE]
        assert router.wiring.pool.open_connections == 1
        assert [attempt.outcome.result.value for attempt in peer.relay.watch.attempts] == ["done", "done"]
        router.assert_idle()
        peer.assert_idle()


async def test_a_stream_through_a_peer_is_not_held_back(tmp_path: Path) -> None:
    heard_it = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        for _ in range(4):
            heard_it.clear()
            await exchange.chunk(EVENT)
            await asyncio.wait_for(heard_it.wait(), 5)
        await exchange.end_stream()

    async with Recorder(script) as up, pair(tmp_path, up.port) as (router, peer):
        client = await Client.to(router.port)
        await client.send(post(router.port, STREAM))
        await client.head()
        for _ in range(4):
            assert await client.chunk() == EVENT
            heard_it.set()
        assert await client.chunk() == b""
        client.close()
        peer.assert_idle()


async def test_a_client_that_leaves_cancels_the_engine_behind_the_peer(tmp_path: Path) -> None:
    ended = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.chunk(EVENT)
        await exchange.gone()
        ended.set()

    async with Recorder(script) as up, pair(tmp_path, up.port) as (router, peer):
        client = await Client.to(router.port)
        await client.send(post(router.port, STREAM))
        await client.head()
        client.close()
        await asyncio.wait_for(ended.wait(), 5)
        await until(lambda: peer.relay.watch.lines)
        peer.assert_idle()
        router.assert_idle()


async def test_a_refusal_is_folded_and_the_next_endpoint_serves_without_a_body_byte_leaving(
    tmp_path: Path,
) -> None:
    async with Recorder() as far, Recorder() as near, pair(tmp_path, far.port, near.port) as (router, peer):
        peer.relay.gate.cause = "queue_full"
        body = b'{"model":"m","x":"' + b"y" * 5_000_000 + b'"}'
        heard = await ask(router.port, post(router.port, body))
        assert (heard.status, heard.headers["x-pairmesh-node"]) == (200, "@here/local0")
        assert near.requests[0].body == body
        assert router.states == [STATE]
        assert router.watch.results() == ["refused", "done"]
        assert peer.relay.watch.lines[0].bytes_in == 0
        peer.relay.gate.cause = None
        assert (await ask(router.port, post(router.port))).headers["x-pairmesh-node"] == f"@{peer.id[:8]}/e0"
        assert router.wiring.pool.open_connections == 2
        router.assert_idle()
        peer.assert_idle()


async def test_an_engines_error_behind_a_peer_is_classified_by_the_router(tmp_path: Path) -> None:
    async def busy(exchange: Exchange) -> None:
        await exchange.answer(b'{"error":"busy"}', status=503)

    async with Recorder(busy) as far, Recorder() as near, pair(tmp_path, far.port, near.port) as (router, _):
        assert (await ask(router.port, post(router.port))).headers["x-pairmesh-attempts"] == "2"
        router.fleet.order = router.fleet.order[:1]
        heard = await ask(router.port, post(router.port))
        assert (heard.status, heard.body) == (503, b'{"error":"busy"}')
        assert not [name for name in heard.headers if name in ("x-pairmesh-state", "x-pairmesh-error")]


async def test_the_ingress_own_error_is_a_failed_attempt_and_never_shown(tmp_path: Path) -> None:
    closed = HeldPort()
    async with Recorder() as near, pair(tmp_path, closed.port, near.port) as (router, _):
        heard = await ask(router.port, post(router.port))
        assert (heard.status, heard.headers["x-pairmesh-attempts"]) == (200, "2")
        assert router.watch.attempts[0].outcome.fault


async def test_a_broken_stream_behind_a_peer_is_told_by_the_router_alone(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.chunk(EVENT)
        await proceed.wait()
        exchange.reset()

    proceed = asyncio.Event()
    async with Recorder(script) as up, pair(tmp_path, up.port) as (router, peer):
        client = await Client.to(router.port)
        await client.send(post(router.port, STREAM))
        await client.head()
        assert await client.chunk() == EVENT
        proceed.set()
        last = await client.chunk()
        assert last is not None
        assert last.count(b'"upstream_lost"') == 1
        assert await client.chunk() is None
        client.close()
        peer.assert_idle()


async def test_a_peer_that_shows_another_certificate_gets_nothing(tmp_path: Path) -> None:
    async with Recorder() as far, Recorder() as near, pair(tmp_path, far.port, near.port) as (router, peer):
        route = peer.route()
        router.fleet.peers[peer.id] = PeerRoute(
            node=route.node, addresses=route.addresses, context=route.context, build=2, pin=b"another"
        )
        assert (await ask(router.port, post(router.port))).headers["x-pairmesh-attempts"] == "2"
        assert router.watch.attempts[0].outcome.cause is Cause.IDENTITY
        assert far.requests == []


class Mute(asyncio.Protocol):
    """A peer that finishes the handshake and then says what it is told to."""

    def __init__(self, say: bytes) -> None:
        self._say = say
        self.heard = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.heard += data
        if self._say:
            self._transport.write(self._say)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("say", "cause"),
    [
        (b"", Cause.NO_CONTINUE),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", Cause.PROTOCOL),
        (b"HTTP/1.1 101 Switching\r\n\r\n", Cause.PROTOCOL),
    ],
)
async def test_without_a_continue_no_body_byte_leaves_and_another_endpoint_serves(
    tmp_path: Path, say: bytes, cause: Cause
) -> None:
    policy = ExchangePolicy(continue_ms=300)
    async with Recorder() as near, ingress(tmp_path, near.port) as peer, running(policy=policy) as router:
        mute = Mute(say)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: mute, "127.0.0.1", 0, ssl=peer.serving.contexts.server)
        route = peer.route()
        port = server.sockets[0].getsockname()[1]
        router.fleet.peers[peer.id] = PeerRoute(
            node=route.node,
            addresses=(("127.0.0.1", port),),
            context=route.context,
            build=1,
            pin=route.pin,
        )
        router.fleet.order.append((peer.id, "e0"))
        router.fleet.add(Local("local0", near.port))
        assert (await ask(router.port, post(router.port))).headers["x-pairmesh-node"] == "@here/local0"
        assert router.watch.attempts[0].outcome.cause is cause
        assert mute.heard.endswith(b"\r\n\r\n")
        assert BODY not in mute.heard
        server.close()
        await server.wait_closed()


async def test_a_peer_that_is_gone_is_left_before_the_first_byte_and_told_after_it(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        if b"stream" in exchange.request.body:
            await exchange.begin_stream()
            await exchange.chunk(EVENT)
        await exchange.gone()

    async with (
        Recorder(script) as far,
        Recorder() as near,
        pair(tmp_path, far.port, near.port) as (router, peer),
    ):
        asked = asyncio.create_task(ask(router.port, post(router.port)))
        client = await Client.to(router.port)
        await client.send(post(router.port, STREAM))
        await client.head()
        assert await client.chunk() == EVENT
        await far.arrived(2)
        router.fleet.alive[peer.id] = Liveness.GONE
        for courier in tuple(router.wiring.in_hand):
            courier.review()
        assert (await asked).headers["x-pairmesh-node"] == "@here/local0"
        last = await client.chunk()
        assert last is not None
        assert b'"upstream_lost"' in last
        client.close()
        router.assert_idle()


@pytest.mark.parametrize("name", ["eng\u00fc", "e1\r\nx-injected: 1", "e1\x1b[31m", "e1;r=1", ""])
async def test_an_engine_whose_name_no_header_can_carry_is_a_failed_attempt(
    tmp_path: Path, name: str
) -> None:
    """A member may call its engines what it likes: no byte of it reaches a header, and the request goes elsewhere."""
    async with Recorder() as up, pair(tmp_path, up.port) as (relay, peer):
        relay.fleet.order[0] = (peer.id, name)
        relay.fleet.add(Local("e9", up.port))
        heard = await ask(relay.port, post(relay.port))
        assert (heard.status, heard.headers["x-pairmesh-node"]) == (200, "@here/e9")
        assert [where for where, _ in relay.watch.faults] == ["dispatch"]
        relay.watch.faults.clear()


@pytest.mark.parametrize("name", ["eng\u00fc", "m\r\nx-injected: 1", "m\x1b[31m"])
async def test_a_name_that_is_no_plain_text_is_left_out_of_an_answers_headers(name: str) -> None:
    async with Recorder() as up, running(up.port) as relay:
        relay.fleet.served = name
        relay.fleet.locals["e0"].spelled = "m"
        heard = await ask(relay.port, post(relay.port))
        assert heard.status == 200
        assert not {"x-pairmesh-model", "x-injected"} & heard.headers.keys()
        assert heard.headers["x-pairmesh-node"] == "@here/e0"
