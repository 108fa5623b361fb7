"""A walk over a JSON text of any size in short steps: where members and elements lie, never what they say.

Every function here is a generator that looks at no more than 64 KiB at a time in one native call, and yields ``None``
about as often, so that whoever drives it can stop, or let others go first. What is nested is skipped by counting
brackets outside of strings, whatever its depth: nothing recurses and nothing is built. Rules: of valid JSON every key
of the walked level is found; a text that is not JSON may pass where the difference lies deeper than that level.
"""

import re
from array import array
from collections.abc import Generator, Iterator
from itertools import accumulate, islice
from typing import Final

import msgspec
from msgspec import Struct

from router_core import limits

SLICE: Final = 64 * limits.KIB
BOM: Final = b"\xef\xbb\xbf"
"""May stand before a JSON text; engines decide whether they take it."""

_FIRST_SLICE: Final = 256
_KEY_MOST: Final = 1_024
"""Bytes; a longer key is none that anybody asks for, even if each of its letters is escaped."""

_OPEN, _SHUT = 1, 255
_PAIR: Final = bytes((_OPEN, _SHUT))
_COLLAPSES = 3
"""How often neighbouring pairs of brackets are taken out before a piece is looked at bracket by bracket."""
_EXACT: Final = 1_024
"""Bytes that are looked at bracket by bracket."""
_PAUSE: Final = 128
"""Members or elements between two steps."""
_OBJECT, _LIST, _TEXT, _COMMA, _COLON, _END = b"{"[0], b"["[0], b'"'[0], b","[0], b":"[0], b"}"[0]
_BRACKET = re.compile(rb"[{}\[\]]")
_SPACE = re.compile(rb"[ \t\r\n]*+")
_SCALAR = re.compile(rb"[-+.0-9A-Za-z]*+")
_FLAT = re.compile(rb'[\[{](?:[-+.,: \t\r\n0-9A-Za-z]++|"[^"\\]*+")*+[\]}]')
"""A short object or list in which nothing is nested."""
_STEPS: Final = bytes(_OPEN if byte in b"{[" else _SHUT if byte in b"}]" else 0 for byte in range(256))
_NO_BRACKETS: Final = bytes(byte for byte in range(256) if byte not in b"{}[]")
_OUTSIDE: Final = b"{}[],: \t\r\n-+.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""What may stand outside of strings; words are left to the reader of the value."""

Span = tuple[int, int]
Text = bytes | bytearray


class Broken(Exception):
    """The text is no JSON, or too deep, at byte ``at``."""

    def __init__(self, at: int) -> None:
        super().__init__(f"at byte {at}")
        self.at = at


class JsonMember(Struct, frozen=True, gc=False):
    """One member of an object: its key (empty if longer than any that matters), the span of its value, where the member
    begins and where what follows it (a comma, or the end of the object) stands."""

    key: bytes
    value: Span
    starts: int
    follows: int


def members(text: Text, at: int) -> Generator[JsonMember | None, None, int]:
    """The members of the object that opens at ``at``, in order; returns where it ends. Raises ``Broken``."""
    count = 0
    at = yield from _white(text, at + 1)
    if _byte(text, at) == _END:
        return at + 1
    while True:
        starts = at
        if _byte(text, at) != _TEXT:
            raise Broken(at)
        at = yield from _string(text, at)
        key = _plain(text, starts, at)
        at = yield from _white(text, at)
        if _byte(text, at) != _COLON:
            raise Broken(at)
        opens = yield from _white(text, at + 1)
        shuts = yield from _value(text, opens)
        at = yield from _white(text, shuts)
        yield JsonMember(key, (opens, shuts), starts, at)
        follows = _byte(text, at)
        if follows == _END:
            return at + 1
        if follows != _COMMA:
            raise Broken(at)
        at = yield from _white(text, at + 1)
        count += 1
        if not count % _PAUSE:
            yield None


def elements(text: Text, at: int) -> Generator[Span | None, None, int]:
    """The spans of the elements of the list that opens at ``at``; returns where it ends. Raises ``Broken``."""
    count = 0
    at = yield from _white(text, at + 1)
    if _byte(text, at) == 0x5D:
        return at + 1
    while True:
        shuts = yield from _value(text, at)
        yield at, shuts
        at = yield from _white(text, shuts)
        follows = _byte(text, at)
        if follows == 0x5D:
            return at + 1
        if follows != _COMMA:
            raise Broken(at)
        at = yield from _white(text, at + 1)
        count += 1
        if not count % _PAUSE:
            yield None


def top(text: Text) -> Generator[JsonMember | None, None, None]:
    """The members of the one object that ``text`` is. Raises ``Broken``."""
    at = yield from _white(text, len(BOM) if text.startswith(BOM) else 0)
    if _byte(text, at) != _OBJECT:
        raise Broken(at)
    at = yield from members(text, at)
    at = yield from _white(text, at)
    if at < len(text):
        raise Broken(at)


