"""The view, profiles and policy folded into rows ready to be scored. Built per snapshot, never per request.

A *row* is (endpoint, served model). Owns: the constants of each row, what may be kept from one snapshot to the next,
the fleet-wide aggregates (herd multiplier, scales of priors). Rules: unknown stays None or costs the stated amount;
nothing here changes after it was built except what ``live`` looks up and ``sifted`` remembers. It knows
nothing of requests.
"""

from collections.abc import Collection, Iterable, Mapping
from operator import attrgetter
from typing import Protocol

from msgspec import Struct

from router_core.ids import Id16, NodeId, NodeName
from router_core.placement.candidates.admission import Squeeze, squeeze_of
from router_core.placement.candidates.candidate import (
    ALIVE,
    Draft,
    Row,
    drafts_of,
    redrafted,
    row_of,
    seen_load_s,
)
from router_core.placement.candidates.circuits import Breaking, NoBreakers
from router_core.placement.candidates.index import Index, Positions, index_of
from router_core.placement.candidates.passed import Kind, Sifted
from router_core.placement.candidates.scales import Scales, scales_of
from router_core.placement.ledger import Ledger
from router_core.placement.request.request import Endpoint, NodeRef, RequestClass
from router_core.policy.placement import PlacementPolicy
from router_core.profile.profiles import Profiles
from router_core.record.membership import Liveness
from router_core.record.state import Role
from router_core.view.cluster import ClusterView, NodeView

_SCALES_MS = 1_000
_HEARING_MS = 10_000
_NODE = int(Role.NODE)
_NODE_ID = attrgetter("node_id")


class Room(Protocol):
    """Where requests wait while everybody is full, as far as choosing needs it."""

    def has_room(self, body_bytes: int, share: float) -> bool:
        """Whether one with a body of this size may join, if its class may fill ``share`` of the room."""


class NoRoom:
    """Nobody waits: who finds everybody full is refused."""

    def has_room(self, body_bytes: int, share: float) -> bool:
        return False


class Live(Struct, frozen=True, kw_only=True):
    """What this router knows beyond any snapshot: own work, breakers, whether requests may be held, endpoints that
    stopped in mid-stream or let several requests wait for too long, what it costs that an endpoint is ``late`` or full,
    classes whose requests leave the mesh where they may, and own models (endpoint, model) that
    are being unloaded."""

    ledger: Ledger
    started_ms: int | None = None
    breakers: Breaking = NoBreakers()
    hold: Room = NoRoom()
    suspects: Collection[Endpoint] = frozenset()
    late: Mapping[Endpoint, float] = {}
    spilling: Collection[RequestClass] = frozenset()
    leaving: Collection[tuple[str, str]] = frozenset()


class Part(Struct, frozen=True, kw_only=True):
    """The rows of one node, with what they were made of: the same inputs need not be folded again."""

    node: NodeView
    learned: int
    alone: bool
    scales: Scales
    drafts: tuple[Draft, ...]
    rows: tuple[Row, ...]


class Fleet(Struct, frozen=True, kw_only=True):
    """All rows of one snapshot, by node id and position, so that nothing depends on who was heard first.

    ``m_r`` multiplies own uncovered work by what the other routers probably did at the same time. ``learned`` and
    ``scaled_ms`` tell of which profiles, and when, the scales were made. ``sifted`` holds what decisions found out about
    these rows that holds for the next ones too. ``silent`` are members that may serve and have not said so in this life, or do not any more.
    """

    gen: int
    me: Id16
    node_id: NodeId
    policy: PlacementPolicy
    parts: Mapping[Id16, Part]
    scales: Scales
    learned: int
    scaled_ms: int
    rows: tuple[Row, ...]
    index: Index
    m_r: float
    profiles: Profiles
    live: Live
    sifted: dict[Kind, Sifted]
    silent: tuple[tuple[NodeId, NodeName], ...] = ()

    def hears_until(self, now: int) -> int | None:
        """Until when (boot ms) members that were not heard in this life may be expected to tell of themselves; None if
        there is none, or it has been long enough."""
        started_ms = self.live.started_ms
        if not self.silent or started_ms is None or now >= started_ms + _HEARING_MS:
            return None
        return started_ms + _HEARING_MS

    @property
    def breakers(self) -> Breaking | None:
        """The breakers, None while every one is closed."""
        return self.live.breakers if len(self.live.breakers) else None

    def offered(self, name: str, tagged: str, digest: bytes | None) -> tuple[Row, ...]:
        """Rows that go by this name (in Ollama's form for Ollama's), or have this digest."""
        index = self.index
        found = index.by_name.get(name, ()) + index.by_tag.get(tagged, ())
        if digest is not None:
            found = tuple(dict.fromkeys(found + index.by_digest.get(digest, ())))
        return self._at(found)

    def with_digest(self, digest: bytes) -> tuple[Row, ...]:
        """Rows whose model has this digest."""
        return self._at(self.index.by_digest.get(digest, ()))

    def with_base(self, base: bytes) -> tuple[Row, ...]:
        """Rows of these weights in any quantisation."""
        return self._at(self.index.by_base.get(base, ()))

    def with_family(self, family: str) -> tuple[Row, ...]:
        """Rows of models of this family."""
        return self._at(self.index.by_family.get(family, ()))

    def _at(self, positions: Positions) -> tuple[Row, ...]:
        rows = self.rows
        return tuple([rows[position] for position in positions])

    def row(self, endpoint: Endpoint, model: str) -> Row | None:
        """The row of a decision: ``model`` as served at ``endpoint``, byte for byte."""
        position = self.index.by_key.get((endpoint, model))
        return self.rows[position] if position is not None else None

    def knows(self, ref: NodeRef) -> bool:
        """True if a node, and the endpoint if one is named, of this reference is in the snapshot."""
        names = self.index.node_names
        if ref.name is not None:
            ids = frozenset(each for each in names.get(ref.name, ()) if each.startswith(ref.mark))
        else:
            ids = frozenset(
                node_id for known in names.values() for node_id in known if node_id == ref.node_id
            )
        return bool(ids) and (
            ref.endpoint is None or any((node_id, ref.endpoint) in self.index.endpoints for node_id in ids)
        )

    def is_silent(self, ref: NodeRef) -> bool:
        """True if ``ref`` means a member that does not say that it serves."""
        return any(
            node_id == ref.node_id
            if ref.node_id is not None
            else name == ref.name and node_id.startswith(ref.mark)
            for node_id, name in self.silent
        )

    def names(self) -> Iterable[str]:
        """Every name a request could use."""
        yield from self.index.by_name
        yield from self.index.by_tag


