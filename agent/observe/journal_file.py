"""The SQLite file of the journal: two tables, bounded by age and size, private to its owner.

Used by one thread at a time for writing; reads open their own connection and may run beside it (WAL). A file
that SQLite calls damaged is set aside as ``<name>.corrupt`` and a new one begun: a journal is worth less than
a daemon that starts. Knows bytes and columns, not what a decision is.
"""

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.structs import astuple

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

_TABLES: Final = """
create table if not exists decisions (
    id text primary key, at_ms integer not null, request_id text not null, action text not null,
    reason text not null, node text, model text, body blob not null);
create index if not exists decisions_by_time on decisions (at_ms);
create table if not exists audit (
    seq integer primary key autoincrement, at_ms integer not null, event text not null, body blob not null);
"""


class Row(Struct, frozen=True, gc=False, kw_only=True):
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
    at_ms: int
    event: str
    body: bytes


class JournalFile:
    """The writing side. A damaged file raises ``sqlite3.DatabaseError``: ``set_aside`` it and go on."""

    def __init__(self, path: Path, *, max_bytes: int = limits.JOURNAL_FILE) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._db: sqlite3.Connection | None = None

    def open(self) -> None:
        """Open or create the file; without it the first write does."""
        self._open_db()

    def set_aside(self) -> None:
        """Close the file and move it away; the next use starts an empty one."""
        self.close()
        with contextlib.suppress(FileNotFoundError):
            self._path.rename(self._path.with_name(self._path.name + ".corrupt"))
        for suffix in ("-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)

    def close(self) -> None:
        if self._db is not None:
            db, self._db = self._db, None
            db.close()

    def write(self, rows: Iterable[Row], audit: Sequence[AuditRow]) -> None:
        """One transaction; a decision already there by id is replaced."""
        db = self._open_db()
        with db:
            rest = iter(rows)
            while part := list(islice(rest, _ROWS_AT_ONCE)):
                places = ", ".join(["(?, ?, ?, ?, ?, ?, ?, ?)"] * len(part))
                values = list(chain.from_iterable(map(astuple, part)))
                db.execute(f"insert or replace into decisions values {places}", values)
            db.executemany(
                "insert into audit (at_ms, event, body) values (?, ?, ?)",
                [(a.at_ms, a.event, a.body) for a in audit],
            )

    def trim(self, wall_ms: int) -> None:
        """Drop what is older than ``KEPT_MS``, then the oldest tenth until the size holds."""
        db = self._open_db()
        with db:
            db.execute("delete from decisions where at_ms < ?", (wall_ms - KEPT_MS,))
            db.execute("delete from audit where seq <= (select max(seq) from audit) - ?", (AUDIT_ROWS,))
        while self._bytes()[0] > self._max_bytes:
            with db:
                left = db.execute("select count(*) from decisions").fetchone()[0]
                db.execute(
                    "delete from decisions where rowid in "
                    "(select rowid from decisions order by at_ms limit ?)",
                    (left // TRIM_SHARE + 1,),
                )
            if not left:
                break
        used, free = self._bytes()
        if free > (used + free) // _FREE_SHARE:
            db.executescript("pragma incremental_vacuum")

    def _bytes(self) -> tuple[int, int]:
        """How much of the file is used, and how much free."""
        pages, free, size = (
            self._open_db().execute(f"pragma {what}").fetchone()[0]
            for what in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * size, free * size

    def _open_db(self) -> sqlite3.Connection:
        if self._db is None:
            self._db = _opened(self._path)
        return self._db


def body_of(path: Path, decision_id: str) -> bytes | None:
    """The stored record of one decision. Raises ``sqlite3.Error``."""
    with _reading(path) as db:
        found = db.execute("select body from decisions where id = ?", (decision_id,)).fetchone()
    return None if found is None else bytes(found[0])


def bodies(
    path: Path, limit: int, *, action: str | None, reason: str | None, since_ms: int | None
) -> list[bytes]:
    """Stored records, newest first, that match what is given. Raises ``sqlite3.Error``."""
    wanted = {"action = ?": action, "reason = ?": reason, "at_ms >= ?": since_ms}
    terms = {term: value for term, value in wanted.items() if value is not None}
    where = f"where {' and '.join(terms)} " if terms else ""
    query = f"select body from decisions {where}order by at_ms desc, rowid desc limit ?"
    with _reading(path) as db:
        return [bytes(body) for (body,) in db.execute(query, (*terms.values(), limit))]


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


def _opened(path: Path) -> sqlite3.Connection:
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY, 0o600))
    path.chmod(0o600)
    db = sqlite3.connect(path, timeout=1.0, check_same_thread=False)
    try:
        db.execute(f"pragma page_size = {_PAGE_BYTES}")
        db.execute("pragma auto_vacuum = incremental")
        db.execute("pragma journal_mode = wal")
        db.execute("pragma synchronous = normal")
        db.execute("pragma temp_store = memory")
        db.execute("pragma secure_delete = fast")
        page_bytes = db.execute("pragma page_size").fetchone()[0]
        db.execute(f"pragma wal_autocheckpoint = {_WAL_BYTES // page_bytes}")
        db.execute(f"pragma journal_size_limit = {_WAL_BYTES}")
        if db.execute("pragma quick_check(1)").fetchone()[0] != "ok":
            raise sqlite3.DatabaseError("quick_check failed")
        db.executescript(_TABLES)
    except BaseException:
        db.close()
        raise
    return db
