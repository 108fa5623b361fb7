"""What a machine asks to keep comes back in the next process life."""

from ipaddress import ip_address
from pathlib import Path

import pytest

from agent.mesh.shelf import MeshShelf
from agent.store.marks import MarkFiles
from agent.store.members import PeerFiles
from router_core.ids import Id16, Id32, MeshId, NodeName
from router_core.mesh.protocol.events import SavedKey
from router_core.mesh.records.saved import (
    KnownAddresses,
    RecordFloor,
    encode_addresses,
    encode_epoch,
    encode_floors,
)
from router_core.record.membership import Member
from router_core.record.state import Address

MESH = MeshId(bytes(16))


def member(number: int) -> Member:
    return Member(id32=Id32(bytes([number]) * 32), der=b"", roles=1, admission=1, name=NodeName("node"))


def address(last: int) -> Address:
    return Address(ip=ip_address(f"10.0.0.{last}").packed, mesh_port=7433, ingress_port=7434)


def shelf(state: Path) -> MeshShelf:
    return MeshShelf(MarkFiles(state), PeerFiles(state))


MEMBERS = {member(number).id16: member(number) for number in (1, 2)}


def test_an_empty_folder_is_a_first_start(tmp_path: Path) -> None:
    saved = shelf(tmp_path).load(MESH, tuple(MEMBERS.values()))
    assert (saved.epoch, saved.floors, saved.addresses) == (0, (), ())
    assert saved.members == tuple(MEMBERS.values())


def test_epoch_floors_and_addresses_survive(tmp_path: Path) -> None:
    floors = tuple(RecordFloor(id16=id16, v_epoch=3, v_seq=9, s_epoch=2, s_seq=4) for id16 in sorted(MEMBERS))
    kept = shelf(tmp_path)
    kept.save(SavedKey.EPOCH, encode_epoch(41), MEMBERS)
    kept.save(SavedKey.FLOORS, encode_floors(floors), MEMBERS)
    kept.save(SavedKey.ADDRESSES, encode_addresses({member(1).id16: (address(5), address(6))}), MEMBERS)
    saved = shelf(tmp_path).load(MESH, ())
    assert saved.epoch == 41
    assert saved.floors == floors
    assert saved.addresses == (KnownAddresses(member(1).id16, (address(5), address(6))),)


def test_a_lost_epoch_file_is_never_reused(tmp_path: Path) -> None:
    kept = shelf(tmp_path)
    kept.save(SavedKey.EPOCH, encode_epoch(7), MEMBERS)
    kept.save(SavedKey.EPOCH, encode_epoch(8), MEMBERS)
    (tmp_path / "epoch").write_bytes(b"damaged")
    assert shelf(tmp_path).load(MESH, ()).epoch >= 8


def test_addresses_of_others_than_members_are_not_kept(tmp_path: Path) -> None:
    kept = shelf(tmp_path)
    known = {member(1).id16: (address(1),), member(2).id16: (address(2),), Id16(bytes(16)): (address(3),)}
    kept.save(SavedKey.ADDRESSES, encode_addresses(known), MEMBERS)
    assert set(PeerFiles(tmp_path).load()) == {member(1).node_id, member(2).node_id}
    kept.save(SavedKey.ADDRESSES, encode_addresses(known), {member(2).id16: member(2)})
    assert set(PeerFiles(tmp_path).load()) == {member(2).node_id}


def test_addresses_someone_else_stored_meanwhile_stay(tmp_path: Path) -> None:
    kept = shelf(tmp_path)
    PeerFiles(tmp_path).save(member(2).node_id, [address(9)])
    kept.save(SavedKey.ADDRESSES, encode_addresses({member(1).id16: (address(1),)}), MEMBERS)
    assert set(PeerFiles(tmp_path).load()) == {member(1).node_id, member(2).node_id}


def test_a_disk_that_refuses_is_an_os_error(tmp_path: Path) -> None:
    kept = shelf(tmp_path / "missing")
    with pytest.raises(OSError, match="No such file"):
        kept.save(SavedKey.EPOCH, encode_epoch(1), MEMBERS)
