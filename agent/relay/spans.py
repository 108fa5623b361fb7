"""The at most two spans of a body that the relay may change: the ``model`` value and the ``pairmesh`` member.

One linear scan over the top level of a JSON object that a real parser has already accepted; strings and nested
values are skipped whole. All other bytes stay as they are. Refuses to know what the values mean.
"""

import re

import msgspec

from agent.relay.dialects.facts import BodyFault

_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[{}\[\],:]', re.DOTALL)
_WHITE = b" \t\r\n"
_ESCAPED_LETTER = re.compile(rb"\\u00[46]")
"""Every letter of "model" and "name", small or capital, escapes to this, so a second spelling of the key cannot hide."""

_ANY_CASE = {
    b"model": re.compile(rb'"[mM][oO][dD][eE][lL]"'),
    b"name": re.compile(rb'"[nN][aA][mM][eE]"'),
}

Span = tuple[int, int]


def suspicious(body: bytes | bytearray, key: bytes = b"model") -> bool:
    """True if the top level may hold ``key`` other than exactly once, in whatever letter case or spelling."""
    return len(_ANY_CASE[key].findall(body)) != 1 or _ESCAPED_LETTER.search(body) is not None


def find(body: bytes | bytearray, model_key: bytes = b"model") -> tuple[Span, Span | None] | BodyFault:
    """The span of the model's name (the value of ``model_key``) and of the ``pairmesh`` member with one adjoining
    comma.

    A fault if either key stands twice at the top level, or the model's not at all. A second spelling of the model's
    key in another letter case counts, too: engines written in Go take the last of them, whatever its case.
    """
    model: Span | None = None
    member: Span | None = None
    depth = 0
    key: bytes | None = None
    key_at = value_at = 0
    comma_at: int | None = None
    for token in _TOKEN.finditer(body):
        first = body[token.start()]
        if first in b"{[":
            depth += 1
        elif first in b"}]":
            depth -= 1
        if depth > 1 or (depth == 1 and first in b"{}]["):
            continue
        if first == 0x22:
            if key is None:
                key, key_at = _plain(token.group()), token.start()
        elif first == 0x3A:
            value_at = token.end()
        elif first in b",}":
            if key == model_key:
                if model is not None:
                    return BodyFault.DUPLICATE_KEY
                model = _trim(body, value_at, token.start())
            elif key == b"pairmesh":
                if member is not None:
                    return BodyFault.DUPLICATE_KEY
                if first == 0x2C:
                    member = key_at, token.end()
                else:
                    member = key_at if comma_at is None else comma_at, token.start()
            elif key is not None and key.lower() == model_key:
                return BodyFault.DUPLICATE_KEY
            key = None
            comma_at = token.start()
    return BodyFault.MODEL_MISSING if model is None else (model, member)


def rewrite(body: bytes | bytearray, model_at: Span, member_at: Span | None, model: str | None) -> bytes:
    """``body`` with the member cut out and, unless ``model`` is None, the model's value replaced."""
    changes: list[tuple[Span, bytes]] = []
    if model is not None:
        changes.append((model_at, msgspec.json.encode(model)))
    if member_at is not None:
        changes.append((member_at, b""))
    changes.sort()
    view = memoryview(body)
    parts: list[bytes | memoryview] = []
    done = 0
    for (start, end), new in changes:
        parts += (view[done:start], new)
        done = end
    parts.append(view[done:])
    return b"".join(parts)


def _plain(quoted: bytes) -> bytes:
    if b"\\" not in quoted:
        return quoted[1:-1]
    return msgspec.json.decode(quoted, type=str).encode("utf-8", "surrogatepass")


def _trim(body: bytes | bytearray, start: int, end: int) -> Span:
    while start < end and body[start] in _WHITE:
        start += 1
    while end > start and body[end - 1] in _WHITE:
        end -= 1
    return start, end
