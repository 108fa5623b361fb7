"""What one attempt taught: the only thing profiles learn from.

Rules: every field that was not observed is None; a cancelled attempt never speaks against the endpoint. It
knows nothing of requests, texts and decisions.
"""

from enum import Enum

from msgspec import Struct

from router_core.ids import Id16


class Result(Enum):
    """How an attempt ended, as far as the endpoint is to blame. ``OTHER``: answered, but says nothing of speed."""

    OK = "ok"
    FAULT = "fault"
    CANCELLED = "cancelled"
    OTHER = "other"


class ProfileKey(Struct, frozen=True, gc=False, kw_only=True, cache_hash=True):
    """One engine configuration serving one model. ``model`` is the digest in hex where known, else the name."""

    node: Id16
    endpoint: str
    model: str
    quant: str | None = None
    ctx: int = 0
    parallel: int = 0
    offload_pct: int | None = None


class Outcome(Struct, frozen=True, gc=False, kw_only=True):
    """One attempt, ended. Times in ms, ``at_ms`` on the boot clock.

    ``prompt_tokens`` are those the engine really computed, ``cached_tokens`` those it reused; ``gen_ms`` covers the
    ``gen_tokens - 1`` gaps after the first token, ``total_ms`` the whole answer from sending to its last byte, where
    no load was part of it. ``concurrency`` counts the requests in the engine, this one
    included. ``ttft_ms`` with ``wait_ms`` and ``net_ms`` (both estimates) stand in for an engine that tells no prompt
    time. ``load_ms`` is set if the attempt caused or awaited a load. ``request_class`` is None where only the router
    that placed the request knows it.
    """

    key: ProfileKey
    at_ms: int
    result: Result
    request_class: str | None = "interactive"
    concurrency: float = 1.0
    text_bytes: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    prompt_ms: float | None = None
    gen_tokens: int | None = None
    gen_ms: float | None = None
    ttft_ms: float | None = None
    wait_ms: float = 0.0
    net_ms: float = 0.0
    load_ms: float | None = None
    total_ms: float | None = None
