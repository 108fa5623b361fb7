"""Who hears of a finished attempt: each fault goes to the one it is about."""

import io
from typing import Any

import pytest
from msgspec.structs import replace

from agent.node.routing.observer import WAITING_MOST, Observing
from agent.node.status.recall import Recalling
from agent.observe.access import AccessLog
from agent.observe.instruments import RelayMetrics
from agent.observe.metrics import Registry
from router_core.ids import NodeId, node_id_of
from router_core.record.state import Dialect
from router_core.router.failure import Cause, FailureClass
from router_core.router.outcome import Outcome, Result
from tests.agent.node.rig import World, a_line, a_report, an_endpoint, an_outcome, answered, failed, id32
from tests.support.until import until

BETA = node_id_of(id32("beta"))


class Heard:
    """Whoever is told something, and what."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **named: self.calls.append((name, *args, *named.values()))


class Watched:
    def __init__(self, learning: Any = None) -> None:
        self.world = World()
        self.world.own(an_endpoint())
        self.engines, self.targets = Heard(), Heard()
        self.metrics = RelayMetrics()
        self.out = io.StringIO()
        self.access = AccessLog(self.out.write, self.world.clock)
        engines: Any = self.engines
        targets: Any = self.targets
        nothing: Any = Nothing()
        self.observing = Observing(
            placing=self.world.placing,
            learning=learning or nothing,
            engines=engines,
            targets=targets,
            metrics=self.metrics,
            access=self.access,
            log=self.world.log,
        )

    def served(self, **over: Any) -> str:
        """A request comes and is served; its decision."""
        choosing = self.world.ask(**over)
        routed = self.world.route(choosing)
        choosing.end(routed.attempt)
        self.observing.attempted(a_report(routed, an_outcome(routed)))
        self.observing.answered(a_line(routed.decision_id))
        return routed.decision_id

    def scraped(self) -> str:
        registry = Registry(lambda exc: None)
        registry.add(self.observing, self.metrics)
        return registry.render()

    def attempted(self, outcome: Any, node: str | None = None, **over: Any) -> None:
        routed = self.world.route(self.world.ask())
        if node is not None:
            routed = replace(routed, choice=replace(routed.choice, is_self=False, node_id=NodeId(node)))
        self.observing.attempted(a_report(routed, outcome(routed), **over))


class Nothing:
    """Learns nothing."""

    def lesson_of(self, report: object) -> None:
        return None


@pytest.mark.parametrize("cause", [Cause.CONNECT_REFUSED, Cause.CONNECT_FAILED, Cause.CONNECT_TIMEOUT])
def test_an_endpoint_that_cannot_be_connected_is_told_to_its_monitor_or_its_address(cause: Cause) -> None:
    watched = Watched()
    watched.attempted(lambda routed: failed(routed, cause))
    assert watched.engines.calls == [("report_connect_failed", "llama", cause is not Cause.CONNECT_TIMEOUT)]
    assert watched.targets.calls == []
    watched.attempted(lambda routed: failed(routed, cause), BETA)
    assert watched.targets.calls == [("unreached", BETA, cause)]
    assert len(watched.engines.calls) == 1


def test_an_address_where_somebody_else_answers_is_no_address_of_the_peer() -> None:
    watched = Watched()
    watched.attempted(lambda routed: failed(routed, Cause.IDENTITY), BETA)
    assert watched.targets.calls == [("unreached", BETA, Cause.IDENTITY)]


def outcome_of(failure: FailureClass, status: int) -> Any:
    return lambda routed: answered(routed, status, failure)


@pytest.mark.parametrize(
    ("failure", "call"),
    [
        (FailureClass.ABSENT, ("report_denied", "llama", "tiny", Dialect.CHAT)),
        (FailureClass.AUTH, ("report_auth", "llama")),
        (FailureClass.ROUTE, ("report_denied", "llama", "tiny", Dialect.CHAT)),
    ],
)
def test_what_an_own_engine_does_not_know_makes_its_monitor_look_again(
    failure: FailureClass, call: tuple[object, ...]
) -> None:
    watched = Watched()
    watched.attempted(outcome_of(failure, 404))
    assert watched.engines.calls == [call]
    watched.attempted(outcome_of(failure, 404), BETA)
    assert len(watched.engines.calls) == 1


@pytest.mark.parametrize(
    "outcome",
    [
        lambda routed: an_outcome(routed, Result.CANCELLED),
        lambda routed: failed(routed, Cause.RESET),
        lambda routed: answered(routed, 400, FailureClass.OTHER),
        lambda routed: answered(routed, 503, FailureClass.BUSY),
    ],
)
def test_other_ends_are_nobodys_business(outcome: Any) -> None:
    watched = Watched()
    watched.attempted(outcome)
    assert (watched.engines.calls, watched.targets.calls) == ([], [])


def test_a_good_answer_proves_the_dialect_of_its_own_engine() -> None:
    watched = Watched()
    watched.attempted(an_outcome)
    watched.attempted(an_outcome, BETA)
    assert watched.engines.calls == [("report_served", "llama", Dialect.CHAT)]


async def test_an_ended_request_is_in_the_access_log_and_its_record_in_the_journal() -> None:
    watched = Watched()
    routed = watched.world.route(watched.world.ask())
    outcome: Outcome = an_outcome(routed)
    watched.observing.attempted(a_report(routed, outcome))
    watched.observing.answered(a_line(routed.decision_id))
    watched.observing.settle()
    watched.access.flush()
    assert routed.decision_id in watched.out.getvalue()
    assert [record.id for record in watched.world.kept.records] == [routed.decision_id]


async def test_the_books_of_a_request_that_went_well_are_kept_a_moment_later() -> None:
    watched = Watched()
    ended = [watched.served() for _ in range(3)]
    assert watched.world.kept.records == []
    await until(lambda: watched.world.kept.records)
    assert [record.id for record in watched.world.kept.records] == ended
    assert not watched.world.placing.open


async def test_whoever_asks_finds_every_request_that_has_ended() -> None:
    watched = Watched()
    journal: Any = watched.world.kept
    recalling = Recalling(watched.world.placing, journal, watched.observing.settle)
    decision = watched.served()
    found = await recalling.get(decision)
    assert found is not None
    assert found.outcome is not None
    assert "pairmesh_relay_seconds_count" in watched.scraped()
    newest = watched.served()
    assert 'pairmesh_relay_seconds_count{phase="total"} 2\n' in watched.scraped()
    assert newest in [record.id for record in watched.world.kept.records]


async def test_the_next_turn_of_a_session_knows_where_the_last_one_was_served() -> None:
    watched = Watched()
    decision = watched.served(headers=(("x-session-id", "s"),))
    assert [record.id for record in watched.world.kept.records] == [decision]
    choosing = watched.world.ask(headers=(("x-session-id", "s"),))
    assert choosing.request is not None
    assert choosing.request.pin is not None


async def test_an_attempt_that_failed_is_noted_before_the_next_one_and_after_what_ended_before_it() -> None:
    watched = Watched()
    first = watched.served()
    choosing = watched.world.ask("r2")
    routed = watched.world.route(choosing)
    watched.observing.attempted(a_report(routed, failed(routed)))
    assert [record.id for record in watched.world.kept.records] == [first]
    again = watched.world.route(choosing, attempt=2)
    watched.observing.attempted(a_report(again, an_outcome(again)))
    watched.observing.answered(a_line(again.decision_id, attempts=2))
    watched.observing.settle()
    (*_, record) = watched.world.kept.records
    assert [attempt.result for attempt in record.attempts] == ["reset", "done"]


class Faulty:
    """Learning with a fault of our own in it."""

    def lesson_of(self, report: object) -> None:
        raise KeyError


@pytest.mark.parametrize("outcome", [an_outcome, failed])
async def test_a_fault_in_the_books_of_an_attempt_is_told_and_strikes_no_request(outcome: Any) -> None:
    watched = Watched(Faulty())
    routed = watched.world.route(watched.world.ask())
    watched.observing.attempted(a_report(routed, outcome(routed)))
    watched.observing.answered(a_line(routed.decision_id))
    watched.observing.settle()
    assert [record.id for record in watched.world.kept.records] == [routed.decision_id]
    assert any("relay.failed" in line for line in watched.world.lines)


async def test_only_so_many_requests_wait_for_their_books() -> None:
    watched = Watched()
    for _ in range(WAITING_MOST // 2):
        watched.served()
    assert len(watched.world.kept.records) == WAITING_MOST // 2


async def test_a_fault_in_the_books_of_one_request_spares_those_of_the_others() -> None:
    watched = Watched()
    watched.world.kept.refuse = 1
    ended = [watched.served() for _ in range(2)]
    watched.observing.settle()
    assert [record.id for record in watched.world.kept.records] == ended[1:]
    assert any("relay.failed" in line for line in watched.world.lines)


def test_a_fault_of_ours_is_told_by_its_class_alone() -> None:
    watched = Watched()
    watched.observing.failed("exchange", ValueError("the answer is 42"))
    (line,) = watched.world.lines
    assert "ValueError" in line
    assert "42" not in line
