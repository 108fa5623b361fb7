"""One question to the authority and its answer: a POST on a connection of its own, bounded as it is read.

Rules: nothing is read beyond what an answer may be, no redirect is followed, no interim answer counts, no connection is
kept: so nothing can be sent into one that nobody listens to, and none is found dead. It knows neither what is
asked nor how long it may take.
"""

import asyncio
from typing import Final, cast
from urllib.parse import urlsplit

import httptools
from msgspec import Struct

from router_core import limits
from router_core.errors import LocalMisuse
from router_core.placement.reasons import AuthorityOutcome
from router_core.policy.authority import AuthorityPolicy

READ_MOST: Final = limits.RESPONSE_HEAD + limits.AUTHORITY_REPLY
"""Bytes of one answer with its head and framing."""


class Unanswered(Struct, frozen=True, gc=False):
    """Asking failed; ``outcome`` and, in one word, ``why``."""

    outcome: AuthorityOutcome
    why: str | None = None


UNREACHABLE: Final = Unanswered(AuthorityOutcome.ERROR, "connect")
CLOSED: Final = Unanswered(AuthorityOutcome.ERROR, "closed")
NOT_HTTP: Final = Unanswered(AuthorityOutcome.ERROR, "not_http")
TOO_LARGE: Final = Unanswered(AuthorityOutcome.INVALID, "too_large")


class Caller:
    """Puts questions to the authority of ``policy``; ``token`` is its bearer token, None for none."""

    def __init__(self, policy: AuthorityPolicy, token: str | None) -> None:
        if token is not None and (not token.isascii() or not token.isprintable() or " " in token):
            raise LocalMisuse("the authority's token holds characters that a header cannot carry")
        parts = urlsplit(policy.url if policy.socket is None else "http://localhost/")
        self._socket, self._host, self._port = policy.socket, parts.hostname or "", parts.port or 0
        lines = [
            f"POST {parts.path or '/'} HTTP/1.1",
            f"Host: {parts.netloc}",
            "Connection: close",
            "User-Agent: pairmesh",
            "Accept: application/json",
            "Content-Type: application/json",
        ]
        if token is not None:
            lines.append(f"Authorization: Bearer {token}")
        self._head = "\r\n".join(lines).encode("ascii")

    async def post(self, question: bytes) -> bytes | Unanswered:
        """The body of a 200 answer, or why there is none. Cancelling it ends the connection."""
        loop = asyncio.get_running_loop()
        call = _Call(b"%s\r\nContent-Length: %d\r\n\r\n%s" % (self._head, len(question), question))
        try:
            if self._socket is not None:
                await loop.create_unix_connection(lambda: call, self._socket)
            else:
                await loop.create_connection(lambda: call, self._host, self._port)
        except TimeoutError:
            raise
        except OSError:
            return UNREACHABLE
        try:
            return await call.answered
        finally:
            call.abort()


class _Call(asyncio.Protocol):
    """One connection. ``answered`` gets what came of it, once."""

    def __init__(self, request: bytes) -> None:
        self.answered: asyncio.Future[bytes | Unanswered] = asyncio.get_running_loop().create_future()
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._left = READ_MOST
        self._final = False
        self._body = bytearray()
        self._transport: asyncio.Transport | None = None

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self.answered.done():
            return
        taken = data[: self._left]
        self._left -= len(taken)
        try:
            self._parser.feed_data(taken)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._end(NOT_HTTP)
        if not self._left:
            self._end(TOO_LARGE)

    def connection_lost(self, exc: Exception | None) -> None:
        """A body without a length ends here."""
        self._end(bytes(self._body) if self._body else CLOSED)

    # --- what the parser finds ---------------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self._final = status >= 200
        if self._final and status != 200:
            self._end(Unanswered(AuthorityOutcome.ERROR, f"status_{status}"))

    def on_body(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > limits.AUTHORITY_REPLY:
            self._end(TOO_LARGE)

    def on_message_complete(self) -> None:
        if self._final:
            self._end(bytes(self._body))

    def _end(self, answer: bytes | Unanswered) -> None:
        if not self.answered.done():
            self.answered.set_result(answer)
