"""One client connection: requests in, one reply at a time out.

Owns: the limits of intake (head and body size, time, pace), keep-alive, pipelining, reply framing, back-pressure
toward the client. Rules: reading is never paused while a request is in flight, since that is how a disconnect is
seen; nothing more is read while the last reply is not taken; a client that takes nothing for 30 s is dropped, also
while it is being closed; everything due within one turn leaves in one write; a reply that broke is closed without its
last chunk; a request is refused at once, and what is left of its body is read unseen for a while, or the client would meet
a reset in place of the reply. Refuses to know routes, dialects and upstreams: a ``Front`` judges heads and starts what answers.
"""

import asyncio
from enum import Enum
from typing import Any, cast

from agent.effects.clock import Clock
from agent.relay.http.frontend import Answer, Buffered, Front, Work
from agent.relay.http.headers import Dates, lines_of, reply_head
from agent.relay.http.parser import BodyReader, Head, HeadReader, Request
from agent.relay.http.repeats import Repeats
from router_core import limits

_DRAIN_MS = 2_000
_EMPTY_MS = 2_000
_PATIENCE_MS = 500
"""How long a request may be on its way before a connection counts as idle."""
_PIPELINED = 64 * limits.KIB
_JOINED = 64 * limits.KIB
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"


class Phase(Enum):
    """How far a client's connection has come with its current request."""

    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    WAIT = "wait"
    REPLY = "reply"
    UNTAKEN = "untaken"
    EMPTY = "empty"
    DRAIN = "drain"
    CLOSED = "closed"


_BEFORE_BODY = (Phase.IDLE, Phase.HEAD)
_UNREAD = (Phase.IDLE, Phase.HEAD, Phase.BODY)
_ASKED = (Phase.WAIT, Phase.REPLY)
_UNANSWERED = (Phase.WAIT, Phase.REPLY, Phase.UNTAKEN)


