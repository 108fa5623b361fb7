"""One node's ingress over mutual TLS, and what a router sends it; or a whole router before it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from agent.effects.clock import Clock
from agent.effects.tasks import Tasks
from agent.identity.certificate import server_name
from agent.identity.listener import Listener, bind
from agent.identity.routes import Port
from agent.relay.frontends.ingress import IngressFront
from agent.relay.http.connection import ServerConnection
from agent.relay.http.headers import Dates
from agent.relay.ports import PeerRoute
from router_core.ids import Id32, NodeName
from router_core.placement.local import LocalWork
from router_core.policy.exchange import ExchangePolicy
from router_core.record.membership import Member
from router_core.record.state import Role
from tests.agent.relay.client import BODY, CHAT, Client, Heard
from tests.agent.relay.rig import Local, Relay, at, build, running
from tests.support.members import Node, introduce, start_node

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
            addresses=(("127.0.0.1", self.port),),
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
