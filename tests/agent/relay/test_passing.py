"""Requests and answers pass byte for byte, at once, and end on both sides when one side leaves."""

import asyncio
import hashlib
import json
import os
from typing import Any, cast

import pytest

from tests.agent.relay.client import BODY, CHAT, Client, ask, get, post
from tests.agent.relay.rig import running
from tests.support.recorder import Exchange, Recorder
from tests.support.until import until

STREAM = b'{"model":"m","stream":true,"messages":[]}'
EVENT = b'data: {"choices":[{"delta":{"content":"word"}}]}\n\n'

ODD_BODIES = [
    b'{"model":"m"}',
    b' {\t"model" :\n"m" , "messages":[ ],"seed":123456789012345678901234567890,"x":1.0E+2 }\r\n',
    b'{"messages":[{"content":"\\u00e9\\ud83d\\ude00 \\/ \\"model\\"","content":"again"}],"model":"m","x":{"model":"other"}}',
    '{"model":"m","prompt":"\u00fc\u6f22\U0001f600"}'.encode(),
    b'{"model":"m","priority":0,"max_tokens":0,"n":null,"service_tier":[],"user":"u","api_base":"http://x"}',
]


async def test_an_engine_whose_api_lies_below_another_path_is_asked_there() -> None:
    async with Recorder() as up, running(up.port) as relay:
        relay.fleet.locals["e0"].base = b"/openai/v1"
        assert (await ask(relay.port, post(relay.port))).status == 200
        assert up.requests[0].line == b"POST /openai/v1/chat/completions HTTP/1.1"


@pytest.mark.promise("what is odd in a body passes as it came")
@pytest.mark.threat("T31")
@pytest.mark.parametrize("body", ODD_BODIES)
async def test_a_request_body_arrives_byte_for_byte(body: bytes) -> None:
    async with Recorder() as up, running(up.port) as relay:
        heard = await ask(relay.port, post(relay.port, body))
        assert heard.status == 200
        assert [request.body for request in up.requests] == [body]
        assert up.faults == []
        relay.assert_idle()


