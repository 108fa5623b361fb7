"""What a model name means in the fleet: which rows offer it, under which digest, at what price.

Rules: names are compared as ``names`` normalises them; an alias is one step and its absent targets are absent; of two
digests under one name the one is meant that most usable rows have, unless the request pins one. Rows are not
judged here.
"""

from collections import Counter
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from router_core.placement.candidates.candidate import Row, RowKey
from router_core.placement.candidates.circuits import Breaking
from router_core.placement.candidates.fleet import Fleet
from router_core.placement.filters.eligibility import Need, closed
from router_core.placement.request.names import ModelName, parse_model_name
from router_core.policy.placement import PlacementPolicy


class Sense(Struct, frozen=True, gc=False, kw_only=True):
    """One model that a name may mean: the rows that go by it, the digest that makes them this model (None: unknown),
    and what an alias charges for it."""

    rows: tuple[Row, ...]
    digest: bytes | None = None
    cost: float = 0.0

    def has(self, row: Row) -> bool:
        """True unless ``row`` is known to be another model of the same name."""
        return self.digest is None or row.digest is None or row.digest == self.digest


class Offer(Struct, frozen=True, kw_only=True):
    """What goes by the name that was asked for. More than one sense is an alias's."""

    resolved: str
    senses: tuple[Sense, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        """Those of the first sense that has any."""
        for sense in self.senses:
            if sense.rows:
                return sense.rows
        return ()


class Meant(Struct, frozen=True, kw_only=True):
    """An offer whose digests are settled. ``costs`` are what an alias charges per row, None if nothing;
    ``conflict`` if rows of one name differ in their digest."""

    need: Need
    rows: tuple[Row, ...]
    senses: tuple[Sense, ...]
    costs: Mapping[RowKey, float] | None = None
    conflict: bool = False


def offer_of(asked: str, fleet: Fleet, policy: PlacementPolicy) -> Offer | None:
    """The rows that go by ``asked``, or None if that is no name. Empty stays empty."""
    for alias, targets in policy.aliases:
        if alias == asked:
            return _aliased(targets, fleet, policy)
    name = parse_model_name(asked)
    return None if name is None else Offer(resolved=name.name, senses=(_sense(name, fleet),))


def _sense(name: ModelName, fleet: Fleet, cost: float = 0.0) -> Sense:
    rows = fleet.offered(name.name, name.tagged, name.digest)
    return Sense(rows=rows, digest=name.digest, cost=cost)


def _aliased(targets: tuple[str, ...], fleet: Fleet, policy: PlacementPolicy) -> Offer:
    named = [parse_model_name(target) for target in targets]
    senses = [
        _sense(name, fleet, min(policy.alias_most, policy.alias_step * step))
        for step, name in enumerate(named)
        if name is not None
    ]
    return Offer(resolved=targets[0], senses=tuple(senses))


def settled(offer: Offer, need: Need, fleet: Fleet, now: int) -> Meant:
    """``offer`` with one digest per sense, and with the rows that have it under another name.

    What differs from the digest of its only sense stays among the rows, to be reported; of an alias it is left out.
    """
    if len(offer.senses) == 1 and not offer.senses[0].cost:
        only, conflict = _settled(offer.senses[0], need, fleet, now)
        if only.digest is not None:
            need = replace(need, digest=only.digest)
        return Meant(need=need, rows=only.rows, senses=(only,), conflict=conflict)
    pairs = [_settled(sense, need, fleet, now) for sense in offer.senses]
    rows: list[Row] = []
    costs: dict[RowKey, float] = {}
    for sense, _ in pairs:
        for row in sense.rows:
            if sense.has(row) and (row.key, row.model) not in costs:
                costs[row.key, row.model] = sense.cost
                rows.append(row)
    return Meant(
        need=need,
        rows=tuple(rows),
        senses=tuple(sense for sense, _ in pairs),
        costs=costs,
        conflict=any(clash for _, clash in pairs),
    )


def _settled(sense: Sense, need: Need, fleet: Fleet, now: int) -> tuple[Sense, bool]:
    rows, digest, conflict = sense.rows, sense.digest, False
    if digest is None:
        digests = {row.digest for row in rows}
        digests.discard(None)
        if not digests:
            return sense, False
        conflict = len(digests) > 1
        digest = _most_common(rows, need, fleet.breakers, now) if conflict else digests.pop()
    twins = fleet.with_digest(digest) if digest is not None else ()
    if len(twins) > sum(row.digest == digest for row in rows):
        known = {(row.key, row.model) for row in rows}
        rows += tuple(row for row in twins if (row.key, row.model) not in known)
    return Sense(rows=rows, digest=digest, cost=sense.cost), conflict


def _most_common(rows: tuple[Row, ...], need: Need, breakers: Breaking | None, now: int) -> bytes | None:
    votes = Counter(
        row.digest for row in rows if row.digest is not None and closed(row, need, breakers, now) is None
    ) or Counter(row.digest for row in rows if row.digest is not None)
    return min(votes, key=lambda digest: (-votes[digest], digest), default=None)
