"""Writes that are whole or not there, and reads that do not follow links.

A write goes to a new file in the same folder, is synced, takes the old one's place by rename after the old one
was kept as ``<name>.last``, and the folder is synced. A crash at any point leaves the old or the new content.
"""

import errno
import os
from pathlib import Path

from agent.effects.entropy import random_bytes
from agent.settings.reading import opened

PRIVATE = 0o600


def write_atomic(path: Path, content: bytes, mode: int = PRIVATE) -> None:
    """Replace ``path`` by ``content``; raises ``OSError`` and then leaves ``path`` as it was."""
    draft = path.with_name(f".{path.name}.{random_bytes(8).hex()}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        try:
            os.fchmod(fd, mode)
            _write_all(fd, content)
            os.fsync(fd)
        finally:
            os.close(fd)
        _keep_last(path)
        draft.rename(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def last_of(path: Path) -> Path:
    """Where the content before the newest write is kept."""
    return path.with_name(path.name + ".last")


def set_aside(path: Path) -> Path:
    """Rename a damaged file to ``<name>.corrupt`` and return that path."""
    aside = path.with_name(path.name + ".corrupt")
    path.replace(aside)
    sync_folder(path.parent)
    return aside


def remove_file(path: Path) -> None:
    """Remove ``path`` and what was kept of it; a missing file is fine."""
    last_of(path).unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    sync_folder(path.parent)


def read_plain(path: Path, most: int) -> bytes:
    """The content of a regular file of at most ``most`` bytes; raises ``OSError``, also for a symbolic link."""
    content, _ = read_with_status(path, most)
    return content


def read_with_status(path: Path, most: int) -> tuple[bytes, os.stat_result]:
    """Content and status of one and the same open file; never blocks on a pipe."""
    with opened(path, os.O_NOFOLLOW) as file:
        found = os.fstat(file.fileno())
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"more than {most} bytes")
    return content, found


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


def _keep_last(path: Path) -> None:
    """Keep the present content under the second name without ever leaving ``path`` missing."""
    draft = path.with_name(f".{path.name}.{random_bytes(8).hex()}")
    try:
        os.link(path, draft, follow_symlinks=False)
    except FileNotFoundError:
        return
    draft.replace(last_of(path))