async def test_a_chunked_request_arrives_whole_with_a_length() -> None:
    async with Recorder() as up, running(up.port) as relay:
        head = b"POST %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\n" % (
            CHAT,
            relay.port,
        )
        pieces = [BODY[:7], BODY[7:8], BODY[8:]]
        raw = b"".join(b"%x;ext=1\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
        await ask(
            relay.port, head + b"Transfer-Encoding: chunked\r\n\r\n" + raw + b"0\r\nX-Trailer: 1\r\n\r\n"
        )
        assert up.requests[0].body == BODY
        assert up.requests[0].value(b"x-trailer") is None


async def test_a_large_request_and_a_large_answer_keep_their_hashes() -> None:
    filler = os.urandom(4 << 20).hex().encode()
    body = b'{"model":"m","messages":[{"role":"user","content":"' + filler + b'"}]}'
    answer = os.urandom(6 << 20)

    async def script(exchange: Exchange) -> None:
        await exchange.answer(answer)

    async with Recorder(script) as up, running(up.port) as relay:
        heard = await ask(relay.port, post(relay.port, body))
        assert hashlib.sha256(up.requests[0].body).digest() == hashlib.sha256(body).digest()
        assert hashlib.sha256(heard.body).digest() == hashlib.sha256(answer).digest()
        relay.assert_idle()


@pytest.mark.lesson("dstackai/dstack#4269: streams that are held back")
async def test_each_write_of_a_stream_arrives_before_the_next_is_sent() -> None:
    heard_so_far = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        for _ in range(5):
            heard_so_far.clear()
            await exchange.chunk(EVENT)
            await asyncio.wait_for(heard_so_far.wait(), 5)
        await exchange.end_stream()

    async with Recorder(script) as up, running(up.port) as relay:
        client = await Client.to(relay.port)
        await client.send(post(relay.port, STREAM))
        status, headers = await client.head()
        assert (status, headers["x-accel-buffering"], headers["cache-control"]) == (200, "no", "no-cache")
        for _ in range(5):
            assert await client.chunk() == EVENT
            heard_so_far.set()
        assert await client.chunk() == b""
        client.close()
        await until(lambda: relay.watch.attempts)
        marks = relay.watch.attempts[0].marks
        assert marks is not None
        assert marks.content_events == 5
        assert marks.first_content_ms is not None


async def test_a_slow_upstreams_single_bytes_are_never_held_back() -> None:
    sent = asyncio.Semaphore(0)

    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        for byte in EVENT:
            await exchange.chunk(bytes((byte,)))
            await asyncio.wait_for(sent.acquire(), 5)
        await exchange.end_stream()

    async with Recorder(script) as up, running(up.port) as relay:
        client = await Client.to(relay.port)
        await client.send(post(relay.port, STREAM))
        await client.head()
        for byte in EVENT:
            assert await client.chunk() == bytes((byte,))
            sent.release()
        client.close()


async def test_an_encoded_answer_passes_untouched() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.answer(b"\x1f\x8b not really", headers=b"content-encoding: gzip\r\n")

    async with Recorder(script) as up, running(up.port) as relay:
        heard = await ask(relay.port, post(relay.port))
        assert (heard.headers["content-encoding"], heard.body) == ("gzip", b"\x1f\x8b not really")
        assert up.requests[0].value(b"accept-encoding") == b"identity"


async def test_a_close_delimited_answer_ends_with_a_last_chunk() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\nabc")
        exchange.close()

    async with Recorder(script) as up, running(up.port) as relay:
        heard = await ask(relay.port, post(relay.port))
        assert (heard.body, heard.clean, heard.chunks is not None) == (b"abc", True, True)


@pytest.mark.parametrize("status", [204, 304])
async def test_an_answer_that_never_has_a_body_tells_no_length(status: int) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.write(b"HTTP/1.1 %d Nothing\r\nx-request-id: e\r\n\r\n" % status)

    async with Recorder(script) as up, running(up.port) as relay:
        client = await Client.to(relay.port)
        for _ in range(2):
            await client.send(post(relay.port))
            found, headers = await client.head()
            assert found == status
            assert headers.keys().isdisjoint({"content-length", "transfer-encoding", "connection"})
        client.close()


async def test_an_http_1_0_client_gets_no_chunk() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.chunk(EVENT)
        await exchange.end_stream()

    async with Recorder(script) as up, running(up.port) as relay:
        heard = await ask(relay.port, post(relay.port, STREAM).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        assert heard.body == EVENT
        assert "transfer-encoding" not in heard.headers
        assert heard.headers["connection"] == "close"


async def test_interim_answers_are_skipped_and_errors_of_the_engine_pass_whole() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.write(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n")
        await exchange.answer(
            b'{"error":"no"}', status=422, headers=b"set-cookie: a=b\r\nx-ratelimit-left: 3\r\n"
        )

    async with Recorder(script) as up, running(up.port) as relay:
        heard = await ask(relay.port, post(relay.port))
        assert (heard.status, heard.body) == (422, b'{"error":"no"}')
        assert "set-cookie" not in heard.headers
        assert heard.headers["x-ratelimit-left"] == "3"
        assert relay.watch.results() == ["answered"]


@pytest.mark.lesson("BerriAI/litellm#32202: a client's key that leaks")
@pytest.mark.threat("T33")
@pytest.mark.threat("T34")
async def test_credentials_hints_and_cookies_never_go_upstream() -> None:
    sent = (
        b"Authorization: Bearer sk-secret\r\nX-Api-Key: k\r\nCookie: c=1\r\nReferer: http://r/\r\nX-Mine: 1\r\n"
        b"X-Pairmesh-Prefer: @n\r\nX-Pairmesh-Route: v=1\r\nX-Pairmesh-State: zz\r\nX-Session-Id: s\r\n"
        b"Accept: text/event-stream\r\nOpenAI-Beta: b\r\nTracestate: t=1\r\nConnection: openai-beta\r\n"
        b"Traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\nX-Request-Id: abc\r\n"
    )
    async with Recorder() as up, running(up.port) as relay:
        relay.fleet.locals["e0"].authorization = "Bearer engine"
        await ask(relay.port, post(relay.port, headers=sent))
        request = up.requests[0]
        names = [name.lower() for name, _ in request.headers]
        assert sorted(names) == sorted(
            b"host content-type content-length accept-encoding user-agent via x-request-id authorization accept "
            b"tracestate traceparent".split()
        )
        assert request.value(b"authorization") == b"Bearer engine"
        assert request.value(b"x-request-id") == b"abc"
        trace = request.value(b"traceparent") or b""
        assert trace.startswith(b"00-0af7651916cd43dd8448eb211c80319c-")
        assert b"b7ad6b7169203331" not in trace
        assert relay.fleet.asked[0].headers == (("x-pairmesh-prefer", "@n"), ("x-session-id", "s"))


async def test_requests_with_one_head_are_told_apart_upstream() -> None:
    sent = b"Traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\nAccept: a/b\r\n"
    async with Recorder() as up, running(up.port) as relay:
        client = await Client.to(relay.port)
        for number in range(3):
            await client.send(post(relay.port, b'{"model":"m","n":%d}' % 10**number, headers=sent))
            assert (await client.heard()).status == 200
        client.close()
        assert [len(request.body) for request in up.requests] == [19, 20, 21]
        for name in (b"x-request-id", b"traceparent"):
            assert len({request.value(name) for request in up.requests}) == 3
        assert {request.value(b"accept") for request in up.requests} == {b"a/b"}


async def test_what_one_endpoint_is_passed_besides_the_next_is_not() -> None:
    async def busy(exchange: Exchange) -> None:
        await exchange.answer(b"{}", status=503)

    async with Recorder(busy) as first, Recorder() as second, running(first.port, second.port) as relay:
        relay.fleet.locals["e0"].pass_headers = frozenset({b"x-mine"})
        client = await Client.to(relay.port)
        for _ in range(2):
            await client.send(post(relay.port, headers=b"X-Mine: 1\r\nAccept: a/b\r\n"))
            assert (await client.heard()).status == 200
        client.close()
        assert [request.value(b"x-mine") for request in first.requests] == [b"1", b"1"]
        assert [request.value(b"x-mine") for request in second.requests] == [None, None]
        assert [request.value(b"accept") for request in second.requests] == [b"a/b", b"a/b"]


async def test_only_two_spans_of_a_body_ever_change() -> None:
    body = b'{ "pairmesh": {"prefer":"@n"} , "model":"alias", "seed":12345678901234567890 }'
    async with Recorder() as up, running(up.port) as relay:
        relay.fleet.locals["e0"].spelled = "native/name"
        await ask(relay.port, post(relay.port, body))
        assert up.requests[0].body == b'{  "model":"native/name", "seed":12345678901234567890 }'
        assert relay.fleet.asked[0].facts.hints == b'{"prefer":"@n"}'


async def test_the_reply_says_who_served_it() -> None:
    async with Recorder() as up, running(up.port) as relay:
        heard = await ask(relay.port, post(relay.port, headers=b"X-Request-Id: mine\r\n"))
        told = {name: value for name, value in heard.headers.items() if name.startswith("x-")}
        assert told == {
            "x-request-id": "mine",
            "x-pairmesh-node": "@here/e0",
            "x-pairmesh-model": "m",
            "x-pairmesh-decision-id": "d1",
            "x-pairmesh-reason": "native",
            "x-pairmesh-hints": "class=honoured",
        }
        assert heard.headers["server"] == "pairmesh"


@pytest.mark.lesson("BerriAI/litellm#30245: an engine that generates for nobody")
@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("leave", ["close", "reset"])
async def test_the_engine_is_cancelled_when_the_client_leaves(streaming: bool, leave: str) -> None:
    ended = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        if streaming:
            await exchange.begin_stream()
            await exchange.chunk(EVENT)
        await exchange.gone()
        ended.set()

    async with Recorder(script) as up, running(up.port) as relay:
        client = await Client.to(relay.port)
        await client.send(post(relay.port, STREAM if streaming else BODY))
        await up.arrived()
        if streaming:
            await client.head()
        client.close() if leave == "close" else client.reset()
        await asyncio.wait_for(ended.wait(), 5)
        await until(lambda: relay.watch.lines)
        assert (relay.watch.lines[0].status, relay.watch.lines[0].code) == (499, "client_gone")
        assert relay.watch.results() == ["cancelled"]
        assert not relay.watch.attempts[0].outcome.fault
        relay.assert_idle()


async def test_a_half_close_of_the_client_is_a_cancel() -> None:
    ended = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.gone()
        ended.set()

    async with Recorder(script) as up, running(up.port) as relay:
        client = await Client.to(relay.port)
        await client.send(post(relay.port))
        await up.arrived()
        client.writer.write_eof()
        await asyncio.wait_for(ended.wait(), 5)
        client.close()


async def test_a_client_that_leaves_in_mid_upload_leaves_nothing_behind() -> None:
    async with Recorder() as up, running(up.port) as relay:
        client = await Client.to(relay.port)
        await client.send(post(relay.port, b'{"model":"m"}')[:-5])
        await until(lambda: relay.buffered.held == 13 - 5)
        client.close()
        await until(lambda: len(relay.roll) == 0)
        relay.assert_idle()
        assert up.requests == []


async def test_a_slow_reader_pauses_the_engine_and_loses_nothing() -> None:
    block, most = os.urandom(64 << 10), 2_000
    written, enough = 0, asyncio.Event()

    async def script(exchange: Exchange) -> None:
        nonlocal written
        await exchange.begin_stream()
        while written < most and not enough.is_set():
            written += 1
            await exchange.chunk(block)
        await exchange.end_stream()

    async with Recorder(script) as up, running(up.port) as relay:

        def is_paused() -> bool:
            requests: list[Any] = [*relay.wiring.in_hand]
            engines = [leg.upstream for request in requests for leg in request._legs]
            return any(engine is not None and not engine.transport.is_reading() for engine in engines)

        client = await Client.to(relay.port)
        transport = cast(asyncio.Transport, client.writer.transport)
        transport.pause_reading()
        await client.send(post(relay.port, STREAM))
        await up.arrived()
        await until(lambda: is_paused() or written == most)
        assert is_paused()
        enough.set()
        transport.resume_reading()
        heard = await client.heard()
        assert heard.clean
        assert hashlib.sha256(heard.body).digest() == hashlib.sha256(block * written).digest()
        client.close()


async def test_connections_are_reused_on_both_sides() -> None:
    async with Recorder() as up, running(up.port) as relay:
        client = await Client.to(relay.port)
        for _ in range(5):
            await client.send(post(relay.port))
            assert (await client.heard()).status == 200
        assert [request.connection for request in up.requests] == [0] * 5
        client.close()


async def test_pipelined_requests_are_answered_in_order_one_at_a_time() -> None:
    async with Recorder() as up, running(up.port) as relay:
        client = await Client.to(relay.port)
        await client.send(post(relay.port) + get(relay.port) + post(relay.port, b'{"model":"m","z":1}'))
        assert [(await client.heard()).body for _ in range(3)] == [
            b'{"ok":true}',
            b'{"status":"ok"}',
            b'{"ok":true}',
        ]
        assert [request.body for request in up.requests] == [BODY, b'{"model":"m","z":1}']
        client.close()


async def test_too_much_pipelining_aborts_the_connection() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.gone()

    async with Recorder(script) as up, running(up.port) as relay:
        client = await Client.to(relay.port)
        await client.send(post(relay.port))
        await up.arrived()
        await client.send(b"x" * (64 << 10) + b"x")
        await client.ended()
        client.close()
        await until(lambda: relay.watch.attempts)
        relay.assert_idle()


async def test_continue_is_said_only_to_who_asked() -> None:
    async with Recorder() as up, running(up.port) as relay:
        raw = post(relay.port, headers=b"Expect: 100-continue\r\n")
        client = await Client.to(relay.port)
        await client.send(raw[: -len(BODY)])
        assert (await client.head())[0] == 100
        await client.send(BODY)
        assert (await client.heard()).status == 200
        client.close()
        assert up.requests[0].value(b"expect") is None


async def test_a_jdk_clients_offer_of_h2c_is_ignored_and_the_connection_closed() -> None:
    offer = (
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"
    )
    async with Recorder() as up, running(up.port) as relay:
        heard = await ask(relay.port, post(relay.port, headers=offer))
        assert (heard.status, heard.headers["connection"]) == (200, "close")
        assert up.requests[0].body == BODY
        assert up.requests[0].value(b"upgrade") is None


async def test_head_and_get_agree() -> None:
    async with Recorder() as up, running(up.port) as relay:
        for path in (b"/health", b"/v1/models", b"/", b"/v1/models/m", b"/v1/models/none"):
            told = await ask(relay.port, get(relay.port, path))
            silent = await ask(relay.port, get(relay.port, path, method=b"HEAD"), bodyless=True)
            assert (told.status, told.headers["content-length"]) == (
                silent.status,
                silent.headers["content-length"],
            )
            assert silent.body == b""
            assert [line.bytes_out for line in relay.watch.lines[-2:]] == [len(told.body), 0]


async def test_an_access_line_has_sizes_and_no_content() -> None:
    body = b'{"model":"m","prompt":"canary-5f3a"}'
    async with Recorder() as up, running(up.port) as relay:
        await ask(relay.port, post(relay.port, body, headers=b"X-Odd: canary-5f3a\r\n"))
        line = relay.watch.lines[0]
        assert (line.bytes_in, line.bytes_out, line.status, line.attempts) == (len(body), 11, 200, 1)
        assert "canary" not in repr(relay.watch.lines)
        assert json.loads(up.requests[0].body)["prompt"] == "canary-5f3a"


async def test_an_access_line_counts_what_the_client_was_sent_and_nothing_else() -> None:
    async def half_an_error(exchange: Exchange) -> None:
        await exchange.write(b"HTTP/1.1 500 X\r\ncontent-length: 99\r\n\r\n" + b"x" * 50)
        exchange.close()

    async with Recorder(half_an_error) as up, running(up.port) as relay:
        heard = await ask(relay.port, post(relay.port))
        line = relay.watch.lines[0]
        assert (heard.status, line.bytes_out) == (502, len(heard.body))


class Stopped:
    """A clock that stands still at a time at which the difference of two floats shows."""

    def boot_ms(self) -> int:
        return 123_456_789

    def boot_us(self) -> int:
        return 123_456_801_300

    def wall_ms(self) -> int:
        return 0


async def test_times_in_an_access_line_are_told_to_the_microsecond() -> None:
    async with Recorder() as up, running(up.port, clock=Stopped()) as relay:
        await ask(relay.port, post(relay.port))
        line = relay.watch.lines[0]
        assert (line.total_ms, line.first_byte_ms) == (12.3, 12.3)
