"""One SQLite file of the state folder: opened when it is needed, of a known schema, private to its owner.

``user_version`` is the schema's number. An older file is brought up by numbered steps, each whole or not at all; one of a
newer version is set aside as it is, with what SQLite keeps beside it, and taken up again by the version that knows it;
one that is damaged, or has other tables than its number says, is set aside as ``<name>.corrupt``. A new one is begun in
its place: what is in here is worth less than a daemon that works. A disk that is full and a file that somebody has
locked are for the caller to wait for.
"""

import contextlib
import errno
import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

from agent.effects.aside import Aside, quietly

BESIDE: Final = ("-wal", "-shm")
"""What SQLite keeps beside a file."""
_BUSY_S: Final = 1.0
_WAITED_FOR: Final = frozenset({"SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_FULL"})
"""Refusals that say nothing against the open file: by SQLite's primary name."""

T = TypeVar("T")


class SqliteFile:
    """``steps[n]`` is the SQL that leads from version ``n`` to the next, 0 being no tables, or those of the
    first step, which files had before they had a number. ``tables`` are the columns they end in. ``pragmas`` are
    set at each opening. ``aside`` hears of a file of a newer version, ``damaged`` of where a damaged one lies.
    Used by one thread at a time.
    """

    def __init__(
        self,
        path: Path,
        *,
        steps: Sequence[str],
        tables: Mapping[str, Sequence[str]],
        pragmas: Sequence[str],
        aside: Aside = quietly,
        damaged: Callable[[Path, str], None] = lambda _path, _cause: None,
    ) -> None:
        self._path = path
        self._steps = tuple(steps)
        self._tables = tables
        self._pragmas = tuple(pragmas)
        self._aside = aside
        self._damaged = damaged
        self._db: sqlite3.Connection | None = None
        self._opened_inode: tuple[int, int] | None = None

    def run(self, act: Callable[[sqlite3.Connection], T]) -> T:
        """What ``act`` makes of the open file, which is replaced by an empty one first if it turns out to be damaged.
        Raises ``OSError`` or ``sqlite3.Error`` if the disk refuses."""
        try:
            return self._tried(act)
        except sqlite3.Error as fault:
            if not is_damage(fault):
                raise
            self._set_aside(fault)
        return self._tried(act)

    def close(self) -> None:
        if self._db is not None:
            db, self._db = self._db, None
            db.close()

    def _tried(self, act: Callable[[sqlite3.Connection], T]) -> T:
        try:
            if self._db is not None and _inode(self._path) != self._opened_inode:
                self.close()  # somebody has removed or replaced the file: what is written there is lost
            if self._db is None:
                self._db = self._opened()
                self._opened_inode = _inode(self._path)
            return act(self._db)
        except sqlite3.Error as fault:
            if not any(name_of(fault).startswith(name) for name in _WAITED_FOR):
                self.close()
            raise

    def _opened(self) -> sqlite3.Connection:
        if self._path.exists() and not self._path.is_file():
            raise sqlite3.DatabaseError("no file")  # a pipe would be waited for
        self._take_up()
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY, 0o600))
        self._path.chmod(0o600)
        db = sqlite3.connect(self._path, timeout=_BUSY_S, check_same_thread=False)
        try:
            for pragma in self._pragmas:
                db.execute(f"pragma {pragma}")
            if db.execute("pragma quick_check(1)").fetchone()[0] != "ok":
                raise sqlite3.DatabaseError("quick_check failed")
            self._bring_up(db)
        except BaseException:
            db.close()
            raise
        return db

    def _take_up(self) -> None:
        """Put a newer file aside before anything is written to it, and one of this version, put aside by an older
        program, back in its place."""
        known = len(self._steps)
        found = _version_at(self._path)
        if found is not None and found > known:
            aside = _move(self._path, f".v{found}")
            self._aside(self._path, found, aside)
            found = None
        waiting = self._path.with_name(f"{self._path.name}.v{known}")
        present = None if found is None else max(1, found)
        if waiting.exists() and (present is None or present < known):
            if present is not None:
                _move(self._path, f".v{present}")
            for suffix in ("", *BESIDE):
                with contextlib.suppress(FileNotFoundError):
                    waiting.with_name(waiting.name + suffix).rename(
                        self._path.with_name(self._path.name + suffix)
                    )

    def _bring_up(self, db: sqlite3.Connection) -> None:
        version = db.execute("pragma user_version").fetchone()[0]
        for number, step in enumerate(self._steps[version:], start=version + 1):
            db.executescript(f"begin immediate; {step}; pragma user_version = {number}; commit")
        for table, columns in self._tables.items():
            found = [row[1] for row in db.execute(f"pragma table_info({table})")]
            if found != list(columns):
                raise sqlite3.DatabaseError(f"{table} has other columns")

    def _set_aside(self, fault: sqlite3.Error) -> None:
        self.close()
        for suffix in BESIDE:
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self._damaged(_move(self._path, ".corrupt"), cause_of(fault))


def is_damage(fault: sqlite3.Error) -> bool:
    """True if ``fault`` speaks against what is in the file, not against the disk or who else holds it."""
    if isinstance(fault, sqlite3.OperationalError):
        return name_of(fault) == "SQLITE_ERROR"
    return isinstance(fault, sqlite3.DatabaseError)


def name_of(fault: sqlite3.Error) -> str:
    """SQLite's name of ``fault``, empty if it has none."""
    return str(getattr(fault, "sqlite_errorname", None) or "")


def cause_of(fault: BaseException) -> str:
    """Why a file could not be used, in a word that nobody else wrote."""
    if isinstance(fault, sqlite3.Error):
        return name_of(fault) or type(fault).__name__
    if isinstance(fault, OSError) and fault.errno is not None:
        return errno.errorcode.get(fault.errno, str(fault.errno))
    return type(fault).__name__


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _version_at(path: Path) -> int | None:
    """The version of the file, unaltered by being asked; None if there is none, or none that can be read."""
    if not path.exists():
        return None
    try:
        with contextlib.closing(
            sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=_BUSY_S)
        ) as db:
            return int(db.execute("pragma user_version").fetchone()[0])
    except sqlite3.Error as fault:
        if is_damage(fault):
            return 0
        raise


def _move(path: Path, suffix: str) -> Path:
    """Rename the file, and what SQLite keeps beside it, by ``suffix``; its new path."""
    aside = path.with_name(path.name + suffix)
    for beside in ("", *BESIDE):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + beside).rename(aside.with_name(aside.name + beside))
    return aside
