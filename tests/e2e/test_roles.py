"""A daemon's two doors for members: who has no role for it learns nothing of the node, however it asks."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from agent.identity.certificate import server_name
from router_core.ids import NodeId
from tests.agent.relay.client import CHAT, Client, Heard
from tests.support.cluster import Node
from tests.support.members import Node as Member
from tests.support.members import start_node
from tests.support.rawlink import RawLink
from tests.support.scripted_engine import ScriptedEngine, Wire, whole

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.threat("T29")]

SECRET = "telling-model"
BODY = json.dumps({"model": SECRET, "messages": []}).encode()
TELEMETRY = ("/metrics", "/v1/view", "/v1/status", "/v1/decisions", "/mesh/v1/view", "/v1/models", "/api/ps")
NO_ROUTER = ("observer", "introducer", "node")


class Doors:
    """One daemon, and a member whose roles at it a test chooses."""

    def __init__(self, daemon: Node, member: Member, asked: list[str], folder: Path) -> None:
        self.daemon = daemon
        self.member = member
        self.asked = asked
        self._file = folder / "member.trust"

    async def grant(self, role: str) -> None:
        self._file.write_bytes(self.member.file())
        told = ("trust", "add", str(self._file), "--id", self.member.own.node_id, "--role", role)
        status, out, err = await self.daemon.cli(*told)
        assert status == 0, (out, err)

    async def ask(self, port: str, sent: bytes) -> Heard:
        """What the daemon answers to ``sent``."""
        reader, writer = await asyncio.open_connection(
            self.daemon.ip,
            self.daemon.ports[port],
            ssl=self.member.contexts.client,
            server_hostname=server_name(NodeId(self.daemon.node_id)),
        )
        client = Client(reader, writer)
        try:
            await client.send(sent)
            return await client.heard()
        finally:
            client.close()

    async def link(self) -> int:
        address = self.daemon.ip, self.daemon.ports["mesh"]
        async with RawLink(
            address, self.member.contexts.client, server_name(NodeId(self.daemon.node_id))
        ) as link:
            return await link.ask()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def doors(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Doors]:
    base = tmp_path_factory.mktemp("roles")

    async def answer(wire: Wire, _: bytes) -> None:
        wire.write(whole(200, b'{"choices":[]}'))

    engine = ScriptedEngine({SECRET: answer})
    daemon = Node(name="alpha", ip="127.0.0.2", base=base / "alpha")
    daemon.write_settings([])
    async with engine.serving(daemon.ip) as url:
        (daemon.config / "endpoints" / "toy.toml").write_text(f'engine = "openai"\nurl = "{url}"\n')
        await daemon.start()
        try:
            member = await start_node(base / "member", "member")
            made = Doors(daemon, member, engine.asked, base)
            daemon.node_id = (await daemon.get("/v1/status"))["own"]["id"]
            for _ in range(2):
                await made.grant("observer")
                _, exported, _ = await daemon.cli("trust", "export")
                await member.membership.add(exported.encode(), daemon.node_id)
            yield made
            await member.tasks.aclose()
        finally:
            await daemon.term()


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode()


def work(daemon: Node) -> bytes:
    """A request as another router would place it."""
    told = {
        "content-type": "application/json",
        "content-length": str(len(BODY)),
        "x-pairmesh-route": "v=1;d=abc;a=1;e=toy;i=7;s=3;p=10;o=20;c=i;w=1000;t=60000;r=1",
        "x-pairmesh-model": SECRET,
        "x-pairmesh-length": str(len(BODY)),
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in told.items())
    return f"POST {CHAT.decode()} HTTP/1.1\r\nhost: {daemon.node_id}\r\n{lines}\r\n".encode() + BODY


def tells_nothing(heard: Heard) -> bool:
    said = (json.dumps(heard.headers) + heard.body.decode("latin-1")).lower()
    return not any(word in said for word in (SECRET, "alpha", "toy", "x-pairmesh-state"))


@pytest.mark.scenario("malformed hints fail safely, and telemetry is for those with a role")
@pytest.mark.threat("T40")
@pytest.mark.parametrize("path", TELEMETRY)
@pytest.mark.parametrize("port", ["mesh", "ingress"])
async def test_telemetry_is_behind_neither_door_whatever_the_role(doors: Doors, port: str, path: str) -> None:
    for role in (*NO_ROUTER, "router"):
        await doors.grant(role)
        heard = await doors.ask(port, get(path))
        assert heard.status == 404
        assert tells_nothing(heard)


@pytest.mark.scenario("malformed hints fail safely, and telemetry is for those with a role")
async def test_the_link_on_which_state_is_told_needs_a_role_for_it(doors: Doors) -> None:
    for role, status in (("observer", 403), ("introducer", 403), ("node", 101), ("router", 101)):
        await doors.grant(role)
        assert await doors.link() == status


@pytest.mark.parametrize("role", NO_ROUTER)
async def test_who_is_no_router_places_nothing_and_is_told_nothing(doors: Doors, role: str) -> None:
    await doors.grant(role)
    heard = await doors.ask("ingress", work(doors.daemon))
    assert (heard.status, json.loads(heard.body)) == (403, {"code": "role"})
    assert tells_nothing(heard)
    assert doors.asked == []


async def test_a_router_is_served_and_told_of_the_node(doors: Doors) -> None:
    await doors.grant("router")
    heard = await doors.ask("ingress", work(doors.daemon))
    assert (heard.status, heard.body) == (200, b'{"choices":[]}')
    assert "x-pairmesh-state" in heard.headers
    assert doors.asked == [SECRET]


@pytest.mark.threat("T40")
@pytest.mark.parametrize("port", ["mesh", "ingress"])
async def test_a_stranger_gets_no_handshake(doors: Doors, port: str, tmp_path: Path) -> None:
    stranger = await start_node(tmp_path / "stranger", "stranger")
    _, exported, _ = await doors.daemon.cli("trust", "export")
    await stranger.membership.add(exported.encode(), doors.daemon.node_id)
    known, doors.member = doors.member, stranger
    try:
        with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
            await doors.ask(port, get("/metrics"))
    finally:
        doors.member = known
        await stranger.tasks.aclose()