class ServerConnection(asyncio.Protocol):
    """See the module. Who accepts connections calls ``tick`` about once a second."""

    def __init__(self, front: Front, clock: Clock, dates: Dates, buffered: Buffered) -> None:
        self._front = front
        self._clock = clock
        self._dates = dates
        self._buffered = buffered
        self._phase = Phase.CLOSED
        self._transport: asyncio.Transport
        self._head: HeadReader | None = None
        self._repeats: Repeats[Head] = Repeats()
        self._request: Request | None = None
        self._body: BodyReader | None = None
        self._body_since = 0
        self._held = 0
        self._work: Work | None = None
        self._pending: list[bytes] = []
        self._pending_size = 0
        self._out: list[bytes] = []
        self._chunked = False
        self._unread: int | None = None
        self._drained = 0
        self._since = 0
        self._stalled_at: tuple[int, int] | None = None
        self._closing = False
        self.deadline: int | None = None
        self.caller: Any = None

    @property
    def phase(self) -> Phase:
        """Where the connection stands with its current request."""
        return self._phase

    @property
    def idle_since(self) -> int | None:
        """Since when no request has come or is being answered, boot ms; None if one is, or may just be on its way. A head
        that is not complete after a while counts as none."""
        if self._phase is Phase.DRAIN:
            return self._since
        if self._phase in _BEFORE_BODY and self._clock.boot_ms() - self._since >= _PATIENCE_MS:
            return self._since
        return None

    @property
    def received(self) -> int:
        """Body bytes of the current request so far, while they come in."""
        return 0 if self._body is None else self._body.received

    @property
    def is_stalled(self) -> bool:
        """True while more waits to be written than the client reads."""
        return self._stalled_at is not None

    # --- transport callbacks ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(limits.WRITE_HIGH, limits.WRITE_LOW)
        self._idle()
        self._front.opened(self)

    def connection_lost(self, _exc: Exception | None) -> None:
        self._phase = Phase.CLOSED
        self._stalled_at = None
        self._leave()
        self._front.closed(self)

    def eof_received(self) -> bool:
        self._leave()
        return False

    def data_received(self, data: bytes) -> None:
        phase = self._phase
        if phase in _BEFORE_BODY:
            self._read_head(data)
        elif phase is Phase.BODY:
            self._read_body(data)
        elif phase in _UNANSWERED:
            self._keep_for_later(data)
        elif phase is Phase.EMPTY:
            self._read_empty(data)
        elif phase is Phase.DRAIN:
            self._drop(len(data))

    def pause_writing(self) -> None:
        self._watch_writing()
        if self._work is not None:
            self._work.pause()

    def resume_writing(self) -> None:
        self._stalled_at = None
        if self._work is not None:
            self._work.resume()
        elif self._phase is Phase.UNTAKEN:
            self._transport.resume_reading()
            self._next()
        elif self._phase is Phase.CLOSED:
            self._watch_writing()

    # --- reading ---------------------------------------------------------------------------------------------

    def _read_head(self, data: bytes) -> None:
        now = self._clock.boot_ms()
        reader = self._head
        if reader is None:
            self._phase = Phase.HEAD
            self._since = now
            again = self._repeats.recall(data)
            if again is not None:
                head, length, end = again
                self._take_in(Request(head, length), data, end, now)
                return
            reader = self._head = HeadReader()
            self.deadline = now + limits.REQUEST_HEAD_TIME
        read = reader.feed(data)
        if read is None:
            return
        request, end = read
        self._head = None
        if isinstance(request, str):
            self._refuse(self._front.fault(self, None, request))
            return
        if request.length and not request.close:
            self._repeats.remember(reader.raw, request.head)
        self._take_in(request, data, end, now)

    def _take_in(self, request: Request, data: bytes, end: int, now: int) -> None:
        """A head has been read, up to ``end`` of ``data``: judge it, then have the body."""
        request.accepted_ms = now
        self._request = request
        length, chunked = request.length, request.head.chunked
        refusal = self._front.judge(self, request)
        if refusal is None and length > limits.REQUEST_BODY:
            refusal = self._front.fault(self, request, "body_too_large")
        stop = end + length
        if refusal is None and length and not self._take(min(stop, len(data)) - end):
            refusal = self._front.fault(self, request, "overloaded")
        if refusal is not None:
            self._turn_down(refusal, request, data[end:])
            return
        if stop <= len(data) and not chunked:
            self._complete(request, data[end:stop], data[stop:])
            return
        self._body = BodyReader(request)
        self._body_since = now
        self._phase = Phase.BODY
        self.deadline = now + limits.BODY_PACE_GRACE
        if end < len(data):
            self.release_body()
            self._read_body(data[end:])
        elif request.head.expects:
            self._transport.write(_CONTINUE)

    def _read_body(self, data: bytes) -> None:
        reader, request = self._body, self._request
        assert reader is not None
        assert request is not None
        before = reader.received
        verdict, rest = reader.feed(data)
        if not self._take(reader.received - before):
            verdict = "overloaded"
        if verdict is False:
            return
        self._body = None
        if verdict == "surplus":
            request.close = True
        elif verdict is not True:
            self._unread = None if request.head.chunked else request.length - reader.received
            self._refuse(self._front.fault(self, request, verdict))
            return
        self._complete(request, reader.body, rest)

    def _complete(self, request: Request, body: bytes | bytearray, rest: bytes) -> None:
        self._phase = Phase.WAIT
        self.deadline = None
        if rest and not self._keep_for_later(rest):
            return
        served = self._front.serve(self, request, body)
        if isinstance(served, Answer):
            self._front.answered(self, request, served)
            self._answer(served, keep=served.keep)
        elif self._phase in _ASKED and self._request is request:
            self._work = served

    def _turn_down(self, refusal: Answer, request: Request, rest: bytes) -> None:
        """Refuse before the body. A peer that waits for ``100`` sends an empty body and may go on."""
        self._front.answered(self, request, refusal)
        if refusal.keep and not request.has_body:
            self._phase = Phase.WAIT
            self._keep_for_later(rest)
            self._answer(refusal, keep=True)
        elif refusal.keep and request.head.expects and request.head.chunked:
            self._phase = Phase.EMPTY
            self.deadline = self._clock.boot_ms() + _EMPTY_MS
            self._write_answer(refusal, close=False)
            if rest:
                self._read_empty(rest)
        else:
            self._unread = None if request.head.chunked else max(0, request.length - len(rest))
            self._answer(refusal, keep=False)

    def _read_empty(self, data: bytes) -> None:
        """The last chunk of a body that was refused; a peer sends it in one piece, whatever follows it."""
        self._keep_for_later(data)
        seen = b"".join(self._pending)
        if not seen.startswith(_LAST_CHUNK):
            if not _LAST_CHUNK.startswith(seen):
                self.abort()
            return
        self._pending, self._pending_size = [], 0
        self._keep_for_later(seen[len(_LAST_CHUNK) :])
        self._next()

    def _keep_for_later(self, data: bytes) -> bool:
        """False if that was too much, and the connection is gone."""
        if data:
            self._pending.append(data)
            self._pending_size += len(data)
            if self._pending_size > _PIPELINED:
                self.abort()
                return False
        return True

    def _refuse(self, answer: Answer) -> None:
        self._front.answered(self, self._request, answer)
        self._answer(answer, keep=False)

    def _take(self, size: int) -> bool:
        if size and not self._buffered.take(size):
            return False
        self._held += size
        return True

    def release_body(self) -> None:
        """The body is not needed any more: its memory counts no longer."""
        if self._held:
            self._buffered.give(self._held)
            self._held = 0

    # --- replying --------------------------------------------------------------------------------------------

    def reply(self, answer: Answer) -> None:
        """End the current request with a whole reply."""
        self._answer(answer, keep=answer.keep)

    def begin(self, status: int, lines: bytes, length: int | None) -> None:
        """Start a passed-on reply with these header lines; ``length`` None frames it by chunks, or by closing toward
        HTTP/1.0."""
        request = self._request
        assert request is not None
        self._phase = Phase.REPLY
        self._chunked = chunked = length is None and request.head.http11
        close = request.close or self._closing
        date = self._dates.at(self._clock.wall_ms())
        self._out.append(reply_head(status, date, lines, length=length, chunked=chunked, close=close))

    def push(self, data: bytes) -> None:
        """Body bytes of the reply."""
        if self._chunked:
            self._out += (b"%x\r\n" % len(data), data, b"\r\n")
        else:
            self._out.append(data)

    def flush(self) -> None:
        """Write what was begun and pushed, at once."""
        out, self._out = self._out, []
        if not out or self._phase is Phase.CLOSED:
            return
        if len(out) == 1:
            self._transport.write(out[0])
        elif sum(map(len, out)) <= _JOINED:
            self._transport.write(b"".join(out))
        else:
            self._transport.writelines(out)

    def end(self) -> None:
        """The reply is complete: on to the next request, or close."""
        if self._chunked:
            self._out.append(_LAST_CHUNK)
        self.flush()
        self._after(keep=True)

    def cut(self, last: bytes) -> None:
        """The reply broke: write ``last`` if it can still be told, then close without a clean end."""
        if last and self._phase is Phase.REPLY:
            self.push(last)
        self.flush()
        self._after(keep=False)

    def abort(self) -> None:
        """Drop the connection; nothing more is written."""
        self._phase = Phase.CLOSED
        self._leave()
        self._transport.abort()

    def close_when_idle(self) -> None:
        """No further request on this connection."""
        self._closing = True
        if self._phase in (Phase.IDLE, Phase.UNTAKEN):
            self._shut()

    def make_way(self) -> None:
        """Close the connection if it is idle, so that another can be had."""
        if self.idle_since is not None:
            self._shut()
            if self._transport.get_write_buffer_size():
                self.abort()

    def peer_certificate(self) -> bytes | None:
        """DER of the caller's certificate on a TLS listener."""
        tls = self._transport.get_extra_info("ssl_object")
        return None if tls is None else tls.getpeercert(binary_form=True)

    def tick(self, now: int) -> None:
        """Called about once a second: enforce what is late."""
        if self._stalled_at is not None:
            self._check_stall(now, *self._stalled_at)
        phase = self._phase
        if phase is Phase.BODY and self._body is not None:
            elapsed = now - self._body_since
            late = elapsed > limits.BODY_PACE_GRACE
            if late and self._body.received * 1000 < limits.BODY_PACE_PER_S * elapsed:
                self._body = self._unread = None
                self._refuse(self._front.fault(self, self._request, "body_timeout"))
        elif self.deadline is not None and now >= self.deadline:
            if phase is Phase.HEAD:
                self._head = None
                self._refuse(self._front.fault(self, None, "head_timeout"))
            elif phase in (Phase.EMPTY, Phase.DRAIN):
                self.abort()
            elif phase is Phase.IDLE:
                self._shut()

    def _watch_writing(self) -> None:
        """Bytes are waiting for the client: from now on it has to take some."""
        self._stalled_at = self._clock.boot_ms(), self._transport.get_write_buffer_size()

    def _check_stall(self, now: int, since: int, size: int) -> None:
        left = self._transport.get_write_buffer_size()
        if left < size:
            self._stalled_at = now, left
        elif now - since >= limits.WRITE_STALL:
            self._stalled_at = None
            if self._work is not None:
                work, self._work = self._work, None
                work.client_stalled()
            self.abort()

    def _write_answer(self, answer: Answer, *, close: bool) -> None:
        date, lines = self._dates.at(self._clock.wall_ms()), lines_of(answer.headers)
        head = reply_head(answer.status, date, lines, length=len(answer.body), chunked=False, close=close)
        silent = self._request is not None and self._request.head.method == b"HEAD"
        self._transport.write(head if silent else head + answer.body)

    def _answer(self, answer: Answer, *, keep: bool) -> None:
        if self._phase is Phase.CLOSED:
            return
        request = self._request
        close = not keep or self._closing or (request is not None and request.close)
        self._write_answer(answer, close=close)
        self._after(keep=not close)

    def _after(self, *, keep: bool) -> None:
        """A reply has been written."""
        request = self._request
        self._work = None
        if self._held:
            self.release_body()
        self._chunked = False
        if self._phase is Phase.CLOSED:
            return
        if keep and not self._closing and request is not None and not request.close:
            self._next()
        elif self._phase in _UNREAD and self._unread != 0:
            self._linger()
        else:
            self._shut()

    def _linger(self) -> None:
        """The client may still be sending what was refused: end our side, where that can be told, and let it finish."""
        self._phase = Phase.DRAIN
        self._since = self._clock.boot_ms()
        self.deadline = self._since + _DRAIN_MS
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def _drop(self, size: int) -> None:
        """More of a refused body came."""
        self._drained += size
        if self._unread is not None and self._drained >= self._unread:
            self._shut()
        elif self._drained > limits.REFUSED_BODY:
            self.abort()

    def _next(self) -> None:
        self._request = None
        if self._stalled_at is not None:
            self._phase = Phase.UNTAKEN
            self.deadline = None
            self._transport.pause_reading()
        elif self._pending:
            self._phase = Phase.WAIT
            asyncio.get_running_loop().call_soon(self._take_up)
        else:
            self._idle()

    def _take_up(self) -> None:
        """Go on with bytes that came while the last request was in flight."""
        if self._phase is Phase.WAIT and self._request is None:
            data = b"".join(self._pending)
            self._pending, self._pending_size = [], 0
            self._phase = Phase.IDLE
            self._read_head(data)

    def _idle(self) -> None:
        self._phase = Phase.IDLE
        self._since = self._clock.boot_ms()
        self.deadline = self._since + limits.KEEP_ALIVE_IDLE

    def _shut(self) -> None:
        self._phase = Phase.CLOSED
        if self._transport.get_write_buffer_size():
            self._watch_writing()
        self._transport.close()

    def _leave(self) -> None:
        """The client is gone, or we are leaving it."""
        self.release_body()
        if self._work is not None:
            work, self._work = self._work, None
            work.client_gone()
