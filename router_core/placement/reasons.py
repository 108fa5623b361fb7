"""Why a row was left out, or a request refused: a closed set of codes with their status.

Rules: the order of ``EXCLUSIONS`` is the order in which filters are applied and reported; if no row is left, the
furthest code reached names the refusal. The wording of messages and the error format of a dialect are
elsewhere.
"""

from enum import Enum


class Reason(Enum):
    """Codes of exclusions, refusals and choices; the value is what records, headers and metrics show."""

    UNTRUSTED = "untrusted"
    LOCALITY = "locality"
    NOT_IN_SUBSET = "not_in_subset"
    UNREACHABLE = "unreachable"
    BREAKER_OPEN = "breaker_open"
    DRAINING = "draining"
    MODEL_ABSENT = "model_absent"
    CAPABILITY = "capability"
    CONTEXT_TOO_SMALL = "context_too_small"
    DOES_NOT_FIT = "does_not_fit"
    PRESSURE = "pressure"
    QUEUE_FULL = "queue_full"
    DEADLINE = "deadline"
    TRIED = "tried"
    REFUSED = "refused"

    HINT_MALFORMED = "hint_malformed"
    STARTING = "starting"
    MODEL_NAME_INVALID = "model_name_invalid"
    SHED = "shed"

    NATIVE = "native"
    HINT = "hint"
    AUTHORITY = "authority"
    SESSION = "session"
    EXPLORE = "explore"
    DEGRADED = "degraded"

    @property
    def status(self) -> int:
        """HTTP status of a refusal with this code; 200 for the reasons of a choice."""
        return _STATUS.get(self, 200)

    @property
    def order(self) -> int:
        """Position among the filters, from 1; 0 for codes that are no filter."""
        return _ORDER.get(self, 0)


EXCLUSIONS = (
    Reason.UNTRUSTED,
    Reason.LOCALITY,
    Reason.NOT_IN_SUBSET,
    Reason.UNREACHABLE,
    Reason.BREAKER_OPEN,
    Reason.DRAINING,
    Reason.MODEL_ABSENT,
    Reason.CAPABILITY,
    Reason.CONTEXT_TOO_SMALL,
    Reason.DOES_NOT_FIT,
    Reason.PRESSURE,
    Reason.QUEUE_FULL,
    Reason.DEADLINE,
    Reason.TRIED,
    Reason.REFUSED,
)

_ORDER = {reason: place for place, reason in enumerate(EXCLUSIONS, start=1)}
_STATUS = {
    Reason.UNTRUSTED: 503,
    Reason.LOCALITY: 400,
    Reason.NOT_IN_SUBSET: 400,
    Reason.UNREACHABLE: 503,
    Reason.BREAKER_OPEN: 503,
    Reason.DRAINING: 503,
    Reason.MODEL_ABSENT: 404,
    Reason.CAPABILITY: 400,
    Reason.CONTEXT_TOO_SMALL: 400,
    Reason.DOES_NOT_FIT: 503,
    Reason.PRESSURE: 429,
    Reason.QUEUE_FULL: 429,
    Reason.DEADLINE: 504,
    Reason.TRIED: 502,
    Reason.REFUSED: 429,
    Reason.STARTING: 503,
    Reason.HINT_MALFORMED: 400,
    Reason.MODEL_NAME_INVALID: 400,
    Reason.SHED: 429,
}


class Action(Enum):
    """What a decision asks for."""

    ROUTE = "route"
    ROUTE_COLD = "route_cold"
    SPILL = "spill"
    QUEUE = "queue"
    SHED = "shed"
    REJECT = "reject"


class Cause(Enum):
    """Why an ingress refuses a request before reading its body; the value of ``x-pairmesh-refused``."""

    DRAINING = "draining"
    MODEL_ABSENT = "model_absent"
    QUEUE_FULL = "queue_full"
    PRESSURE = "pressure"
    COLD = "cold"


class HintOutcome(Enum):
    """What became of one hint."""

    HONOURED = "honoured"
    OUTSCORED = "outscored"
    EXCLUDED = "excluded"
    IGNORED_UNKNOWN = "ignored_unknown"
    IGNORED_UNAUTHORISED = "ignored_unauthorised"
    IGNORED_MALFORMED = "ignored_malformed"
    CLAMPED = "clamped"


class AuthorityOutcome(Enum):
    """What asking an authority came to. The last six leave the choice as it is without one; ``off``: not asked."""

    USED = "used"
    CACHED = "cached"
    TIMEOUT = "timeout"
    ERROR = "error"
    INVALID = "invalid"
    BREAKER_OPEN = "breaker_open"
    EMPTY_INTERSECTION = "empty_intersection"
    OFF = "off"
