"""One connection toward an engine or a peer.

Owns: sending one request, reading one answer, telling a clean end from a broken one, and when a socket may serve
again. A socket returns to the pool only after a complete message in both directions, without ``Connection:
close`` and without a surplus byte; it is never half-closed. Refuses to know what is asked and what to do about a
failure: a ``Sink`` hears of it.
"""

import asyncio
import re
import ssl
from collections.abc import Callable
from typing import Protocol, cast

import httptools
from msgspec import Struct

from agent.relay.dialects.streams import Stream
from agent.relay.http.headers import BODYLESS, Headers
from agent.relay.http.repeats import Repeats
from agent.relay.ports import Admits
from router_core import limits
from router_core.router.failure import Cause

_CHUNK = 256 * limits.KIB
_JOINED = 64 * limits.KIB
_LAST_CHUNK = b"0\r\n\r\n"
_FRAMING = (b"content-length", b"transfer-encoding")
_OF_CONNECTION = frozenset({b"connection", b"keep-alive"})
_EARLY_CLOSE_MS = 1_500
_TIMEOUT = re.compile(rb"timeout=(\d{1,6})")
_MAX = re.compile(rb"max=(\d{1,6})")


class Target(Struct, frozen=True, gc=False):
    """One place that connections go to; the pool's key. ``owner`` is an endpoint or a node; a node has no ``ip`` here,
    as all its addresses lead to the same place."""

    owner: str
    ip: str = ""
    port: int = 0
    build: int = 0


Reached = Callable[[str, int, Cause | None], None]
"""Told what connecting to one address of several gave: None if it stands."""


class Options(Struct, frozen=True, kw_only=True):
    """How connections to one kind of target are made and kept. ``pin`` is the only certificate accepted; ``admits``,
    of a target with a name, judges each address that it leads to. ``addresses`` are those of a target without one, best
    first: the first to stand counts, ``reached`` is told about each."""

    idle_ms: int
    idle_most: int
    most: int
    off_host: bool
    context: ssl.SSLContext | None = None
    server_name: str | None = None
    pin: bytes | None = None
    admits: Admits | None = None
    addresses: tuple[tuple[str, int], ...] = ()
    reached: Reached | None = None


class AnswerHead:
    """The final head of an answer, without the body's length, so that answers may share it. ``reusable``: the socket may
    serve again after it. ``gist`` is what its reader made of it: how it streams, and which header lines come down."""

    __slots__ = ("gist", "headers", "reusable", "status")

    def __init__(self, status: int, headers: Headers, *, reusable: bool) -> None:
        self.status = status
        self.headers = headers
        self.reusable = reusable
        self.gist: tuple[Stream | None, bytes] | None = None


class Sink(Protocol):
    """Who asked. Nothing is told after ``ended``, ``lost``, or once the connection was let go."""

    def continued(self) -> None: ...

    def head(self, head: AnswerHead, length: int | None) -> None:
        """``length`` is None when the end is told by chunks or by closing."""

    def data(self, data: bytes, ended: bool) -> None:
        """Body bytes of one read (maybe none), and whether the answer is complete with them."""

    def lost(self, cause: Cause, stale: bool) -> None: ...


class Keeper(Protocol):
    """Who keeps connections between requests."""

    def keep(self, connection: "UpstreamConnection", idle_ms: int) -> None:
        """Take a connection back that may serve again."""

    def forget(self, connection: "UpstreamConnection") -> None:
        """The connection is closed."""


