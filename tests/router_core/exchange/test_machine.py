"""One request's life: transcripts of the state table, and what holds for every interleaving."""

from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_core.exchange import events as ev
from router_core.exchange.machine import ENDED, Exchange, State
from router_core.placement.request.request import Endpoint
from router_core.policy.exchange import ExchangePolicy, Hedge
from router_core.router.failure import Cause, FailureClass
from router_core.router.outcome import Outcome, Result
from router_core.router.patience import overdue_ms

POLICY = ExchangePolicy()


def key(name: str) -> Endpoint:
    return f"node/{name}"


def target(
    name: str = "a", *, peer: bool = False, first_byte_ms: int = 0, patient: bool = False
) -> ev.Target:
    return ev.Target(
        endpoint=key(name),
        peer=peer,
        connect_ms=2_000,
        first_byte_ms=first_byte_ms,
        idle_ms=0 if peer else 300_000,
        overdue_ms=10_000,
        patient=patient,
    )


class Run:
    """Drives a machine and collects what it asked for."""

    def __init__(
        self,
        *,
        until_ms: int | None = None,
        policy: ExchangePolicy = POLICY,
        hedge: Hedge = Hedge.OFF,
        first_byte_ms: int = 0,
    ) -> None:
        self.machine = Exchange(policy, until_ms=until_ms, hedge=hedge)
        self.first_byte_ms = first_byte_ms
        self.now = 0
        self.actions: list[ev.Action] = []
        self.tell(ev.BodyParsed())

    def tell(self, event: ev.Event, at: int | None = None) -> list[ev.Action]:
        self.now = self.now if at is None else at
        actions = self.machine.handle(event, self.now)
        self.actions += actions
        return actions

    def dialled(self, name: str = "a", *, peer: bool = False, patient: bool = False) -> "Run":
        where = target(name, peer=peer, first_byte_ms=self.first_byte_ms, patient=patient)
        self.tell(ev.Decided(target=where))
        return self

    def sent(self, name: str = "a", *, peer: bool = False) -> "Run":
        self.dialled(name, peer=peer)
        self.tell(ev.Connected(attempt=self.machine.attempt))
        if peer:
            self.tell(ev.Continued(attempt=self.machine.attempt))
        return self

    def streaming(self, *, peer: bool = False) -> "Run":
        self.sent(peer=peer)
        self.tell(ev.HeadReceived(attempt=self.machine.attempt, status=200))
        self.tell(ev.FirstByteReceived(attempt=self.machine.attempt))
        return self

    def lost(self, cause: Cause = Cause.RESET, *, stale: bool = False) -> list[ev.Action]:
        return self.tell(ev.Lost(attempt=self.machine.attempt, cause=cause, stale=stale))

    def outcomes(self) -> list[Outcome]:
        return [action.outcome for action in self.actions if isinstance(action, ev.EndAttempt)]


T = TypeVar("T", bound=ev.Action)


def the(kind: type[T], action: ev.Action) -> T:
    """The action, which is of this kind."""
    assert isinstance(action, kind), action
    return action


def kinds(actions: list[ev.Action]) -> list[str]:
    return [type(action).__name__ for action in actions]


def test_a_good_answer_goes_from_decision_to_one_done_outcome() -> None:
    run = Run().streaming()
    run.tell(ev.BodyEnded(attempt=1))
    assert kinds(run.actions) == ["Decide", "Dial", "SendRequest", "Commit", "Finish", "EndAttempt"]
    assert run.outcomes()[0].result is Result.DONE
    assert run.machine.state is State.DONE


def test_headers_alone_commit_nothing() -> None:
    run = Run().sent()
    assert run.tell(ev.HeadReceived(attempt=1, status=200)) == []
    assert run.machine.state is State.AWAITING


@pytest.mark.lesson("vllm-project/vllm-ascend#13140: 200, then nothing")
def test_headers_then_death_is_a_failover_and_never_an_empty_answer() -> None:
    run = Run().sent()
    run.tell(ev.HeadReceived(attempt=1, status=200))
    assert kinds(run.lost()) == ["CancelUpstream", "EndAttempt", "Decide"]


