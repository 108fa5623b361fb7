"""All rooms of one node, and the wires that run against the order they are built in."""

import asyncio
from collections.abc import Sequence
from functools import partial

from agent.admin.config_verbs import config_verbs
from agent.admin.drain_verbs import drain_verbs
from agent.admin.routes import Routes
from agent.admin.server import AdminServer
from agent.admin.trust_verbs import trust_verbs
from agent.assembly.ground import Ground
from agent.assembly.host import HostRooms
from agent.assembly.mesh import MeshRooms, TrustRooms
from agent.assembly.placement import PlacementRooms
from agent.assembly.ports import Ports
from agent.assembly.relay import RelayRooms
from agent.effects.clock import Clock
from agent.effects.entropy import new_rng
from agent.effects.tasks import Tasks
from agent.engines.catalogue import LOOPBACK_PORTS
from agent.identity.own import OwnIdentity
from agent.node.config.endpoints import OwnEndpoints, keyed
from agent.node.config.in_force import InForce
from agent.node.config.reload import Reloading, manifest_faults
from agent.node.routing.trace import Trace
from agent.node.status.dry_run import DryRuns
from agent.node.status.figures import LiveFigures
from agent.node.status.member_log import MemberLog
from agent.node.status.recall import Recalling
from agent.node.status.status import NodePicture
from agent.observe.capture import report_crash
from agent.observe.journal import Journal
from agent.observe.log import Log, class_name
from agent.observe.metrics import Registry
from agent.observe.view_metrics import ViewMetrics
from agent.relay.ports import Phase
from agent.sampling.files import Roots
from agent.settings.load import Settings
from agent.settings.manifest import read_manifests
from agent.settings.unread import ENDPOINTS
from agent.store.folders import Folders
from agent.store.secrets import secrets_folder
from router_core.ids import Id16, NodeId
from router_core.policy.placement import PlacementPolicy
from router_core.policy.residency import ResidencyPolicy
from router_core.record.membership import ViewChange
from router_core.record.state import Address, Static, Volatile

OWN_DUE_MS = 2_000
PART_FAULT_MS = 120_000
"""So long a part that failed is told of; one that goes on failing is begun anew at least once a minute."""


