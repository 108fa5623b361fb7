"""Clients that are broken or mean harm, before a whole daemon: everybody else is served meanwhile."""

import asyncio
import contextlib
import http.client
import json
import os
import random
import resource
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from tests.support.cluster import Node
from tests.support.field import OpenAiEngine, chat, mesh

MIB = 1 << 20
BODY = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'
TYPE = b"Content-Type: application/json\r\n"


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4_096)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.asynccontextmanager
async def one(tmp_path: Path) -> AsyncIterator[Node]:
    async with OpenAiEngine().serving() as url, mesh(tmp_path, alpha=[url]) as cluster:
        yield cluster["alpha"]


def address(node: Node) -> tuple[str, int]:
    at = urlsplit(node.api)
    assert at.hostname is not None
    assert at.port is not None
    return at.hostname, at.port


def head(node: Node, path: str, rest: bytes, method: str = "POST", version: str = "1.1") -> bytes:
    host, port = address(node)
    return f"{method} {path} HTTP/{version}\r\nHost: {host}:{port}\r\n".encode() + rest + b"\r\n"


def posted(node: Node, path: str, body: bytes) -> tuple[int, float]:
    """Status and seconds of one POST by Python's own client, which sends everything before it reads."""
    began = time.monotonic()
    connection = http.client.HTTPConnection(*address(node), timeout=60)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            response.read()
            return response.status, time.monotonic() - began
    finally:
        connection.close()


async def test_bodies_of_millions_of_keys_hold_nobody_up(tmp_path: Path) -> None:
    """30 MB, three at once: a daemon that read them on its loop was deaf for a minute, and its watchdog killed it."""
    keys = b'{"pairmesh":{},"model":"m","messages":[],' + b'"k":1,' * 5_000_000 + b'"k":1}'
    odd = b'{"model":"m","messages":[' + b"1," * 2_000_000 + b"1]}"
    async with one(tmp_path) as node:
        asked = [
            asyncio.create_task(asyncio.to_thread(posted, node, "/v1/chat/completions", keys))
            for _ in range(3)
        ]
        asked.append(asyncio.create_task(asyncio.to_thread(posted, node, "/v1/chat/completions", odd)))
        waits = []
        while not all(task.done() for task in asked):
            waits.append((await chat(node)).seconds)
        assert [task.result()[0] for task in asked] == [400, 400, 400, 200]
        assert max(waits) < 3, "on a loaded machine; measured alone below 0.1 s"


async def test_a_refused_client_reads_why_and_is_let_go_at_once(tmp_path: Path) -> None:
    """Python's ``http.client`` met a reset, and its user an error of the network instead of the reason; HTTP/1.0 and closing
    clients waited for the end for one to two seconds."""
    async with one(tmp_path) as node:
        for path, status in (("/v1/nope", 404), ("/v1/chat/completions", 413)):
            assert (await asyncio.to_thread(posted, node, path, b"x" * 40 * MIB))[0] == status
        for version in ("1.0", "1.1"):
            for rest, told in (
                (b"", b"404"),
                (b"Content-Length: x\r\n", b"400"),
                (b"Origin: http://a.example\r\n", b"403"),
            ):
                reader, writer = await asyncio.open_connection(*address(node))
                began = time.monotonic()
                writer.write(head(node, "/nope", rest + b"Connection: close\r\n", version=version))
                said = await asyncio.wait_for(reader.read(), 10)
                assert said.split(b" ")[1] == told
                assert time.monotonic() - began < 0.8
                writer.close()


async def test_a_thousand_idle_connections_lock_nobody_out(tmp_path: Path, many_descriptors: None) -> None:
    async with one(tmp_path) as node:
        idle = []
        try:
            for _ in range(1_100):
                idle.append(socket.create_connection(address(node), timeout=10))  # noqa: PERF401
            reply = await chat(node, within_s=10)
            assert (reply.status, reply.seconds < 5) == (200, True)
        finally:
            for each in idle:
                each.close()
        lines = [line for line in node.log.read_text().splitlines() if "connections.full" in line]
        assert 1 <= len(lines) <= 2


async def test_declared_bytes_take_no_memory(tmp_path: Path) -> None:
    async with one(tmp_path) as node:
        assert node.process is not None
        before = psutil.Process(node.process.pid).memory_info().rss
        idle = []
        for _ in range(5):
            idle.append(socket.create_connection(address(node), timeout=10))
            idle[-1].sendall(
                head(node, "/v1/chat/completions", TYPE + b"Content-Length: 33000000\r\n") + b"{"
            )
        assert (await chat(node)).status == 200
        assert psutil.Process(node.process.pid).memory_info().rss - before < 24 * MIB
        for each in idle:
            each.close()


async def test_whatever_comes_over_a_thousand_connections_the_next_request_is_served(tmp_path: Path) -> None:
    """Requests cut, mixed up and reset at random (seeded), half-closed, pipelined, with ``Expect`` and without."""
    rng = random.Random(9)
    async with one(tmp_path) as node:
        good = head(node, "/v1/chat/completions", TYPE + b"Content-Length: %d\r\n" % len(BODY)) + BODY
        chunked = head(node, "/v1/chat/completions", TYPE + b"Transfer-Encoding: chunked\r\n")
        kinds = [
            good,
            good * 5,
            head(node, "/v1/chat/completions", TYPE + b"Expect: 100-continue\r\nContent-Length: 9\r\n"),
            chunked + b'5\r\n{"mod\r\n' * 9 + b"0\r\n\r\n",
            chunked + b"1\r\nx\r\n" * 4_000,
            head(node, "/v1/models", b"", "GET") * 40,
            head(node, "/v1/models", b"Connection: close\r\n", "GET", "1.0"),
            head(node, "/api/chat", TYPE + b"Content-Length: 99999999\r\n") + b"x" * 70_000,
            b"\x16\x03\x01\x02\x00" + os.urandom(64),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        ]

        async def attack(seed: int) -> None:
            rng = random.Random(seed)
            raw = bytearray(rng.choice(kinds))
            for _ in range(rng.choice((0, 0, 1, 8))):
                raw[rng.randrange(len(raw))] = rng.randrange(256)
            reader, writer = await asyncio.open_connection(*address(node))
            with contextlib.suppress(OSError, TimeoutError):
                at = 0
                while at < len(raw):
                    step = rng.choice((1, 7, 300, 100_000))
                    writer.write(bytes(raw[at : at + step]))
                    at += step
                    if rng.random() < 0.02:
                        break
                    if step > 1:
                        await writer.drain()
                end = rng.choice(("reset", "half", "read", "close"))
                if end == "half":
                    writer.write_eof()
                if end in ("half", "read"):
                    await asyncio.wait_for(reader.read(65_536), 0.3)
                if end == "close":
                    writer.close()
                    await writer.wait_closed()
            writer.transport.abort()

        seeds = [rng.randrange(1 << 30) for _ in range(1_000)]
        for first in range(0, len(seeds), 50):
            await asyncio.gather(*(attack(seed) for seed in seeds[first : first + 50]))
        reply = await chat(node, within_s=10)
        assert reply.status == 200
        faults = [
            line
            for line in node.log.read_text().splitlines()
            if "Traceback" in line or '"level":"error"' in line
        ]
        assert faults == []
        assert json.loads(reply.raw)["object"] == "chat.completion"
