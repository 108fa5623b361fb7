"""Router to ingress over mutual TLS: roles, announcements, admission before the body, one hop, two whole relays."""

import asyncio
import contextlib
import hashlib
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.effects.clock import Clock
from agent.effects.tasks import Tasks
from agent.identity.certificate import server_name
from agent.identity.listener import Listener, bind
from agent.identity.routes import Port
from agent.relay.headers import Dates
from agent.relay.ingress import IngressFront
from agent.relay.listener import ServerConnection
from agent.relay.ports import PeerRoute
from agent.relay.route import decode_state, encode_state, format_route, parse_route
from router_core.exchange.failure import Cause
from router_core.ids import Id32, NodeName
from router_core.placement.local import LocalWork
from router_core.policy.exchange import ExchangePolicy
from router_core.record.membership import Liveness, Member
from router_core.record.state import Role
from tests.agent.relay.client import BODY, CHAT, Client, Heard, ask, post
from tests.agent.relay.rig import Local, Relay, at, bound, build, running
from tests.support.members import Node, introduce, start_node
from tests.support.recorder import Exchange, Recorder
from tests.support.until import until

ROUTE = "v=1;d=abc;a=1;e=e0;i=7;s=3;p=10;o=20;c=i;w=1000;t=60000;r=1"
STREAM = b'{"model":"m","stream":true,"messages":[]}'
EVENT = b'data: {"choices":[{"delta":{"content":"word"}}]}\n\n'
STATE = (b"signed record", b"s" * 64)


@dataclass(slots=True)
class Ingress:
    """One node's ingress before one engine, and the certificates to reach it."""

    relay: Relay
    local: LocalWork
    serving: Node
    calling: Node
    port: int
    tasks: Tasks

    @property
    def id(self) -> str:
        return self.serving.own.node_id

    async def dial(self, caller: Node | None = None) -> Client:
        context = (caller or self.calling).contexts.client
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=context, server_hostname=server_name(self.serving.own.node_id)
        )
        return Client(reader, writer)

    def route(self, build_number: int = 1) -> PeerRoute:
        return PeerRoute(
            node=self.serving.own.node_id,
            ip="127.0.0.1",
            port=self.port,
            context=self.calling.contexts.client,
            build=build_number,
            pin=self.serving.own.der,
        )

    def assert_idle(self) -> None:
        self.relay.assert_idle()
        assert self.local.in_flight("e0") == 0


@asynccontextmanager
async def ingress(
    tmp_path: Path,
    upstream: int,
    roles: int = Role.ROUTER,
    *,
    clock: Clock | None = None,
    handshake_s: float = 5.0,
) -> AsyncIterator[Ingress]:
    serving = await start_node(tmp_path / "serving", "serving")
    calling = await start_node(tmp_path / "calling", "calling")
    await introduce(serving, calling)
    relay, local = build(clock), LocalWork()
    relay.gate.state = STATE
    relay.fleet.add(Local("e0", upstream))
    own = calling.own
    relay.gate.members[own.der] = Member(
        id32=Id32(bytes(own.id32)), der=own.der, roles=roles, admission=1, name=NodeName("calling")
    )
    front = IngressFront(
        wiring=relay.wiring,
        admission=relay.gate,
        local=local,
        endpoint_key=at,
        policy=ExchangePolicy(attempts=1),
        roll=relay.roll,
    )
    dates = Dates()
    tasks = Tasks(relay.watch.failed)
    listener = Listener(
        Port.INGRESS,
        [bind("127.0.0.1", 0)],
        lambda: ServerConnection(front, relay.clock, dates, relay.buffered),
        context=serving.contexts.server,
        by_der=lambda: serving.membership.by_der,
        admittance=serving.admittance,
        tasks=tasks,
        refused=serving.refused,
        handshake_s=handshake_s,
    )
    listener.start()
    try:
        yield Ingress(relay, local, serving, calling, listener.addresses[0][1], tasks)
    finally:
        for connection in relay.roll:
            connection.abort()
        await listener.aclose()
        await tasks.aclose()
        await relay.wiring.tasks.aclose()
        relay.wiring.pool.close()
        for node in (serving, calling):
            await node.tasks.aclose()
        await asyncio.sleep(0)
        assert relay.watch.faults == []


@asynccontextmanager
async def pair(tmp_path: Path, upstream: int, *others: int) -> AsyncIterator[tuple[Relay, Ingress]]:
    """A router whose first choice is a peer's endpoint ``e0``, then local ones."""
    async with ingress(tmp_path, upstream) as peer, running() as router:
        router.fleet.order.append((peer.id, "e0"))
        router.fleet.peers[peer.id] = peer.route()
        for number, port in enumerate(others):
            router.fleet.add(Local(f"local{number}", port))
        yield router, peer


