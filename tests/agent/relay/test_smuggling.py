"""One request or none: the corpus against both listeners, in any segmentation, beside another parser, and fuzzed."""

import asyncio
from pathlib import Path
from random import Random

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.relay.http.headers import engine_head, passed_up
from agent.relay.http.parser import Request
from tests.agent.relay.client import BODY, CHAT, Client, ask
from tests.agent.relay.corpus import (
    ALL,
    CHUNKED,
    HOST,
    JSON,
    LAST,
    LENGTH,
    SERVED,
    TE,
    TYPE,
    Case,
    at_api,
    head,
)
from tests.agent.relay.ingress_rig import ROUTE, ingress
from tests.agent.relay.rig import Relay, running
from tests.agent.relay.wire import taken
from tests.support.recorder import Recorder
from tests.support.until import until

ANNOUNCED = b"X-Pairmesh-Route: %s\r\nX-Pairmesh-Model: m\r\nX-Pairmesh-Length: %d\r\n" % (
    ROUTE.encode(),
    len(BODY),
)
PROBE = b"GET /probe HTTP/1.1\r\n" + HOST + b"\r\n"


def at_ingress(raw: bytes) -> bytes:
    return raw.replace(HOST, b"Host: x.mesh.internal\r\n").replace(TYPE, JSON + ANNOUNCED)


async def final(client: Client) -> tuple[int, bool] | None:
    """Status of the next reply that is not interim, and whether it closes; None if the connection ends instead."""
    try:
        status, headers = await client.head()
        while status == 100:
            status, headers = await client.head()
        await client.reader.readexactly(int(headers["content-length"]))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return status, headers.get("connection") == "close"


async def hold(
    case: Case, client: Client, pieces: list[bytes], probe: bytes, relay: Relay, up: Recorder
) -> None:
    """Say ``pieces`` and hold the listener to the case: its reply, and what of it reached the upstream."""
    try:
        for piece in pieces:
            if client.writer.transport.is_closing():
                break
            client.writer.write(piece)
            await asyncio.sleep(0)
        if case.status is not None:
            heard = await final(client)
            if heard is None:
                assert len(pieces) > 1, "no reply"
                assert case.close
            else:
                status, closes = heard
                assert status == case.status
                await read_on(case, client, closes, probe)
    finally:
        client.close()
    await until(lambda: len(relay.roll) == 0)
    assert [(request.line, request.body) for request in up.requests] == (
        [(b"POST /v1/chat/completions HTTP/1.1", BODY)] if case.served else []
    )
    assert up.faults == []
    assert len(relay.fleet.asked) <= 1
    relay.assert_idle()


async def read_on(case: Case, client: Client, closes: bool, probe: bytes) -> None:
    """A connection that is kept must go on exactly behind the request."""
    assert closes or not case.close
    assert not (closes and case.served and not case.close)
    if closes:
        return
    await client.send(probe)
    beyond = await final(client)
    assert beyond is not None
    assert beyond[0] in ((404,) if case.served else (400, 404))


def test_the_corpus_is_a_corpus() -> None:
    assert len(ALL) >= 100
    assert len({case.raw for case in ALL.values()}) == len(ALL)


@pytest.mark.threat("T32")
@pytest.mark.threat("T33")
@pytest.mark.parametrize("name", ALL)
async def test_exactly_one_request_or_none_leaves_the_relay(name: str) -> None:
    case = ALL[name]
    async with Recorder() as up, running(up.port) as relay:
        raw, probe = at_api(case.raw, relay.port), at_api(PROBE, relay.port)
        await hold(case, await Client.to(relay.port), [raw], probe, relay, up)
        if len(raw) < 1_000:
            up.requests.clear()
            relay.fleet.asked.clear()
            single = [raw[at : at + 1] for at in range(len(raw))]
            await hold(case, await Client.to(relay.port), single, probe, relay, up)


@pytest.mark.threat("T32")
@pytest.mark.threat("T33")
async def test_exactly_one_request_or_none_leaves_the_ingress(tmp_path: Path) -> None:
    async with Recorder() as up, ingress(tmp_path, up.port) as peer:
        for name, case in ALL.items():
            up.requests.clear()
            there = case if case.ingress is None else replace(case, status=case.ingress)
            try:
                await hold(
                    there, await peer.dial(), [at_ingress(case.raw)], at_ingress(PROBE), peer.relay, up
                )
            except AssertionError as wrong:
                raise AssertionError(f"{name}: {wrong}") from wrong
        peer.assert_idle()


@pytest.mark.threat("T33")
async def test_what_connection_nominates_is_not_heard_of_again() -> None:
    sent = b"X-Request-Id: theirs\r\nX-Pairmesh-Prefer: @n\r\nX-Session-Id: s\r\nAccept: text/plain\r\n"
    nominated = (
        b"Connection: keep-alive, X-Request-Id, accept\r\nConnection: x-pairmesh-prefer , X-Session-Id\r\n"
    )
    async with Recorder() as up, running(up.port) as relay:
        await ask(relay.port, at_api(head(LENGTH, nominated, sent, body=BODY), relay.port))
        request = up.requests[0]
        assert request.value(b"accept") is None
        assert request.value(b"x-request-id") not in (None, b"theirs")
        assert relay.fleet.asked[0].headers == ()


@pytest.mark.threat("T36")
async def test_nominating_an_origin_does_not_hide_it() -> None:
    async with Recorder() as up, running(up.port) as relay:
        hidden = b"Connection: Origin\r\nOrigin: http://evil.example\r\n"
        heard = await ask(relay.port, at_api(head(LENGTH, hidden, body=BODY), relay.port))
        assert heard.status == 403
        assert up.requests == []


