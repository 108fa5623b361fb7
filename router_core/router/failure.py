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
    PEER_FAULT = "peer_fault"
    INTERNAL = "internal"

    __hash__ = object.__hash__


class Verdict(Enum):
    """What to do with an answer."""

    COMMIT = "commit"
    NEXT = "next"
    NEXT_ONCE = "next_once"


OWN = frozenset({Cause.POOL_FULL, Cause.DEADLINE, Cause.INTERNAL})
"""Causes that say nothing about the endpoint."""

UNBEGUN = frozenset(
    {
        Cause.CONNECT_REFUSED,
        Cause.CONNECT_FAILED,
        Cause.CONNECT_TIMEOUT,
        Cause.IDENTITY,
        Cause.POOL_FULL,
        Cause.NO_CONTINUE,
        Cause.INTERNAL,
    }
)
"""Causes with which no engine can have begun to work on the request."""

TIMEOUTS = frozenset({Cause.FIRST_BYTE, Cause.SILENT, Cause.DEADLINE, Cause.IDLE})

_ELSEWHERE = frozenset({FailureClass.BUSY, FailureClass.LOADING, FailureClass.ABSENT, FailureClass.ROUTE})
"""The endpoint declines what another one may take."""
_NEXT = _ELSEWHERE | {FailureClass.DEAD}
_FULL = (429, 503, 529)
_NOT_HERE = (*_FULL, 502, 504)
_NO_ERROR_OF_ITS_OWN = _ELSEWHERE | {FailureClass.TOO_LONG}


def judge(status: int, failure: FailureClass) -> Verdict:
    """The fate of an answer before commit.

    2xx and 3xx commit, as does a 4xx that is about the request itself or its caller. What another endpoint may do
    better goes on to the next one; a server error does so once per request.
    """
    if failure in _NEXT or status in _NOT_HERE:
        return Verdict.NEXT
    if failure is FailureClass.LOAD_FAILED or (status >= 500 and failure is FailureClass.OTHER):
        return Verdict.NEXT_ONCE
    return Verdict.COMMIT


def declines(status: int, failure: FailureClass) -> bool:
    """True of an answer that only says "not here": nothing was begun for the request."""
    return failure in _ELSEWHERE or status in _FULL


def is_overloaded(status: int, failure: FailureClass) -> bool:
    """True if the endpoint says that it has no room now, or who stands before it that it cannot be had."""
    return failure is FailureClass.BUSY or status in _NOT_HERE


def is_server_error(status: int, failure: FailureClass) -> bool:
    """True of an answer that tells of an error of the server's own: of the endpoint's, or caused by the request alone,
    which no single answer can tell."""
    return failure is FailureClass.DEAD or (
        status >= 500 and status not in _NOT_HERE and failure not in _NO_ERROR_OF_ITS_OWN
    )


def exhausted_code(cause: Cause | None) -> tuple[int, str]:
    """Status and code told to the client when no attempt is left and no upstream gave an answer."""
    if cause in TIMEOUTS:
        return 504, "upstream_timeout"
    if cause is Cause.PROTOCOL:
        return 502, "upstream_protocol"
    return 502, "upstream_unreachable"
