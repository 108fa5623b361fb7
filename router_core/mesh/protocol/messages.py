"""What two ends of a link say: HELLO HAVE RECS WANT PING PONG BYE.

One binary message is a type byte and one msgpack array. Decoding is bounded and typed, every fault is one
``RemoteFault``; encoding keeps the sender's limits (16 KiB soft, a single big record aside, never above 61,440 B).
Records ride through as the bytes they are; nothing here looks into them.
"""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Annotated, Final, TypeVar

from msgspec import Meta, Struct

from router_core import limits
from router_core.errors import LocalMisuse, RemoteFault
from router_core.record import codec
from router_core.record.envelope import Sealed
from router_core.record.state import U8, U16, U32, U63, Bytes8, Bytes16

T = TypeVar("T")

PROTOCOL: Final = 1
"""The one link protocol this node speaks."""

IGNORED_FROM: Final = 128
"""Types from here on are ignored, not refused."""

HAVE_STATE: Final = 1
ROSTER8_UNSET: Final = bytes(8)
"""Sent as roster8 while endorsements and removals do not travel; never compared."""

Bytes4 = Annotated[bytes, Meta(min_length=4, max_length=4)]
Bytes64 = Annotated[bytes, Meta(min_length=64, max_length=64)]
_PER_RECORD: Final = 16
"""Bytes of a RECS item beside ``signed`` and ``sig``, rounded up."""


class MessageType(IntEnum):
    """The first byte of a message: its type."""

    HELLO = 1
    HAVE = 2
    RECS = 3
    WANT = 4
    PING = 5
    PONG = 6
    BYE = 7


class ByeCode(IntEnum):
    """Why a link ends. A code not listed reads as ``PROTOCOL``."""

    FULL = 1
    DUP_LINK = 2
    REMOVED = 3
    WRONG_MESH = 4
    VERSION = 5
    GOING_DOWN = 6
    BAD_SIGNATURE = 7
    PROTOCOL = 8
    TRIM = 9
    DUP_IDENTITY = 10
    SELF = 11
    SLOW = 12


PLANNED: Final = (ByeCode.DUP_LINK, ByeCode.GOING_DOWN, ByeCode.TRIM)
"""Any other end of a link that was up is abnormal."""


