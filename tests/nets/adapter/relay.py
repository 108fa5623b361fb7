"""One node's relay and placement as the daemon wires them, with sockets, clock, engines and peers in the hands of a
driver that speaks plain data. Nothing awaits: a step is a call, and what it did is read from ``took``.
"""

import re
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping
from random import Random
from types import SimpleNamespace
from typing import Any, Final

from agent.board import Board
from agent.node.config.drains import Drains
from agent.node.routing.learning import Learning
from agent.node.routing.observer import Observing
from agent.node.routing.placement import Placing
from agent.node.state.view import Viewing
from agent.node.state.work import WatchedWork
from agent.observe.instruments import DecisionMetrics, RelayMetrics
from agent.observe.log import Log
from agent.relay.forwarding.context import Hands, Wiring, sweep_lateness
from agent.relay.frontends.local import ApiFront, Doors
from agent.relay.http.acceptor import Roll
from agent.relay.http.frontend import Answer
from agent.relay.http.parser import HeadReader
from agent.relay.http.parser import Request as Parsed
from agent.relay.ports import AccessLine, PeerRoute, Phase
from agent.relay.upstream.connection import AnswerHead
from agent.relay.upstream.pool import ConnectFailed
from router_core.ids import MeshId, NodeId, NodeName, id8_of, node_id_of
from router_core.placement.decision.ids import DecisionIds
from router_core.placement.record import DecisionRecord
from router_core.placement.request.request import Endpoint
from router_core.profile.profiles import Profiles
from router_core.record.membership import Liveness
from router_core.router.failure import Cause, FailureClass
from router_core.router.router import Router
from router_core.view.cluster import NodeView
from router_core.view.fold import empty
from tests.nets.adapter.router import (
    INST,
    OF_IDS,
    POLICIES,
    a_member,
    change_of,
    endpoint_key,
    exchange_policy,
    id16,
    id32,
    profile_policy,
    static,
    volatile,
)
from tests.nets.canonical import plain
from tests.nets.draw import NOW, OWN

MESH: Final = MeshId(bytes(16))
PORT: Final = 11_433
_IDS: Final = re.compile(rb"(x-pairmesh-decision-id: )\S+|(x-request-id: )[0-9a-f]{32}")
_ROUTE: Final = re.compile(rb"x-pairmesh-route: \S*;i=(\d+);s=(\d+);")
_DECIDED: Final = re.compile(rb";d=[A-Za-z0-9]+;")
_DRAINING_ENGINE: Final = 4
_CLASSES: Final = {
    429: FailureClass.BUSY,
    503: FailureClass.BUSY,
    404: FailureClass.ABSENT,
    401: FailureClass.AUTH,
}


class HandClock:
    """Time moves when the driver says so."""

    def __init__(self) -> None:
        self.now = NOW

    def boot_ms(self) -> int:
        return self.now

    def boot_us(self) -> int:
        return 1_000 * self.now

    def wall_ms(self) -> int:
        return 1_700_000_000_000 + self.now


class _Hands(Hands):
    """Requests in hand; the driver wakes them, no loop does."""

    def wake_at(self, due: int, now: int) -> None:
        return


class Dial:
    """A connection that is being made: the driver says what comes of it."""

    def __init__(self, node: "RelayNode", owner: str) -> None:
        self._node = node
        self.at = owner
        self._waits: Coroutine[Any, Any, Any] | None = None
        self.number = node.next_number()

    def __await__(self) -> Generator["Dial", str | None, str | None]:
        return (yield self)

    def begun_by(self, task: Coroutine[Any, Any, Any]) -> None:
        self._waits = task

    def comes_to(self, cause: str | None) -> None:
        """The connection stands, or failed for this cause. Of no effect if nobody waits for it any more."""
        task, self._waits = self._waits, None
        if task is not None:
            try:
                task.send(cause)
            except StopIteration:
                return

    def cancel(self) -> None:
        task, self._waits = self._waits, None
        if task is not None:
            task.close()


class _Tasks:
    """Background work of the relay, of which there is only dialling."""

    def __init__(self) -> None:
        self.begun: list[_Task] = []

    def spawn(self, coro: Coroutine[Any, Any, Any], name: str) -> "_Task":
        task = _Task(coro)
        self.begun.append(task)
        return task