def test_the_end_of_an_empty_body_commits_and_finishes() -> None:
    run = Run().sent()
    run.tell(ev.HeadReceived(attempt=1, status=204))
    assert kinds(run.tell(ev.BodyEnded(attempt=1))) == ["Commit", "Finish", "EndAttempt"]


def test_a_peers_body_waits_for_continue() -> None:
    run = Run().dialled(peer=True)
    assert kinds(run.tell(ev.Connected(attempt=1))) == ["SendRequest"]
    assert kinds(run.tell(ev.Continued(attempt=1))) == ["SendBody"]
    assert run.tell(ev.Continued(attempt=1)) == []


def test_no_continue_in_two_seconds_is_a_failover() -> None:
    run = Run().dialled(peer=True)
    run.tell(ev.Connected(attempt=1))
    assert run.machine.deadline == 2_000
    assert run.tell(ev.TimePassed(), at=1_999) == []
    assert "Decide" in kinds(run.tell(ev.TimePassed(), at=2_000))
    assert run.outcomes()[0].cause is Cause.NO_CONTINUE


def test_each_failover_avoids_what_was_tried_and_the_third_failure_is_told() -> None:
    run = Run()
    for name in ("a", "b", "c"):
        run.dialled(name)
        run.tell(ev.Connected(attempt=run.machine.attempt))
        run.lost(Cause.EOF)
    decides = [action for action in run.actions if isinstance(action, ev.Decide)]
    assert [each.tried for each in decides] == [frozenset(), {key("a")}, {key("a"), key("b")}]
    assert run.actions[-1] == ev.Reply(status=502, code="upstream_unreachable", retry_after_s=None)
    assert run.machine.state is State.FAILED


def test_a_refusal_is_not_an_attempt_and_no_fault() -> None:
    run = Run()
    for name in ("a", "b", "c", "d", "e"):
        run.dialled(name, peer=True)
        run.tell(ev.Connected(attempt=run.machine.attempt))
        if name in "ab":
            actions = run.tell(ev.IngressRefused(attempt=run.machine.attempt, cause="queue_full"))
            assert kinds(actions) == ["EndAttempt", "Decide"]
            decide = the(ev.Decide, actions[1])
            assert key(name) in decide.declined
            assert decide.refused == frozenset()
            assert decide.tried == frozenset()
        else:
            run.lost()
    assert [each.result for each in run.outcomes()] == [Result.REFUSED] * 2 + [Result.FAILED] * 3
    assert not run.outcomes()[0].fault


def test_who_declined_may_be_chosen_again_and_is_left_out_once_it_refuses_who_waits() -> None:
    run = Run()
    for patient, declined, refused in ((False, {key("a")}, set()), (True, {key("a")}, {key("a")})):
        run.dialled(peer=True, patient=patient)
        run.tell(ev.Connected(attempt=run.machine.attempt))
        actions = run.tell(ev.IngressRefused(attempt=run.machine.attempt, cause="queue_full"))
        decide = the(ev.Decide, actions[1])
        assert (set(decide.declined), set(decide.refused)) == (declined, refused)
    assert run.machine.dispatches == 0


def test_if_all_that_is_left_are_refusals_the_cause_is_told_as_429() -> None:
    run = Run()
    for name in ("a", "b"):
        run.dialled(name, peer=True)
        run.tell(ev.Connected(attempt=run.machine.attempt))
        run.tell(ev.IngressRefused(attempt=run.machine.attempt, cause="pressure"))
    actions = run.tell(ev.TurnedAway(status=502, code="refused"))
    assert actions == [ev.Reply(status=429, code="pressure", retry_after_s=None)]
    assert [each.fault for each in run.outcomes()] == [False, False]


@pytest.mark.parametrize(
    ("status", "failure"),
    [
        (503, FailureClass.BUSY),
        (503, FailureClass.LOADING),
        (404, FailureClass.ABSENT),
        (400, FailureClass.ABSENT),
        (404, FailureClass.ROUTE),
        (405, FailureClass.ROUTE),
        (502, FailureClass.OTHER),
        (504, FailureClass.OTHER),
        (500, FailureClass.DEAD),
    ],
)
def test_what_another_endpoint_may_do_better_goes_on(status: int, failure: FailureClass) -> None:
    run = Run().sent()
    actions = run.tell(ev.Answered(attempt=1, status=status, failure=failure, whole=True))
    assert kinds(actions) == ["CancelUpstream", "EndAttempt", "Decide"]


