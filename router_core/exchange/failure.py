"""How an attempt can go wrong, and what that means for the request and for the endpoint.

Two closed sets: ``FailureClass`` reads an upstream's *answer* (the engine's adapter classifies it), ``Cause``
names why there was none, or no more of it. ``judge`` is the failover table; it never sees a body.
"""

from enum import Enum


class FailureClass(Enum):
    """What an answer with status >= 400 says. The values are shared by name with the engines' adapters."""

    BUSY = "busy"
    LOADING = "loading"
    ABSENT = "absent"
    TOO_LONG = "too_long"
    LOAD_FAILED = "load_failed"
    AUTH = "auth"
    ROUTE = "route"
    DEAD = "dead"
    OTHER = "other"

    __hash__ = object.__hash__


class Cause(Enum):
    """Why an upstream's answer did not come, or ended early."""

    CONNECT_REFUSED = "connect_refused"
    CONNECT_FAILED = "connect_failed"
    CONNECT_TIMEOUT = "connect_timeout"
    IDENTITY = "identity_mismatch"
    POOL_FULL = "pool_full"
    NO_CONTINUE = "no_continue"
    EOF = "eof"
    RESET = "reset"
    TRUNCATED = "truncated"
    PROTOCOL = "protocol"
    FIRST_BYTE = "first_byte_limit"
    DEADLINE = "deadline"
    SILENT = "silent"
    SUSPECT = "suspect"
    GONE = "gone"
    IDLE = "idle"

    __hash__ = object.__hash__


class Verdict(Enum):
    """What to do with an answer."""

    COMMIT = "commit"
    NEXT = "next"
    NEXT_ONCE = "next_once"


OWN = frozenset({Cause.POOL_FULL, Cause.DEADLINE})
"""Causes that say nothing about the endpoint."""

TIMEOUTS = frozenset({Cause.FIRST_BYTE, Cause.SILENT, Cause.DEADLINE, Cause.IDLE})

_NEXT = frozenset(
    {
        FailureClass.BUSY,
        FailureClass.LOADING,
        FailureClass.ABSENT,
        FailureClass.AUTH,
        FailureClass.ROUTE,
        FailureClass.DEAD,
    }
)
_BLAMELESS = frozenset({FailureClass.BUSY, FailureClass.LOADING, FailureClass.ABSENT, FailureClass.TOO_LONG})


def judge(status: int, failure: FailureClass) -> Verdict:
    """The fate of an answer before commit.

    2xx and 3xx commit, as does a 4xx that is about the request itself. What another endpoint may do better
    goes on to the next one; a server error does so once per request.
    """
    if failure in _NEXT or status in (429, 502, 503, 504, 529):
        return Verdict.NEXT
    if failure is FailureClass.LOAD_FAILED or (status >= 500 and failure is FailureClass.OTHER):
        return Verdict.NEXT_ONCE
    return Verdict.COMMIT


def is_fault(status: int, failure: FailureClass) -> bool:
    """True if the answer counts against the endpoint: a 5xx that is not busy, loading, absent or too long."""
    return failure is FailureClass.DEAD or (status >= 500 and failure not in _BLAMELESS)


def exhausted_code(cause: Cause | None) -> tuple[int, str]:
    """Status and code told to the client when no attempt is left and no upstream gave an answer."""
    if cause in TIMEOUTS:
        return 504, "upstream_timeout"
    if cause is Cause.PROTOCOL:
        return 502, "upstream_protocol"
    return 502, "upstream_unreachable"
