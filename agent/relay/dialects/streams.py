"""How an answer is cut into events, and which of them carry generated content."""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Final

import msgspec
from msgspec import Raw, Struct

from agent.relay.dialects.raw import NONE

_EMPTY = (b"", b"null", b'""', b"[]")


class _Delta(Struct, gc=False):
    content: Raw = NONE
    reasoning_content: Raw = NONE
    reasoning: Raw = NONE
    tool_calls: Raw = NONE


class _Choice(Struct, gc=False):
    delta: _Delta | None = None
    text: Raw = NONE


class _Chunk(Struct, gc=False):
    choices: list[_Choice] = []


class _Message(Struct, gc=False):
    content: Raw = NONE
    thinking: Raw = NONE
    tool_calls: Raw = NONE


class _Line(Struct, gc=False):
    response: Raw = NONE
    thinking: Raw = NONE
    message: _Message | None = None


_chunk = msgspec.json.Decoder(_Chunk).decode
_line = msgspec.json.Decoder(_Line).decode


class Stream(Struct, frozen=True, kw_only=True):
    """One way of writing a stream. ``ends`` are what may end an event, ``end`` finds the first; ``counted`` are the ends that are counted, each
    with how many bytes of it may stand in the piece before; ``separator`` divides events whose line ends are LF."""

    ends: tuple[bytes, ...]
    end: re.Pattern[bytes]
    counted: tuple[tuple[bytes, int], ...]
    separator: bytes
    has_content: Callable[[bytes], bool]

    def ends_in(self, data: bytes, edge: bytes = b"") -> int:
        """How many events end in ``data``, which follows the bytes ``edge``."""
        return sum(
            ((edge[-carried:] + data) if carried else data).count(mark) for mark, carried in self.counted
        )

    def split(self, window: bytes) -> list[bytes]:
        """The events of a window, the empty ones left out."""
        normal = window.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        return [event for event in normal.split(self.separator) if event.strip()]


def _sent_has_content(event: bytes) -> bool:
    for line in event.splitlines():
        if not line.startswith(b"data:"):
            continue
        try:
            chunk = _chunk(line[5:])
        except (msgspec.MsgspecError, RecursionError):
            continue
        for choice in chunk.choices:
            told = choice.delta or _Delta()
            fields = (told.content, told.reasoning_content, told.reasoning, told.tool_calls, choice.text)
            if any(bytes(field) not in _EMPTY for field in fields):
                return True
    return False


def _line_has_content(event: bytes) -> bool:
    try:
        line = _line(event)
    except (msgspec.MsgspecError, RecursionError):
        return False
    message = line.message or _Message()
    fields = (line.response, line.thinking, message.content, message.thinking, message.tool_calls)
    return any(bytes(field) not in _EMPTY for field in fields)


SERVER_SENT: Final = Stream(
    ends=(b"\n\n", b"\r\n\r\n", b"\r\r"),
    end=re.compile(rb"\n\n|\r\n\r\n|\r\r"),
    counted=((b"\n\n", 1), (b"\n\r\n", 2)),
    separator=b"\n\n",
    has_content=_sent_has_content,
)
"""Server-sent events of the OpenAI dialects."""

LINES: Final = Stream(
    ends=(b"\n",),
    end=re.compile(rb"\n"),
    counted=((b"\n", 0),),
    separator=b"\n",
    has_content=_line_has_content,
)
"""Lines of JSON, as Ollama's native routes write them."""

_BY_TYPE: Final = {b"text/event-stream": SERVER_SENT, b"application/x-ndjson": LINES}


@lru_cache(maxsize=64)
def stream_of(content_type: bytes | None) -> Stream | None:
    """How an answer of this type is cut into events; None if it is no stream."""
    return _BY_TYPE.get((content_type or b"").partition(b";")[0].strip().lower())
