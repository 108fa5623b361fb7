"""An authority outside the node: what it is asked about one request, what its answer means, and how far that counts.

Rules: the question tells sizes (rounded up to powers of two, and rows judged by these), requirements and rows by id,
never text of a request nor a hash of one; an answer is bounded and wholly valid or a fault; it ranks rows that may serve
anyway, so it neither adds one nor excuses one from a filter. Asking is done
elsewhere; its ``Counsel`` comes with the request.
"""

import math
from collections.abc import Iterable
from enum import Enum
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from router_core import limits
from router_core.placement.candidates.fleet import Fleet
from router_core.placement.candidates.pace import pace_of
from router_core.placement.reasons import AuthorityOutcome
from router_core.placement.record import AuthorityNote, Factors
from router_core.placement.request.request import Advice, Counsel, Endpoint, PlacementRequest
from router_core.placement.scoring.survey import Survey, score
from router_core.placement.scoring.weighing import Scored, Weighing
from router_core.placement.selection.choose import S
from router_core.policy.authority import AuthorityMode
from router_core.policy.placement import PlacementPolicy
from router_core.record.spelling import capability_names, dialect_name

VERSION = 1
_ENDLESS_MS = 10**12


class AskedSize(Struct, frozen=True, gc=False, kw_only=True):
    """Expected tokens, each rounded up to a power of two."""

    prompt_tokens_le: int
    output_tokens_le: int


class AskedSlo(Struct, frozen=True, gc=False, kw_only=True):
    """The latency targets of the request: time to the first token and time per token."""

    ttft_ms: int
    tpot_ms: int | None


class AskedEstimate(Struct, frozen=True, gc=False, kw_only=True):
    """What a candidate is expected to take, in ms; ``ect`` is the expected completion time."""

    wait: int
    load: int
    prefill: int
    ttft: int
    ect: int
    cost: int


class AskedRow(Struct, frozen=True, gc=False, kw_only=True):
    """One row that may serve; ``id`` is ``<node_id>/<endpoint>``, ``ahead`` how many requests have to end there first."""

    id: Endpoint
    model: str
    level: int
    resident: bool
    est_ms: AskedEstimate
    ahead: float
    factors: Factors
    score: float


class Question(Struct, frozen=True, gc=False, kw_only=True, rename={"request_class": "class"}):
    """What the authority is asked; encodes to JSON as it is. ``candidates`` come best first.
    ``model`` is empty if nobody offers what was asked for: then it would be any text a client sent."""

    decision_id: str
    budget_ms: int
    request_class: str
    dialect: str
    requires: tuple[str, ...]
    model: str
    match: str
    locality: str
    size: AskedSize
    slo: AskedSlo
    candidates: tuple[AskedRow, ...]
    v: int = VERSION


class AnswerFault(Enum):
    """What is wrong with an answer: the first of its members that does not hold."""

    TOO_LARGE = "too_large"
    NOT_JSON = "not_json"
    VERSION = "version"
    ORDER = "order"
    WEIGHTS = "weights"
    TTL = "ttl_ms"
    REASON = "reason"


def question_of(request: PlacementRequest, seen: Survey, decision_id: str, budget_ms: int) -> Question:
    """What is asked about ``request`` after ``seen``, which is ``coarse``; ``budget_ms`` is the time left to answer."""
    need, hints = seen.need, request.hints
    best = sorted(seen.scored, key=lambda row: row.score)[: limits.AUTHORITY_IDS]
    return Question(
        decision_id=decision_id,
        budget_ms=budget_ms,
        request_class=hints.request_class.value,
        dialect=dialect_name(need.dialect),
        requires=capability_names(need.inferred | need.explicit),
        model=seen.resolved if seen.offered else "",
        match=seen.need.match.value,
        locality=seen.need.locality.value,
        size=AskedSize(
            prompt_tokens_le=power_of_two(need.prompt), output_tokens_le=power_of_two(need.output)
        ),
        slo=AskedSlo(
            ttft_ms=round(1000.0 * need.ttft_s),
            tpot_ms=None if need.tpot_s is None else round(1000.0 * need.tpot_s),
        ),
        candidates=tuple(_asked_row(row) for row in best),
    )


def coarse(
    seen: Survey, request: PlacementRequest, fleet: Fleet, policy: PlacementPolicy, now: int
) -> Survey:
    """``seen`` with its rows judged as if every size of ``request`` were the next power of two: times, factors and scores
    tell an authority of no size more than that."""
    prompt, output = power_of_two(seen.need.prompt), power_of_two(seen.need.output)
    ctx = math.ceil(policy.prompt_slack * prompt) + output
    if request.item_bytes is not None:
        ctx = min(ctx, power_of_two(seen.need.ctx))
    need = replace(
        seen.need,
        prompt=prompt,
        output=output,
        ctx=max(ctx, request.num_ctx or 0),
        transfer_s=policy.rtt_s + power_of_two(request.body_bytes) / policy.link_bytes_per_s,
        until_ms=now + _ENDLESS_MS,
    )
    pin = request.pin
    if pin is not None:
        request = replace(request, pin=replace(pin, tokens=power_of_two(pin.tokens)))
    weighing = Weighing(request, need, seen.sifted, fleet, policy, fleet.breakers, now)
    weighing.weigh([pace_of(each.row, fleet.profiles, policy) for each in seen.scored])
    scored = weighing.scored + weighing.reserves
    if scored:
        score(scored, [], request, need, policy)
    return replace(seen, need=need, scored=scored)


