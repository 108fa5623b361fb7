"""The smuggling corpus: requests that two parsers might read differently, and what has to become of each.

``HOST`` stands for a listener's own ``Host`` line, ``TYPE`` for the content type and whatever else the listener asks
of a head. A case is ``served`` (exactly one request reaches the upstream, with ``BODY``) or not at all.
"""

from msgspec import Struct

from router_core import limits
from tests.agent.relay.client import BODY

LINE = b"POST /v1/chat/completions HTTP/1.1\r\n"
HOST = b"@host\r\n"
TYPE = b"@type\r\n"
JSON = b"Content-Type: application/json\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
assert len(BODY) == 60, "lengths in the cases below are spelled out"
TE = b"Transfer-Encoding: chunked\r\n"
LAST = b"0\r\n\r\n"
CHUNK = b"%x\r\n%s\r\n" % (len(BODY), BODY)
CHUNKED = CHUNK + LAST
HIDDEN = b"POST /v1/completions HTTP/1.1\r\n" + HOST + TYPE + LENGTH + b"\r\n" + BODY
"""A whole request where only the wrong reading of what stands before it finds a request."""


class Case(Struct, frozen=True, kw_only=True):
    """``status`` is the reply's on both listeners, ``ingress`` where the ingress answers otherwise; None for no reply
    until the client gives up. ``close``: nothing behind it is read as a request."""

    raw: bytes
    status: int | None
    served: bool = False
    close: bool = True
    ingress: int | None = None


def at_api(raw: bytes, port: int) -> bytes:
    """``raw`` as a client of the API at ``port`` sends it."""
    return raw.replace(HOST, b"Host: 127.0.0.1:%d\r\n" % port).replace(TYPE, JSON)


def head(*fields: bytes, line: bytes = LINE, body: bytes = b"") -> bytes:
    """A head with the listener's own lines first."""
    return line + HOST + TYPE + b"".join(fields) + b"\r\n" + body


def bad(*fields: bytes, line: bytes = LINE, body: bytes = BODY, status: int = 400) -> Case:
    return Case(raw=head(*fields, line=line, body=body), status=status)


def chunks(body: bytes, *fields: bytes) -> Case:
    return bad(TE, *fields, body=body)


def good(*fields: bytes, line: bytes = LINE, body: bytes = BODY, close: bool = False) -> Case:
    return Case(raw=head(*fields, line=line, body=body), status=200, served=True, close=close)


def got(target: bytes, status: int = 400, ingress: int | None = None, *, close: bool = True) -> Case:
    raw = b"GET %s HTTP/1.1\r\n" % target + HOST + b"\r\n"
    return Case(raw=raw, status=status, ingress=ingress, close=close)


