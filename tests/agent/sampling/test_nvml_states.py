"""The supervisor: start, ask, give up, stop, try again."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.sampling import nvml_states as states
from agent.sampling.nvml_states import Absence, ProbeState, ProbeTimes, StateChanged, Supervisor
from agent.sampling.nvml_wire import BINDING_MISSING

SEEN = states.HardwareSeen(True)
HELLO = states.HelloAnswered()
OFF, STARTING, READY, HUNG, STOPPING, UNDEAD, BACKOFF, ENDED = ProbeState


class Level(Random):
    """No jitter."""

    def random(self) -> float:
        return 0.5


class Run:
    """A supervisor under a clock of its own; ``done`` are its actions but ``StateChanged``."""

    def __init__(self, times: ProbeTimes | None = None) -> None:
        self.machine = Supervisor(Level(), times)
        self.now = 0
        self.done: list[states.Action] = []
        self.changes: list[StateChanged] = []

    def tell(self, *events: states.Event) -> None:
        for event in events:
            for action in self.machine.handle(event, self.now):
                (self.changes if isinstance(action, StateChanged) else self.done).append(action)  # type: ignore[arg-type]

    def wait(self, ms: int) -> None:
        """Let time pass, waking the machine whenever it wants."""
        until = self.now + ms
        while self.machine.deadline is not None and self.machine.deadline <= until:
            self.now = max(self.now, self.machine.deadline)
            before = self.machine.deadline
            self.tell(states.WaitPassed())
            assert self.machine.deadline != before or self.machine.deadline is None
        self.now = until

    def drain(self) -> list[str]:
        taken, self.done = [type(action).__name__ for action in self.done], []
        return taken

    @property
    def state(self) -> ProbeState:
        return self.machine.state


def ready() -> Run:
    run = Run()
    run.tell(SEEN, HELLO)
    run.drain()
    assert run.state is READY
    return run


def test_a_host_without_driver_or_gpu_never_starts_a_process() -> None:
    run = Run()
    for _ in range(10):
        run.tell(states.HardwareSeen(False))
        run.wait(30_000)
    assert (run.state, run.done, run.changes, run.machine.alive) == (OFF, [], [], False)


def test_hardware_that_appears_later_is_used() -> None:
    run = Run()
    run.tell(states.HardwareSeen(False), SEEN)
    assert (run.state, run.drain()) == (STARTING, ["Start"])


def test_an_answer_in_time_keeps_it_ready() -> None:
    run = ready()
    run.tell(states.QuestionSent(2_000))
    run.wait(1_999)
    run.tell(states.ReplyReceived())
    run.wait(60_000)
    assert (run.state, run.drain()) == (READY, [])


def test_a_late_answer_within_ten_seconds_is_used() -> None:
    run = ready()
    run.tell(states.QuestionSent(2_000))
    run.wait(2_000)
    assert run.state is HUNG
    run.wait(7_999)
    run.tell(states.ReplyReceived())
    assert (run.state, run.drain()) == (READY, [])


def test_a_hung_call_is_terminated_before_it_is_killed_and_tried_again_later() -> None:
    run = ready()
    run.tell(states.QuestionSent(2_000))
    run.wait(10_000)
    assert (run.state, run.drain()) == (STOPPING, ["Terminate"])
    run.wait(4_999)
    assert run.drain() == []
    run.wait(1)
    assert run.drain() == ["Kill"]
    run.tell(states.Exited())
    assert (run.state, run.machine.cause) == (BACKOFF, Absence.HANG)
    run.wait(4_999)
    assert run.drain() == []
    run.wait(1)
    assert (run.state, run.drain()) == (STARTING, ["Start"])


def test_a_hang_after_ten_good_minutes_waits_no_longer_than_the_first() -> None:
    run = Run()
    run.tell(SEEN)
    for _ in range(3):
        run.tell(HELLO)
        run.wait(600_000)
        run.tell(states.QuestionSent(2_000))
        run.wait(10_000)
        run.tell(states.Exited())
        assert run.machine.deadline == run.now + 5_000
        run.wait(5_000)


def test_no_second_process_is_started_beside_one_that_cannot_die() -> None:
    run = ready()
    run.tell(states.QuestionSent(2_000))
    run.wait(25_000)
    assert run.state is UNDEAD
    run.drain()
    run.wait(3_600_000)
    run.tell(SEEN)
    assert (run.state, run.drain()) == (UNDEAD, [])
    run.tell(states.Exited())
    assert run.state is BACKOFF
    run.wait(5_000)
    assert run.drain() == ["Start"]


def test_crashes_wait_one_two_four_seconds_up_to_a_minute_and_start_over_after_ten_good_minutes() -> None:
    run = Run()
    run.tell(SEEN)
    waits = []
    for _ in range(8):
        run.tell(HELLO, states.Exited())
        assert run.machine.deadline is not None
        waits.append(run.machine.deadline - run.now)
        run.wait(waits[-1])
    assert waits == [1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000]
    run.tell(HELLO)
    run.wait(600_000)
    run.tell(states.Exited())
    assert run.machine.deadline == run.now + 1_000


@pytest.mark.parametrize(
    ("code", "cause", "wait_ms"),
    [
        (9, Absence.INIT, 5_000),
        (12, Absence.INIT, 5_000),
        (18, Absence.INIT, 5_000),
        (999, Absence.INIT, 5_000),
        (4, Absence.DENIED, 5_000),
        (BINDING_MISSING, Absence.BINDING, 300_000),
    ],
)
def test_a_start_that_fails_is_tried_again_for_ever(code: int, cause: Absence, wait_ms: int) -> None:
    run = Run()
    run.tell(SEEN, states.HelloAnswered(code))
    assert (run.state, run.drain()) == (STOPPING, ["Start", "Quit"])
    run.tell(states.Exited())
    assert (run.state, run.machine.cause, run.machine.code) == (BACKOFF, cause, code)
    run.wait(wait_ms - 1)
    assert run.drain() == []
    run.wait(1)
    assert run.drain() == ["Start"]
    run.tell(HELLO)
    assert (run.state, run.machine.cause, run.machine.code) == (READY, None, 0)


def test_a_new_driver_version_ends_the_wait() -> None:
    run = Run()
    run.tell(SEEN, states.HelloAnswered(18), states.Exited(), SEEN)
    assert run.state is BACKOFF
    run.tell(states.HardwareSeen(True, changed=True))
    assert run.state is STARTING


def test_a_driver_that_was_removed_ends_the_tries() -> None:
    run = Run()
    run.tell(SEEN, states.HelloAnswered(9), states.Exited(), states.HardwareSeen(False))
    run.wait(3_600_000)
    assert (run.state, run.machine.deadline) == (OFF, None)


def test_an_unwanted_process_is_asked_then_terminated_then_killed() -> None:
    run = ready()
    run.tell(states.Unwanted(Absence.RECYCLE))
    assert run.drain() == ["Quit"]
    run.wait(700)
    assert run.drain() == ["Terminate"]
    run.wait(2_000)
    assert run.drain() == ["Kill"]
    run.tell(states.Exited())
    run.wait(0)
    assert (run.state, run.drain()) == (STARTING, ["Start"])


@pytest.mark.parametrize("hung", [False, True])
def test_the_end_of_the_daemon_waits_less_than_two_seconds(hung: bool) -> None:
    run = ready()
    if hung:
        run.tell(states.QuestionSent(2_000))
        run.wait(3_000)
    run.tell(states.EndRequested())
    assert run.drain() == ["Terminate"]
    run.wait(1_500)
    assert run.drain() == ["Kill"]
    run.wait(300)
    assert run.state is ENDED
    run.tell(states.Exited(), SEEN)
    assert (run.state, run.drain()) == (ENDED, [])


def test_the_end_without_a_process_is_at_once() -> None:
    run = Run()
    run.tell(states.EndRequested())
    assert (run.state, run.done) == (ENDED, [])


EVENTS = st.one_of(
    st.builds(states.HardwareSeen, st.booleans(), st.booleans()),
    st.builds(states.HelloAnswered, st.sampled_from([0, 0, 4, 9, 18, 1002])),
    st.just(states.QuestionSent(2_000)),
    st.just(states.ReplyReceived()),
    st.builds(states.Unwanted, st.sampled_from(Absence)),
    st.just(states.Exited()),
    st.integers(0, 400_000),
)


@settings(max_examples=100, deadline=None)
@given(steps=st.lists(EVENTS, max_size=40))
def test_there_are_never_two_processes_and_no_kill_without_a_term(steps: list[states.Event | int]) -> None:
    run = Run()
    alive = terminated = False
    for step in steps:
        if isinstance(step, int):
            run.wait(step)
        elif (isinstance(step, states.Exited) and not alive) or (
            isinstance(step, states.QuestionSent) and run.state is not READY
        ):
            continue
        else:
            run.tell(step)
            alive = alive and not isinstance(step, states.Exited)
        for action in run.drain():
            match action:
                case "Start":
                    assert not alive
                    alive, terminated = True, False
                case "Terminate":
                    terminated = True
                case "Kill":
                    assert alive
                    assert terminated
        assert run.machine.alive == alive
        assert (run.machine.deadline is not None) or run.state in (OFF, READY, UNDEAD)


MORE, LAST = states.Exited(True), states.Exited()


def refused(code: int) -> states.HelloAnswered:
    return states.HelloAnswered(code)


def test_every_library_is_tried_before_there_is_a_wait_and_the_one_that_answers_is_used() -> None:
    run = Run()
    run.tell(SEEN, refused(9), MORE)
    assert (run.state, run.now) == (STARTING, 0)
    run.tell(refused(12), MORE, HELLO)
    assert (run.state, run.machine.code, run.machine.cause) == (READY, 0, None)
    assert BACKOFF not in [change.state for change in run.changes]


@pytest.mark.parametrize(
    ("codes", "counts", "cause"),
    [
        ((9, 18, 12), 18, Absence.INIT),
        ((12, 9), 9, Absence.INIT),
        ((9, 4), 4, Absence.DENIED),
        ((999, 9), 999, Absence.INIT),
        ((12, 27), 27, Absence.INIT),
        ((12,), 12, Absence.INIT),
    ],
)
def test_of_libraries_that_all_refuse_the_most_telling_reason_counts(
    codes: tuple[int, ...], counts: int, cause: Absence
) -> None:
    run = Run()
    run.tell(SEEN)
    for number, code in enumerate(codes, start=1):
        run.tell(refused(code), states.Exited(number < len(codes)))
    assert (run.state, run.machine.code, run.machine.cause) == (BACKOFF, counts, cause)


def test_a_library_that_ends_its_process_hides_no_other() -> None:
    run = Run()
    run.tell(SEEN, MORE)
    assert run.state is STARTING
    run.tell(HELLO)
    assert run.state is READY
    run.tell(MORE)
    assert run.state is BACKOFF


def test_a_library_that_refuses_is_tried_ever_more_rarely_and_at_once_when_something_changed() -> None:
    run = Run()
    run.tell(SEEN)
    starts: list[int] = []
    while run.now < 86_400_000:
        if run.state is STARTING:
            starts.append(run.now)
            run.tell(refused(9), LAST)
        run.wait(1_000)
    assert len([at for at in starts if at < 900_000]) <= 8
    assert len(starts) <= 10 + 24
    run.tell(states.HardwareSeen(True))
    assert run.state is BACKOFF
    run.tell(states.HardwareSeen(True, True))
    assert run.state is STARTING
    run.tell(refused(9), LAST)
    run.wait(6_000)
    assert run.state is STARTING