@pytest.mark.parametrize(
    ("status", "failure"),
    [
        (400, FailureClass.OTHER),
        (400, FailureClass.TOO_LONG),
        (422, FailureClass.OTHER),
        (401, FailureClass.AUTH),
        (403, FailureClass.AUTH),
    ],
)
def test_an_error_about_the_request_itself_is_passed_on(status: int, failure: FailureClass) -> None:
    run = Run().sent()
    assert kinds(run.tell(ev.Answered(attempt=1, status=status, failure=failure, whole=True))) == ["Commit"]
    run.tell(ev.BodyEnded(attempt=1))
    assert run.outcomes()[0].result is Result.ANSWERED
    assert not run.outcomes()[0].fault


def test_a_server_error_is_tried_elsewhere_once_per_request() -> None:
    run = Run().sent("a")
    assert "Decide" in kinds(
        run.tell(ev.Answered(attempt=1, status=500, failure=FailureClass.OTHER, whole=True))
    )
    run.sent("b")
    assert kinds(run.tell(ev.Answered(attempt=2, status=500, failure=FailureClass.OTHER, whole=True))) == [
        "Commit"
    ]
    run.tell(ev.BodyEnded(attempt=2))
    assert [each.fault for each in run.outcomes()] == [False, False]
    assert "BlameEndpoint" not in kinds(run.actions)


def test_a_server_error_is_the_endpoints_own_once_another_one_has_served_the_request() -> None:
    run = Run().sent("a")
    run.tell(ev.Answered(attempt=1, status=500, failure=FailureClass.OTHER, whole=True))
    run.sent("b")
    run.tell(ev.HeadReceived(attempt=2, status=200))
    assert run.tell(ev.FirstByteReceived(attempt=2))[1:] == [ev.BlameEndpoint(endpoint=key("a"))]


def test_when_nothing_is_left_the_last_upstreams_own_answer_is_passed_on() -> None:
    run = Run().sent()
    run.tell(ev.Answered(attempt=1, status=503, failure=FailureClass.BUSY, whole=True))
    assert kinds(run.tell(ev.TurnedAway(status=502, code="tried"))) == ["ReplyAnswer"]


def test_a_refusal_before_any_attempt_is_told_as_it_is() -> None:
    run = Run()
    actions = run.tell(ev.TurnedAway(status=429, code="queue_full", retry_after_s=7))
    assert actions == [ev.Reply(status=429, code="queue_full", retry_after_s=7)]
    assert run.machine.state is State.REFUSED


def test_a_stale_connection_is_redialled_once_and_not_counted() -> None:
    run = Run().sent()
    assert run.lost(Cause.EOF, stale=True) == [ev.Redial(attempt=1)]
    run.tell(ev.Connected(attempt=1))
    assert "Decide" in kinds(run.lost(Cause.EOF, stale=True))
    assert run.machine.dispatches == 1
    assert len(run.outcomes()) == 1


def test_what_no_engine_can_have_begun_uses_up_no_attempt_until_there_is_too_much_of_it() -> None:
    run = Run().dialled("n0")
    for number in range(1, POLICY.spared + 1):
        assert "Decide" in kinds(run.lost(Cause.CONNECT_TIMEOUT if number % 2 else Cause.CONNECT_REFUSED))
        assert run.machine.dispatches == 0
        run.dialled(f"n{number}")
    for number in range(POLICY.attempts - 1):
        assert "Decide" in kinds(run.lost(Cause.CONNECT_REFUSED))
        run.dialled(f"m{number}")
    assert "Decide" not in kinds(run.lost(Cause.CONNECT_REFUSED))
    assert len(run.outcomes()) == POLICY.spared + POLICY.attempts


def test_an_answer_that_only_declines_uses_up_no_attempt() -> None:
    run = Run()
    for number, (status, failure) in enumerate(
        [
            (503, FailureClass.BUSY),
            (404, FailureClass.ABSENT),
            (404, FailureClass.ROUTE),
            (503, FailureClass.LOADING),
        ]
    ):
        run.sent(f"n{number}")
        run.tell(ev.Answered(attempt=run.machine.attempt, status=status, failure=failure, whole=True))
        assert run.machine.dispatches == 0
    run.sent("last")
    run.tell(ev.Answered(attempt=run.machine.attempt, status=504, failure=FailureClass.OTHER, whole=True))
    assert run.machine.dispatches == 1


