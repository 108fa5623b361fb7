"""The rooms of one node, built and wired: who gets whose calls. Nothing is decided here.

What a room needs of another it gets as a callable or a Protocol; rooms of one layer meet only here and at the board.
"""

import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from functools import partial
from ipaddress import ip_address
from pathlib import Path

from agent import __version__
from agent.admin.drain_verbs import drain_verbs
from agent.admin.routes import Routes
from agent.admin.server import AdminServer
from agent.admin.trust_verbs import trust_verbs
from agent.authority.asking import Authority
from agent.board import Board
from agent.effects.clock import Clock
from agent.effects.entropy import new_rng, random_bytes, random_u32
from agent.effects.tasks import Tasks
from agent.engines.catalogue import LOOPBACK_PORTS
from agent.engines.contract import EndpointStatus
from agent.engines.outside import IpAddress, Outside, beyond
from agent.engines.watch import EngineWatch
from agent.identity.admittance import Admittance, Refusal
from agent.identity.keys import Ed25519Verifier, NodeKey
from agent.identity.listener import Listener
from agent.identity.member_file import addresses_of
from agent.identity.membership import Membership
from agent.identity.own import OwnIdentity
from agent.identity.routes import Port
from agent.identity.tls import OwnFiles, TlsContexts
from agent.mesh.addresses import AddressBook, AddressRules, Endpoint
from agent.mesh.discovery import Discovery, own_addresses
from agent.mesh.door import Door
from agent.mesh.driver import Driver, Told
from agent.mesh.shelf import MeshShelf
from agent.node.draining import Drains
from agent.node.dry_run import DryRuns
from agent.node.endpoints import OwnEndpoints
from agent.node.gate import Gate
from agent.node.learning import Learning, open_store
from agent.node.listening import bind_all, shown
from agent.node.listing import FleetListing
from agent.node.measuring import LiveFigures
from agent.node.observing import EngineWaits, Observing
from agent.node.own_work import own_work
from agent.node.picture import NodePicture
from agent.node.placing import Placing
from agent.node.recalling import Recalling
from agent.node.reloading import ENDPOINTS, Reloading, manifest_faults
from agent.node.showing import Showing, placer_of
from agent.node.speaking import Listeners, Sources, Speaking
from agent.node.targets import NodeTargets
from agent.node.trace import Trace, TracedObserver, TracedPlacer
from agent.node.viewing import Viewing
from agent.node.work import WatchedWork
from agent.observe.access import stream_access_log
from agent.observe.capture import report_crash
from agent.observe.instruments import Alarms, DecisionMetrics, LoadMetrics, RelayMetrics
from agent.observe.journal import Journal
from agent.observe.log import Log
from agent.observe.metrics import Counter, Registry
from agent.observe.view_metrics import ViewMetrics
from agent.relay.accept import Acceptor, Roll
from agent.relay.api import ApiFront, Doors
from agent.relay.dispatch import DispatchRate
from agent.relay.front import Buffered
from agent.relay.headers import Dates
from agent.relay.ingress import IngressFront
from agent.relay.listener import ServerConnection
from agent.relay.pool import Pool
from agent.relay.ports import Observer, Phase, Placer
from agent.relay.wiring import Hands, Wiring
from agent.residency import Listeners as ResidencyListeners
from agent.residency import ModelResidency
from agent.residency import Sources as ResidencySources
from agent.sampling.files import Roots
from agent.sampling.loop import OwnWork, Sampler, SamplerPorts
from agent.sampling.nvml import NvmlClient, binding_file
from agent.sampling.nvml_report import ProbeReport
from agent.sampling.reader import HostReader
from agent.sampling.report import SamplingReport
from agent.settings.load import MeshSettings, Settings
from agent.settings.manifest import read_manifests
from agent.settings.policy import PolicyRead, load_policy
from agent.store.folders import Folders, RefuseToStart
from agent.store.marks import Marks
from agent.store.members import PeerFiles, RosterFiles
from router_core.errors import LocalMisuse
from router_core.exchange.breaker import Breakers
from router_core.ids import Id16, NodeId, id8_of
from router_core.mesh.machine import Mesh
from router_core.mesh.publish import Me
from router_core.placement.demand import Demand
from router_core.placement.fleet import Live
from router_core.placement.hold import Hold
from router_core.placement.holding import Holding
from router_core.placement.ledger import Ledger
from router_core.placement.request import Endpoint as PlacedAt
from router_core.placement.request import RequestClass
from router_core.placement.sessions import Sessions
from router_core.policy.authority import AuthorityMode, AuthorityPolicy
from router_core.policy.exchange import ExchangePolicy
from router_core.policy.mesh import MeshPolicy
from router_core.policy.placement import PlacementPolicy
from router_core.policy.profile import ProfilePolicy
from router_core.policy.residency import ResidencyPolicy
from router_core.pressure.samples import Sampled
from router_core.pressure.wire import load_memory_mib, node_level
from router_core.profile.profiles import Profiles
from router_core.record.membership import Member, ViewChange
from router_core.record.state import Address, Level, Static, Volatile
from router_core.view.fold import empty