class _Task:
    def __init__(self, coro: Coroutine[Any, Any, Any]) -> None:
        self._coro = coro
        self._dial: Dial | None = None
        self._is_over = False

    def begin(self) -> Dial | None:
        """Run up to the wait for the connection."""
        if self._is_over:
            return None
        try:
            dial = self._coro.send(None)
        except StopIteration:
            return None
        assert isinstance(dial, Dial)
        self._dial = dial
        dial.begun_by(self._coro)
        return dial

    def cancel(self) -> None:
        self._is_over = True
        if self._dial is not None:
            self._dial.cancel()
        else:
            self._coro.close()


class Upstream:
    """One connection to an engine or a peer. ``what`` it is asked for shows in ``took``; the driver answers."""

    reused = False

    def __init__(self, node: "RelayNode", owner: str, *, reused: bool = False) -> None:
        self._node = node
        self._sink: Any = None
        self.at = owner
        self.reused = reused
        self.transport = self
        self.number = node.next_number()
        self.stream = False

    # what the relay does

    def start(self, sink: Any) -> None:
        self._sink = sink

    def send(self, head: bytes, body: bytes | bytearray) -> None:
        self._note("request", head=_plain_head(head), body=bytes(body).decode())

    def send_head(self, head: bytes) -> None:
        found = _ROUTE.search(head)
        assert found is not None
        self._note("head", head=_plain_head(head), seq=int(found[2]))

    def send_body(self, body: bytes | bytearray) -> None:
        self._note("body", body=bytes(body).decode())

    def send_no_body(self) -> None:
        self._note("no body")

    def abort(self) -> None:
        self._sink = None
        self._note("abort")

    def pause_reading(self) -> None:
        self._note("pause")

    def resume_reading(self) -> None:
        self._note("resume")

    def _note(self, what: str, **more: Any) -> None:
        self._node.tell({"upstream": what, "at": self.at} | more, self)

    # what the other side does

    @property
    def is_open(self) -> bool:
        return self._sink is not None

    def continues(self) -> None:
        if self._sink is not None:
            self._sink.continued()

    def answers(self, status: int, headers: Iterable[tuple[bytes, bytes]], length: int | None = None) -> None:
        if self._sink is not None:
            self._sink.head(AnswerHead(status, list(headers), reusable=True), length)

    def says(self, data: bytes, *, ends: bool = False) -> None:
        sink = self._sink
        if ends:
            self._sink = None
        if sink is not None:
            sink.data(data, ends)

    def breaks(self, cause: str) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.lost(Cause(cause), self.reused)


def _plain_head(head: bytes) -> list[str]:
    """The lines of a request's head without ids."""
    lines = _DECIDED.sub(b";d=;", _IDS.sub(rb"\1\2id", head)).decode("latin-1").split("\r\n")
    return sorted(line for line in lines if line and not line.startswith("traceparent"))


class _Pool:
    """Gives no connection but those that the driver lets be idle."""

    def __init__(self, node: "RelayNode") -> None:
        self._node = node

    def take(self, target: Any) -> Upstream | None:
        at = self._node.name_of(target.owner)
        return Upstream(self._node, at, reused=True) if self._node.has_idle(at) else None

    async def connect(self, target: Any, options: Any) -> Upstream:
        at = self._node.name_of(target.owner)
        cause = await Dial(self._node, at)
        if cause is not None:
            raise ConnectFailed(Cause(cause))
        return Upstream(self._node, at)


class _Engine:
    """A local endpoint as the relay sees it."""

    ip, port, host, off_host, tls, admits = "127.0.0.1", 8080, b"127.0.0.1:8080", False, None, None
    pass_headers: frozenset[bytes] = frozenset()
    authorization: str | None = None
    connections = 64

    def __init__(self, told: Mapping[str, Any]) -> None:
        self.name = told["name"]
        self.connect_ms = told["connect_ms"]
        self.first_byte_ms = told["first_byte_ms"]
        self.idle_ms = told["idle_ms"]

    def path_of(self, path: bytes) -> bytes:
        return path

    def upstream_name(self, served: str) -> str:
        return f"{served}.gguf"

    def classify(self, status: int, prefix: bytes) -> FailureClass:
        return _CLASSES.get(status, FailureClass.OTHER)