async def test_requests_sent_at_once_are_answered_one_by_one_in_their_order() -> None:
    second = BODY.replace(b"hello", b"again")
    async with Recorder() as up, running(up.port) as relay:
        client = await Client.to(relay.port)
        raw = head(LENGTH, body=BODY) + head(LENGTH, body=second) + head(TE, body=CHUNKED)
        await client.send(at_api(raw, relay.port))
        assert [(await client.heard()).status for _ in range(3)] == [200, 200, 200]
        assert [request.body for request in up.requests] == [BODY, second, BODY]
        client.close()


async def test_a_request_with_too_much_behind_it_is_not_begun() -> None:
    request = at_api(head(LENGTH, body=BODY), 80)
    assert len(await taken([request + b"x" * 65_536])) == 1
    assert await taken([request + b"x" * 65_537]) == []


Read = tuple[bytes, bytes, bytes]
"""Method, target and body of one request."""


def target_of(request: Request) -> bytes:
    return request.head.path + (b"?" + request.head.query if request.head.query else b"")


def other_reading(raw: bytes) -> list[Read]:
    """The whole requests that h11 finds in ``raw``; empty lines between requests, which it refuses, are skipped."""
    found: list[Read] = []
    while True:
        parser = h11.Connection(h11.SERVER)
        parser.receive_data(raw.lstrip(b"\r\n"))
        try:
            request = parser.next_event()
            if not isinstance(request, h11.Request):
                return found
            body = b""
            while isinstance(event := parser.next_event(), h11.Data):
                body += event.data
            if not isinstance(event, h11.EndOfMessage):
                return found
        except h11.ProtocolError:
            return found
        found.append((request.method, request.target, body))
        raw = parser.trailing_data[0]


def readings(raw: bytes, pieces: list[bytes]) -> list[Read]:
    """What the connection reads, having held each request that would go upstream to its one meaning."""
    requests = asyncio.run(taken(pieces))
    for request, body in requests:
        passed = passed_up(request.head.headers, Random(1), frozenset({b"x-a"}))
        sent = engine_head(
            path=request.head.path,
            host=b"u:1",
            length=len(body),
            request_id="r",
            attempt=1,
            passed=passed,
            authorization=None,
        )
        assert other_reading(sent + body) == [(b"POST", request.head.path, body)]
    return [(request.head.method, target_of(request), body) for request, body in requests]


@pytest.mark.threat("T32")
@pytest.mark.parametrize("name", SERVED)
def test_another_parser_reads_the_same_and_cuts_change_nothing(name: str) -> None:
    raw = at_api(SERVED[name].raw, 80)
    whole = readings(raw, [raw])
    assert whole == [(b"POST", CHAT, BODY)]
    assert other_reading(raw)[:1] == whole
    for cut in range(1, len(raw)):
        assert readings(raw, [raw[:cut], raw[cut:]])[:1] == whole


SEEDS = [
    at_api(raw, 80)
    for raw in (
        head(LENGTH, b"X-A: b\r\n", body=BODY),
        head(
            TE,
            b"Accept: b\r\n",
            body=b"5\r\n%s\r\n37;a=b\r\n%s\r\n0\r\nX-T: t\r\n\r\n" % (BODY[:5], BODY[5:]),
        ),
        head(LENGTH, b"Connection: x-a, Upgrade\r\nUpgrade: h2c\r\nX-A: b\r\n", body=BODY),
        head(b"Content-Length: 2\r\n", body=b"{}") + head(TE, body=b"2\r\n{}\r\n" + LAST),
    )
]
TOKENS = [
    *(bytes((byte,)) for byte in b'\0\t\n\v\r ;:,+-0159aAx#%\x7f\x80\xff"\\'),
    *(b"\r\n", b"\r\n\r\n", b"\n\n", b"\r\n ", b"\r\n\t", b"\x85", b"\xa0", b" HTTP/1.1", b"0\r\n\r\n"),
    *(b"Content-Length: 5\r\n", b"Content-Length: 0\r\n", b"Transfer-Encoding: chunked\r\n"),
    *(b"Transfer-Encoding: identity\r\n", b"Connection: close\r\n", b"Upgrade: h2c\r\n", b"Host: b\r\n"),
    *(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"chunked", b", ", b"Expect: 100-continue\r\n", b"HTTP/1.0"),
]


@st.composite
def mutants(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """A request with some of its bytes cut out, replaced, repeated, and the pieces it comes in."""
    raw = draw(st.sampled_from(SEEDS))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(raw)))
        until_ = min(len(raw), at + draw(st.integers(0, 12)))
        middle = draw(st.sampled_from([*TOKENS, b"", raw[at:until_] * 2]))
        raw = raw[:at] + middle + raw[until_:]
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(raw) - 1)), max_size=4)))
    return raw, [raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]


@pytest.mark.threat("T32")
@settings(max_examples=100, deadline=None)
@given(mutant=mutants())
def test_whatever_is_read_as_requests_another_parser_reads_as_the_same(
    mutant: tuple[bytes, list[bytes]],
) -> None:
    raw, pieces = mutant
    read = readings(raw, pieces)
    whole = readings(raw, [raw])
    least = min(len(read), len(whole))
    assert read[:least] == whole[:least]
    longest = max(read, whole, key=len)
    assert other_reading(raw)[: len(longest)] == longest