REFUSED: dict[str, Case] = {
    # Two framings, or one that can be read in two ways.
    "length and coding": bad(LENGTH, TE, body=CHUNKED),
    "coding and length": bad(TE, LENGTH, body=CHUNKED),
    "coding ends before the length does": bad(TE, b"Content-Length: 200\r\n", body=LAST + HIDDEN),
    "length ends before the coding does": bad(b"Content-Length: 5\r\n", TE, body=LAST + HIDDEN),
    "two equal lengths": bad(LENGTH, LENGTH),
    "two lengths": bad(LENGTH, b"Content-Length: 1\r\n"),
    "a list of lengths": bad(b"Content-Length: 60, 60\r\n"),
    "signed length": bad(b"Content-Length: +60\r\n"),
    "negative length": bad(b"Content-Length: -5\r\n"),
    "hex length": bad(b"Content-Length: 0x3c\r\n"),
    "length with a fraction": bad(b"Content-Length: 60.0\r\n"),
    "length with an underscore": bad(b"Content-Length: 6_0\r\n"),
    "length with a space": bad(b"Content-Length: 6 0\r\n"),
    "length with a parameter": bad(b"Content-Length: 60;x\r\n"),
    "length in other digits": bad(b"Content-Length: \xd9\xa6\xd9\xa0\r\n"),
    "tabs around the length": bad(b"Content-Length: \t60\t\r\n"),
    "white space behind the length": bad(b"Content-Length: 60 \r\n"),
    "empty length": bad(b"Content-Length: \r\n"),
    "endless length": bad(b"Content-Length: 99999999999999999999\r\n"),
    "chunked, identity": bad(b"Transfer-Encoding: chunked, identity\r\n", body=CHUNKED),
    "identity, chunked": bad(b"Transfer-Encoding: identity, chunked\r\n", body=CHUNKED),
    "gzip, chunked": bad(b"Transfer-Encoding: gzip, chunked\r\n", body=CHUNKED),
    "chunked, chunked": bad(b"Transfer-Encoding: chunked, chunked\r\n", body=CHUNKED),
    "two codings": bad(TE, TE, body=CHUNKED),
    "identity": bad(b"Transfer-Encoding: identity\r\n", LENGTH),
    "empty coding": bad(b"Transfer-Encoding: \r\n", LENGTH),
    "xchunked": bad(b"Transfer-Encoding: xchunked\r\n", body=CHUNKED),
    "quoted coding": bad(b'Transfer-Encoding: "chunked"\r\n', body=CHUNKED),
    "coding behind a vertical tab": bad(b"Transfer-Encoding:\x0bchunked\r\n", body=CHUNKED),
    "coding with a parameter": bad(b"Transfer-Encoding: chunked;q=1\r\n", body=CHUNKED),
    "coding on HTTP/1.0": bad(TE, line=LINE.replace(b"1.1", b"1.0"), body=CHUNKED),
    # Lines.
    "folded header": bad(b"X-A: b\r\n c\r\n", LENGTH),
    "folded length": bad(b"Content-Length:\r\n 60\r\n"),
    "folded coding": bad(b"Transfer-Encoding:\r\n\tchunked\r\n", body=CHUNKED),
    "bare LF in the head": bad(b"X-A: b\n", LENGTH),
    "bare LF line ends": Case(raw=head(LENGTH).replace(b"\r\n", b"\n") + BODY, status=400),
    "bare LF ends the head": Case(raw=head(LENGTH)[:-2] + b"\n" + BODY, status=400),
    "bare CR": bad(b"X-A: b\rX-B: c\r\n", LENGTH),
    "CR before CRLF": bad(b"X-A: b\r\r\n", LENGTH),
    "space before the colon": bad(b"Content-Length : 60\r\n"),
    "tab before the colon": bad(b"Transfer-Encoding\t: chunked\r\n", LENGTH),
    "space before a name": bad(b" X-A: b\r\n", LENGTH),
    "no colon": bad(b"X-A\r\n", LENGTH),
    "no name": bad(b": b\r\n", LENGTH),
    "NUL in a value": bad(b"X-A: a\x00b\r\n", LENGTH),
    "NUL in a name": bad(b"X\x00A: b\r\n", LENGTH),
    "DEL in a value": bad(b"X-A: a\x7fb\r\n", LENGTH),
    "quote in a name": bad(b'"X-A": b\r\n', LENGTH),
    "high byte in a name": bad(b"X-\xc3\xa4: b\r\n", LENGTH),
    # Chunks.
    "chunk size overflow": chunks(b"1" + b"0" * 17 + b"\r\n"),
    "chunk size wraps to the right one": chunks(b"1%016x\r\n" % len(BODY) + BODY + b"\r\n" + LAST),
    "chunk size junk": chunks(b"3cx\r\n" + BODY + b"\r\n" + LAST),
    "chunk size with 0x": chunks(b"0x3c\r\n" + BODY + b"\r\n" + LAST),
    "chunk size with a sign": chunks(b"+3c\r\n" + BODY + b"\r\n" + LAST),
    "negative chunk size": chunks(b"-3c\r\n" + BODY + b"\r\n" + LAST),
    "chunk size with a space": chunks(b"3c \r\n" + BODY + b"\r\n" + LAST),
    "space before the chunk size": chunks(b" 3c\r\n" + BODY + b"\r\n" + LAST),
    "no chunk size": chunks(b"\r\n" + BODY + b"\r\n" + LAST),
    "chunk size ended by LF": chunks(b"3c\n" + BODY + b"\r\n" + LAST),
    "chunk ended by LF": chunks(b"3c\r\n" + BODY + b"\n" + LAST),
    "chunk longer than told": chunks(b"2\r\n" + BODY + b"\r\n" + LAST),
    "LF in a chunk extension": chunks(b"3c;a\nb\r\n" + BODY + b"\r\n" + LAST),
    "CR in a chunk extension": chunks(b"3c;a\rb\r\n" + BODY + b"\r\n" + LAST),
    "trailer without a colon": chunks(CHUNK + b"0\r\nX-A\r\n\r\n"),
    "trailer with a space before its colon": chunks(CHUNK + b"0\r\nX-A : b\r\n\r\n"),
    "folded trailer": chunks(CHUNK + b"0\r\nX-A: b\r\n c\r\n\r\n"),
    "a length in the trailers": chunks(CHUNK + b"0\r\nContent-Length: 5\r\n\r\n"),
    "a coding in the trailers": chunks(CHUNK + b"0\r\nTransfer-Encoding: chunked\r\n\r\n" + LAST),
    "no last chunk": Case(raw=head(TE, body=CHUNK), status=None),
    "no end of the trailers": Case(raw=head(TE, body=CHUNK + b"0\r\n"), status=None),
    "body shorter than told": Case(raw=head(LENGTH, body=BODY[:-1]), status=None),
    # Without a framing there is no body: what stands there is another message, and none.
    "no framing": Case(raw=head(body=BODY), status=400, close=False),
    "length zero": Case(raw=head(b"Content-Length: 0\r\n", body=BODY), status=400, close=False),
    # Request lines.
    "absolute form": bad(LENGTH, line=b"POST http://127.0.0.1/v1/chat/completions HTTP/1.1\r\n"),
    "authority form": Case(raw=b"CONNECT 127.0.0.1:80 HTTP/1.1\r\n" + HOST + b"\r\n", status=400),
    "CONNECT with a path": bad(LENGTH, line=b"CONNECT /v1/chat/completions HTTP/1.1\r\n"),
    "asterisk form": Case(raw=b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n", status=400),
    "fragment": bad(LENGTH, line=b"POST /v1/chat/completions#x HTTP/1.1\r\n"),
    "space in the target": bad(LENGTH, line=b"POST /v1/chat/completions x HTTP/1.1\r\n"),
    "two spaces before the target": bad(LENGTH, line=LINE.replace(b"POST ", b"POST  ")),
    "two spaces before the version": bad(LENGTH, line=LINE.replace(b" HTTP", b"  HTTP")),
    "NUL in the target": bad(LENGTH, line=b"POST /v1/chat/completions\x00 HTTP/1.1\r\n"),
    "high byte in the target": bad(LENGTH, line=b"POST /v1/chat/completions\xff HTTP/1.1\r\n"),
    "tab for a space": bad(LENGTH, line=b"POST\t/v1/chat/completions HTTP/1.1\r\n"),
    "space before the method": bad(LENGTH, line=b" " + LINE),
    "method in lower case": bad(LENGTH, line=LINE.replace(b"POST", b"post")),
    "unknown method": Case(raw=b"FROB / HTTP/1.1\r\n" + HOST + b"\r\n", status=400),
    "HTTP/0.9": Case(raw=b"GET /\r\n\r\n", status=400),
    "HTTP/0.9 by name": Case(raw=b"GET / HTTP/0.9\r\n" + HOST + b"\r\n", status=400),
    "HTTP/1.2": bad(LENGTH, line=LINE.replace(b"1.1", b"1.2")),
    "HTTP/2.0": Case(raw=b"GET / HTTP/2.0\r\n" + HOST + b"\r\n", status=400),
    "HTTP/2 preface": Case(raw=b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", status=400),
    "version in lower case": bad(LENGTH, line=LINE.replace(b"HTTP", b"http")),
    "version without a dot": bad(LENGTH, line=LINE.replace(b"1.1", b"11")),
    "space behind the version": bad(LENGTH, line=LINE.replace(b"\r\n", b" \r\n")),
    "TLS": Case(raw=b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", status=400),
    "dot segments": got(b"/v1/../health"),
    "encoded dot segments": got(b"/v1/%2e%2e/health", 404, close=False),
    "double slash": got(b"//health"),
    "encoded slash": got(b"/v1%2Fmodels"),
    "encoded backslash": got(b"/v1%5cmodels"),
    "encoded NUL": got(b"/v1/models/a%00"),
    # Hosts, upgrades, expectations, limits, other methods.
    "two hosts": Case(raw=LINE + HOST + HOST + TYPE + LENGTH + b"\r\n" + BODY, status=400),
    "two different hosts": Case(
        raw=LINE + HOST + b"Host: evil.example\r\n" + TYPE + LENGTH + b"\r\n" + BODY, status=400
    ),
    "no host": Case(raw=LINE + TYPE + LENGTH + b"\r\n" + BODY, status=400),
    "empty host": Case(raw=LINE + b"Host: \r\n" + TYPE + LENGTH + b"\r\n" + BODY, status=400),
    "upgrade to a web socket": bad(b"Connection: Upgrade\r\nUpgrade: websocket\r\n", LENGTH),
    "upgrade without nomination": bad(b"Upgrade: foo\r\n", LENGTH),
    "upgrade to two": bad(b"Connection: Upgrade\r\nUpgrade: h2c, websocket\r\n", LENGTH),
    "two upgrades": bad(b"Connection: Upgrade\r\nUpgrade: h2c\r\nUpgrade: h2c\r\n", LENGTH),
    "other expectation": bad(LENGTH, b"Expect: 200-ok\r\n", status=417),
    "expectation and another": bad(LENGTH, b"Expect: 100-continue, gzip\r\n", status=417),
    "empty expectation": bad(LENGTH, b"Expect: \r\n", status=417),
    "two expectations": bad(LENGTH, b"Expect: 100-continue\r\nExpect: 100-continue\r\n"),
    "too many headers": bad(LENGTH, b"X-A: b\r\n" * limits.REQUEST_HEADERS, status=431),
    "too much head": bad(LENGTH, b"X-A: " + b"b" * limits.REQUEST_HEAD + b"\r\n", status=431),
    "too long a target": bad(
        LENGTH, line=b"POST /%s HTTP/1.1\r\n" % (b"a" * limits.REQUEST_TARGET), status=414
    ),
    "too long a body": bad(b"Content-Length: %d\r\n" % (limits.REQUEST_BODY + 1), body=b"", status=413),
    "two content types": bad(LENGTH, b"Content-Type: text/plain\r\n"),
    "TRACE": Case(raw=head(line=LINE.replace(b"POST", b"TRACE")), status=405, ingress=404, close=False),
    "GET with a body": Case(
        raw=head(LENGTH, line=LINE.replace(b"POST", b"GET"), body=HIDDEN), status=405, ingress=404
    ),
}

SERVED: dict[str, Case] = {
    "by length": good(LENGTH),
    "by chunks": good(TE, body=CHUNKED),
    "two chunks": good(TE, body=b"A\r\n%s\r\n%X\r\n%s\r\n" % (BODY[:10], len(BODY) - 10, BODY[10:]) + LAST),
    "chunk size with zeros": good(TE, body=b"000003C\r\n%s\r\n000\r\n\r\n" % BODY),
    "chunk extensions": good(TE, body=b'3c;a=b;c="d"\r\n%s\r\n0;e\r\n\r\n' % BODY),
    "trailers": good(TE, body=CHUNK + b"0\r\nX-A: b\r\nX-Pairmesh-Prefer: @evil\r\n\r\n"),
    "coding in upper case": good(b"TRANSFER-ENCODING: CHUNKED\r\n", body=CHUNKED),
    "length with zeros": good(b"Content-Length: 00060\r\n"),
    "white space before the length": good(b"Content-Length:   60\r\n"),
    "no white space before the length": good(b"Content-Length:60\r\n"),
    "empty lines before the request": Case(
        raw=b"\r\n\r\n" + head(LENGTH, body=BODY), status=200, served=True, close=False
    ),
    "coding under a like name": good(
        b"Transfer_Encoding: chunked\r\n", b"X-Transfer-Encoding: chunked\r\n", LENGTH
    ),
    "high bytes in a value": good(b"X-A: a\x85Transfer-Encoding: chunked\xa0\r\n", LENGTH),
    "tab in a value": good(b"X-A: a\tb\r\n", LENGTH),
    "nominated length": good(b"Connection: content-length\r\n", LENGTH),
    "nominated coding": good(b"Connection: keep-alive, Transfer-Encoding\r\n", TE, body=CHUNKED),
    "expectation": good(LENGTH, b"Expect: 100-Continue\r\n"),
    "h2c offer": good(
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\n",
        LENGTH,
        close=True,
    ),
    "h2c offer with chunks": good(
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\n",
        TE,
        body=CHUNKED,
        close=True,
    ),
    "HTTP/1.0": good(LENGTH, line=LINE.replace(b"1.1", b"1.0"), close=True),
    "behind close, another": good(b"Connection: close\r\n", LENGTH, body=BODY + HIDDEN, close=True),
    "behind HTTP/1.0, another": good(
        LENGTH, line=LINE.replace(b"1.1", b"1.0"), body=BODY + HIDDEN, close=True
    ),
    "behind an h2c offer, another": good(
        b"Connection: Upgrade\r\nUpgrade: h2c\r\n", LENGTH, body=BODY + HIDDEN, close=True
    ),
    "method told by a header": good(b"X-HTTP-Method-Override: DELETE\r\n", LENGTH),
}

ALL = REFUSED | SERVED
