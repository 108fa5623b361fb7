"""One relay with a local API before recording upstreams, everything else scripted and recorded."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from random import Random

from agent.effects.clock import Clock, SystemClock
from agent.effects.tasks import Tasks
from agent.relay.forwarding.context import Hands, Wiring
from agent.relay.frontends.local import ApiFront, Doors
from agent.relay.http.acceptor import Acceptor, Roll
from agent.relay.http.connection import ServerConnection
from agent.relay.http.frontend import Buffered
from agent.relay.http.headers import Dates
from agent.relay.ports import (
    AccessLine,
    Admits,
    Asked,
    AttemptReport,
    FirstBytes,
    Held,
    NobodyAsks,
    Observer,
    Offered,
    PeerRoute,
    Phase,
    Placer,
    Queued,
    Routed,
    RouteHeader,
    Turned,
)
from agent.relay.upstream.pool import Pool
from router_core.ids import Id32, NodeId, NodeName
from router_core.placement.queueing.hold import Waiting
from router_core.placement.reasons import HintOutcome
from router_core.placement.request.request import Endpoint, HintNote, RequestClass
from router_core.policy.exchange import ExchangePolicy, Hedge
from router_core.record.membership import Liveness, Member
from router_core.record.state import Dialect
from router_core.router.failure import FailureClass
from router_core.router.router import Router
from router_core.view.cluster import NodeView
from router_core.view.fold import empty
from tests.support.routes import a_choice, a_route


def at(endpoint: str, node: str = "") -> Endpoint:
    """The key of an endpoint in these tests."""
    return f"{node}/{endpoint}"


@dataclass(slots=True)
class Local:
    """A local engine at a port of this host."""

    name: str
    port: int
    ip: str = "127.0.0.1"
    authorization: str | None = None
    pass_headers: frozenset[bytes] = frozenset()
    off_host: bool = False
    connect_ms: int = 2_000
    first_byte_ms: int = 0
    idle_ms: int = 300_000
    connections: int = 64
    spelled: str | None = None
    base: bytes = b"/v1"
    tls: ssl.SSLContext | None = None
    admits: Admits | None = None

    @property
    def host(self) -> bytes:
        return b"%s:%d" % (self.ip.encode(), self.port)

    def path_of(self, path: bytes) -> bytes:
        return self.base + path[len(b"/v1") :] if path.startswith(b"/v1/") else path

    def upstream_name(self, served: str) -> str:
        return self.spelled or served

    def classify(self, status: int, prefix: bytes) -> Enum:
        return classify(status, prefix)


def classify(status: int, prefix: bytes) -> FailureClass:
    """A plain OpenAI engine's classes, as far as these tests need them."""
    if status in (429, 503, 529):
        return FailureClass.BUSY
    if status == 404:
        return FailureClass.ABSENT if b'"error"' in prefix else FailureClass.ROUTE
    return FailureClass.AUTH if status in (401, 403) else FailureClass.OTHER


@dataclass(slots=True)
class Fleet:
    """Targets and choices: endpoints are tried in order; ``peers`` maps a node to its ingress. An endpoint in ``room``
    takes so many requests at a time; if only full ones are left, a request is held for ``hold_ms``, or told so."""

    order: list[tuple[str, str]] = field(default_factory=list)
    locals: dict[str, Local] = field(default_factory=dict)
    peers: dict[str, PeerRoute] = field(default_factory=dict)
    alive: dict[str, Liveness] = field(default_factory=dict)
    pictures: dict[Endpoint, NodeView] = field(default_factory=dict)
    served: str = "m"
    until_ms: int | None = None
    room: dict[str, int] = field(default_factory=dict)
    hold_ms: int | None = None
    hedge: Hedge = Hedge.OFF
    turned: Turned | None = None
    break_at: str = ""
    consult: Callable[[], Coroutine[None, None, None]] | None = None
    open_seqs: dict[int, str] = field(default_factory=dict)
    decisions: int = 0
    asked: list[Asked] = field(default_factory=list)

    def add(self, local: Local) -> Local:
        self.locals[local.name] = local
        self.order.append(("", local.name))
        return local

    def local(self, endpoint: str) -> Local | None:
        return self.locals.get(endpoint)

    def peer(self, node: NodeId) -> PeerRoute | None:
        return self.peers.get(node)

    def peer_classify(self, node: NodeId, endpoint: str, status: int, prefix: bytes) -> Enum:
        return classify(status, prefix)

    def liveness(self, node: NodeId) -> Liveness:
        return self.alive.get(node, Liveness.FRESH)

    def picture(self, endpoint: Endpoint) -> NodeView | None:
        return self.pictures.get(endpoint)

    def fail_at(self, where: str) -> None:
        if self.break_at == where:
            raise RuntimeError("on purpose")

    def place(self, asked: Asked) -> "Chooser":
        self.asked = [*self.asked[-99:], asked]
        return Chooser(self, asked)


