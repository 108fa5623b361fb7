"""Endorsements (E) and removals (X): what one node says about who may speak.

``signed = [1, kind, mesh8, signer16, subject16, admission, body]``, signed in a domain of its own. They are
statements, not versions: epoch and seq play no part, and the bytes that came are the bytes that are kept.
"""

from enum import IntEnum
from typing import Annotated, Final

from msgspec import Meta, Struct

from router_core import limits
from router_core.errors import LocalMisuse, RemoteFault
from router_core.ids import Id16, Id32, NodeName, id16_of, parse_node_name
from router_core.record import codec
from router_core.record.crypto import ENDORSE_DOMAIN, REMOVE_DOMAIN, Signer, Verifier
from router_core.record.envelope import Sealed
from router_core.record.state import U8, U16, U32, Bytes8, Bytes16, Kind, Role

VERSION: Final = 1
FULL_MEMBER: Final = Role.NODE | Role.ROUTER | Role.INTRODUCER
"""The roles that pairing and file import give unless told otherwise."""

CAPS: Final = {Kind.E: limits.E_SIGNED, Kind.X: limits.X_SIGNED}

Bytes32 = Annotated[bytes, Meta(min_length=32, max_length=32)]


class Via(IntEnum):
    """How an endorser came to know the subject."""

    PAIRING = 1
    FILE = 2
    REENDORSED = 3


class RemovalReason(IntEnum):
    """Why a member was removed."""

    REMOVED = 1
    LEFT = 2


class Endorsement(Struct, frozen=True, gc=False, kw_only=True):
    """An E, read. ``sealed`` is what it was read from."""

    signer: Id16
    id32: Id32
    admission: int
    der: bytes
    roles: int
    via: int
    name: NodeName
    sealed: Sealed

    @property
    def subject(self) -> Id16:
        return id16_of(self.id32)


class Removal(Struct, frozen=True, gc=False, kw_only=True):
    """An X, read. It names exactly one admission."""

    signer: Id16
    id32: Id32
    admission: int
    reason: int
    sealed: Sealed

    @property
    def subject(self) -> Id16:
        return id16_of(self.id32)


class _Frame(Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    v: U8 = VERSION
    kind: U8
    mesh8: Bytes8
    signer16: Bytes16
    subject16: Bytes16
    admission: U32
    body: bytes


class _EndorseBody(Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    id32: Bytes32
    der: Annotated[bytes, Meta(max_length=limits.CERTIFICATE)]
    roles: U16
    via: U8
    name: str


class _RemoveBody(Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    id32: Bytes32
    reason: U8


def endorse(
    signer: Signer,
    *,
    mesh8: bytes,
    by: Id16,
    id32: Id32,
    admission: int,
    der: bytes,
    roles: int,
    via: Via,
    name: NodeName,
) -> Endorsement:
    """Sign an E about ``id32``; raises ``LocalMisuse`` for a subject that is the signer or over the cap."""
    if id16_of(id32) == by:
        raise LocalMisuse("a node does not endorse itself")
    body = codec.encode(_EndorseBody(id32=id32, der=der, roles=roles, via=via, name=name))
    sealed = _seal(Kind.E, signer, mesh8, by, id32, admission, body)
    return Endorsement(
        signer=by, id32=id32, admission=admission, der=der, roles=roles, via=via, name=name, sealed=sealed
    )


def remove(
    signer: Signer, *, mesh8: bytes, by: Id16, id32: Id32, admission: int, reason: RemovalReason
) -> Removal:
    """Sign an X about ``id32`` at exactly ``admission``."""
    body = codec.encode(_RemoveBody(id32=id32, reason=reason))
    sealed = _seal(Kind.X, signer, mesh8, by, id32, admission, body)
    return Removal(signer=by, id32=id32, admission=admission, reason=reason, sealed=sealed)


def read_statement(sealed: Sealed, mesh8: bytes) -> Endorsement | Removal:
    """The E or X in ``sealed``, unverified; raises ``RemoteFault`` ``malformed`` or ``wrong_mesh``."""
    frame = codec.decode(sealed.signed, _Frame, codec.STATEMENT, "malformed")
    if frame.v != VERSION or frame.kind not in CAPS or len(sealed.signed) > CAPS[Kind(frame.kind)]:
        raise RemoteFault("malformed", f"version {frame.v} kind {frame.kind}")
    if frame.mesh8 != mesh8:
        raise RemoteFault("wrong_mesh", frame.mesh8.hex())
    if not frame.admission:
        raise RemoteFault("malformed", "admissions count from 1")
    if frame.kind == Kind.E:
        return _endorsement(frame, sealed)
    return _removal(frame, sealed)


def verify_statement(statement: Endorsement | Removal, key32: bytes, verifier: Verifier) -> bool:
    """True if the signer's key signed exactly these bytes in the domain of their kind."""
    domain = ENDORSE_DOMAIN if isinstance(statement, Endorsement) else REMOVE_DOMAIN
    return verifier.verify(key32, statement.sealed.sig, domain + statement.sealed.signed)


def _seal(
    kind: Kind, signer: Signer, mesh8: bytes, by: Id16, id32: Id32, admission: int, body: bytes
) -> Sealed:
    frame = _Frame(
        kind=kind, mesh8=mesh8, signer16=by, subject16=id16_of(id32), admission=admission, body=body
    )
    signed = codec.encode(frame)
    if len(signed) > CAPS[kind]:
        raise LocalMisuse(f"a statement of kind {kind} has {len(signed)} bytes, limit {CAPS[kind]}")
    domain = ENDORSE_DOMAIN if kind == Kind.E else REMOVE_DOMAIN
    return Sealed(signed, signer.sign(domain + signed))


def _endorsement(frame: _Frame, sealed: Sealed) -> Endorsement:
    body = codec.decode(frame.body, _EndorseBody, codec.TRUST_BODY, "malformed")
    name = parse_node_name(body.name)
    if name is None or body.via not in set(Via) or frame.signer16 == frame.subject16:
        raise RemoteFault("malformed", "name, via or subject of an endorsement")
    if body.id32[:16] != frame.subject16:
        raise RemoteFault("malformed", "subject differs from its id")
    return Endorsement(
        signer=Id16(frame.signer16),
        id32=Id32(body.id32),
        admission=frame.admission,
        der=body.der,
        roles=body.roles,
        via=body.via,
        name=name,
        sealed=sealed,
    )


def _removal(frame: _Frame, sealed: Sealed) -> Removal:
    body = codec.decode(frame.body, _RemoveBody, codec.TRUST_BODY, "malformed")
    if body.id32[:16] != frame.subject16:
        raise RemoteFault("malformed", "subject differs from its id")
    return Removal(
        signer=Id16(frame.signer16),
        id32=Id32(body.id32),
        admission=frame.admission,
        reason=body.reason,
        sealed=sealed,
    )
