"""What clients get, whatever engines do: the exchange, the filters and the breakers that ship, at virtual time."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from router_core.exchange import events as ev
from router_core.exchange.machine import ENDED, Exchange, State
from router_core.placement.candidates.candidate import Row
from router_core.placement.candidates.fleet import Live
from router_core.placement.queueing.hold import after_wait
from router_core.placement.scoring.survey import has_other
from router_core.policy.exchange import ExchangePolicy, Hedge
from router_core.router.breaker import Breakers
from router_core.router.failure import Cause, FailureClass, is_server_error
from router_core.router.lateness import Lateness
from router_core.router.outcome import SERVED, Outcome, Result
from router_core.router.patience import overdue_ms
from tests.support.fleets import NOW, POLICY, a_fleet, a_ledger, a_request, a_row, decided

EXCHANGE = ExchangePolicy()
DEADLINE_MS = 1_800_000
LOOKS_AGAIN_MS = 5
DECLINES = {
    "busy": (503, FailureClass.BUSY),
    "loading": (503, FailureClass.LOADING),
    "absent": (404, FailureClass.ABSENT),
    "route": (405, FailureClass.ROUTE),
}
FREE = ("refused", "unconnectable", "no_continue", *DECLINES)
"""What no engine can have begun with: it costs the request no attempt."""
COSTLY = ("eof", "reset", "hangs", "silent", "gone", "bad_gateway")
"""What an engine may have begun to work on: at most two of these before a third attempt has to serve."""


@dataclass
class Engine:
    """One endpoint: what it does to a request, and after how many ms."""

    row: Row
    does: str
    after_ms: int = 0
    peer: bool = True
    bad_for: frozenset[str] = frozenset()


@dataclass
class World:
    """Engines, one router, a clock."""

    engines: dict[str, Engine]
    now: int = NOW
    breakers: Breakers = field(default_factory=lambda: Breakers(EXCHANGE))
    lateness: Lateness = field(default_factory=lambda: Lateness(EXCHANGE))
    _due: list[tuple[int, int, Callable[[], None]]] = field(default_factory=list)
    _number: count = field(default_factory=count)  # type: ignore[type-arg]

    def after(self, wait_ms: int, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + wait_ms, next(self._number), call))

    def run(self) -> None:
        while self._due:
            self.now, _, call = heapq.heappop(self._due)
            call()

    def rows(self) -> list[Row]:
        return [replace(engine.row, taken_ms=self.now - 500) for engine in self.engines.values()]

    def fleet(self) -> object:
        live = Live(
            ledger=a_ledger(),
            breakers=self.breakers,
            hold=Roomy(),
            suspects=self.lateness.suspects,
            late=self.lateness.costs,
        )
        return a_fleet(*self.rows(), live=live)


class Roomy:
    """A queue that is never full."""

    def has_room(self, body_bytes: int, share: float) -> bool:
        return True


class Sent:
    last_byte_ms: float | None = None


class Flight:
    """One client's request. ``status`` is what it got, None while it waits."""

    def __init__(self, world: World, who: str = "local", size: int = 1) -> None:
        self.world = world
        self.who = who
        self.size = size
        self.status: int | None = None
        self.served_by: str | None = None
        self.sent: dict[int, tuple[Engine, Sent]] = {}
        self.machine = Exchange(EXCHANGE, until_ms=world.now + DEADLINE_MS, hedge=Hedge.HUNG)
        self.since_ms: int | None = None
        self.request = a_request(arrival_ms=world.now, request_id=f"{who}{size}{world.now}")
        self.tell(ev.BodyParsed())

    def tell(self, event: ev.Event) -> None:
        if self.machine.state in ENDED:
            return
        for action in self.machine.handle(event, self.world.now):
            self.perform(action)
        if (due := self.machine.deadline) is not None:
            self.world.after(max(0, due - self.world.now), lambda: self.wake(due))

    def wake(self, due: int) -> None:
        if self.machine.deadline == due:
            self.tell(
                ev.TimePassed(last_byte_ms=self.world.now if self.machine.state is State.STREAMING else None)
            )

    def later(self, wait_ms: int, event: ev.Event) -> None:
        self.world.after(wait_ms, lambda: self.tell(event))

    def perform(self, action: ev.Action) -> None:
        world = self.world
        if isinstance(action, ev.Decide):
            self.decide(action)
        elif isinstance(action, ev.Dial):
            engine = world.engines[action.target.endpoint]
            world.breakers.dispatched(action.target.endpoint, world.now)
            self.sent[action.attempt] = engine, Sent()
            refused = {"refused": Cause.CONNECT_REFUSED, "unconnectable": Cause.CONNECT_TIMEOUT}
            if engine.does == "refused":
                self.later(1, ev.Lost(attempt=action.attempt, cause=refused[engine.does]))
            elif engine.does != "unconnectable":
                self.later(1, ev.Connected(attempt=action.attempt))
        elif isinstance(action, ev.SendRequest):
            engine, sent = self.sent[action.attempt]
            world.lateness.sent(engine.row.key, sent)
            if not engine.peer:
                self.work(action.attempt)
            elif engine.does != "no_continue":
                self.later(1, ev.Continued(attempt=action.attempt))
        elif isinstance(action, ev.SendBody):
            self.work(action.attempt)
        elif isinstance(action, ev.NoteOverdue):
            engine, sent = self.sent[action.attempt]
            world.lateness.overdue(engine.row.key, sent, world.now)
        elif isinstance(action, ev.BlameEndpoint):
            world.breakers.failed(action.endpoint, world.now)
        elif isinstance(action, ev.Commit):
            engine, _ = self.sent[action.attempt]
            world.lateness.heard(engine.row.key)
            self.served_by = engine.row.node_name
        elif isinstance(action, ev.EndAttempt):
            self.ended(action.outcome)
        elif isinstance(action, ev.Reply):
            self.status = action.status
        elif isinstance(action, ev.ReplyAnswer):
            self.status = 500

    def decide(self, action: ev.Decide) -> None:
        world = self.world
        request = replace(
            self.request,
            attempt=action.attempt,
            tried=action.tried,
            refused=action.refused,
            spare=action.spare,
        )
        if self.since_ms is not None:
            request = after_wait(request, POLICY, world.now, since_ms=self.since_ms, waits=True)
        decision = decided(request, world.fleet(), now=world.now)  # type: ignore[arg-type]
        choice = decision.chosen
        if decision.hold is not None and not action.spare:
            reason, self.since_ms = decision.reason, decision.hold.since_ms
            turned = ev.TurnedAway(status=reason.status, code=reason.value)
            self.tell(ev.Queued(until_ms=decision.hold.until_ms, turned=turned))
            self.later(LOOKS_AGAIN_MS, ev.Woken())
            return
        if choice is None and action.spare:
            self.tell(ev.NoSpare())
        elif choice is None:
            reason = decision.reason
            self.tell(ev.TurnedAway(status=reason.status, code=reason.value))
        else:
            engine, est = world.engines[choice.endpoint], choice.est
            target = ev.Target(
                endpoint=choice.endpoint,
                peer=engine.peer,
                connect_ms=2_000,
                overdue_ms=overdue_ms(
                    ttft_ms=1000.0 * est.ttft,
                    load_ms=1000.0 * est.load,
                    ect_ms=1000.0 * est.ect,
                    stream=False,
                ),
            )
            self.tell(ev.Decided(target=target))

    def work(self, number: int) -> None:
        engine, _ = self.sent[number]
        does, wait_ms = engine.does, engine.after_ms
        if self.who in engine.bad_for:
            does = "server_error"
        if does == "serves":
            self.later(wait_ms, ev.HeadReceived(attempt=number, status=200))
            self.later(wait_ms, ev.FirstByteReceived(attempt=number))
            self.later(wait_ms + 10, ev.BodyEnded(attempt=number))
        elif does in DECLINES:
            status, failure = DECLINES[does]
            self.later(5, ev.Answered(attempt=number, status=status, failure=failure, whole=True))
        elif does in ("server_error", "bad_gateway"):
            status = 500 if does == "server_error" else 502
            self.later(
                max(5, wait_ms),
                ev.Answered(attempt=number, status=status, failure=FailureClass.OTHER, whole=True),
            )
            self.later(max(5, wait_ms), ev.BodyEnded(attempt=number))
        elif does in ("eof", "reset", "gone"):
            causes = {"eof": Cause.EOF, "reset": Cause.RESET, "gone": Cause.GONE}
            self.later(max(5, wait_ms), ev.Lost(attempt=number, cause=causes[does]))
        elif does == "silent":
            self.world.after(7_000, lambda: self.review(number))

    def review(self, number: int) -> None:
        """The owner calls the engine silent, from now on: the attempt moves if another endpoint can take it."""
        if number not in self.sent or self.machine.state is not State.AWAITING:
            return
        world = self.world
        tried = self.machine.tried | {each.row.key for each, _ in self.sent.values()}
        request = replace(self.request, attempt=2, tried=tried, refused=self.machine.refused)
        if has_other(request, world.fleet(), POLICY, world.now):  # type: ignore[arg-type]
            self.tell(ev.NoSignOfLife(attempt=number, cause=Cause.SILENT))
        else:
            world.after(2_000, lambda: self.review(number))

    def ended(self, outcome: Outcome) -> None:
        world = self.world
        engine, sent = self.sent.pop(outcome.attempt)
        at = engine.row.key
        world.lateness.ended(at, sent, world.now)
        status, failure = outcome.status, outcome.failure
        if outcome.fault:
            world.breakers.failed(at, world.now, connection_refused=outcome.cause is Cause.CONNECT_REFUSED)
        elif status is not None and failure is not None and is_server_error(status, failure):
            world.breakers.erred(at, world.now, (self.who, self.size), busy=world.lateness.under_way(at) > 0)
        elif outcome.result in SERVED:
            world.breakers.succeeded(at, world.now)
        else:
            world.breakers.released(at)
        if outcome.result is Result.DONE:
            self.status = 200
        elif outcome.result is Result.ANSWERED:
            self.status = outcome.status


