"""The two allow-lists of headers, and the heads built from them. Pure.

Whatever is not listed is dropped, and what ``Connection`` nominates is dropped before that. A client's
credentials, cookies, origin and hints never go upstream; an engine's server name, cookies and CORS headers never
come down. Framing headers are always our own.
"""

import re
from email.utils import formatdate
from http import HTTPStatus
from random import Random
from typing import Final

Headers = list[tuple[bytes, bytes]]
"""Names in lower case, in the order they came."""

REQUEST_PASSED: Final = frozenset(
    {b"accept", b"anthropic-version", b"anthropic-beta", b"openai-beta", b"tracestate"}
)
REPLY_PASSED: Final = frozenset(
    {
        b"content-type",
        b"content-encoding",
        b"cache-control",
        b"retry-after",
        b"retry-after-ms",
        b"x-should-retry",
        b"request-id",
        b"openai-processing-ms",
        b"openai-version",
    }
)
REPLY_FAMILIES: Final = (b"anthropic-ratelimit-", b"x-ratelimit-")
_UNPASSABLE = frozenset(
    {
        b"authorization",
        b"x-api-key",
        b"cookie",
        b"origin",
        b"referer",
        b"expect",
        b"host",
        b"content-length",
        b"content-type",
        b"transfer-encoding",
        b"connection",
        b"keep-alive",
        b"upgrade",
        b"te",
        b"trailer",
        b"via",
    }
)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TRACE = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_REASONS: Final = {status.value: status.phrase.encode("ascii") for status in HTTPStatus} | {
    529: b"Overloaded"
}
BODYLESS: Final = frozenset({204, 304})
_STARTS: Final = {
    status: b"HTTP/1.1 %d %s\r\nserver: pairmesh\r\ndate: " % (status, reason)
    for status, reason in _REASONS.items()
}
_NONE: Final[frozenset[bytes]] = frozenset()


def value_of(headers: Headers, name: bytes) -> bytes | None:
    """The first value of ``name``."""
    for key, value in headers:
        if key == name:
            return value
    return None


def nominated(headers: Headers) -> frozenset[bytes]:
    """The names that ``Connection`` makes hop-by-hop."""
    if value_of(headers, b"connection") is None:
        return _NONE
    told = [value for key, value in headers if key == b"connection"]
    return frozenset(token.strip().lower() for value in told for token in value.split(b","))


def lines_of(headers: Headers) -> bytes:
    """``headers`` as header lines."""
    return b"".join([b"%s: %s\r\n" % pair for pair in headers])


def is_plain(value: str) -> bool:
    """True for what a header of our own can carry: printable ASCII. Names come out of records too."""
    return value.isascii() and value.isprintable()


def own_line(name: str, value: str) -> str:
    """A header line of our own, nothing for a value that is not plain."""
    return f"{name}: {value}\r\n" if is_plain(value) else ""


def own_header(name: bytes, value: str) -> Headers:
    """A header of our own, none for a value that is not plain."""
    return [(name, value.encode("ascii"))] if is_plain(value) else []


def request_id_of(told: bytes | None) -> str | None:
    """The value of a client's ``x-request-id`` if it is one, else None."""
    if told is None:
        return None
    text = told.decode("latin-1")
    return text if _REQUEST_ID.fullmatch(text) else None


def passed_up(headers: Headers, rng: Random, extra: frozenset[bytes] = _NONE) -> bytes:
    """The client's headers that may go upstream, as header lines.

    ``rng`` gives this hop its id in a forwarded ``traceparent``. ``extra`` are names that the operator passes to this
    endpoint besides; what must never go upstream does not, even so.
    """
    dropped = nominated(headers)
    lines = b""
    for key, value in headers:
        if key in REQUEST_PASSED or (key in extra and key not in _UNPASSABLE):
            if key not in dropped:
                lines += b"%s: %s\r\n" % (key, value)
        elif key == b"traceparent" and key not in dropped and (told := _TRACE.fullmatch(value)) is not None:
            span = b"%016x" % rng.getrandbits(64)
            lines += b"traceparent: %s-%s-%s-%s\r\n" % (told[1], told[2], span, told[4])
    return lines