class Hello(Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """The first message of both sides. ``id16`` must be the TLS identity; ``purpose`` 0 link, 1 audit."""

    proto_min: U16 = PROTOCOL
    proto_max: U16 = PROTOCOL
    features: U32 = 0
    mesh8: Bytes8
    id16: Bytes16
    epoch: U63
    inst: U32
    boot_ms: U63
    degree: U16 = 0
    degree_cap: U16 = 0
    roster8: Bytes8 = ROSTER8_UNSET
    purpose: U8 = 0


class HaveState(Struct, frozen=True, gc=False, array_like=True):
    """Newest seq of S, V and L held of one origin in ``epoch``; 0 is none."""

    id16: Bytes16
    epoch: U63
    sseq: U63 = 0
    vseq: U63 = 0
    lseq: U63 = 0


class HaveTrust(Struct, frozen=True, gc=False, array_like=True):
    """Which admission, removal and endorsements of one member are held; not sent by this version."""

    id16: Bytes16
    admission: U32
    removed: U8
    eset4: Bytes4


class Have(Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """Chunk ``chunk`` of ``chunks``. ``parts``: bit 0 state, 1 trust, 2 reply wanted."""

    chunk: U16
    chunks: U16
    parts: U8 = HAVE_STATE
    states: Annotated[tuple[HaveState, ...], Meta(max_length=limits.HAVE_PER_CHUNK)] = ()
    trust: Annotated[tuple[HaveTrust, ...], Meta(max_length=limits.HAVE_PER_CHUNK)] = ()


class Heard(Struct, frozen=True, gc=False, array_like=True):
    """One record of RECS. ``age_ms`` is an unsigned hint, never used for safety."""

    age_ms: U32
    signed: bytes
    sig: Bytes64

    @property
    def sealed(self) -> Sealed:
        return Sealed(self.signed, self.sig)


class Recs(Struct, frozen=True, gc=False):
    """Carries records."""

    items: tuple[Heard, ...]


class Wanted(Struct, frozen=True, gc=False, array_like=True):
    """ "Send this if you hold at least (epoch, seq)"."""

    id16: Bytes16
    kind: U8
    epoch: U63
    seq: U63


class Want(Struct, frozen=True, gc=False):
    """Asks for records."""

    items: tuple[Wanted, ...]


class Ping(Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """Asks for a ``Pong``; measures the round trip and shows that the link is alive."""

    nonce: U32
    boot_ms: U63
    roster8: Bytes8 = ROSTER8_UNSET
    degree: U16 = 0
    degree_cap: U16 = 0


class Pong(Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """Answers a ``Ping`` with the same ``nonce``."""

    nonce: U32
    boot_ms: U63
    roster8: Bytes8 = ROSTER8_UNSET
    degree: U16 = 0
    degree_cap: U16 = 0


class SocketAddress(Struct, frozen=True, gc=False, array_like=True):
    """An IP address of 4 or 16 bytes and a port."""

    ip: Annotated[bytes, Meta(min_length=4, max_length=16)]
    port: U16


class OtherPeer(Struct, frozen=True, gc=False, array_like=True):
    """Another member to connect to, and where it may be reached."""

    id16: Bytes16
    endpoints: Annotated[tuple[SocketAddress, ...], Meta(max_length=limits.ADDRESSES)] = ()


class Bye(Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """The last message; then the link closes. ``retry_after_ms`` 0 leaves the time to the other end."""

    code: U8
    retry_after_ms: U32 = 0
    alternatives: Annotated[tuple[OtherPeer, ...], Meta(max_length=8)] = ()


Message = Hello | Have | Recs | Want | Ping | Pong | Bye

_STRUCTS: Final[dict[int, type[Hello | Have | Ping | Pong | Bye]]] = {
    MessageType.HELLO: Hello,
    MessageType.HAVE: Have,
    MessageType.PING: Ping,
    MessageType.PONG: Pong,
    MessageType.BYE: Bye,
}
_TYPES: Final = {kind: bytes([code]) for code, kind in _STRUCTS.items()}


def decode(data: bytes) -> Message | None:
    """One received message; None for a type to be ignored.

    Raises ``RemoteFault`` with reason ``too_big``, ``unknown_type`` or ``malformed``.
    """
    if not 1 <= len(data) <= limits.LINK_MESSAGE:
        raise RemoteFault("too_big", f"{len(data)} bytes, limit {limits.LINK_MESSAGE}")
    code = data[0]
    if code >= IGNORED_FROM:
        return None
    blob = data[1:]
    if code == MessageType.RECS:
        heard = codec.decode(blob, tuple[Heard, ...], codec.LINK_MESSAGE, "malformed")
        return Recs(_at_most(heard, limits.RECORDS_PER_MESSAGE))
    if code == MessageType.WANT:
        wanted = codec.decode(blob, tuple[Wanted, ...], codec.LINK_MESSAGE, "malformed")
        return Want(_at_most(wanted, limits.WANTS_PER_MESSAGE))
    kind = _STRUCTS.get(code)
    if kind is None:
        raise RemoteFault("unknown_type", str(code))
    message = codec.decode(blob, kind, codec.LINK_MESSAGE, "malformed")
    if isinstance(message, Have) and message.chunk >= message.chunks:
        raise RemoteFault("malformed", f"chunk {message.chunk} of {message.chunks}")
    return message


def _at_most(items: tuple[T, ...], most: int) -> tuple[T, ...]:
    if len(items) > most:
        raise RemoteFault("malformed", f"{len(items)} items, limit {most}")
    return items


def encode(message: Message) -> bytes:
    """``message`` as sent; raises ``LocalMisuse`` above 61,440 bytes."""
    if isinstance(message, Recs):
        data = bytes([MessageType.RECS]) + codec.encode(message.items)
    elif isinstance(message, Want):
        data = bytes([MessageType.WANT]) + codec.encode(message.items)
    else:
        data = _TYPES[type(message)] + codec.encode(message)
    if len(data) > limits.LINK_MESSAGE_SENT:
        raise LocalMisuse(
            f"a {type(message).__name__} of {len(data)} bytes, limit {limits.LINK_MESSAGE_SENT}"
        )
    return data


def encode_haves(states: Sequence[HaveState]) -> list[bytes]:
    """HAVE in as many chunks as ``states`` needs, at least one."""
    step = limits.HAVE_PER_CHUNK
    chunks = max(1, -(-len(states) // step))
    return [
        encode(Have(chunk=chunk, chunks=chunks, states=tuple(states[chunk * step : (chunk + 1) * step])))
        for chunk in range(chunks)
    ]


def encode_wants(items: Sequence[Wanted]) -> list[bytes]:
    """WANT in as many messages as ``items`` needs."""
    step = limits.WANTS_PER_MESSAGE
    return [encode(Want(tuple(items[at : at + step]))) for at in range(0, len(items), step)]


def pack(records: Iterable[Heard]) -> list[tuple[Heard, ...]]:
    """``records`` in order, grouped into messages of at most 64 records and 16 KiB, a big one alone."""
    groups: list[tuple[Heard, ...]] = []
    group: list[Heard] = []
    size = 0
    for record in records:
        more = packed_bytes(record)
        if group and (size + more > limits.LINK_MESSAGE_SOFT or len(group) == limits.RECORDS_PER_MESSAGE):
            groups.append(tuple(group))
            group, size = [], 0
        group.append(record)
        size += more
    if group:
        groups.append(tuple(group))
    return groups


def packed_bytes(record: Heard) -> int:
    """Bytes a record takes within RECS, rounded up."""
    return len(record.signed) + len(record.sig) + _PER_RECORD
