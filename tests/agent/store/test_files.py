import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.store.atomic import last_of, read_plain, remove_file, set_aside, write_atomic
from agent.store.checked import (
    FILE_MOST,
    Damaged,
    FileSchema,
    Newer,
    pack,
    read_checked,
    read_checked_or_last,
    unpack,
    write_checked,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_write_is_private_and_keeps_the_content_before(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"one")
    write_atomic(path, b"two")
    write_atomic(path, b"three")
    assert path.read_bytes() == b"three"
    assert last_of(path).read_bytes() == b"two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert names(tmp_path) == ["file", "file.last"]


def test_the_mode_does_not_depend_on_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_atomic(tmp_path / "file", b"", mode=0o644)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o644


def test_a_write_that_fails_leaves_the_old_content_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    with pytest.raises(OSError):
        write_atomic(path, b"new")
    assert names(tmp_path) == ["folder"]


def test_a_write_replaces_a_link_instead_of_following_it(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"theirs")
    (tmp_path / "file").symlink_to(tmp_path / "elsewhere")
    write_atomic(tmp_path / "file", b"ours")
    assert (tmp_path / "elsewhere").read_bytes() == b"theirs"
    assert not (tmp_path / "file").is_symlink()


@pytest.mark.threat("T26")
def test_a_link_a_pipe_and_an_oversize_file_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"1234")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe")
    assert read_plain(tmp_path / "real", 4) == b"1234"
    for name, most in (("link", 4), ("pipe", 4), ("real", 3)):
        with pytest.raises(OSError):
            read_plain(tmp_path / name, most)


def test_removing_and_setting_aside_take_what_they_name(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"one")
    write_atomic(path, b"two")
    assert set_aside(path).read_bytes() == b"two"
    remove_file(path)
    assert names(tmp_path) == ["file.corrupt"]


def test_a_checked_file_has_its_layout() -> None:
    assert pack(b"abc")[:11] == b"PMF1\x00\x00\x00\x03abc"
    assert len(pack(b"abc")) == 4 + 4 + 3 + 16
    assert unpack(pack(b"abc")) == (1, b"abc")
    assert pack(b"abc", 2)[:13] == b"PMF2\x00\x02\x00\x00\x00\x03abc"
    assert unpack(pack(b"abc", 2)) == (2, b"abc")


@pytest.mark.threat("T48")
@settings(max_examples=60, deadline=None)
@given(payload=st.binary(max_size=60), version=st.sampled_from([1, 2, 999]), data=st.data())
def test_a_checked_file_cut_or_altered_anywhere_is_seen(
    payload: bytes, version: int, data: st.DataObject
) -> None:
    content = pack(payload, version)
    cut = data.draw(st.integers(0, len(content) - 1))
    at = data.draw(st.integers(0, len(content) - 1))
    altered = bytearray(content)
    altered[at] ^= data.draw(st.integers(1, 255))
    for bad in (content[:cut], bytes(altered), content + b"x"):
        with pytest.raises(Damaged):
            unpack(bad)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=st.dictionaries(st.binary(max_size=8), st.integers(0, 2**63 - 1), max_size=5))
def test_a_checked_value_reads_back(tmp_path: Path, value: dict[bytes, int]) -> None:
    write_checked(tmp_path / "file", value)
    assert read_checked(tmp_path / "file", dict[bytes, int]) == value


def test_a_missing_checked_file_is_none_and_a_wrong_one_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert read_checked(path, int) is None
    write_checked(path, "text")
    with pytest.raises(Damaged):
        read_checked(path, int)
    path.write_bytes(bytes(FILE_MOST + 1))
    with pytest.raises(Damaged, match=f"more than {FILE_MOST} bytes"):
        read_checked(path, int)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(Damaged, match="not a file"):
        read_checked(path, int)


def test_a_damaged_file_is_replaced_by_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert read_checked_or_last(path, int) is None
    write_checked(path, 1)
    write_checked(path, 2)
    path.write_bytes(b"")
    assert read_checked_or_last(path, int) == 1
    last_of(path).write_bytes(b"")
    with pytest.raises(Damaged):
        read_checked_or_last(path, int)
    last_of(path).unlink()
    with pytest.raises(Damaged):
        read_checked_or_last(path, int)


def test_an_older_file_is_brought_up_by_numbered_steps(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_checked(path, 5)
    second = FileSchema(steps=(lambda value: {"count": value},))
    third = FileSchema(steps=(*second.steps, lambda value: value | {"unit": "ms"}))
    assert read_checked(path, dict[str, int | str], third) == {"count": 5, "unit": "ms"}
    write_checked(path, {"count": 6}, second)
    assert read_checked(path, dict[str, int | str], third) == {"count": 6, "unit": "ms"}
    write_checked(path, {"count": 7, "unit": "s"}, third)
    assert read_checked(path, dict[str, int | str], third) == {"count": 7, "unit": "s"}


def test_a_newer_file_is_told_from_a_damaged_one_and_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_checked(path, 1)
    newer = FileSchema(steps=(lambda value: value,))
    write_checked(path, 2, newer)
    with pytest.raises(Newer) as found:
        read_checked_or_last(path, int)
    assert (found.value.path, found.value.version) == (path, 2)
    path.write_bytes(b"")
    assert read_checked_or_last(path, int) == 1
    write_checked(path, 3, newer)
    write_checked(path, 4)
    path.write_bytes(b"")
    with pytest.raises(Newer):
        read_checked_or_last(path, int)


_WRITER = """
import sys
from pathlib import Path
from agent.store.checked import write_checked
for number in range(1, 1_000_000):
    write_checked(Path(sys.argv[1]), number)
    print(number, flush=True)
"""


@pytest.mark.threat("T48")
def test_a_killed_writer_leaves_a_whole_file_not_older_than_what_it_reported(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for kills in range(4):
        writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        for _ in range(20 + 7 * kills):
            writer.stdout.readline()
        writer.kill()
        reported = writer.stdout.read().split()
        writer.stdout.close()
        writer.wait()
        written = read_checked(path, int)
        assert written is not None
        assert written >= (int(reported[-1]) if reported else 20 + 7 * kills)
