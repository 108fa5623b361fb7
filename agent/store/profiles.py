"""Learned profiles on disk: one row per text key, its value opaque bytes.

A file that cannot be read is set aside and a new one begun: profiles are learned again. One that is locked, or a disk
that is full, is tried again with the next save. Used from one thread at a time.
"""

import sqlite3
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from agent.effects.aside import Aside, quietly
from agent.effects.sqlite_file import SqliteFile

FILE: Final = "profiles.sqlite"
_UPSERT: Final = (
    "insert into profiles (key, value) values (?, ?) on conflict (key) do update set value = excluded.value"
)
_STEPS: Final = (
    "create table if not exists profiles (key text primary key, value blob not null) without rowid",
)


class ProfileStore:
    """``profiles.sqlite`` below one state folder, opened when it is first used. ``aside`` hears of a file of a newer
    version, ``damaged`` of where a damaged one lies and why. All methods raise ``OSError`` or ``sqlite3.Error`` if the
    disk refuses."""

    def __init__(
        self,
        state: Path,
        *,
        aside: Aside = quietly,
        damaged: Callable[[Path, str], None] = lambda _path, _cause: None,
    ) -> None:
        self._file = SqliteFile(
            state / FILE,
            steps=_STEPS,
            tables={"profiles": ("key", "value")},
            pragmas=("journal_mode = wal", "synchronous = normal"),
            aside=aside,
            damaged=damaged,
        )

    def load(self) -> dict[str, bytes]:
        """Every row."""
        return self._file.run(lambda db: dict(db.execute("select key, value from profiles")))

    def save(self, changed: Mapping[str, bytes], gone: Iterable[str] = ()) -> None:
        """Write ``changed`` and delete ``gone`` in one transaction."""
        deleted = [(key,) for key in gone]

        def write(db: sqlite3.Connection) -> None:
            with db:
                db.executemany(_UPSERT, changed.items())
                db.executemany("delete from profiles where key = ?", deleted)

        self._file.run(write)

    def close(self) -> None:
        self._file.close()
