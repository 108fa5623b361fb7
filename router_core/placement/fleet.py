"""The view, profiles and policy folded into rows ready to be scored. Built per snapshot, never per request.

A *row* is (endpoint, served model). Owns: the constants of each row, the index by model, the fleet-wide aggregates
(herd multiplier, scales of priors). Rules: unknown stays None or costs the stated amount; nothing here changes
after it was built except what ``live`` looks up. Refuses to know requests.
"""

from collections.abc import Collection, Iterable, Mapping
from operator import attrgetter
from typing import Protocol

from msgspec import Struct

from router_core.ids import Id16, NodeId, NodeName
from router_core.placement.ledger import Ledger
from router_core.placement.request import Endpoint, NodeRef
from router_core.placement.rows import ALIVE, Draft, Row, drafts_of, row_of
from router_core.placement.scales import Scales, scales_of
from router_core.policy.placement import PlacementPolicy
from router_core.profile.profiles import Profiles
from router_core.record.membership import Liveness
from router_core.view.cluster import ClusterView, NodeView

_NO_ROWS: tuple[Row, ...] = ()
_SMOOTHING = 0.1
_NODE_ID = attrgetter("node_id")


class Breaking(Protocol):
    """The circuit breakers of this router, as far as choosing needs them."""

    def __len__(self) -> int:
        """How many endpoints have a fault on record; 0 means all are closed."""

    def state(self, endpoint: Endpoint, now: int) -> int:
        """0 closed, 1 half-open (ready for one trial), 2 open."""

    def last_fault_ms(self, endpoint: Endpoint) -> int | None:
        """When the endpoint last failed, boot ms; None if it never did."""


class NoBreakers:
    """Every breaker closed, always."""

    def __len__(self) -> int:
        return 0

    def state(self, endpoint: Endpoint, now: int) -> int:
        return 0

    def last_fault_ms(self, endpoint: Endpoint) -> int | None:
        return None


class Live(Struct, frozen=True, kw_only=True):
    """What this router knows beyond any snapshot: own work, breakers, and endpoints that stopped in mid-stream."""

    ledger: Ledger
    breakers: Breaking = NoBreakers()
    suspects: Collection[Endpoint] = frozenset()


class Part(Struct, frozen=True, kw_only=True):
    """The rows of one node, with what they were made of: the same inputs need not be folded again. ``means`` are the
    smoothed outstanding seconds of its endpoints."""

    node: NodeView
    learned: int
    alone: bool
    scales: Scales
    drafts: tuple[Draft, ...]
    means: Mapping[Endpoint, float]
    rows: tuple[Row, ...]


class Fleet(Struct, frozen=True, kw_only=True):
    """All rows of one snapshot, by node id and position, so that nothing depends on who was heard first.

    ``by_name`` holds names of all engines but Ollama, ``by_tag`` Ollama's with their tag. ``m_r`` multiplies own
    uncovered work by what the other routers probably did at the same time.
    """

    gen: int
    me: Id16
    node_id: NodeId
    policy: PlacementPolicy
    parts: Mapping[Id16, Part]
    scales: Scales
    rows: tuple[Row, ...]
    by_name: Mapping[str, tuple[Row, ...]]
    by_tag: Mapping[str, tuple[Row, ...]]
    by_digest: Mapping[bytes, tuple[Row, ...]]
    by_key: Mapping[tuple[Endpoint, str], Row]
    node_names: Mapping[NodeName, frozenset[NodeId]]
    endpoints: frozenset[tuple[NodeId, str]]
    m_r: float
    profiles: Profiles
    live: Live

    @property
    def breakers(self) -> Breaking | None:
        """The breakers, None while every one is closed."""
        return self.live.breakers if len(self.live.breakers) else None

    def offered(self, name: str, tagged: str, digest: bytes | None) -> tuple[Row, ...]:
        """Rows that go by this name (in Ollama's form for Ollama's), or have this digest."""
        plain, ollama = self.by_name.get(name, _NO_ROWS), self.by_tag.get(tagged, _NO_ROWS)
        rows = plain + ollama if plain and ollama else plain or ollama
        if digest is not None:
            known = {(row.key, row.model) for row in rows}
            rows += tuple(
                row for row in self.by_digest.get(digest, _NO_ROWS) if (row.key, row.model) not in known
            )
        return rows

    def row(self, endpoint: Endpoint, model: str) -> Row | None:
        """The row of a decision: ``model`` as served at ``endpoint``, byte for byte."""
        return self.by_key.get((endpoint, model))

    def knows(self, ref: NodeRef) -> bool:
        """True if a node, and the endpoint if one is named, of this reference is in the snapshot."""
        if ref.name is not None:
            ids = self.node_names.get(ref.name, frozenset())
        else:
            ids = frozenset(
                node_id for known in self.node_names.values() for node_id in known if node_id == ref.node_id
            )
        return bool(ids) and (
            ref.endpoint is None or any((node_id, ref.endpoint) in self.endpoints for node_id in ids)
        )

    def names(self) -> Iterable[str]:
        """Every name a request could use."""
        yield from self.by_name
        yield from self.by_tag


