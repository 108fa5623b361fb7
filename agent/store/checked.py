"""Checked files: a head, a msgpack payload, and a check of what may not have changed.

Each kind of file has a schema version. Version 1 is ``PMF1`` + u32 big-endian length + payload + sha256(payload)[:16];
a later one is ``PMF2`` + u16 version + u32 length + payload + sha256(version + payload)[:16], and is read by numbered
steps from each version to the next. A file cut or altered anywhere is seen, one of a version that is not known yet is
named; what then happens (the last one, quarantine, refusal) is the caller's.
"""

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from agent.effects.aside import Aside
from agent.store.atomic import last_of, read_plain, sync_folder, write_atomic

MAGIC: Final = b"PMF1"
VERSIONED: Final = b"PMF2"
FILE_MOST: Final = 4 * 1024 * 1024
_HEAD = len(MAGIC) + 4
_CHECK = 16

Step = Callable[[Any], Any]
"""Makes a value of one version, in msgpack's own types, one of the next."""


class FileSchema(Struct, frozen=True, kw_only=True):
    """How one kind of file came to be what it is: ``steps[n]`` leads from version ``n + 1`` to the next."""

    steps: tuple[Step, ...] = ()

    @property
    def version(self) -> int:
        return 1 + len(self.steps)


FIRST: Final = FileSchema()

T = TypeVar("T")


class Damaged(Exception):
    """A checked file exists and cannot be believed."""


class Newer(Exception):
    """A checked file is whole and of a version that this program does not know."""

    def __init__(self, path: Path, version: int) -> None:
        super().__init__(f"{path} is of version {version}")
        self.path = path
        self.version = version


def pack(payload: bytes, version: int = 1) -> bytes:
    """The bytes of a checked file around ``payload``."""
    length = len(payload).to_bytes(4, "big")
    if version == 1:
        return MAGIC + length + payload + sha256(payload).digest()[:_CHECK]
    number = version.to_bytes(2, "big")
    return VERSIONED + number + length + payload + sha256(number + payload).digest()[:_CHECK]


def unpack(content: bytes) -> tuple[int, bytes]:
    """Version and payload of a checked file; raises ``Damaged``."""
    at = _HEAD if content.startswith(MAGIC) else _HEAD + 2
    version = 1 if content.startswith(MAGIC) else int.from_bytes(content[len(MAGIC) : at - 4], "big")
    payload = content[at : at + int.from_bytes(content[at - 4 : at], "big")]
    if not version or content != pack(payload, version):
        raise Damaged(f"{len(content)} bytes do not check")
    return version, payload


def read_checked(path: Path, kind: type[T], schema: FileSchema = FIRST) -> T | None:
    """The value in ``path``, None if there is no such file; raises ``Damaged`` and ``Newer``."""
    try:
        content = read_plain(path, FILE_MOST)
    except FileNotFoundError:
        return None
    except OSError as fault:
        raise Damaged(f"{path}: {fault.strerror}") from None
    try:
        version, payload = unpack(content)
        if version > schema.version:
            raise Newer(path, version)
        if version == schema.version:
            return msgspec.msgpack.decode(payload, type=kind)
        value = msgspec.msgpack.decode(payload)
        for step in schema.steps[version - 1 :]:
            value = step(value)
        return msgspec.convert(value, type=kind)
    except (Damaged, msgspec.DecodeError, RecursionError):
        raise Damaged(f"{path} is damaged") from None


def read_checked_or_last(path: Path, kind: type[T], schema: FileSchema = FIRST) -> T | None:
    """Like ``read_checked``, but a damaged or missing file is replaced by the one before it.

    None if neither was ever written; ``Damaged`` if what there is cannot be believed.
    """
    try:
        value = read_checked(path, kind, schema)
    except Damaged as damage:
        last = read_checked(last_of(path), kind, schema)
        if last is None:
            raise damage from None
        return last
    return value if value is not None else read_checked(last_of(path), kind, schema)


def set_newer_aside(newer: Newer, told: Aside) -> None:
    """Rename a file of a newer version, as it is, to ``<name>.v<N>``, where that version finds it again."""
    aside = newer.path.with_name(f"{newer.path.name}.v{newer.version}")
    newer.path.replace(aside)
    sync_folder(aside.parent)
    told(newer.path, newer.version, aside)


def older_or_none(read: Callable[[], T | None], told: Aside) -> T | None:
    """What ``read`` finds once every file of a newer version that is in its way is set aside."""
    while True:
        try:
            return read()
        except Newer as newer:
            set_newer_aside(newer, told)


def write_checked(path: Path, value: object, schema: FileSchema = FIRST) -> None:
    """Write ``value`` (structs, sequences, mappings, ints, str, bytes) atomically."""
    write_atomic(path, pack(msgspec.msgpack.encode(value), schema.version))
