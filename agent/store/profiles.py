"""Learned profiles on disk: one row per text key, its value opaque bytes.

A file that SQLite cannot read is set aside and a new one begun: profiles are learned again. One connection, used
from one thread at a time.
"""

import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path

from agent.store.atomic import set_aside

_SCHEMA = "CREATE TABLE IF NOT EXISTS profiles (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID"


class ProfileStore:
    """``profiles.sqlite`` below one state folder."""

    def __init__(self, state: Path) -> None:
        """Open or create the file; raises ``OSError`` or ``sqlite3.OperationalError`` if the disk refuses."""
        self._path = state / "profiles.sqlite"
        self.set_aside: Path | None = None
        """Where a damaged file went at opening."""
        try:
            self._db = self._open()
        except sqlite3.DatabaseError as fault:
            if isinstance(fault, sqlite3.OperationalError):
                raise
            self.set_aside = set_aside(self._path)
            for suffix in ("-wal", "-shm"):
                self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
            self._db = self._open()

    def load(self) -> dict[str, bytes]:
        """Every row."""
        return dict(self._db.execute("SELECT key, value FROM profiles"))

    def save(self, changed: Mapping[str, bytes], gone: Iterable[str] = ()) -> None:
        """Write ``changed`` and delete ``gone`` in one transaction; raises ``sqlite3.OperationalError``."""
        with self._db:
            self._db.executemany(
                "INSERT INTO profiles VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
                changed.items(),
            )
            self._db.executemany("DELETE FROM profiles WHERE key = ?", ((key,) for key in gone))

    def close(self) -> None:
        self._db.close()

    def _open(self) -> sqlite3.Connection:
        self._path.touch(mode=0o600, exist_ok=True)
        db = sqlite3.connect(self._path, check_same_thread=False, timeout=5)
        try:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute(_SCHEMA)
            if db.execute("PRAGMA quick_check").fetchone() != ("ok",):
                raise sqlite3.DatabaseError("the check failed")
        except BaseException:
            db.close()
            raise
        return db