class Chooser:
    """Chooses for one request: the first endpoint that was not tried."""

    def __init__(self, fleet: Fleet, asked: Asked) -> None:
        self._fleet = fleet
        self._asked = asked
        self.until_ms = fleet.until_ms
        self._held_since: int | None = None
        self._seqs: dict[int, int] = {}

    def consult(self) -> Coroutine[None, None, None] | None:
        return None if self._fleet.consult is None else self._fleet.consult()

    def decide(
        self,
        *,
        attempt: int,
        tried: frozenset[Endpoint],
        refused: frozenset[Endpoint],
        now: int,
        declined: frozenset[Endpoint] = frozenset(),
    ) -> Routed | Turned | Queued:
        fleet = self._fleet
        fleet.fail_at("decide")
        if fleet.turned is not None:
            return fleet.turned
        fleet.decisions += 1
        full = False
        for node, endpoint in fleet.order:
            key = at(endpoint, node)
            if key in tried or key in refused:
                continue
            if list(fleet.open_seqs.values()).count(endpoint) >= fleet.room.get(endpoint, 1_000):
                full = True
                continue
            fleet.open_seqs[fleet.decisions] = endpoint
            self._seqs[attempt] = fleet.decisions
            return a_route(
                a_choice(endpoint, node=node, key=key, model=fleet.served),
                attempt=attempt,
                called=f"d{fleet.decisions}",
                seq=fleet.decisions,
                hints=(HintNote(hint="class", outcome=HintOutcome.HONOURED),),
                held_ms=self.held_ms(now),
            )
        return self._full(now) if full else Turned(decision_id="none", status=502, code="tried")

    def _full(self, now: int) -> Turned | Queued:
        turned = Turned(decision_id="full", status=429, code="queue_full", retry_after_s=7)
        if self._fleet.hold_ms is None:
            return turned
        if self._held_since is None:
            self._held_since = now
        waiting = Waiting(
            ticket=id(self),
            request_class=RequestClass.INTERACTIVE,
            caller=self._asked.caller,
            kind="m",
            seconds=1.0,
            body_bytes=self._asked.body_bytes,
            since_ms=self._held_since,
            deadline_ms=now + 600_000,
        )
        return Queued(waiting=waiting, until_ms=self._held_since + self._fleet.hold_ms, turned=turned)

    @property
    def hedge(self) -> Hedge:
        return self._fleet.hedge

    def has_other(self, *, tried: frozenset[Endpoint], refused: frozenset[Endpoint], now: int) -> bool:
        return any(at(endpoint, node) not in tried | refused for node, endpoint in self._fleet.order)

    def spare(
        self,
        *,
        beside: Routed,
        attempt: int,
        tried: frozenset[Endpoint],
        refused: frozenset[Endpoint],
        now: int,
    ) -> Routed | None:
        chosen = self.decide(attempt=attempt, tried=tried, refused=refused, now=now)
        return chosen if isinstance(chosen, Routed) else None

    def held_ms(self, now: int) -> int | None:
        return None if self._held_since is None else now - self._held_since

    def first_token(self, attempt: int) -> None:
        self._fleet.fail_at("first_token")
        assert self._seqs[attempt] in self._fleet.open_seqs

    def end(self, attempt: int) -> None:
        del self._fleet.open_seqs[self._seqs.pop(attempt)]


@dataclass(slots=True)
class Gate:
    """Admission that says ``cause`` to everything."""

    cause: str | None = None
    members: dict[bytes, Member] = field(default_factory=dict)
    state: tuple[bytes, bytes] | None = None
    admitted: list[tuple[RouteHeader, str]] = field(default_factory=list)

    def member(self, der: bytes) -> Member | None:
        return self.members.get(der)

    def admit(self, route: RouteHeader, model: str, dialect: Dialect) -> str | None:
        if self.cause is None:
            self.admitted.append((route, model))
        return self.cause

    def asked_about(self, route: RouteHeader, model: str, dialect: Dialect) -> str | None:
        return self.cause

    def service_ms(self, route: RouteHeader, model: str) -> float:
        return 100.0

    def fresh_state(self) -> tuple[bytes, bytes] | None:
        return self.state


@dataclass(slots=True)
class Listed:
    generation: int = 1
    names: list[tuple[str, Dialect]] = field(default_factory=lambda: [("m", Dialect.CHAT)])
    running: list[Held] = field(default_factory=list)
    ollama: list[str] = field(default_factory=list)
    aka: list[tuple[str, Dialect]] = field(default_factory=list)

    def offered(self) -> Iterable[Offered]:
        return [Offered(name=name, dialects=dialects) for name, dialects in self.names]

    def held(self) -> Iterable[Held]:
        return self.running

    def versions(self) -> Iterable[str]:
        return self.ollama

    def aliases(self) -> Iterable[tuple[str, Dialect]]:
        return self.aka


