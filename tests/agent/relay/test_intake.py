"""Heads and bodies: limits at their value and one beyond, memory, expectations, what is drained."""

import asyncio
import gc
import json
import tracemalloc

import pytest

from agent.relay.http.parser import BodyReader, HeadReader, Request
from router_core import limits
from tests.agent.relay.client import BODY, Client, ask, post
from tests.agent.relay.rig import running
from tests.support.recorder import Exchange, Recorder
from tests.support.until import until

LINE = b"POST /v1/chat/completions HTTP/1.1\r\n"
HOST = b"Host: 127.0.0.1:%d\r\n"
TYPE = b"Content-Type: application/json\r\n"
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
TE = b"Transfer-Encoding: chunked\r\n"


async def test_a_request_hidden_behind_a_chunked_body_never_runs() -> None:
    hidden = b"POST /v1/completions HTTP/1.1\r\n"
    async with Recorder() as up, running(up.port) as relay:
        heard = await ask(relay.port, LINE + HOST % relay.port + TYPE + TE + b"\r\n" + CHUNKED + hidden)
        assert (heard.status, heard.headers["connection"]) == (200, "close")
        assert [request.body for request in up.requests] == [BODY]


async def test_a_head_may_come_byte_by_byte() -> None:
    async with Recorder() as up, running(up.port) as relay:
        client = await Client.to(relay.port)
        for byte in post(relay.port):
            await client.send(bytes((byte,)))
        assert (await client.heard()).status == 200
        client.close()


def test_what_was_read_is_held_by_no_cycle() -> None:
    chunked = read_head(LINE + HOST % 80 + TYPE + TE + b"\r\n")
    assert isinstance(chunked, Request)
    gc.collect()
    gc.disable()
    try:
        read_head(head_of(100))
        assert BodyReader(chunked).feed(CHUNKED) == (True, b"")
        assert BodyReader(chunked).feed(CHUNKED + LINE) == ("surplus", b"")
        assert gc.collect() == 0
    finally:
        gc.enable()


def read_head(raw: bytes) -> Request | str | None:
    read = HeadReader().feed(raw)
    return None if read is None else read[0]


def head_of(size: int) -> bytes:
    start = b"GET / HTTP/1.1\r\nHost: a\r\nX-Fill: "
    return start + b"f" * (size - len(start) - 4) + b"\r\n\r\n"


def test_a_head_at_its_limit_passes_and_one_byte_more_does_not() -> None:
    assert isinstance(read_head(head_of(limits.REQUEST_HEAD)), Request)
    assert read_head(head_of(limits.REQUEST_HEAD + 1)) == "head_too_large"


def test_an_endless_header_is_refused_before_its_end() -> None:
    reader = HeadReader()
    assert reader.feed(b"GET / HTTP/1.1\r\nHost: a\r\nX-Fill: ") is None
    verdict = None
    for _ in range(9):
        verdict = reader.feed(b"f" * 4_096)
        if verdict is not None:
            break
    assert verdict is not None
    assert verdict[0] == "head_too_large"


def test_a_target_at_its_limit_passes_and_one_byte_more_does_not() -> None:
    def head(size: int) -> bytes:
        return b"GET /" + b"a" * (size - 1) + b" HTTP/1.1\r\nHost: a\r\n\r\n"

    assert isinstance(read_head(head(limits.REQUEST_TARGET)), Request)
    assert read_head(head(limits.REQUEST_TARGET + 1)) == "target_too_long"
    assert read_head(b"GET /" + b"a" * 40_000) == "target_too_long"


def test_a_hundred_headers_pass_and_one_more_does_not() -> None:
    def head(count: int) -> bytes:
        return b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * (count - 1) + b"\r\n"

    assert isinstance(read_head(head(limits.REQUEST_HEADERS)), Request)
    assert read_head(head(limits.REQUEST_HEADERS + 1)) == "head_too_large"


