"""The polling client over real sockets: what it refuses to do and to read."""

import asyncio
import contextlib
import gzip
import socket
import threading
from collections.abc import AsyncIterator
from ipaddress import ip_address

import pytest
import uvloop
from aiohttp import web

from agent.engines.client import AddressInfo, EngineClient, may_connect
from agent.engines.contract import Credential, EngineMisspoke, EngineUnreachable
from agent.engines.outside import IpAddress, beyond
from agent.settings.manifest import EngineKind, EngineUrl, Manifest
from tests.support.engine_setup import client_of, manifest
from tests.support.fakes.replay import ReplayServer, Sample

KIB = 1024
MIB = 1024 * KIB


@contextlib.asynccontextmanager
async def raw_server(answer: bytes, *, close: bool = True) -> AsyncIterator[int]:
    """A server that sends ``answer`` to whoever connects."""

    talks: set[asyncio.Task[None]] = set()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talks.add(asyncio.current_task())  # type: ignore[arg-type]
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
            if not close:
                await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
        await asyncio.gather(*talks)


async def test_a_redirect_is_an_error_and_never_followed() -> None:
    target = ReplayServer({"/x": Sample(200, {}, b"{}")})
    async with target.serving():
        for location in ("http://169.254.169.254/latest", f"http://127.0.0.1:{target.port}/x", "/x"):
            server = ReplayServer({"/v1/models": Sample(302, {"Location": location})})
            async with server.serving(), client_of(manifest(server.port)) as client:
                with pytest.raises(EngineMisspoke) as caught:
                    await client.get_json("/v1/models")
            assert caught.value.reason == "redirect"
            assert server.calls == [("GET", "/v1/models")]
    assert target.calls == []