class _Targets:
    """Where endpoints are."""

    def __init__(self, node: "RelayNode", engines: Iterable[Mapping[str, Any]], peers: Iterable[str]) -> None:
        self._node = node
        self._engines = {told["name"]: _Engine(told) for told in engines}
        self._peers = {node_id_of(id32(name)): _a_peer(name) for name in peers}
        self.classes = _Engine({"name": "", "connect_ms": 0, "first_byte_ms": 0, "idle_ms": 0})

    def local(self, endpoint: str) -> _Engine | None:
        return None if self._node.is_draining(endpoint) else self._engines.get(endpoint)

    def peer(self, node: NodeId) -> PeerRoute | None:
        return self._peers.get(node)

    def peer_classify(self, node: NodeId, endpoint: str, status: int, prefix: bytes) -> FailureClass:
        return self.classes.classify(status, prefix)

    def liveness(self, node: NodeId) -> Liveness:
        found = self._of(node)
        return Liveness.GONE if found is None else found.liveness

    def picture(self, endpoint: Endpoint) -> NodeView | None:
        return self._of(NodeId(endpoint.partition("/")[0]))

    def _of(self, node: NodeId) -> NodeView | None:
        nodes = self._node.board.current.nodes.values()
        return next((each for each in nodes if each.node_id == node), None)


def _a_peer(name: str) -> PeerRoute:
    context: Any = None
    return PeerRoute(
        node=node_id_of(id32(name)),
        addresses=(("127.0.0.1", 1),),
        context=context,
        build=1,
        pin=name.encode(),
    )


class Client:
    """The client of one life: what it is written shows in ``took``."""

    caller: Any = None
    idle_since: int | None = None

    def __init__(self, node: "RelayNode", life: int) -> None:
        self._node = node
        self._life = life
        self.work: Any = None
        self.is_over = False

    def reply(self, answer: Answer) -> None:
        lines = b"".join([b"%s: %s\n" % pair for pair in answer.headers])
        self._over(
            "reply",
            status=answer.status,
            head=_plain_lines(lines),
            body=answer.body.decode(),
            keep=answer.keep,
        )

    def begin(self, status: int, lines: bytes, length: int | None) -> None:
        self._note("begin", status=status, head=_plain_lines(lines), length=length)

    def push(self, data: bytes) -> None:
        self._note("push", data=data.decode())

    def flush(self) -> None:
        return

    def end(self) -> None:
        self._over("end")

    def cut(self, last: bytes) -> None:
        self._over("cut", data=last.decode())

    def abort(self) -> None:
        self._over("abort")

    def release_body(self) -> None:
        return

    def _over(self, what: str, **more: Any) -> None:
        self.is_over = True
        self._note(what, **more)

    def _note(self, what: str, **more: Any) -> None:
        self._node.tell({"client": what, "life": self._life} | more)


def _plain_lines(lines: bytes) -> list[str]:
    return sorted(_IDS.sub(rb"\1\2id", lines).decode("latin-1").replace("\r", "").split("\n"))[1:]


class _Journal:
    def __init__(self, node: "RelayNode") -> None:
        self._node = node

    def put(self, record: DecisionRecord) -> None:
        self._node.tell({"journal": plain(record, without=OF_IDS | {"request_id"})})


class _Watchers:
    """The engines' monitors and the peers' addresses, which hear of some endings."""

    def __init__(self, node: "RelayNode") -> None:
        self._tell = node.tell
        self._name = node.name_of

    def report_served(self, endpoint: str, dialect: object) -> None:
        self._tell({"watcher": "served", "at": endpoint})

    def report_connect_failed(self, endpoint: str, *, refused: bool) -> None:
        self._tell({"watcher": "connect failed", "at": endpoint, "refused": refused})

    def report_auth(self, endpoint: str) -> None:
        self._tell({"watcher": "auth", "at": endpoint})

    def report_denied(self, endpoint: str, model: str, dialect: object) -> None:
        self._tell({"watcher": "denied", "at": endpoint, "model": model})

    def look_for_models(self) -> None:
        self._tell({"watcher": "look for models"})

    def unreached(self, node: str, cause: Cause) -> None:
        self._tell({"watcher": "unreached", "at": self._name(node), "cause": cause.value})

    def put(self, line: AccessLine) -> None:
        self._tell({"access": plain(line, without={"request_id", "decision_id"})})


