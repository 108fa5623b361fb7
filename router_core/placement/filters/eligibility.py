"""What a request needs, and which rows cannot give it.

Rules: filters run in the order of ``reasons.EXCLUSIONS`` and the first that fails is reported; an inferred requirement
excludes only on a known no, an explicit one needs a known yes; empty stays empty. Nothing is ranked here.
"""

from math import ceil

from msgspec import Struct

from router_core.placement.candidates.admission import Gate
from router_core.placement.candidates.candidate import Row
from router_core.placement.candidates.circuits import Breaking
from router_core.placement.reasons import Reason
from router_core.placement.request.request import (
    NO_HINTS,
    NO_OUTPUT,
    Hints,
    Locality,
    Match,
    NodeRef,
    PlacementRequest,
    RequestClass,
)
from router_core.policy.placement import ClassTargets, PlacementPolicy
from router_core.record.spelling import capability_names, dialect_name
from router_core.record.state import Capability, Dialect
from router_core.view.freshness import is_stale

_OPEN = 2
_MIB = 2**20
_EXACT = Match.EXACT
_INTERACTIVE = RequestClass.INTERACTIVE
_HOST, _ANY = Locality.HOST, Locality.ANY
_EMBEDS = int(Dialect.EMBED | Dialect.OLLAMA_EMBED)
_NO_OUTPUT = int(NO_OUTPUT)
_EMBEDDINGS = int(Capability.EMBEDDINGS)
_CUTS = int(Dialect.OLLAMA_CHAT | Dialect.OLLAMA_GENERATE | Dialect.OLLAMA_EMBED)
"""Dialects in which a prompt is cut to the context."""
CUTTING_ENGINE = "ollama"
"""The kind of engine that cuts a prompt to the context in any dialect."""


class Need(Struct, frozen=True, gc=False):
    """What is constant of one request while rows are judged. Tokens, bytes; ``until_ms`` on the boot clock.

    ``digest`` is the one digest that counts as this model, None if none is known. ``match`` and ``locality`` are the
    loosest that caller and operator both permit; ``share`` of an endpoint's room is open to the class. ``ctx`` is the
    context that is probably needed, which ranks; ``sure`` what is needed for certain, which excludes.
    """

    dialect: int
    inferred: int
    explicit: int
    ctx: int
    num_ctx: int | None
    locality: Locality
    may_spill: bool
    narrows: bool
    hints: Hints
    digest: bytes | None
    match: Match
    prompt: int
    output: int
    ttft_s: float
    tpot_s: float | None
    until_ms: int
    share: float
    transfer_s: float
    sure: int = 0


def need_of(
    request: PlacementRequest,
    bytes_per_token: float,
    learned: int | None,
    policy: PlacementPolicy,
    digest: bytes | None = None,
) -> Need:
    """The needs of ``request``; ``learned`` is the usual output of this model and class, if any was seen, ``digest`` the
    one that is meant, if that is settled."""
    hints, dialect = request.hints, int(request.dialect)
    locality = hints.locality.within(policy.spill_cap)
    targets = targets_of(hints.request_class, policy)
    prompt = request.prompt_tokens
    if prompt is None:
        prompt = ceil(request.text_bytes / bytes_per_token) + request.token_numbers
        if request.images or request.audio_parts:
            prompt += policy.image_tokens * request.images + policy.audio_tokens * request.audio_parts
    each = 0
    if not dialect & _NO_OUTPUT:
        each = learned if learned is not None else policy.output_tokens
        if hints.expect_tokens is not None:
            each = hints.expect_tokens
        if request.output_cap is not None:
            each = min(each, request.output_cap)
    item = prompt
    if request.item_bytes is not None:
        item = max(ceil(request.item_bytes / bytes_per_token), request.item_tokens)
    ctx = ceil(policy.prompt_slack * item) + each
    if request.num_ctx is not None and request.num_ctx > ctx:
        ctx = request.num_ctx
    return Need(
        dialect,
        int(request.requires) | (_EMBEDDINGS if dialect & _EMBEDS else 0),
        int(hints.requires_caps),
        ctx,
        request.num_ctx,
        locality,
        may_spill=locality is _ANY,
        narrows=hints is not NO_HINTS and hints.narrows,
        hints=hints,
        digest=digest,
        match=hints.match if hints.match is _EXACT else _match(hints.match, dialect, policy),
        prompt=prompt,
        output=each * request.choices if request.choices > 1 else each,
        ttft_s=hints.slo_ttft_ms / 1000.0 if hints.slo_ttft_ms is not None else targets.ttft_s,
        tpot_s=hints.slo_tpot_ms / 1000.0 if hints.slo_tpot_ms is not None else targets.tpot_s,
        until_ms=until_ms_of(request, targets),
        share=targets.share if request.stands_as is None else targets_of(request.stands_as, policy).share,
        transfer_s=policy.rtt_s + request.body_bytes / policy.link_bytes_per_s,
        sure=0 if dialect & _CUTS else request.sure_tokens,
    )


def _match(asked: Match, dialect: int, policy: PlacementPolicy) -> Match:
    """``asked``, capped. Vectors of another model mean nothing beside those of the one asked for."""
    capped = asked.within(policy.match_cap)
    return capped.within(Match.QUANT) if dialect & _EMBEDS else capped


def until_ms_of(request: PlacementRequest, targets: ClassTargets) -> int:
    """Boot time after which ``request`` is dispatched no more: by its own deadline, else by that of its class."""
    asked_ms = request.hints.deadline_ms
    return request.arrival_ms + (targets.deadline_ms if asked_ms is None else asked_ms)