def test_a_limit_that_the_owner_set_is_a_failover_then_504() -> None:
    run = Run(policy=ExchangePolicy(attempts=1), first_byte_ms=4_000).sent()
    assert run.machine.deadline == 4_000
    actions = run.tell(ev.TimePassed(), at=4_000)
    assert ev.Reply(status=504, code="upstream_timeout", retry_after_s=None) in actions
    assert (run.outcomes()[0].cause, run.outcomes()[0].fault) == (Cause.FIRST_BYTE, True)


TEN_MINUTES = 600_000


@pytest.mark.parametrize("peer", [False, True])
@pytest.mark.parametrize("hedge", [Hedge.OFF, Hedge.HUNG])
def test_no_prediction_ends_an_attempt_however_long_its_first_byte_takes(peer: bool, hedge: Hedge) -> None:
    run = Run(until_ms=1_800_000, hedge=hedge).sent(peer=peer)
    while run.machine.deadline is not None and run.machine.deadline < TEN_MINUTES:
        actions = run.tell(ev.TimePassed(), at=run.machine.deadline)
        assert set(kinds(actions)) <= {"NoteOverdue", "Decide"}
        if "Decide" in kinds(actions):
            assert the(ev.Decide, actions[-1]).spare
            run.tell(ev.NoSpare())
    run.tell(ev.HeadReceived(attempt=1, status=200), at=TEN_MINUTES)
    assert kinds(run.tell(ev.FirstByteReceived(attempt=1))) == ["Commit"]
    run.tell(ev.BodyEnded(attempt=1))
    assert [each.result for each in run.outcomes()] == [Result.DONE]


def test_that_an_attempt_is_overdue_is_noted_once_and_ends_nothing() -> None:
    run = Run().sent()
    assert run.tell(ev.TimePassed(), at=9_999) == []
    assert run.tell(ev.TimePassed(), at=10_000) == [ev.NoteOverdue(attempt=1, endpoint=key("a"))]
    assert run.tell(ev.TimePassed(), at=500_000) == []
    assert (run.machine.state, run.machine.deadline) == (State.AWAITING, None)


def test_a_peers_request_is_overdue_from_when_it_asked_for_the_body() -> None:
    run = Run().dialled(peer=True)
    run.tell(ev.Connected(attempt=1))
    run.tell(ev.Continued(attempt=1), at=700)
    assert run.machine.deadline == 10_700


def test_without_a_sign_of_life_an_attempt_moves_and_an_answer_under_way_does_not() -> None:
    for cause in (Cause.SILENT, Cause.SUSPECT):
        for run in (Run().dialled(), Run().sent()):
            gone = ev.NoSignOfLife(attempt=1, cause=cause)
            assert kinds(run.tell(gone)) == ["CancelUpstream", "EndAttempt", "Decide"]
            assert (run.outcomes()[0].cause, run.outcomes()[0].fault) == (cause, True)
    assert Run().streaming().tell(ev.NoSignOfLife(attempt=1, cause=Cause.SILENT)) == []


class Hedged(Run):
    """One attempt at ``a`` that hangs, and a second one at ``b``."""

    def __init__(self, hedge: Hedge = Hedge.HUNG, until_ms: int | None = None) -> None:
        super().__init__(hedge=hedge, until_ms=until_ms)
        self.sent("a")
        while not (isinstance(self.actions[-1], ev.Decide) and self.actions[-1].spare):
            assert self.machine.deadline is not None
            self.tell(ev.TimePassed(), at=self.machine.deadline)
        self.began = self.now
        self.dialled("b")
        self.tell(ev.Connected(attempt=2))


def test_no_prediction_keeps_a_second_attempt_from_being_made_while_there_is_time() -> None:
    run = Run(hedge=Hedge.HUNG, until_ms=900_000)
    endless = ev.Target(endpoint=key("a"), peer=False, connect_ms=2_000, overdue_ms=10**9)
    run.tell(ev.Decided(target=endless))
    run.tell(ev.Connected(attempt=1))
    assert run.machine.deadline == 300_000
    assert kinds(run.tell(ev.TimePassed(), at=300_000)) == ["Decide"]
    hurried = Run(hedge=Hedge.HUNG, until_ms=45_000).sent()
    assert "Decide" in kinds(hurried.tell(ev.TimePassed(), at=15_000))