def found(walk: Iterator[JsonMember | None]) -> list[JsonMember]:
    """All members of a walk, taken in one go."""
    return [member for member in walk if member is not None]


def _byte(text: Text, at: int) -> int:
    """The byte at ``at``, -1 behind the end."""
    return text[at] if at < len(text) else -1


def _white(text: Text, at: int) -> Generator[None, None, int]:
    """Where what is not white space begins."""
    while True:
        space = _SPACE.match(text, at, at + SLICE)
        assert space is not None
        end = space.end()
        if end - at < SLICE:
            return end
        at = end
        yield None


def _value(text: Text, at: int) -> Generator[None, None, int]:
    """Where the value that begins at ``at`` ends."""
    first = _byte(text, at)
    if first == _TEXT:
        return (yield from _string(text, at))
    if first in (_OBJECT, _LIST):
        flat = _FLAT.match(text, at, at + _FIRST_SLICE)
        if flat is not None:
            return flat.end()
        return (yield from _nested(text, at))
    end = at
    while True:
        scalar = _SCALAR.match(text, end, end + SLICE)
        assert scalar is not None
        end, before = scalar.end(), end
        if end - before < SLICE:
            break
        yield None
    if end == at:
        raise Broken(at)
    return end


def _string(text: Text, at: int) -> Generator[None, None, int]:
    """Where the string whose quote stands at ``at`` ends."""
    at += 1
    size = _FIRST_SLICE
    while True:
        end = text.find(b'"', at, at + size)
        if text.find(b"\\", at, at + size if end < 0 else end) >= 0:
            piece = _unescaped(text, at, size)
            end = piece.find(b'"')
            end, step = (at + end if end >= 0 else -1), len(piece)
        else:
            step = min(size, len(text) - at)
        if end >= 0:
            return end + 1
        if step <= 0:
            raise Broken(len(text))
        at += step
        size = min(size * 4, SLICE)
        yield None


def _nested(text: Text, at: int) -> Generator[None, None, int]:
    """Where the object or list that opens at ``at`` ends."""
    at, depth, quoted, size = at + 1, 1, 0, _FIRST_SLICE
    while True:
        piece = _unescaped(text, at, size)
        if not piece:
            raise Broken(len(text))
        parts = piece.split(b'"')
        outside = b"".join(parts[quoted::2])
        if outside.translate(None, _OUTSIDE):
            raise Broken(at)
        steps = outside.translate(_STEPS, _NO_BRACKETS)
        left = steps
        for _ in range(_COLLAPSES):
            left = left.replace(_PAIR, b"")
        shut = left.count(_SHUT)
        opened = len(left) - shut
        if shut >= depth or depth + opened + _COLLAPSES > limits.JSON_DEPTH:
            levels = list(accumulate(array("b", left), initial=depth))
            if 0 in levels or max(levels) + _COLLAPSES > limits.JSON_DEPTH:
                if size > _EXACT:
                    size //= 4
                    continue
                levels = list(accumulate(array("b", steps), initial=depth))
                ends = levels.index(0) if 0 in levels else None
                if max(levels[:ends]) > limits.JSON_DEPTH:
                    raise Broken(at)
                if ends:
                    return at + _bracket(parts, quoted, ends) + 1
        depth += opened - shut
        quoted ^= (len(parts) - 1) & 1
        at += len(piece)
        size = min(size * 4, SLICE)
        yield None


def _bracket(parts: list[bytes], quoted: int, number: int) -> int:
    """Where in a piece, cut into ``parts`` at its quotes, the bracket with this number (from 1) stands."""
    at = len(parts[0]) + 1 if quoted else 0
    for index in range(quoted, len(parts), 2):
        part = parts[index]
        count = len(part.translate(None, _NO_BRACKETS))
        if number <= count:
            return at + next(islice(_BRACKET.finditer(part), number - 1, None)).start()
        number -= count
        at += len(part) + 1 + (len(parts[index + 1]) + 1 if index + 1 < len(parts) else 0)
    raise AssertionError("it was counted")


def _unescaped(text: Text, at: int, size: int) -> bytes:
    """The next bytes, each escape of a quote or backslash put out of sight; never cut within one. Empty at the end."""
    piece = bytes(memoryview(text)[at : at + size])
    if b"\\" in piece:
        piece = piece.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        if piece.endswith(b"\\"):
            return piece[:-1]
    return piece


def _plain(text: Text, starts: int, ends: int) -> bytes:
    """The key between two quotes as it reads."""
    if ends - starts > _KEY_MOST:
        return b""
    quoted = bytes(text[starts:ends])
    if b"\\" not in quoted:
        return quoted[1:-1]
    try:
        return msgspec.json.decode(quoted, type=str).encode("utf-8", "surrogatepass")
    except msgspec.MsgspecError:
        raise Broken(starts) from None