def targets_of(request_class: RequestClass, policy: PlacementPolicy) -> ClassTargets:
    """The default targets of a request class."""
    if request_class is _INTERACTIVE:
        return policy.interactive
    return policy.batch if request_class is RequestClass.BATCH else policy.background


def closed(row: Row, need: Need, breakers: Breaking | None, now: int) -> Reason | None:
    """Why the endpoint of ``row`` cannot be used by this request at all, whatever the model; None if it can.

    ``breakers`` may be None if all are closed.
    """
    if row.untrusted:
        return Reason.UNTRUSTED
    if (row.cloud and not need.may_spill) or (need.locality is _HOST and not row.is_self):
        return Reason.LOCALITY
    if need.narrows and not in_subset(row, need.hints):
        return Reason.NOT_IN_SUBSET
    if row.down is not None:
        return Reason.UNREACHABLE
    if breakers is not None and breakers.state(row.key, now) == _OPEN:
        return Reason.BREAKER_OPEN
    if row.draining:
        return Reason.DRAINING
    return None


def unfit(row: Row, need: Need, now: int) -> Reason | None:
    """Why ``row`` cannot serve this request although its endpoint is open; None if it can. Only facts exclude: how long
    a prompt probably is, and how much memory a model probably takes beside its weights, is for ranking."""
    if need.digest is not None and row.digest is not None and row.digest != need.digest:
        return Reason.MODEL_ABSENT
    warm = row.resident or row.loading
    if not warm and not row.loadable:
        return Reason.MODEL_ABSENT
    if (
        not row.dialects & need.dialect
        or row.cap_no & need.inferred
        or need.explicit & ~row.cap_yes
        or not _large_enough(row, need.hints)
    ):
        return Reason.CAPABILITY
    ctx = context_of(row, need)
    if ctx is not None and (
        (need.sure > ctx and row.engine != CUTTING_ENGINE)
        or (need.hints.ctx_least is not None and need.hints.ctx_least > ctx)
    ):
        return Reason.CONTEXT_TOO_SMALL
    if not warm:
        if (
            row.reach_bytes is not None
            and row.weight_bytes > row.reach_bytes
            and (row.is_self or not is_stale(now - row.taken_ms, row.period_ms))
        ):
            return Reason.DOES_NOT_FIT
        if not row.loads:
            return Reason.PRESSURE
    return Reason.PRESSURE if row.gate is not Gate.OPEN else None


def context_of(row: Row, need: Need) -> int | None:
    """The context, in tokens, that ``row`` has for this request; None if that is not known."""
    return row.ctx_most if need.num_ctx is not None and row.reload_s else row.ctx


def is_soft(row: Row) -> bool:
    """True if pressure excludes ``row`` only as long as anything else is left."""
    return row.gate is Gate.SOFT and (row.resident or row.loading or row.loads)


def in_subset(row: Row, hints: Hints) -> bool:
    """True if ``row`` satisfies every node, engine and label term."""
    return not unmet_terms(row, hints)


def unmet_terms(row: Row, hints: Hints) -> list[str]:
    """The keys of the terms of ``require`` that ``row`` does not meet."""
    met = {
        "node": (not hints.requires_node or any(matches(ref, row) for ref in hints.requires_node))
        and not any(matches(ref, row) for ref in hints.refuses_node),
        "engine": all(engine == row.engine for engine in hints.requires_engine)
        and row.engine not in hints.refuses_engine,
        "label": row.labels.issuperset(hints.requires_label) and row.labels.isdisjoint(hints.refuses_label),
    }
    return [key for key, is_met in met.items() if not is_met]


def matches(ref: NodeRef, row: Row) -> bool:
    """True if ``ref`` means the node of ``row``, and its endpoint if it names one."""
    if ref.endpoint is not None and ref.endpoint != row.endpoint:
        return False
    if ref.node_id is not None:
        return row.node_id == ref.node_id
    return row.node_name == ref.name and row.node_id.startswith(ref.mark)


def detail_of(row: Row, need: Need, reason: Reason) -> str | None:
    """What exactly failed, in our own words, for the record."""
    if reason is Reason.CAPABILITY:
        return missing(row, need)
    if reason is Reason.NOT_IN_SUBSET:
        return ",".join(unmet_terms(row, need.hints))
    if reason is Reason.DOES_NOT_FIT:
        return f"{row.weight_bytes // _MIB}>{int(row.reach_bytes or 0) // _MIB} MiB"
    if reason is Reason.CONTEXT_TOO_SMALL:
        return f"{context_of(row, need)}<{max(need.sure, need.hints.ctx_least or 0)}"
    if reason is Reason.PRESSURE:
        return row.squeeze_detail
    if reason is Reason.UNREACHABLE:
        return row.down
    if reason is Reason.MODEL_ABSENT:
        return (
            "digest" if need.digest is not None and row.digest not in (None, need.digest) else "not_loadable"
        )
    return None


def _large_enough(row: Row, hints: Hints) -> bool:
    if hints.params_least_m is not None and (row.params_m is None or row.params_m < hints.params_least_m):
        return False
    return hints.bits_least is None or (row.bits is not None and row.bits >= hints.bits_least)


def lacking(row: Row, need: Need) -> int:
    """The capabilities that ``row`` lacks for this request."""
    return (row.cap_no & need.inferred) | (need.explicit & ~row.cap_yes)


def missing(row: Row, need: Need) -> str:
    """What ``row`` lacks of what the request needs: a dialect, capabilities, or size."""
    if not row.dialects & need.dialect:
        return dialect_name(need.dialect)
    return ",".join(capability_names(lacking(row, need))) or "size"
