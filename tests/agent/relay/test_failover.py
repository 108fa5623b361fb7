"""Before the first body byte a request goes elsewhere; after it the truth is told. Real sockets on both sides."""

import asyncio
import json
import socket

import pytest

from router_core.router.failure import Cause
from tests.agent.relay.client import BODY, Client, Heard, ask, post
from tests.agent.relay.rig import Local, at, running
from tests.support.ports import HeldPort
from tests.support.recorder import Exchange, Recorder, say_ok
from tests.support.until import until

STREAM = b'{"model":"m","stream":true,"messages":[]}'
EVENT = b'data: {"choices":[{"delta":{"content":"word"}}]}\n\n'


def code_of(heard: Heard) -> str:
    code: str = json.loads(heard.body)["error"]["code"]
    return code


async def eof(exchange: Exchange) -> None:
    exchange.close()


async def reset(exchange: Exchange) -> None:
    exchange.reset()


async def head_then_eof(exchange: Exchange) -> None:
    await exchange.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")
    exchange.close()


async def chunked_head_then_eof(exchange: Exchange) -> None:
    await exchange.begin_stream()
    exchange.close()


async def garbage(exchange: Exchange) -> None:
    await exchange.write(b"SSH-2.0-OpenSSH\r\n")


async def bad_head(exchange: Exchange) -> None:
    await exchange.write(
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    )


async def two_lengths(exchange: Exchange) -> None:
    await exchange.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nabc")


async def endless_head(exchange: Exchange) -> None:
    await exchange.write(b"HTTP/1.1 200 OK\r\nx: " + b"a" * 70_000)


async def busy(exchange: Exchange) -> None:
    await exchange.answer(b'{"error":{"code":503}}', status=503)


async def absent(exchange: Exchange) -> None:
    await exchange.answer(b'{"error":"not found"}', status=404)


async def locked(exchange: Exchange) -> None:
    await exchange.answer(b'{"error":"key"}', status=401)


async def broken(exchange: Exchange) -> None:
    await exchange.answer(b'{"error":"boom"}', status=500)


@pytest.mark.parametrize(
    "script",
    [
        eof,
        reset,
        head_then_eof,
        chunked_head_then_eof,
        garbage,
        bad_head,
        two_lengths,
        endless_head,
        busy,
        absent,
        broken,
    ],
)
async def test_a_failure_before_the_first_byte_goes_to_the_next_endpoint(script: object) -> None:
    async with Recorder(script) as bad, Recorder() as good, running(bad.port, good.port) as relay:  # type: ignore[arg-type]
        heard = await ask(relay.port, post(relay.port))
        assert (heard.status, heard.body, heard.headers["x-pairmesh-attempts"]) == (200, b'{"ok":true}', "2")
        assert [len(bad.requests), len(good.requests)] == [1, 1]
        assert good.requests[0].body == BODY
        assert (good.requests[0].value(b"x-request-id") or b"").endswith(b"-a2")
        assert relay.watch.results() == ["failed", "done"]
        relay.assert_idle()


async def test_a_refused_connection_goes_on_and_opens_the_breaker_at_once() -> None:
    closed = HeldPort()
    async with Recorder() as good, running(closed.port, good.port) as relay:
        heard = await ask(relay.port, post(relay.port))
        assert (heard.status, heard.headers["x-pairmesh-node"]) == (200, "@here/e1")
        assert relay.watch.attempts[0].outcome.cause is Cause.CONNECT_REFUSED
        now = relay.clock.boot_ms()
        assert relay.wiring.router.breakers.state(relay.watch.attempts[0].routed.choice.endpoint, now) == 2


async def test_an_endpoint_that_accepts_nothing_costs_its_connect_limit_only() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        async with Recorder() as good, running(full.getsockname()[1], good.port) as relay:
            relay.fleet.locals["e0"].connect_ms = 150
            heard = await ask(relay.port, post(relay.port))
            assert (heard.status, heard.headers["x-pairmesh-attempts"]) == (200, "2")
            assert relay.watch.attempts[0].outcome.cause is Cause.CONNECT_TIMEOUT
        for filler in fillers:
            filler.close()


