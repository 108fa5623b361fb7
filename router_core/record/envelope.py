"""The sealed envelope of a state record: header and body in one signed blob, beside its signature.

``signed = [v, kind, mesh8, id16, epoch, inst, seq, mono_ms, due_ms, sref?, body]`` and
``sig = Ed25519(origin key, "pairmesh/record/v1\\0" + signed)``. A header is judged without touching the body.
What was received is verified, stored and relayed as the bytes that came; nothing here re-encodes a record.
"""

from hashlib import sha256
from typing import Annotated, Final

from msgspec import Meta, Struct

from router_core import limits
from router_core.errors import LocalMisuse, RemoteFault
from router_core.record import codec
from router_core.record.crypto import RECORD_DOMAIN, Signer, Verifier
from router_core.record.state import U8, U32, U63, Bytes8, Bytes16, Kind

VERSION: Final = 1
DUE_MIN_MS: Final = 2_000
DUE_MAX_MS: Final = 60_000
CAPS: Final = {Kind.V: limits.V_SIGNED, Kind.S: limits.S_SIGNED, Kind.L: limits.L_SIGNED}
"""Most bytes of ``signed`` by kind. Endorsements and removals are no state records."""

HEADER_MOST: Final = 89
"""Bytes of ``signed`` beside the body, every number at its longest."""

Bytes64 = Annotated[bytes, Meta(min_length=64, max_length=64)]


class Sref(Struct, frozen=True, gc=False, array_like=True):
    """Which S a V's positions refer to: its seq, and the first 8 bytes of SHA-256 of its ``signed``."""

    seq: U63
    digest8: Bytes8


class Header(Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """Everything of ``signed``; ``body`` stays packed. ``due_ms`` promises the next V (0 in S and L)."""

    v: U8 = VERSION
    kind: U8
    mesh8: Bytes8
    id16: Bytes16
    epoch: U63
    inst: U32
    seq: U63
    mono_ms: U63
    due_ms: U32 = 0
    sref: Sref | None = None
    body: bytes


class Sealed(Struct, frozen=True, gc=False, array_like=True):
    """A record as it travels and as it is stored: ``[signed, sig]``."""

    signed: bytes
    sig: Bytes64


def seal(header: Header, signer: Signer) -> Sealed:
    """Encode and sign an own record; raises ``LocalMisuse`` above its cap."""
    signed = codec.encode(header)
    cap = CAPS[Kind(header.kind)]
    if len(signed) > cap:
        raise LocalMisuse(f"a record of kind {header.kind} has {len(signed)} bytes, limit {cap}")
    return Sealed(signed, signer.sign(RECORD_DOMAIN + signed))


def read_header(signed: bytes, mesh8: bytes) -> Header:
    """The header of a V, S or L in mesh ``mesh8``, judged without touching the body.

    Raises ``RemoteFault`` with reason ``over_cap``, ``bad_header``, ``unsupported_version``, ``unknown_kind`` or
    ``wrong_mesh``. The version is judged first, so a record of a later layout reads as ``unsupported_version``.
    """
    if len(signed) > limits.RECORD_HEADER:
        raise RemoteFault("over_cap", f"{len(signed)} bytes, limit {limits.RECORD_HEADER}")
    elements = codec.unpack(signed, codec.RECORD_HEADER, "bad_header")
    if not isinstance(elements, list) or len(elements) < 2 or not all(type(e) is int for e in elements[:2]):
        raise RemoteFault("bad_header", "no version and kind")
    version, kind = elements[:2]
    if version != VERSION:
        raise RemoteFault("unsupported_version", str(version))
    if kind not in CAPS:
        raise RemoteFault("unknown_kind", str(kind))
    if len(signed) > CAPS[kind]:
        raise RemoteFault("over_cap", f"{len(signed)} bytes of kind {kind}, limit {CAPS[kind]}")
    header = codec.convert(elements, Header, "bad_header")
    if header.mesh8 != mesh8:
        raise RemoteFault("wrong_mesh", header.mesh8.hex())
    if not header.seq or not header.epoch:
        raise RemoteFault("bad_header", "epoch and seq count from 1")
    if kind == Kind.V:
        if not DUE_MIN_MS <= header.due_ms <= DUE_MAX_MS:
            raise RemoteFault("bad_header", f"due_ms {header.due_ms}")
    elif header.due_ms or header.sref is not None:
        raise RemoteFault("bad_header", f"due_ms or sref in kind {kind}")
    return header


def verify(sealed: Sealed, key32: bytes, verifier: Verifier) -> bool:
    """True if the origin's key signed exactly these bytes as a state record."""
    return verifier.verify(key32, sealed.sig, RECORD_DOMAIN + sealed.signed)


def sref_of(seq: int, signed: bytes) -> Sref:
    """The reference a V carries to the S sealed as ``signed``."""
    return Sref(seq, sha256(signed).digest()[:8])
