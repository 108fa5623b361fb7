"""The roster: who may speak, as the sum of the endorsements and removals this node holds.

Per subject the version is (admission, removed), ordered (a, member) < (a, removed) < (a + 1, member): a removal
wins until a higher admission. ``join`` is a maximum, so the order of arrival does not matter. A roster is
immutable; ``hear`` returns the next one beside its verdict. Endorsements do not travel between nodes: only what
this node signed itself counts. The own node is no entry of its roster.
"""

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final

from msgspec import Struct

from router_core import limits
from router_core.errors import RemoteFault
from router_core.ids import Id16, Id32, MeshId, NodeName, id16_of, id32_of_key, mesh8_of
from router_core.record.crypto import Signer, Verifier
from router_core.record.envelope import Sealed
from router_core.record.membership import Member
from router_core.trust.certificate import CertFault, CertificateCheck
from router_core.trust.statements import (
    Endorsement,
    Removal,
    RemovalReason,
    Via,
    endorse,
    read_statement,
    remove,
    verify_statement,
)

ENDORSERS: Final = 4
"""Endorsements held of one admission: those of the lowest signers."""
ADMISSION_STEP: Final = 65_536
"""How far above the known admission a new one may lie, so that nobody exhausts the counter."""


class MergeVerdict(Enum):
    """What became of a statement. Only ``ACCEPTED`` changed the roster."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    STALE = "stale"
    FULL = "full"
    MALFORMED = "malformed"
    WRONG_MESH = "wrong_mesh"
    BAD_CERT = "bad_cert"
    CERT_MISMATCH = "cert_mismatch"
    ID16_TAKEN = "id16_taken"
    NOT_INTRODUCER = "not_introducer"
    UNKNOWN_SUBJECT = "unknown_subject"
    BAD_SIGNATURE = "bad_signature"


class RosterEntry(Struct, frozen=True, kw_only=True):
    """All that is held about one subject: at least one endorsement, all of one admission, and its removal."""

    endorsements: tuple[Endorsement, ...]
    removal: Removal | None = None

    @property
    def id32(self) -> Id32:
        return self.endorsements[0].id32

    @property
    def der(self) -> bytes:
        return self.endorsements[0].der

    @property
    def name(self) -> NodeName:
        return self.endorsements[0].name

    @property
    def admission(self) -> int:
        return self.endorsements[0].admission

    @property
    def removed(self) -> bool:
        return self.removal is not None

    @property
    def roles(self) -> int:
        """What every endorser grants."""
        roles = self.endorsements[0].roles
        for endorsement in self.endorsements[1:]:
            roles &= endorsement.roles
        return roles

    def member(self) -> Member:
        return Member(
            id32=self.id32, der=self.der, roles=self.roles, admission=self.admission, name=self.name
        )


def join(left: RosterEntry, right: RosterEntry) -> RosterEntry:
    """The least entry that says all that both say of one subject: commutative, associative, idempotent."""
    if left.admission != right.admission:
        return max(left, right, key=lambda entry: entry.admission)
    by_signer: dict[Id16, Endorsement] = {}
    for endorsement in (*left.endorsements, *right.endorsements):
        held = by_signer.get(endorsement.signer)
        if held is None or _bytes(endorsement) < _bytes(held):
            by_signer[endorsement.signer] = endorsement
    removals = [entry.removal for entry in (left, right) if entry.removal is not None]
    return RosterEntry(
        endorsements=tuple(by_signer[signer] for signer in sorted(by_signer)[:ENDORSERS]),
        removal=min(removals, key=_bytes) if removals else None,
    )


class Roster:
    """Who may speak, as node ``own_key32`` sees it in mesh ``mesh_id``. Never changes."""

    def __init__(
        self,
        own_key32: bytes,
        mesh_id: MeshId,
        entries: Mapping[Id16, RosterEntry] | None = None,
        limit: int = limits.ROSTER_DEFAULT,
    ) -> None:
        self.me = id32_of_key(own_key32)
        self.mesh_id = mesh_id
        self.limit = limit
        self.entries: Mapping[Id16, RosterEntry] = MappingProxyType(dict(sorted((entries or {}).items())))
        self._key32 = own_key32
        current = [entry.member() for entry in self.entries.values() if not entry.removed]
        self._members = MappingProxyType({member.id16: member for member in current})
        self.by_der: Mapping[bytes, Member] = MappingProxyType({member.der: member for member in current})
        """Certificate -> member: the look-up behind every accept and every request."""

    def members(self) -> Mapping[Id16, Member]:
        """Everybody who may speak, this node aside, in order of id."""
        return self._members

    def hear(
        self, sealed: Sealed, verifier: Verifier, check: CertificateCheck
    ) -> tuple[MergeVerdict, "Roster"]:
        """Judge one statement; the roster returned is this one unless the verdict is ``ACCEPTED``."""
        try:
            statement = read_statement(sealed, mesh8_of(self.mesh_id))
        except RemoteFault as fault:
            return (MergeVerdict.WRONG_MESH if fault.reason == "wrong_mesh" else MergeVerdict.MALFORMED), self
        if statement.signer != id16_of(self.me):
            return MergeVerdict.NOT_INTRODUCER, self
        entry = self.entries.get(statement.subject)
        if entry is not None and entry.id32 != statement.id32:
            return MergeVerdict.ID16_TAKEN, self
        if isinstance(statement, Endorsement):
            refused = self._judge_endorsement(statement, entry, check)
        else:
            refused = _judge_removal(statement, entry)
        if refused is not None:
            return refused, self
        if not verify_statement(statement, self._key32, verifier):
            return MergeVerdict.BAD_SIGNATURE, self
        return MergeVerdict.ACCEPTED, self._with(statement, entry)

    def next_admission(self, id32: Id32, claimed: int) -> int:
        """The admission at which this node may endorse ``id32``, whose own file claims ``claimed``: never one
        that a removal has ended."""
        entry = self.entries.get(id16_of(id32))
        if entry is None:
            return max(claimed, 1)
        return max(claimed, entry.admission + entry.removed)

    def moved(self, mesh_id: MeshId, signer: Signer) -> "Roster":
        """The same members in another mesh: every own statement is signed anew, removals stay removals."""
        by, mesh8 = id16_of(self.me), mesh8_of(mesh_id)
        entries: dict[Id16, RosterEntry] = {}
        for subject, entry in self.entries.items():
            endorsement = endorse(
                signer,
                mesh8=mesh8,
                by=by,
                id32=entry.id32,
                admission=entry.admission,
                der=entry.der,
                roles=entry.roles,
                via=Via(entry.endorsements[0].via),
                name=entry.name,
            )
            removal = entry.removal and remove(
                signer,
                mesh8=mesh8,
                by=by,
                id32=entry.id32,
                admission=entry.admission,
                reason=RemovalReason(entry.removal.reason),
            )
            entries[subject] = RosterEntry(endorsements=(endorsement,), removal=removal)
        return Roster(self._key32, mesh_id, entries, self.limit)

    def _judge_endorsement(
        self, statement: Endorsement, entry: RosterEntry | None, check: CertificateCheck
    ) -> MergeVerdict | None:
        """Why the endorsement is not accepted, its signature aside."""
        known = entry.admission if entry is not None else 0
        if entry is not None:
            if statement.admission < known or (statement.admission == known and entry.removed):
                return MergeVerdict.STALE
            if _joined(entry, statement) == entry:
                return MergeVerdict.DUPLICATE
        if statement.admission > known + ADMISSION_STEP:
            return MergeVerdict.MALFORMED
        found = check(statement.der)
        if isinstance(found, CertFault) or found != statement.id32:
            return MergeVerdict.BAD_CERT
        if entry is not None and entry.der != statement.der:
            return MergeVerdict.CERT_MISMATCH
        if statement.subject not in self._members and len(self._members) >= self.limit:
            return MergeVerdict.FULL
        return None

    def _with(self, statement: Endorsement | Removal, entry: RosterEntry | None) -> "Roster":
        if isinstance(statement, Endorsement):
            added = RosterEntry(endorsements=(statement,)) if entry is None else _joined(entry, statement)
        else:
            assert entry is not None
            added = join(entry, RosterEntry(endorsements=entry.endorsements, removal=statement))
        return Roster(self._key32, self.mesh_id, {**self.entries, statement.subject: added}, self.limit)


def _judge_removal(statement: Removal, entry: RosterEntry | None) -> MergeVerdict | None:
    """Why the removal is not accepted, its signature aside. It never adds a member."""
    if entry is None or statement.admission > entry.admission:
        return MergeVerdict.UNKNOWN_SUBJECT
    if statement.admission < entry.admission:
        return MergeVerdict.STALE
    if entry.removed:
        return MergeVerdict.DUPLICATE
    return None


def _joined(entry: RosterEntry, endorsement: Endorsement) -> RosterEntry:
    return join(entry, RosterEntry(endorsements=(endorsement,)))


def _bytes(statement: Endorsement | Removal) -> tuple[bytes, bytes]:
    return statement.sealed.signed, statement.sealed.sig
