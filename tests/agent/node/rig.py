"""One node's rooms around a real view and fleet, with a clock in hand and no sockets."""

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from msgspec.structs import replace

from agent.board import Board
from agent.engines.contract import (
    EndpointHealth,
    EndpointStatus,
    Identity,
    LoadSource,
    ObservedLoad,
    ObservedModel,
    OwnedModel,
    ResidencyState,
    ResponseMarks,
    Timings,
)
from agent.node.routing.learning import Learning
from agent.node.routing.placement import Choosing, Placing
from agent.node.state.statement import static_statement, volatile_statement
from agent.node.state.view import Viewing
from agent.node.state.work import WatchedWork
from agent.observe.instruments import DecisionMetrics
from agent.observe.log import Log
from agent.relay.dialects.facts import Facts
from agent.relay.ports import AccessLine, Asked, AttemptReport, Routed
from agent.settings.manifest import EngineKind, EngineUrl, Manifest
from agent.store.profiles import ProfileStore
from router_core.ids import Id16, Id32, MeshId, NodeName, id16_of, node_id_of
from router_core.placement.decision.ids import DecisionIds
from router_core.placement.record import DecisionRecord
from router_core.placement.request.request import Endpoint
from router_core.policy.placement import PlacementPolicy
from router_core.pressure.samples import Sampled, measured
from router_core.profile.profiles import Profiles
from router_core.record.membership import Liveness, Member, ViewChange
from router_core.record.state import Dialect, Flag, ResourceLevel, Role, Static, Volatile
from router_core.router.failure import Cause, FailureClass
from router_core.router.outcome import Outcome, Result
from router_core.router.router import Router
from router_core.view.fold import empty
from tests.support.host_samples import host

MESH = MeshId(bytes(16))
STREAMED = 40


class HandClock:
    """Time moves when a test says so."""

    def __init__(self, now: int = 1_000_000) -> None:
        self.now = now

    def boot_ms(self) -> int:
        return self.now

    def boot_us(self) -> int:
        return self.now * 1_000

    def wall_ms(self) -> int:
        return 1_700_000_000_000 + self.now


def id32(name: str) -> Id32:
    return Id32(name.encode().ljust(32, b"\x01"))


def id16(name: str) -> Id16:
    return id16_of(id32(name))


def key_of(name: str, endpoint: str = "llama") -> Endpoint:
    return f"{node_id_of(id32(name))}/{endpoint}"


def a_member(name: str, **over: Any) -> Member:
    fields: dict[str, Any] = {
        "id32": id32(name),
        "der": name.encode(),
        "roles": Role.NODE | Role.ROUTER,
        "admission": 1,
        "name": NodeName(name),
    }
    return Member(**(fields | over))


def an_owned(name: str = "tiny", **over: Any) -> OwnedModel:
    return OwnedModel(native_id=over.pop("native_id", f"/{name}.gguf"), name=name, **over)


def a_resident(
    name: str = "tiny", state: ResidencyState = ResidencyState.RESIDENT, **over: Any
) -> ObservedModel:
    return ObservedModel(native_id=over.pop("native_id", f"/{name}.gguf"), state=state, **over)


def an_endpoint(name: str = "llama", **over: Any) -> EndpointStatus:
    """A ready llama.cpp endpoint of 4 slots with ``tiny`` in memory, looked at 100 ms ago."""
    manifest = Manifest(
        name=name,
        url=EngineUrl(scheme="http", host="127.0.0.1", port=8080),
        engine=EngineKind.LLAMACPP,
        slots=over.pop("slots", 4),
        max_queue=over.pop("max_queue", None),
        jit_load=over.pop("jit_load", None),
        remote_host=over.pop("remote_host", False),
        cloud=over.pop("cloud", False),
    )
    fields: dict[str, Any] = {
        "manifest": manifest,
        "health": EndpointHealth.READY,
        "identity": Identity(
            engine=EngineKind.LLAMACPP, flavour="single", version="b1", dialects=Dialect.CHAT
        ),
        "owned": (an_owned(),),
        "resident": (a_resident(),),
        "load": ObservedLoad(source=LoadSource.ENGINE, running=0, waiting=0),
        "observed_ms": 999_900,
    }
    return EndpointStatus(name=name, **(fields | over))