def test_a_hung_attempt_gets_a_second_one_beside_it_within_a_minute() -> None:
    run = Hedged()
    assert run.began <= 60_000
    assert run.outcomes() == []
    decide = next(action for action in run.actions if isinstance(action, ev.Decide) and action.spare)
    assert (decide.tried, decide.attempt) == (frozenset({key("a")}), 2)
    assert Hedged(Hedge.OVERDUE).began == 10_000


@pytest.mark.parametrize("winner", [1, 2])
def test_the_first_byte_wins_and_the_other_attempt_is_no_fault(winner: int) -> None:
    run = Hedged()
    run.tell(ev.HeadReceived(attempt=winner, status=200))
    other = 3 - winner
    actions = run.tell(ev.FirstByteReceived(attempt=winner))
    assert kinds(actions) == ["CancelUpstream", "EndAttempt", "Commit"]
    assert the(ev.CancelUpstream, actions[0]).attempt == other
    assert the(ev.Commit, actions[2]).attempt == winner
    outcome = the(ev.EndAttempt, actions[1]).outcome
    assert (outcome.result, outcome.fault) == (Result.CANCELLED, False)
    assert run.tell(ev.FirstByteReceived(attempt=other)) == []
    run.tell(ev.BodyEnded(attempt=winner))
    assert run.machine.state is State.DONE


@pytest.mark.parametrize("first", [1, 2])
def test_if_one_of_two_attempts_fails_the_other_goes_on_alone(first: int) -> None:
    run = Hedged()
    other = 3 - first
    actions = run.tell(ev.Lost(attempt=first, cause=Cause.EOF))
    assert kinds(actions) == ["CancelUpstream", "EndAttempt"]
    run.tell(ev.HeadReceived(attempt=other, status=200))
    assert kinds(run.tell(ev.FirstByteReceived(attempt=other))) == ["Commit"]


@pytest.mark.parametrize("status", [400, 500, 503])
def test_an_error_never_wins_while_another_attempt_may_still_serve(status: int) -> None:
    run = Hedged()
    said = ev.Answered(attempt=2, status=status, failure=FailureClass.OTHER, whole=True)
    assert kinds(run.tell(said)) == ["CancelUpstream", "EndAttempt"]
    run.tell(ev.HeadReceived(attempt=1, status=200), at=run.now + 1_000)
    assert "Commit" in kinds(run.tell(ev.FirstByteReceived(attempt=1)))


def test_if_both_attempts_hang_a_third_one_is_made_and_no_fourth() -> None:
    run = Hedged()
    while "Decide" not in kinds(run.tell(ev.TimePassed(), at=run.machine.deadline)):
        pass
    assert the(ev.Decide, run.actions[-1]).tried == {key("a"), key("b")}
    run.dialled("c")
    run.tell(ev.Connected(attempt=3))
    while run.machine.deadline is not None:
        assert "Decide" not in kinds(run.tell(ev.TimePassed(), at=run.machine.deadline))
    run.tell(ev.HeadReceived(attempt=2, status=200))
    ended = run.tell(ev.FirstByteReceived(attempt=2))
    assert sorted(each.outcome.attempt for each in ended if isinstance(each, ev.EndAttempt)) == [1, 3]


def test_without_a_free_place_a_second_attempt_is_looked_for_again() -> None:
    run = Run(hedge=Hedge.HUNG).sent()
    run.tell(ev.TimePassed(), at=POLICY.hung_ms)
    run.tell(ev.NoSpare())
    assert run.machine.deadline == POLICY.hung_ms + POLICY.spare_retry_ms


def test_an_endpoint_that_is_doubted_gets_a_second_attempt_at_once_unless_that_is_switched_off() -> None:
    actions = Run(hedge=Hedge.HUNG).sent().tell(ev.EndpointDoubtful(attempt=1))
    assert kinds(actions) == ["Decide"]
    assert the(ev.Decide, actions[0]).spare
    assert Run().sent().tell(ev.EndpointDoubtful(attempt=1)) == []


