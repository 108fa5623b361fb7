"""Bounded decode and canonical encode of everything that crosses the mesh.

A blob is unpacked once under hard limits (``Bounds``), nothing may trail, then converted strictly into one
array-like struct. Whatever goes wrong, nesting and recursion included, is one ``RemoteFault``. Readers ignore
extra trailing elements of a struct; an enum value they do not know reads as unknown. Encoding uses the
shortest form of every integer, string and array, so equal values have equal bytes.

It knows the bodies, but neither stamps nor signatures, and it never re-encodes what it decoded.
"""

from typing import Final, NoReturn, TypeVar

import msgpack
import msgspec
from msgspec import Struct

from router_core import limits
from router_core.errors import RemoteFault
from router_core.record.state import Leave, Static, Volatile
from router_core.record.text import is_model_name
from router_core.record.unknown import read_static, read_volatile

T = TypeVar("T")


class Bounds(Struct, frozen=True, kw_only=True):
    """Ceilings of one kind of blob: its bytes, elements per array, bytes per string, bytes per bin."""

    size: int
    array: int
    text: int
    binary: int


LINK_MESSAGE: Final = Bounds(
    size=limits.LINK_MESSAGE - 1, array=limits.HAVE_PER_CHUNK, text=128, binary=limits.RECORD_HEADER
)
"""No list of a message is longer than a HAVE's. The unpacker reserves what a list promises at every depth it
allows, so this bounds its memory to about 2 MB whatever comes."""
RECORD_HEADER: Final = Bounds(size=limits.RECORD_HEADER, array=16, text=0, binary=limits.RECORD_HEADER_BIN)
V_BODY: Final = Bounds(size=limits.V_SIGNED, array=64, text=0, binary=16)
S_BODY: Final = Bounds(size=limits.S_SIGNED, array=64, text=128, binary=32)
L_BODY: Final = Bounds(size=64, array=64, text=0, binary=16)
STATEMENT: Final = Bounds(size=limits.E_SIGNED, array=16, text=0, binary=1_536)
TRUST_BODY: Final = Bounds(size=1_536, array=16, text=64, binary=1_024)

_ENCODER = msgspec.msgpack.Encoder()


def encode(value: object) -> bytes:
    """``value`` (structs, sequences, ints, str, bytes, None) as canonical msgpack.

    Byte for byte what ``msgpack.packb`` makes of the same elements.
    """
    return _ENCODER.encode(value)


def decode(data: bytes, kind: type[T], bounds: Bounds, reason: str) -> T:
    """``data`` as a ``kind``, within ``bounds``; raises ``RemoteFault(reason)`` for anything else."""
    return convert(unpack(data, bounds, reason), kind, reason)


def unpack(data: bytes, bounds: Bounds, reason: str) -> object:
    """The untyped elements of ``data``; raises ``RemoteFault(reason)``.

    Every call builds a decoder of its own, so a fault leaves nothing behind for the next blob.
    """
    if len(data) > bounds.size:
        raise RemoteFault(reason, f"{len(data)} bytes, limit {bounds.size}")
    try:
        unpacked: object = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_map_len=0,
            max_ext_len=0,
            max_array_len=bounds.array,
            max_str_len=bounds.text,
            max_bin_len=bounds.binary,
            object_pairs_hook=_refuse,
            ext_hook=_refuse,
        )
    except (ValueError, RecursionError, MemoryError, OverflowError, msgpack.UnpackException) as fault:
        raise RemoteFault(reason, f"unpack: {type(fault).__name__}") from None
    return unpacked


def _refuse(*_: object) -> NoReturn:
    """Even an empty map or ext: the length limits let those pass."""
    raise ValueError("maps and ext types are not used")


def convert(unpacked: object, kind: type[T], reason: str) -> T:
    """Untyped elements as a ``kind``, strictly; raises ``RemoteFault(reason)``."""
    try:
        # bytes is named a builtin so that a str never passes for base64 of a bin.
        return msgspec.convert(unpacked, kind, strict=True, builtin_types=(bytes,))
    except (msgspec.ValidationError, RecursionError) as fault:
        raise RemoteFault(reason, f"convert: {type(fault).__name__}") from None


def encode_volatile(body: Volatile) -> bytes:
    """A V body; call ``fit_volatile`` first, nothing is checked here."""
    return _ENCODER.encode(body)


def encode_static(body: Static) -> bytes:
    """An S body; call ``fit_static`` first, nothing is checked here."""
    return _ENCODER.encode(body)


def encode_leave(body: Leave) -> bytes:
    """The body of an L record as bytes."""
    return _ENCODER.encode(body)


def decode_volatile(data: bytes) -> Volatile:
    """A V body; raises ``RemoteFault("bad_body")``. Unknown enum values read as unknown."""
    return read_volatile(decode(data, Volatile, V_BODY, "bad_body"))


def decode_static(data: bytes) -> Static:
    """An S body; raises ``RemoteFault("bad_body")``, also for a malformed address, engine or model name.

    Of other texts what is not printable ASCII reads as ``?``: older origins sent them as they were.
    """
    body = decode(data, Static, S_BODY, "bad_body")
    for address in body.addrs:
        if len(address.ip) not in (4, 16):
            raise RemoteFault("bad_body", f"an address of {len(address.ip)} bytes")
    for model in body.models:
        if not is_model_name(model.name) or not all(map(is_model_name, model.aliases)):
            raise RemoteFault("bad_body", "malformed model name")
    return read_static(body)


def decode_leave(data: bytes) -> Leave:
    """An L body; raises ``RemoteFault("bad_body")``. Its reason is for display: unknown codes stay as sent."""
    return decode(data, Leave, L_BODY, "bad_body")
