"""A head that is known again is read as if it had been parsed, on both sides of the relay."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.relay.frontends.local import ApiFront, Doors
from agent.relay.http.connection import ServerConnection
from agent.relay.http.headers import Dates
from agent.relay.http.parser import Head, HeadReader, Request
from agent.relay.http.repeats import DIGITS, MOST, Repeats
from agent.relay.upstream.connection import AnswerHead, Options, Target, UpstreamConnection
from router_core.router.failure import Cause
from tests.agent.relay.client import BODY
from tests.agent.relay.corpus import ALL, LENGTH, at_api, head
from tests.agent.relay.rig import build
from tests.agent.relay.wire import Wire, taken

PLAIN = at_api(head(LENGTH, b"Accept: b\r\nConnection: x-a\r\nX-A: b\r\n", body=BODY), 80)
ODD = (
    PLAIN,
    PLAIN.replace(b"Content-Length: ", b"content-LENGTH:\t "),
    PLAIN.replace(b"POST ", b"\r\nPOST "),
    PLAIN.replace(LENGTH, LENGTH + b"Expect: 100-continue\r\n"),
)
TOKENS = (
    *(bytes((byte,)) for byte in b"\0\t\n\r :;,+-0159ax\x7f\xff"),
    *(
        b"\r\n",
        b"\r\n\r\n",
        b"\r\n ",
        b"Content-Length: 5\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"close",
        b"",
    ),
    *(
        b"1" * 18,
        b"1" * 19,
        b"00",
        b"Connection: content-length\r\n",
        b"Keep-Alive: max=2\r\n",
        b"204",
        b"1.0",
    ),
)


@st.composite
def changed(draw: st.DrawFn, raws: tuple[bytes, ...]) -> tuple[bytes, bytes]:
    """A message and another one that differs from it in its length, or in a few bytes anywhere."""
    raw = draw(st.sampled_from(raws))
    digits = b"%d" % draw(st.integers(0, 10 ** draw(st.integers(0, 20))))
    told = b"%d" % len(BODY)
    other = raw.replace(told, digits, 1) if draw(st.booleans()) else raw
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(other)))
        until_ = min(len(other), at + draw(st.integers(0, 3)))
        other = other[:at] + draw(st.sampled_from(TOKENS)) + other[until_:]
    return raw, other


def fields(head: Head) -> dict[str, object]:
    return {name: getattr(head, name) for name in Head.__slots__ if name not in ("gist", "passed")}


def remembered(raw: bytes) -> Repeats[Head]:
    reader, repeats = HeadReader(), Repeats[Head]()
    read = reader.feed(raw)
    assert read is not None
    assert isinstance(read[0], Request)
    repeats.remember(reader.raw, read[0].head)
    return repeats


@pytest.mark.threat("T32")
@settings(max_examples=300, deadline=None)
@given(pair=changed(ODD))
def test_a_head_known_again_is_the_one_that_parsing_gives(pair: tuple[bytes, bytes]) -> None:
    first, second = pair
    known = remembered(first).recall(second)
    if known is not None:
        parsed = HeadReader().feed(second)
        assert parsed is not None
        assert isinstance(parsed[0], Request)
        assert (fields(known[0]), known[1], known[2]) == (fields(parsed[0].head), parsed[0].length, parsed[1])


@pytest.mark.parametrize("raw", ODD)
@pytest.mark.parametrize("digits", [b"0", b"007", b"7", b"9" * DIGITS])
def test_only_the_length_may_differ(raw: bytes, digits: bytes) -> None:
    told = b"%d" % len(BODY)
    known = remembered(raw).recall(raw.replace(told, digits, 1))
    assert known is not None
    assert known[1] == int(digits)
    for other in (b"", b"+7", b"7 7", b"-7", b"7,7", b"0x7", b"9" * (DIGITS + 1), b"\xb2"):
        assert remembered(raw).recall(raw.replace(told, other, 1)) is None


def test_a_long_head_is_not_kept() -> None:
    def known(size: int) -> bool:
        raw = PLAIN.replace(b"Accept: b", b"Accept: " + b"b" * (size - len(PLAIN) + len(BODY) + 1))
        assert raw.index(b"\r\n\r\n") + 4 == size
        return remembered(raw).recall(raw) is not None

    assert known(MOST)
    assert not known(MOST + 1)


Reading = list[tuple[dict[str, object], int, bool, bytes]]


def readings(pieces: list[bytes]) -> Reading:
    return [
        (fields(request.head), request.length, request.close, body)
        for request, body in asyncio.run(taken(pieces))
    ]


@pytest.mark.threat("T32")
@pytest.mark.parametrize("name", ALL)
def test_what_came_before_changes_no_reading_of_the_corpus(name: str) -> None:
    raw = at_api(ALL[name].raw, 80)
    assert readings([PLAIN, raw]) == readings([PLAIN]) + readings([raw])


@pytest.mark.threat("T32")
@settings(max_examples=100, deadline=None)
@given(pair=changed(ODD))
def test_what_came_before_changes_no_reading(pair: tuple[bytes, bytes]) -> None:
    first, second = pair
    assert readings([first, second]) == readings([first]) + readings([second])


async def test_a_head_known_again_is_searched_for_the_names_of_sessions_in_force() -> None:
    relay, wire = build(), Wire()
    front = ApiFront(
        wiring=relay.wiring,
        place=relay.fleet.place,
        listing=lambda: relay.listed,
        phase=lambda: relay.phase,
        doors=Doors.of(("127.0.0.1", 80)),
        roll=relay.roll,
    )
    connection = ServerConnection(front, relay.clock, Dates(), relay.buffered)
    connection.connection_made(wire)
    for name in (b"x-b", b"x-a", b"x-a", b"x-b"):
        front.name_sessions([name])
        connection.data_received(PLAIN.replace(b"Connection: x-a\r\n", b""))
    named = (("x-a", "b"),)
    assert [asked.headers for asked in relay.fleet.asked] == [(), named, named, ()]


# --- answers -------------------------------------------------------------------------------------------------

ANSWERS = tuple(
    b"HTTP/1.1 200 OK\r\ncontent-type: a/b\r\n%scontent-length: %d\r\nX-Y: z\r\n\r\n%s"
    % (more, len(BODY), BODY)
    for more in (b"", b"Keep-Alive: timeout=5, max=3\r\n", b"Connection: keep-alive, x-y\r\n")
)


class Heard:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def continued(self) -> None:
        self.told.append("continued")

    def head(self, head: AnswerHead, length: int | None) -> None:
        self.told.append((head.status, head.headers, head.reusable, length))

    def data(self, data: bytes, ended: bool) -> None:
        self.told.append((data, ended))

    def lost(self, cause: Cause, stale: bool) -> None:
        self.told.append((cause, stale))


class Keeper:
    """Keeps what may serve again."""

    def __init__(self) -> None:
        self.kept: list[int] = []

    def keep(self, connection: UpstreamConnection, idle_ms: int) -> None:
        self.kept.append(idle_ms)

    def forget(self, connection: UpstreamConnection) -> None: ...


def heard(answers: list[bytes]) -> tuple[list[list[object]], list[int]]:
    """What is told of each answer on one connection, and how often and for how long it was kept."""
    keeper, wire = Keeper(), Wire()
    options = Options(idle_ms=60_000, idle_most=1, most=1, off_host=False)
    connection = UpstreamConnection(keeper, Target("e", "127.0.0.1", 1), options)
    connection.connection_made(wire)
    told: list[list[object]] = []
    for answer in answers:
        if wire.closed or len(keeper.kept) < len(told):
            break
        sink = Heard()
        connection.start(sink)
        connection.send(b"POST / HTTP/1.1\r\n\r\n", b"")
        connection.data_received(answer)
        told.append(sink.told)
    return told, keeper.kept


@settings(max_examples=300, deadline=None)
@given(pair=changed(ANSWERS))
def test_what_was_answered_before_changes_no_answer(pair: tuple[bytes, bytes]) -> None:
    first, second = pair
    told, kept = heard([first, second])
    assert heard([first])[0] == told[:1]
    assert heard([second])[0] == told[1:]
    assert len(kept) <= 2


def test_a_repeated_head_does_not_begin_the_count_of_requests_anew() -> None:
    told, kept = heard([ANSWERS[1]] * 5)
    assert len(told) == 3
    assert kept == [3_500, 3_500]
