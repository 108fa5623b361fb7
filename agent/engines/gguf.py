"""What a weight file says of its model's descent, in the first pages of a GGUF file.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Only the file's beginning is read, where writers put
what is general; tokenizers and tensors are never reached. Whatever is not as it must be tells nothing.
"""

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from msgspec import Struct

from agent.engines.quants import file_type
from agent.settings.reading import regular

HEAD: Final = 64 * 1024
_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_FACTS_MOST: Final = 512
_TEXT_MOST: Final = 128
_TEXT, _LIST, _U32 = 8, 9, 4
_SIZES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_FAMILY: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}")
_GENERAL: Final = "general."


class Descent(Struct, frozen=True, gc=False, kw_only=True):
    """Where a model comes from. ``base`` names the weights whatever their quantisation; None is unknown."""

    base: str | None = None
    family: str | None = None
    quant: str | None = None


UNKNOWN: Final = Descent()


def base_of(basename: str | None, finetune: str | None, size: str | None, version: str | None) -> str | None:
    """The name of the weights, if at least basename and size are given."""
    if basename is None or size is None:
        return None
    return "-".join(part for part in (basename, finetune, size, version) if part).casefold()


def descent_of(path: Path) -> Descent:
    """The descent that the GGUF file at ``path`` states. Blocks on the disk."""
    try:
        head = regular(path, HEAD)
    except OSError:
        return UNKNOWN
    facts = dict(_facts(head))
    texts = {key: value for key, value in facts.items() if isinstance(value, str)}
    family, told = texts.get("architecture", ""), facts.get("file_type")
    return Descent(
        base=base_of(
            texts.get("basename"), texts.get("finetune"), texts.get("size_label"), texts.get("version")
        ),
        family=family if _FAMILY.fullmatch(family) else None,
        quant=file_type(told) if isinstance(told, int) else None,
    )


def _facts(head: bytes) -> Iterator[tuple[str, str | int]]:
    """The general facts, without their prefix, up to the first thing that is cut off or not understood."""
    try:
        magic, version, _, count = struct.unpack_from("<4sIQQ", head)
        if magic != _MAGIC or version not in _VERSIONS:
            return
        at = 24
        for _ in range(min(count, _FACTS_MOST)):
            key, at = _text(head, at)
            (kind,) = struct.unpack_from("<I", head, at)
            at += 4
            if kind == _TEXT:
                value, at = _text(head, at)
                if key.startswith(_GENERAL) and 0 < len(value) <= _TEXT_MOST:
                    yield key.removeprefix(_GENERAL), value
            elif kind == _LIST:
                at = _skipped(head, at)
            else:
                if kind == _U32 and key.startswith(_GENERAL):
                    yield key.removeprefix(_GENERAL), struct.unpack_from("<I", head, at)[0]
                at += _SIZES[kind]
    except (struct.error, KeyError, UnicodeDecodeError):
        return


def _text(head: bytes, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", head, at)
    end = at + 8 + length
    if end > len(head):
        raise struct.error
    return head[at + 8 : end].decode(), end


def _skipped(head: bytes, at: int) -> int:
    """Where a list ends."""
    kind, count = struct.unpack_from("<IQ", head, at)
    at += 12
    if kind != _TEXT:
        return at + int(count) * _SIZES[kind]
    for _ in range(count):
        at = _text(head, at)[1]
    return at
