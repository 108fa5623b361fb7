"""Claims about the journal: it loses rows rather than the loop's time, and survives its file."""

import contextlib
import json
import os
import sqlite3
import stat
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from agent.observe.journal import Journal
from agent.observe.journal_file import KEPT_MS, AuditRow, JournalFile, JournalRow, bodies, body_of
from agent.observe.log import Log
from router_core import limits
from router_core.placement.reasons import Action, Reason
from router_core.placement.record import DecisionRecord, Ending
from tests.agent.observe.records import record

WALL = 1_700_000_000_000


class Hands:
    def __init__(self) -> None:
        self.ms = 0

    def boot_ms(self) -> int:
        return self.ms

    def boot_us(self) -> int:
        return self.ms * 1_000

    def wall_ms(self) -> int:
        return WALL + self.ms


class Shelf:
    """A journal on a temporary file with what it logged."""

    def __init__(self, path: Path, file: JournalFile | None = None) -> None:
        self.clock = Hands()
        self.lines: list[str] = []
        self.log = Log(self.lines.append, self.clock)
        self.path = path
        self.journal = Journal(path, self.clock, self.log, file=file)

    async def __aenter__(self) -> "Shelf":
        self.journal.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.journal.aclose()

    def events(self) -> list[str]:
        return [json.loads(line)["event"] for line in self.lines]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


async def test_a_decision_is_found_by_its_id_now_and_after_a_restart(path: Path) -> None:
    async with Shelf(path) as shelf:
        shelf.journal.put(record("A" * 26))
        found = await shelf.journal.get("A" * 26)
        assert found is not None
        assert found.at_ms == WALL
    async with Shelf(path) as shelf:
        assert await shelf.journal.get("A" * 26) == found
        assert await shelf.journal.get("B" * 26) is None


async def test_the_record_with_its_outcome_replaces_the_one_without(path: Path) -> None:
    first = record("A" * 26)
    ended = replace(first, outcome=Ending(status=200, total_ms=700, ttft_ms=120))
    async with Shelf(path) as shelf:
        shelf.journal.put(first)
        await shelf.journal.settled()
        shelf.clock.ms += 700
        shelf.journal.put(ended)
    async with Shelf(path) as shelf:
        (found,) = await shelf.journal.recent(10)
        assert found.outcome == ended.outcome
        assert found.at_ms == WALL


async def test_recent_is_newest_first_across_memory_and_file_and_filters(path: Path) -> None:
    async with Shelf(path) as shelf:
        for number in range(4):
            shelf.clock.ms = number
            shelf.journal.put(record(f"{number}".rjust(26, "A")))
    async with Shelf(path) as shelf:
        shelf.clock.ms = 10
        refused = replace(record("Z" * 26), action=Action.REJECT, reason=Reason.QUEUE_FULL, chosen=None)
        shelf.journal.put(refused)
        assert [r.id[-1] for r in await shelf.journal.recent(3)] == ["Z", "3", "2"]
        assert [r.id[-1] for r in await shelf.journal.recent(9, action="route")] == ["3", "2", "1", "0"]
        assert [r.id[-1] for r in await shelf.journal.recent(9, reason="queue_full")] == ["Z"]
        assert [r.id[-1] for r in await shelf.journal.recent(9, since_ms=WALL + 3)] == ["Z", "3"]
        assert await shelf.journal.recent(0) == []


async def test_a_full_queue_drops_counts_and_never_blocks(path: Path) -> None:
    shelf = Shelf(path)
    extra = 10
    for number in range(limits.JOURNAL_QUEUE + extra):
        shelf.journal.put(record(f"{number:026d}"))
    assert shelf.journal.dropped == extra
    families = {family.name: family.series[0][3] for family in shelf.journal.collect()}
    assert families["pairmesh_journal_dropped_total"] == extra
    async with shelf:
        await shelf.journal.settled()
        assert shelf.journal.written == limits.JOURNAL_QUEUE
    assert len(bodies(path, 10_000, action=None, reason=None, since_ms=None)) == limits.JOURNAL_QUEUE


async def test_memory_keeps_a_ring(path: Path) -> None:
    async with Shelf(path) as shelf:
        for number in range(limits.JOURNAL_RING + 5):
            shelf.journal.put(record(f"{number:026d}"))
        assert len(shelf.journal._ring) == limits.JOURNAL_RING
        await shelf.journal.settled()
        assert await shelf.journal.get(f"{0:026d}") is not None


async def test_the_file_is_private_and_in_wal_mode(path: Path) -> None:
    old = os.umask(0)
    try:
        async with Shelf(path) as shelf:
            shelf.journal.put(record("A" * 26))
            await shelf.journal.settled()
            for file in path.parent.iterdir():
                assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
            with sqlite3.connect(path) as db:
                assert db.execute("pragma journal_mode").fetchone()[0] == "wal"
            db.close()
    finally:
        os.umask(old)


