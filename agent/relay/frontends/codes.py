"""The closed set of error codes of the data plane, with status and fixed text.

Messages never echo a name, a value or a byte of a request or an answer; they may carry limits, seconds, counts of
rows per code, and names of models that the caller may list.
"""

from collections.abc import Iterable
from typing import Final

from router_core import limits

CODES: Final[dict[str, tuple[int, str]]] = {
    "bad_request": (400, "the request is malformed"),
    "model_missing": (400, "the body has no string member 'model'"),
    "model_name_invalid": (400, "the model name is not a valid one"),
    "duplicate_key": (400, "a top-level key that must be unique stands twice in the body"),
    "hint_malformed": (
        400,
        f"a narrowing routing hint is malformed, or hints are larger than {limits.HINT_HEADERS // limits.KIB} KiB",
    ),
    "locality": (400, "no endpoint of this model is within the allowed locality"),
    "not_in_subset": (400, "no endpoint of this model matches x-pairmesh-require"),
    "capability": (400, "no endpoint of this model has a capability that the request needs"),
    "context_length_exceeded": (400, "the request is longer than the model's context"),
    "route_malformed": (400, "the route header is missing or malformed"),
    "route_mismatch": (400, "the body is not the one that the route header announced"),
    "unauthorized": (401, "a valid key is needed"),
    "host_refused": (403, "this Host is not served here: the setting api.hosts lists further names"),
    "origin_refused": (
        403,
        "web pages of this origin may not call this API: the setting api.origins lists those that may",
    ),
    "engine_admin_disabled": (403, "changing an engine's models is not done here: ask the engine itself"),
    "role": (403, "the caller's role does not permit this"),
    "route_unknown": (
        404,
        "no such route: the base URL for OpenAI clients ends in /v1, that for Ollama clients is the host and port alone",
    ),
    "model_absent": (404, "no reachable endpoint offers this model"),
    "method": (405, "the method is not allowed on this route"),
    "head_timeout": (408, f"the request head took longer than {limits.REQUEST_HEAD_TIME // 1000} s"),
    "body_timeout": (408, f"the body came slower than {limits.BODY_PACE_PER_S // limits.KIB} KiB/s"),
    "body_too_large": (413, f"the body is larger than {limits.REQUEST_BODY // limits.MIB} MiB"),
    "target_too_long": (414, f"the request target is longer than {limits.REQUEST_TARGET // limits.KIB} KiB"),
    "media_type": (
        415,
        "the body must be application/json without content encoding; another type is only read as JSON if the request has "
        "no Origin, Referer, Cookie or Sec-Fetch-* header",
    ),
    "expectation": (417, "only the expectation 100-continue can be met"),
    "queue_full": (429, "every endpoint of this model is full"),
    "pressure": (429, "every host of this model is under pressure"),
    "shed": (429, "the request was shed"),
    "cold": (429, "the model is not loaded where it was asked for"),
    "wait_exceeded": (429, "the wait is longer than the request allows"),
    "head_too_large": (
        431,
        f"the request head is larger than {limits.REQUEST_HEAD // limits.KIB} KiB "
        f"or has more than {limits.REQUEST_HEADERS} headers",
    ),
    "refused": (429, "every endpoint of this model has refused this request"),
    "upstream_unreachable": (502, "no endpoint that was tried has answered"),
    "upstream_protocol": (502, "the endpoint did not speak proper HTTP"),
    "tried": (502, "every endpoint of this model has failed this request"),
    "untrusted": (503, "no trusted node offers this model"),
    "unreachable": (503, "no endpoint of this model is reachable"),
    "breaker_open": (503, "every endpoint of this model is resting after failures"),
    "draining": (503, "every endpoint of this model is draining"),
    "does_not_fit": (
        503,
        "the model's weights are larger than the memory that any endpoint can get for them",
    ),
    "overloaded": (503, "too many requests are in flight"),
    "starting": (503, "the node has just started and has not heard of all engines and nodes yet"),
    "shutting_down": (503, "the node is shutting down"),
    "deadline": (504, "the request's deadline passed before it could begin"),
    "upstream_timeout": (504, "the endpoint did not answer in time"),
    "upstream_lost": (502, "the endpoint broke off its answer"),
    "loop_detected": (508, "the request has already passed through this mesh"),
}

RETRY_AFTER_S: Final = 1
"""Said with a 429 or 503 when nothing better is known; placement's refusals know better."""

WAITING_IS_NO_HELP: Final = frozenset({"does_not_fit"})
"""Codes with a status that asks clients to come back, of which none is told when."""

OF_PEERS: Final = frozenset({"route_malformed", "route_mismatch", "role"})
"""Codes that only a peer's router is ever told."""

_SAID_AS: Final = {"context_too_small": "context_length_exceeded"}


def status_of(code: str) -> int:
    """The HTTP status of an error code."""
    return CODES[code][0]


def said_as(reason: str) -> str:
    """The code under which clients know a refusal of placement's."""
    return _SAID_AS.get(reason, reason)


def is_passing(status: int, code: str) -> bool:
    """Whether a client is told when to come back."""
    return status in (429, 503) and code not in WAITING_IS_NO_HELP


def message_of(
    code: str,
    counts: Iterable[tuple[str, int]] = (),
    nearest: Iterable[str] = (),
    words: str | None = None,
) -> str:
    """The text for ``code``, or the ``words`` that fit this very refusal better, with how many rows fell to which code and
    which offered names come near."""
    text = words or (CODES[code][1] if code in CODES else "the request cannot be served")
    told = ", ".join(f"{said_as(name)} {count}" for name, count in counts)
    near = ", ".join(nearest)
    return text + (f" ({told})" if told else "") + (f"; similar models: {near}" if near else "")