@dataclass(slots=True)
class Watch:
    """Keeps what the relay reports, unless told to ``forget``; a fault in its own code fails the test at the end."""

    forget: bool = False
    refuse: bool = False

    attempts: list[AttemptReport] = field(default_factory=list)
    lines: list[AccessLine] = field(default_factory=list)
    faults: list[tuple[str, BaseException]] = field(default_factory=list)

    def attempted(self, report: AttemptReport) -> None:
        if self.refuse:
            raise RuntimeError("on purpose")
        if not self.forget:
            self.attempts.append(report)

    def answered(self, line: AccessLine) -> None:
        if not self.forget:
            self.lines.append(line)

    def failed(self, where: str, exc: BaseException) -> None:
        self.faults.append((where, exc))

    def results(self) -> list[str]:
        return [report.outcome.result.value for report in self.attempts]


@dataclass(slots=True)
class Relay:
    """A running relay. ``port`` is its API."""

    fleet: Fleet
    gate: Gate
    watch: Watch
    wiring: Wiring
    roll: Roll
    listed: Listed
    buffered: Buffered
    clock: Clock
    states: list[tuple[bytes, bytes]]
    full: list[bool] = field(default_factory=list)
    port: int = 0
    phase: Phase = Phase.SERVING

    def assert_idle(self) -> None:
        """Nothing is left in hand."""
        assert not self.wiring.in_hand
        assert not self.fleet.open_seqs
        assert not self.wiring.router.queue
        assert not len(self.wiring.router.lateness)
        assert self.buffered.held == 0


def a_router(clock: Clock, policy: ExchangePolicy) -> Router:
    """A router that knows of no node."""
    view = empty(Id32(bytes(32)), NodeName("here"))
    return Router(view, rng=Random(1), now=clock.boot_ms(), exchange=policy)


def build(
    clock: Clock | None = None,
    policy: ExchangePolicy | None = None,
    first_bytes: FirstBytes | None = None,
    observer: Observer | None = None,
    router: Router | None = None,
) -> Relay:
    """A relay without listeners; its tasks report to ``watch``, and so do its requests unless to ``observer``."""
    clock = clock or SystemClock()
    fleet, gate, watch = Fleet(), Gate(), Watch()
    states: list[tuple[bytes, bytes]] = []
    policy = policy or ExchangePolicy()
    wiring = Wiring(
        clock=clock,
        policy=policy,
        pool=Pool(asyncio.get_running_loop()),
        tasks=Tasks(watch.failed),
        targets=fleet,
        router=router or a_router(clock, policy),
        observer=observer or watch,
        heard_state=lambda signed, signature: states.append((signed, signature)),
        rng=Random(1),
        in_hand=Hands(clock),
        first_bytes=first_bytes or NobodyAsks(),
    )
    return Relay(
        fleet=fleet,
        gate=gate,
        watch=watch,
        wiring=wiring,
        roll=Roll(clock),
        listed=Listed(),
        buffered=Buffered(),
        clock=clock,
        states=states,
    )


def bound() -> socket.socket:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    return sock


@asynccontextmanager
async def running(
    *upstreams: int,
    clock: Clock | None = None,
    policy: ExchangePolicy | None = None,
    doors_of: Callable[[int], Doors] | None = None,
    most: int = 1_024,
    first_bytes: FirstBytes | None = None,
    place: Placer | None = None,
    observer: Observer | None = None,
    router: Router | None = None,
) -> AsyncIterator[Relay]:
    """A relay whose API is up, with one local endpoint ``e0``, ``e1``... per upstream port. ``place`` chooses among them,
    else they are tried in order."""
    relay = build(clock, policy, first_bytes, observer, router)
    for number, port in enumerate(upstreams):
        relay.fleet.add(Local(f"e{number}", port))
    sock = bound()
    address = sock.getsockname()
    front = ApiFront(
        wiring=relay.wiring,
        place=place or relay.fleet.place,
        listing=lambda: relay.listed,
        phase=lambda: relay.phase,
        doors=doors_of(address[1]) if doors_of else Doors.of(address),
        roll=relay.roll,
    )
    dates = Dates()
    acceptor = Acceptor(
        sock,
        lambda: ServerConnection(front, relay.clock, dates, relay.buffered),
        relay.roll,
        most=most,
        full=relay.full.append,
    )
    relay.port = acceptor.address[1]
    relay.wiring.tasks.spawn(acceptor.run(relay.wiring.tasks), "accept")
    try:
        yield relay
    finally:
        for connection in relay.roll:
            connection.abort()
        await relay.wiring.tasks.aclose()
        relay.wiring.pool.close()
        await asyncio.sleep(0)
        assert relay.watch.faults == []
