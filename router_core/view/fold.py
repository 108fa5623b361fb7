"""Changes in, next snapshot out.

A change replaces all that was known of its origin; GONE, LEFT and REMOVED nodes leave the view. Freshness is judged by
the mesh, and no history is kept.
"""

from collections.abc import Container, Iterable, Mapping

from msgspec.structs import replace

from router_core.ids import Id16, Id32, NodeName, id16_of, labels_of, node_id_of
from router_core.record.membership import Liveness, Member, ViewChange
from router_core.record.state import Flag
from router_core.view.cluster import ClusterView, NodeView
from router_core.view.freshness import is_routable

_ABSENT = frozenset({Liveness.GONE, Liveness.LEFT, Liveness.REMOVED})


def empty(me: Id32, name: NodeName) -> ClusterView:
    """The picture of the node ``me``, called ``name``, before anything was heard."""
    return ClusterView(
        gen=0,
        me=id16_of(me),
        node_id=node_id_of(me),
        name=name,
        nodes={},
        members={},
        labels={node_id_of(me): name},
    )


def fold(
    view: ClusterView,
    changes: Iterable[ViewChange],
    members: Mapping[Id16, Member],
    now: int,
    unreachable: Container[Id16] = (),
) -> ClusterView:
    """The next snapshot: ``view`` with ``changes`` applied under the roster ``members``.

    Nodes whose roster entry changed or vanished are re-judged even without a change of their own, and so are those that
    came to be ``unreachable`` for requests, or reachable again. The own node stays whatever the roster says of it.
    """
    if members is not view.members:
        names = {member.node_id: member.name for member in members.values()}
        names.setdefault(view.node_id, view.name)
        view = replace(view, members=members, labels=labels_of(names))
    nodes = dict(view.nodes)
    for change in changes:
        if change.state in _ABSENT and change.origin != view.me:
            nodes.pop(change.origin, None)
        else:
            nodes[change.origin] = _node_of(view, change, members.get(change.origin))
    for id16, node in list(nodes.items()):
        member = members.get(id16)
        if member is None and not node.is_self:
            del nodes[id16]
            continue
        cut_off = id16 in unreachable and not node.is_self
        if (
            member != node.member
            or node.label != view.labels[node.node_id]
            or node.unreachable is not cut_off
        ):
            nodes[id16] = _rejudged(view, node, member, cut_off)
    return replace(view, gen=view.gen + 1, nodes=nodes)


def _node_of(view: ClusterView, change: ViewChange, member: Member | None) -> NodeView:
    volatile, static = change.volatile, change.static
    is_self = change.origin == view.me
    flags = volatile.flags if volatile is not None else 0
    roles = member.roles if member is not None else 0
    return NodeView(
        id16=change.origin,
        node_id=member.node_id if member is not None else view.node_id,
        name=member.name if member is not None else view.name,
        label=view.labels[member.node_id if member is not None else view.node_id],
        member=member,
        roles=roles,
        liveness=change.state,
        is_self=is_self,
        routable=is_routable(
            is_self=is_self,
            roles=roles,
            liveness=change.state,
            volatile=volatile,
            static=static,
            quarantined=change.quarantined,
        ),
        draining=bool(flags & Flag.DRAINING),
        lonely=bool(flags & Flag.LONELY),
        conflict=bool(flags & Flag.CONFLICT),
        quarantined=change.quarantined,
        volatile=volatile,
        static=static,
        mono_ms=change.mono_ms,
        base_ms=change.base_ms,
        due_ms=change.due_ms,
        epoch=change.epoch,
        inst=change.inst,
        seq=change.seq,
        rtt_ms=change.rtt_ms,
    )


def _rejudged(view: ClusterView, node: NodeView, member: Member | None, unreachable: bool) -> NodeView:
    roles = member.roles if member is not None else 0
    return replace(
        node,
        member=member,
        node_id=member.node_id if member is not None else view.node_id,
        name=member.name if member is not None else view.name,
        label=view.labels[member.node_id if member is not None else view.node_id],
        roles=roles,
        unreachable=unreachable,
        routable=not unreachable
        and is_routable(
            is_self=node.is_self,
            roles=roles,
            liveness=node.liveness,
            volatile=node.volatile,
            static=node.static,
            quarantined=node.quarantined,
        ),
    )
