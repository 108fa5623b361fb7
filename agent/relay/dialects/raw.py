"""Sizes and small values out of raw JSON: text is measured and never built, an odd value reads as not told."""

from collections.abc import Callable
from typing import TypeVar

import msgspec
from msgspec import Raw, Struct

NONE = Raw()
"""A member that is not there."""

TOKENS_MOST = 10**9
OFF = (b"", b"null", b"false", b"[]", b"{}", b"0")
"""Values that ask for nothing."""

_T = TypeVar("_T")
SURE_FROM = 2_048
_NUMBERS = b"0123456789-, \n\r\t"
TOKEN_BYTES = 16
_RUNS = b" -=_*#.~+|"
"""Characters of which one token may stand for a long run."""
_TEXT, _LIST, _NULL = 0x22, 0x5B, 0x6E


def decoder(kind: type[_T]) -> Callable[[Raw], _T | None]:
    """A reader of one type; None for what is absent or of another type."""
    decode = msgspec.json.Decoder(kind).decode

    def read(raw: Raw) -> _T | None:
        if raw is NONE:
            return None
        try:
            return decode(raw)
        except (msgspec.MsgspecError, RecursionError):
            return None

    return read


text = decoder(str)
items = decoder(list[Raw])
_int = decoder(int)


def whole(raw: Raw, most: int = TOKENS_MOST) -> int | None:
    """A whole number from 1 to ``most``, else None."""
    value = _int(raw)
    return value if value is not None and 1 <= value <= most else None


def size_of(raw: Raw) -> int:
    """Bytes between the quotes of a JSON string, of the whole value for anything else, 0 if absent or null."""
    view = memoryview(raw)
    length = len(view)
    first = view[0] if length else _NULL
    if first == _TEXT:
        return length - 2
    return 0 if first == _NULL else length


def opening(raw: Raw) -> int | None:
    """The first byte of a value."""
    view = memoryview(raw)
    return view[0] if len(view) else None


def is_list(raw: Raw) -> bool:
    """Whether the value is a JSON array."""
    view = memoryview(raw)
    return len(view) > 0 and view[0] == _LIST


class Inputs(Struct, frozen=True, gc=False, kw_only=True):
    """What is given to be completed or embedded, whole and of the longest item. ``items`` is None where it is neither
    text nor token numbers nor a list of these."""

    text_bytes: int
    tokens: int = 0
    items: int | None = None
    longest_bytes: int = 0
    longest_tokens: int = 0
    sure: int = 0


def inputs_of(raw: Raw) -> Inputs:
    """One text, a list of them, token numbers, or a list of such lists. Each item has to fit alone."""
    found = items(raw)
    if found is None:
        size = size_of(raw)
        if text(raw) is None:
            return Inputs(text_bytes=size, longest_bytes=size)
        return Inputs(text_bytes=size, items=1, longest_bytes=size, sure=sure_of(raw))
    if found and opening(found[0]) not in (_TEXT, _LIST):
        return _of([raw])
    return _of(found)


def _of(given: list[Raw]) -> Inputs:
    size = tokens = most = most_tokens = sure = 0
    for item in given:
        numbers = numbers_in(bytes(item)) if is_list(item) else 0
        if numbers:
            tokens += numbers
            most_tokens = max(most_tokens, numbers)
            continue
        length = size_of(item)
        size += length
        if length > most:
            most = length
            sure = max(sure, sure_of(item))
    return Inputs(
        text_bytes=size,
        tokens=tokens,
        items=len(given),
        longest_bytes=most,
        longest_tokens=most_tokens,
        sure=max(sure, most_tokens),
    )


def sure_of(raw: Raw) -> int:
    """Tokens that a text has for certain: no vocabulary's tokens are longer in the mean, once what they have long runs of
    is left out and an escape of JSON counts as one byte; 0 for what is no text, and for one so short that any context
    holds it."""
    view = memoryview(raw)
    if len(view) < SURE_FROM or view[0] != _TEXT:
        return 0
    return sure_tokens(dense(view[1:-1].tobytes()))


def dense(text: bytes) -> int:
    """Bytes of a piece of text as it stands in JSON that no long run and no escape is made of, less four for an escape."""
    return len(text.translate(None, _RUNS)) - 5 * text.count(b"\\")


def sure_tokens(dense_bytes: int) -> int:
    """Tokens that text of so many dense bytes has for certain."""
    return max(0, -(-dense_bytes // TOKEN_BYTES))


def is_numbers(piece: bytes) -> bool:
    """True if nothing but whole numbers stands in a piece of the inside of a JSON list."""
    return not piece.translate(None, _NUMBERS)


def numbers_in(list_: bytes) -> int:
    """How many whole numbers a JSON list has; 0 if it has anything else."""
    inside = list_[1:-1]
    return inside.count(b",") + 1 if is_numbers(inside) and inside.strip() else 0
