"""Where members may be dialled: a bounded book of hints, and the rules that keep bad ones out.

Hints come from four places: the member's own S record and addresses that worked before (both kept by the mesh
machine), the operator (``mesh.peers``), and multicast discovery. The operator's word is taken as it is; every other hint must lie inside
``mesh.allow_networks`` and may not be unspecified, multicast, link-local, IPv4-mapped, one of our own addresses
or below port 1024. A hint says where to knock, never who answers: identity is the business of TLS.

The book opens no socket and reads no clock.
"""

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_address
from typing import Final, NamedTuple

from agent.mesh.interfaces import IpAddress
from agent.settings.values import PeerHint
from router_core import limits
from router_core.ids import Id16, NodeId, id16_of, id32_of
from router_core.record.membership import Member
from router_core.record.state import Address

IpNetwork = IPv4Network | IPv6Network

LOWEST_PORT: Final = 1_024
INGRESS_PORT: Final = 7_434
"""Where requests go to a member that tells no address of its own."""
STRANGERS: Final = 64
"""Ids outside the roster whose sightings are remembered, in case they become members."""
FAILURES: Final = 4 * limits.ADDRESSES


class PeerAddress(NamedTuple):
    """A literal address and a port: something that can be dialled."""

    ip: IpAddress
    port: int

    def __str__(self) -> str:
        return f"[{self.ip}]:{self.port}" if self.ip.version == 6 else f"{self.ip}:{self.port}"


class Unfit(Enum):
    """Why an address is not dialled."""

    NOT_DIALABLE = "not_dialable"
    NOT_ALLOWED = "not_allowed"
    OWN = "own"


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressRules:
    """Which hints of others are followed. ``own`` are the addresses by which a dial would lead back to this node."""

    allow: tuple[IpNetwork, ...]
    own: Container[IpAddress] = frozenset()

    def admit(self, endpoint: PeerAddress) -> bool:
        return self.unfit(endpoint) is None

    def unfit(self, endpoint: PeerAddress) -> Unfit | None:
        """Why a hint is not followed, None if it is."""
        if not _is_dialable(endpoint):
            return Unfit.NOT_DIALABLE
        if not self._allows(endpoint.ip):
            return Unfit.NOT_ALLOWED
        return Unfit.OWN if endpoint.ip in self.own else None

    def admit_proven(self, endpoint: PeerAddress) -> bool:
        """True if the member that a link leads to may be dialled there, too: no hint, so only loopback has to be
        allowed."""
        ip = endpoint.ip
        return _is_dialable(endpoint) and ip not in self.own and (not ip.is_loopback or self._allows(ip))

    def _allows(self, ip: IpAddress) -> bool:
        return any(ip.version == network.version and ip in network for network in self.allow)


def _is_dialable(endpoint: PeerAddress) -> bool:
    ip = endpoint.ip
    if endpoint.port < LOWEST_PORT or endpoint.port > 65_535:
        return False
    if ip.is_unspecified or ip.is_multicast or ip.is_link_local:
        return False
    return isinstance(ip, IPv4Address) or (ip.ipv4_mapped is None and ip.scope_id is None)


_KEPT: Final = frozenset({None, Unfit.OWN, Unfit.NOT_ALLOWED})
"""What is an own address now may be somebody else's in a moment, and what is not allowed is told to the operator."""