@pytest.mark.parametrize("damage", [b"not a database, by far " * 40, None])
async def test_a_damaged_file_is_set_aside_and_work_goes_on(path: Path, damage: bytes | None) -> None:
    async with Shelf(path) as shelf:
        for number in range(300):
            shelf.journal.put(record(f"{number:026d}"))
    if damage is None:
        raw = bytearray(path.read_bytes())
        raw[4096:16384] = b"\x5a" * 12_288
        damage = bytes(raw)
    path.write_bytes(damage)
    async with Shelf(path) as shelf:
        shelf.journal.put(record("A" * 26))
        await shelf.journal.settled()
        assert (path.parent / "journal.sqlite.corrupt").stat().st_size == len(damage)
        assert "journal.set_aside" in shelf.events()
    assert body_of(path, "A" * 26) is not None


class Refusing(JournalFile):
    """A file on a disk that refuses for as long as ``refuses`` is set."""

    refuses = True

    def write(self, rows: Iterable[JournalRow], audit: Sequence[AuditRow]) -> None:
        if self.refuses:
            raise sqlite3.OperationalError("database or disk is full")
        super().write(rows, audit)


async def test_what_a_full_disk_does_not_take_waits_for_it(path: Path) -> None:
    file = Refusing(path)
    async with Shelf(path, file) as shelf:
        shelf.journal.put(record("A" * 26))
        shelf.journal.audit("trust.removed", node="atlas")
        for _ in range(3):
            await shelf.journal.settled()
        assert (shelf.journal.lost, shelf.journal.written) == (0, 0)
        assert str(path) in str(shelf.journal.fault)
        assert await shelf.journal.get("A" * 26) is not None
        file.refuses = False
        shelf.journal.put(record("B" * 26))
        await shelf.journal.settled()
        assert (shelf.journal.lost, shelf.journal.written) == (0, 3)
        assert shelf.journal.fault is None
        assert len(await shelf.journal.audits(9)) == 1
    assert shelf.events() == ["trust.removed", "journal.not_written", "journal.written_again"]
    assert all(body_of(path, each * 26) is not None for each in "AB")


async def test_what_waits_for_the_disk_is_bounded_and_the_rest_counted(path: Path) -> None:
    file = Refusing(path)
    async with Shelf(path, file) as shelf:
        for turn in range(2):
            for number in range(limits.JOURNAL_QUEUE - 1):
                shelf.journal.put(record(f"{turn}{number:025d}"))
            await shelf.journal.settled()
        assert shelf.journal.lost == limits.JOURNAL_QUEUE - 2
        file.refuses = False
        await shelf.journal.settled()
        assert shelf.journal.written == limits.JOURNAL_QUEUE


async def test_a_locked_file_is_written_once_it_is_free(path: Path) -> None:
    async with Shelf(path) as shelf:
        shelf.journal.put(record("A" * 26))
        await shelf.journal.settled()
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("begin exclusive")
            shelf.journal.put(record("B" * 26))
            await shelf.journal.settled()
            (line,) = (json.loads(line) for line in shelf.lines)
            assert (line["event"], line["cause"]) == ("journal.not_written", "SQLITE_BUSY")
            assert line["file"] == str(path)
            other.execute("rollback")
        while body_of(path, "B" * 26) is None:
            await shelf.journal.settled()
        assert shelf.journal.lost == 0


async def test_rows_that_never_found_the_disk_are_counted_at_the_end(path: Path) -> None:
    shelf = Shelf(path, Refusing(path))
    async with shelf:
        shelf.journal.put(record("A" * 26))
    assert shelf.journal.lost == 1


async def test_a_journal_of_a_newer_version_is_kept_as_it_is_and_a_new_one_begun(path: Path) -> None:
    """The field trial's N22: ``user_version`` 99 and one more column that must not be null."""
    told: list[tuple[Path, int, Path]] = []
    async with Shelf(path) as shelf:
        shelf.journal.put(record("A" * 26))
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.executescript(
            "alter table decisions add column extra text not null default ''; pragma user_version = 99"
        )
    before = path.read_bytes()
    journal = Journal(path, shelf.clock, shelf.log, aside=lambda *all: told.append(all))
    journal.start()
    journal.put(record("B" * 26))
    await journal.aclose()
    aside = path.with_name("journal.sqlite.v99")
    assert told == [(path, 99, aside)]
    assert aside.read_bytes() == before
    assert body_of(path, "B" * 26) is not None
    assert body_of(path, "A" * 26) is None


