"""What is kept of an answer while it passes: two small windows, and how many content events went by.

Bytes are looked at, never delayed or altered. Events are parsed only until the first one with content (or 16 KiB),
from then on separators are counted. The windows are handed to the engine's adapter once and dropped.
"""

from agent.relay.dialects.streams import Stream

HEAD_WINDOW = 4_096
TAIL_WINDOW = 16_384
EVENTS_LOOKED = 256
"""Events without content that are parsed at a time; behind so many the next counts as having some."""
_MARK_MOST = 3
"""Bytes of an event's end that may have come before the rest of it."""


class Tail:
    """Windows and counts of one response body. ``stream`` None: no stream, windows only."""

    __slots__ = (
        "_edge",
        "_pending",
        "_recent",
        "_recent_size",
        "_separators",
        "first_content_ms",
        "head",
        "size",
        "stream",
    )

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream
        self.head = b""
        self.size = 0
        self.first_content_ms: float | None = None
        self._recent: list[bytes] = []
        self._recent_size = 0
        self._pending: bytes | None = b"" if stream is not None else None
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
        stream = self.stream
        if stream is None:
            return
        if self._pending is not None:
            self._search(stream, data, now_ms)
        else:
            self._separators += stream.ends_in(data, self._edge)
        self._edge = data[-2:] if size > 1 else (self._edge + data)[-2:]

    @property
    def mid_event(self) -> bool:
        """True if the stream stands inside an event."""
        return self.stream is not None and self.size > 0 and not self.tail.endswith(self.stream.ends)

    @property
    def tail(self) -> bytes:
        """The last 16 KiB."""
        return b"".join(self._recent)[-TAIL_WINDOW:]

    @property
    def content_events(self) -> int | None:
        """Events with content, None if the answer is no stream. Read it at the end."""
        stream = self.stream
        if stream is None:
            return None
        if self.first_content_ms is None:
            return 0
        trailing = 0
        for event in reversed(stream.split(self.tail)[-EVENTS_LOOKED:]):
            if stream.has_content(event):
                break
            trailing += 1
        return max(1, 1 + self._separators - trailing)

    def _search(self, stream: Stream, data: bytes, now_ms: float) -> None:
        """Parse events until the first with content, then count the separators of what is left. Each byte is looked for an
        end once, and none behind the window is."""
        before = self._pending or b""
        pending = before + data
        window = pending[:TAIL_WINDOW]
        looked, begins, at = 0, 0, max(0, len(before) - _MARK_MOST)
        while (end := stream.end.search(window, at)) is not None:
            event, begins = window[begins : end.start()], end.end()
            at = begins
            if not event:
                continue
            looked += 1
            if looked > EVENTS_LOOKED or stream.has_content(event):
                self.first_content_ms = now_ms
                self._pending = None
                self._separators = stream.ends_in(pending[begins:])
                return
        if self.size > TAIL_WINDOW:
            self.first_content_ms = now_ms
            self._pending = None
            return
        self._pending = pending[begins:]
