"""The file by which a node introduces itself to another: JSON that people copy, mail and read.

It holds nothing secret and proves nothing: whoever adds it names the id that he expects. Untrusted on the way in:
bounded, strict, and the certificate must be the one of its own key.
"""

import ipaddress
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from agent.identity.certificate import check_cert
from router_core import limits
from router_core.errors import RemoteFault
from router_core.ids import Id32, MeshId, NodeId, NodeName, node_id_of, parse_node_name
from router_core.record.state import U32_MAX, Address, Port
from router_core.trust.certificate import CertFault
from router_core.trust.mesh_choice import MeshClaim

FORMAT: Final = "pairmesh-member"
VERSION: Final = 1
MOST: Final = 16 * limits.KIB


class MemberFile(Struct, frozen=True, kw_only=True):
    """A node in its own words. ``admission`` is its own in the mesh it claims."""

    id32: Id32
    der: bytes
    name: NodeName
    admission: int
    claim: MeshClaim
    addresses: tuple[Address, ...]

    @property
    def node_id(self) -> NodeId:
        return node_id_of(self.id32)


class _AddressText(Struct, frozen=True, kw_only=True):
    ip: Annotated[str, Meta(max_length=64)]
    mesh_port: Port
    ingress_port: Port


class _Text(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: str
    version: int
    node_id: str
    name: str
    mesh_id: Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    paired: bool
    admission: Annotated[int, Meta(ge=1, le=U32_MAX)]
    addresses: Annotated[list[_AddressText], Meta(max_length=limits.ADDRESSES)]
    certificate: bytes


def write_member_file(member: MemberFile) -> bytes:
    """The text of the file; the node id stands in it for people, who compare it by another way."""
    text = _Text(
        format=FORMAT,
        version=VERSION,
        node_id=member.node_id,
        name=member.name,
        mesh_id=member.claim.mesh_id.hex(),
        paired=member.claim.paired,
        admission=member.admission,
        addresses=[_address_text(address) for address in member.addresses[: limits.ADDRESSES]],
        certificate=member.der,
    )
    return msgspec.json.format(msgspec.json.encode(text), indent=2) + b"\n"


def parse_member_file(content: bytes) -> MemberFile:
    """The reverse; raises ``RemoteFault``: ``malformed``, ``unsupported_version`` or ``bad_cert``."""
    if len(content) > MOST:
        raise RemoteFault("malformed", f"{len(content)} bytes, limit {MOST}")
    try:
        head = msgspec.json.decode(content, type=_Head)
        if head.format != FORMAT:
            raise RemoteFault("malformed", "no member file")
        if head.version != VERSION:
            raise RemoteFault("unsupported_version", str(head.version))
        text = msgspec.json.decode(content, type=_Text)
        addresses = tuple(map(_address, text.addresses))
    except (ValueError, RecursionError) as fault:
        raise RemoteFault("malformed", type(fault).__name__) from None
    name = parse_node_name(text.name)
    if name is None:
        raise RemoteFault("malformed", "no node name")
    found = check_cert(text.certificate)
    if isinstance(found, CertFault):
        raise RemoteFault("bad_cert", found.value)
    if node_id_of(found) != text.node_id:
        raise RemoteFault("bad_cert", "certificate of another node")
    return MemberFile(
        id32=found,
        der=text.certificate,
        name=name,
        admission=text.admission,
        claim=MeshClaim(MeshId(bytes.fromhex(text.mesh_id)), text.paired),
        addresses=addresses,
    )


class _Head(Struct, frozen=True, kw_only=True):
    format: str
    version: int


def addresses_of(hosts: Sequence[str], mesh_port: int, ingress_port: int) -> tuple[Address, ...]:
    """Addresses from literal IPs; raises ``ValueError`` for anything else."""
    return tuple(
        Address(ip=ipaddress.ip_address(host).packed, mesh_port=mesh_port, ingress_port=ingress_port)
        for host in hosts
    )


def _address_text(address: Address) -> _AddressText:
    return _AddressText(
        ip=str(ipaddress.ip_address(address.ip)),
        mesh_port=address.mesh_port,
        ingress_port=address.ingress_port,
    )


def _address(text: _AddressText) -> Address:
    return Address(
        ip=ipaddress.ip_address(text.ip).packed, mesh_port=text.mesh_port, ingress_port=text.ingress_port
    )
