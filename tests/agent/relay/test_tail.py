"""Windows and counts of a passing answer, whatever the pieces it comes in."""

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.relay.dialects.streams import LINES, SERVER_SENT, Stream, stream_of
from agent.relay.dialects.tail import HEAD_WINDOW, TAIL_WINDOW, Tail

ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}'
WORD = b'data: {"choices":[{"delta":{"content":"w"}}]}'
STOP = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}'
USAGE = b'data: {"choices":[],"usage":{"completion_tokens":3}}'
DONE = b"data: [DONE]"


def fed(data: bytes, cuts: list[int], stream: Stream | None = SERVER_SENT) -> Tail:
    tail = Tail(stream)
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    for number, (start, end) in enumerate(itertools.pairwise(places)):
        tail.feed(data[start:end], float(number))
    return tail


@given(st.binary(max_size=40_000), st.lists(st.integers(0, 40_000), max_size=12))
@settings(max_examples=60, deadline=None)
def test_the_windows_are_the_two_ends_of_the_body(data: bytes, cuts: list[int]) -> None:
    tail = fed(data, cuts, None)
    assert tail.head == data[:HEAD_WINDOW]
    assert tail.tail == data[-TAIL_WINDOW:]
    assert tail.size == len(data)
    assert tail.content_events is None


@given(
    st.integers(0, 40),
    st.lists(st.sampled_from((STOP, USAGE, DONE, b": ping")), max_size=4),
    st.sampled_from((b"\n", b"\r\n")),
    st.lists(st.integers(0, 10_000), max_size=30),
)
@settings(max_examples=100, deadline=None)
def test_content_events_are_counted_however_the_bytes_are_cut(
    words: int, endings: list[bytes], line_end: bytes, cuts: list[int]
) -> None:
    events = [b": hello", ROLE, *[WORD] * words, *endings]
    data = b"".join(event + line_end * 2 for event in events)
    tail = fed(data, cuts)
    assert tail.content_events == words
    assert (tail.first_content_ms is None) is (words == 0)
    assert not tail.mid_event


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"choices":[{"delta":{"reasoning_content":"t"}}]}',
        b'data:{"choices":[{"delta":{"tool_calls":[{}]}}]}',
        b'data: {"choices":[{"text":"t"}]}',
        b"event: x\ndata: " + WORD[6:],
    ],
)
def test_reasoning_tools_and_completions_are_content_too(event: bytes) -> None:
    assert fed(event + b"\n\n", []).content_events == 1


def test_the_middle_of_an_event_is_known() -> None:
    assert fed(WORD + b"\n\n" + WORD[:9], []).mid_event
    assert not fed(b"", []).mid_event


def test_a_long_start_without_content_stops_the_search() -> None:
    tail = Tail(SERVER_SENT)
    for _ in range(20):
        tail.feed(b": " + b"c" * 1_000 + b"\n\n", 5.0)
    assert tail.first_content_ms is not None


# --- lines of JSON -------------------------------------------------------------------------------------------

SAID = b'{"model":"m","created_at":"t","message":{"role":"assistant","content":"w"},"done":false}'
SILENT = b'{"model":"m","created_at":"t","message":{"role":"assistant","content":""},"done":false}'
LAST = b'{"model":"m","created_at":"t","response":"","done":true,"context":[1,2]}'
ERROR = b'{"error":"gone"}'


@given(
    st.integers(0, 40),
    st.lists(st.sampled_from((SILENT, LAST, ERROR)), max_size=3),
    st.sampled_from((b"\n", b"\r\n")),
    st.lists(st.integers(0, 10_000), max_size=30),
)
@settings(max_examples=100, deadline=None)
def test_lines_with_content_are_counted_however_the_bytes_are_cut(
    words: int, endings: list[bytes], line_end: bytes, cuts: list[int]
) -> None:
    lines = [SILENT, *[SAID] * words, *endings]
    tail = fed(b"".join(line + line_end for line in lines), cuts, LINES)
    assert tail.content_events == words
    assert (tail.first_content_ms is None) is (words == 0)
    assert not tail.mid_event


@pytest.mark.parametrize(
    ("line", "content"),
    [
        (b'{"response":"w","done":false}', True),
        (b'{"response":"","thinking":"t","done":false}', True),
        (b'{"message":{"role":"assistant","content":"","thinking":"t"}}', True),
        (b'{"message":{"role":"assistant","content":"","tool_calls":[{}]}}', True),
        (b'{"response":"","done":true}', False),
        (b"not json", False),
        (b'{"message":7}', False),
    ],
)
def test_what_counts_as_content_of_a_line(line: bytes, content: bool) -> None:
    assert fed(line + b"\n", [], LINES).content_events == int(content)


def test_the_middle_of_a_line_is_known() -> None:
    assert fed(SAID + b"\n" + SAID[:9], [], LINES).mid_event
    assert not fed(SAID + b"\n", [], LINES).mid_event
    assert not fed(SAID, [], None).mid_event


@pytest.mark.parametrize(
    ("kind", "stream"),
    [
        (b"text/event-stream; charset=utf-8", SERVER_SENT),
        (b"Application/X-NDJSON", LINES),
        (b"application/json", None),
        (b"", None),
        (None, None),
    ],
)
def test_the_type_of_an_answer_tells_how_it_streams(kind: bytes | None, stream: Stream | None) -> None:
    assert stream_of(kind) is stream


@pytest.mark.parametrize("stream", [SERVER_SENT, LINES])
@pytest.mark.parametrize(
    "piece", [b"\n", b"\r", b":\n\n", b"data:1\n", b"data:{}\n\n", b"{}\n", b"[" * 999 + b"\n\n", b"x"]
)
def test_no_read_of_a_hostile_stream_takes_long(stream: Stream, piece: bytes) -> None:
    """256 KiB are what one read brings at most. Without bounds a read of line ends took minutes."""
    data = (piece * (256 * 1024 // len(piece) + 1))[: 256 * 1024]
    tail = Tail(stream)
    took = []
    for _ in range(3):
        began = time.thread_time()
        tail.feed(data, 1.0)
        took.append(time.thread_time() - began)
    began = time.thread_time()
    assert tail.content_events is not None
    took.append(time.thread_time() - began)
    assert max(took) < 0.05


def test_content_behind_many_events_without_is_found_all_the_same() -> None:
    tail = Tail(SERVER_SENT)
    tail.feed(b": wait\n\n" * 200, 1.0)
    before = tail.first_content_ms
    tail.feed(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n' * 3, 2.0)
    assert (before, tail.first_content_ms, tail.content_events) == (None, 2.0, 3)
