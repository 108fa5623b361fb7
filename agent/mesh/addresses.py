"""Where members may be dialled: a bounded book of hints, and the rules that keep bad ones out.

Hints come from four places: the member's own S record and addresses that worked before (both kept by the mesh
machine), the operator (``mesh.peers``), and multicast discovery. The operator's word is taken as it is; every other hint must lie inside
``mesh.allow_networks`` and may not be unspecified, multicast, link-local, IPv4-mapped, one of our own addresses
or below port 1024. A hint says where to knock, never who answers: identity is the business of TLS.

The book opens no socket and reads no clock.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final, NamedTuple

from agent.settings.values import PeerHint
from router_core import limits
from router_core.ids import Id16, NodeId, id16_of, id32_of
from router_core.record.membership import Member
from router_core.record.state import Address

IpAddress = IPv4Address | IPv6Address
IpNetwork = IPv4Network | IPv6Network

LOWEST_PORT: Final = 1_024
STRANGERS: Final = 64
"""Ids outside the roster whose sightings are remembered, in case they become members."""
FAILURES: Final = 4 * limits.ADDRESSES


class Endpoint(NamedTuple):
    """A literal address and a port: something that can be dialled."""

    ip: IpAddress
    port: int

    def __str__(self) -> str:
        return f"[{self.ip}]:{self.port}" if self.ip.version == 6 else f"{self.ip}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressRules:
    """Which hints of others are followed. ``own`` are the addresses this node itself listens on."""

    allow: tuple[IpNetwork, ...]
    own: frozenset[IpAddress] = frozenset()

    def admit(self, endpoint: Endpoint) -> bool:
        ip = endpoint.ip
        if endpoint.port < LOWEST_PORT or endpoint.port > 65_535:
            return False
        if ip.is_unspecified or ip.is_multicast or ip.is_link_local or ip in self.own:
            return False
        if isinstance(ip, IPv6Address) and (ip.ipv4_mapped is not None or ip.scope_id is not None):
            return False
        return any(ip.version == network.version and ip in network for network in self.allow)


class AddressBook:
    """What this node knows of members beside their own words: the operator's entries, and sightings.

    ``choose`` orders all addresses of one member for a dial: those that failed since they last worked come last,
    longest-ago failure first. Lists are at most eight long, strangers at most 64.
    """

    def __init__(self, rules: AddressRules, static: Sequence[PeerHint] = ()) -> None:
        self._rules = rules
        self._static = tuple(static)
        self._sighted: dict[Id16, tuple[Endpoint, ...]] = {}
        self._failed: dict[Id16, dict[Endpoint, None]] = {}
        self._strangers: OrderedDict[NodeId, tuple[Endpoint, ...]] = OrderedDict()

    @property
    def strangers(self) -> int:
        """How many ids outside the roster are remembered."""
        return len(self._strangers)

    def admit_members(self, members: Iterable[Id16]) -> None:
        """Keep what is known of exactly these members; a stranger sighted earlier brings its sighting along."""
        sighted = {id16: self._sighted.get(id16, ()) for id16 in members}
        for node_id in [node_id for node_id in self._strangers if id16_of(id32_of(node_id)) in sighted]:
            sighted[id16_of(id32_of(node_id))] = self._strangers.pop(node_id)
        self._sighted = sighted
        self._failed = {id16: tried for id16, tried in self._failed.items() if id16 in sighted}

    def sight(self, node_id: NodeId, endpoints: Iterable[Endpoint]) -> bool:
        """Take a multicast sighting, replacing the last one; True if it is of a member and usable."""
        seen = self._filtered(endpoints)
        id16 = id16_of(id32_of(node_id))
        if id16 in self._sighted:
            self._sighted[id16] = seen
            return bool(seen)
        self._strangers.pop(node_id, None)
        if seen:
            self._strangers[node_id] = seen
        while len(self._strangers) > STRANGERS:
            self._strangers.popitem(last=False)
        return False

    def worked(self, peer: Id16, endpoint: Endpoint) -> None:
        """Note a link made through ``endpoint``."""
        self._failed.get(peer, {}).pop(endpoint, None)

    def failed(self, peer: Id16, endpoint: Endpoint) -> None:
        """Note that nothing, or somebody else, answered at ``endpoint``."""
        if peer not in self._sighted:
            return
        tried = self._failed.setdefault(peer, {})
        tried.pop(endpoint, None)
        tried[endpoint] = None
        if len(tried) > FAILURES:
            del tried[next(iter(tried))]

    def choose(self, member: Member, named: Iterable[Address]) -> tuple[Endpoint, ...]:
        """Addresses to dial, at most eight, best first: ``named`` by the member or by experience, then our own."""
        tried = self._failed.get(member.id16, {})
        static = [Endpoint(hint.ip, hint.port) for hint in self._static if _means(hint, member)]
        known = dict.fromkeys(
            (*self._filtered(_endpoints(named)), *static, *self._sighted.get(member.id16, ()))
        )
        untried = [endpoint for endpoint in known if endpoint not in tried]
        again = [endpoint for endpoint in tried if endpoint in known]
        return tuple((untried + again)[: limits.ADDRESSES])

    def _filtered(self, endpoints: Iterable[Endpoint]) -> tuple[Endpoint, ...]:
        admitted = dict.fromkeys(endpoint for endpoint in endpoints if self._rules.admit(endpoint))
        return tuple(admitted)[: limits.ADDRESSES]


def _means(hint: PeerHint, member: Member) -> bool:
    if not hint.named:
        return hint.ref == member.node_id
    return hint.ref == member.name and member.node_id.startswith(hint.mark)


def _endpoints(addrs: Iterable[Address]) -> list[Endpoint]:
    return [Endpoint(ip_address(addr.ip), addr.mesh_port) for addr in addrs if len(addr.ip) in (4, 16)]
