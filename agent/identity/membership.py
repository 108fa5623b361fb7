"""The one owner of the roster at run time: loads it, changes it, stores it, and has every listener follow.

A change is stored before it counts, except that a removal counts even if the disk refuses; then it is stored as
soon as the disk allows. Removal goes in one order: stored, certificate forgotten, contexts rebuilt, subscribers
told, then every connection of the removed id aborted.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Final

from msgspec import Struct

from agent.effects.sqlite_file import cause_of
from agent.effects.tasks import Tasks
from agent.identity.admittance import Admittance
from agent.identity.certificate import check_cert
from agent.identity.keys import Ed25519Verifier
from agent.identity.member_file import MemberFile, parse_member_file, write_member_file
from agent.identity.own import OwnIdentity
from agent.identity.tls import TlsContexts
from agent.store.members import PeerFiles, RosterFile, RosterFiles
from router_core import limits
from router_core.errors import RemoteFault
from router_core.ids import (
    Id16,
    MeshId,
    NodeId,
    NodeName,
    id16_of,
    matches_prefix,
    mesh8_of,
    node_id_of,
    parse_marked_name,
    parse_node_id,
)
from router_core.record.membership import Member
from router_core.record.state import Address
from router_core.trust.mesh_choice import MeshChoice, MeshClaim, choose_mesh
from router_core.trust.roster import MergeVerdict, Roster, RosterEntry
from router_core.trust.statements import FULL_MEMBER, RemovalReason, Via, endorse, remove

FLUSH_S: Final = 0.2
RETRY_S: Final = 10.0

OnChange = Callable[[Mapping[Id16, Member], MeshId], None]
"""Told after every change: everybody who may speak (this node aside) and the mesh they speak in. Another mesh id
than before means: drop all links and foreign records, seal own ones anew."""

Open = Callable[[Member], int]
"""Tells how many connections to a member are open, beside those that listeners have admitted."""

OnAddresses = Callable[[NodeId, tuple[Address, ...]], None]
"""Told where a member's own file says it can be reached, before the member is told of."""


class AddCode(Enum):
    """What became of ``add``. The first two left the node a member."""

    ADDED = "added"
    ALREADY_MEMBER = "already_member"
    MALFORMED = "malformed"
    BAD_CERT = "bad_cert"
    UNSUPPORTED_VERSION = "unsupported_version"
    ID_DIFFERS = "id_differs"
    ID_NOT_WHOLE = "id_not_whole"
    SELF = "self"
    MESH_MISMATCH = "mesh_mismatch"
    FULL = "full"
    CERT_MISMATCH = "cert_mismatch"
    ID16_TAKEN = "id16_taken"
    ADMISSION_TOO_HIGH = "admission_too_high"
    NOT_STORED = "not_stored"


class Added(Struct, frozen=True, kw_only=True):
    """``adopted``: this node moved to the other's mesh."""

    code: AddCode
    node_id: NodeId | None = None
    adopted: bool = False


class RemoveCode(Enum):
    """What became of ``remove``."""

    REMOVED = "removed"
    REMOVED_NOT_STORED = "removed_not_stored"
    NOT_A_MEMBER = "not_a_member"
    AMBIGUOUS = "ambiguous"


class Removed(Struct, frozen=True, kw_only=True):
    """``aborted`` counts the connections that were open, all of which are cut."""

    code: RemoveCode
    node_id: NodeId | None = None
    aborted: int = 0


_ROSTER_CODES: Final = {
    MergeVerdict.FULL: AddCode.FULL,
    MergeVerdict.CERT_MISMATCH: AddCode.CERT_MISMATCH,
    MergeVerdict.ID16_TAKEN: AddCode.ID16_TAKEN,
    MergeVerdict.BAD_CERT: AddCode.BAD_CERT,
    MergeVerdict.MALFORMED: AddCode.ADMISSION_TOO_HIGH,
}