def test_a_chunked_body_is_refused_at_the_byte_that_exceeds_the_limit() -> None:
    request = read_head(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
    assert isinstance(request, Request)
    block = b"x" * limits.MIB
    for size, expected in ((limits.REQUEST_BODY, True), (limits.REQUEST_BODY + 1, "body_too_large")):
        reader = BodyReader(request)
        verdict: bool | str = False
        for _ in range(limits.REQUEST_BODY // limits.MIB):
            verdict, _ = reader.feed(b"%x\r\n%s\r\n" % (len(block), block))
        assert verdict is False
        extra = size - limits.REQUEST_BODY
        verdict, _ = reader.feed((b"%x\r\n%s\r\n" % (extra, b"x" * extra) if extra else b"") + b"0\r\n\r\n")
        assert verdict == expected


def test_chunk_framing_without_body_bytes_is_bounded() -> None:
    request = read_head(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
    assert isinstance(request, Request)
    for filler in (b"1;" + b"e" * 4_094, b"0\r\n" + b"t: " + b"e" * 4_091):
        reader = BodyReader(request)
        verdicts = [reader.feed(filler)[0]] + [reader.feed(b"e" * 4_096)[0] for _ in range(12)]
        assert "bad_request" in verdicts


@pytest.mark.lesson("bodies without a limit")
async def test_a_body_beyond_the_limit_is_refused_before_it_is_read() -> None:
    async with Recorder() as up, running(up.port) as relay:
        heard = await ask(
            relay.port,
            LINE + HOST % relay.port + TYPE + b"Content-Length: %d\r\n\r\n" % (limits.REQUEST_BODY + 1),
        )
        assert heard.status == 413
        assert relay.watch.lines[0].code == "body_too_large"


async def test_a_body_at_the_limit_passes() -> None:
    filler = b'{"model":"m","x":"'
    body = filler + b"x" * (limits.REQUEST_BODY - len(filler) - 2) + b'"}'
    async with Recorder() as up, running(up.port) as relay:
        assert (await ask(relay.port, post(relay.port, body))).status == 200
        assert up.requests[0].body == body
        relay.assert_idle()


async def test_bodies_beyond_the_common_memory_are_refused() -> None:
    async with Recorder() as up, running(up.port) as relay:
        relay.buffered.limit = len(BODY)
        first = await Client.to(relay.port)
        await first.send(post(relay.port)[:-1])
        await until(lambda: relay.buffered.held == len(BODY) - 1)
        heard = await ask(relay.port, post(relay.port))
        assert heard.status == 503
        assert int(heard.headers["retry-after"]) >= 1
        await first.send(BODY[-1:])
        assert (await first.heard()).status == 200
        first.close()
        relay.assert_idle()


async def test_other_expectations_cannot_be_met() -> None:
    async with Recorder() as up, running(up.port) as relay:
        heard = await ask(relay.port, post(relay.port, headers=b"Expect: 200-ok\r\n"))
        assert heard.status == 417
        assert up.requests == []


async def test_memory_grows_with_the_bytes_that_came() -> None:
    """Five connections declare 32 MiB each and send one byte."""
    async with Recorder() as up, running(up.port) as relay:
        declared = LINE + HOST % relay.port + TYPE + b"Content-Length: %d\r\n\r\n{" % limits.REQUEST_BODY
        clients = [await Client.to(relay.port) for _ in range(5)]
        tracemalloc.start()
        for client in clients:
            await client.send(declared)
        await until(lambda: relay.buffered.held == len(clients))
        assert tracemalloc.get_traced_memory()[0] < limits.MIB
        tracemalloc.stop()
        assert (await ask(relay.port, post(relay.port))).status == 200
        for client in clients:
            client.close()
        await until(lambda: relay.buffered.held == 0)


async def test_idle_connections_close_when_told_and_busy_ones_after_their_reply() -> None:
    async def script(exchange: Exchange) -> None:
        await proceed.wait()
        await exchange.answer(b"{}")

    proceed = asyncio.Event()
    async with Recorder(script) as up, running(up.port) as relay:
        idle, busy = await Client.to(relay.port), await Client.to(relay.port)
        await busy.send(post(relay.port))
        await up.arrived()
        await until(lambda: len(relay.roll) == 2)
        relay.roll.close_idle()
        await idle.ended()
        proceed.set()
        heard = await busy.heard()
        assert (heard.status, heard.headers["connection"]) == (200, "close")
        await busy.ended()
        for client in (idle, busy):
            client.close()


async def test_stopping_tells_each_request_the_truth() -> None:
    async def script(exchange: Exchange) -> None:
        if b"stream" in exchange.request.body:
            await exchange.begin_stream()
            await exchange.chunk(b"data: {}\n\n")
        await exchange.gone()

    async with Recorder(script) as up, running(up.port) as relay:
        waiting, streaming = await Client.to(relay.port), await Client.to(relay.port)
        await waiting.send(post(relay.port))
        await streaming.send(post(relay.port, b'{"model":"m","stream":true}'))
        await streaming.head()
        await streaming.chunk()
        await up.arrived(2)
        for courier in tuple(relay.wiring.in_hand):
            courier.shut_down()
        heard = await waiting.heard()
        assert (heard.status, json.loads(heard.body)["error"]["code"]) == (503, "shutting_down")
        last = await streaming.chunk()
        assert last is not None
        assert b'"shutting_down"' in last
        assert await streaming.chunk() is None
        for client in (waiting, streaming):
            client.close()
        relay.assert_idle()