def head(
    length: int = len(BODY), *, path: bytes = CHAT, method: bytes = b"POST", **changes: str | None
) -> bytes:
    """A router's request head; ``changes`` replace headers, None leaves one out."""
    told: dict[str, str | None] = {
        "host": "x.mesh.internal",
        "content-type": "application/json",
        "transfer-encoding": "chunked",
        "expect": "100-continue",
        "x-request-id": "rid",
        "x-pairmesh-route": ROUTE,
        "x-pairmesh-model": "m",
        "x-pairmesh-length": str(length),
    }
    told |= {name.replace("_", "-"): value for name, value in changes.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in told.items() if value is not None)
    return b"%s %s HTTP/1.1\r\n%s\r\n" % (method, path, lines.encode())


def chunked(body: bytes = BODY) -> bytes:
    return b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


def code_of(heard: Heard) -> str:
    code: str = json.loads(heard.body)["code"]
    return code


async def test_an_admitted_request_is_asked_for_its_body_and_served(tmp_path: Path) -> None:
    async with Recorder() as up, ingress(tmp_path, up.port) as peer:
        client = await peer.dial()
        await client.send(head())
        assert (await client.head())[0] == 100
        assert peer.local.in_flight("e0") == 1
        await client.send(chunked())
        heard = await client.heard()
        assert (heard.status, heard.body) == (200, b'{"ok":true}')
        assert decode_state(heard.headers["x-pairmesh-state"].encode()) == STATE
        assert up.requests[0].body == BODY
        assert not [name for name, _ in up.requests[0].headers if name.startswith(b"x-pairmesh")]
        seen = peer.local.seen(peer.relay.clock.boot_ms())
        assert [(row.inst, row.seq, row.accepted) for row in seen] == [(7, 3, 1)]
        client.close()
        peer.assert_idle()


@pytest.mark.threat("T29")
@pytest.mark.parametrize(
    ("roles", "status"),
    [
        (Role.ROUTER, 100),
        (Role.NODE | Role.ROUTER, 100),
        (Role.NODE, 403),
        (Role.OBSERVER, 403),
        (Role.INTRODUCER, 403),
        (0, 403),
    ],
)
async def test_only_a_router_may_send_requests(tmp_path: Path, roles: int, status: int) -> None:
    async with Recorder() as up, ingress(tmp_path, up.port, roles=roles) as peer:
        client = await peer.dial()
        await client.send(head())
        answered, told = await client.head()
        assert answered == status
        assert "x-pairmesh-state" not in told
        client.close()
        assert up.requests == []


@pytest.mark.threat("T29")
@pytest.mark.parametrize("sent", [head(), head(path=b"/metrics", method=b"GET"), b"nonsense\r\n\r\n"])
async def test_nothing_is_told_of_the_node_to_who_has_no_role_for_it(tmp_path: Path, sent: bytes) -> None:
    async with Recorder() as up, ingress(tmp_path, up.port, roles=Role.OBSERVER) as peer:
        client = await peer.dial()
        await client.send(sent)
        heard = await client.heard()
        assert heard.status in (400, 403, 404)
        assert "x-pairmesh-state" not in heard.headers
        assert json.loads(heard.body).keys() == {"code"}
        client.close()


@pytest.mark.parametrize(
    ("method", "path"),
    [(b"GET", CHAT), (b"POST", b"/health"), (b"GET", b"/v1/models"), (b"GET", b"/"), (b"POST", b"/x")],
)
async def test_there_is_nothing_else_on_the_ingress(tmp_path: Path, method: bytes, path: bytes) -> None:
    async with Recorder() as up, ingress(tmp_path, up.port) as peer:
        client = await peer.dial()
        await client.send(head(method=method, path=path))
        heard = await client.heard()
        assert (heard.status, code_of(heard)) == (404, "route_unknown")
        client.close()


@pytest.mark.threat("T27")
async def test_a_member_that_was_removed_is_cut_at_its_next_request(tmp_path: Path) -> None:
    async with Recorder() as up, ingress(tmp_path, up.port) as peer:
        client = await peer.dial()
        await client.send(head())
        await client.head()
        await client.send(chunked())
        assert (await client.heard()).status == 200
        peer.relay.gate.members.clear()
        await client.send(head())
        await client.ended()
        client.close()
        assert len(up.requests) == 1


async def test_a_stranger_gets_no_handshake(tmp_path: Path) -> None:
    async with Recorder() as up, ingress(tmp_path, up.port) as peer:
        stranger = await start_node(tmp_path / "stranger")
        with contextlib.suppress(OSError):
            client = await peer.dial(stranger)
            client.close()
        await until(lambda: peer.serving.refusals)
        await stranger.tasks.aclose()
        assert len(peer.relay.roll) == 0
        assert up.requests == []


