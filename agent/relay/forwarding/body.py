"""A request body with what was read of it, and the bytes that each target is sent."""

from collections.abc import Callable

from agent.relay.dialects import spans
from agent.relay.dialects.facts import BodyFault, Facts
from agent.relay.dialects.large import Large
from agent.relay.dialects.walk import Span
from router_core import limits
from router_core.record.state import Dialect

_MARK = b"\xef\xbb\xbf"

ReadFacts = Callable[[Dialect, bytes | bytearray], Facts | BodyFault]


_LIGHT = 8 * limits.KIB


def is_heavy(body: bytes | bytearray) -> bool:
    """True for a body that is too large to be read on the loop, or holds too many members or elements."""
    size = len(body)
    if size <= _LIGHT:
        return False
    return size > limits.BODY_INLINE or body.count(b",") > limits.BODY_INLINE_COMMAS


class Parcel:
    """One body. It is sent as it came unless the model's name must change or a ``pairmesh`` member is cut."""

    __slots__ = ("_mark", "_member", "_model_at", "body", "facts")

    def __init__(self, body: bytes | bytearray, facts: Facts, mark: bytes = b"") -> None:
        self.body = body
        self.facts = facts
        self._mark = mark
        self._model_at: Span | None = None
        self._member: Span | None = None

    @classmethod
    def of(cls, body: bytes | bytearray, read: Large) -> "Parcel":
        """A large body, as it was read off the loop."""
        parcel = cls(body, read.facts)
        parcel._model_at, parcel._member = read.model_at, read.member_at
        return parcel

    @classmethod
    def read(cls, facts_of: ReadFacts, dialect: Dialect, body: bytes | bytearray) -> "Parcel | BodyFault":
        """Read a ``body`` that is not heavy; a fault if it is ours to refuse. A byte order mark before it is the engine's
        to judge."""
        mark = body[:3] if body[:3] == _MARK else b""
        if mark:
            body = body[3:]
        facts = facts_of(dialect, body)
        if isinstance(facts, BodyFault):
            return facts
        parcel = cls(body, facts, bytes(mark))
        if facts.hints is not None or spans.suspicious(body, facts.model_key):
            fault = parcel._locate()
            if fault is not None:
                return fault
        return parcel

    def as_model(self, name: str) -> bytes | bytearray:
        """The body for a target that calls the model ``name``."""
        renamed = name if name != self.facts.model else None
        if renamed is None and self._member is None:
            return self._mark + self.body if self._mark else self.body
        if self._model_at is None:
            self._locate()
        assert self._model_at is not None
        told = spans.rewrite(self.body, self._model_at, self._member, renamed)
        return self._mark + told if self._mark else told

    def drop(self) -> None:
        """The body will not be sent again."""
        self.body = b""

    def _locate(self) -> BodyFault | None:
        found = spans.find(self.body, self.facts.model_key)
        if isinstance(found, BodyFault):
            return found
        self._model_at, self._member = found
        return None
