"""The verbs about members: ``trust-list``, ``trust-export``, ``trust-add``, ``trust-remove``.

Arguments are typed and bounded before anything acts; every change leaves an audit line. The rules of
membership are the membership's; this only says in words why it refused.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Protocol

from msgspec import Meta, Struct

from agent.admin.arguments import Audit, typed
from agent.admin.documents import RosterDoc, names_of
from agent.admin.ports import VerbRefused, Verbs
from agent.identity.member_file import MOST
from agent.identity.membership import AddCode, Added, RemoveCode, Removed
from router_core.ids import MeshId, NodeId, NodeName, node_id_of, short_id
from router_core.record.state import Address, Role
from router_core.trust.roster import RosterEntry
from router_core.trust.statements import FULL_MEMBER

_ADD_REFUSALS: Final = {
    AddCode.MALFORMED: "this is not a member file: make one with 'pairmesh trust export'",
    AddCode.BAD_CERT: "the file's certificate is not one a node makes of its own key",
    AddCode.UNSUPPORTED_VERSION: "the file was written by a newer version",
    AddCode.ID_DIFFERS: "the file is not of the node named by --id: do not trust it before you know why",
    AddCode.ID_NOT_WHOLE: "--id takes the other node's whole id, 52 characters, as 'pairmesh trust list' prints it there: "
    "the short one of 'pairmesh status' could be another node's",
    AddCode.SELF: "this is this node's own file",
    AddCode.MESH_MISMATCH: "both nodes are in a mesh that was paired by code: one must leave its own first",
    AddCode.FULL: "the roster is full: raise mesh.roster_max or remove a member",
    AddCode.CERT_MISMATCH: "a member of this id is known by another certificate",
    AddCode.ID16_TAKEN: "another member's id begins the same",
    AddCode.ADMISSION_TOO_HIGH: "the admission is out of range",
    AddCode.NOT_STORED: "the entry could not be stored and was not taken: look at the state folder's disk",
}
_REMOVE_REFUSALS: Final = {
    RemoveCode.NOT_A_MEMBER: "no member goes by that: give its id, 8 characters of it or more, or its name as @NAME",
    RemoveCode.AMBIGUOUS: "more than one node goes by that: give more of the id, or @NAME~XXXX as 'pairmesh status' does",
}
_ROLES: Final = {str(role.name).lower(): role for role in Role}


class MembershipPort(Protocol):
    """The part of the membership that the verbs use; ``agent.identity.membership.Membership`` has it."""

    name: NodeName

    @property
    def mesh_id(self) -> MeshId: ...

    def entries(self) -> Sequence[RosterEntry]: ...

    def export(self, addresses: Sequence[Address]) -> bytes: ...

    async def add(self, content: bytes, expected: str, roles: int = FULL_MEMBER) -> Added: ...

    async def remove(self, ref: str) -> Removed: ...


class AddArguments(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``roles`` empty means all a full member has."""

    file: Annotated[str, Meta(max_length=MOST)]
    id: Annotated[str, Meta(max_length=64)]
    roles: Annotated[tuple[str, ...], Meta(max_length=8)] = ()


class RemoveArguments(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``ref``: a node id, a prefix of at least 8 characters, ``@name`` or ``@name~xxxx``."""

    ref: Annotated[str, Meta(min_length=1, max_length=96)]


class NoArguments(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The arguments of a verb that takes none."""


def trust_verbs(
    membership: MembershipPort, own: NodeId, addresses: Callable[[], Sequence[Address]], audit: Audit
) -> Verbs:
    """The verbs over ``membership``; ``addresses`` are where this node can be dialled now."""

    async def listed(arguments: dict[str, Any]) -> dict[str, Any]:
        typed(arguments, NoArguments)
        members = [_line(entry) for entry in membership.entries()]
        return {"own": own, "name": membership.name, "mesh": membership.mesh_id.hex(), "members": members}

    async def exported(arguments: dict[str, Any]) -> dict[str, Any]:
        typed(arguments, NoArguments)
        return {"id": own, "file": membership.export(addresses()).decode()}

    async def added(arguments: dict[str, Any]) -> dict[str, Any]:
        asked = typed(arguments, AddArguments)
        result = await membership.add(asked.file.encode(), asked.id, _role_bits(asked.roles))
        if (why := _ADD_REFUSALS.get(result.code)) is not None:
            raise VerbRefused(result.code.value, why)
        if result.code is AddCode.ADDED:
            audit.audit("trust.added", node=result.node_id, adopted=result.adopted)
        return {"code": result.code.value, "id": result.node_id, "adopted": result.adopted}

    async def removed(arguments: dict[str, Any]) -> dict[str, Any]:
        result = await membership.remove(typed(arguments, RemoveArguments).ref)
        if (why := _REMOVE_REFUSALS.get(result.code)) is not None:
            raise VerbRefused(result.code.value, why)
        stored = result.code is RemoveCode.REMOVED
        audit.audit("trust.removed", node=result.node_id, connections_cut=result.aborted, stored=stored)
        return {"code": result.code.value, "id": result.node_id, "connections_cut": result.aborted}

    return {
        "trust-list": listed,
        "trust-export": exported,
        "trust-add": added,
        "trust-remove": removed,
    }


def _line(entry: RosterEntry) -> RosterDoc:
    node_id = node_id_of(entry.id32)
    return RosterDoc(
        id=node_id,
        short_id=short_id(node_id),
        name=entry.name,
        roles=names_of(Role, entry.roles),
        admission=entry.admission,
        removed=entry.removed,
    )


def _role_bits(names: Sequence[str]) -> int:
    bits = 0
    for name in names:
        if name not in _ROLES:
            raise VerbRefused("arguments_malformed", f"a role is one of {' '.join(_ROLES)}")
        bits |= _ROLES[name]
    return bits or int(FULL_MEMBER)