class Membership:
    """Who may speak to this node, and what follows when that changes."""

    def __init__(
        self,
        own: OwnIdentity,
        name: NodeName,
        *,
        roster_files: RosterFiles,
        peer_files: PeerFiles,
        contexts: TlsContexts,
        admittance: Admittance,
        tasks: Tasks,
        limit: int = limits.ROSTER_DEFAULT,
        flush_s: float = FLUSH_S,
        retry_s: float = RETRY_S,
    ) -> None:
        self.own = own
        self.name = name
        self.quarantined: tuple[NodeId, ...] = ()
        """Subjects whose stored files did not convince, after ``load``."""
        self._roster_files = roster_files
        self._peer_files = peer_files
        self._contexts = contexts
        self._admittance = admittance
        self._tasks = tasks
        self._verifier = Ed25519Verifier()
        self._roster = Roster(own.key.key32, MeshId(own.mesh.mesh_id), limit=limit)
        self._subscribers: list[OnChange] = []
        self._address_subscribers: list[OnAddresses] = []
        self._open: list[Open] = []
        self._changing = asyncio.Lock()
        self._unsaved: dict[NodeId, RosterFile] = {}
        self._unsaved_cause: str | None = None
        self._flush_s = flush_s
        self._retry_s = retry_s

    @property
    def fault(self) -> str | None:
        """Why a change is in force and not stored yet, for people; None if all is stored."""
        if self._unsaved_cause is None:
            return None
        return (
            f"{len(self._unsaved)} roster entries cannot be stored ({self._unsaved_cause}): they are in force, and tried "
            "again every 10 s"
        )

    @property
    def mesh_id(self) -> MeshId:
        return self._roster.mesh_id

    @property
    def members(self) -> Mapping[Id16, Member]:
        """Everybody who may speak, this node aside."""
        return self._roster.members()

    @property
    def by_der(self) -> Mapping[bytes, Member]:
        """Look the peer's certificate up here for every request: a live connection outlives a removal."""
        return self._roster.by_der

    def entries(self) -> Sequence[RosterEntry]:
        """Everybody ever added, removed ones included, in order of id."""
        return tuple(self._roster.entries.values())

    def subscribe(self, on_change: OnChange) -> None:
        self._subscribers.append(on_change)

    def subscribe_addresses(self, on_addresses: OnAddresses) -> None:
        self._address_subscribers.append(on_addresses)

    def count_also(self, open_to: Open) -> None:
        self._open.append(open_to)

    def find(self, ref: str) -> list[Member]:
        """The members that ``ref`` names: a node id, a prefix of at least 8 characters, ``@name`` or ``@name~xxxx``."""
        if ref.startswith("@"):
            name, mark = parse_marked_name(ref[1:]) or (None, "")
            return [m for m in self.members.values() if m.name == name and m.node_id.startswith(mark)]
        return [member for member in self.members.values() if matches_prefix(member.node_id, ref)]

    async def load(self) -> None:
        """Read the stored roster, verify every signature again, and install the contexts. Call once, at start."""
        async with self._changing:
            roster, resigned, self.quarantined = await asyncio.to_thread(self._read_stored)
            self._roster = roster
            for subject in resigned:
                await self._store_or_retry(roster.entries[subject])
            await self._install()

    def export(self, addresses: Sequence[Address]) -> bytes:
        """This node's member file, for ``add`` on another."""
        return write_member_file(
            MemberFile(
                id32=self.own.id32,
                der=self.own.der,
                name=self.name,
                admission=self.own.mesh.admission,
                claim=self._claim,
                addresses=tuple(addresses),
            )
        )

    async def add(self, content: bytes, expected: str, roles: int = FULL_MEMBER) -> Added:
        """Admit the node whose member file is ``content``, if it is the one ``expected`` (its whole node id).

        May move this node to the other's mesh. Nobody is admitted whose entry could not be stored.
        """
        try:
            member = parse_member_file(content)
        except RemoteFault as fault:
            return Added(code=AddCode(fault.reason))
        if parse_node_id(expected) is None:
            return Added(code=AddCode.ID_NOT_WHOLE, node_id=member.node_id)
        if expected != member.node_id:
            return Added(code=AddCode.ID_DIFFERS, node_id=member.node_id)
        if member.id32 == self.own.id32:
            return Added(code=AddCode.SELF, node_id=member.node_id)
        async with self._changing:
            return await self._add(member, roles)

    async def remove(self, ref: str) -> Removed:
        """Remove the one member that ``ref`` names, on this node, and cut its connections."""
        async with self._changing:
            found = self.find(ref)
            if len(found) != 1 or ref == f"@{self.name}":
                return Removed(code=RemoveCode.AMBIGUOUS if found else RemoveCode.NOT_A_MEMBER)
            member = found[0]
            removal = remove(
                self.own.key,
                mesh8=mesh8_of(self.mesh_id),
                by=self.own.id16,
                id32=member.id32,
                admission=member.admission,
                reason=RemovalReason.REMOVED,
            )
            verdict, roster = self._roster.hear(removal.sealed, self._verifier, check_cert)
            assert verdict is MergeVerdict.ACCEPTED, verdict
            stored = await self._store_or_retry(roster.entries[member.id16])
            self._roster = roster
            cut = self._admittance.count(member.id16) + sum(open_to(member) for open_to in self._open)
            with contextlib.suppress(OSError):
                await asyncio.to_thread(self._peer_files.forget, member.node_id)
            await self._install()
            self._tell()
        if self._admittance.count(member.id16):
            await asyncio.sleep(self._flush_s)
        self._admittance.abort(member.id16)
        code = RemoveCode.REMOVED if stored else RemoveCode.REMOVED_NOT_STORED
        return Removed(code=code, node_id=member.node_id, aborted=cut)

    @property
    def _claim(self) -> MeshClaim:
        return self.own.mesh.claim

    async def _add(self, member: MemberFile, roles: int) -> Added:
        choice = choose_mesh(self._claim, member.claim)
        if choice is MeshChoice.MISMATCH:
            return Added(code=AddCode.MESH_MISMATCH, node_id=member.node_id)
        adopts = choice is MeshChoice.ADOPT
        home = self._roster.moved(member.claim.mesh_id, self.own.key) if adopts else self._roster
        verdict, roster = self._endorsed(home, member, roles)
        if verdict not in (MergeVerdict.ACCEPTED, MergeVerdict.DUPLICATE):
            return Added(code=_ROSTER_CODES[verdict], node_id=member.node_id)
        code = AddCode.ADDED if verdict is MergeVerdict.ACCEPTED else AddCode.ALREADY_MEMBER
        try:
            if adopts:
                await asyncio.to_thread(self.own.save_mesh, self.own.mesh.moved(member.claim))
                self._roster = home
            await asyncio.to_thread(self._store_member, member, roster.entries[id16_of(member.id32)])
            self._roster = roster
        except OSError:
            code, adopts = AddCode.NOT_STORED, adopts and self._roster is home
        else:
            for on_addresses in self._address_subscribers:
                on_addresses(member.node_id, member.addresses)
        if adopts:
            # What a crash leaves in the former mesh is signed anew at the next start.
            for entry in self.entries():
                await self._store_or_retry(entry)
        if adopts or code is AddCode.ADDED:
            await self._install()
            self._tell()
        return Added(code=code, node_id=member.node_id, adopted=adopts)

    def _endorsed(self, roster: Roster, member: MemberFile, roles: int) -> tuple[MergeVerdict, Roster]:
        """``roster`` with ``member`` in it; ``DUPLICATE`` if it is in there just so."""
        entry = roster.entries.get(id16_of(member.id32))
        admission = roster.next_admission(member.id32, member.admission)
        if entry is not None and entry.id32 == member.id32 and admission == entry.admission:
            if (entry.roles, entry.name) == (roles, member.name):
                return MergeVerdict.DUPLICATE, roster
            admission += 1
        endorsement = endorse(
            self.own.key,
            mesh8=mesh8_of(roster.mesh_id),
            by=self.own.id16,
            id32=member.id32,
            admission=admission,
            der=member.der,
            roles=roles,
            via=Via.FILE,
            name=member.name,
        )
        return roster.hear(endorsement.sealed, self._verifier, check_cert)

    def _store_member(self, member: MemberFile, entry: RosterEntry) -> None:
        self._roster_files.save(member.node_id, _file_of(entry))
        if member.addresses:
            self._peer_files.save(member.node_id, member.addresses)

    async def _store_or_retry(self, entry: RosterEntry) -> bool:
        """Store one entry, now or later; False if later."""
        node_id = node_id_of(entry.id32)
        try:
            await asyncio.to_thread(self._roster_files.save, node_id, _file_of(entry))
        except OSError as fault:
            self._unsaved_cause = cause_of(fault)
            if not self._unsaved:
                self._tasks.spawn(self._retry(), "store roster")
            self._unsaved[node_id] = _file_of(entry)
            return False
        self._unsaved.pop(node_id, None)
        return True

    async def _retry(self) -> None:
        while self._unsaved:
            await asyncio.sleep(self._retry_s)
            async with self._changing:
                for node_id, file in list(self._unsaved.items()):
                    try:
                        await asyncio.to_thread(self._roster_files.save, node_id, file)
                    except OSError as fault:
                        self._unsaved_cause = cause_of(fault)
                        break
                    del self._unsaved[node_id]
        self._unsaved_cause = None

    async def _install(self) -> None:
        await self._contexts.rebuild([member.der for member in self.members.values()])

    def _tell(self) -> None:
        for on_change in self._subscribers:
            on_change(self.members, self.mesh_id)

    def _read_stored(self) -> tuple[Roster, list[Id16], tuple[NodeId, ...]]:
        """Runs in a thread: the roster on disk, subjects to store again, and whose files were set aside."""
        files, quarantined = self._roster_files.load()
        entries: dict[Id16, RosterEntry] = {}
        resigned: list[Id16] = []
        for mesh_id in (self.mesh_id, *map(MeshId, self.own.mesh.former)):
            part = Roster(self.own.key.key32, mesh_id, limit=limits.ROSTER_MAX)
            for node_id, file in list(files.items()):
                heard = self._heard(part, node_id, file)
                if heard is not None:
                    part = heard
                    del files[node_id]
            if mesh_id != self.mesh_id:
                part = part.moved(self.mesh_id, self.own.key)
                resigned += part.entries
            entries.update(part.entries)
        for node_id in files:
            self._roster_files.quarantine(node_id)
            quarantined.append(node_id)
        roster = Roster(self.own.key.key32, self.mesh_id, entries, self._roster.limit)
        return roster, resigned, tuple(quarantined)

    def _heard(self, roster: Roster, node_id: NodeId, file: RosterFile) -> Roster | None:
        """``roster`` with what ``file`` says of ``node_id``, or None if any of it does not convince."""
        statements = (*file.endorsements, *([file.removal] if file.removal is not None else []))
        for sealed in statements:
            verdict, roster = roster.hear(sealed, self._verifier, check_cert)
            if verdict is not MergeVerdict.ACCEPTED:
                return None
        said = [entry for entry in roster.entries.values() if node_id_of(entry.id32) == node_id]
        return roster if said and said[0].removed == file.removed else None


def _file_of(entry: RosterEntry) -> RosterFile:
    return RosterFile(
        admission=entry.admission,
        removed=entry.removed,
        endorsements=tuple(endorsement.sealed for endorsement in entry.endorsements),
        removal=entry.removal.sealed if entry.removal is not None else None,
        der=entry.der,
        roles=entry.roles,
        name=entry.name,
    )
