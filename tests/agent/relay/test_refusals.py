"""Refused requests, and connections beyond the cap: real clients can read what they are told, and nobody locks others out."""

import asyncio
import contextlib
import http.client
import json
import time
from pathlib import Path

import pytest

from agent.relay.http.connection import ServerConnection
from router_core import limits
from tests.agent.relay.client import BODY, Client, get, post
from tests.agent.relay.ingress_rig import head, ingress
from tests.agent.relay.rig import Relay, running
from tests.support.recorder import Exchange, Recorder
from tests.support.until import until

CURL = "curl"


def told(relay: Relay) -> list[str | None]:
    return [line.code for line in relay.watch.lines]


@pytest.mark.parametrize(
    ("path", "size", "status"),
    [
        ("/nope", 5 * limits.MIB, 404),
        ("/nope", 40 * limits.MIB, 404),
        ("/api/pull", 20 * limits.MIB, 403),
        ("/v1/models", 5 * limits.MIB, 405),
        ("/v1/chat/completions", limits.REQUEST_BODY + 1, 413),
        ("/v1/chat/completions", 48 * limits.MIB, 413),
    ],
)
async def test_a_client_that_sends_all_before_it_reads_is_told_why(path: str, size: int, status: int) -> None:
    """Python's ``http.client`` sends the whole body first; a connection that is reset meanwhile takes the reply along."""

    def refused() -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", relay.port, timeout=10)
        try:
            connection.request("POST", path, b"x" * size, {"Content-Type": "application/json"})
            with connection.getresponse() as response:
                return response.status, json.loads(response.read())["error"]["message"]
        finally:
            connection.close()

    async with Recorder() as up, running(up.port) as relay:
        if path.startswith("/api"):
            refused_of = lambda: refused_native(relay.port, path, size)  # noqa: E731
            assert await asyncio.to_thread(refused_of) == status
        else:
            seen, why = await asyncio.to_thread(refused)
            assert seen == status
            assert why
        await until(lambda: len(relay.roll) == 0)
        assert up.requests == []
        relay.assert_idle()


