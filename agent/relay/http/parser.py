"""Reading a request off the wire: the head through llhttp with every lenient flag off, a chunked body likewise.

Pure parsing: bytes in; a ``Request``, body bytes or a fault code out. The parser is fed exactly up to the blank
line, so a message's end is always known: what follows belongs to the body or to the next request. A reader and its
parser hold each other: a reader that is done lets go, or what it read would stay until the next collection of garbage.
Refuses to know sockets, routes and who is asking.
"""

from typing import Final

import httptools

from agent.relay.http.headers import Headers
from router_core import limits

_CONTROLS: Final = bytes(range(9)) + b"\x0b\x0c" + bytes(range(14, 32)) + b"\x7f"
_ONCE: Final = frozenset(
    {b"host", b"content-length", b"transfer-encoding", b"content-type", b"expect", b"upgrade"}
)
_JUDGED: Final = frozenset(
    {b"via", b"origin", b"referer", b"cookie", b"content-encoding", b"sec-fetch-site", b"sec-fetch-mode"}
)
"""What a listener refuses requests by: nominating it must not hide it."""
_CHUNKED_HEAD: Final = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
_BODY_OVERHEAD: Final = limits.REQUEST_HEAD
"""Framing bytes (chunk heads, extensions, trailers) that a chunked body may spend without body bytes."""


class Head:
    """One request head, checked for hygiene. Header names are lower-case bytes.

    ``single`` has the first value of each name as it came; ``headers``, and first values in ``named``, lack what
    ``Connection`` nominates. None of them has the body's length, so that requests may share a head. What is made of a
    head whatever the body is kept with it: ``gist`` by the front that it came to, ``passed`` by who passes it on.
    """

    __slots__ = (
        "chunked",
        "close",
        "expects",
        "gist",
        "headers",
        "http11",
        "method",
        "named",
        "passed",
        "path",
        "query",
        "single",
    )

    def __init__(self, method: bytes, path: bytes, query: bytes, headers: Headers) -> None:
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers
        self.single: dict[bytes, bytes] = {}
        self.named = self.single
        self.chunked = False
        self.close = False
        self.expects = False
        self.http11 = True
        self.gist: object = None
        self.passed: bytes | None = None


class Request:
    """One request: its head, the ``length`` its head tells, and whether the connection has to ``close`` after it. Times
    are boot milliseconds."""

    __slots__ = ("accepted_ms", "close", "head", "length")

    def __init__(self, head: Head, length: int) -> None:
        self.head = head
        self.length = length
        self.close = head.close
        self.accepted_ms = 0

    @property
    def has_body(self) -> bool:
        return self.head.chunked or self.length > 0


class HeadReader:
    """Reads one head. ``feed`` until it returns something."""

    __slots__ = ("_complete", "_headers", "_parser", "_raw", "_upgrade", "_url")

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: Headers = []
        self._raw = b""
        self._complete = False
        self._upgrade = False

    @property
    def raw(self) -> bytes:
        """The bytes of the head so far."""
        return self._raw

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._complete = True

    def feed(self, data: bytes) -> tuple[Request | str, int] | None:
        """The request, or a fault code, with the offset in ``data`` where the head ended; None for more."""
        start = 0
        while True:
            before = len(self._raw)
            search = max(0, before - 3)
            self._raw = raw = self._raw + data[start:] if before else data[start:]
            found = raw.find(b"\r\n\r\n", search)
            if found >= 0:
                self._raw = raw = raw[: found + 4]
            if len(raw) > limits.REQUEST_HEAD:
                return self._oversize(), len(data)
            fed = raw[before:]
            try:
                self._parser.feed_data(fed)
            except httptools.HttpParserUpgrade:
                self._upgrade = True
            except httptools.HttpParserError:
                return "bad_request", len(data)
            start += len(fed)
            if self._complete:
                checked = self._checked()
                del self._parser
                return checked, start
            if len(self._url) > limits.REQUEST_TARGET:
                return "target_too_long", len(data)
            if found < 0:
                return None

    def _oversize(self) -> str:
        line = self._raw.find(b"\r\n")
        target_is_it = line < 0 or line > limits.REQUEST_TARGET + 32
        return "target_too_long" if target_is_it else "head_too_large"

    def _checked(self) -> Request | str:
        """The request, or what is wrong with it; the first of: bytes, version, counts, target, framing, expectation."""
        raw = self._raw
        lines = raw.count(b"\r\n")
        if raw.count(b"\n") != lines or raw.count(b"\r") != lines:
            return "bad_request"
        if b"\r\n " in raw or b"\r\n\t" in raw or len(raw.translate(None, _CONTROLS)) != len(raw):
            return "bad_request"
        version = self._parser.get_http_version()
        if version not in ("1.1", "1.0"):
            return "bad_request"
        if len(self._headers) > limits.REQUEST_HEADERS:
            return "head_too_large"
        target, method = self._url, self._parser.get_method()
        if len(target) > limits.REQUEST_TARGET:
            return "target_too_long"
        if target[:1] != b"/" or b"#" in target:
            return "bad_request"
        line = b"%s %s HTTP/%s\r\n" % (method, target, version.encode())
        if not raw.startswith(line) and not raw.lstrip(b"\r\n").startswith(line):
            return "bad_request"
        path, _, query = target.partition(b"?")
        if not _clean_path(path):
            return "bad_request"
        head = Head(method, path, query, self._headers)
        head.http11 = version == "1.1"
        return self._framed(head)

    def _framed(self, head: Head) -> Request | str:
        headers, size = head.headers, 0
        single = head.single = head.named = dict(headers)
        if len(single) < len(headers):
            seen: set[bytes] = set()
            for name, value in reversed(headers):
                if name in _ONCE and name in seen:
                    return "bad_request"
                seen.add(name)
                single[name] = value
        tokens: set[bytes] = set()
        if b"connection" in single:
            for name, value in headers:
                if name == b"connection":
                    tokens.update(token.strip().lower() for token in value.split(b","))
        if not single.get(b"host"):
            return "bad_request"
        coding, length = single.get(b"transfer-encoding"), single.pop(b"content-length", None)
        if coding is not None:
            if length is not None or coding.lower() != b"chunked" or not head.http11:
                return "bad_request"
            head.chunked = True
        elif length is not None:
            if not length.isdigit() or len(length) > 18:
                return "bad_request"
            size = int(length)
            head.headers = headers = [field for field in headers if field[0] != b"content-length"]
        upgrade = single.get(b"upgrade")
        if head.method == b"CONNECT" or (upgrade is not None and upgrade.lower() != b"h2c"):
            return "bad_request"
        expect = single.get(b"expect")
        if expect is not None:
            if expect.lower() != b"100-continue":
                return "expectation"
            head.expects = head.http11
        head.close = not head.http11 or b"close" in tokens or upgrade is not None
        tokens -= _JUDGED
        if not tokens.isdisjoint(single):
            head.headers = [field for field in headers if field[0] not in tokens]
            head.named = {name: value for name, value in single.items() if name not in tokens}
        return Request(head, size)