def test_a_doubt_that_is_told_again_and_again_asks_for_a_free_place_no_more_often_than_every_few_seconds() -> (
    None
):
    run = Run(hedge=Hedge.HUNG).sent()
    assert kinds(run.tell(ev.EndpointDoubtful(attempt=1))) == ["Decide"]
    run.tell(ev.NoSpare())
    for at in range(0, POLICY.spare_retry_ms, 100):
        assert run.tell(ev.EndpointDoubtful(attempt=1), at=at) == []
    assert kinds(run.tell(ev.TimePassed(), at=POLICY.spare_retry_ms)) == ["Decide"]


def test_the_deadline_and_the_client_end_all_attempts_under_way() -> None:
    late = Hedged(until_ms=100_000).tell(ev.TimePassed(), at=100_000)
    assert kinds(late) == ["CancelUpstream", "EndAttempt", "CancelUpstream", "EndAttempt", "Reply"]
    assert late[-1] == ev.Reply(status=504, code="upstream_timeout", retry_after_s=None)
    gone = Hedged().tell(ev.ClientGone())
    assert kinds(gone) == ["CancelUpstream", "EndAttempt", "CancelUpstream", "EndAttempt"]


def test_the_byte_wins_against_an_abandon_that_is_handled_later() -> None:
    run = Run().sent()
    run.tell(ev.HeadReceived(attempt=1, status=200), at=9_999)
    run.tell(ev.FirstByteReceived(attempt=1), at=10_000)
    assert run.tell(ev.NoSignOfLife(attempt=1, cause=Cause.SILENT)) == []
    assert run.machine.state is State.STREAMING


def test_an_abandoned_attempts_byte_changes_nothing() -> None:
    run = Run().sent("a")
    run.tell(ev.NoSignOfLife(attempt=1, cause=Cause.SILENT))
    run.dialled("b")
    assert run.tell(ev.FirstByteReceived(attempt=1)) == []
    assert run.tell(ev.BodyEnded(attempt=1)) == []
    assert run.machine.state is State.DIALLING


@pytest.mark.lesson("ai-dynamo/dynamo#475: tokens repeated after a failover")
def test_after_commit_a_loss_is_told_and_never_retried() -> None:
    run = Run().streaming()
    assert kinds(run.lost()) == ["CancelUpstream", "TellError", "EndAttempt"]
    assert run.outcomes()[0].result is Result.BROKEN
    assert run.outcomes()[0].fault


def test_idle_time_counts_from_the_last_byte() -> None:
    run = Run().streaming()
    assert run.tell(ev.TimePassed(last_byte_ms=200_000), at=300_000) == []
    assert run.machine.deadline == 500_000
    assert run.tell(ev.TimePassed(last_byte_ms=200_000), at=500_000)[1] == ev.TellError(
        code="upstream_timeout"
    )


def test_before_the_answer_itself_begins_its_stream_has_until_the_deadline() -> None:
    run = Run(until_ms=1_800_000).streaming()
    role = ev.TimePassed(last_byte_ms=1_000, content=False)
    assert run.tell(role, at=301_000) == []
    assert run.tell(role, at=1_799_999) == []
    assert run.tell(role, at=1_800_000)[1] == ev.TellError(code="upstream_timeout")
    begun = Run(until_ms=1_800_000).streaming()
    assert begun.tell(ev.TimePassed(last_byte_ms=1_000), at=301_000)[1] == ev.TellError(
        code="upstream_timeout"
    )


def test_a_peers_stream_has_no_limit_here_but_its_own_node_does_not_answer_for_thirty_seconds() -> None:
    stream = Run().streaming(peer=True)
    before = stream.machine.deadline
    stream.tell(ev.NodeSuspected(), at=1_000)
    assert (before, stream.machine.deadline) == (None, 31_000)
    assert stream.tell(ev.TimePassed(last_byte_ms=30_000), at=31_000) == []
    assert stream.tell(ev.TimePassed(last_byte_ms=30_000), at=60_000)[1] == ev.TellError(code="upstream_lost")
    back = Run().streaming(peer=True)
    back.tell(ev.NodeSuspected(), at=1_000)
    back.tell(ev.NodeRecovered(), at=2_000)
    assert back.machine.deadline is None


