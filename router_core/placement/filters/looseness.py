"""Which rows may stand in for the model that was asked for, and at what level: other quantisations of the same weights,
models of the same family, the operator's pool.

Rules: what is unknown, or told in contradictory ways, never qualifies; names are never compared to find kin; a row is
taken at the strictest level it qualifies for. Whether a level opens is found out while rows are judged.
"""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from msgspec import Struct

from router_core.placement.candidates.candidate import Row, RowKey
from router_core.placement.candidates.fleet import Fleet
from router_core.placement.candidates.passed import StandIn
from router_core.placement.filters.eligibility import Need
from router_core.placement.filters.model_match import Sense
from router_core.placement.request.names import parse_model_name
from router_core.policy.placement import Match, PlacementPolicy

_Fact = TypeVar("_Fact", str, bytes)


class Lineage(Struct, frozen=True, gc=False, kw_only=True):
    """What is known of a model beyond its name. ``params_m`` are millions, the most that any of its rows tells."""

    base: bytes | None
    family: str | None
    params_m: int | None


def lineage_of(sense: Sense) -> Lineage:
    """What the rows of ``sense`` tell of their model; what they contradict each other in is unknown."""
    rows = [row for row in sense.rows if sense.has(row)]
    return Lineage(
        base=_agreed(row.base for row in rows),
        family=_agreed(row.family for row in rows),
        params_m=max((row.params_m for row in rows if row.params_m is not None), default=None),
    )


def stand_ins(
    senses: tuple[Sense, ...], need: Need, fleet: Fleet, policy: PlacementPolicy
) -> dict[RowKey, StandIn]:
    """Rows that may stand in for any of ``senses`` as loosely as ``need`` permits, the strictest level first."""
    meant = {(row.key, row.model) for sense in senses for row in sense.rows if sense.has(row)}
    found: dict[RowKey, StandIn] = {}
    for match in Match:
        if not Match.EXACT.level < match.level <= need.match.level:
            continue
        penalty = policy.match_penalties[match.level - 1]
        for row, cost in _rows_at(match, senses, need, fleet, policy):
            key = (row.key, row.model)
            if key not in meant and key not in found:
                found[key] = StandIn(row=row, match=match, cost=penalty + cost)
    return found


def _rows_at(
    match: Match, senses: tuple[Sense, ...], need: Need, fleet: Fleet, policy: PlacementPolicy
) -> Iterator[tuple[Row, float]]:
    if match is Match.ANY:
        for text in policy.match_any_pool:
            name = parse_model_name(text)
            if name is not None:
                yield from ((row, 0.0) for row in fleet.offered(name.name, name.tagged, name.digest))
        return
    for sense in senses:
        lineage = lineage_of(sense)
        if match is Match.QUANT:
            rows = _quantised(lineage, fleet, policy.match_min_bits)
        else:
            rows = _related(lineage, need.hints.params_least_m, fleet, policy.match_min_bits)
        yield from ((row, sense.cost) for row in rows)


def _quantised(lineage: Lineage, fleet: Fleet, least_bits: float) -> Iterable[Row]:
    if lineage.base is None:
        return
    for row in fleet.with_base(lineage.base):
        if row.bits is not None and row.bits >= least_bits:
            yield row


def _related(lineage: Lineage, told_m: int | None, fleet: Fleet, least_bits: float) -> Iterable[Row]:
    """A family's engines often tell no quantisation, so only one known to be too coarse is out."""
    least_m = told_m if told_m is not None else lineage.params_m
    if lineage.family is None or least_m is None:
        return
    for row in fleet.with_family(lineage.family):
        if (
            row.params_m is not None
            and row.params_m >= least_m
            and (row.bits is None or row.bits >= least_bits)
        ):
            yield row


def _agreed(told: Iterable[_Fact | None]) -> _Fact | None:
    known = set(told)
    known.discard(None)
    return known.pop() if len(known) == 1 else None