_MODEL_PATH: Final = b"/v1/models/"


def _clean_path(path: bytes) -> bool:
    if b"%" not in path:
        return b".." not in path and b"//" not in path
    lower = path.lower()
    if path.startswith(_MODEL_PATH):
        lower = lower.replace(b"%2f", b"/")
    return not any(mark in lower for mark in (b"..", b"//", b"%2f", b"%5c", b"%00"))


class BodyReader:
    """Collects one body, by length or by chunks, up to the limit."""

    __slots__ = ("_chunks", "_ended", "_filled", "_growing", "_spent", "body", "length")

    def __init__(self, request: Request) -> None:
        self.length = request.length
        self._filled = 0
        self._ended = False
        self._spent = 0
        self._growing: bytearray | None = None
        self.body: bytes | bytearray = b""
        if request.head.chunked:
            self._growing = bytearray()
            self._chunks = httptools.HttpRequestParser(self)
            self._chunks.feed_data(_CHUNKED_HEAD)

    def on_body(self, data: bytes) -> None:
        assert self._growing is not None
        self._spent = 0
        if len(self._growing) <= limits.REQUEST_BODY:
            self._growing += data

    def on_message_begin(self) -> None:
        if self._ended:
            raise _Surplus

    def on_message_complete(self) -> None:
        self._ended = True

    @property
    def received(self) -> int:
        """Body bytes so far."""
        return self._filled if self._growing is None else len(self._growing)

    def feed(self, data: bytes) -> tuple[bool | str, bytes]:
        """(True when complete, False for more, or a fault code) and what of ``data`` lies behind the body.

        Where a chunked body ended inside ``data`` is not told by the parser: with more behind it the verdict is
        ``surplus``. The body is complete then, but what followed is lost and the connection has to end.
        """
        if self._growing is None:
            return self._fill(data)
        self._spent += len(data)
        try:
            self._chunks.feed_data(data)
        except httptools.HttpParserError:
            if not self._ended:
                return "bad_request", b""
            self.body = self._growing
            del self._chunks
            return "surplus", b""
        if len(self._growing) > limits.REQUEST_BODY:
            return "body_too_large", b""
        if self._ended:
            self.body = self._growing
            del self._chunks
            return True, b""
        if self._spent - len(data) > _BODY_OVERHEAD:
            return "bad_request", b""
        return False, b""

    def _fill(self, data: bytes) -> tuple[bool | str, bytes]:
        """Nothing is set aside for bytes that have not come."""
        length, filled = self.length, self._filled
        if filled == 0 and len(data) >= length:
            self._filled = length
            self.body = data if len(data) == length else data[:length]
            return True, b"" if len(data) == length else data[length:]
        if filled == 0:
            self.body = bytearray()
        assert isinstance(self.body, bytearray)
        take = min(len(data), length - filled)
        self.body += data if take == len(data) else memoryview(data)[:take]
        self._filled = filled + take
        return self._filled == length, data[take:]


class _Surplus(Exception):
    """Another message began behind the one that was read."""
