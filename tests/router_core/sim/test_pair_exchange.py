"""The dispatch loop of ``pair-1.0``, jitter off, against owners that refuse, are silent or leave."""

from collections.abc import Callable
from functools import partial

from router_core.sim.placement.baselines import pair_exchange as px
from router_core.sim.placement.baselines.pair import Proxy, Snapshot
from router_core.sim.timeline import Timeline


def idle(*nodes: str) -> Proxy:
    """A proxy that ranks these nodes, all of them idle."""
    proxy, none = Proxy(), dict.fromkeys(nodes, 0)
    proxy.apply(Snapshot(generation=1, order=tuple(sorted(nodes)), pending=none, pressure=none))
    return proxy


class Trial:
    """One request against owners that behave by ``script`` (called with this trial, a node and the attempt)."""

    def __init__(self, script: Callable[["Trial", str, int], None], *owners: str) -> None:
        self.timeline = Timeline()
        self.present = list(owners)
        self.dials: list[tuple[str, int]] = []
        self.told: list[tuple[str, str | None]] = []
        self.abandoned: list[int] = []
        self.answer: tuple[int, int] | None = None
        self._script = script
        self.proxy = idle(*owners)
        self.machine = px.PairExchange(
            self.proxy, lambda: list(self.present), lambda node: node in self.present, lambda: 1.0, 0
        )
        self.perform(self.machine.begin(0))

    def perform(self, actions: list[px.Action]) -> None:
        now = self.timeline.now
        for action in actions:
            if isinstance(action, px.Dial):
                self.dials.append((action.node, now))
                self.timeline.at(now, partial(self._script, self, action.node, action.attempt))
            elif isinstance(action, px.Tell):
                self.told.append((action.state, action.node))
            elif isinstance(action, px.Abandon):
                self.abandoned.append(action.attempt)
            else:
                self.answer = (action.status, now)
        deadline = self.machine.deadline
        if deadline is not None:
            self.timeline.at(deadline, self._pass)

    def _pass(self) -> None:
        if self.machine.deadline is not None and self.machine.deadline <= self.timeline.now:
            self.perform(self.machine.passed(self.timeline.now))

    def run(self, until_s: int = 1_000) -> "Trial":
        self.timeline.run_until(1000 * until_s)
        return self

    @property
    def seconds(self) -> list[tuple[str, float]]:
        return [(node, at / 1000) for node, at in self.dials]


def refuses(trial: Trial, _node: str, attempt: int) -> None:
    trial.perform(trial.machine.refused(attempt, trial.timeline.now))


def says(status: int) -> Callable[[Trial, str, int], None]:
    def script(trial: Trial, _node: str, attempt: int) -> None:
        trial.perform(trial.machine.connected(attempt, trial.timeline.now))
        trial.perform(trial.machine.headers(attempt, status, trial.timeline.now))

    return script


def is_silent(trial: Trial, _node: str, attempt: int) -> None:
    trial.perform(trial.machine.connected(attempt, trial.timeline.now))


def serves(trial: Trial, node: str, attempt: int) -> None:
    says(200)(trial, node, attempt)
    trial.perform(trial.machine.first_byte(attempt, trial.timeline.now))
    trial.timeline.after(1_000, lambda: trial.perform(trial.machine.ended(attempt, trial.timeline.now)))


def test_13_an_owner_that_is_always_busy_is_tried_five_times() -> None:
    trial = Trial(says(503), "a").run()
    assert [at for _, at in trial.seconds] == [0, 1, 3, 7, 15]
    assert trial.answer == (503, 15_000)


def test_14_two_refusing_owners_are_tried_in_rounds() -> None:
    trial = Trial(refuses, "a", "b").run()
    assert trial.seconds == [("a", 0), ("b", 0), ("a", 2), ("b", 2), ("a", 10)]
    assert trial.answer == (502, 10_000)


def test_15_a_silent_owner_costs_two_minutes_each_time() -> None:
    trial = Trial(is_silent, "a").run()
    assert [at for _, at in trial.seconds] == [0, 121, 243, 367, 495]
    assert trial.answer == (502, 615_000)


def test_16_an_owner_that_leaves_is_given_up_at_the_next_check() -> None:
    def script(trial: Trial, node: str, attempt: int) -> None:
        (is_silent if node == "a" else serves)(trial, node, attempt)

    trial = Trial(script, "a", "b")
    trial.timeline.at(30_100, lambda: trial.present.remove("a"))
    trial.run()
    assert trial.seconds == [("a", 0), ("b", 30.5)]
    assert trial.abandoned == [1]
    assert trial.answer is not None
    assert trial.answer[0] == 200


def test_17_headers_and_then_silence_are_tried_again_after_two_minutes() -> None:
    trial = Trial(says(200), "a", "b").run(until_s=121)
    assert trial.seconds == [("a", 0), ("b", 120)]


def test_18_without_an_owner_the_answer_comes_at_once() -> None:
    trial = Trial(refuses)
    assert trial.answer == (502, 0)
    assert not trial.dials


def test_other_client_errors_are_passed_through_at_once() -> None:
    trial = Trial(says(400), "a", "b").run()
    assert trial.answer == (400, 0)
    assert len(trial.dials) == 1


def test_everybody_hears_of_each_step() -> None:
    trial = Trial(serves, "a").run()
    assert trial.told == [("queued", "a"), ("running", "a"), ("completed", "a")]


def test_a_pause_unplaces_the_job_and_frees_its_reservation() -> None:
    trial = Trial(refuses, "a")
    trial.timeline.run_until(500)
    assert trial.told == [("queued", "a"), ("queued", None)]
    assert not trial.proxy.reserved


def test_after_the_first_byte_nothing_is_tried_again() -> None:
    def script(trial: Trial, node: str, attempt: int) -> None:
        says(200)(trial, node, attempt)
        trial.perform(trial.machine.first_byte(attempt, trial.timeline.now))

    trial = Trial(script, "a", "b").run(until_s=5_000)
    assert trial.seconds == [("a", 0)]
    assert trial.machine.deadline is None


def test_owners_that_all_left_are_waited_for_until_the_window_ends() -> None:
    def script(trial: Trial, node: str, attempt: int) -> None:
        trial.present.clear()
        refuses(trial, node, attempt)

    trial = Trial(script, "a").run()
    assert len(trial.dials) == 1
    assert trial.answer == (503, 600_000)
