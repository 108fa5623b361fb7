"""The rooms that carry requests: from clients and peers, to engines and peers."""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from agent.assembly.ground import Ground
from agent.assembly.host import HostRooms
from agent.assembly.mesh import MeshRooms, TrustRooms
from agent.assembly.placement import PlacementRooms
from agent.assembly.ports import Ports
from agent.effects.entropy import new_rng
from agent.effects.tasks import Tasks
from agent.identity.admittance import Refusal
from agent.identity.listener import Listener
from agent.identity.routes import Port
from agent.mesh.door import Door
from agent.node.config.ports import shown
from agent.node.routing.ingress_gate import Gate
from agent.node.routing.observer import EngineWaits, Observing
from agent.node.routing.probes import Probing
from agent.node.routing.questions import Showing, placer_of
from agent.node.routing.reachability import Reach
from agent.node.routing.targets import NodeTargets
from agent.node.routing.trace import Trace, TracedObserver, TracedPlacer
from agent.node.status.listing import FleetListing
from agent.observe.access import AccessLog
from agent.observe.instruments import RelayMetrics
from agent.observe.metrics import Counter
from agent.relay.forwarding.context import Hands, Wiring, own_requests
from agent.relay.frontends.ingress import IngressFront
from agent.relay.frontends.local import ApiFront, Doors
from agent.relay.http.acceptor import Acceptor, Roll
from agent.relay.http.connection import ServerConnection
from agent.relay.http.frontend import Buffered
from agent.relay.http.headers import Dates
from agent.relay.ports import Observer, Phase, Placer
from agent.relay.upstream.pool import Pool
from router_core import limits
from router_core.ids import Id16, MeshId, parse_node_id
from router_core.policy.placement import PlacementPolicy
from router_core.record.membership import Member

FULL_LINE_MS: Final = 10_000
_FULL: Final = {
    "idle_longest": "the connection idle longest made room: have clients close or share theirs",
    "none_idle": "every connection has a request: others wait until one ends",
}
_HALF_OPEN: Final = {
    Refusal.PER_IP: (
        limits.UNAUTHENTICATED_PER_IP,
        "one address has so many that never finish: 'ss -tn' shows which; block it",
    ),
    Refusal.UNAUTHENTICATED: (
        limits.UNAUTHENTICATED,
        "so many never finish: 'ss -tn' shows from where; members' known addresses get in",
    ),
}
"""Most connections whose handshake is not over, and what to do about those that keep others out."""


def _session_headers(policy: PlacementPolicy) -> frozenset[bytes]:
    return frozenset(name.encode("ascii") for name in policy.session_headers)


