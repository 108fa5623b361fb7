from pathlib import Path

import pytest

from agent.store.atomic import last_of
from agent.store.checked import pack
from agent.store.folders import RefuseToStart
from agent.store.marks import Floor, MarkFiles
from agent.store.members import PeerFiles, RosterFile, RosterFiles
from agent.store.profiles import ProfileStore
from router_core.ids import Id16, Id32, node_id_of
from router_core.record.envelope import Sealed
from router_core.record.stamp import Stamp
from router_core.record.state import Address

ONE, TWO = node_id_of(Id32(bytes(32))), node_id_of(Id32(bytes([1]) * 32))
FILE = RosterFile(
    admission=1,
    removed=False,
    endorsements=(Sealed(b"signed", bytes(64)),),
    removal=None,
    der=b"der",
    roles=11,
    name="box",
)
ADDRESS = Address(ip=bytes([10, 0, 0, 1]), mesh_port=7_433, ingress_port=7_434)


def test_the_epoch_is_what_was_saved(tmp_path: Path) -> None:
    marks = MarkFiles(tmp_path)
    assert marks.epoch() == 0
    marks.save_epoch(7)
    assert MarkFiles(tmp_path).epoch() == 7


@pytest.mark.threat("T48")
def test_a_damaged_epoch_never_leads_to_one_used_before(tmp_path: Path) -> None:
    marks = MarkFiles(tmp_path)
    marks.save_epoch(7)
    marks.save_epoch(8)
    whole = (tmp_path / "epoch").read_bytes()
    for cut in range(len(whole)):
        (tmp_path / "epoch").write_bytes(whole[:cut])
        assert marks.epoch() + 1 > 8
    last_of(tmp_path / "epoch").write_bytes(b"")
    assert marks.epoch() == 0


def test_floors_survive_and_damaged_ones_are_the_ones_before_or_none(tmp_path: Path) -> None:
    marks = MarkFiles(tmp_path)
    assert marks.floors() == {}
    first = {Id16(bytes(16)): Floor(static=Stamp(1, 2), volatile=Stamp(1, 9))}
    second = {Id16(bytes(16)): Floor(static=Stamp(2, 2), volatile=Stamp(2, 9))}
    marks.save_floors(first)
    marks.save_floors(second)
    assert MarkFiles(tmp_path).floors() == second
    (tmp_path / "floors").write_bytes(b"PMF1")
    assert marks.floors() == first
    last_of(tmp_path / "floors").unlink()
    assert marks.floors() == {}


def test_roster_files_read_back(tmp_path: Path) -> None:
    files = RosterFiles(tmp_path)
    assert files.load() == ({}, [])
    files.save(ONE, FILE)
    files.save(TWO, FILE)
    assert files.load() == ({ONE: FILE, TWO: FILE}, [])


@pytest.mark.threat("T48")
def test_a_roster_file_cut_anywhere_is_quarantined_and_the_rest_is_used(tmp_path: Path) -> None:
    RosterFiles(tmp_path).save(TWO, FILE)
    RosterFiles(tmp_path).save(ONE, FILE)
    path = tmp_path / "roster" / ONE
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        assert RosterFiles(tmp_path).load() == ({TWO: FILE}, [ONE])
        assert path.with_name(ONE + ".corrupt").read_bytes() == whole[:cut]
        assert not path.exists()


@pytest.mark.threat("T27")
def test_damage_does_not_bring_a_removed_member_back(tmp_path: Path) -> None:
    files = RosterFiles(tmp_path)
    files.save(ONE, FILE)
    removed = RosterFile(
        admission=1,
        removed=True,
        endorsements=FILE.endorsements,
        removal=Sealed(b"x", bytes(64)),
        der=b"der",
        roles=11,
        name="box",
    )
    files.save(ONE, removed)
    (tmp_path / "roster" / ONE).write_bytes(b"")
    assert files.load() == ({ONE: removed}, [])


def test_peers_keep_eight_addresses_and_a_damaged_file_is_dropped(tmp_path: Path) -> None:
    peers = PeerFiles(tmp_path)
    peers.save(ONE, [ADDRESS] * 9)
    assert peers.load() == {ONE: (ADDRESS,) * 8}
    (tmp_path / "peers" / ONE).write_bytes(b"junk")
    assert peers.load() == {}
    peers.save(ONE, [ADDRESS])
    peers.forget(ONE)
    assert peers.load() == {}


