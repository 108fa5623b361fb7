"""Small kernel files: where the mounts are, and how one is read.

A kernel file is never trusted to be there, to be short or to hold what it should: every reader answers None for
what it cannot get. Nothing here keeps a value.
"""

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

READ_MOST: Final = 256 * 1024
CHUNK: Final = 16 * 1024
"""Above a page, of which a kernel file gives at most one at a time, and small enough to be had cheaply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roots:
    """The mounts everything is read below, so that a test can hand in folder trees."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    cg: Path = Path("/sys/fs/cgroup")
    dev: Path = Path("/dev")


def read_text(path: Path) -> str | None:
    """The stripped text of ``path``; None if it cannot be read or is no UTF-8."""
    raw = b""
    try:
        with path.open("rb", buffering=0) as file:
            while len(raw) < READ_MOST and (more := file.read(CHUNK)):
                raw += more
        return raw.decode("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None


def read_number(path: Path) -> int | None:
    """The one non-negative whole number ``path`` holds, or None."""
    return whole(read_text(path))


def whole(text: str | None) -> int | None:
    """A whole number in decimal digits, or None."""
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def read_field(path: Path, name: str) -> int | None:
    """The number in the line ``name NUMBER`` of ``path``, or None."""
    return field_of(read_text(path) or "", name)


def field_of(text: str, name: str) -> int | None:
    """The number in the line ``name NUMBER`` of ``text``, or None."""
    _, found, rest = f"\n{text}".partition(f"\n{name} ")
    return whole(rest.partition("\n")[0].strip()) if found else None


class KeptFile:
    """A kernel file that stays open and is read again from its start.

    It is opened anew after an error, since its device or cgroup may be gone. ``error`` is the number of the last
    failure, 0 after a good read.
    """

    GONE: Final = (errno.ENODEV, errno.ENOENT)

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None
        self.error = 0

    def read(self) -> str | None:
        """The text, or None with ``error`` set."""
        text = self._read()
        if text is None and self.error in self.GONE:
            text = self._read()
        return text

    def _read(self) -> str | None:
        try:
            if self._fd is None:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            raw = os.pread(self._fd, CHUNK, 0)
        except OSError as error:
            self.error = error.errno or errno.EIO
            self.close()
            return None
        self.error = 0
        return raw.decode("ascii", "replace")

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