def fold_fleet(
    previous: Fleet | None,
    view: ClusterView,
    profiles: Profiles,
    policy: PlacementPolicy,
    live: Live,
    now: int,
) -> Fleet:
    """The rows of ``view``; those of nodes about which nothing changed are taken over from ``previous``.

    ``live.ledger`` is told which of its entries the new records cover.
    """
    live.ledger.cover(view)
    if previous is not None and previous.policy is not policy:
        previous = None
    known: Mapping[Id16, Part] = previous.parts if previous is not None else {}
    drafts = {
        id16: part.drafts
        if (part := known.get(id16)) is not None and part.node is node
        else tuple(drafts_of(node, profiles))
        for id16, node in view.nodes.items()
    }
    scales = scales_of((draft for found in drafts.values() for draft in found), profiles)
    if previous is not None and scales == previous.scales:
        scales = previous.scales
    alone = not any(node.liveness in ALIVE and not node.is_self for node in view.nodes.values())
    parts: dict[Id16, Part] = {}
    for node in sorted(view.nodes.values(), key=_NODE_ID):
        id16 = node.id16
        part = known.get(id16)
        learned = profiles.changed_at(id16)
        if (
            part is None
            or part.node is not node
            or (part.learned, part.alone) != (learned, alone)
            or part.scales is not scales
        ):
            part = _part_of(node, drafts[id16], part, scales, alone, profiles, policy, now)
        parts[id16] = part
    rows = tuple([row for part in parts.values() for row in part.rows])
    names: dict[NodeName, set[NodeId]] = {}
    for node in view.nodes.values():
        names.setdefault(node.name, set()).add(node.node_id)
    by_digest: dict[bytes, list[Row]] = {}
    for row in rows:
        if row.digest is not None:
            by_digest.setdefault(row.digest, []).append(row)
    return Fleet(
        gen=view.gen,
        me=view.me,
        node_id=view.node_id,
        policy=policy,
        parts=parts,
        scales=scales,
        rows=rows,
        by_name=_by_name(row for row in rows if row.engine != "ollama"),
        by_tag=_by_name(row for row in rows if row.engine == "ollama"),
        by_digest={digest: tuple(found) for digest, found in by_digest.items()},
        by_key={(row.key, row.model): row for row in rows},
        node_names={name: frozenset(ids) for name, ids in names.items()},
        endpoints=frozenset([(row.node_id, row.endpoint) for row in rows]),
        m_r=herd_multiplier(view, policy),
        profiles=profiles,
        live=live,
    )


def _part_of(
    node: NodeView,
    drafts: tuple[Draft, ...],
    previous: Part | None,
    scales: Scales,
    alone: bool,
    profiles: Profiles,
    policy: PlacementPolicy,
    now: int,
) -> Part:
    means = _work_means(node, drafts, previous)
    return Part(
        node=node,
        learned=profiles.changed_at(node.id16),
        alone=alone,
        scales=scales,
        drafts=drafts,
        means=means,
        rows=tuple(
            row_of(draft, scales.scaled(draft), means[draft.key], alone, profiles, policy, now)
            for draft in drafts
        ),
    )


def herd_multiplier(view: ClusterView, policy: PlacementPolicy) -> float:
    """All routers' work over own work, in bounds: what probably arrived beside each request of ours."""
    own = view.own
    sent = own.volatile.disp if own is not None and own.volatile is not None else None
    mine = sent.work_c if sent is not None else 0
    total, routers = mine, 1
    for node in view.nodes.values():
        if node.is_self or node.liveness is not Liveness.FRESH or node.volatile is None:
            continue
        disp = node.volatile.disp
        if disp is not None and disp.work_c:
            total += disp.work_c
            routers += 1
    cap = policy.herd_cap if routers <= policy.herd_crowd else policy.herd_cap_crowd
    if mine == 0:
        return cap
    return min(cap, max(policy.herd_floor, total / mine))


def _work_means(node: NodeView, drafts: tuple[Draft, ...], previous: Part | None) -> Mapping[Endpoint, float]:
    """Outstanding work of each endpoint of ``node``, smoothed over its records."""
    if previous is not None and previous.node.seq == node.seq and previous.node.epoch == node.epoch:
        known, rate = previous.means, 0.0
    else:
        known, rate = previous.means if previous is not None else {}, _SMOOTHING
    means: dict[Endpoint, float] = {}
    for draft in drafts:
        work = draft.load.work_ds / 10.0
        mean = known.get(draft.key, work)
        means[draft.key] = mean + rate * (work - mean)
    return means


def _by_name(rows: Iterable[Row]) -> dict[str, tuple[Row, ...]]:
    index: dict[str, list[Row]] = {}
    for row in rows:
        for name in row.names:
            index.setdefault(name, []).append(row)
    return {name: tuple(found) for name, found in index.items()}