def test_names_that_are_no_node_ids_are_left_alone(tmp_path: Path) -> None:
    RosterFiles(tmp_path).save(ONE, FILE)
    (tmp_path / "roster" / "README").write_text("hello")
    assert list(RosterFiles(tmp_path).load()[0]) == [ONE]
    assert (tmp_path / "roster" / "README").exists()


def test_profiles_are_saved_changed_and_deleted(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    assert store.load() == {}
    store.save({"a": b"1", "b": b"2"})
    store.save({"a": b"3"}, gone=["b", "never"])
    store.close()
    store = ProfileStore(tmp_path)
    assert store.load() == {"a": b"3"}
    store.close()
    assert (tmp_path / "profiles.sqlite").stat().st_mode & 0o777 == 0o600


@pytest.mark.threat("T48")
@pytest.mark.parametrize("damage", ["junk", "cut", "middle"])
def test_a_damaged_profile_file_is_set_aside_and_learning_starts_anew(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "profiles.sqlite"
    store = ProfileStore(tmp_path)
    store.save({str(i): bytes(200) for i in range(200)})
    store.close()
    whole = path.read_bytes()
    half = len(whole) // 2
    path.write_bytes(
        {"junk": b"junk" * 999, "cut": whole[: half + 100], "middle": whole[:half] + b"\xff" * half}[damage]
    )
    told = []
    store = ProfileStore(tmp_path, damaged=lambda kept_as, cause: told.append((kept_as, cause)))
    assert store.load() == {}
    assert [kept_as for kept_as, _ in told] == [tmp_path / "profiles.sqlite.corrupt"]
    store.save({"a": b"1"})
    store.close()


NEWER = pack(b"\x93\x01\x02\x03", 7)


class Told:
    """Which files were set aside."""

    def __init__(self) -> None:
        self.files: list[tuple[str, int, str]] = []

    def __call__(self, path: Path, version: int, aside: Path) -> None:
        self.files.append((path.name, version, aside.name))


def test_marks_of_a_newer_version_are_set_aside_unaltered_and_told(tmp_path: Path) -> None:
    told = Told()
    marks = MarkFiles(tmp_path, told)
    marks.save_epoch(7)
    marks.save_epoch(8)
    for name in ("epoch", "floors"):
        (tmp_path / name).write_bytes(NEWER)
    assert marks.epoch() + 1 > 8
    assert marks.floors() == {}
    assert told.files == [("epoch", 7, "epoch.v7"), ("floors", 7, "floors.v7")]
    assert [(tmp_path / f"{name}.v7").read_bytes() for name in ("epoch", "floors")] == [NEWER, NEWER]
    marks.save_epoch(10)
    assert MarkFiles(tmp_path).epoch() == 10


def test_a_newer_file_and_a_newer_one_before_it_are_both_set_aside(tmp_path: Path) -> None:
    told = Told()
    for name in ("epoch", "epoch.last", "floors", "floors.last"):
        (tmp_path / name).write_bytes(NEWER)
    marks = MarkFiles(tmp_path, told)
    assert (marks.epoch(), marks.floors()) == (0, {})
    assert [aside for *_, aside in told.files] == ["epoch.v7", "epoch.last.v7", "floors.v7", "floors.last.v7"]


def test_addresses_of_a_newer_version_are_set_aside_and_those_of_others_used(tmp_path: Path) -> None:
    told = Told()
    peers = PeerFiles(tmp_path, told)
    peers.save(ONE, [ADDRESS])
    peers.save(TWO, [ADDRESS])
    (tmp_path / "peers" / ONE).write_bytes(NEWER)
    assert peers.load() == {TWO: (ADDRESS,)}
    assert told.files == [(ONE, 7, f"{ONE}.v7")]
    assert peers.load() == {TWO: (ADDRESS,)}


@pytest.mark.parametrize("name", [ONE, f"{ONE}.last"])
def test_a_roster_of_a_newer_version_is_refused_and_left_as_it_is(tmp_path: Path, name: str) -> None:
    RosterFiles(tmp_path).save(TWO, FILE)
    (tmp_path / "roster" / name).write_bytes(NEWER)
    with pytest.raises(RefuseToStart, match="newer version") as refused:
        RosterFiles(tmp_path).load()
    assert refused.value.reason == "state_newer"
    assert (tmp_path / "roster" / name).read_bytes() == NEWER
