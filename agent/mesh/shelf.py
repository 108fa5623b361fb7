"""What the mesh machine remembers across processes, between its bytes and the store's files."""

from collections.abc import Mapping

from msgspec import msgpack

from agent.store.marks import Floor, MarkFiles
from agent.store.members import PeerFiles
from router_core import limits
from router_core.ids import Id16, MeshId, NodeId, id16_of, id32_of
from router_core.mesh.protocol.events import SavedKey
from router_core.mesh.records import saved
from router_core.record.membership import Member
from router_core.record.stamp import Stamp
from router_core.record.state import Address


class MeshShelf:
    """Loads what a machine starts from; ``save`` runs in the driver's writer thread."""

    def __init__(self, marks: MarkFiles, peers: PeerFiles) -> None:
        self._marks = marks
        self._peers = peers
        self._stored = peers.load()

    def load(self, mesh_id: MeshId, members: tuple[Member, ...]) -> saved.Saved:
        """Epoch, floors and addresses as the store has them; what was damaged reads as unknown."""
        floors = sorted(self._marks.floors().items())
        return saved.Saved(
            mesh_id=mesh_id,
            members=members,
            epoch=self._marks.epoch(),
            floors=tuple(_floor(id16, floor) for id16, floor in floors),
            addresses=tuple(
                saved.KnownAddresses(id16_of(id32_of(node_id)), addrs)
                for node_id, addrs in self._stored.items()
            ),
        )

    def save(self, key: SavedKey, data: bytes, members: Mapping[Id16, Member]) -> None:
        """Write what the machine encoded; raises ``OSError``. Addresses of those not among ``members`` are dropped."""
        match key:
            case SavedKey.EPOCH:
                self._marks.save_epoch(msgpack.decode(data, type=int))
            case SavedKey.FLOORS:
                floors = msgpack.decode(data, type=tuple[saved.RecordFloor, ...])
                self._marks.save_floors({Id16(floor.id16): _stored_floor(floor) for floor in floors})
            case SavedKey.ADDRESSES:
                known = msgpack.decode(data, type=tuple[saved.KnownAddresses, ...])
                self._save_addresses(
                    {members[Id16(peer.id16)].node_id: peer.addrs for peer in known if peer.id16 in members}
                )

    def _save_addresses(self, newest: dict[NodeId, tuple[Address, ...]]) -> None:
        for node_id in self._stored.keys() - newest.keys():
            self._peers.forget(node_id)
        for node_id, addrs in newest.items():
            if self._stored.get(node_id) != addrs:
                self._peers.save(node_id, addrs)
        self._stored = newest


def _floor(id16: Id16, floor: Floor) -> saved.RecordFloor:
    return saved.RecordFloor(
        id16=id16,
        v_epoch=floor.volatile.epoch,
        v_seq=floor.volatile.seq,
        s_epoch=floor.static.epoch,
        s_seq=floor.static.seq,
        l_epoch=floor.leave.epoch,
        l_seq=floor.leave.seq,
        proof=floor.proof,
    )


def _stored_floor(floor: saved.RecordFloor) -> Floor:
    proof = floor.proof
    return Floor(
        static=Stamp(floor.s_epoch, floor.s_seq),
        volatile=Stamp(floor.v_epoch, floor.v_seq),
        leave=Stamp(floor.l_epoch, floor.l_seq),
        proof=proof if proof is not None and len(proof.signed) <= limits.V_SIGNED else None,
    )