def a_sample(at_ms: int = 1_000_000, **over: Any) -> Sampled:
    sample = host(at_ms)
    fields: dict[str, Any] = {
        "at_ms": at_ms,
        "profile": "server",
        "host": sample,
        "mem_avail_bytes": sample.mem_avail_bytes,
        "cpu_busy_pct": measured(1.0, at_ms),
        "cpu_external_pct": measured(1.0, at_ms),
        "resources": (),
        "flags": Flag(0),
    }
    return Sampled(**(fields | over))


def stated(*endpoints: EndpointStatus, **over: Any) -> tuple[Static, Volatile]:
    """S and V of a healthy node with these endpoints."""
    static = static_statement(
        sampled=over.get("sampled") or a_sample(),
        addrs=over.pop("addrs", ()),
        version="1",
        router=True,
        endpoints=endpoints,
        profiles=over.pop("profiles", ()),
    )
    fields: dict[str, Any] = {
        "sampled": a_sample(),
        "endpoints": endpoints,
        "work": {},
        "times": {},
        "seen": (),
        "disp": None,
        "flags": Flag(0),
        "load_memory_mib": 40_000,
        "now": 1_000_000,
    }
    volatile = volatile_statement(static, **(fields | over))
    sampled_codes = range(6 if static.gpus else 4)
    calm = tuple(ResourceLevel(code=code, level=0, score_c=0) for code in sampled_codes)
    return static, replace(volatile, resources=calm)


class Kept:
    """A journal that is a list. It refuses the next ``refuse`` records."""

    def __init__(self) -> None:
        self.records: list[DecisionRecord] = []
        self.refuse = 0

    def put(self, record: DecisionRecord) -> None:
        if self.refuse:
            self.refuse -= 1
            raise RuntimeError("on purpose")
        self.records.append(record)

    async def get(self, decision_id: str) -> DecisionRecord | None:
        return next((record for record in self.records if record.id == decision_id), None)


class World:
    """This node, called ``me``, and what it believes of others."""

    def __init__(
        self,
        tmp: Path | None = None,
        *,
        policy: PlacementPolicy | None = None,
        profiles: Profiles | None = None,
    ) -> None:
        self.clock = HandClock()
        self.lines: list[str] = []
        self.log = Log(self.lines.append, self.clock)
        self.work = WatchedWork()
        self.policy = policy or PlacementPolicy()
        self.board = Board(empty(id32("me"), NodeName("me")))
        rng = Random(1)
        self.router = Router(
            self.board.current,
            rng=rng,
            now=self.clock.now,
            inst=7,
            policy=self.policy,
            profiles=profiles,
            local=self.work,
            session_secret=b"secret",
            ids=DecisionIds(rng),
        )
        self.viewing = Viewing(self.board, own=a_member("me"), router=self.router, clock=self.clock)
        self.kept = Kept()
        self.placing = Placing(self.router, clock=self.clock, journal=self.kept, metrics=DecisionMetrics())
        if tmp is not None:
            self.store = ProfileStore(tmp)
            self.learning = Learning(self.router, self.store, self.clock, self.log)
        self._members: dict[Id16, Member] = {}
        self._seq = 0

    def admit(self, *names: str) -> None:
        """The roster names exactly these, besides this node."""
        self._members = {id16(name): a_member(name) for name in names}
        self.viewing.members_changed(self._members, MESH)

    def own(self, *endpoints: EndpointStatus, **over: Any) -> None:
        """This node's own statement."""
        self.viewing.said(*stated(*endpoints, **over), 2_000)

    def peer(self, name: str, *endpoints: EndpointStatus, **over: Any) -> None:
        """A member's newest records arrive."""
        if id16(name) not in self._members:
            self.admit(*(member.name for member in self._members.values()), name)
        state, epoch = over.pop("state", Liveness.FRESH), over.pop("epoch", 1)
        static, volatile = stated(*endpoints, **over)
        self.hear(name, static, volatile, state, epoch)

    def hear(
        self,
        name: str,
        static: Static | None,
        volatile: Volatile | None,
        state: Liveness = Liveness.FRESH,
        epoch: int = 1,
        rtt_ms: int | None = None,
    ) -> None:
        self._seq += 1
        change = ViewChange(
            origin=id16(name),
            state=state,
            confirmed=True,
            epoch=epoch,
            inst=1,
            seq=self._seq,
            mono_ms=self.clock.now,
            base_ms=0,
            due_ms=2_000,
            volatile=volatile,
            static=static,
            rtt_ms=rtt_ms,
        )
        self.viewing.heard([change])

    def ask(self, request_id: str = "r1", **over: Any) -> Choosing:
        """A chat for ``tiny`` comes in."""
        return self.placing(an_asked(self.clock.now, request_id=request_id, **over))

    def route(
        self, choosing: Choosing, attempt: int = 1, tried: Mapping[str, object] | None = None
    ) -> Routed:
        """The decision, which must find somebody."""
        routed = choosing.decide(
            attempt=attempt, tried=frozenset(tried or ()), refused=frozenset(), now=self.clock.now
        )
        assert isinstance(routed, Routed), routed
        return routed