SPEEDS = st.tuples(
    st.sampled_from((1.0, 30.0, 1_000.0, 100_000.0)), st.sampled_from((0.1, 5.0, 50.0, 5_000.0))
)


def engine_of(
    number: int, does: str, after_ms: int, speeds: tuple[float, float], *, peer: bool = True
) -> Engine:
    """An engine whose predicted speeds have nothing to do with what it does."""
    return Engine(a_row(f"n{number}", pp=speeds[0], tg=speeds[1]), does, after_ms, peer)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Up to two engines that cost an attempt each, any that do not, and one or more that serve in time, however late."""
    does = draw(st.lists(st.sampled_from(COSTLY), max_size=2)) + draw(
        st.lists(st.sampled_from(FREE), max_size=4)
    )
    engines = [
        engine_of(
            number,
            what,
            draw(st.integers(0, 20_000)),
            draw(SPEEDS),
            peer=what == "no_continue" or draw(st.booleans()),
        )
        for number, what in enumerate(draw(st.permutations(does)))
    ]
    engines += [
        engine_of(90 + number, "serves", draw(st.integers(0, 400_000)), draw(SPEEDS))
        for number in range(draw(st.integers(1, 2)))
    ]
    return World({engine.row.key: engine for engine in engines})


@given(worlds())
@settings(max_examples=1_000, deadline=None)
def test_no_error_reaches_a_client_while_some_endpoint_could_have_served(world: World) -> None:
    flight = Flight(world)
    world.run()
    assert flight.status == 200, flight.machine.state
    assert world.engines[
        next(at for at, each in world.engines.items() if each.row.node_name == flight.served_by)
    ].does == ("serves")


@given(st.lists(SPEEDS, min_size=1, max_size=4), st.integers(0, 1_700_000))
@settings(max_examples=100, deadline=None)
def test_what_is_predicted_changes_no_outcome(speeds: list[tuple[float, float]], after_ms: int) -> None:
    engines = [engine_of(number, "serves", after_ms, each) for number, each in enumerate(speeds)]
    world = World({engine.row.key: engine for engine in engines})
    flights = [Flight(world) for _ in range(4)]
    world.run()
    assert [flight.status for flight in flights] == [200] * 4
    assert not any(world.breakers.last_fault_ms(at) for at in world.engines)


@example(
    hosts=1, script=[*((True, 0, size) for size in range(1, 6)), (False, 8, 1), (False, 0, 1)], takes_ms=0
)
@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.booleans(), st.integers(0, 4_000), st.integers(1, 30)), min_size=1, max_size=40),
    st.integers(0, 3_000),
)
@settings(max_examples=100, deadline=None)
def test_one_callers_failing_bodies_change_no_others_outcome(
    hosts: int, script: list[tuple[bool, int, int]], takes_ms: int
) -> None:
    engines = [
        Engine(a_row(f"n{number}"), "serves", takes_ms, bad_for=frozenset({"mallory"}))
        for number in range(hosts)
    ]
    world = World({engine.row.key: engine for engine in engines})
    good: list[Flight] = []
    bad: list[Flight] = []
    at = 0
    for is_bad, passed, size in script:
        at += passed
        if is_bad:
            world.after(at, lambda size=size: bad.append(Flight(world, "mallory", size)))  # type: ignore[misc]
        else:
            world.after(at, lambda size=size: good.append(Flight(world, "alice", size)))  # type: ignore[misc]
    world.run()
    assert {flight.status for flight in good} <= {200}
    assert {flight.status for flight in bad} <= {500, 503}


@pytest.mark.parametrize("hosts", [1, 2])
def test_an_engine_that_fails_everybody_is_rested(hosts: int) -> None:
    rng = Random(1)
    engines = [Engine(a_row("bad", tg=5_000), "serves", 10, bad_for=frozenset(f"c{n}" for n in range(20)))]
    if hosts == 2:
        engines.append(Engine(a_row("good", tg=5), "serves", 10))
    world = World({engine.row.key: engine for engine in engines})
    flights: list[Flight] = []
    for number in range(20):
        world.after(
            number * rng.randrange(50, 60),
            lambda number=number: flights.append(Flight(world, f"c{number}", number)),  # type: ignore[misc]
        )
    world.run()
    assert world.breakers.last_fault_ms(engines[0].row.key) is not None
    if hosts == 2:
        assert [flight.status for flight in flights] == [200] * 20
