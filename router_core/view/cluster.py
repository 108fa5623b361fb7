"""The immutable view of the mesh at one moment: each node as this node sees it.

Nothing here changes after it was built. Ages are computed by the reader, an unknown stays None. ``fold`` makes the next
view from the last one; which models are offered is indexed by ``placement``.
"""

from collections.abc import Mapping

from msgspec import Struct

from router_core.ids import Id16, NodeId, NodeName
from router_core.record.membership import Liveness, Member
from router_core.record.state import Static, Volatile


class NodeView(Struct, frozen=True, gc=False, kw_only=True):
    """One node as this node sees it.

    ``label`` is its name, marked where another member has the same one.
    ``member`` is None only for the own node while it has no roster entry. ``routable`` is the verdict on liveness,
    role and flags, draining included, and on whether it takes requests from here at all: if not, it is ``unreachable``.
    ``mono_ms + base_ms`` is when the newest V was taken, in our clock. ``rtt_ms`` is
    None if no link of ours leads there.
    """

    id16: Id16
    node_id: NodeId
    name: NodeName
    label: str
    member: Member | None
    roles: int
    liveness: Liveness
    is_self: bool
    routable: bool
    draining: bool
    lonely: bool
    conflict: bool
    quarantined: bool
    volatile: Volatile | None
    static: Static | None
    mono_ms: int
    base_ms: int
    due_ms: int
    epoch: int
    inst: int
    seq: int
    rtt_ms: int | None = None
    unreachable: bool = False

    @property
    def taken_ms(self) -> int:
        """When the newest V was taken, in this host's boot clock."""
        return self.mono_ms + self.base_ms

    @property
    def period_ms(self) -> int:
        """The origin's publish period: half of what it promises."""
        return max(1, self.due_ms // 2)

    def age_ms(self, now: int) -> int:
        """Age of the newest V in ms, never negative."""
        return max(0, now - self.mono_ms - self.base_ms)


class ClusterView(Struct, frozen=True, gc=False, kw_only=True):
    """All nodes known at generation ``gen``, keyed by id16, the own node (``me``) included once it has published.

    ``members`` is the roster that it was folded under, ``labels`` what each of these nodes is called, seen or not.
    """

    gen: int
    me: Id16
    node_id: NodeId
    name: NodeName
    nodes: Mapping[Id16, NodeView]
    members: Mapping[Id16, Member]
    labels: Mapping[NodeId, str]

    @property
    def own(self) -> NodeView | None:
        """This node itself, or None before its first record."""
        return self.nodes.get(self.me)