class RelayRooms:
    """Built on the loop. ``phase`` is asked at each request; ``trace`` hears of each."""

    def __init__(
        self,
        ground: Ground,
        trust: TrustRooms,
        placement: PlacementRooms,
        mesh: MeshRooms,
        host: HostRooms,
        tasks: Tasks,
        ports: Ports,
        *,
        phase: Callable[[], Phase],
        trace: Trace | None,
    ) -> None:
        clock, api = ground.clock, ground.settings.api
        membership, engines = trust.membership, host.engines
        self._node_id = ground.own.node_id
        self.reach = Reach(clock)
        self.targets = NodeTargets(
            board=placement.board,
            endpoints=engines.endpoints,
            members=lambda: membership.members,
            contexts=trust.contexts,
            book=mesh.book,
            ways=mesh.driver.ways_to,
            reach=self.reach,
            is_draining=lambda: phase() is Phase.DRAINING,
            outside=mesh.outside,
        )
        self.metrics = RelayMetrics()
        self.access = AccessLog(ground.log.lines, clock, human=ground.log.is_human)
        self.pool = Pool(asyncio.get_running_loop())
        self.probing = Probing(
            reach=self.reach,
            targets=self.targets,
            pool=self.pool,
            members=lambda: membership.members,
            is_linked=lambda peer: bool(mesh.driver.ways_to(peer)),
            connect_ms=placement.exchange_policy.connect_ms,
            clock=clock,
            tasks=tasks,
        )
        self.observing = Observing(
            placing=placement.placing,
            learning=placement.learning,
            engines=engines,
            targets=self.targets,
            metrics=self.metrics,
            access=self.access,
            log=ground.log,
            limits=host.limits,
            learned=placement.viewing.learned,
        )
        observer: Observer = self.observing
        place: Placer = placement.placing
        if trace is not None:
            viewing, board = placement.viewing, placement.board
            observer = TracedObserver(observer, trace)
            place = TracedPlacer(place, trace, lambda: board.current, lambda: viewing.members)
        showing = Showing(fleet=placement.fleet, rtts=mesh.rtts, rng=new_rng())
        self.wiring = Wiring(
            clock=clock,
            policy=placement.exchange_policy,
            pool=self.pool,
            tasks=tasks,
            targets=self.targets,
            router=placement.router,
            observer=observer,
            heard_state=mesh.driver.record_heard,
            rng=new_rng(),
            in_hand=Hands(clock),
            first_bytes=EngineWaits(engines),
        )
        self._log = ground.log
        self._clock = clock
        self._full_at: int | None = None
        self.refused = Counter(
            "pairmesh_connections_refused_total", "Connections refused, or left waiting.", ("port", "why")
        )
        engines.progress = lambda name: own_requests(self.wiring.in_hand, self._endpoint_key(name))
        self.buffered = Buffered()
        dates = Dates()
        self.api_roll, self.ingress_roll = Roll(clock), Roll(clock)
        self.acceptors: dict[str, Acceptor] = {}
        self._api_fronts: list[ApiFront] = []
        for sock in ports.api:
            front = ApiFront(
                wiring=self.wiring,
                place=placer_of(place, showing),
                listing=lambda: FleetListing(placement.fleet(), engines.endpoints(), clock),
                phase=phase,
                doors=Doors.of(sock.getsockname()[:2], api.hosts, api.origins),
                roll=self.api_roll,
                session_headers=_session_headers(placement.policy),
            )
            self._api_fronts.append(front)
            make = partial(ServerConnection, front, clock, dates, self.buffered)
            self.acceptors[shown(sock)] = Acceptor(
                sock, make, self.api_roll, exhausted=partial(self._out_of_descriptors, "api"), full=self._full
            )
        ingress = IngressFront(
            wiring=self.wiring,
            admission=Gate(
                by_der=lambda: membership.by_der, fleet=placement.fleet, fresh=mesh.driver.fresh_state
            ),
            local=placement.work,
            endpoint_key=self._endpoint_key,
            policy=placement.exchange_policy,
            roll=self.ingress_roll,
        )
        self.link_server = Door(lambda: membership.by_der, mesh.driver.serve).server()
        self.listeners = [
            Listener(
                port,
                socks,
                factory,
                context=trust.contexts.server,
                by_der=lambda: membership.by_der,
                admittance=trust.admittance,
                tasks=tasks,
                refused=self._refuse,
                is_known=mesh.is_members,
            )
            for port, socks, factory in (
                (Port.LINK, ports.link, self.link_server),
                (
                    Port.INGRESS,
                    ports.ingress,
                    lambda: ServerConnection(ingress, clock, dates, self.buffered),
                ),
            )
        ]

    def members_changed(self, members: Mapping[Id16, Member], mesh_id: MeshId) -> None:
        """The roster changed: whoever left it is not connected to any more."""
        self.targets.members_changed(members, mesh_id)
        known = {member.node_id for member in members.values()}
        self.pool.drop(lambda owner: parse_node_id(owner) is not None and owner not in known)

    def adopt(self, policy: PlacementPolicy) -> None:
        """Name sessions as ``policy`` does."""
        for front in self._api_fronts:
            front.name_sessions(_session_headers(policy))

    def cut_off(self, endpoint: str) -> None:
        """End what is in flight at an own endpoint: it goes elsewhere, or its client is told."""
        for request in tuple(self.wiring.in_hand):
            request.cut_off(self._endpoint_key(endpoint))

    def _endpoint_key(self, name: str) -> str:
        return f"{self._node_id}/{name}"

    def _refuse(self, port: Port, why: Refusal) -> None:
        if why is Refusal.DESCRIPTORS:
            self._out_of_descriptors(port.value)
        else:
            self.refused.inc(port.value, why.value)
            if why in _HALF_OPEN:
                limit, cure = _HALF_OPEN[why]
                self._log.warning(
                    "connections.refused", port=port.value, reason=why.value, limit=limit, why=cure
                )

    def _full(self, made_room: bool) -> None:
        why = "idle_longest" if made_room else "none_idle"
        self.refused.inc("api", why)
        now = self._clock.boot_ms()
        if self._full_at is None or now - self._full_at >= FULL_LINE_MS:
            self._full_at = now
            self._log.warning("connections.full", port="api", most=limits.API_CONNECTIONS, why=_FULL[why])

    def _out_of_descriptors(self, port: str) -> None:
        self.refused.inc(port, Refusal.DESCRIPTORS.value)
        self._log.warning("accept.paused", port=port, why="no descriptor is left: raise LimitNOFILE")