def test_a_gone_peer_is_left_at_once() -> None:
    assert "Decide" in kinds(Run().sent(peer=True).lost(Cause.GONE))
    assert "TellError" in kinds(Run().streaming(peer=True).lost(Cause.GONE))


def test_a_cancelled_attempt_is_never_the_endpoints_fault() -> None:
    for run in (Run().dialled(), Run().sent(), Run().streaming()):
        assert kinds(run.tell(ev.ClientGone())) == ["CancelUpstream", "EndAttempt"]
        assert run.outcomes()[0].result is Result.CANCELLED
        assert not run.outcomes()[0].fault


def test_nothing_is_dispatched_after_the_deadline() -> None:
    run = Run(until_ms=5_000).sent()
    assert run.machine.deadline == 5_000
    actions = run.tell(ev.TimePassed(), at=5_000)
    assert kinds(actions) == ["CancelUpstream", "EndAttempt", "Reply"]
    assert the(ev.Reply, actions[-1]).status == 504
    assert not run.outcomes()[0].fault


def test_stopping_tells_the_truth_before_and_after_commit() -> None:
    assert Run().sent().tell(ev.ShuttingDown())[-1] == ev.Reply(
        status=503, code="shutting_down", retry_after_s=None
    )
    assert ev.TellError(code="shutting_down") in Run().streaming().tell(ev.ShuttingDown())


FULL = ev.TurnedAway(status=429, code="queue_full", retry_after_s=3)


def queued(until_ms: int = 60_000) -> ev.Queued:
    return ev.Queued(until_ms=until_ms, turned=FULL)


def test_a_held_request_decides_again_when_it_is_woken() -> None:
    run = Run()
    assert run.tell(queued()) == []
    assert (run.machine.state, run.machine.deadline) == (State.HELD, 60_000)
    assert run.tell(ev.Woken()) == [
        ev.Decide(tried=frozenset(), refused=frozenset(), declined=frozenset(), attempt=1)
    ]
    assert run.tell(queued()) == []
    run.tell(ev.Woken())
    assert kinds(run.tell(ev.Decided(target=target()))) == ["Dial"]
    assert run.machine.deadline == 2_000


def test_who_is_held_too_long_is_turned_away() -> None:
    run = Run()
    run.tell(queued(5_000))
    assert run.tell(ev.TimePassed(), at=4_999) == []
    assert run.tell(ev.TimePassed(), at=5_000) == [ev.Reply(status=429, code="queue_full", retry_after_s=3)]
    assert run.machine.state is State.REFUSED


def test_a_client_that_leaves_while_held_ends_no_attempt() -> None:
    run = Run()
    run.tell(queued())
    assert run.tell(ev.ClientGone()) == []
    assert (run.machine.state, run.machine.deadline) == (State.CANCELLED, None)


def test_a_stop_is_told_to_who_is_held() -> None:
    run = Run()
    run.tell(queued())
    assert run.tell(ev.ShuttingDown()) == [ev.Reply(status=503, code="shutting_down", retry_after_s=None)]


def test_a_failed_request_that_is_held_in_vain_is_told_429_and_no_bad_gateway() -> None:
    run = Run().sent()
    run.lost()
    run.tell(queued(5_000))
    assert run.tell(ev.TimePassed(), at=5_000)[-1] == ev.Reply(status=429, code="queue_full", retry_after_s=3)
    run = Run().sent()
    run.lost()
    assert run.tell(FULL) == [ev.Reply(status=429, code="queue_full", retry_after_s=3)]


def test_after_a_wait_a_refusal_is_old_news_and_another_one_is_spared() -> None:
    run = Run()
    for name in "ab":
        run.dialled(name, peer=True, patient=True)
        run.tell(ev.Connected(attempt=run.machine.attempt))
        actions = run.tell(ev.IngressRefused(attempt=run.machine.attempt, cause="queue_full"))
        assert the(ev.Decide, actions[-1]).refused == {key(name)}
        run.tell(queued())
        assert the(ev.Decide, run.tell(ev.Woken())[-1]).refused == frozenset()
    assert run.machine.dispatches == 0


