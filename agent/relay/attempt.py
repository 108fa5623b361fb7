"""What one attempt has seen of its upstream so far: status, headers, held bytes, marks, windows."""

from enum import Enum

from agent.relay.dialects.tail import Tail
from agent.relay.headers import Headers, value_of
from agent.relay.ports import Marks
from agent.relay.upstream import Options, Target

_EVENT_STREAM = b"text/event-stream"


class Mode(Enum):
    """What the answer is: to be passed on, an error to be judged first, or a peer's own refusal or fault."""

    PASS = "pass"
    HOLD = "hold"
    REFUSED = "refused"
    FAULT = "fault"


class Attempt:
    """Mutable notes of one attempt. Times are boot milliseconds."""

    __slots__ = (
        "body",
        "connected_ms",
        "continued",
        "dispatched_ms",
        "events",
        "first_byte_ms",
        "head_ms",
        "headers",
        "held",
        "last_byte_ms",
        "length",
        "mode",
        "options",
        "peer",
        "refusal",
        "sent_ms",
        "status",
        "tail",
        "target",
    )

    def __init__(self, *, peer: bool, dispatched_ms: float) -> None:
        self.peer = peer
        self.dispatched_ms = dispatched_ms
        self.connected_ms: float | None = None
        self.sent_ms: float | None = None
        self.head_ms: float | None = None
        self.first_byte_ms: float | None = None
        self.last_byte_ms: float | None = None
        self.target: Target | None = None
        self.options: Options | None = None
        self.continued = False
        self.status = 0
        self.headers: Headers = []
        self.length: int | None = None
        self.events = False
        self.mode = Mode.PASS
        self.refusal = ""
        self.body: bytes | bytearray = b""
        self.held: list[bytes] = []
        self.tail = Tail(events=False)

    def heard_head(self, status: int, headers: Headers, length: int | None, now_ms: float) -> None:
        self.status, self.headers, self.length = status, headers, length
        self.head_ms = now_ms
        kind = value_of(headers, b"content-type")
        self.events = kind is not None and kind.lower().startswith(_EVENT_STREAM)
        self.mode = Mode.PASS if status < 400 else Mode.HOLD
        self.tail = Tail(events=self.events)

    def heard_bytes(self, data: bytes, now_ms: float) -> None:
        if self.first_byte_ms is None:
            self.first_byte_ms = now_ms
        self.last_byte_ms = now_ms
        self.tail.feed(data, now_ms)

    @property
    def size(self) -> int:
        """Body bytes so far."""
        return self.tail.size

    def marks(self) -> Marks | None:
        """None if no answer's head ever came."""
        if self.sent_ms is None or self.head_ms is None:
            return None
        last = self.head_ms if self.last_byte_ms is None else self.last_byte_ms
        return Marks(
            sent_ms=self.sent_ms,
            head_ms=self.head_ms,
            last_byte_ms=last,
            first_byte_ms=self.first_byte_ms,
            first_content_ms=self.tail.first_content_ms,
            content_events=self.tail.content_events,
        )