def power_of_two(count: int) -> int:
    """The least power of two that is not below ``count``; 0 stays 0."""
    return 1 << (count - 1).bit_length() if count > 0 else 0


def _asked_row(scored: Scored) -> AskedRow:
    est = scored.est
    return AskedRow(
        id=scored.row.key,
        model=scored.row.model,
        level=scored.match.level,
        resident=scored.resident,
        est_ms=AskedEstimate(
            wait=round(1000.0 * est.wait),
            load=round(1000.0 * est.load),
            prefill=round(1000.0 * est.prefill),
            ttft=round(1000.0 * est.ttft),
            ect=round(1000.0 * est.ect),
            cost=round(1000.0 * est.cost),
        ),
        ahead=round(est.ahead, 2),
        factors=scored.f,
        score=scored.score,
    )


# --- the answer ----------------------------------------------------------------------------------------------

_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_whole = msgspec.json.Decoder(int | None)
_ids = msgspec.json.Decoder(list[str])
_numbers = msgspec.json.Decoder(list[float] | None)
_text = msgspec.json.Decoder(str | None)
_NULL = msgspec.Raw(b"null")


def parse_answer(raw: bytes) -> Advice | AnswerFault:
    """The advice in the body of an answer. Members that are not known are ignored, null is as good as absent."""
    if len(raw) > limits.AUTHORITY_REPLY:
        return AnswerFault.TOO_LARGE
    try:
        members = _members.decode(raw)
    except _UNREADABLE:
        return AnswerFault.NOT_JSON
    fault = AnswerFault.VERSION
    try:
        if _read(members, "v", _whole) != VERSION:
            return fault
        fault = AnswerFault.ORDER
        order: list[str] = _read(members, "order", _ids)
        if len(order) > limits.AUTHORITY_IDS or len(set(order)) < len(order):
            return fault
        fault = AnswerFault.WEIGHTS
        weights: list[float] | None = _read(members, "weights", _numbers)
        if weights is not None and not _fit(weights, order):
            return fault
        fault = AnswerFault.TTL
        ttl_ms: int | None = _read(members, "ttl_ms", _whole)
        if ttl_ms is not None and not 0 <= ttl_ms <= limits.AUTHORITY_TTL:
            return fault
        fault = AnswerFault.REASON
        reason: str | None = _read(members, "reason", _text)
        if reason is not None and not _printable(reason):
            return fault
    except _UNREADABLE:
        return fault
    return Advice(
        order=tuple(order),
        weights=None if weights is None else tuple(weights),
        ttl_ms=limits.AUTHORITY_TTL_DEFAULT if ttl_ms is None else ttl_ms,
        reason=reason,
    )


def _read(members: dict[str, msgspec.Raw], name: str, decoder: msgspec.json.Decoder[Any]) -> Any:
    return decoder.decode(members.get(name, _NULL))


def _fit(weights: list[float], order: list[str]) -> bool:
    return len(weights) == len(order) and all(0.0 < weight < math.inf for weight in weights)


def _printable(reason: str) -> bool:
    return len(reason) <= limits.AUTHORITY_REASON and reason.isascii() and reason.isprintable()


# --- how far it counts ---------------------------------------------------------------------------------------


def heed(counsel: Counsel, seen: Survey, policy: PlacementPolicy, seed: bytes) -> AuthorityNote:
    """Intersect the answer with the rows of ``seen`` that are in the running; an advisory one takes the place of what
    the request prefers, as a hint ranked by its order."""
    advice, outcome, why, first = counsel.advice, counsel.outcome, counsel.why, None
    if advice is not None:
        order = _within(advice, {scored.row.key for scored in seen.scored}, seed)
        why = advice.reason
        if not order:
            outcome = AuthorityOutcome.EMPTY_INTERSECTION
        else:
            first = order[0]
            if counsel.mode is AuthorityMode.ADVISORY:
                _lean(seen, order, policy)
    return AuthorityNote(mode=counsel.mode, outcome=outcome, ms=counsel.ms, reason=why, first=first)


def led_by(note: AuthorityNote, rows: Iterable[S]) -> S | None:
    """The one of ``rows`` that an authoritative answer came to, None if none did."""
    if note.first is None or not note.leads:
        return None
    return next((scored for scored in rows if scored.key == note.first), None)


def _within(advice: Advice, running: set[Endpoint], seed: bytes) -> list[Endpoint]:
    places = [place for place, key in enumerate(advice.order) if key in running]
    if places and advice.weights is not None:
        drawn = _draw(places, [advice.weights[place] for place in places], seed)
        places = [drawn, *(place for place in places if place != drawn)]
    return [advice.order[place] for place in places]


def _lean(seen: Survey, order: list[Endpoint], policy: PlacementPolicy) -> None:
    bonus = {key: policy.hint_bonus / (1.0 + rank) for rank, key in enumerate(order)}
    for scored in (*seen.scored, *seen.reserves):
        gain = bonus.get(scored.row.key, 0.0) - scored.hint_bonus
        scored.hint_bonus += gain
        scored.adj -= gain
        scored.score -= gain


def _draw(places: list[int], weights: list[float], seed: bytes) -> int:
    """One of ``places``, in proportion; by another hash of ``seed`` than the one that draws among near ties."""
    most = max(weights)
    shares = [weight / most for weight in weights]
    chance = blake2b(seed, digest_size=8, person=b"authority").digest()
    point = int.from_bytes(chance, "big") / 2**64 * sum(shares)
    for place, share in zip(places, shares, strict=True):
        point -= share
        if point < 0.0:
            return place
    return places[-1]
