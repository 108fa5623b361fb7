"""What the rooms above the records hand to each other about members: who may speak, how alive, what changed."""

from enum import Enum

from msgspec import Struct

from router_core.ids import Id16, Id32, NodeId, NodeName, node_id_of
from router_core.record.state import Static, Volatile


class Liveness(Enum):
    """A local verdict on one origin; nobody can declare it for anybody else."""

    UNCONFIRMED = "unconfirmed"
    FRESH = "fresh"
    LATE = "late"
    SUSPECT = "suspect"
    GONE = "gone"
    LEFT = "left"
    REMOVED = "removed"


class Member(Struct, frozen=True, gc=False, kw_only=True):
    """One entry of the roster that may speak. ``roles`` are bits of ``record.state.Role``."""

    id32: Id32
    der: bytes
    roles: int
    admission: int
    name: NodeName

    @property
    def id16(self) -> Id16:
        return Id16(self.id32[:16])

    @property
    def node_id(self) -> NodeId:
        return node_id_of(self.id32)


class ViewChange(Struct, frozen=True, gc=False, kw_only=True):
    """The newest accepted state of one origin, as the mesh hands it to the view.

    A reader computes the age itself: ``now - mono_ms - base_ms`` (``base_ms`` maps the origin's boot clock to
    ours and may be negative). ``static`` is None until an S matching V's ``sref`` is held; then V's positions
    must not be read. For the own node ``base_ms`` is 0 and ``state`` FRESH. ``rtt_ms`` is the round trip to it, None if
    there is no link of ours to measure it on.
    """

    origin: Id16
    state: Liveness
    confirmed: bool
    epoch: int
    inst: int
    seq: int
    mono_ms: int
    base_ms: int
    due_ms: int
    volatile: Volatile | None
    static: Static | None
    quarantined: bool = False
    rtt_ms: int | None = None