def refused_native(port: int, path: str, size: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("POST", path, b"x" * size)
        with connection.getresponse() as response:
            return response.status
    finally:
        connection.close()


async def test_curl_reads_the_refusal_of_an_upload_in_parts(tmp_path: Path) -> None:
    """Multipart, as for a transcription, and without waiting for ``100``."""
    upload = tmp_path / "upload"
    upload.write_bytes(b"x" * 8 * limits.MIB)
    async with Recorder() as up, running(up.port) as relay:
        process = await asyncio.create_subprocess_exec(
            CURL,
            "-sS",
            "-H",
            "Expect:",
            "-F",
            f"file=@{upload}",
            "-w",
            "%{http_code}",
            f"http://127.0.0.1:{relay.port}/v1/nope",
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await asyncio.wait_for(process.communicate(), 20)
        assert out.endswith(b"}404")


REFUSED = {
    "http/1.0": (b"GET /nope HTTP/1.0\r\n", b"", 404),
    "close": (b"GET /nope HTTP/1.1\r\n", b"Connection: close\r\n", 404),
    "host": (
        b"GET /health HTTP/1.1\r\n",
        b"X-A: b\r\nConnection: close\r\nOrigin: http://evil.example\r\n",
        403,
    ),
    "framing": (b"POST /nope HTTP/1.1\r\n", b"Content-Length: x\r\n", 400),
    "body to come": (b"POST /nope HTTP/1.1\r\n", b"Content-Length: 100\r\n", 404),
    "body there": (b"POST /nope HTTP/1.1\r\n", b"Content-Length: 2\r\n\r\n{}", 404),
    "chunks to come": (b"POST /nope HTTP/1.1\r\n", b"Transfer-Encoding: chunked\r\n\r\n5\r\nab", 404),
    "expects": (b"POST /nope HTTP/1.1\r\n", b"Content-Length: 9\r\nExpect: 100-continue\r\n", 404),
    "too large": (
        b"POST /v1/completions HTTP/1.1\r\n",
        b"Content-Type: application/json\r\nContent-Length: 99999999\r\n",
        413,
    ),
}


@pytest.mark.parametrize("kind", list(REFUSED))
async def test_the_connection_of_a_refusal_ends_at_once(kind: str) -> None:
    line, rest, status = REFUSED[kind]
    async with Recorder() as up, running(up.port) as relay:
        client = await Client.to(relay.port)
        raw = line + b"Host: 127.0.0.1:%d\r\n" % relay.port + rest
        await client.send(raw if b"\r\n\r\n" in rest else raw + b"\r\n")
        heard = await client.heard()
        began = time.perf_counter()
        assert (heard.status, heard.headers["connection"]) == (status, "close")
        await client.ended()
        assert time.perf_counter() - began < 0.5, (
            "measured alone below 5 ms; a second without the end of our side"
        )
        client.close()
        await until(lambda: len(relay.roll) == 0)


async def test_a_refusal_without_a_body_keeps_the_connection() -> None:
    async with Recorder() as up, running(up.port) as relay:
        client = await Client.to(relay.port)
        await client.send(
            b"POST /v1/nope HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % relay.port + post(relay.port)
        )
        assert [(await client.heard()).status for _ in range(2)] == [404, 200]
        client.close()


async def test_what_is_left_of_a_refused_body_is_read_only_so_far() -> None:
    async with Recorder() as up, running(up.port) as relay:
        client = await Client.to(relay.port)
        await client.send(
            b"POST /nope HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Length: 999999999\r\n\r\n" % relay.port
        )
        assert (await client.heard()).status == 404
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 4 * limits.REFUSED_BODY:
                await client.send(b"x" * 262_144)
                sent += 262_144
        assert limits.REFUSED_BODY / 2 < sent < 2 * limits.REFUSED_BODY
        assert relay.buffered.held == 0
        client.close()


async def test_under_tls_a_refused_body_is_read_to_its_end(tmp_path: Path) -> None:
    async with Recorder() as up, ingress(tmp_path, up.port) as peer:
        client = await peer.dial()
        raw = head(transfer_encoding=None, expect=None, path=b"/v1/nope")[:-2]
        await client.send(raw + b"Content-Length: 3000000\r\n\r\n")
        assert (await client.head())[0] == 404
        for _ in range(30):
            await client.send(b"x" * 100_000)
        await until(lambda: len(peer.relay.roll) == 0)
        client.close()


# --- beyond the cap ----------------------------------------------------------------------------------------------


async def test_at_the_cap_the_connection_idle_longest_makes_room() -> None:
    async with Recorder() as up, running(up.port, most=3) as relay:
        clients = [await Client.to(relay.port) for _ in range(3)]
        for number in (0, 2, 1):
            await clients[number].send(post(relay.port))
            assert (await clients[number].heard()).status == 200
            await asyncio.sleep(0.002)
        newcomer = await Client.to(relay.port)
        await newcomer.send(post(relay.port))
        assert (await newcomer.heard()).status == 200
        await clients[0].ended()
        for client in clients[1:]:
            await client.send(post(relay.port))
            assert (await client.heard()).status == 200
        assert relay.full[-1] is True
        for client in (*clients, newcomer):
            client.close()


async def test_silent_connections_do_not_keep_a_client_waiting() -> None:
    async with Recorder() as up, running(up.port, most=64) as relay:
        silent = [await Client.to(relay.port) for _ in range(100)]
        began = time.perf_counter()
        client = await Client.to(relay.port)
        await client.send(post(relay.port))
        assert (await client.heard()).status == 200
        assert time.perf_counter() - began < 5
        assert len(relay.roll) <= 64
        for each in (*silent, client):
            each.close()


async def test_where_none_is_idle_a_new_one_waits_until_somebody_leaves() -> None:
    async def script(exchange: Exchange) -> None:
        await proceed.wait()
        await exchange.answer(b"{}")

    proceed = asyncio.Event()
    async with Recorder(script) as up, running(up.port, most=2) as relay:
        clients = [await Client.to(relay.port) for _ in range(3)]
        for client in clients:
            await client.send(post(relay.port))
        await up.arrived(2)
        await until(lambda: relay.full)
        assert (len(relay.roll), relay.full) == (2, [False])
        proceed.set()
        for client in clients:
            assert (await client.heard()).status == 200
        for client in clients:
            client.close()


async def test_a_head_that_does_not_come_keeps_no_place_for_long() -> None:
    async with Recorder() as up, running(up.port, most=2) as relay:
        slow = [await Client.to(relay.port) for _ in range(2)]
        for client in slow:
            await client.send(b"POST /v1/chat")
        await until(lambda: [each.phase.value for each in connections(relay)] == ["head", "head"])
        client = await Client.to(relay.port)
        await client.send(post(relay.port))
        assert (await client.heard()).status == 200
        for each in (*slow, client):
            each.close()


def connections(relay: Relay) -> list[ServerConnection]:
    return [each for each in relay.roll if isinstance(each, ServerConnection)]


async def test_a_routers_idle_connections_make_room_for_its_next_one(tmp_path: Path) -> None:
    async with Recorder() as up, ingress(tmp_path, up.port) as peer:
        clients = [await peer.dial() for _ in range(limits.INGRESS_PER_ID)]
        await until(lambda: len(peer.relay.roll) == limits.INGRESS_PER_ID)
        await until(lambda: any(each.idle_since is not None for each in connections(peer.relay)))
        newcomer = await peer.dial()
        await newcomer.send(head())
        assert (await newcomer.head())[0] == 100
        await newcomer.send(b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY))
        assert (await newcomer.heard()).status == 200
        await until(lambda: len(peer.relay.roll) <= limits.INGRESS_PER_ID)
        for each in (*clients, newcomer):
            each.close()


async def test_a_view_is_answered_at_once_to_whoever_ends_after_it() -> None:
    async with Recorder() as up, running(up.port) as relay:
        client = await Client.to(relay.port)
        await client.send(get(relay.port, headers=b"Connection: close\r\n"))
        assert (await client.heard()).status == 200
        began = time.perf_counter()
        await client.ended()
        assert time.perf_counter() - began < 0.5
        client.close()
