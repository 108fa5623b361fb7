"""The picture that the residency machine decides on: the fleet's rows and this node's engines, put together.

Rules: what serves a model elsewhere counts only while it could be used; of equals the node with the smaller id goes
first; a size or a time nobody knows stays None or is a guess that says so. Pure; refuses to know how engines are asked.
"""

from collections.abc import Iterable, Mapping

from msgspec import Struct

from router_core.placement.candidates.admission import Gate
from router_core.placement.candidates.candidate import Row
from router_core.placement.candidates.fleet import Fleet
from router_core.placement.demand import rate_of, rates_of
from router_core.placement.request.names import parse_model_name
from router_core.placement.residency.events import EngineResidency, HostLook, Key, Model
from router_core.placement.scoring.estimates import waiting_s
from router_core.profile.estimate import quantile

_LOAD_QUANTILE = 0.75


class HostModel(Struct, frozen=True, gc=False, kw_only=True):
    """One own model as its engine tells of it. ``held_bytes`` None: not told; ``busy`` counts the engine's own."""

    key: Key
    held: EngineResidency = EngineResidency.ABSENT
    held_bytes: int | None = None
    busy: int = 0
    used_ms: int | None = None
    is_watched: bool = True
    keep: bool = False


class Headroom(Struct, frozen=True, kw_only=True):
    """Memory that loads here go to, and what limits them. Fields as in ``HostLook``."""

    free_bytes: int | None
    reserve_bytes: int
    places: Mapping[str, int]
    level: int | None


def outlook(fleet: Fleet, seen: Iterable[HostModel], headroom: Headroom, now: int) -> HostLook:
    """The picture at ``now``; models that the fleet does not offer here are left out."""
    rates = rates_of(fleet)
    models = []
    for own in seen:
        row = fleet.row(f"{fleet.node_id}/{own.key[0]}", own.key[1])
        if row is not None:
            models.append(_model(own, row, fleet, rate_of(row, rates), now))
    local = fleet.live.ledger.local
    return HostLook(
        models=tuple(models),
        free_bytes=headroom.free_bytes,
        reserve_bytes=headroom.reserve_bytes,
        places=headroom.places,
        level=headroom.level,
        is_idle=not any(model.busy for model in models)
        and not any(local.in_flight(endpoint) for endpoint in {model.key[0] for model in models}),
    )


def _model(own: HostModel, row: Row, fleet: Fleet, rate: float, now: int) -> Model:
    local = fleet.live.ledger.local
    rows = [other for other in _same_model(row, fleet) if _is_usable(other, fleet)]
    load_s, load_known = _load_time(row, fleet)
    need = row.need_bytes or None
    held = own.held_bytes if own.held_bytes is not None else need or 0
    waits = [
        waiting_s(each, fleet.live.ledger, fleet.profiles, fleet.policy, now)
        for each in rows
        if each.resident and each.gate is Gate.OPEN
    ]
    return Model(
        key=own.key,
        held=own.held,
        need_bytes=need,
        held_bytes=held,
        load_s=load_s,
        load_known=load_known,
        busy=max(own.busy, local.in_model(*own.key)),
        used_ms=own.used_ms,
        is_watched=own.is_watched,
        keep=own.keep,
        may_load=row.loads and row.gate is Gate.OPEN and row.down is None and not row.draining,
        started=local.started(*own.key),
        rate=rate,
        able=max(1, sum(each.is_self or each.resident or each.loading or each.loadable for each in rows)),
        ahead=sum(_is_ahead(each, load_s, fleet) for each in rows),
        wait_s=min(waits, default=None),
        is_loading=any(each.loading for each in rows),
    )


def _same_model(row: Row, fleet: Fleet) -> Iterable[Row]:
    name = parse_model_name(row.names[0])
    if name is None:
        return (row,)
    offered = dict.fromkeys(fleet.offered(name.name, name.tagged, row.digest))
    return [other for other in offered if None in (row.digest, other.digest) or row.digest == other.digest]


def _is_usable(row: Row, fleet: Fleet) -> bool:
    return (
        not (row.untrusted or row.cloud or row.draining)
        and row.down is None
        and (row.endpoint, row.model) not in (fleet.live.leaving if row.is_self else ())
    )


def _is_ahead(row: Row, load_s: float, fleet: Fleet) -> bool:
    """True if another node would be done sooner with loading what ``row`` offers, and could begin now."""
    return (
        not row.is_self
        and row.loadable
        and not row.resident
        and not row.loading
        and row.loads
        and row.gate is Gate.OPEN
        and row.in_flight + row.queued == 0
        and (row.room_bytes is None or row.need_bytes <= row.room_bytes)
        and (row.load_s, row.node_id) < (load_s, fleet.node_id)
    )


def _load_time(row: Row, fleet: Fleet) -> tuple[float, bool]:
    """Seconds that a load of ``row`` takes here, and whether that was observed."""
    policy = fleet.profiles.policy
    profile = fleet.profiles.find(row.profile_key)
    if profile is not None and profile.loads_s:
        return quantile(profile.loads_s, _LOAD_QUANTILE), True
    if row.load_s:
        return row.load_s, False
    return max(policy.load_least_s, row.need_bytes / policy.load_bytes_per_s), False
