"""How a request may wait in the queue."""

from msgspec import Struct

from router_core.placement.candidates.candidate import RowKey


class HoldTerms(Struct, frozen=True, gc=False, kw_only=True):
    """How a request may wait for room: since when it does, until when it is held, when it is worth nothing any more
    (boot ms), which rows it waits for, and its service time in seconds on the fastest of them."""

    since_ms: int
    until_ms: int
    deadline_ms: int
    rows: frozenset[RowKey]
    seconds: float