async def test_a_listing_of_five_mebibytes_is_refused_with_and_without_a_length() -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            for _ in range(5 * 16):
                await response.write(bytes(MIB // 16))
        return response

    server = ReplayServer({"/told": Sample(body=bytes(5 * MIB)), "/untold": endless})
    async with server.serving(), client_of(manifest(server.port)) as client:
        for path in ("/told", "/untold"):
            with pytest.raises(EngineMisspoke) as caught:
                await client.get(path)
            assert caught.value.reason == "too_large"


async def test_a_compressed_body_is_read_up_to_the_cap() -> None:
    listed = gzip.compress(b'{"data":[{"id":"a"}]}')
    bomb = gzip.compress(bytes(64 * MIB))
    for body, reason in ((bomb, "too_large"), (b"\x1f\x8b" + bytes(40), "not_json")):
        server = ReplayServer({"/v1/models": Sample(200, {"Content-Encoding": "gzip"}, body)})
        async with server.serving(), client_of(manifest(server.port)) as client:
            with pytest.raises(EngineMisspoke) as caught:
                await client.get_json("/v1/models")
        assert caught.value.reason == reason
    server = ReplayServer({"/v1/models": Sample(200, {"Content-Encoding": "gzip"}, listed)})
    async with server.serving(), client_of(manifest(server.port)) as client:
        assert await client.get_json("/v1/models") == {"data": [{"id": "a"}]}
        first = await client.get_listing("/v1/models", "data")
        assert first.items == ({"id": "a"},)
        assert await client.get_listing("/v1/models", "data") is first, "equal bytes are not read again"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[" * 100_000, b"\xff\xfe", b'{"a": NaN}', b"null " * 3],
    ids=lambda body: body[:8].hex(),
)
async def test_bodies_that_are_no_json_are_told_as_such(body: bytes) -> None:
    server = ReplayServer({"/v1/models": Sample(body=body)})
    async with server.serving(), client_of(manifest(server.port)) as client:
        with pytest.raises(EngineMisspoke) as caught:
            await client.get_json("/v1/models")
    assert caught.value.reason == "not_json"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"hello\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    ],
    ids=["nothing", "no-http", "short", "bad-chunk", "long-header"],
)
async def test_malformed_answers_are_unreachable_and_not_a_crash(answer: bytes) -> None:
    async with raw_server(answer) as port, client_of(manifest(port)) as client:
        with pytest.raises(EngineUnreachable) as caught:
            await client.get("/health")
    assert caught.value.reason == "read"


async def test_silence_ends_in_a_timeout() -> None:
    async with raw_server(b"", close=False) as port, client_of(manifest(port)) as client:
        with pytest.raises(EngineUnreachable) as caught:
            await client.get("/health", timeout_s=0.05)
    assert caught.value.reason == "timeout"


def test_a_flood_of_interim_answers_ends_in_a_timeout_and_comes_in_small_pieces() -> None:
    """On the daemon's loop, which hands over all that has arrived at once; the flood comes from another thread."""
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    longest = 0

    class Watching(EngineClient):
        def _guarded_socket(self, info: AddressInfo) -> socket.socket:
            made = super()._guarded_socket(info)
            nonlocal longest
            longest = made.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
            return made

    def flood(listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            talking, _ = listening.accept()
            with talking:
                while True:
                    talking.sendall(interim * 1_000)

    async def ask(port: int) -> str:
        client = Watching(manifest(port))
        try:
            await client.get("/health", timeout_s=0.3)
        except EngineUnreachable as error:
            return error.reason
        finally:
            await client.aclose()
        return "an answer"

    with socket.create_server(("127.0.0.1", 0)) as listening:
        flooding = threading.Thread(target=flood, args=(listening,))
        flooding.start()
        try:
            assert uvloop.run(ask(listening.getsockname()[1])) == "timeout"
        finally:
            flooding.join()
    assert 0 < longest <= 64 * KIB, "one piece holds no more than a few milliseconds of parsing"


async def test_nothing_is_connected_outside_loopback_without_remote_host() -> None:
    described = manifest(9, host="192.0.2.1")
    async with client_of(described) as client:
        for call in (client.get("/health"), client.touch()):
            with pytest.raises(EngineUnreachable) as caught:
                await call
            assert caught.value.reason == "guard"


@pytest.mark.parametrize(
    ("host", "port", "allowed"),
    [
        ("127.0.0.1", 8080, True),
        ("127.0.0.1", 8081, False),
        ("127.0.0.2", 8080, False),
        ("::1", 8080, False),
        ("169.254.169.254", 8080, False),
        ("::ffff:127.0.0.1", 8080, False),
        ("2130706433", 8080, False),
        ("localhost", 8080, False),
    ],
)
def test_only_the_manifests_own_address_may_be_connected(host: str, port: int, allowed: bool) -> None:
    assert may_connect(manifest(8080), host, port) is allowed


def test_a_remote_host_is_exactly_the_manifests_address() -> None:
    described = manifest(8080, host="192.0.2.7", remote_host=True)
    assert may_connect(described, "192.0.2.7", 8080)
    assert not may_connect(described, "192.0.2.8", 8080)
    assert not may_connect(described, "127.0.0.1", 8080)


def cloud(host: str, port: int = 443, scheme: str = "https") -> Manifest:
    return Manifest(
        name="cloud",
        url=EngineUrl(scheme=scheme, host=host, port=port),
        engine=EngineKind.OPENAI,
        cloud=True,
        remote_host=True,
    )


def test_a_cloud_name_may_not_resolve_to_this_host_or_this_link() -> None:
    described = cloud("api.example.com")
    assert may_connect(described, "203.0.113.9", 443)
    assert not may_connect(described, "203.0.113.9", 80)
    for host in (
        "127.0.0.1",
        "::1",
        "::ffff:127.0.0.1",
        "169.254.169.254",
        "fe80::1",
        "0.0.0.0",
        "224.0.0.1",
    ):
        assert not may_connect(described, host, 443)


def test_a_cloud_name_may_not_resolve_to_a_node_of_the_mesh() -> None:
    mesh: set[IpAddress] = set()
    rule = beyond(lambda: mesh)
    described = cloud("api.example.com")
    assert may_connect(described, "203.0.113.9", 443, rule)
    mesh.add(ip_address("203.0.113.9"))
    assert not may_connect(described, "203.0.113.9", 443, rule)
    assert not may_connect(described, "127.0.0.1", 443, rule)


async def test_a_cloud_name_that_leads_home_is_never_connected() -> None:
    server = ReplayServer({"/v1/models": Sample(200, {}, b"{}")})
    async with server.serving():
        for look in ("get", "touch"):
            client = EngineClient(cloud("localhost", server.port, "http"))
            with pytest.raises(EngineUnreachable) as caught:
                await (client.touch() if look == "touch" else client.get("/v1/models"))
            assert caught.value.reason == "guard"
            await client.aclose()
    assert server.calls == []


async def test_a_cloud_name_is_looked_up_at_each_connect() -> None:
    seen: list[IpAddress] = []

    def note(address: IpAddress) -> bool:
        seen.append(address)
        return address.version == 4

    server = ReplayServer({"/v1/models": Sample(200, {}, b"{}")})
    async with server.serving():
        client = EngineClient(cloud("localhost", server.port, "http"), outside=note)
        assert (await client.get("/v1/models")).status == 200
        await client.aclose()
    assert ip_address("127.0.0.1") in seen


async def test_only_our_own_key_travels_and_it_never_prints() -> None:
    seen: list[dict[str, str]] = []

    async def note(request: web.Request) -> web.StreamResponse:
        seen.append({name.lower(): value for name, value in request.headers.items()})
        return web.Response(headers={"Set-Cookie": "a=b"}, text="{}")

    server = ReplayServer({"/props": note})
    async with server.serving():
        client = EngineClient(manifest(server.port), Credential("secret-key"))
        for _ in range(2):
            await client.get("/props")
        await client.aclose()
    assert [sorted(headers) for headers in seen] == [
        ["accept", "accept-encoding", "authorization", "host", "user-agent"]
    ] * 2
    assert seen[0]["authorization"] == "Bearer secret-key"
    assert "secret" not in repr(Credential("secret-key"))


async def test_events_are_read_one_by_one_and_an_end_is_told() -> None:
    answer = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
        b': ping\n\ndata: {"a":1}\n\ndata: {"a":2}\n\n'
    )
    got: list[bytes] = []
    assert await follow(answer, got) == "read"
    assert got == [b"", b'{"a":1}', b'{"a":2}']


async def test_an_event_line_without_end_is_refused() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: " + b"x" * 2 * MIB
    assert await follow(answer, []) == "too_large"


async def test_a_flood_of_events_lets_others_have_their_turn() -> None:
    """An engine that pushes as fast as it can: between any 32 events the loop goes round."""
    flood = b"\n" * 100_000 + b"data: {}\n" * 20_000
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" + flood
    got: list[bytes] = []
    rounds = 0

    async def count() -> None:
        nonlocal rounds
        while True:
            await asyncio.sleep(0)
            rounds += 1

    counting = asyncio.create_task(count())
    assert await follow(answer, got) == "read"
    counting.cancel()
    assert len(got) == 20_001
    assert rounds > 20_000 // 32


async def follow(answer: bytes, got: list[bytes]) -> str:
    """Collect the events in ``answer``; the reason why the stream ended."""
    async with (
        raw_server(answer) as port,
        client_of(manifest(port)) as client,
        contextlib.aclosing(client.events("/models/sse")) as events,
    ):
        try:
            async for event in events:
                got.append(event)  # noqa: PERF401
        except (EngineMisspoke, EngineUnreachable) as end:
            return end.reason
    return "no end"