def fold_fleet(
    previous: Fleet | None,
    view: ClusterView,
    profiles: Profiles,
    policy: PlacementPolicy,
    live: Live,
    now: int,
    *,
    news: bool = False,
) -> Fleet:
    """The rows of ``view``; those of nodes about which nothing changed are taken over from ``previous``. ``news``: what was
    learned last is to be known of everywhere at once.

    ``live.ledger`` is told which of its entries the new records cover.
    """
    live.ledger.cover(view)
    if previous is not None and previous.policy is not policy:
        previous = None
    known: Mapping[Id16, Part] = previous.parts if previous is not None else {}
    drafts = {id16: _drafts(node, known.get(id16), profiles) for id16, node in view.nodes.items()}
    same = previous if previous is not None and _same_offers(known, view) else None
    scaled = same if same is not None and not (news or _scales_are_due(same, profiles, now)) else None
    if scaled is None:
        scales = scales_of((draft for found in drafts.values() for draft in found), profiles)
        if previous is not None and scales == previous.scales:
            scales = previous.scales
    else:
        scales = scaled.scales
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
            part = _part_of(node, drafts[id16], scales, alone, profiles, policy, now)
        parts[id16] = part
    rows = tuple([row for part in parts.values() for row in part.rows])
    nodes = ((node.name, node.node_id) for node in view.nodes.values())
    return Fleet(
        gen=view.gen,
        me=view.me,
        node_id=view.node_id,
        policy=policy,
        parts=parts,
        scales=scales,
        learned=scaled.learned if scaled is not None else profiles.gen,
        scaled_ms=scaled.scaled_ms if scaled is not None else now,
        rows=rows,
        index=same.index if same is not None else index_of(rows, nodes),
        m_r=herd_multiplier(view, policy),
        profiles=profiles,
        live=live,
        sifted={},
        silent=tuple(
            [
                (member.node_id, member.name)
                for id16, member in view.members.items()
                if member.roles & _NODE and id16 != view.me and not _is_heard(view.nodes.get(id16))
            ]
        ),
    )


def _is_heard(node: NodeView | None) -> bool:
    """What a member said before, that it is alone or unheard, may be over since this node is back."""
    return node is not None and (node.routable or node.draining)


def _drafts(node: NodeView, known: Part | None, profiles: Profiles) -> tuple[Draft, ...]:
    if known is None or not _offers_as(known.node, node):
        return tuple(drafts_of(node, profiles))
    return known.drafts if known.node is node else tuple(redrafted(known.drafts, node))


def _same_offers(known: Mapping[Id16, Part], view: ClusterView) -> bool:
    """True if the same nodes offer the same models under the same names as before: whatever else moved, rows stay in
    their places."""
    return known.keys() == view.nodes.keys() and all(
        _offers_as(known[id16].node, node) for id16, node in view.nodes.items()
    )


def _offers_as(old: NodeView, new: NodeView) -> bool:
    """True if ``new`` offers what ``old`` did, under the same names."""
    return old is new or (
        old.static is new.static
        and (old.volatile is None) is (new.volatile is None)
        and old.name == new.name
        and old.label == new.label
        and old.node_id == new.node_id
    )


def _scales_are_due(fleet: Fleet, profiles: Profiles, now: int) -> bool:
    """Scales move slowly: what was learned since is taken in once a second."""
    return fleet.learned != profiles.gen and now - fleet.scaled_ms >= _SCALES_MS


def _part_of(
    node: NodeView,
    drafts: tuple[Draft, ...],
    scales: Scales,
    alone: bool,
    profiles: Profiles,
    policy: PlacementPolicy,
    now: int,
) -> Part:
    squeezes: dict[int, Squeeze] = {}
    for draft in drafts:
        position = draft.model.engine
        if position not in squeezes:
            squeezes[position] = squeeze_of(draft.static, draft.volatile, draft.engine, policy.unknown_factor)
    by_position = {draft.position: draft for draft in drafts}

    def reload_s(position: int) -> float | None:
        draft = by_position.get(position)
        return None if draft is None else seen_load_s(draft, profiles)

    return Part(
        node=node,
        learned=profiles.changed_at(node.id16),
        alone=alone,
        scales=scales,
        drafts=drafts,
        rows=tuple(
            row_of(
                draft,
                scales.scaled(draft),
                squeezes[draft.model.engine],
                alone,
                profiles,
                policy,
                now,
                reload_s,
            )
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