class AddressBook:
    """What this node knows of members beside their own words: the operator's entries, and sightings.

    ``choose`` orders all addresses of one member for a dial: those that failed since they last worked come last,
    longest-ago failure first. Lists are at most eight long, strangers at most 64.
    """

    def __init__(self, rules: AddressRules, static: Sequence[PeerHint] = ()) -> None:
        self._rules = rules
        self._static = tuple(static)
        self._sighted: dict[Id16, tuple[PeerAddress, ...]] = {}
        self._failed: dict[Id16, dict[PeerAddress, None]] = {}
        self._strangers: OrderedDict[NodeId, tuple[PeerAddress, ...]] = OrderedDict()

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

    def sight(self, node_id: NodeId, endpoints: Iterable[PeerAddress]) -> bool:
        """Take a multicast sighting, replacing the last one; True if it is of a member and usable."""
        seen = tuple(dict.fromkeys(each for each in endpoints if self._rules.unfit(each) in _KEPT))
        seen = seen[: limits.ADDRESSES]
        id16 = id16_of(id32_of(node_id))
        if id16 in self._sighted:
            self._sighted[id16] = seen
            return any(self._rules.admit(each) for each in seen)
        self._strangers.pop(node_id, None)
        if seen:
            self._strangers[node_id] = seen
        while len(self._strangers) > STRANGERS:
            self._strangers.popitem(last=False)
        return False

    def worked(self, peer: Id16, endpoint: PeerAddress) -> None:
        """Note a link made through ``endpoint``."""
        self._failed.get(peer, {}).pop(endpoint, None)

    def failed(self, peer: Id16, endpoint: PeerAddress) -> None:
        """Note that nothing, or somebody else, answered at ``endpoint``."""
        if peer not in self._sighted:
            return
        tried = self._failed.setdefault(peer, {})
        tried.pop(endpoint, None)
        tried[endpoint] = None
        if len(tried) > FAILURES:
            del tried[next(iter(tried))]

    def forget_failures(self) -> None:
        """This host is elsewhere now: what could not be reached from where it was may be here."""
        self._failed.clear()

    def choose(self, member: Member, named: Iterable[Address]) -> tuple[PeerAddress, ...]:
        """Addresses to dial, at most eight, best first: ``named`` by the member or by experience, then our own."""
        tried = self._failed.get(member.id16, {})
        sighted = self._filtered(self._sighted.get(member.id16, ()))
        known = dict.fromkeys((*self._filtered(_endpoints(named)), *self.told_by_operator(member), *sighted))
        untried = [endpoint for endpoint in known if endpoint not in tried]
        again = [endpoint for endpoint in tried if endpoint in known]
        return tuple((untried + again)[: limits.ADDRESSES])

    def choose_ingress(
        self, member: Member, named: Iterable[Address], ways: Iterable[tuple[IpAddress, bool]]
    ) -> tuple[PeerAddress, ...]:
        """Addresses to send requests to, at most eight, best first: where a link to the member was dialled, what it
        names itself, what the operator says, and last where a link came from that it does not name.

        ``ways`` are the addresses that links to it run over, True for those that were dialled.
        """
        told = [
            PeerAddress(ip_address(each.ip), each.ingress_port) for each in named if len(each.ip) in (4, 16)
        ]
        ports = {each.ip: each.port for each in reversed(told)}
        usual = told[0].port if told else INGRESS_PORT
        operators = [
            PeerAddress(each.ip, ports.get(each.ip, usual)) for each in self.told_by_operator(member)
        ]
        proven = [(PeerAddress(ip, ports.get(ip, usual)), dialled or ip in ports) for ip, dialled in ways]
        linked = [(at, first) for at, first in proven if self._rules.admit_proven(at)]
        known = dict.fromkeys(
            (
                *(at for at, first in linked if first),
                *(at for at in told if self._rules.admit(at)),
                *operators,
                *(at for at, first in linked if not first),
            )
        )
        return tuple(known)[: limits.ADDRESSES]

    def left_out(
        self, named: Iterable[Address], chosen: Container[PeerAddress]
    ) -> tuple[tuple[PeerAddress, Unfit], ...]:
        """Addresses for requests that a member names and that are not among the ``chosen``, with the reason."""
        told = [
            PeerAddress(ip_address(each.ip), each.ingress_port) for each in named if len(each.ip) in (4, 16)
        ]
        return tuple(
            (at, why) for at in told if at not in chosen and (why := self._rules.unfit(at)) is not None
        )

    def unfit_for_links(
        self, member: Member, named: Iterable[Address]
    ) -> tuple[tuple[PeerAddress, Unfit], ...]:
        """Addresses that a member names, or was sighted at, and that are not dialled, with the reason."""
        known = dict.fromkeys((*_endpoints(named), *self._sighted.get(member.id16, ())))
        listed = {each.ip for each in self.told_by_operator(member)}
        return tuple(
            (at, why) for at in known if at.ip not in listed and (why := self._rules.unfit(at)) is not None
        )

    def ips(self) -> frozenset[IpAddress]:
        """Every address that the operator names, or that a member was sighted at."""
        sighted = (each.ip for seen in self._sighted.values() for each in seen)
        return frozenset((*sighted, *(hint.ip for hint in self._static)))

    def told_by_operator(self, member: Member) -> list[PeerAddress]:
        """Where ``mesh.peers`` says that ``member`` is."""
        return [PeerAddress(hint.ip, hint.port) for hint in self._static if _means(hint, member)]

    def _filtered(self, endpoints: Iterable[PeerAddress]) -> tuple[PeerAddress, ...]:
        admitted = dict.fromkeys(endpoint for endpoint in endpoints if self._rules.admit(endpoint))
        return tuple(admitted)[: limits.ADDRESSES]


def _means(hint: PeerHint, member: Member) -> bool:
    if not hint.named:
        return hint.ref == member.node_id
    return hint.ref == member.name and member.node_id.startswith(hint.mark)


def _endpoints(addrs: Iterable[Address]) -> list[PeerAddress]:
    return [PeerAddress(ip_address(addr.ip), addr.mesh_port) for addr in addrs if len(addr.ip) in (4, 16)]
