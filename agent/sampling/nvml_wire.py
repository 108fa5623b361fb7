"""Lines between the daemon and the process that talks to the driver: one JSON object a line, at most 256 KiB.

Replies are untrusted: a wrong id, a long line, bad JSON or a wrong type is a fault of the other side. A value out of
its range is no value, with the code ``IMPLAUSIBLE``. Nothing here knows what a code means.
"""

from typing import Final

import msgspec
from msgspec import Struct

from router_core.errors import RemoteFault

LINE_MOST: Final = 256 * 1024
IMPLAUSIBLE, SYMBOL_MISSING, BINDING_MISSING = 1_000, 1_001, 1_002
"""Codes of our own, beside those of NVML."""
MEMORY_MOST: Final = 2**44
TEXT_MOST: Final = 256
SENTINELS: Final = frozenset(
    {2**32 - 1, *(2**63 - 1 - n for n in range(17)), *(2**64 - 1 - n for n in range(17))}
)
"""What the library says for "not available"."""


class NvmlRefusal(Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A field that could not be read, and the code of the reason."""

    e: int


Field = int | str | NvmlRefusal | None
Fields = dict[str, Field]


class NvmlReply(Struct, frozen=True, kw_only=True):
    """One reply. ``t`` is boot ms at its end, ``dt_us`` how long it took; ``gpu`` has the fields of each GPU by UUID;
    ``unreadable`` counts GPUs that did not tell theirs."""

    id: int
    ok: bool
    t: int = 0
    dt_us: int = 0
    e: int = 0
    where: str = ""
    v: int = 0
    lib: str | None = None
    init_ms: int = 0
    rss_kib: int = 0
    symbols: dict[str, bool] = {}
    versions: Fields = {}
    gpu: dict[str, Fields] = {}
    unreadable: int = 0
    unreadable_e: int | None = None


_DECODER: Final = msgspec.json.Decoder(NvmlReply)


def encode_request(number: int, op: str, **arguments: object) -> bytes:
    """One request to the NVML child as a line of JSON."""
    return msgspec.json.encode({"id": number, "op": op, **arguments}) + b"\n"


def decode_reply(line: bytes, number: int) -> NvmlReply:
    """The reply to request ``number``. Raises ``RemoteFault``."""
    try:
        reply = _DECODER.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
        raise RemoteFault(f"not a reply: {type(fault).__name__}") from None
    if reply.id != number:
        raise RemoteFault(f"reply {reply.id} where {number} was asked")
    return reply


def number_of(fields: Fields, name: str, least: int, most: int) -> int | NvmlRefusal:
    """A whole number in ``least..most``; a sentinel, a missing or an odd value is implausible."""
    value = fields.get(name)
    if isinstance(value, NvmlRefusal):
        return value
    if not isinstance(value, int) or value in SENTINELS or not least <= value <= most:
        return NvmlRefusal(IMPLAUSIBLE)
    return value


def text_of(fields: Fields, name: str) -> str | None:
    """A printable text of at most 256 characters, or None."""
    value = fields.get(name)
    return value if isinstance(value, str) and len(value) <= TEXT_MOST and value.isprintable() else None
