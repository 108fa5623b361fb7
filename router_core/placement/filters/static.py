"""Which rows of a model may serve one kind of request, as far as neither clock nor load moves that.

Rules: filters up to pressure run once per snapshot and kind of request and are kept in the fleet, at most ``_KEPT``
results of a snapshot; what hangs on more (terms, the own host alone, open breakers, own loads, another context) is
judged anew for each request. It knows nothing of how busy a row is.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from heapq import nsmallest

from router_core.placement.candidates.candidate import Row, RowKey
from router_core.placement.candidates.circuits import Breaking
from router_core.placement.candidates.fleet import Fleet
from router_core.placement.candidates.pace import pace_of
from router_core.placement.candidates.passed import Exclusion, Kind, Passed, Sifted, StandIn
from router_core.placement.filters.eligibility import CUTTING_ENGINE, Need, closed, is_soft, need_of, unfit
from router_core.placement.filters.looseness import stand_ins
from router_core.placement.filters.model_match import offer_of, settled
from router_core.placement.reasons import Reason
from router_core.placement.request.request import NO_HINTS, Endpoint, Hints, Locality, PlacementRequest
from router_core.policy.placement import Match, PlacementPolicy

_KEPT = 64
_BEFORE_CONTEXT = frozenset(
    {
        Reason.UNTRUSTED,
        Reason.LOCALITY,
        Reason.NOT_IN_SUBSET,
        Reason.UNREACHABLE,
        Reason.BREAKER_OPEN,
        Reason.DRAINING,
        Reason.MODEL_ABSENT,
        Reason.CAPABILITY,
    }
)


def sift(
    request: PlacementRequest, fleet: Fleet, policy: PlacementPolicy, breakers: Breaking | None, now: int
) -> tuple[Sifted, Need]:
    """The rows that ``request`` may use on this snapshot, and what it needs; ``breakers`` may be None if all are
    closed."""
    kind = _kind(request, fleet, policy) if breakers is None else None
    if kind is not None and (kept := fleet.sifted.get(kind)) is not None:
        need = _need(request, fleet, policy, kept.group, kept.digest)
        if need.sure <= kept.passed.ctx_least:
            return kept, need
    sifted, need = _sifted(request, fleet, policy, now)
    if (
        kind is not None
        and sifted.rows
        and need.sure <= sifted.passed.ctx_least
        and len(fleet.sifted) < _KEPT
    ):
        fleet.sifted[kind] = sifted
    return sifted, need


def passed(
    rows: Iterable[Row], need: Need, fleet: Fleet, now: int, looser: Mapping[RowKey, StandIn] | None = None
) -> Passed:
    """``rows`` through the filters; ``looser`` if they stand in for the model that is meant."""
    breakers = fleet.breakers
    held: list[Row] = []
    soft: list[Row] = []
    excluded: list[Exclusion] = []
    ctx_least = math.inf
    for row in rows:
        reason = closed(row, need, breakers, now) or unfit(row, need, now)
        if reason is None:
            held.append(row)
        else:
            stand_in = looser[row.key, row.model] if looser is not None else None
            excluded.append(Exclusion(row=row, reason=reason, stand_in=stand_in))
            if reason in _BEFORE_CONTEXT:
                continue
            if reason is Reason.PRESSURE and is_soft(row):
                soft.append(row)
        if row.ctx is not None and row.ctx < ctx_least and row.engine != CUTTING_ENGINE:
            ctx_least = row.ctx
    return Passed(
        open=tuple(held),
        soft=tuple(soft),
        excluded=tuple(excluded),
        ctx_least=ctx_least,
        narrowest=min([row.ctx for row in held if row.ctx is not None], default=math.inf),
    )


def _kind(request: PlacementRequest, fleet: Fleet, policy: PlacementPolicy) -> Kind | None:
    """The kind of an ordinary request; None if more than that decides which rows it may use."""
    hints = request.hints
    if (
        (hints is not NO_HINTS and _is_particular(hints))
        or request.num_ctx is not None
        or policy is not fleet.policy
    ):
        return None
    return request.model, int(request.dialect), int(request.requires)


def _is_particular(hints: Hints) -> bool:
    return (
        hints.narrows
        or bool(hints.requires_caps)
        or hints.match is not Match.EXACT
        or hints.locality is not Locality.MESH
        or hints.ctx_least is not None
        or hints.params_least_m is not None
        or hints.bits_least is not None
    )


def _need(
    request: PlacementRequest, fleet: Fleet, policy: PlacementPolicy, group: str, digest: bytes | None
) -> Need:
    profiles = fleet.profiles
    return need_of(
        request,
        profiles.bytes_per_token(group),
        profiles.output_tokens(group, request.hints.request_class._value_),
        policy,
        digest,
    )


def _sifted(
    request: PlacementRequest, fleet: Fleet, policy: PlacementPolicy, now: int
) -> tuple[Sifted, Need]:
    offer = offer_of(request.model, fleet, policy)
    rows = offer.rows if offer is not None else ()
    group = rows[0].profile_key.model if rows else request.model
    need = _need(request, fleet, policy, group, None)
    conflict, costs = False, None
    looser: Mapping[RowKey, StandIn] = {}
    if offer is not None:
        meant = settled(offer, need, fleet, now)
        need, rows, costs, conflict = meant.need, meant.rows, meant.costs, meant.conflict
        if need.match is not Match.EXACT:
            looser = stand_ins(meant.senses, need, fleet, policy)
    stand_in_rows = [stand_in.row for stand_in in looser.values()]
    own = tuple([row for row in rows if (row.key, row.model) not in looser]) if looser else rows
    through = passed(own, need, fleet, now)
    always, places = _marked(through.open, policy)
    sifted = Sifted(
        resolved=offer.resolved if offer is not None else None,
        group=group,
        digest=need.digest,
        conflict=conflict,
        rows=rows,
        passed=through,
        paces=tuple([pace_of(row, fleet.profiles, policy) for row in through.open]),
        taken_ms=min(
            [row.taken_ms for row in (*through.open, *stand_in_rows) if not row.is_self], default=None
        ),
        counts=Counter([gone.reason for gone in through.excluded]),
        costs=costs,
        looser=looser,
        always=always,
        places=places,
    )
    return sifted, need


def _marked(
    rows: tuple[Row, ...], policy: PlacementPolicy
) -> tuple[Sequence[int], Mapping[Endpoint, Sequence[int]]]:
    if len(rows) <= policy.scored_all:
        return (), {}
    places: dict[Endpoint, list[int]] = {}
    for place, row in enumerate(rows):
        places.setdefault(row.key, []).append(place)
    calm = nsmallest(policy.scored_calm, range(len(rows)), key=lambda place: rows[place].pressure)
    return [*calm, *[place for place, row in enumerate(rows) if row.is_self]], places
