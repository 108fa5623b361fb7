"""The rooms by which nodes find each other and tell their state, and who may take part."""

from collections.abc import Callable, Sequence
from ipaddress import ip_address
from typing import Final

from agent.assembly.ground import Ground
from agent.board import Board
from agent.effects.entropy import new_rng
from agent.effects.tasks import Tasks
from agent.engines.outside import Outside, beyond
from agent.identity.admittance import Admittance
from agent.identity.keys import Ed25519Verifier, NodeKey
from agent.identity.membership import Membership
from agent.identity.tls import OwnFiles, TlsContexts
from agent.mesh.addresses import AddressBook, AddressRules, PeerAddress
from agent.mesh.discovery import Discovery
from agent.mesh.driver import Driver, DriverListeners
from agent.mesh.interfaces import IpAddress
from agent.mesh.own_addresses import OwnAddresses
from agent.mesh.shelf import MeshShelf
from agent.observe.instruments import Alarms
from agent.settings.load import MeshSettings
from agent.store.marks import MarkFiles
from agent.store.members import PeerFiles, RosterFiles
from router_core.ids import Id16, NodeId, short_id
from router_core.mesh.machine import Mesh
from router_core.mesh.records.publisher import Me
from router_core.policy.mesh import MeshPolicy
from router_core.record.membership import ViewChange
from router_core.record.state import Address

MEMBERS_MS: Final = 1_000
"""How long the known addresses of members are taken as they were."""


def mesh_policy(mesh: MeshSettings) -> MeshPolicy:
    """The mesh's tuning with the times that the settings name."""
    return MeshPolicy(
        backoff_max_s=mesh.backoff_max_ms // 1_000,
        gone_min_s=mesh.gone_min_ms // 1_000,
        gone_redial_s=mesh.gone_redial_ms // 1_000,
    )


class MeshCrypto:
    """Signs with the own key, verifies with anybody's."""

    def __init__(self, key: NodeKey) -> None:
        self.sign = key.sign
        self.verify = Ed25519Verifier().verify


class TrustRooms:
    """Who may take part; ``load`` before anybody asks."""

    def __init__(self, ground: Ground, tasks: Tasks) -> None:
        own, state = ground.own, ground.folders.state
        self.admittance = Admittance()
        self.contexts = TlsContexts(OwnFiles(own.cert_path, own.key_path))
        self.peer_files = PeerFiles(state, ground.newer)
        self.membership = Membership(
            own,
            ground.settings.name,
            roster_files=RosterFiles(state),
            peer_files=self.peer_files,
            contexts=self.contexts,
            admittance=self.admittance,
            tasks=tasks,
            limit=ground.settings.mesh.roster_max,
        )


class MeshRooms:
    """``heard`` gets what is heard of other nodes, ``linked`` who a link was made to or lost. ``outside`` tells which
    addresses are no node's. ``own`` looks first."""

    def __init__(
        self,
        ground: Ground,
        trust: TrustRooms,
        board: Board,
        *,
        link_port: int,
        heard: Callable[[Sequence[ViewChange]], None],
        linked: Callable[[Id16, bool], None],
    ) -> None:
        settings, own, clock = ground.settings.mesh, ground.own, ground.clock
        membership = trust.membership
        shelf = MeshShelf(MarkFiles(ground.folders.state, ground.newer), trust.peer_files)
        self._clock = clock
        self._board = board
        saved = shelf.load(membership.mesh_id, tuple(membership.members.values()))
        self.machine = Mesh(
            Me(id16=own.id16, key32=own.key.key32),
            mesh_policy(settings),
            MeshCrypto(own.key),
            new_rng(),
            saved,
            clock.boot_ms(),
        )
        self.alarms = Alarms(ground.log, "mesh", self._called)
        self.own = OwnAddresses(settings.listen, ground.settings.ingress, in_use=self._in_use)
        self.rules = AddressRules(allow=settings.allow_networks, own=self.own)
        self.book = AddressBook(self.rules, settings.peers)
        self.outside: Outside = beyond(self.addresses)
        self.driver = Driver(
            self.machine,
            clock=clock,
            tls=lambda: trust.contexts.client,
            source=settings.listen.ip if settings.listen.source is not None else None,
            book=self.book,
            shelf=shelf,
            told=DriverListeners(
                on_view=heard, notify=self.alarms.notify, failed=ground.failed, on_link=linked
            ),
        )
        self.discovery = Discovery(
            own.node_id, link_port, sighted=self.driver.sighted, clock=clock, failed=ground.failed
        )
        self._loopback = settings.listen.loopback
        self._saved = frozenset(
            ip_address(addr.ip)
            for known in saved.addresses
            for addr in known.addrs
            if len(addr.ip) in (4, 16)
        )
        self._members_at: int | None = None
        self._members_ips: frozenset[IpAddress] = frozenset()

    def announced(self) -> tuple[IpAddress, ...]:
        """The own addresses to tell by multicast: none of a loopback listener."""
        return () if self._loopback else self.own.ips

    def moved(self) -> None:
        """This host has other addresses than before."""
        self.driver.moved(self.own)
        self.discovery.moved()

    def _in_use(self) -> frozenset[IpAddress]:
        return self.driver.local_ips()

    def _called(self, id16: str) -> tuple[str, str] | None:
        """How people know the node whose id begins with the bytes ``id16`` (hex): its name and short id."""
        view = self._board.current
        member = view.members.get(Id16(bytes.fromhex(id16)))
        return None if member is None else (view.labels[member.node_id], short_id(member.node_id))

    def addresses(self) -> frozenset[IpAddress]:
        """Every address that nodes of the mesh tell, and all of this host."""
        return self.own.all | self._told()

    def _told(self) -> frozenset[IpAddress]:
        nodes = self._board.current.nodes.values()
        told = [addr.ip for node in nodes if node.static is not None for addr in node.static.addrs]
        return frozenset(ip_address(ip) for ip in told if len(ip) in (4, 16))

    def is_members(self, ip: str) -> bool:
        """True if a member is known to have that address: it told it, was reached or seen there, or the operator says
        so."""
        now = self._clock.boot_ms()
        if self._members_at is None or now - self._members_at >= MEMBERS_MS:
            self._members_at = now
            self._members_ips = (
                self._told() | self._saved | self.book.ips() | frozenset(self.driver.remote_ips())
            )
        return ip_address(ip.partition("%")[0]) in self._members_ips

    def told_addresses(self, node_id: NodeId, addresses: tuple[Address, ...]) -> None:
        """``node_id`` can be dialled there, as its member file or its operator says."""
        self.driver.sighted(node_id, [PeerAddress(ip_address(addr.ip), addr.mesh_port) for addr in addresses])

    def rtts(self) -> dict[Id16, int]:
        """Milliseconds to each member that one could be measured to."""
        members = self.machine.picture(self._clock.boot_ms()).members
        return {member.id16: member.rtt_ms for member in members if member.rtt_ms is not None}
