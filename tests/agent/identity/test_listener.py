"""Over real sockets: who gets through the accept task, and how those that should not are turned away."""

import asyncio
import contextlib
import resource
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from agent.identity.admittance import Admittance, Refusal
from agent.identity.certificate import certificate_pem, server_name
from agent.identity.listener import Listener, bind
from agent.identity.routes import Port
from agent.identity.tls import OwnFiles, context, is_pinned, peer_der
from tests.support.members import Node, introduce, start_node
from tests.support.until import until

LOOPS = [pytest.param(asyncio.new_event_loop, id="asyncio"), pytest.param(uvloop.new_event_loop, id="uvloop")]


class Echo(asyncio.Protocol):
    """Sends back what it gets; remembers who is connected."""

    def __init__(self, seen: list["Echo"]) -> None:
        self.seen = seen
        self.transport: asyncio.Transport | None = None
        self.lost = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.seen.append(self)

    def data_received(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True


class Server:
    """A listener of one node in front of ``Echo``."""

    def __init__(self, node: Node, port: Port = Port.INGRESS, **timing: Any) -> None:
        self.node = node
        self.seen: list[Echo] = []
        self.listener = Listener(
            port,
            [bind("127.0.0.1", 0)],
            lambda: Echo(self.seen),
            context=node.contexts.server,
            by_der=lambda: node.membership.by_der,
            admittance=node.admittance,
            tasks=node.tasks,
            refused=node.refused,
            **timing,
        )
        self.listener.start()

    @property
    def address(self) -> tuple[str, int]:
        return self.listener.addresses[0]

    def reasons(self) -> set[Refusal]:
        return {refusal for _, refusal in self.node.refusals}

    async def aclose(self) -> None:
        await self.listener.aclose()
        for echo in self.seen:
            if echo.transport is not None:
                echo.transport.abort()
        await self.node.tasks.aclose()
        await until(lambda: all(echo.lost for echo in self.seen))
        assert self.node.failures == []


async def dial(
    server: Server, context: ssl.SSLContext, name: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*server.address, ssl=context, server_hostname=name)


async def echoes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """True if a byte comes back; False if the connection is dead."""
    try:
        writer.write(b"x")
        async with asyncio.timeout(5):
            return await reader.read(1) == b"x"
    except (OSError, ssl.SSLError):
        return False


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def refused(server: Server, context: ssl.SSLContext, name: str) -> bool:
    """True if nothing can be had from the server: no handshake, or a connection that dies unanswered."""
    try:
        reader, writer = await dial(server, context, name)
    except OSError:
        return True
    answered = await echoes(reader, writer)
    await hang_up(writer)
    return not answered


@pytest.fixture(params=LOOPS)
def on_loop(request: pytest.FixtureRequest) -> Callable[[Callable[[], object]], None]:
    """Runs an async test on each kind of loop."""

    def run(test: Callable[[], object]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(asyncio.wait_for(test(), 30))  # type: ignore[arg-type]

    return run


async def pair(tmp_path: Path) -> tuple[Node, Node]:
    left = await start_node(tmp_path / "left", "left")
    right = await start_node(tmp_path / "right", "right")
    await introduce(left, right)
    return left, right


def test_members_talk_over_tls_1_3_and_know_each_other(
    on_loop: Callable[[Callable[[], object]], None], tmp_path: Path
) -> None:
    async def scenario() -> None:
        left, right = await pair(tmp_path)
        server = Server(left)
        reader, writer = await dial(server, right.contexts.client, server_name(left.own.node_id))
        assert await echoes(reader, writer)
        connection = writer.get_extra_info("ssl_object")
        assert connection.version() == "TLSv1.3"
        assert is_pinned(writer.transport, left.own.der)
        assert peer_der(server.seen[0].transport) == right.own.der
        assert left.admittance.live(Port.INGRESS) == 1
        await hang_up(writer)
        await until(lambda: left.admittance.live(Port.INGRESS) == 0)
        assert left.refusals == []
        await server.aclose()

    on_loop(scenario)


def test_a_stranger_is_refused_in_the_handshake(
    on_loop: Callable[[Callable[[], object]], None], tmp_path: Path
) -> None:
    async def scenario() -> None:
        left, _ = await pair(tmp_path)
        stranger = await start_node(tmp_path / "stranger")
        await stranger.membership.add(left.file(), left.own.node_id)
        server = Server(left)
        assert await refused(server, stranger.contexts.client, server_name(left.own.node_id))
        await until(lambda: Refusal.HANDSHAKE in server.reasons())
        assert server.seen == []
        assert left.admittance.pending == 0
        await server.aclose()

    on_loop(scenario)


def test_a_server_that_is_not_a_member_is_refused_by_the_dialler(
    on_loop: Callable[[Callable[[], object]], None], tmp_path: Path
) -> None:
    async def scenario() -> None:
        left, right = await pair(tmp_path)
        impostor = await start_node(tmp_path / "impostor")
        await impostor.membership.add(right.file(), right.own.node_id)
        server = Server(impostor)
        with pytest.raises(ssl.SSLCertVerificationError):
            await dial(server, right.contexts.client, server_name(left.own.node_id))
        await server.aclose()

    on_loop(scenario)


def test_another_member_at_the_dialled_address_is_not_taken_for_the_one_meant(
    on_loop: Callable[[Callable[[], object]], None], tmp_path: Path
) -> None:
    async def scenario() -> None:
        left, right = await pair(tmp_path)
        third = await start_node(tmp_path / "third")
        await introduce(right, third)
        server = Server(third)
        with pytest.raises(ssl.SSLCertVerificationError, match="ostname"):
            await dial(server, right.contexts.client, server_name(left.own.node_id))
        _, writer = await dial(server, right.contexts.client, server_name(third.own.node_id))
        assert not is_pinned(writer.transport, left.own.der)
        await hang_up(writer)
        await server.aclose()

    on_loop(scenario)


def issued_by(issuer: Node, folder: Path) -> OwnFiles:
    """A certificate that names ``issuer`` for another key, issued by ``issuer``, with its own as the chain."""
    private = Ed25519PrivateKey.generate()
    good = x509.load_der_x509_certificate(issuer.own.der)
    builder = (
        x509.CertificateBuilder()
        .serial_number(1)
        .subject_name(good.subject)
        .issuer_name(good.subject)
        .public_key(private.public_key())
        .not_valid_before(good.not_valid_before_utc)
        .not_valid_after(good.not_valid_after_utc)
    )
    for extension in good.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    leaf = builder.sign(issuer.own.key.private, None)
    files = OwnFiles(folder / "leaf.pem", folder / "leaf.key")
    files.cert_path.write_bytes(leaf.public_bytes(Encoding.PEM) + certificate_pem(issuer.own.der))
    files.key_path.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return files


@pytest.mark.threat("T29")
def test_a_certificate_issued_by_a_member_opens_nothing(
    on_loop: Callable[[Callable[[], object]], None], tmp_path: Path
) -> None:
    async def scenario() -> None:
        left, right = await pair(tmp_path)
        server = Server(left)
        forged = context(ssl.PROTOCOL_TLS_CLIENT, issued_by(right, tmp_path), [left.own.der])
        assert await refused(server, forged, server_name(left.own.node_id))
        await until(lambda: Refusal.HANDSHAKE in server.reasons())
        assert server.seen == []
        await server.aclose()

    on_loop(scenario)


@pytest.mark.threat("T28")
def test_tls_1_2_and_plaintext_get_nothing(
    on_loop: Callable[[Callable[[], object]], None], tmp_path: Path
) -> None:
    async def scenario() -> None:
        left, right = await pair(tmp_path)
        server = Server(left)
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
        old.load_cert_chain(right.own.cert_path, right.own.key_path)
        old.load_verify_locations(cadata=left.own.der)
        with pytest.raises(OSError):
            await dial(server, old, server_name(left.own.node_id))
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        async with asyncio.timeout(10):
            got = await reader.read()
        assert b"HTTP" not in got
        await hang_up(writer)
        assert server.seen == []
        await server.aclose()

    on_loop(scenario)


@pytest.mark.threat("T28")
def test_a_client_without_a_certificate_gets_nothing(
    on_loop: Callable[[Callable[[], object]], None], tmp_path: Path
) -> None:
    async def scenario() -> None:
        left, _ = await pair(tmp_path)
        server = Server(left)
        bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        bare.load_verify_locations(cadata=left.own.der)
        assert await refused(server, bare, server_name(left.own.node_id))
        assert server.seen == []
        await server.aclose()

    on_loop(scenario)


@pytest.mark.threat("T27")
def test_removal_cuts_live_connections_on_every_port_and_refuses_new_ones(
    on_loop: Callable[[Callable[[], object]], None], tmp_path: Path
) -> None:
    async def scenario() -> None:
        left, right = await pair(tmp_path)
        servers = [Server(left, Port.INGRESS), Server(left, Port.LINK)]
        name = server_name(left.own.node_id)
        streams = [await dial(server, right.contexts.client, name) for server in servers]
        for reader, writer in streams:
            assert await echoes(reader, writer)
        result = await left.membership.remove(right.own.node_id)
        assert result.aborted == 2
        for reader, writer in streams:
            assert not await echoes(reader, writer)
            await hang_up(writer)
        for server in servers:
            assert await refused(server, right.contexts.client, name)
        for server in servers:
            await server.aclose()

    on_loop(scenario)


@pytest.mark.threat("T27")
def test_no_tls_session_is_ever_offered_for_resumption(tmp_path: Path) -> None:
    async def scenario() -> None:
        left, right = await pair(tmp_path)
        server = Server(left)

        def session() -> tuple[bool, ssl.SSLSession | None]:
            with (
                socket.create_connection(server.address, timeout=5) as raw,
                right.contexts.client.wrap_socket(raw, server_hostname=server_name(left.own.node_id)) as sock,
            ):
                sock.sendall(b"x")
                assert sock.recv(1) == b"x"
                saved = sock.session
                return saved is not None and saved.has_ticket, saved

        has_ticket, saved = await asyncio.to_thread(session)
        assert not has_ticket
        await left.membership.remove(right.own.node_id)

        def answered() -> bool:
            name = server_name(left.own.node_id)
            try:
                with (
                    socket.create_connection(server.address, timeout=5) as raw,
                    right.contexts.client.wrap_socket(raw, server_hostname=name, session=saved) as sock,
                ):
                    sock.sendall(b"x")
                    return sock.recv(1) == b"x"
            except OSError:
                return False

        assert not await asyncio.to_thread(answered)
        await server.aclose()

    asyncio.run(scenario())


@pytest.mark.threat("T27")
def test_a_connection_that_was_mid_handshake_when_its_id_was_removed_is_never_admitted(
    on_loop: Callable[[Callable[[], object]], None], tmp_path: Path
) -> None:
    async def scenario() -> None:
        left, right = await pair(tmp_path)
        by_der: dict[bytes, object] = {}
        seen: list[Echo] = []
        listener = Listener(
            Port.LINK,
            [bind("127.0.0.1", 0)],
            lambda: Echo(seen),
            context=left.contexts.server,
            by_der=lambda: by_der,  # type: ignore[arg-type, return-value]
            admittance=left.admittance,
            tasks=left.tasks,
            refused=left.refused,
        )
        listener.start()
        reader, writer = await asyncio.open_connection(
            *listener.addresses[0], ssl=right.contexts.client, server_hostname=server_name(left.own.node_id)
        )
        assert not await echoes(reader, writer)
        assert (Port.LINK, Refusal.STRANGER) in left.refusals
        assert seen == []
        await hang_up(writer)
        await listener.aclose()
        await left.tasks.aclose()

    on_loop(scenario)


@pytest.mark.threat("T20")
async def test_silence_before_the_handshake_is_cut(tmp_path: Path) -> None:
    left, _ = await pair(tmp_path)
    server = Server(left, handshake_s=0.2)
    reader, writer = await asyncio.open_connection(*server.address)
    async with asyncio.timeout(10):
        assert await reader.read() == b""
    await until(lambda: left.admittance.pending == 0)
    assert server.reasons() == {Refusal.HANDSHAKE}
    await hang_up(writer)
    await server.aclose()


@pytest.mark.threat("T20")
async def test_one_address_holds_at_most_eight_unauthenticated_connections(tmp_path: Path) -> None:
    left, right = await pair(tmp_path)
    server = Server(left, handshake_s=60)
    silent = [await asyncio.open_connection(*server.address) for _ in range(8)]
    await until(lambda: left.admittance.pending == 8)
    reader, writer = await asyncio.open_connection(*server.address)
    async with asyncio.timeout(10):
        assert await reader.read() == b""
    assert server.reasons() == {Refusal.PER_IP}
    for _, each in [*silent, (reader, writer)]:
        await hang_up(each)
    await until(lambda: left.admittance.pending == 0)
    reader, writer = await dial(server, right.contexts.client, server_name(left.own.node_id))
    assert await echoes(reader, writer)
    await hang_up(writer)
    await server.aclose()


@pytest.mark.threat("T20")
def test_a_member_gets_in_past_those_that_hold_all_half_open_connections(
    on_loop: Callable[[Callable[[], object]], None], tmp_path: Path
) -> None:
    async def scenario() -> None:
        left, right = await pair(tmp_path)
        server = Server(left, handshake_s=60)
        silent = [await asyncio.open_connection(*server.address) for _ in range(8)]
        await until(lambda: left.admittance.pending == 8)
        name = server_name(left.own.node_id)
        async with asyncio.timeout(20):
            while await refused(server, right.contexts.client, name):
                """As long as the others might still finish."""
        reader, writer = await dial(server, right.contexts.client, name)
        assert await echoes(reader, writer)
        async with asyncio.timeout(10):
            assert await silent[0][0].read() == b"", "the oldest gave way"
        assert left.admittance.pending < 8
        for _, each in [*silent, (reader, writer)]:
            await hang_up(each)
        await server.aclose()

    on_loop(scenario)


@pytest.mark.threat("T20")
async def test_a_known_address_gets_in_while_strangers_fill_the_port(tmp_path: Path) -> None:
    left, right = await pair(tmp_path)
    server = Server(left, handshake_s=60, is_known=lambda ip: ip == "127.0.0.1")
    sources = [f"127.0.0.{number}" for number in range(2, 6)]
    silent = [
        await asyncio.open_connection(*server.address, local_addr=(ip, 0)) for ip in sources for _ in range(8)
    ]
    await until(lambda: left.admittance.pending == 32)
    reader, writer = await dial(server, right.contexts.client, server_name(left.own.node_id))
    assert await echoes(reader, writer)
    assert left.admittance.pending == 32
    for _, each in [*silent, (reader, writer)]:
        await hang_up(each)
    await server.aclose()


async def test_one_member_holds_at_most_four_connections_on_the_link_port(tmp_path: Path) -> None:
    left, right = await pair(tmp_path)
    server = Server(left, Port.LINK)
    name = server_name(left.own.node_id)
    held = [await dial(server, right.contexts.client, name) for _ in range(4)]
    await until(lambda: left.admittance.live(Port.LINK) == 4)
    assert await refused(server, right.contexts.client, name)
    assert server.reasons() == {Refusal.PER_ID}
    for reader, writer in held:
        assert await echoes(reader, writer)
        await hang_up(writer)
    await server.aclose()


@pytest.mark.threat("T21")
async def test_accepting_pauses_at_the_descriptor_reserve_and_recovers(tmp_path: Path) -> None:
    left = await start_node(tmp_path / "left", admittance=Admittance(most=2))
    right = await start_node(tmp_path / "right")
    await introduce(left, right)
    server = Server(left, pause_s=0.01)
    name = server_name(left.own.node_id)
    held = [await dial(server, right.contexts.client, name) for _ in range(2)]
    await until(lambda: Refusal.DESCRIPTORS in server.reasons())
    waiting = asyncio.ensure_future(dial(server, right.contexts.client, name))
    for reader, writer in held:
        assert await echoes(reader, writer)
    assert not waiting.done()
    await hang_up(held[0][1])
    async with asyncio.timeout(10):
        reader, writer = await waiting
    assert await echoes(reader, writer)
    await hang_up(writer)
    await hang_up(held[1][1])
    await server.aclose()


@pytest.fixture
async def linked(tmp_path: Path) -> AsyncIterator[tuple[Node, Node]]:
    left, right = await pair(tmp_path)
    yield left, right
    await left.tasks.aclose()


async def test_aiohttp_serves_websockets_and_requests_behind_the_listener(linked: tuple[Node, Node]) -> None:
    left, right = linked

    async def link(request: web.Request) -> web.WebSocketResponse:
        member = left.membership.by_der[peer_der(request.transport) or b""]
        ws = web.WebSocketResponse(protocols=("pairmesh.v1",))
        await ws.prepare(request)
        await ws.send_bytes(member.id16)
        await ws.close()
        return ws

    app = web.Application()
    app.router.add_get("/mesh/v1/link", link)
    runner = web.AppRunner(app)
    await runner.setup()
    assert runner.server is not None
    listener = Listener(
        Port.LINK,
        [bind("127.0.0.1", 0)],
        runner.server,
        context=left.contexts.server,
        by_der=lambda: left.membership.by_der,
        admittance=left.admittance,
        tasks=left.tasks,
        refused=left.refused,
    )
    listener.start()
    host, port = listener.addresses[0]
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(
            f"wss://{host}:{port}/mesh/v1/link",
            ssl=right.contexts.client,
            server_hostname=server_name(left.own.node_id),
            protocols=("pairmesh.v1",),
        ) as ws,
    ):
        assert await ws.receive_bytes() == right.own.id16
        assert (await ws.receive()).type is aiohttp.WSMsgType.CLOSE
    await runner.cleanup()
    await listener.aclose()
    await until(lambda: left.admittance.live(Port.LINK) == 0)


_CROWD = """
import socket, sys
held = []
for _ in range(40):
    try:
        held.append(socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=5))
    except OSError:
        break
print(len(held), flush=True)
sys.stdin.read()
"""


@pytest.mark.threat("T21")
async def test_running_out_of_descriptors_keeps_what_is_up_and_recovers(tmp_path: Path) -> None:
    left, right = await pair(tmp_path)
    server = Server(left, pause_s=0.02, handshake_s=60)
    name = server_name(left.own.node_id)
    reader, writer = await dial(server, right.contexts.client, name)
    crowd = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _CROWD, str(server.address[1]), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as probe:
        resource.setrlimit(resource.RLIMIT_NOFILE, (probe.fileno() + 4, hard))
    try:
        await until(lambda: Refusal.DESCRIPTORS in server.reasons())
        assert await echoes(reader, writer)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    await crowd.communicate(b"")
    await until(lambda: left.admittance.pending == 0)
    assert await echoes(reader, writer)
    async with asyncio.timeout(20):
        while await refused(server, right.contexts.client, name):
            """The crowd's connections may still wait to be accepted and dropped."""
    await hang_up(writer)
    await server.aclose()
