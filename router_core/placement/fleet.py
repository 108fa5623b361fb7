"""The view, profiles and policy folded into rows ready to be scored. Built per snapshot, never per request.

A *row* is (endpoint, served model). Owns: the constants of each row, the index by model, the fleet-wide aggregates
(herd multiplier, calibration of priors). Rules: unknown stays None or costs the stated amount; nothing here changes
after it was built except what ``live`` looks up. Refuses to know requests.
"""

from collections.abc import Container, Iterable, Mapping
from typing import Protocol

from msgspec import Struct

from router_core.ids import Id16, NodeId, NodeName
from router_core.placement.ledger import Ledger
from router_core.placement.request import Endpoint, NodeRef
from router_core.placement.rows import ALIVE, Calibration, Draft, Row, drafts_of, row_of
from router_core.policy.placement import PlacementPolicy
from router_core.profile.profiles import Profiles
from router_core.record.membership import Liveness
from router_core.view.cluster import ClusterView

_NO_ROWS: tuple[Row, ...] = ()


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
    suspects: Container[Endpoint] = frozenset()


class Fleet(Struct, frozen=True, kw_only=True):
    """All rows of one snapshot. ``by_name`` holds names of all engines but Ollama, ``by_tag`` Ollama's with their tag.

    ``m_r`` multiplies own uncovered work by what the other routers probably did at the same time.
    """

    gen: int
    me: Id16
    node_id: NodeId
    rows: tuple[Row, ...]
    by_name: Mapping[str, tuple[Row, ...]]
    by_tag: Mapping[str, tuple[Row, ...]]
    by_digest: Mapping[bytes, tuple[Row, ...]]
    by_key: Mapping[tuple[Endpoint, str], Row]
    node_names: Mapping[NodeName, frozenset[NodeId]]
    endpoints: frozenset[tuple[NodeId, str]]
    work_means: Mapping[Endpoint, tuple[int, float]]
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
    """The rows of ``view``. ``previous`` carries the smoothed work of each endpoint on; ``live.ledger`` is told which
    of its entries the new records cover."""
    live.ledger.cover(view)
    drafts = [draft for node in view.nodes.values() for draft in drafts_of(node, profiles)]
    scales = Calibration(drafts, profiles)
    means = _work_means(previous, drafts)
    others = sum(node.liveness in ALIVE and not node.is_self for node in view.nodes.values())
    rows = tuple(
        row_of(draft, scales.scaled(draft), means[draft.key][1], others, profiles, policy, now)
        for draft in drafts
    )
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
        rows=rows,
        by_name=_by_name(row for row in rows if row.engine != "ollama"),
        by_tag=_by_name(row for row in rows if row.engine == "ollama"),
        by_digest={digest: tuple(found) for digest, found in by_digest.items()},
        by_key={(row.key, row.model): row for row in rows},
        node_names={name: frozenset(ids) for name, ids in names.items()},
        endpoints=frozenset((row.node_id, row.endpoint) for row in rows),
        work_means=means,
        m_r=herd_multiplier(view, policy),
        profiles=profiles,
        live=live,
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


def _work_means(previous: Fleet | None, drafts: list[Draft]) -> dict[Endpoint, tuple[int, float]]:
    means: dict[Endpoint, tuple[int, float]] = {}
    for draft in drafts:
        if draft.key in means:
            continue
        work = draft.load.work_ds / 10.0
        known = previous.work_means.get(draft.key) if previous is not None else None
        if known is None:
            means[draft.key] = (draft.node.seq, work)
        elif known[0] == draft.node.seq:
            means[draft.key] = known
        else:
            means[draft.key] = (draft.node.seq, known[1] + 0.1 * (work - known[1]))
    return means


def _by_name(rows: Iterable[Row]) -> dict[str, tuple[Row, ...]]:
    index: dict[str, list[Row]] = {}
    for row in rows:
        for name in row.names:
            index.setdefault(name, []).append(row)
    return {name: tuple(found) for name, found in index.items()}