async def test_silence_past_the_first_byte_limit_goes_to_the_next_endpoint() -> None:
    ended = asyncio.Event()

    async def silent(exchange: Exchange) -> None:
        await exchange.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")
        await exchange.gone()
        ended.set()

    async with Recorder(silent) as bad, Recorder() as good, running(bad.port, good.port) as relay:
        relay.fleet.locals["e0"].first_byte_ms = 150
        assert (await ask(relay.port, post(relay.port))).status == 200
        await asyncio.wait_for(ended.wait(), 5)
        assert relay.watch.attempts[0].outcome.cause is Cause.FIRST_BYTE


async def test_at_most_three_endpoints_are_tried() -> None:
    async with (
        Recorder(eof) as one,
        Recorder(eof) as two,
        Recorder(eof) as three,
        Recorder(eof) as four,
        running(one.port, two.port, three.port, four.port) as relay,
    ):
        heard = await ask(relay.port, post(relay.port))
        assert (heard.status, code_of(heard)) == (502, "upstream_unreachable")
        assert heard.headers["x-should-retry"] == "false"
        assert relay.watch.results() == ["failed"] * 3
        relay.assert_idle()


async def test_endpoints_that_are_simply_down_use_up_no_attempt() -> None:
    closed = [HeldPort() for _ in range(4)]
    async with Recorder() as up, running(*(held.port for held in closed), up.port) as relay:
        heard = await ask(relay.port, post(relay.port))
        assert heard.status == 200
        assert relay.watch.results() == ["failed"] * 4 + ["done"]


async def test_with_nothing_left_the_last_upstreams_own_answer_is_told() -> None:
    async with Recorder(eof) as one, Recorder(busy) as two, running(one.port, two.port) as relay:
        heard = await ask(relay.port, post(relay.port))
        assert (heard.status, heard.body) == (503, b'{"error":{"code":503}}')


async def test_a_server_error_is_tried_elsewhere_only_once() -> None:
    async with (
        Recorder(broken) as one,
        Recorder(broken) as two,
        Recorder() as three,
        running(one.port, two.port, three.port) as relay,
    ):
        heard = await ask(relay.port, post(relay.port))
        assert (heard.status, heard.body) == (500, b'{"error":"boom"}')
        assert three.requests == []


async def too_long(exchange: Exchange) -> None:
    await exchange.answer(b'{"error":"too long"}', status=400)


@pytest.mark.parametrize(("script", "status"), [(too_long, 400), (locked, 401)])
async def test_an_answer_about_the_request_or_its_caller_is_not_tried_elsewhere(
    script: object, status: int
) -> None:
    async with Recorder(script) as one, Recorder() as two, running(one.port, two.port) as relay:  # type: ignore[arg-type]
        assert (await ask(relay.port, post(relay.port))).status == status
        assert two.requests == []


async def test_a_long_error_answer_passes_in_full() -> None:
    body = b'{"error":"' + b"x" * 100_000 + b'"}'

    async def script(exchange: Exchange) -> None:
        await exchange.answer(body, status=400)

    async with Recorder(script) as up, running(up.port) as relay:
        heard = await ask(relay.port, post(relay.port))
        assert (heard.status, heard.body, heard.clean) == (400, body, True)


@pytest.mark.lesson("bodies written anew, and [DONE] after an error")
@pytest.mark.parametrize("how", ["eof", "reset", "bad_chunk"])
@pytest.mark.parametrize("mid_event", [True, False])
async def test_after_the_first_byte_a_loss_is_told_without_done_and_without_a_last_chunk(
    how: str, mid_event: bool
) -> None:
    sent = EVENT + (EVENT[:10] if mid_event else b"")

    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.chunk(sent)
        await proceed.wait()
        if how == "bad_chunk":
            await exchange.write(b"nonsense\r\n")
        elif how == "eof":
            exchange.close()
        else:
            exchange.reset()

    proceed = asyncio.Event()
    async with Recorder(script) as bad, Recorder() as good, running(bad.port, good.port) as relay:
        client = await Client.to(relay.port)
        await client.send(post(relay.port, STREAM))
        assert (await client.head())[0] == 200
        assert await client.chunk() == sent
        proceed.set()
        last = await client.chunk()
        assert last is not None
        assert last.startswith(b"\n\ndata: {" if mid_event else b"data: {")
        assert last.endswith(b"\n\n")
        assert b"[DONE]" not in last
        told = json.loads(last.strip().removeprefix(b"data: "))
        assert told["error"]["code"] == "upstream_lost"
        assert await client.chunk() is None
        client.close()
        assert good.requests == []
        assert relay.watch.results() == ["broken"]
        assert relay.watch.lines[-1].bytes_out == len(sent) + len(last)
        relay.assert_idle()


