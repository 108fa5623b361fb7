"""The two allow-lists of headers, and the heads built from them. Pure.

Whatever is not listed is dropped, and what ``Connection`` nominates is dropped before that. A client's
credentials, cookies, origin and hints never go upstream; an engine's server name, cookies and CORS headers never
come down. Framing headers are always our own.
"""

import re
from email.utils import formatdate
from http import HTTPStatus
from typing import Final

from msgspec import Struct

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


def value_of(headers: Headers, name: bytes) -> bytes | None:
    """The first value of ``name``."""
    for key, value in headers:
        if key == name:
            return value
    return None


def nominated(headers: Headers) -> frozenset[bytes]:
    """The names that ``Connection`` makes hop-by-hop."""
    told = [value for key, value in headers if key == b"connection"]
    if not told:
        return frozenset()
    return frozenset(token.strip().lower() for value in told for token in value.split(b","))


def request_id_of(headers: Headers) -> str | None:
    """The client's request id if it is one, else None."""
    told = value_of(headers, b"x-request-id")
    if told is None:
        return None
    text = told.decode("latin-1")
    return text if _REQUEST_ID.fullmatch(text) else None


def passed_up(headers: Headers, span: bytes, extra: frozenset[bytes] = frozenset()) -> bytes:
    """The client's headers that may go upstream, as header lines.

    ``span`` is 16 hex digits, the id of this hop in a forwarded ``traceparent``. ``extra`` are names that the
    operator passes to this endpoint besides; what must never go upstream does not, even so.
    """
    dropped = nominated(headers)
    lines: list[bytes] = []
    for key, value in headers:
        if key in dropped:
            continue
        if key in REQUEST_PASSED or (key in extra and key not in _UNPASSABLE):
            lines.append(b"%s: %s\r\n" % (key, value))
        elif key == b"traceparent" and (told := _TRACE.fullmatch(value)) is not None:
            lines.append(b"traceparent: %s-%s-%s-%s\r\n" % (told[1], told[2], span, told[4]))
    return b"".join(lines)


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
    *, path: bytes, node: str, length: int, request_id: str, passed: bytes, route: str, model: str
) -> bytes:
    """The head of a request to a peer's ingress; the body waits for ``100 Continue``."""
    return (
        b"POST %s HTTP/1.1\r\nhost: %s.mesh.internal\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\nexpect: 100-continue\r\nx-request-id: %s\r\nx-pairmesh-route: %s\r\n"
        b"x-pairmesh-model: %s\r\nx-pairmesh-length: %d\r\n%s\r\n"
    ) % (
        path,
        node.encode("ascii"),
        request_id.encode("ascii"),
        route.encode("ascii"),
        model.encode("ascii"),
        length,
        passed,
    )


def passed_down(headers: Headers, *, events: bool = False) -> Headers:
    """The upstream's headers that may come down; framing is ours. Nobody on the way is to hold ``events`` back."""
    dropped = nominated(headers)
    passed = [
        (key, value)
        for key, value in headers
        if (key in REPLY_PASSED or key.startswith(REPLY_FAMILIES)) and key not in dropped
    ]
    if events:
        passed.append((b"x-accel-buffering", b"no"))
        if value_of(passed, b"cache-control") is None:
            passed.append((b"cache-control", b"no-cache"))
    return passed


class Framing(Struct, frozen=True, gc=False):
    """How a reply's end is told: by length, by a last chunk, or (neither) by closing."""

    length: int | None = None
    chunked: bool = False


def reply_head(status: int, date: bytes, headers: Headers, framing: Framing, *, close: bool) -> bytes:
    """Status line and headers of a reply. ``date`` is a ready header value."""
    lines = [
        b"HTTP/1.1 %d %s\r\nserver: pairmesh\r\ndate: %s\r\n"
        % (status, _REASONS.get(status, b"Unknown"), date)
    ]
    lines += [b"%s: %s\r\n" % pair for pair in headers]
    if framing.length is not None:
        lines.append(b"content-length: %d\r\n" % framing.length)
    elif framing.chunked:
        lines.append(b"transfer-encoding: chunked\r\n")
    if close:
        lines.append(b"connection: close\r\n")
    lines.append(b"\r\n")
    return b"".join(lines)


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