OWN_DUE_MS = 2_000
SECRET_MOST = 8_192


def mesh_policy(mesh: MeshSettings) -> MeshPolicy:
    """The mesh's tuning with the times that the settings name."""
    return MeshPolicy(
        backoff_max_s=mesh.backoff_max_ms // 1_000,
        gone_min_s=mesh.gone_min_ms // 1_000,
        gone_redial_s=mesh.gone_redial_ms // 1_000,
        audit_s=mesh.audit_ms // 1_000,
        audit_far_s=mesh.audit_far_ms // 1_000,
    )


def _session_headers(policy: PlacementPolicy) -> frozenset[bytes]:
    return frozenset(name.encode("ascii") for name in policy.session_headers)


class MeshCrypto:
    """Signs with the own key, verifies with anybody's."""

    def __init__(self, key: NodeKey) -> None:
        self.sign = key.sign
        self.verify = Ed25519Verifier().verify


class Assembly:
    """Every room of one node. ``bind`` and ``build`` first, in that order, on the loop; ``close_sockets`` last."""

    def __init__(
        self,
        settings: Settings,
        folders: Folders,
        own: OwnIdentity,
        clock: Clock,
        log: Log,
        trace: Trace | None = None,
    ) -> None:
        self.trace = trace
        self.settings = settings
        self.folders = folders
        self.own = own
        self.clock = clock
        self.log = log
        self.roots = Roots()
        self.residency_policy = ResidencyPolicy()
        self.outside: Outside = beyond(self._mesh_addresses)
        self.phase = Phase.STARTING
        self.faults: list[str] = []
        self.sockets: dict[str, tuple[socket.socket, ...]] = {}
        self.addresses: tuple[Address, ...] = ()
        self.reload = asyncio.Event()
        """Set to have the config folder read again."""

    def bind(self) -> None:
        """Take the ports; raises ``RefuseToStart``."""
        settings = self.settings
        wanted = {"mesh.listen": settings.mesh.listen, "ingress.listen": settings.ingress}
        if settings.router:
            wanted["api.listen"] = settings.api.listen
        for key, listen in wanted.items():
            self.sockets[key] = bind_all(key, listen)

    def close_sockets(self) -> None:
        """Give the ports back."""
        for socks in self.sockets.values():
            for sock in socks:
                sock.close()

    def _port(self, key: str) -> int:
        return int(self.sockets[key][0].getsockname()[1])

    def _mesh_addresses(self) -> frozenset[IpAddress]:
        """Every address that nodes of the mesh tell, and those this one listens on."""
        nodes = self.board.current.nodes.values()
        told = [addr.ip for node in nodes if node.static is not None for addr in node.static.addrs]
        return self.ingress_rules.own | {ip_address(ip) for ip in told if len(ip) in (4, 16)}

    async def build(self) -> None:
        """Build and wire every room; nothing runs yet but the journal's thread."""
        settings, folders, own, clock, log = self.settings, self.folders, self.own, self.clock, self.log
        self.tasks = Tasks(self._failed)
        self.registry = Registry(partial(report_crash, log, "metrics.failed"))
        self.journal = Journal(folders.state / "journal.sqlite", clock, log)
        self.journal.start()

        self.admittance = Admittance()
        self.contexts = TlsContexts(OwnFiles(own.cert_path, own.key_path))
        peer_files = PeerFiles(folders.state)
        self.membership = Membership(
            own,
            settings.name,
            roster_files=RosterFiles(folders.state),
            peer_files=peer_files,
            contexts=self.contexts,
            admittance=self.admittance,
            tasks=self.tasks,
            limit=settings.mesh.roster_max,
        )
        await self.membership.load()
        for node_id in self.membership.quarantined:
            self._fault(
                f"the roster file of {node_id} did not convince and was set aside: add that node again"
            )
            log.warning("roster_quarantined", node=node_id)

        self._build_placement()
        self._build_mesh(MeshShelf(Marks(folders.state), peer_files))
        self._build_engines()
        self._build_relay()
        self._build_sampling()
        self._build_residency()
        self._build_admin()
        self.membership.subscribe_addresses(self._told_addresses)
        self.membership.subscribe(self.viewing.members_changed)
        self.membership.subscribe(self.driver.roster_changed)
        self.membership.subscribe(self.targets.members_changed)
        self.targets.members_changed(self.membership.members, self.membership.mesh_id)
        self.viewing.members_changed(self.membership.members, self.membership.mesh_id)
        self.driver.roster_changed(self.membership.members, self.membership.mesh_id)

    def _build_placement(self) -> None:
        own, clock = self.own, self.clock
        self.policy = self._policy()
        self.exchange_policy = ExchangePolicy()
        self.work = WatchedWork()
        self.ledger = Ledger(id8_of(own.id16), random_u32(), self.work)
        self.breakers = Breakers(self.exchange_policy)
        self.suspects: set[PlacedAt] = set()
        self.leaving: set[tuple[str, str]] = set()
        self.demand = Demand()
        self.hold = Hold(self.policy)
        self.holding = Holding(self.hold, clock.boot_ms)
        spilling: set[RequestClass] = set()
        self.profiles = Profiles(ProfilePolicy())
        self.board = Board(empty(own.id32, self.settings.name))
        self.viewing = Viewing(
            self.board,
            own=Member(
                id32=own.id32,
                der=own.der,
                roles=own.mesh.roles,
                admission=own.mesh.admission,
                name=self.settings.name,
            ),
            profiles=self.profiles,
            policy=self.policy,
            live=Live(
                ledger=self.ledger,
                breakers=self.breakers,
                hold=self.hold,
                suspects=self.suspects,
                leaving=self.leaving,
                spilling=spilling,
            ),
            reborn=self.breakers.reborn,
            clock=clock,
        )
        self.learning = Learning(
            self.profiles,
            open_store(self.folders.state, self.log),
            lambda: self.viewing.fleet,
            clock,
            self.log,
        )
        self.learning.restore()
        self.decisions = DecisionMetrics()
        self.placing = Placing(
            fleet=lambda: self.viewing.fleet,
            ledger=self.ledger,
            sessions=Sessions(),
            session_secret=random_bytes(32),
            rng=new_rng(),
            clock=clock,
            journal=self.journal,
            metrics=self.decisions,
            authority=self._authority(self.policy.authority),
            demand=self.demand,
            spilling=spilling,
        )

    def _authority(self, policy: AuthorityPolicy) -> Authority | None:
        if policy.mode is AuthorityMode.OFF:
            return None
        token = self._credential(policy.credential) if policy.credential is not None else None
        try:
            return Authority(policy, token=token, clock=self.clock, log=self.log)
        except LocalMisuse as misuse:
            raise RefuseToStart("credential_unusable", f"{policy.credential}: {misuse}") from None

    def _swap_policy(self, policy: PlacementPolicy) -> None:
        """Put ``policy`` in force, whole. Raises ``RefuseToStart`` and changes nothing if its authority cannot be had."""
        if policy.authority != self.policy.authority:
            self.placing.authority = self._authority(policy.authority)
        for front in self.api_fronts:
            front.name_sessions(_session_headers(policy))
        self.policy = self.hold.policy = policy
        self.viewing.adopt(policy)

    def _policy(self) -> PlacementPolicy:
        read = load_policy(self.folders.config)
        if isinstance(read, PolicyRead):
            return read.policy
        raise RefuseToStart("policy_refused", "; ".join(map(str, read)))

    def _build_mesh(self, shelf: MeshShelf) -> None:
        mesh, own, membership = self.settings.mesh, self.own, self.membership
        self.machine = Mesh(
            Me(id16=own.id16, key32=own.key.key32),
            mesh_policy(mesh),
            MeshCrypto(own.key),
            new_rng(),
            shelf.load(membership.mesh_id, tuple(membership.members.values())),
            self.clock.boot_ms(),
        )
        self.alarms = Alarms(self.log, "mesh")
        rules = AddressRules(allow=mesh.allow_networks, own=frozenset(own_addresses(mesh.listen)))
        self.ingress_rules = rules
        self.driver = Driver(
            self.machine,
            clock=self.clock,
            tls=lambda: self.contexts.client,
            source=mesh.listen.ip if mesh.listen.source is not None else None,
            book=AddressBook(rules, mesh.peers),
            shelf=shelf,
            told=Told(on_view=self._heard, notify=self.alarms.notify, failed=self._failed),
        )
        self.discovery = Discovery(
            own.node_id,
            self._port("mesh.listen"),
            sighted=self.driver.sighted,
            clock=self.clock,
            failed=self._failed,
        )

    def _build_engines(self) -> None:
        read = read_manifests(self.folders.config / ENDPOINTS)
        self.engines = EngineWatch(
            read.manifests,
            clock=self.clock,
            rng=new_rng(),
            changed=self._engine_changed,
            failed=self._failed,
            read_credential=self._credential,
            ports=LOOPBACK_PORTS if self.settings.autodetect else (),
            outside=self.outside,
        )
        self.drains = Drains(
            endpoints=self.engines.endpoints,
            in_flight=self.work.in_flight,
            cut=self._cut_off,
            changed=lambda: self.speaking.speak(),
            clock=self.clock,
        )
        self.reloading = Reloading(
            self.folders.config,
            current=lambda: self.viewing.fleet.policy,
            swap=self._swap_policy,
            endpoints=OwnEndpoints(self.engines, self.drains, read_credential=self._credential, log=self.log),
            now=self.reload,
            log=self.log,
        )
        self.reloading.tell(manifest_faults(read))
        self.dispatch = DispatchRate(self.clock)
        self.speaking = Speaking(
            Sources(
                endpoints=self.engines.endpoints,
                addresses=lambda: self.addresses,
                dispatch=self.dispatch.row,
                claims=partial(self.learning.claims, self.own.id16),
                used=self.learning.used,
                demand=lambda: self.demand.rows(self.clock.boot_ms()),
                leaving=self.leaving,
                reserved_mib=lambda: self.residency.reserved_mib,
                drains=self.drains,
            ),
            Listeners(view=self._said, mesh=self._told_mesh, work=self._report_work),
            self.work,
            self.clock,
            version=__version__,
            router=self.settings.router,
        )
        self.work.changed = self._work_changed

    def _build_relay(self) -> None:
        clock = self.clock
        self.targets = NodeTargets(
            board=self.board,
            endpoints=self.engines.endpoints,
            members=lambda: self.membership.members,
            contexts=self.contexts,
            book=AddressBook(self.ingress_rules),
            is_draining=lambda: self.phase is Phase.DRAINING,
            outside=self.outside,
        )
        self.relay_metrics = RelayMetrics()
        self.access = stream_access_log(sys.stderr, clock)
        gate = Gate(
            by_der=lambda: self.membership.by_der,
            fleet=lambda: self.viewing.fleet,
            fresh=self.driver.fresh_state,
        )
        self.pool = Pool(asyncio.get_running_loop())
        self.observing = Observing(
            placing=self.placing,
            learning=self.learning,
            engines=self.engines,
            targets=self.targets,
            metrics=self.relay_metrics,
            access=self.access,
            log=self.log,
        )
        observer: Observer = self.observing
        place: Placer = self.placing
        if self.trace is not None:
            observer = TracedObserver(observer, self.trace)
            place = TracedPlacer(place, self.trace, lambda: self.board.current, lambda: self.viewing.members)
        showing = Showing(fleet=lambda: self.viewing.fleet, rtts=self._rtts, rng=new_rng())
        wiring = Wiring(
            clock=clock,
            policy=self.exchange_policy,
            pool=self.pool,
            tasks=self.tasks,
            targets=self.targets,
            breakers=self.breakers,
            dispatch=self.dispatch,
            observer=observer,
            heard_state=self.driver.record_heard,
            rng=new_rng(),
            in_hand=Hands(clock),
            holding=self.holding,
            first_bytes=EngineWaits(self.engines),
        )
        self.wiring = wiring
        self.buffered = buffered = Buffered()
        dates = Dates()
        api = self.settings.api
        self.api_roll, self.ingress_roll = Roll(clock), Roll(clock)
        ingress_front = IngressFront(
            wiring=wiring,
            admission=gate,
            local=self.work,
            endpoint_key=lambda name: f"{self.own.node_id}/{name}",
            policy=self.exchange_policy,
            roll=self.ingress_roll,
        )
        self.acceptors: dict[str, Acceptor] = {}
        self.api_fronts: list[ApiFront] = []
        for sock in self.sockets.get("api.listen", ()):
            api_front = ApiFront(
                wiring=wiring,
                place=placer_of(place, showing),
                listing=lambda: FleetListing(self.viewing.fleet, self.engines.endpoints(), clock),
                phase=lambda: self.phase,
                doors=Doors.of(sock.getsockname()[:2], api.hosts, api.origins),
                roll=self.api_roll,
                session_headers=_session_headers(self.policy),
            )
            self.api_fronts.append(api_front)
            make = partial(ServerConnection, api_front, clock, dates, buffered)
            self.acceptors[shown(sock)] = Acceptor(sock, make, self.api_roll)
        self.refused = Counter(
            "pairmesh_connections_refused_total", "Connections refused on peers' ports.", ("port", "why")
        )
        door = Door(lambda: self.membership.by_der, self.driver.serve)
        self.link_server = door.server()
        self.listeners = [
            Listener(
                port,
                self.sockets[key],
                factory,
                context=self.contexts.server,
                by_der=lambda: self.membership.by_der,
                admittance=self.admittance,
                tasks=self.tasks,
                refused=self._refused,
            )
            for port, key, factory in (
                (Port.LINK, "mesh.listen", self.link_server),
                (
                    Port.INGRESS,
                    "ingress.listen",
                    lambda: ServerConnection(ingress_front, clock, dates, buffered),
                ),
            )
        ]

    def _build_sampling(self) -> None:
        self.sampling_report = SamplingReport(self.log, self.clock.boot_ms)
        binding = binding_file()
        self.probe_report = ProbeReport(self.log, binding)
        gpus = None
        if self.settings.sampling.nvml != "off":
            gpus = NvmlClient(
                clock=self.clock,
                rng=new_rng(),
                folder=self.folders.runtime,
                environ=os.environ,
                binding=binding,
                report=self.probe_report,
                failed=self._failed,
            )
        search = os.environ.get("LD_LIBRARY_PATH", "")
        self.sampler = Sampler(
            self.settings.sampling,
            self.clock,
            SamplerPorts(
                read=HostReader(self.roots, self.clock.boot_ms, library_path=search).read,
                work=self._own_work,
                on_sampled=self._sampled,
                on_notify=self.sampling_report.notify,
                on_failed=self.sampling_report.failed,
            ),
            gpus=gpus,
        )

    def _build_residency(self) -> None:
        self.load_metrics = LoadMetrics()
        self.residency = ModelResidency(
            self.engines,
            ResidencySources(
                fleet=lambda: self.viewing.fleet,
                free_mib=lambda: load_memory_mib(self.sampler.latest, self.clock.boot_ms()),
                level=self._level,
                used=self.learning.used,
            ),
            ResidencyListeners(changed=self.speaking.models_moved, loaded=self.learning.loaded),
            leaving=self.leaving,
            clock=self.clock,
            rng=new_rng(),
            tasks=self.tasks,
            log=self.log,
            metrics=self.load_metrics,
            policy=self.residency_policy,
        )

    def _build_admin(self) -> None:
        self.registry.add(
            self.observing,
            self.decisions,
            self.relay_metrics,
            self.load_metrics,
            LiveFigures(
                fleet=lambda: self.viewing.fleet,
                ledger=self.ledger,
                breakers=self.breakers,
                hold=self.hold,
                connections=lambda: {"api": len(self.api_roll), "ingress": len(self.ingress_roll)},
                held_bytes=lambda: self.buffered.held,
                now=self.clock.boot_ms,
            ),
            self.alarms,
            self.journal,
            self.access,
            self.refused,
            self.sampling_report,
            self.probe_report,
            ViewMetrics(lambda: self.board.current, self.clock.boot_ms),
        )
        self.admin = AdminServer(
            Routes(
                status=NodePicture(
                    membership=self.membership,
                    board=self.board,
                    mesh=lambda: self.machine.picture(self.clock.boot_ms()),
                    addresses=self.shown_addresses,
                    faults=lambda: (*self.faults, *self.reloading.faults),
                    policy=lambda: self.viewing.fleet.policy,
                    drains=self.drains.docs,
                    clock=self.clock,
                ),
                decisions=Recalling(self.placing, self.journal, self.observing.settle),
                dry_runs=DryRuns(self.placing, new_rng()),
                exposition=self.registry,
                verbs={
                    **trust_verbs(self.membership, self.own.node_id, lambda: self.addresses, self.journal),
                    **drain_verbs(self.drains, self.engines.endpoints, self.journal),
                },
                log=self.log,
            ),
            hosts=self.settings.api.hosts,
            origins=self.settings.api.origins,
        )

    # --- wires -----------------------------------------------------------------------------------------------

    def _failed(self, name: str, exc: BaseException) -> None:
        report_crash(self.log, "task.failed", exc, task=name)

    def _fault(self, text: str) -> None:
        self.faults.append(text)

    def _refused(self, port: Port, why: Refusal) -> None:
        self.refused.inc(port.value, why.value)

    def _heard(self, changes: Sequence[ViewChange]) -> None:
        if self.trace is not None:
            self.trace.records(changes)
        self.viewing.heard(changes)
        self.holding.news()

    def _engine_changed(self, status: EndpointStatus, urgent: bool) -> None:
        self.speaking.engine_changed(status, urgent)
        if urgent:
            self.residency.noticed()

    def _sampled(self, sampled: Sampled, urgent: bool) -> None:
        self.speaking.sampled(sampled, urgent)
        self.residency.sampled(urgent)

    def _level(self) -> Level | None:
        sampled = self.sampler.latest
        return node_level(sampled, self.clock.boot_ms()) if sampled is not None else None

    def _work_changed(self, endpoint: str) -> None:
        self.speaking.work_changed(endpoint)
        self.sampler.worked()

    def _report_work(self, endpoint: str, in_flight: int, began: bool) -> None:
        if endpoint in self.engines.endpoints():
            self.engines.report_work(endpoint, in_flight, began=began)

    def _cut_off(self, endpoint: str) -> None:
        for request in tuple(self.wiring.in_hand):
            request.cut_off(f"{self.own.node_id}/{endpoint}")

    def _said(self, static: Static, volatile: Volatile) -> None:
        self.viewing.said(static, volatile, OWN_DUE_MS)
        self.holding.news()

    def _told_mesh(self, static: Static, volatile: Volatile, urgent: bool) -> None:
        self.driver.body_changed(volatile, static, urgent=urgent)

    def _told_addresses(self, node_id: NodeId, addresses: tuple[Address, ...]) -> None:
        self.driver.sighted(node_id, [Endpoint(ip_address(addr.ip), addr.mesh_port) for addr in addresses])

    def _own_work(self) -> OwnWork:
        local = [each for each in self.engines.endpoints().values() if not each.manifest.remote_host]
        up = [status for status in local if status.health.takes_requests]
        return own_work(up, self.work.in_flight, ordering=self.residency.ordering)

    def _rtts(self) -> dict[Id16, int]:
        members = self.machine.picture(self.clock.boot_ms()).members
        return {member.id16: member.rtt_ms for member in members if member.rtt_ms is not None}

    def _credential(self, name: str) -> str:
        folder = os.environ.get("CREDENTIALS_DIRECTORY")
        path = (Path(folder) if folder else self.folders.state / "credentials") / name
        try:
            with path.open("rb") as file:
                return file.read(SECRET_MOST).decode("ascii").strip()
        except (OSError, UnicodeDecodeError):
            raise RefuseToStart(
                "credential_unreadable", f"{path} cannot be read: it is named as a credential"
            ) from None

    def shown_addresses(self) -> dict[str, str]:
        """Where this node listens, by name."""
        shown_by_key = {key.partition(".")[0]: shown(socks[0]) for key, socks in self.sockets.items()}
        return shown_by_key | {"admin": str(self.settings.admin), "socket": str(self.folders.admin_socket)}

    def own_addresses(self) -> tuple[Address, ...]:
        """Where this node can be dialled; only what a peer may be told (ports below 1024 never are)."""
        hosts = [str(ip) for ip in own_addresses(self.settings.mesh.listen)]
        return addresses_of(hosts, self._port("mesh.listen"), self._port("ingress.listen"))
