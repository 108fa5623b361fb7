"""The SQLite file of the journal: two tables, bounded by age and size, private to its owner.

Used by one thread at a time for writing; reads open their own connection and may run beside it (WAL). Knows bytes and
columns, not what a decision is.
"""

import contextlib
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.structs import astuple

from agent.effects.aside import Aside, quietly
from agent.effects.sqlite_file import SqliteFile
from router_core import limits

KEPT_MS: Final = 7 * 24 * 3_600_000
AUDIT_ROWS: Final = 10_000
TRIM_SHARE: Final = 10
_FREE_SHARE: Final = 5
"""The part of the file that may be free: less is soon written to again, giving it back would be work twice."""
_PAGE_BYTES: Final = 8_192
"""Of a new file. A record of two rows takes more than half of SQLite's usual page, and so all of it."""
_WAL_BYTES: Final = 4 * limits.MIB
_ROWS_AT_ONCE: Final = 64
"""Rows of one statement. Each statement hands the interpreter to the other threads and has to win it back: a row at a
time would keep the event loop waiting as often as it serves requests."""

_STEPS: Final = (
    """
create table if not exists decisions (
    id text primary key, at_ms integer not null, request_id text not null, action text not null,
    reason text not null, node text, model text, body blob not null);
create index if not exists decisions_by_time on decisions (at_ms);
create table if not exists audit (
    seq integer primary key autoincrement, at_ms integer not null, event text not null, body blob not null)
""",
)
_COLUMNS: Final = {
    "decisions": ("id", "at_ms", "request_id", "action", "reason", "node", "model", "body"),
    "audit": ("seq", "at_ms", "event", "body"),
}
_NAMED: Final = f"({', '.join(_COLUMNS['decisions'])})"
_PRAGMAS: Final = (
    f"page_size = {_PAGE_BYTES}",
    "auto_vacuum = incremental",
    "journal_mode = wal",
    "synchronous = normal",
    "temp_store = memory",
    "secure_delete = fast",
    f"wal_autocheckpoint = {_WAL_BYTES // _PAGE_BYTES}",
    f"journal_size_limit = {_WAL_BYTES}",
)


class JournalRow(Struct, frozen=True, gc=False, kw_only=True):
    """One decision as stored; ``body`` is the whole record."""

    id: str
    at_ms: int
    request_id: str
    action: str
    reason: str
    node: str | None
    model: str | None
    body: bytes


class AuditRow(Struct, frozen=True, gc=False, kw_only=True):
    """One change that an operator made, as stored; ``body`` is the whole entry."""

    at_ms: int
    event: str
    body: bytes


class JournalFile:
    """The writing side; opened when it is first used. A file that is damaged, or of a newer version, is replaced by an
    empty one, and ``damaged`` or ``aside`` told of where it lies. Methods raise ``OSError`` or ``sqlite3.Error`` if the
    disk refuses."""

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int = limits.JOURNAL_FILE,
        aside: Aside = quietly,
        damaged: Callable[[Path, str], None] = lambda _path, _cause: None,
    ) -> None:
        self._max_bytes = max_bytes
        self._file = SqliteFile(
            path, steps=_STEPS, tables=_COLUMNS, pragmas=_PRAGMAS, aside=aside, damaged=damaged
        )

    def open(self) -> None:
        """Open or create the file; without it the first write does."""
        self._file.run(lambda _db: None)

    def close(self) -> None:
        self._file.close()

    def write(self, rows: Iterable[JournalRow], audit: Sequence[AuditRow]) -> None:
        """One transaction; a decision already there by id is replaced."""
        taken = list(rows)

        def write(db: sqlite3.Connection) -> None:
            with db:
                for first in range(0, len(taken), _ROWS_AT_ONCE):
                    part = taken[first : first + _ROWS_AT_ONCE]
                    places = ", ".join(["(?, ?, ?, ?, ?, ?, ?, ?)"] * len(part))
                    values = list(chain.from_iterable(map(astuple, part)))
                    db.execute(f"insert or replace into decisions {_NAMED} values {places}", values)
                db.executemany(
                    "insert into audit (at_ms, event, body) values (?, ?, ?)",
                    [(a.at_ms, a.event, a.body) for a in audit],
                )

        self._file.run(write)

    def trim(self, wall_ms: int) -> None:
        """Drop what is older than ``KEPT_MS``, then the oldest tenth until the size holds."""
        self._file.run(lambda db: self._trim(db, wall_ms))

    def _trim(self, db: sqlite3.Connection, wall_ms: int) -> None:
        with db:
            db.execute("delete from decisions where at_ms < ?", (wall_ms - KEPT_MS,))
            db.execute("delete from audit where seq <= (select max(seq) from audit) - ?", (AUDIT_ROWS,))
        while _bytes(db)[0] > self._max_bytes:
            with db:
                left = db.execute("select count(*) from decisions").fetchone()[0]
                db.execute(
                    "delete from decisions where rowid in "
                    "(select rowid from decisions order by at_ms limit ?)",
                    (left // TRIM_SHARE + 1,),
                )
            if not left:
                break
        used, free = _bytes(db)
        if free > (used + free) // _FREE_SHARE:
            db.executescript("pragma incremental_vacuum")


def _bytes(db: sqlite3.Connection) -> tuple[int, int]:
    """How much of the file is used, and how much free."""
    pages, free, size = (
        db.execute(f"pragma {what}").fetchone()[0] for what in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size, free * size


Body = tuple[int, bytes]
"""A stored record with when it was made, wall time in ms."""


def body_of(path: Path, decision_id: str) -> Body | None:
    """The stored record of one decision. Raises ``sqlite3.Error``."""
    with _reading(path) as db:
        found = db.execute("select at_ms, body from decisions where id = ?", (decision_id,)).fetchone()
    return None if found is None else (int(found[0]), bytes(found[1]))


def bodies(
    path: Path, limit: int, *, action: str | None, reason: str | None, since_ms: int | None
) -> list[Body]:
    """Stored records, newest first, that match what is given. Raises ``sqlite3.Error``."""
    wanted = {"action = ?": action, "reason = ?": reason, "at_ms >= ?": since_ms}
    terms = {term: value for term, value in wanted.items() if value is not None}
    where = f"where {' and '.join(terms)} " if terms else ""
    query = f"select at_ms, body from decisions {where}order by at_ms desc, rowid desc limit ?"
    with _reading(path) as db:
        return [(int(at_ms), bytes(body)) for at_ms, body in db.execute(query, (*terms.values(), limit))]


def audit_rows(path: Path, limit: int) -> list[AuditRow]:
    """Stored audit lines, newest first. Raises ``sqlite3.Error``."""
    with _reading(path) as db:
        found = db.execute("select at_ms, event, body from audit order by seq desc limit ?", (limit,))
        return [AuditRow(at_ms=at_ms, event=event, body=bytes(body)) for at_ms, event, body in found]


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=1.0)
    try:
        yield db
    finally:
        db.close()
