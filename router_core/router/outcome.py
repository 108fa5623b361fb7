"""How one attempt of a request ended."""

from enum import Enum

from msgspec import Struct

from router_core.placement.request.request import Endpoint
from router_core.router.failure import Cause, FailureClass


class Result(Enum):
    """How an attempt ended. ``ANSWERED`` is an error of the upstream that was passed on whole."""

    DONE = "done"
    ANSWERED = "answered"
    FAILED = "failed"
    BROKEN = "broken"
    CANCELLED = "cancelled"
    REFUSED = "refused"

    __hash__ = object.__hash__


SERVED = frozenset({Result.DONE, Result.ANSWERED})
"""The endpoint has given a whole answer."""


class Outcome(Struct, frozen=True, gc=False, kw_only=True):
    """The one end of one attempt. ``fault`` says whether it counts against the endpoint."""

    attempt: int
    endpoint: Endpoint
    result: Result
    cause: Cause | None
    status: int | None
    failure: FailureClass | None
    refusal: str | None
    fault: bool
