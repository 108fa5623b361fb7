"""What one attempt has seen of its upstream so far: status, headers, held bytes, marks, windows."""

from collections.abc import Callable
from enum import Enum
from functools import partial

from agent.engines.contract import ResponseMarks
from agent.relay.dialects.streams import SERVER_SENT, Stream, stream_of
from agent.relay.dialects.tail import Tail
from agent.relay.http.headers import Headers, passed_down, value_of
from agent.relay.ports import Asked, AttemptReport, FirstBytes, Routed
from agent.relay.upstream.connection import AnswerHead
from agent.relay.upstream.route_header import decode_state
from router_core.placement.reasons import Cause as RefusalCause
from router_core.router.outcome import Outcome

HELD_ANSWER = 16_384
"""An error answer is held back, and kept for replay, up to this size."""

_REFUSALS = {cause.value.encode("ascii"): cause.value for cause in RefusalCause}


_NO_ANSWER = Tail(None)


class Mode(Enum):
    """What the answer is: to be passed on, an error to be judged first, or a peer's own refusal or fault."""

    PASS = "pass"
    HOLD = "hold"
    REFUSED = "refused"
    FAULT = "fault"


class Attempt:
    """Mutable notes of one attempt. Times are boot milliseconds. ``lines`` are those of ``headers`` that may come
    down, as an answer that begins passes them on."""

    __slots__ = (
        "asked_for_body",
        "body",
        "body_ms",
        "connected_ms",
        "dispatched_ms",
        "first_byte_ms",
        "head_ms",
        "headers",
        "held",
        "last_byte_ms",
        "length",
        "lines",
        "mode",
        "overdue",
        "peer",
        "refusal",
        "sent_ms",
        "status",
        "tail",
        "waiting",
    )

    def __init__(self, *, peer: bool, dispatched_ms: float) -> None:
        self.peer = peer
        self.dispatched_ms = dispatched_ms
        self.connected_ms: float | None = None
        self.sent_ms: float | None = None
        self.body_ms: float | None = None
        self.head_ms: float | None = None
        self.first_byte_ms: float | None = None
        self.last_byte_ms: float | None = None
        self.asked_for_body = self.overdue = False
        self.status = 0
        self.headers: Headers = []
        self.lines = b""
        self.length: int | None = None
        self.mode = Mode.PASS
        self.refusal = ""
        self.body: bytes | bytearray = b""
        self.held: list[bytes] = []
        self.tail = _NO_ANSWER
        self.waiting: Callable[[], None] | None = None

    def wait(self, first_bytes: FirstBytes, endpoint: str, model: str) -> None:
        """The request has been sent to an own engine, which is watched for loading until something comes."""
        sent_ms = int(self.sent_ms or 0)
        first_bytes.sent(endpoint, model, sent_ms)
        self.waiting = partial(first_bytes.heard, endpoint, model, sent_ms)

    def waited(self) -> None:
        """A byte has come, or will not come any more; saying so twice is harmless."""
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            waiting()

    def heard_head(self, head: AnswerHead, length: int | None, now_ms: float) -> None:
        gist = head.gist
        if gist is None:
            stream = stream_of(value_of(head.headers, b"content-type"))
            gist = head.gist = stream, passed_down(head.headers, events=stream is SERVER_SENT)
        stream, self.lines = gist
        self.status, self.headers, self.length = head.status, head.headers, length
        self.head_ms = now_ms
        self.mode = Mode.PASS if head.status < 400 else Mode.HOLD
        self.tail = Tail(stream)

    def heard_peer(self, headers: Headers) -> tuple[bytes, bytes] | None:
        """Note a peer's own refusal or fault; the record it sent along as (signed, signature)."""
        refused = value_of(headers, b"x-pairmesh-refused")
        if refused is not None:
            self.mode, self.refusal = Mode.REFUSED, _REFUSALS.get(refused, "refused")
        elif (fault := value_of(headers, b"x-pairmesh-error")) is not None:
            self.mode, self.refusal = Mode.FAULT, fault.decode("latin-1")
        told = value_of(headers, b"x-pairmesh-state")
        return None if told is None else decode_state(told)

    def heard_bytes(self, data: bytes, now_ms: float) -> None:
        if self.first_byte_ms is None:
            self.first_byte_ms = now_ms
            if self.waiting is not None:
                self.waited()
        self.last_byte_ms = now_ms
        self.tail.feed(data, now_ms)

    @property
    def stream(self) -> Stream | None:
        """How the answer is cut into events, None if it is no stream."""
        return self.tail.stream

    @property
    def size(self) -> int:
        """Body bytes so far."""
        return self.tail.size

    def marks(self) -> ResponseMarks | None:
        """None if no answer's head ever came."""
        if self.sent_ms is None or self.head_ms is None:
            return None
        last = self.head_ms if self.last_byte_ms is None else self.last_byte_ms
        return ResponseMarks(
            sent_ms=self.sent_ms,
            head_ms=self.head_ms,
            last_byte_ms=last,
            first_byte_ms=self.first_byte_ms,
            first_content_ms=self.tail.first_content_ms,
            content_events=self.tail.content_events,
        )


def attempt_report(
    side: str, asked: Asked, routed: Routed, outcome: Outcome, attempt: Attempt
) -> AttemptReport:
    """What is told of an attempt once it has ended."""
    return AttemptReport(
        side=side,
        request_id=asked.request_id,
        routed=routed,
        outcome=outcome,
        dispatched_ms=attempt.dispatched_ms,
        connected_ms=attempt.connected_ms,
        marks=attempt.marks(),
        head=attempt.tail.head,
        tail=attempt.tail.tail,
        body_bytes=attempt.size,
        text_bytes=0 if asked.facts.tokens else asked.facts.text_bytes,
        dialect=asked.dialect,
        is_work=asked.is_work,
    )