@pytest.mark.parametrize(
    "changes",
    [
        {"x_pairmesh_route": None},
        {"x_pairmesh_route": "v=2;" + ROUTE[4:]},
        {"x_pairmesh_route": ROUTE + ";z=1"},
        {"x_pairmesh_route": ROUTE.replace("i=7", "i=4294967296")},
        {"x_pairmesh_model": None},
        {"x_pairmesh_length": None},
        {"x_pairmesh_length": "-1"},
    ],
)
async def test_a_head_that_announces_nothing_is_malformed(
    tmp_path: Path, changes: dict[str, str | None]
) -> None:
    async with Recorder() as up, ingress(tmp_path, up.port) as peer:
        client = await peer.dial()
        await client.send(head(**changes))
        heard = await client.heard()
        assert (heard.status, heard.headers["x-pairmesh-error"]) == (400, "route_malformed")
        client.close()
        assert up.requests == []


@pytest.mark.parametrize(
    ("length", "body"),
    [
        (len(BODY) + 1, BODY),
        (len(BODY), BODY[:-1] + b" }"),
        (13, b'{"model":"x"}'),
        (2, b"{}"),
        (2, b"[]"),
        (25, b'{"model":"m","model":"x"}'),
    ],
)
async def test_a_body_other_than_announced_never_reaches_the_engine(
    tmp_path: Path, length: int, body: bytes
) -> None:
    async with Recorder() as up, ingress(tmp_path, up.port) as peer:
        client = await peer.dial()
        await client.send(head(length))
        await client.head()
        await client.send(chunked(body))
        heard = await client.heard()
        assert (heard.status, code_of(heard)) == (400, "route_mismatch")
        client.close()
        assert up.requests == []
        peer.assert_idle()


async def test_a_refusal_comes_before_the_body_and_keeps_the_connection(tmp_path: Path) -> None:
    async with Recorder() as up, ingress(tmp_path, up.port) as peer:
        client = await peer.dial()
        peer.relay.gate.cause = "queue_full"
        for _ in range(2):
            await client.send(head())
            heard = await client.heard()
            assert (heard.status, heard.headers["x-pairmesh-refused"]) == (429, "queue_full")
            assert decode_state(heard.headers["x-pairmesh-state"].encode()) == STATE
            await client.send(b"0\r\n\r\n")
        peer.relay.gate.cause = None
        await client.send(head())
        assert (await client.head())[0] == 100
        await client.send(chunked())
        assert (await client.heard()).status == 200
        client.close()
        peer.assert_idle()


async def test_a_refused_body_that_comes_all_the_same_ends_the_connection(tmp_path: Path) -> None:
    async with Recorder() as up, ingress(tmp_path, up.port) as peer:
        client = await peer.dial()
        peer.relay.gate.cause = "pressure"
        await client.send(head())
        await client.heard()
        await client.send(chunked())
        await client.ended()
        client.close()
        assert up.requests == []


async def test_a_router_that_leaves_before_its_body_gives_its_place_back(tmp_path: Path) -> None:
    async with Recorder() as up, ingress(tmp_path, up.port) as peer:
        client = await peer.dial()
        await client.send(head())
        assert (await client.head())[0] == 100
        client.reset()
        await until(lambda: peer.local.in_flight("e0") == 0)
        await until(lambda: len(peer.relay.roll) == 0)
        peer.assert_idle()


async def test_an_engine_that_cannot_be_reached_is_an_error_of_the_ingress_itself(tmp_path: Path) -> None:
    with bound() as sock:
        free: int = sock.getsockname()[1]
    async with ingress(tmp_path, free) as peer:
        client = await peer.dial()
        await client.send(head())
        await client.head()
        await client.send(chunked())
        heard = await client.heard()
        assert (heard.status, heard.headers["x-pairmesh-error"]) == (502, "upstream_unreachable")
        client.close()
        peer.assert_idle()


# --- two relays ----------------------------------------------------------------------------------------------


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
    with bound() as sock:
        free: int = sock.getsockname()[1]
    async with Recorder() as near, pair(tmp_path, free, near.port) as (router, _):
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
            node=route.node, ip=route.ip, port=route.port, context=route.context, build=2, pin=b"another"
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
            node=route.node, ip=route.ip, port=port, context=route.context, build=1, pin=route.pin
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


def test_a_route_header_survives_its_own_parser() -> None:
    parsed = parse_route(ROUTE)
    assert parsed is not None
    assert format_route(parsed) == ROUTE
    for wrong in (
        "",
        ROUTE[:-1],
        ROUTE + "0",
        ROUTE.replace("c=i", "c=x"),
        ROUTE.replace("e=e0", "e=../x"),
        " " + ROUTE,
    ):
        assert parse_route(wrong) is None


def test_a_state_header_survives_its_own_parser_and_rejects_junk() -> None:
    assert decode_state(encode_state(*STATE)) == STATE
    for wrong in (b"", b"!!!", b"AAAA", b"A" * 5_000, b"\xff\xfe"):
        assert decode_state(wrong) is None