def engine_head(
    *,
    path: bytes,
    host: bytes,
    length: int,
    request_id: str,
    attempt: int,
    passed: bytes,
    authorization: str | None,
) -> bytes:
    """The head of a request to an engine. Attempts after the first are told apart by a suffix of the id."""
    suffix = f"-a{attempt}" if attempt > 1 else ""
    auth = b"" if authorization is None else b"authorization: %s\r\n" % authorization.encode("latin-1")
    return (
        b"POST %s HTTP/1.1\r\nhost: %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
        b"accept-encoding: identity\r\nuser-agent: pairmesh\r\nvia: 1.1 pairmesh\r\nx-request-id: %s\r\n%s%s\r\n"
    ) % (path, host, length, (request_id + suffix).encode("ascii"), auth, passed)


def peer_head(
    *,
    path: bytes,
    node: str,
    length: int,
    request_id: str,
    passed: bytes,
    route: str,
    ahead: str | None,
    model: str,
) -> bytes:
    """The head of a request to a peer's ingress; the body waits for ``100 Continue``. Raises ``ValueError`` for names
    that no header can carry."""
    if not is_plain(model):
        raise ValueError("a name that is no printable ASCII")
    expects = b"" if ahead is None else b"x-pairmesh-ahead: %s\r\n" % ahead.encode("ascii")
    return (
        b"POST %s HTTP/1.1\r\nhost: %s.mesh.internal\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\nexpect: 100-continue\r\nx-request-id: %s\r\nx-pairmesh-route: %s\r\n"
        b"%sx-pairmesh-model: %s\r\nx-pairmesh-length: %d\r\n%s\r\n"
    ) % (
        path,
        node.encode("ascii"),
        request_id.encode("ascii"),
        route.encode("ascii"),
        expects,
        model.encode("ascii"),
        length,
        passed,
    )


def passed_down(headers: Headers, *, events: bool = False) -> bytes:
    """The upstream's headers that may come down, as header lines; framing is ours. Nobody on the way is to hold
    ``events`` back."""
    dropped = nominated(headers)
    lines = b""
    kept = False
    for key, value in headers:
        if (key in REPLY_PASSED or key.startswith(REPLY_FAMILIES)) and key not in dropped:
            lines += b"%s: %s\r\n" % (key, value)
            kept = kept or key == b"cache-control"
    if events:
        lines += (
            b"x-accel-buffering: no\r\n" if kept else b"x-accel-buffering: no\r\ncache-control: no-cache\r\n"
        )
    return lines


def reply_head(
    status: int, date: bytes, lines: bytes, *, length: int | None, chunked: bool, close: bool
) -> bytes:
    """Status line and headers of a reply, whose end is told by length, by a last chunk, or (neither) by closing. One that
    never has a body tells none of these.

    ``date`` is a ready header value, ``lines`` are ready header lines.
    """
    framing = b""
    if length:
        framing = b"content-length: %d\r\n" % length
    elif length is not None:
        framing = b"" if status in BODYLESS else b"content-length: 0\r\n"
    elif chunked:
        framing = b"transfer-encoding: chunked\r\n"
    start = _STARTS.get(status) or b"HTTP/1.1 %d Unknown\r\nserver: pairmesh\r\ndate: " % status
    end = b"connection: close\r\n\r\n" if close else b"\r\n"
    return b"".join((start, date, b"\r\n", lines, framing, end))


class Dates:
    """The ``Date`` value, made once per second."""

    __slots__ = ("_second", "_value")

    def __init__(self) -> None:
        self._second = -1
        self._value = b""

    def at(self, wall_ms: int) -> bytes:
        second = wall_ms // 1000
        if second != self._second:
            self._second = second
            self._value = formatdate(second, usegmt=True).encode("ascii")
        return self._value