@pytest.mark.parametrize("kind", [b"text/plain", b"text/event-stream"])
async def test_an_answer_that_is_shorter_than_it_said_gets_no_byte_of_ours(kind: bytes) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.write(b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: 10\r\n\r\nabc" % kind)
        exchange.close()

    async with Recorder(script) as up, running(up.port) as relay:
        heard = await ask(relay.port, post(relay.port))
        assert (heard.clean, heard.body) == (False, b"abc")
        assert relay.watch.lines[-1].bytes_out == 3


async def test_a_stream_that_falls_silent_ends_as_a_timeout() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.chunk(EVENT)
        await exchange.gone()

    async with Recorder(script) as up, running(up.port) as relay:
        relay.fleet.locals["e0"].idle_ms = 200
        heard = await ask(relay.port, post(relay.port, STREAM))
        assert not heard.clean
        assert b'"upstream_timeout"' in heard.body


async def test_a_stream_may_end_without_done() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.chunk(EVENT)
        await exchange.end_stream()

    async with Recorder(script) as up, running(up.port) as relay:
        heard = await ask(relay.port, post(relay.port, STREAM))
        assert heard.clean
        assert heard.body == EVENT


@pytest.mark.lesson("llm-d/llm-d#1564: a kept connection reset on reuse")
async def test_a_reused_socket_that_was_closed_meanwhile_costs_no_attempt() -> None:
    async def once(exchange: Exchange) -> None:
        if exchange.request.connection == 0 and len(up.requests) == 2:
            exchange.close()
        else:
            await say_ok(exchange)

    async with Recorder(once) as up, running(up.port) as relay:
        client = await Client.to(relay.port)
        for _ in range(2):
            await client.send(post(relay.port))
            heard = await client.heard()
            assert heard.status == 200
            assert "x-pairmesh-attempts" not in heard.headers
        client.close()
        assert [request.connection for request in up.requests] == [0, 0, 1]
        assert relay.watch.results() == ["done", "done"]


async def test_an_engine_that_closes_idle_sockets_causes_no_error() -> None:
    async def say_and_close(exchange: Exchange) -> None:
        await say_ok(exchange)
        exchange.close()

    async with Recorder(say_and_close) as up, running(up.port) as relay:
        client = await Client.to(relay.port)
        for _ in range(4):
            await client.send(post(relay.port))
            assert (await client.heard()).status == 200
        client.close()
        assert relay.watch.results() == ["done"] * 4
        await until(lambda: up.open_sockets == 0)


@pytest.mark.parametrize("surplus", ["HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx", "x"])
async def test_a_socket_with_surplus_bytes_is_not_used_again(surplus: str) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok" + surplus.encode())

    async with Recorder(script) as up, running(up.port) as relay:
        client = await Client.to(relay.port)
        for _ in range(2):
            await client.send(post(relay.port))
            assert (await client.heard()).body == b"ok"
        client.close()
        assert [request.connection for request in up.requests] == [0, 1]


@pytest.mark.parametrize(
    "headers", [b"connection: close\r\n", b"keep-alive: timeout=1\r\n", b"keep-alive: timeout=60, max=1\r\n"]
)
async def test_a_socket_the_engine_is_about_to_close_is_not_used_again(headers: bytes) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.answer(b"ok", headers=headers)

    async with Recorder(script) as up, running(up.port) as relay:
        client = await Client.to(relay.port)
        for _ in range(2):
            await client.send(post(relay.port))
            await client.heard()
        client.close()
        assert [request.connection for request in up.requests] == [0, 1]


async def test_a_full_pool_is_not_held_against_the_endpoint() -> None:
    async def hang(exchange: Exchange) -> None:
        await exchange.gone()

    async with Recorder(hang) as one, Recorder() as two, running(one.port) as relay:
        relay.fleet.locals["e0"].connections = 1
        first = await Client.to(relay.port)
        await first.send(post(relay.port))
        await one.arrived()
        relay.fleet.add(Local("e1", two.port))
        assert (await ask(relay.port, post(relay.port))).headers["x-pairmesh-node"] == "@here/e1"
        assert relay.watch.attempts[0].outcome.cause is Cause.POOL_FULL
        assert not relay.watch.attempts[0].outcome.fault
        first.close()


async def test_any_mix_of_endings_leaves_nothing_in_flight() -> None:
    endings = [say_ok, eof, reset, busy, broken, garbage, chunked_head_then_eof, say_ok]

    async def script(exchange: Exchange) -> None:
        await endings[len(one.requests) % len(endings)](exchange)

    async with Recorder(script) as one, Recorder(say_ok) as two, running(one.port, two.port) as relay:

        async def hurried() -> None:
            client = await Client.to(relay.port)
            await client.send(post(relay.port))
            client.close()

        replies = await asyncio.gather(
            *(ask(relay.port, post(relay.port)) for _ in range(40)), *(hurried() for _ in range(20))
        )
        assert {reply.status for reply in replies if reply is not None} == {200}
        await until(lambda: len(relay.watch.lines) == 60)
        relay.assert_idle()


@pytest.mark.parametrize("where", ["decide", "first_token", "attempted"])
async def test_a_fault_in_the_relays_own_code_ends_its_request_and_leaves_nothing(where: str) -> None:
    async with Recorder() as up, running(up.port) as relay:
        relay.fleet.break_at = where
        relay.watch.refuse = where == "attempted"
        client = await Client.to(relay.port)
        await client.send(post(relay.port))
        await until(lambda: relay.watch.faults)
        if where == "decide":
            assert (await client.heard()).status == 502
        client.close()
        relay.fleet.break_at, relay.watch.refuse = "", False
        await until(lambda: not relay.wiring.in_hand)
        assert relay.buffered.held == 0
        assert (await ask(relay.port, post(relay.port))).status == 200
        assert not relay.fleet.open_seqs
        relay.watch.faults.clear()


async def test_a_request_at_an_endpoint_that_is_given_up_goes_elsewhere_before_its_first_byte() -> None:
    async def silent(exchange: Exchange) -> None:
        await exchange.gone()

    async with Recorder(silent) as bad, Recorder() as good, running(bad.port, good.port) as relay:
        asking = asyncio.create_task(ask(relay.port, post(relay.port)))
        await until(lambda: bad.requests)
        for request in tuple(relay.wiring.in_hand):
            request.cut_off(at("e1"))
            request.cut_off(at("e0"))
        heard = await asking
        assert (heard.status, heard.headers["x-pairmesh-attempts"]) == (200, "2")
        assert relay.watch.attempts[0].outcome.cause is Cause.GONE
        relay.assert_idle()


async def test_an_answer_of_an_endpoint_that_is_given_up_is_told_to_be_broken() -> None:
    async def endless(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.write(b"%x\r\n%s\r\n" % (len(EVENT), EVENT))
        await exchange.gone()

    async with Recorder(endless) as engine, running(engine.port) as relay:
        asking = asyncio.create_task(ask(relay.port, post(relay.port, STREAM)))
        await until(lambda: [r for r in relay.wiring.in_hand if r.silent_at(2**40) is not None])
        for request in tuple(relay.wiring.in_hand):
            request.cut_off(at("e0"))
        heard = await asking
        assert EVENT in heard.body
        assert b"[DONE]" not in heard.body
        assert b"upstream_lost" in heard.body
        relay.assert_idle()
