"""The last head of a connection: whoever keeps one open sends the same head again, but for the length of the body.

Owns: knowing such a head again from its bytes, without parsing it. Rules: what is recalled is what parsing would have
given, since all bytes are the same but the digits of the one ``Content-Length``, and those are checked as intake does;
one head is kept, and none longer than ``MOST``. Refuses to know what a head says.
"""

import re
from typing import Final, Generic, TypeVar

MOST: Final = 4_096
DIGITS: Final = 18
"""The longest length that is read as one."""

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,%d})\r\n" % DIGITS, re.IGNORECASE)

HeadT = TypeVar("HeadT")


class Repeats(Generic[HeadT]):
    """Of one connection, in one direction."""

    __slots__ = ("_after", "_before", "_head")

    def __init__(self) -> None:
        self._before = self._after = b""
        self._head: HeadT | None = None

    def remember(self, raw: bytes, head: HeadT) -> None:
        """``raw`` was accepted, ends with its blank line and tells one length, which ``head`` does not depend on."""
        told = _LENGTH.search(raw) if len(raw) <= MOST else None
        if told is not None:
            self._before, self._after, self._head = raw[: told.start(1)], raw[told.end(1) :], head

    def recall(self, data: bytes) -> tuple[HeadT, int, int] | None:
        """The head that ``data`` begins with, the length it tells and where it ends; None if it has to be parsed."""
        head, before, after = self._head, self._before, self._after
        if head is None or not data.startswith(before):
            return None
        start = len(before)
        end = data.find(after, start, start + DIGITS + len(after))
        if end < 0:
            return None
        digits = data[start:end]
        return (head, int(digits), end + len(after)) if digits.isdigit() else None