def test_refusals_are_not_spared_for_ever() -> None:
    run = Run(policy=ExchangePolicy(refusals=2))
    for _ in range(5):
        run.dialled(peer=True)
        run.tell(ev.Connected(attempt=run.machine.attempt))
        run.tell(ev.IngressRefused(attempt=run.machine.attempt, cause="queue_full"))
        run.tell(queued())
        run.tell(ev.Woken())
    assert run.machine.state is State.FAILED
    assert run.machine.attempt == 5
    assert run.actions[-1] == ev.Reply(status=429, code="queue_full", retry_after_s=None)


def test_how_late_is_overdue_follows_prediction_above_its_floor() -> None:
    def limit(*, ttft_ms: float = 0.0, load_ms: float = 0.0, ect_ms: float = 0.0, stream: bool = True) -> int:
        return overdue_ms(ttft_ms=ttft_ms, load_ms=load_ms, ect_ms=ect_ms, stream=stream)

    assert limit(ttft_ms=100) == 10_000
    assert limit(ttft_ms=65_000, load_ms=60_000) == 3 * 5_000 + 2 * 60_000
    assert limit(ttft_ms=100, ect_ms=20_000, stream=False) == 60_000


ATTEMPT = st.integers(1, 4)
EVENTS = st.one_of(
    st.builds(
        lambda name, peer, limit: ev.Decided(target=target(name, peer=peer, first_byte_ms=limit)),
        st.sampled_from("abcd"),
        st.booleans(),
        st.sampled_from((0, 5_000)),
    ),
    st.sampled_from((ev.TurnedAway(status=503, code="unreachable"), FULL, queued(30_000), ev.Woken())),
    st.builds(ev.Connected, attempt=ATTEMPT),
    st.builds(ev.Continued, attempt=ATTEMPT),
    st.builds(ev.HeadReceived, attempt=ATTEMPT, status=st.sampled_from((200, 204, 302))),
    st.builds(ev.FirstByteReceived, attempt=ATTEMPT),
    st.builds(ev.BodyEnded, attempt=ATTEMPT),
    st.builds(
        ev.Answered,
        attempt=ATTEMPT,
        status=st.sampled_from((400, 404, 429, 500, 503)),
        failure=st.sampled_from(FailureClass),
        whole=st.booleans(),
    ),
    st.builds(ev.IngressRefused, attempt=ATTEMPT, cause=st.sampled_from(("queue_full", "pressure"))),
    st.builds(ev.Lost, attempt=ATTEMPT, cause=st.sampled_from(Cause), stale=st.booleans()),
    st.builds(ev.NoSignOfLife, attempt=ATTEMPT, cause=st.sampled_from((Cause.SILENT, Cause.SUSPECT))),
    st.builds(ev.EndpointDoubtful, attempt=ATTEMPT),
    st.sampled_from(
        (
            ev.NodeSuspected(),
            ev.NodeRecovered(),
            ev.NoSpare(),
            ev.ClientGone(),
            ev.ShuttingDown(),
            ev.TimePassed(),
        )
    ),
)


@pytest.mark.promise("an attempt has one outcome, a request at most one reply")
@given(
    st.lists(st.tuples(EVENTS, st.integers(0, 4_000)), max_size=60),
    st.sampled_from((None, 20_000)),
    st.sampled_from(Hedge),
)
@settings(max_examples=200, deadline=None)
def test_every_attempt_has_one_outcome_and_every_request_at_most_one_reply(
    script: list[tuple[ev.Event, int]], until_ms: int | None, hedge: Hedge
) -> None:
    run = Run(until_ms=until_ms, hedge=hedge)
    for event, passed in script:
        run.tell(event, at=run.now + passed)
    run.tell(ev.ClientGone())
    assert run.machine.state in ENDED
    assert run.machine.deadline is None
    names = kinds(run.actions)
    assert sorted(each.attempt for each in run.outcomes()) == list(range(1, names.count("Dial") + 1))
    assert names.count("Commit") <= 1
    ends = (
        names.count("Reply") + names.count("ReplyAnswer") + names.count("Finish") + names.count("TellError")
    )
    assert ends <= 1
    if "Commit" in names:
        after = names[names.index("Commit") :]
        assert "Decide" not in after
        assert "Dial" not in after
        assert "Reply" not in after
    assert run.machine.dispatches <= POLICY.attempts
    assert names.count("Dial") <= POLICY.attempts + POLICY.spared + POLICY.refusals
    assert sum(each.fault for each in run.outcomes() if each.result is Result.CANCELLED) == 0
