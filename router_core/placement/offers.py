"""What a model name means in the fleet: which rows offer it, under which digest, at what price.

Rules: names are compared as ``names`` normalises them; an alias is one step and its absent targets are absent; of two
digests under one name the one is meant that most usable rows have, unless the request pins one. Refuses to judge rows.
"""

from collections import Counter
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from router_core.placement.eligibility import Need, closed
from router_core.placement.fleet import Breaking, Fleet
from router_core.placement.names import parse_model_name
from router_core.placement.request import Endpoint
from router_core.placement.rows import Row
from router_core.policy.placement import PlacementPolicy


class Offer(Struct, kw_only=True):
    """Rows that go by one name. ``costs`` are what an alias charges per (endpoint, model), ``pin`` the digest asked
    for."""

    resolved: str
    rows: tuple[Row, ...]
    costs: Mapping[tuple[Endpoint, str], float] | None = None
    pin: bytes | None = None


def offer_of(asked: str, fleet: Fleet, policy: PlacementPolicy) -> Offer | None:
    """The rows that go by ``asked``, or None if that is no name. Empty stays empty."""
    for alias, targets in policy.aliases:
        if alias == asked:
            return _aliased(asked, targets, fleet, policy)
    name = parse_model_name(asked)
    if name is None:
        return None
    rows = fleet.offered(name.name, name.tagged, name.digest)
    return Offer(resolved=name.name, rows=rows, pin=name.digest)


def _aliased(asked: str, targets: tuple[str, ...], fleet: Fleet, policy: PlacementPolicy) -> Offer:
    rows: list[Row] = []
    costs: dict[tuple[Endpoint, str], float] = {}
    for step, target in enumerate(targets):
        name = parse_model_name(target)
        if name is None:
            continue
        for row in fleet.offered(name.name, name.tagged, name.digest):
            if (row.key, row.model) not in costs:
                costs[row.key, row.model] = min(policy.alias_most, policy.alias_step * step)
                rows.append(row)
    return Offer(resolved=targets[0], rows=tuple(rows), costs=costs)


def with_one_digest(offer: Offer, need: Need, fleet: Fleet, now: int) -> tuple[Need, tuple[Row, ...], bool]:
    """Settle which digest is meant, and add rows that have it under another name. True if there was a conflict."""
    if offer.costs is not None:
        return need, offer.rows, False
    digest, conflict = offer.pin, False
    if digest is None:
        digests = {row.digest for row in offer.rows}
        digests.discard(None)
        if not digests:
            return need, offer.rows, False
        conflict = len(digests) > 1
        digest = _most_common(offer.rows, need, fleet.breakers, now) if conflict else digests.pop()
    rows = offer.rows
    twins = fleet.with_digest(digest) if digest is not None else ()
    if len(twins) > sum(row.digest == digest for row in rows):
        known = {(row.key, row.model) for row in rows}
        rows += tuple(row for row in twins if (row.key, row.model) not in known)
    return replace(need, digest=digest), rows, conflict


def _most_common(rows: tuple[Row, ...], need: Need, breakers: Breaking | None, now: int) -> bytes | None:
    votes = Counter(
        row.digest for row in rows if row.digest is not None and closed(row, need, breakers, now) is None
    ) or Counter(row.digest for row in rows if row.digest is not None)
    return min(votes, key=lambda digest: (-votes[digest], digest), default=None)