class Assembly:
    """Every room of one node. ``ports.bind`` and ``build`` first, in that order, on the loop; ``ports.close`` last."""

    def __init__(
        self,
        settings: Settings,
        folders: Folders,
        own: OwnIdentity,
        clock: Clock,
        log: Log,
        trace: Trace | None = None,
    ) -> None:
        self.ground = Ground(settings, folders, own, clock, log)
        self.settings = settings
        self.folders = folders
        self.own = own
        self.clock = clock
        self.log = log
        self.trace = trace
        self.ports = Ports(settings, folders)
        self.tasks = Tasks(self.ground.failed)
        self.roots = Roots()
        self.engine_ports = LOOPBACK_PORTS
        self.residency_policy = ResidencyPolicy()
        self.phase = Phase.STARTING
        self.faults = self.ground.faults
        self._failed_parts: dict[str, tuple[int, str]] = {}
        self.addresses: tuple[Address, ...] = ()
        self.reload = asyncio.Event()
        """Set to have the config folder read again."""

    async def build(self) -> None:
        """Build and wire every room; nothing runs yet but the journal's thread. Raises ``RefuseToStart``."""
        self.trust = TrustRooms(self.ground, self.tasks)
        self.membership = self.trust.membership
        await self.membership.load()
        self.journal = Journal(
            self.folders.state / "journal.sqlite", self.clock, self.log, aside=self.ground.newer
        )
        self.journal.start()
        for node_id in self.membership.quarantined:
            self._fault(
                f"the roster file of {node_id} did not convince and was set aside: add that node again"
            )
            self.log.warning("roster_quarantined", node=node_id)
        self._build_placement()
        self.member_log = MemberLog(lambda: self.placement.board.current, self.log)
        self.mesh = MeshRooms(
            self.ground,
            self.trust,
            self.placement.board,
            link_port=self.ports.link_port,
            heard=self._heard,
            linked=self._linked,
        )
        self.mesh.own.look()
        self.addresses = self.ports.told(self.mesh.own.ips)
        self._build_host()
        self.relay = RelayRooms(
            self.ground,
            self.trust,
            self.placement,
            self.mesh,
            self.host,
            self.tasks,
            self.ports,
            phase=lambda: self.phase,
            trace=self.trace,
        )
        self._build_admin()
        self.relay.reach.subscribe(self._reach_changed)
        self.membership.subscribe_addresses(self.mesh.told_addresses)
        self.membership.count_also(lambda member: self.mesh.driver.dialled_links(member.id16))
        self.membership.count_also(lambda member: self.relay.pool.open_to(member.node_id))
        for members_changed in (
            self.relay.members_changed,
            self.placement.viewing.members_changed,
            self.mesh.driver.roster_changed,
        ):
            self.membership.subscribe(members_changed)
            members_changed(self.membership.members, self.membership.mesh_id)

    def _build_placement(self) -> None:
        self.placement = PlacementRooms(self.ground, self.journal)

    def _build_host(self) -> None:
        read = read_manifests(self.folders.config / ENDPOINTS)
        manifests, unfit = keyed(read.manifests, self.ground.secret)
        self.host = HostRooms(
            self.ground,
            self.placement,
            self.tasks,
            manifests,
            outside=self.mesh.outside,
            roots=self.roots,
            engine_ports=self.engine_ports,
            residency_policy=self.residency_policy,
            addresses=lambda: self.addresses,
            cut_off=lambda endpoint: self.relay.cut_off(endpoint),
            said=self._said,
            told_mesh=self._told_mesh,
        )
        self.in_force = InForce(self.settings, self.folders.config, self.placement.read)
        self.reloading = Reloading(
            self.folders.config,
            secrets_folder(self.folders.state),
            current=lambda: self.placement.fleet().policy,
            swap=self._swap_policy,
            endpoints=OwnEndpoints(
                self.host.engines, self.host.drains, read_credential=self.ground.secret, log=self.log
            ),
            in_force=self.in_force,
            now=self.reload,
            log=self.log,
        )
        self.reloading.tell([*manifest_faults(read), *unfit])

    def _build_admin(self) -> None:
        placement, host, relay, clock = self.placement, self.host, self.relay, self.clock
        self.registry = Registry(partial(report_crash, self.log, "metrics.failed"))
        self.registry.add(
            relay.observing,
            placement.decisions,
            relay.metrics,
            host.load_metrics,
            LiveFigures(
                router=placement.router,
                connections=lambda: {"api": len(relay.api_roll), "ingress": len(relay.ingress_roll)},
                held_bytes=lambda: relay.buffered.held,
                now=clock.boot_ms,
            ),
            self.mesh.alarms,
            self.journal,
            relay.access,
            self.log,
            relay.refused,
            host.sampling_report,
            host.probe_report,
            ViewMetrics(lambda: placement.board.current, clock.boot_ms),
        )
        self.admin = AdminServer(
            Routes(
                status=NodePicture(
                    membership=self.membership,
                    board=placement.board,
                    mesh=lambda: self.mesh.machine.picture(clock.boot_ms()),
                    dial_faults=lambda: self.mesh.driver.dial_faults,
                    addresses=self.ports.shown,
                    told=lambda: [str(ip) for ip in self.mesh.own.ips],
                    reach=self.relay.reach,
                    targets=self.relay.targets,
                    unlinked=lambda peer: self.mesh.driver.left_out.get(peer, ()),
                    faults=self._faults,
                    policy=lambda: placement.fleet().policy,
                    drains=host.drains.docs,
                    endpoints=host.engines.endpoints,
                    residency=host.residency.standings,
                    log_lines_lost=lambda: self.log.lost,
                    waits_for_restart=lambda: self.reloading.waits,
                    host=host.measured,
                    clock=clock,
                ),
                decisions=Recalling(placement.placing, self.journal, relay.observing.settle),
                dry_runs=DryRuns(placement.placing, new_rng()),
                exposition=self.registry,
                verbs={
                    **trust_verbs(self.membership, self.own.node_id, lambda: self.addresses, self.journal),
                    **drain_verbs(host.drains, host.engines.endpoints, self.journal),
                    **config_verbs(
                        self.settings.written, lambda: self.in_force.policy, self.in_force.waiting
                    ),
                },
                log=self.log,
            ),
            hosts=self.settings.api.hosts,
            origins=self.settings.api.origins,
        )

    # --- wires -----------------------------------------------------------------------------------------------

    def _fault(self, text: str) -> None:
        self.faults.append(text)

    def part_failed(self, name: str, exc: BaseException) -> None:
        """A part that others can do without failed and is begun anew."""
        self._failed_parts[name] = (self.clock.boot_ms(), class_name(exc))
        report_crash(self.log, "part.failed", exc, part=name)

    def _faults(self) -> tuple[str, ...]:
        """What the operator must see."""
        since_ms = self.clock.boot_ms() - PART_FAULT_MS
        broken = [
            f"{name} fails and is begun anew each time: {why}, see part.failed in the log"
            for name, (at_ms, why) in self._failed_parts.items()
            if at_ms >= since_ms
        ]
        unwritten = [self.journal.fault, self.placement.learning.fault, self.membership.fault]
        told = [fault for fault in unwritten if fault is not None]
        told += [
            f"{self.folders.state}: {what} cannot be stored ({cause})"
            for what, cause in self.mesh.driver.unstored.items()
        ]
        if (gone := self.mesh.own.missing) is not None:
            told.append(
                f"a listener is bound to {gone}, which this host does not have any more: correct mesh.listen and "
                'ingress.listen, or leave the address out (":7433"), and restart'
            )
        return (*self.faults, *broken, *told, *self.reloading.faults)

    def _heard(self, changes: Sequence[ViewChange]) -> None:
        if self.trace is not None:
            self.trace.records(changes)
        self.placement.viewing.heard(changes)
        self.member_log.heard(changes)
        self.placement.router.queue.news(self.clock.boot_ms())

    def _linked(self, peer: Id16, opened: bool) -> None:
        """A link was made or lost."""
        self.relay.probing.linked(peer, opened)

    def _reach_changed(self, node: NodeId) -> None:
        """What is known of the ways to a node's ingress changed: tell whether it takes requests at all, if that did."""
        reach = self.relay.reach
        before, now = self.placement.viewing.unreachable, reach.unreachable
        if before == now:
            return
        self.placement.viewing.reach_changed(now)
        if (found := reach.of(node)) is not None:
            at = "no address" if found.at is None else str(found.at)
            self.log.warning("requests.unreachable", node=node, at=at, why=found.why)
        else:
            self.log.info("requests.reachable", node=node)

    def moved(self, elsewhere: bool) -> None:
        """This host's addresses came, went (``elsewhere``) or changed their ranks: say so, and follow."""
        self.log.info("addresses.changed", addresses=" ".join(map(str, self.mesh.own.ips)) or "none")
        self.addresses = self.ports.told(self.mesh.own.ips)
        if elsewhere:
            self.mesh.moved()
            self.relay.probing.moved()
        self.host.speaking.addresses_moved()

    def _said(self, static: Static, volatile: Volatile) -> None:
        self.placement.viewing.said(static, volatile, OWN_DUE_MS)
        self.placement.router.queue.news(self.clock.boot_ms())

    def _told_mesh(self, static: Static, volatile: Volatile, urgent: bool) -> None:
        self.mesh.driver.body_changed(volatile, static, urgent=urgent)

    def _swap_policy(self, policy: PlacementPolicy) -> None:
        """Put ``policy`` in force, whole, or raise ``RefuseToStart`` and change nothing."""
        self.placement.adopt(policy)
        self.relay.adopt(policy)
