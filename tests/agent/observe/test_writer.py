"""The log's writer: whatever its reader does, whoever speaks goes on, and what is lost is counted."""

import errno
import fcntl
import os
import select
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.observe.writer import LineWriter
from router_core import limits

PIPE_BYTES = 4_096


class Pipe:
    """A small pipe whose reader reads when it is told to."""

    def __init__(self) -> None:
        self.out, self.into = os.pipe()
        fcntl.fcntl(self.into, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def read_until(self, wanted: Callable[[bytes], bool], found: bytes = b"") -> bytes:
        while not wanted(found):
            ready, _, _ = select.select([self.out], [], [], 10.0)
            assert ready, f"no more came after {found[-200:]!r}"
            found += os.read(self.out, 65_536)
        return found

    def close(self) -> None:
        os.close(self.out)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


def told(count: int) -> str:
    return f"lost {count}"


def test_lines_come_whole_and_in_order(pipe: Pipe) -> None:
    writer = LineWriter(pipe.into, told)
    for number in range(100):
        writer.put(f"line {number}\nand its second")
    found = pipe.read_until(lambda found: found.count(b"\n") == 200)
    assert found.decode().splitlines()[-2:] == ["line 99", "and its second"]
    assert writer.close()
    assert writer.dropped == {"full": 0, "unwritable": 0}


def test_a_reader_that_stands_still_costs_lines_and_is_told_how_many(pipe: Pipe) -> None:
    writer = LineWriter(pipe.into, told)
    before = limits.LOG_QUEUE + 2_000
    line = "x" * 99
    for _ in range(before):
        writer.put(line)
    lost = writer.dropped["full"]
    assert 0 < lost <= 2_000
    kept = before - lost
    found = pipe.read_until(lambda found: found.count(b"\n") == kept + 1)
    assert found.count(line.encode()) == kept
    assert f"lost {lost}\n".encode() in found
    assert writer.close()


def test_what_waits_is_bounded_in_bytes_too(pipe: Pipe) -> None:
    writer = LineWriter(pipe.into, told, most_bytes=100_000)
    for _ in range(100):
        writer.put("y" * 9_999)
    assert writer.dropped["full"] >= 89
    assert not writer.close(0.05)
    pipe.close()
    pipe.out = os.open(os.devnull, os.O_RDONLY)


def test_of_a_batch_that_does_not_fit_the_first_lines_are_kept(pipe: Pipe) -> None:
    writer = LineWriter(pipe.into, told, most_lines=3)
    writer.put("z" * 2 * PIPE_BYTES)  # taken by the thread, which then stands still
    writer.put("a\nb\nc\nd\ne")
    assert writer.dropped["full"] == 3
    found = pipe.read_until(lambda found: b"lost 3" in found)
    assert found.split()[1:] == [b"a", b"b", b"lost", b"3"]


def test_a_reader_that_is_gone_costs_lines_and_nothing_else(pipe: Pipe) -> None:
    writer = LineWriter(pipe.into, told)
    pipe.close()
    pipe.out = os.open(os.devnull, os.O_RDONLY)
    for _ in range(50):
        writer.put("unheard")
    assert writer.close(5.0)
    assert writer.dropped == {"full": 0, "unwritable": 50}


def test_the_end_waits_for_a_reader_only_so_long(pipe: Pipe) -> None:
    writer = LineWriter(pipe.into, told)
    writer.put("x" * 3 * PIPE_BYTES)
    assert not writer.close(0.05)
    pipe.read_until(lambda found: len(found) == 3 * PIPE_BYTES + 1)


def test_a_descriptor_that_never_blocks_is_waited_for(pipe: Pipe) -> None:
    os.set_blocking(pipe.into, False)
    writer = LineWriter(pipe.into, told)
    writer.put("x" * 5 * PIPE_BYTES)
    assert len(pipe.read_until(lambda found: found.endswith(b"\n"))) == 5 * PIPE_BYTES + 1
    assert writer.close()


def test_after_a_torn_line_the_next_begins_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = tmp_path / "log"
    fd = os.open(target, os.O_WRONLY | os.O_CREAT, 0o600)
    real, full, torn = os.write, threading.Event(), threading.Event()

    def write(to: int, raw: bytes) -> int:
        """A disk that has room for three bytes and then is full until told."""
        if to != fd or full.is_set():
            return real(to, raw)
        if target.stat().st_size == 3:
            torn.set()
            raise OSError(errno.ENOSPC, "no space left on device")
        return real(to, bytes(raw)[:3])

    monkeypatch.setattr(os, "write", write)
    writer = LineWriter(fd, told)
    writer.put("first line")
    assert torn.wait(5.0)
    full.set()
    writer.put("second line")
    assert writer.close(5.0)
    assert target.read_text() == "fir\nsecond line\nlost 1\n"
    assert writer.dropped == {"full": 0, "unwritable": 1}
