"""What the mesh machine wants done. The driver performs actions in order; results come back as events."""

from enum import Enum

from msgspec import Struct

from router_core.ids import Id16
from router_core.mesh.protocol.events import LinkId, SavedKey
from router_core.mesh.protocol.messages import ByeCode
from router_core.record.membership import ViewChange
from router_core.record.state import Address


class Alarm(Enum):
    """Codes of ``Notify``."""

    DUPLICATE_IDENTITY = "duplicate_identity"
    RESTARTS = "restarts"
    EQUIVOCATION = "equivocation"
    BAD_SIGNATURE = "bad_signature"
    QUARANTINED = "quarantined"
    LONELY = "lonely"
    EPOCH_NOT_PERSISTED = "epoch_not_persisted"
    EPOCH_EXHAUSTED = "epoch_exhausted"
    FLOODING = "flooding"
    UNSENDABLE = "unsendable"


class SendFrame(Struct, frozen=True, gc=False):
    """Queue one binary message on the link; answer ``LinkBusy`` if that leaves more than 64 KiB waiting."""

    link: LinkId
    data: bytes


class CloseLink(Struct, frozen=True, gc=False):
    """Flush what was sent for at most 200 ms, then close. The machine has already forgotten the link."""

    link: LinkId
    code: ByeCode | None


class PauseReading(Struct, frozen=True, gc=False):
    """Read no further message from the link until ``ResumeReading``."""

    link: LinkId


class ResumeReading(Struct, frozen=True, gc=False):
    """Read messages from the link again."""

    link: LinkId


class Dial(Struct, frozen=True, gc=False):
    """Connect to the peer: try ``addrs`` that lie in allowed networks, then addresses known to the driver.

    Answered by ``LinkOpened`` or one ``DialFailed`` within 5 s.
    """

    peer: Id16
    addrs: tuple[Address, ...]


class Persist(Struct, frozen=True, gc=False):
    """Write ``data`` atomically under ``key``; answer ``PersistDone``."""

    key: SavedKey
    data: bytes


class ViewChanged(Struct, frozen=True):
    """Newest pictures of origins, each origin once; the own node is never among them."""

    changes: tuple[ViewChange, ...]


class Notify(Struct, frozen=True, gc=False):
    """An alarm: ids and numbers for one log line and one counter."""

    code: Alarm
    fields: tuple[tuple[str, str | int], ...] = ()


Action = SendFrame | CloseLink | PauseReading | ResumeReading | Dial | Persist | ViewChanged | Notify
