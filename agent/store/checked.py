"""Checked files: ``PMF1`` + u32 big-endian length + msgpack payload + sha256(payload)[:16].

A file cut or altered anywhere is seen; what then happens (the last one, quarantine, refusal) is the caller's.
"""

from hashlib import sha256
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from agent.store.atomic import last_of, read_plain, write_atomic

MAGIC: Final = b"PMF1"
FILE_MOST: Final = 1024 * 1024
_HEAD = len(MAGIC) + 4
_CHECK = 16

T = TypeVar("T")


class Damaged(Exception):
    """A checked file exists and cannot be believed."""


def pack(payload: bytes) -> bytes:
    """The bytes of a checked file around ``payload``."""
    return MAGIC + len(payload).to_bytes(4, "big") + payload + sha256(payload).digest()[:_CHECK]


def unpack(content: bytes) -> bytes:
    """The payload of a checked file; raises ``Damaged``."""
    length = int.from_bytes(content[len(MAGIC) : _HEAD], "big")
    payload = content[_HEAD : _HEAD + length]
    if not content.startswith(MAGIC) or content != pack(payload):
        raise Damaged(f"{len(content)} bytes do not check")
    return payload


def read_checked(path: Path, kind: type[T]) -> T | None:
    """The value in ``path``, None if there is no such file; raises ``Damaged``."""
    try:
        content = read_plain(path, FILE_MOST)
    except FileNotFoundError:
        return None
    except OSError as fault:
        raise Damaged(f"{path}: {fault.strerror}") from None
    try:
        return msgspec.msgpack.decode(unpack(content), type=kind)
    except (Damaged, msgspec.DecodeError, RecursionError):
        raise Damaged(f"{path} is damaged") from None


def read_checked_or_last(path: Path, kind: type[T]) -> T | None:
    """Like ``read_checked``, but a damaged or missing file is replaced by the one before it.

    None if neither was ever written; ``Damaged`` if what there is cannot be believed.
    """
    try:
        value = read_checked(path, kind)
    except Damaged as damage:
        last = read_checked(last_of(path), kind)
        if last is None:
            raise damage from None
        return last
    return value if value is not None else read_checked(last_of(path), kind)


def write_checked(path: Path, value: object) -> None:
    """Write ``value`` (structs, sequences, mappings, ints, str, bytes) atomically."""
    write_atomic(path, pack(msgspec.msgpack.encode(value)))