async def test_audit_lines_are_kept_and_logged(path: Path) -> None:
    async with Shelf(path) as shelf:
        shelf.journal.audit("trust.added", node="atlas", admission=2)
        shelf.journal.audit("trust.removed", node="atlas")
        await shelf.journal.settled()
        newest, oldest = await shelf.journal.audits(10)
        assert (newest.event, oldest.event) == ("trust.removed", "trust.added")
        assert oldest.facts == {"node": "atlas", "admission": 2}
        assert shelf.events() == ["trust.added", "trust.removed"]


async def test_a_record_of_a_version_that_told_another_clock_tells_when_it_was_made(path: Path) -> None:
    made = msgspec.to_builtins(record("A" * 26)) | {"at_ms": 5_000, "wall_ms": WALL}
    del made["boot_ms"]
    file = JournalFile(path)
    file.write([replace(row("A" * 26, WALL), body=msgspec.msgpack.encode(made))], [])
    file.close()
    async with Shelf(path) as shelf:
        for found in (await shelf.journal.get("A" * 26), *await shelf.journal.recent(9)):
            assert found is not None
            assert (found.at_ms, found.boot_ms) == (WALL, 0)


async def test_an_unreadable_body_is_left_out(path: Path) -> None:
    async with Shelf(path) as shelf:
        shelf.journal.put(record("A" * 26))
    db = sqlite3.connect(path)
    db.execute("insert into decisions values ('B', 9, 'r', 'route', 'native', null, null, x'ff')")
    db.commit()
    db.close()
    async with Shelf(path) as shelf:
        assert [r.id for r in await shelf.journal.recent(10)] == ["A" * 26]
        assert await shelf.journal.get("B") is None


def test_rows_older_than_a_week_go(path: Path) -> None:
    file = JournalFile(path)
    file.open()
    file.write([row("old", 0), row("new", 10)], [])
    file.trim(KEPT_MS + 5)
    file.close()
    assert body_of(path, "old") is None
    assert body_of(path, "new") is not None


def test_the_oldest_rows_go_when_the_file_is_full(path: Path) -> None:
    file = JournalFile(path, max_bytes=200_000)
    file.open()
    file.write([row(f"{n:04d}", n, size=4_000) for n in range(200)], [])
    file.trim(0)
    file.close()
    assert path.stat().st_size <= 250_000
    assert body_of(path, "0199") is not None
    assert body_of(path, "0000") is None


def test_what_the_oldest_rows_leave_is_written_to_again(path: Path) -> None:
    file = JournalFile(path, max_bytes=1_000_000)
    file.open()
    sizes = []
    for turn in range(12):
        file.write([row(f"{turn}-{n}", turn, size=2_000) for n in range(50)], [])
        file.trim(0)
        sizes.append(pages_of(path))
    assert any(free for _, free, _ in sizes), "some rows had to go"
    assert sizes == sorted(sizes, key=lambda size: size[0]), "nothing is given back that is needed at once"
    assert all(free <= pages / 5 and pages * page_bytes <= 1_200_000 for pages, free, page_bytes in sizes)


def test_a_file_of_an_earlier_version_is_used_with_the_pages_it_has(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("pragma page_size = 4096")
    db.execute("pragma auto_vacuum = incremental")
    db.execute("pragma journal_mode = wal")
    db.execute(
        "create table decisions (id text primary key, at_ms integer not null, request_id text not null, "
        "action text not null, reason text not null, node text, model text, body blob not null)"
    )
    db.execute("insert into decisions values ('old', 1, 'r', 'route', 'native', null, null, x'01')")
    db.commit()
    db.close()
    file = JournalFile(path)
    file.write([row("new", 2)], [])
    file.trim(0)
    file.close()
    assert pages_of(path)[2] == 4_096
    assert (body_of(path, "old"), body_of(path, "new")) == ((1, b"\x01"), (2, b"x" * 10))


async def test_the_thread_ends_with_the_journal(path: Path) -> None:
    async with Shelf(path) as shelf:
        shelf.journal.put(record("A" * 26))
        assert "journal" in {thread.name for thread in threading.enumerate()}
    assert "journal" not in {thread.name for thread in threading.enumerate()}
    assert body_of(path, "A" * 26) is not None


def pages_of(path: Path) -> tuple[int, int, int]:
    """Pages of the file, how many of them are free, and the bytes of one."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        pages, free, size = (
            db.execute(f"pragma {what}").fetchone()[0]
            for what in ("page_count", "freelist_count", "page_size")
        )
    return pages, free, size


def row(row_id: str, at_ms: int, size: int = 10) -> JournalRow:
    return JournalRow(
        id=row_id,
        at_ms=at_ms,
        request_id="r",
        action="route",
        reason="native",
        node=None,
        model=None,
        body=b"x" * size,
    )


def test_a_record_survives_its_encoding() -> None:
    made = record("A" * 26)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=DecisionRecord) == made
    assert msgspec.json.decode(msgspec.json.encode(made), type=DecisionRecord) == made