class UpstreamConnection(asyncio.Protocol):
    """One socket. ``sink`` is None while it idles in the pool."""

    def __init__(self, pool: Keeper, target: Target, options: Options) -> None:
        self._pool = pool
        self.target = target
        self.options = options
        self.transport: asyncio.Transport
        self.reused = False
        self.uncounted = False
        self.expires_ms = 0.0
        self._sink: Sink | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._raw = b""
        self._repeats: Repeats[AnswerHead] = Repeats()
        self._headers: Headers = []
        self._status = 0
        self._interim = 0
        self._left: int | None = None
        self._chunked = False
        self._in_body = False
        self._ended = False
        self._heard = False
        self._reusable = False
        self._sent = False
        self._requests = 0
        self._requests_most: int | None = None
        self._idle_ms = options.idle_ms
        self._fragments: list[bytes] = []
        self._unsent: memoryview | None = None
        self._write_paused = False

    # --- sending ---------------------------------------------------------------------------------------------

    def start(self, sink: Sink) -> None:
        """Take the connection into use for one request."""
        self._sink = sink
        self._raw = b""
        self._interim = 0
        self._in_body = self._ended = self._heard = self._sent = False
        self._requests += 1

    def send(self, head: bytes, body: bytes | bytearray) -> None:
        """A whole request, framed by the head's ``Content-Length``."""
        if len(body) <= _JOINED:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))
        self._sent = True

    def send_head(self, head: bytes) -> None:
        """A head whose body waits for ``100 Continue``."""
        self.transport.write(head)

    def send_body(self, body: bytes | bytearray) -> None:
        """The body in chunks, no faster than the peer reads."""
        self._unsent = memoryview(body)
        self._pump()

    def send_no_body(self) -> None:
        """The body was refused: end it empty, so that the connection can be kept."""
        self.transport.write(_LAST_CHUNK)
        self._sent = True

    def _pump(self) -> None:
        while self._unsent is not None and not self._write_paused:
            piece, rest = self._unsent[:_CHUNK], self._unsent[_CHUNK:]
            last = not len(rest)
            frame = b"%x\r\n%s\r\n" % (len(piece), piece) if len(piece) else b""
            self._unsent = None if last else rest
            self.transport.write(frame + _LAST_CHUNK if last else frame)
            self._sent = last

    def pause_writing(self) -> None:
        self._write_paused = True

    def resume_writing(self) -> None:
        self._write_paused = False
        self._pump()

    # --- letting go ------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Drop the socket at once, without draining."""
        self._sink = None
        self._unsent = None
        self.transport.abort()

    @property
    def fragile(self) -> bool:
        """True while a loss may be no more than an idle close that crossed our request."""
        return self.reused and not self._heard

    def _settle(self) -> None:
        """The answer is complete: back to the pool, or close."""
        self._sink = self._unsent = None
        buffered = self.transport.get_write_buffer_size()
        most = self._requests_most
        if self._reusable and self._sent and not buffered and (most is None or self._requests < most):
            self._pool.keep(self, self._idle_ms)
        elif buffered:
            self.transport.abort()
        else:
            self.transport.close()

    # --- transport callbacks ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(limits.WRITE_HIGH, limits.WRITE_LOW)

    def eof_received(self) -> bool:
        if self._sink is not None and self._in_body and self._left is None and not self._chunked:
            sink = self._sink
            self._reusable = False
            self._settle()
            sink.data(b"", True)
        else:
            self._lose(Cause.TRUNCATED if self._in_body else Cause.EOF)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        reset = exc is not None
        self._lose(Cause.RESET if reset else Cause.TRUNCATED if self._in_body else Cause.EOF)

    def _lose(self, cause: Cause) -> None:
        sink, self._sink = self._sink, None
        self._unsent = None
        if sink is not None:
            stale = self.fragile
            self.transport.abort()
            sink.lost(cause, stale)

    def data_received(self, data: bytes) -> None:
        sink = self._sink
        if sink is None:
            self.transport.abort()
            return
        self._heard = True
        try:
            if not self._in_body:
                rest = self._read_head(data, sink)
                if rest is None or self._sink is not sink:
                    return
                data = rest
            self._read_body(data, sink)
        except httptools.HttpParserError:
            self._lose(Cause.PROTOCOL)

    # --- reading an answer -----------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_body(self, data: bytes) -> None:
        self._fragments.append(data)

    def on_message_begin(self) -> None:
        if self._ended:
            self._reusable = False
            raise _Surplus

    def on_message_complete(self) -> None:
        self._ended = True

    def _read_head(self, data: bytes, sink: Sink) -> bytes | None:
        """What follows the final head, or None if there is more to wait for."""
        again = None if self._raw else self._repeats.recall(data)
        if again is not None:
            known, self._left, end = again
            self._chunked, self._reusable, self._in_body = False, known.reusable, True
            sink.head(known, self._left)
            return data[end:]
        self._raw = raw = self._raw + data if self._raw else data
        while True:
            end = raw.find(b"\r\n\r\n")
            if end < 0 or end + 4 > limits.RESPONSE_HEAD:
                if len(raw) > limits.RESPONSE_HEAD or not b"HTTP/1.".startswith(raw[:7]):
                    self._lose(Cause.PROTOCOL)
                return None
            head, raw = raw[: end + 4], raw[end + 4 :]
            parser = self._parser = httptools.HttpResponseParser(self)
            self._headers, self._ended = [], False
            parser.feed_data(head)
            self._status = parser.get_status_code()
            if self._status >= 200:
                break
            self._interim += 1
            if self._status == 101 or self._interim > limits.INTERIM_RESPONSES:
                self._lose(Cause.PROTOCOL)
                return None
            if self._status == 100:
                sink.continued()
                if self._sink is not sink:
                    return None
            self._raw = raw
            if not raw:
                return None
        self._raw = b""
        if not self._frame(parser):
            self._lose(Cause.PROTOCOL)
            return None
        headers = [field for field in self._headers if field[0] != b"content-length"]
        answer = AnswerHead(self._status, headers, reusable=self._reusable)
        if self._reusable and self._left:
            self._repeats.remember(head, answer)
        self._in_body = True
        sink.head(answer, self._left)
        return raw

    def _frame(self, parser: httptools.HttpResponseParser) -> bool:
        """Learn how the body ends and whether the socket may serve again."""
        headers = self._headers
        if len(headers) > limits.RESPONSE_HEADERS:
            return False
        named = dict(headers)
        if len(named) < len(headers) and any(_times(headers, name) > 1 for name in _FRAMING):
            return False
        coding, length = named.get(b"transfer-encoding"), named.get(b"content-length")
        if coding is not None and (length is not None or coding.strip().lower() != b"chunked"):
            return False
        if length is not None and (not length.isdigit() or len(length) > 18):
            return False
        keep = parser.get_http_version() == "1.1"
        if not _OF_CONNECTION.isdisjoint(named):
            for name, value in headers:
                if name == b"connection" and b"close" in value.lower():
                    keep = False
                elif name == b"keep-alive":
                    self._note_keep_alive(value)
        bodyless = self._status in BODYLESS
        self._chunked = coding is not None and not bodyless
        self._left = 0 if bodyless else int(length) if length is not None else None
        self._reusable = keep and (self._chunked or self._left is not None)
        return True

    def _note_keep_alive(self, value: bytes) -> None:
        told = value.lower()
        if (timeout := _TIMEOUT.search(told)) is not None:
            self._idle_ms = min(self.options.idle_ms, max(0, int(timeout[1]) * 1000 - _EARLY_CLOSE_MS))
        if self._requests_most is None and (most := _MAX.search(told)) is not None:
            self._requests_most = self._requests + int(most[1]) - 1

    def _read_body(self, data: bytes, sink: Sink) -> None:
        ended = False
        if self._chunked:
            data, ended = self._dechunk(data)
        elif self._left is not None:
            if len(data) > self._left:
                self._reusable = False
                data = data[: self._left]
            self._left -= len(data)
            ended = self._left == 0
        if ended:
            self._settle()
        if data or ended:
            sink.data(data, ended)

    def _dechunk(self, data: bytes) -> tuple[bytes, bool]:
        if not data:
            return data, False
        assert self._parser is not None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            if not self._ended:
                raise
            self._reusable = False
        fragments, self._fragments = self._fragments, []
        return fragments[0] if len(fragments) == 1 else b"".join(fragments), self._ended


def _times(headers: Headers, name: bytes) -> int:
    return sum(key == name for key, _ in headers)


class _Surplus(Exception):
    """Bytes behind a complete answer."""