class RelayNode:
    """This node, called ``me``. ``told`` has the policy's variant, the own node and the peers as records say them.

    ``took`` are the actions of the step so far, each with who it concerns; ``has_idle`` is the driver's word on whether
    an idle connection to an endpoint or peer is at hand.
    """

    def __init__(self, told: Mapping[str, Any], has_idle: Callable[[str], bool]) -> None:
        self.took: list[tuple[dict[str, Any], Any]] = []
        self.has_idle = has_idle
        self.clock = HandClock()
        self._numbers = 0
        self._seq = 0
        self._own: Mapping[str, Any] = told["own"]
        self._engines: list[str] = [engine["name"] for engine in told["own"]["static"]["engines"]]
        self._peers: list[str] = [peer["name"] for peer in told["peers"]]
        self._names = {str(node_id_of(id32(name))): name for name in (*self._peers, OWN)}
        policy, numbers = POLICIES[told["policy"]], exchange_policy()
        self._faults: list[str] = []
        self.log = Log(lambda line: None, self.clock)
        self.work = WatchedWork()
        self.board = Board(empty(id32(OWN), NodeName(OWN)))
        rng = Random(1)
        self.router = Router(
            self.board.current,
            rng=rng,
            now=self.clock.now,
            inst=INST,
            policy=policy,
            exchange=numbers,
            profiles=Profiles(profile_policy()),
            local=self.work,
            session_secret=b"secret",
            ids=DecisionIds(rng),
            most_waiting=told["most_waiting"],
        )
        self.drains = Drains(
            endpoints=lambda: self._engines,
            in_flight=self.work.in_flight,
            cut=self._cut,
            changed=self.say,
            clock=self.clock,
        )
        self.viewing = Viewing(self.board, own=a_member(OWN), router=self.router, clock=self.clock)
        self.viewing.members_changed({id16(name): a_member(name) for name in self._peers}, MESH)
        nothing: Any = SimpleNamespace()
        watchers: Any = _Watchers(self)
        self.learning = Learning(self.router, nothing, self.clock, self.log)
        self.placing = Placing(
            self.router, clock=self.clock, journal=_Journal(self), metrics=DecisionMetrics()
        )
        self.observing = _Observing(
            self._faults,
            placing=self.placing,
            learning=self.learning,
            engines=watchers,
            targets=watchers,
            metrics=RelayMetrics(),
            access=watchers,
            log=self.log,
            learned=self.viewing.learned,
        )
        self.tasks = _Tasks()
        tasks: Any = self.tasks
        pool: Any = _Pool(self)
        targets: Any = _Targets(self, told["engines"], self._peers)
        self.wiring = Wiring(
            clock=self.clock,
            policy=numbers,
            pool=pool,
            tasks=tasks,
            targets=targets,
            router=self.router,
            observer=self.observing,
            heard_state=lambda signed, signature: self.tell({"state": len(signed)}),
            rng=Random(2),
            in_hand=_Hands(self.clock),
        )
        listing: Any = nothing
        self.front = ApiFront(
            wiring=self.wiring,
            place=self.placing,
            listing=lambda: listing,
            phase=lambda: Phase.SERVING,
            doors=Doors.of(("127.0.0.1", PORT)),
            roll=Roll(self.clock),
        )
        self.lives: dict[int, Client] = {}
        self.say()

    # --- what the parts above need ---------------------------------------------------------------------------

    def tell(self, action: dict[str, Any], whom: Any = None) -> None:
        self.took.append((action, whom))

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def name_of(self, owner: str) -> str:
        """What the driver calls the owner of a connection: an own endpoint, or a peer."""
        return self._names.get(owner, owner)

    def is_draining(self, endpoint: str) -> bool:
        return endpoint in self.drains or None in self.drains

    def _cut(self, endpoint: str) -> None:
        for each in self._open():
            each.work.cut_off(endpoint_key((OWN, endpoint)))

    def _open(self) -> list[Client]:
        return [each for each in self.lives.values() if not each.is_over and each.work is not None]

    # --- what happens ----------------------------------------------------------------------------------------

    def asks(self, life: int, raw: bytes) -> None:
        """A client sends a whole request."""
        client: Any = Client(self, life)
        head, _, body = raw.partition(b"\r\n\r\n")
        read = HeadReader().feed(head + b"\r\n\r\n")
        assert read is not None
        parsed = read[0]
        assert isinstance(parsed, Parsed), parsed
        parsed.accepted_ms = self.clock.now
        self.lives[life] = client
        answer = self.front.judge(client, parsed)
        served = self.front.serve(client, parsed, body) if answer is None else answer
        if isinstance(served, Answer):
            client.reply(served)
            self.front.answered(client, parsed, served)
        else:
            client.work = served

    def leaves(self, life: int, *, stalled: bool = False) -> None:
        """The client of a life goes away, or reads no more."""
        client = self.lives[life]
        if not client.is_over:
            client.is_over = True
            (client.work.client_stalled if stalled else client.work.client_gone)()

    def due(self) -> int | None:
        """When the next request wants to hear that time passed."""
        return min((each.work.due for each in self._open() if each.work.due is not None), default=None)

    def time_passed(self) -> None:
        for each in self._open():
            if each.work.due is not None and each.work.due <= self.clock.now:
                each.work.time_passed()

    def say(self) -> None:
        """This node states itself, with the work that it has in hand."""
        state, facts = self._own["volatile"], self._own["static"]["engines"]
        engines = []
        for load, engine in zip(state["engines"], facts, strict=True):
            busy, slots = self.work.in_flight(engine["name"]), engine["slots"]
            draining = {"state": _DRAINING_ENGINE} if self.is_draining(engine["name"]) else {}
            mine = {"running": min(busy, slots), "queued": max(0, busy - slots), "ours": busy}
            engines.append(load | mine | draining)
        demand = tuple(
            {"key8": row.key8, "rpm": row.rpm, "work_c": row.work_c}
            for row in self.router.demand.rows(self.clock.now)
        )
        told = state | {"engines": engines, "demand": demand}
        self.viewing.said(static(self._own["static"]), volatile(told), 2 * self._own["period_ms"])
        self.router.queue.news(self.clock.now)

    def hears(self, peer: Mapping[str, Any], seen: int | None) -> None:
        """A peer's newest records, or the verdict on it, arrive; ``seen`` is the last request that it got from here."""
        state = dict(peer["volatile"])
        if seen is not None:
            state["seen"] = ({"router": id8_of(id16(OWN)), "inst": INST, "seq": seen, "accepted": seen},)
        self._seq += 1
        self.viewing.heard([change_of({**peer, "volatile": state}, self._seq, self.clock.now)])
        self.router.queue.news(self.clock.now)
        self.looks()

    def looks(self) -> None:
        """Each request looks at what it depends on, as it does after every change of the view."""
        for each in self._open():
            each.work.review()

    def sweeps(self) -> None:
        """What is done about once a second."""
        sweep_lateness([each.work for each in self._open()], self.router, self.clock.now)
        self.drains.sweep()

    def drain(self, endpoint: str | None) -> None:
        self.drains.begin(endpoint)

    def undo_drain(self, endpoint: str | None) -> None:
        self.drains.undo(endpoint)

    def shuts_down(self) -> None:
        for each in self._open():
            each.work.shut_down()

    # --- what came of it -------------------------------------------------------------------------------------

    def dials(self) -> list[Dial]:
        """Connections that were begun to be made in this step."""
        begun, self.tasks.begun = self.tasks.begun, []
        return [dial for task in begun if (dial := task.begin()) is not None]

    def settle(self) -> list[tuple[dict[str, Any], Any]]:
        """Everything is booked; the actions of this step."""
        self.observing.settle()
        assert not self._faults, self._faults
        took, self.took = self.took, []
        return took

    def books(self) -> dict[str, Any]:
        """What the router keeps between requests."""
        now = self.clock.now
        ends = [(OWN, name) for name in self._engines] + [(name, "e0") for name in self._peers]
        keys = {endpoint_key(at): "/".join(at) for at in ends}
        owed = {
            keys[at]: [plain(each.work_s), each.requests]
            for at, each in self.router.ledger.owed.items()
            if at in keys
        }
        return {
            "reserved": len(self.router.ledger),
            "owed": owed,
            "loading": sum(self.router.ledger.loading.values()),
            "own": {name: self.work.in_flight(name) for name in self._engines},
            "breakers": {
                name: state
                for key, name in keys.items()
                if (state := int(self.router.breakers.state(key, now)))
            },
            "late": {keys[at]: plain(cost) for at, cost in self.router.lateness.costs.items()},
            "suspects": sorted(keys[at] for at in self.router.lateness.suspects),
            "under_way": len(self.router.lateness),
            "waiting": len(self.router.queue),
            "waiting_bytes": self.router.queue.body_bytes,
            "sessions": len(self.router.sessions),
            "spilling": sorted(each.value for each in self.router.spilling),
            "lessons": self.router.profiles.gen,
            "open": len(self.placing.open),
            "drains": {str(each.endpoint): each.stage for each in self.drains.docs()},
            "dispatch": plain(self.router.dispatch.row(now)),
        }

    def lessons(self) -> dict[str, Any]:
        """All that was learned."""
        return {
            f"{self._names.get(str(node_id_of(id32(name))), name)}/{key.endpoint}/{key.model}/{key.ctx}": plain(
                profile
            )
            for key, profile in self.router.profiles.items()
            for name in (*self._peers, OWN)
            if id16(name) == key.node
        }


class _Observing(Observing):
    """Keeps every fault of our own code for the driver to fail on."""

    def __init__(self, faults: list[str], **parts: Any) -> None:
        super().__init__(**parts)
        self._all = faults

    def failed(self, where: str, exc: BaseException) -> None:
        self._all.append(f"{where}: {exc!r}")