def an_asked(now: int, **over: Any) -> Asked:
    facts: dict[str, Any] = {"model": "tiny", "stream": True, "text_bytes": 4_000}
    facts |= {key: over.pop(key) for key in tuple(over) if key in Facts.__struct_fields__}
    fields: dict[str, Any] = {
        "request_id": "r1",
        "dialect": Dialect.CHAT,
        "facts": Facts(**facts),
        "headers": (),
        "caller": "local",
        "body_bytes": 5_000,
        "accepted_ms": now,
    }
    return Asked(**(fields | over))


def an_outcome(routed: Routed, result: Result = Result.DONE, **over: Any) -> Outcome:
    fields: dict[str, Any] = {
        "attempt": 1,
        "endpoint": routed.choice.endpoint,
        "result": result,
        "cause": None,
        "status": 200,
        "failure": None,
        "refusal": None,
        "fault": False,
    }
    return Outcome(**(fields | over))


def failed(routed: Routed, cause: Cause = Cause.RESET) -> Outcome:
    return an_outcome(routed, Result.FAILED, cause=cause, status=None, fault=True)


def answered(routed: Routed, status: int, failure: FailureClass, *, fault: bool = False) -> Outcome:
    return an_outcome(routed, Result.ANSWERED, status=status, failure=failure, fault=fault)


def marks(now: int, **over: Any) -> ResponseMarks:
    """Sent at ``now``; a stream whose first content came 100 ms later and whose last came after 1.1 s."""
    fields: dict[str, Any] = {
        "sent_ms": float(now),
        "head_ms": now + 90.0,
        "first_byte_ms": now + 95.0,
        "first_content_ms": now + 100.0,
        "last_byte_ms": now + 1_100.0,
        "content_events": STREAMED,
    }
    return ResponseMarks(**(fields | over))


def a_report(routed: Routed, outcome: Outcome | None = None, **over: Any) -> AttemptReport:
    """The end of one attempt; its answer told 100 prompt tokens in 50 ms and 50 tokens at 49 a second."""
    told = (
        b'data: {"choices":[{"finish_reason":"stop"}],"timings":{"prompt_n":100,"prompt_ms":50.0,'
        b'"cache_n":0,"predicted_n":50,"predicted_per_second":49.0}}\n\n'
    )
    fields: dict[str, Any] = {
        "side": "api",
        "request_id": "r1",
        "routed": routed,
        "outcome": outcome or an_outcome(routed),
        "dispatched_ms": 1_000_000.0,
        "connected_ms": 1_000_001.0,
        "marks": marks(1_000_000),
        "head": told,
        "tail": told,
        "body_bytes": 500,
        "text_bytes": 400,
        "dialect": Dialect.CHAT,
    }
    return AttemptReport(**(fields | over))


def taught(learning: Learning, report: AttemptReport) -> Timings | None:
    """What ``report`` told, folded in."""
    lesson = learning.lesson_of(report)
    return None if lesson is None else learning.learn(lesson)


def a_line(decision_id: str | None, **over: Any) -> AccessLine:
    fields: dict[str, Any] = {
        "side": "api",
        "method": "POST",
        "route": "/v1/chat/completions",
        "status": 200,
        "code": None,
        "request_id": "r1",
        "decision_id": decision_id,
        "peer": None,
        "bytes_in": 1,
        "bytes_out": 1,
        "attempts": 1,
        "total_ms": 1_100.0,
        "first_byte_ms": 95.0,
    }
    return AccessLine(**(fields | over))


def owned_models(*names: str) -> tuple[OwnedModel, ...]:
    return tuple(an_owned(name) for name in names)
