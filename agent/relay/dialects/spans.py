"""The at most two spans of a body that the relay may change: the ``model`` value and the ``pairmesh`` member.

All other bytes stay as they are. Refuses to know what the values mean.
"""

import re
from collections.abc import Iterable

import msgspec

from agent.relay.dialects import walk
from agent.relay.dialects.facts import BodyFault
from agent.relay.dialects.walk import Broken, JsonMember, Span, Text
from router_core import limits

_ESCAPED_LETTER = re.compile(rb"\\u00[46]")
"""Every letter of "model" and "name", small or capital, escapes to this, so a second spelling of the key cannot hide."""

_ANY_CASE = {
    b"model": re.compile(rb'"[mM][oO][dD][eE][lL]"'),
    b"name": re.compile(rb'"[nN][aA][mM][eE]"'),
}


def suspicious(body: Text, key: bytes = b"model") -> bool:
    """True if the top level may hold ``key`` other than exactly once, in whatever letter case or spelling."""
    return len(_ANY_CASE[key].findall(body)) != 1 or _ESCAPED_LETTER.search(body) is not None


def find(body: Text, model_key: bytes = b"model") -> tuple[Span, Span | None] | BodyFault:
    """The two spans of a body that is small enough to be walked in one go."""
    told: list[JsonMember] = []
    try:
        for member in walk.top(body):
            if member is not None:
                told.append(member)
                if len(told) > limits.BODY_KEYS:
                    return BodyFault.BAD_REQUEST
    except Broken:
        return BodyFault.BAD_REQUEST
    return among(body, told, model_key)


def among(body: Text, told: Iterable[JsonMember], model_key: bytes) -> tuple[Span, Span | None] | BodyFault:
    """The span of the model's name (the value of ``model_key``) and of the ``pairmesh`` member with one adjoining
    comma, among the members of the top level.

    A fault if either key stands twice at the top level, or the model's not at all. A second spelling of the model's
    key in another letter case counts, too: engines written in Go take the last of them, whatever its case.
    """
    model: Span | None = None
    member: Span | None = None
    comma_at: int | None = None
    for each in told:
        key = each.key
        if key == model_key:
            if model is not None:
                return BodyFault.DUPLICATE_KEY
            model = each.value
        elif key == b"pairmesh":
            if member is not None:
                return BodyFault.DUPLICATE_KEY
            if body[each.follows] == _COMMA:
                member = each.starts, each.follows + 1
            else:
                member = each.starts if comma_at is None else comma_at, each.follows
        elif key.lower() == model_key:
            return BodyFault.DUPLICATE_KEY
        comma_at = each.follows
    return BodyFault.MODEL_MISSING if model is None else (model, member)


def rewrite(body: Text, model_at: Span, member_at: Span | None, model: str | None) -> bytes:
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


_COMMA = b","[0]
