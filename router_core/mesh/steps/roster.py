"""What a changed roster does: new members are pursued, removed ones forgotten, another mesh id starts all over.

Stamps outlive their entry as floors, so a member that returns cannot be impersonated by its past. Who may speak is
decided elsewhere; here it is taken as given.
"""

from router_core.ids import Id16, MeshId, mesh8_of
from router_core.mesh.parts import Parts
from router_core.mesh.protocol.messages import ByeCode
from router_core.mesh.records.origin import Origin
from router_core.mesh.steps import link_life
from router_core.record.membership import Liveness, Member


def roster_changed(
    parts: Parts, members: tuple[Member, ...], mesh_id: MeshId, now: int, *, starting: bool
) -> None:
    """Take over the roster; ``LocalMisuse`` if a certificate does not hold its member's key."""
    moved = mesh_id != parts.mesh_id
    if moved:
        _leave_for(parts, mesh_id, now)
    listed = {member.id16: member for member in members if member.id16 != parts.me.id16}
    for id16 in [id16 for id16 in parts.origins if id16 not in listed]:
        _remove(parts, parts.origins[id16], now)
    for id16, member in listed.items():
        parts.receiver.removed.pop(id16, None)
        origin = parts.origins.get(id16)
        if origin is None or origin.member.der != member.der:
            parts.origins[id16] = Origin(member, parts.policy, now, parts.floors.get(id16), mesh8_of(mesh_id))
        else:
            origin.member = member
    parts.dialler.set_peers(listed, now, starting=starting or moved)
    parts.forget_wants()


def _remove(parts: Parts, origin: Origin, now: int) -> None:
    id16 = origin.id16
    _forget(parts, origin)
    parts.receiver.removed[id16] = None
    for link in parts.links_to(id16):
        link_life.drop(parts, link, ByeCode.REMOVED, now)
    origin.enter(Liveness.REMOVED, now)
    parts.changed(origin, now, urgent=True)


def _leave_for(parts: Parts, mesh_id: MeshId, now: int) -> None:
    """Another mesh id: no link, no foreign record and no own seal survives; stamps do."""
    parts.mesh_id = mesh_id
    for link in list(parts.links.values()):
        parts.close(link, ByeCode.WRONG_MESH, now)
    for origin in list(parts.origins.values()):
        origin.forget_mesh()
        _forget(parts, origin)
        if origin.state is not None and origin.enter(Liveness.GONE, now):
            parts.changed(origin, now, urgent=True)
    parts.receiver.mesh8 = mesh8_of(mesh_id)
    parts.publisher.start_over(mesh8_of(mesh_id))


def _forget(parts: Parts, origin: Origin) -> None:
    id16: Id16 = origin.id16
    origin.forget()
    parts.floors[id16] = origin.floor()
    parts.hearsay.forget(id16)
    parts.losses.forget(id16)
    parts.origins.pop(id16, None)
