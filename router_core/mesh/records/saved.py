"""What outlives a process: the epoch, the floors, the addresses that worked. Three small files, each whole.

A file that cannot be read counts as lost; then the ratchet (a record of ours coming back from others) and the
confirmation of others' records do the rest. Nothing here touches a disk.
"""

from collections.abc import Mapping
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta, Struct

from router_core import limits
from router_core.ids import Id16, MeshId
from router_core.mesh.protocol.events import SavedKey
from router_core.record import codec
from router_core.record.envelope import Sealed
from router_core.record.membership import Member
from router_core.record.state import U63, Address, Bytes16

T = TypeVar("T")


class RecordFloor(Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """Stamps of one origin at or below which no record of that kind may come back.

    ``proof`` is the newest V or L that was held: an origin that lost its disk starts below the floor, and only its
    own record can make it rise.
    """

    id16: Bytes16
    v_epoch: U63 = 0
    v_seq: U63 = 0
    s_epoch: U63 = 0
    s_seq: U63 = 0
    proof: Sealed | None = None
    l_epoch: U63 = 0
    l_seq: U63 = 0


class KnownAddresses(Struct, frozen=True, gc=False, array_like=True):
    """Where a peer was reached, newest first."""

    id16: Bytes16
    addrs: Annotated[tuple[Address, ...], Meta(max_length=limits.ADDRESSES)] = ()


class Saved(Struct, frozen=True, kw_only=True):
    """What the machine starts from. ``epoch`` is the last one used, 0 if none is known."""

    mesh_id: MeshId
    members: tuple[Member, ...] = ()
    epoch: int = 0
    floors: tuple[RecordFloor, ...] = ()
    addresses: tuple[KnownAddresses, ...] = ()


_Floors = Annotated[tuple[RecordFloor, ...], Meta(max_length=limits.ROSTER_MAX)]
_Addresses = Annotated[tuple[KnownAddresses, ...], Meta(max_length=limits.ROSTER_MAX)]
_EPOCH: Final = msgspec.msgpack.Decoder(U63)
_FLOORS: Final = msgspec.msgpack.Decoder(_Floors)
_ADDRESSES: Final = msgspec.msgpack.Decoder(_Addresses)


def encode_epoch(epoch: int) -> bytes:
    """The file of the last used epoch."""
    return codec.encode(epoch)


def encode_floors(floors: tuple[RecordFloor, ...]) -> bytes:
    """The file of the newest stamps seen of each member."""
    return codec.encode(floors)


def encode_addresses(addresses: Mapping[Id16, tuple[Address, ...]]) -> bytes:
    """The file of the addresses at which peers were reached."""
    return codec.encode([KnownAddresses(id16, addrs) for id16, addrs in sorted(addresses.items())])


def read_saved(
    files: Mapping[SavedKey, bytes], mesh_id: MeshId, members: tuple[Member, ...]
) -> tuple[Saved, tuple[SavedKey, ...]]:
    """``Saved`` from the files there are, and the keys of those that are damaged and count as lost."""
    damaged: list[SavedKey] = []
    epoch = _read(_EPOCH, files, SavedKey.EPOCH, 0, damaged)
    floors = _read(_FLOORS, files, SavedKey.FLOORS, (), damaged)
    addresses = _read(_ADDRESSES, files, SavedKey.ADDRESSES, (), damaged)
    saved = Saved(mesh_id=mesh_id, members=members, epoch=epoch, floors=floors, addresses=addresses)
    return saved, tuple(damaged)


def _read(
    decoder: msgspec.msgpack.Decoder[T],
    files: Mapping[SavedKey, bytes],
    key: SavedKey,
    empty: T,
    damaged: list[SavedKey],
) -> T:
    data = files.get(key)
    if data is None:
        return empty
    try:
        return decoder.decode(data)
    except msgspec.MsgspecError:
        damaged.append(key)
        return empty
