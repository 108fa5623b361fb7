"""SQLite files over their versions: brought up, set aside whole, taken up again, or begun anew."""

import contextlib
import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agent.effects.sqlite_file import SqliteFile, cause_of

ONE = ("create table if not exists t (a integer)",)
TWO = (*ONE, "alter table t add column b text not null default 'x'")


class Told:
    def __init__(self) -> None:
        self.aside: list[tuple[str, int, str]] = []
        self.damaged: list[tuple[str, str]] = []


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "t.sqlite"


def opened(path: Path, told: Told, steps: Sequence[str] = ONE) -> SqliteFile:
    return SqliteFile(
        path,
        steps=steps,
        tables={"t": ("a", "b")[: len(steps)]},
        pragmas=("journal_mode = wal",),
        aside=lambda was, version, now: told.aside.append((was.name, version, now.name)),
        damaged=lambda now, cause: told.damaged.append((now.name, cause)),
    )


def used(path: Path, told: Told, sql: str, steps: Sequence[str] = ONE) -> list[Any]:
    """What one program of this version gets for one statement."""
    file = opened(path, told, steps)
    try:

        def act(db: sqlite3.Connection) -> list[Any]:
            with db:
                return db.execute(sql).fetchall()

        return file.run(act)
    finally:
        file.close()


def raw(path: Path, script: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.executescript(script)


def version_of(path: Path) -> int:
    with contextlib.closing(sqlite3.connect(path)) as db:
        return int(db.execute("pragma user_version").fetchone()[0])


def test_a_new_file_is_of_the_newest_version_and_private(path: Path, told: Told) -> None:
    used(path, told, "insert into t values (1, 'y')", TWO)
    assert version_of(path) == 2
    assert path.stat().st_mode & 0o777 == 0o600
    assert (told.aside, told.damaged) == ([], [])


@pytest.mark.parametrize("number", [0, 1], ids=["before versions", "the first"])
def test_an_older_file_is_brought_up_step_by_step(path: Path, told: Told, number: int) -> None:
    raw(path, f"create table t (a integer); insert into t values (7); pragma user_version = {number}")
    assert used(path, told, "select a, b from t", TWO) == [(7, "x")]
    assert version_of(path) == 2


def test_a_newer_file_is_set_aside_with_what_lies_beside_it_and_taken_up_again(
    path: Path, told: Told
) -> None:
    held = opened(path, told, TWO)
    held.run(lambda db: db.executescript("insert into t values (7, 'new')"))
    beside = path.with_name(path.name + "-wal")
    whole = {each.name: each.read_bytes() for each in (path, beside)}
    copies = path.parent / "crashed"
    copies.mkdir()
    for name, content in whole.items():
        (copies / name).write_bytes(content)
    held.close()

    crashed = copies / path.name
    assert used(crashed, told, "select * from t") == []
    assert told.aside == [("t.sqlite", 2, "t.sqlite.v2")]
    for name, content in whole.items():
        assert (copies / name.replace("t.sqlite", "t.sqlite.v2")).read_bytes() == content
    used(crashed, told, "insert into t values (8)")
    assert used(crashed, told, "select * from t", TWO) == [(7, "new")]
    assert used(crashed.with_name("t.sqlite.v1"), told, "select * from t") == [(8,)]
    assert not (copies / "t.sqlite.v2").exists()
    assert told.damaged == []


@pytest.mark.parametrize(
    "damage",
    [
        "create table t (a integer, extra text not null)",
        "create table t (z integer)",
        "create table other (a integer)",
    ],
)
def test_a_file_whose_tables_are_not_what_its_number_says_is_replaced(
    path: Path, told: Told, damage: str
) -> None:
    raw(path, f"{damage}; pragma user_version = 1")
    assert used(path, told, "select * from t") == []
    ((aside, _),) = told.damaged
    assert aside == "t.sqlite.corrupt"
    assert (path.parent / aside).exists()


def test_a_file_that_is_damaged_while_it_is_open_is_replaced(path: Path, told: Told) -> None:
    file = opened(path, told)
    calls: list[int] = []

    def act(db: sqlite3.Connection) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise sqlite3.DatabaseError("database disk image is malformed")
        with db:
            db.execute("insert into t values (1)")

    file.run(act)
    file.close()
    assert told.damaged == [("t.sqlite.corrupt", "DatabaseError")]
    assert used(path, told, "select * from t") == [(1,)]


def test_a_file_that_was_removed_under_it_is_begun_anew(path: Path, told: Told) -> None:
    file = opened(path, told)
    file.run(lambda db: db.executescript("insert into t values (1)"))
    for each in path.parent.iterdir():
        each.unlink()
    file.run(lambda db: db.executescript("insert into t values (2)"))
    file.close()
    assert used(path, told, "select a from t") == [(2,)]
    assert told.damaged == []


@pytest.mark.parametrize("where", ["open", "not open"])
def test_a_lock_is_for_the_caller_to_wait_for(
    path: Path, told: Told, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.effects.sqlite_file._BUSY_S", 0.01)
    file = opened(path, told)
    file.run(lambda db: db.executescript("insert into t values (1)"))
    if where == "not open":
        file.close()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("begin exclusive")
        with pytest.raises(sqlite3.OperationalError) as refused:
            file.run(lambda db: db.executescript("insert into t values (2)"))
        assert cause_of(refused.value) == "SQLITE_BUSY"
        other.execute("rollback")
    file.run(lambda db: db.executescript("insert into t values (3)"))
    file.close()
    assert used(path, told, "select a from t") == [(1,), (3,)]
    assert (told.aside, told.damaged) == ([], [])


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_set_aside_and_never_waited_for(path: Path, told: Told, make: Any) -> None:
    make(path)
    assert used(path, told, "select * from t") == []
    assert told.damaged == [("t.sqlite.corrupt", "DatabaseError")]


def test_a_link_into_a_place_that_is_not_there_is_for_the_caller_to_wait_for(path: Path, told: Told) -> None:
    path.symlink_to(path.parent / "unmounted" / "t.sqlite")
    with pytest.raises(OSError, match="No such file"):
        used(path, told, "select * from t")
    (path.parent / "unmounted").mkdir()
    (path.parent / "unmounted" / "t.sqlite").touch()
    assert used(path, told, "select * from t") == []
    assert path.is_symlink()


def test_a_cause_is_a_word_of_the_system() -> None:
    assert cause_of(OSError(28, "whatever")) == "ENOSPC"
    assert cause_of(sqlite3.OperationalError("text of somebody")) == "OperationalError"
