"""Sizes and small values out of raw JSON: text is measured and never built, an odd value reads as not told."""

from collections.abc import Callable
from typing import TypeVar

import msgspec
from msgspec import Raw

NONE = Raw()
"""A member that is not there."""

TOKENS_MOST = 10**9
OFF = (b"", b"null", b"false", b"[]", b"{}", b"0")
"""Values that ask for nothing."""

_T = TypeVar("_T")
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
    view = memoryview(raw)
    return len(view) > 0 and view[0] == _LIST


def inputs_of(raw: Raw) -> tuple[int, int | None]:
    """Text bytes and number of inputs: one string, a list of them, or token numbers."""
    found = items(raw)
    if found is None:
        return size_of(raw), None if text(raw) is None else 1
    if found and opening(found[0]) not in (_TEXT, _LIST):
        return size_of(raw), 1
    return sum(size_of(item) for item in found), len(found)
