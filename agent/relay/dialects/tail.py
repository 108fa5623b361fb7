"""What is kept of an answer while it passes: two small windows, and how many content events went by.

Bytes are looked at, never delayed or altered. Events are parsed only until the first one with content (or 16 KiB),
from then on separators are counted. The windows are handed to the engine's adapter once and dropped.
"""

import msgspec
from msgspec import Raw, Struct

HEAD_WINDOW = 4_096
TAIL_WINDOW = 16_384
_NONE = Raw()
_EMPTY = (b"", b"null", b'""', b"[]")


class _Delta(Struct, gc=False):
    content: Raw = _NONE
    reasoning_content: Raw = _NONE
    reasoning: Raw = _NONE
    tool_calls: Raw = _NONE


class _Choice(Struct, gc=False):
    delta: _Delta | None = None
    text: Raw = _NONE


class _Chunk(Struct, gc=False):
    choices: list[_Choice] = []


_chunk = msgspec.json.Decoder(_Chunk).decode


def has_content(event: bytes) -> bool:
    """True if one server-sent event carries generated content in an OpenAI dialect."""
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


class Tail:
    """Windows and counts of one response body. ``events`` False: no event stream, windows only."""

    __slots__ = (
        "_edge",
        "_events",
        "_pending",
        "_recent",
        "_recent_size",
        "_separators",
        "first_content_ms",
        "head",
        "size",
    )

    def __init__(self, *, events: bool) -> None:
        self._events = events
        self.head = b""
        self.size = 0
        self.first_content_ms: float | None = None
        self._recent: list[bytes] = []
        self._recent_size = 0
        self._pending: bytes | None = b"" if events else None
        self._edge = b""
        self._separators = 0

    def feed(self, data: bytes, now_ms: float) -> None:
        """Look at the next bytes of the body."""
        size = len(data)
        self.size += size
        if len(self.head) < HEAD_WINDOW:
            self.head += data[: HEAD_WINDOW - len(self.head)]
        recent = self._recent
        recent.append(data)
        self._recent_size += size
        while self._recent_size - len(recent[0]) >= TAIL_WINDOW:
            self._recent_size -= len(recent.pop(0))
        if not self._events:
            return
        if self._pending is not None:
            self._search(data, now_ms)
        else:
            edge = self._edge
            self._separators += (edge[-1:] + data).count(b"\n\n") + (edge + data).count(b"\n\r\n")
        self._edge = data[-2:] if size > 1 else (self._edge + data)[-2:]

    @property
    def mid_event(self) -> bool:
        """True if the stream stands inside an event."""
        return self.size > 0 and not self.tail.endswith((b"\n\n", b"\r\n\r\n", b"\r\r"))

    @property
    def tail(self) -> bytes:
        """The last 16 KiB."""
        return b"".join(self._recent)[-TAIL_WINDOW:]

    @property
    def content_events(self) -> int | None:
        """Events with content, None if the answer is no event stream. Read it at the end."""
        if not self._events:
            return None
        if self.first_content_ms is None:
            return 0
        trailing = 0
        for event in reversed(_events_in(self.tail)):
            if has_content(event):
                break
            trailing += 1
        return max(1, 1 + self._separators - trailing)

    def _search(self, data: bytes, now_ms: float) -> None:
        """Parse events until the first with content, then count the separators of what is left."""
        pending = (self._pending or b"") + data
        while (cut := _separator(pending)) is not None:
            event, pending = pending[: cut[0]], pending[cut[1] :]
            if has_content(event):
                self.first_content_ms = now_ms
                self._pending = None
                self._separators = pending.count(b"\n\n") + pending.count(b"\n\r\n")
                return
        if self.size > TAIL_WINDOW:
            self.first_content_ms = now_ms
            self._pending = None
            return
        self._pending = pending


def _separator(data: bytes) -> tuple[int, int] | None:
    """Start and end of the first blank line of ``data``, whatever its line ends."""
    found = [(at, at + len(mark)) for mark in (b"\n\n", b"\r\n\r\n", b"\r\r") if (at := data.find(mark)) >= 0]
    return min(found, default=None)


def _events_in(window: bytes) -> list[bytes]:
    normal = window.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    return [event for event in normal.split(b"\n\n") if event.strip()]
