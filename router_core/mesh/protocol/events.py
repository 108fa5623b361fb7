"""What happens to the mesh machine: the events its driver reports, and the timer.

A link is named by a number its driver draws, never used twice in a process life. ``Ticked`` is sent whenever
``Mesh.deadline`` has passed, which is at most 500 ms after the last one.
"""

from enum import Enum
from typing import NewType

from msgspec import Struct

from router_core.ids import Id16, MeshId
from router_core.record.membership import Member
from router_core.record.state import Address, LeaveReason, Static, Volatile

LinkId = NewType("LinkId", int)


class DialFailure(Enum):
    """Why a dial came to nothing. Only ``REFUSED`` (a reset by the host itself) says something about the peer."""

    REFUSED = "refused"
    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    UNTRUSTED = "untrusted"
    NO_ADDRESS = "no_address"


class SavedKey(Enum):
    """What the machine asks to persist, each by one atomic write."""

    EPOCH = "epoch"
    FLOORS = "floors"
    ADDRESSES = "addresses"


class Ticked(Struct, frozen=True, gc=False):
    """The deadline passed."""


class Resumed(Struct, frozen=True, gc=False):
    """The driver yielded to its loop after ``Mesh.backlog`` was true."""


class LinkOpened(Struct, frozen=True, gc=False, kw_only=True):
    """TLS and upgrade are done and ``peer`` is proven. ``addr`` is where it was dialled, if it was."""

    link: LinkId
    peer: Id16
    dialled: bool
    addr: Address | None = None


class LinkClosed(Struct, frozen=True, gc=False):
    """The connection ended, or could not be written; nothing more comes from it."""

    link: LinkId


class LinkBusy(Struct, frozen=True, gc=False):
    """The link's write buffer went above 64 KiB; no records go there until ``LinkReady``."""

    link: LinkId


class LinkReady(Struct, frozen=True, gc=False):
    """The link's write buffer is below 64 KiB again."""

    link: LinkId


class LinkFlooded(Struct, frozen=True, gc=False):
    """Bytes came that are no messages, beyond any use; the connection was cut."""

    link: LinkId


class FrameReceived(Struct, frozen=True, gc=False):
    """One binary message."""

    link: LinkId
    data: bytes


class DialFailed(Struct, frozen=True, gc=False):
    """An attempt to connect to the peer failed."""

    peer: Id16
    why: DialFailure


class PeerSighted(Struct, frozen=True, gc=False):
    """Discovery saw the peer; its back-off starts over."""

    peer: Id16


class BodyChanged(Struct, frozen=True, kw_only=True):
    """The shell's newest own bodies, always both: positions in ``volatile`` are those of ``static``.

    ``urgent`` sends V at once, within the event bucket; ``due_ms`` promises a longer silence than usual after it
    (2,000..60,000).
    """

    volatile: Volatile
    static: Static
    urgent: bool = False
    due_ms: int | None = None


class RosterChanged(Struct, frozen=True, kw_only=True):
    """Everybody who may speak, the own node included or not, and the mesh they speak in."""

    members: tuple[Member, ...]
    mesh_id: MeshId


class RecordHeard(Struct, frozen=True, gc=False):
    """A sealed record that came outside links (in a refusal); nobody is to blame for it."""

    signed: bytes
    sig: bytes


class PersistDone(Struct, frozen=True, gc=False):
    """The answer to one ``Persist``, in the order of the requests."""

    key: SavedKey
    ok: bool


class LeaveRequested(Struct, frozen=True, gc=False):
    """This node is about to leave: a leave record is to be sent."""

    reason: LeaveReason


Event = (
    Ticked
    | Resumed
    | LinkOpened
    | LinkClosed
    | LinkBusy
    | LinkReady
    | LinkFlooded
    | FrameReceived
    | DialFailed
    | PeerSighted
    | BodyChanged
    | RosterChanged
    | RecordHeard
    | PersistDone
    | LeaveRequested
)
