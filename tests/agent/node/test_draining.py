"""What drains takes nothing new, ends what it has, and is given up when its time is over."""

import pytest

from agent.node.config.drains import MOST_MS, Drains
from tests.agent.node.rig import HandClock


class Host:
    """Two endpoints and their requests."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.work = {"a": 0, "b": 0}
        self.cuts: list[str] = []
        self.changes = 0
        self.drains = Drains(
            endpoints=lambda: self.work,
            in_flight=lambda name: self.work[name],
            cut=self.cuts.append,
            changed=self._changed,
            clock=self.clock,
        )

    def _changed(self) -> None:
        self.changes += 1

    def stages(self) -> dict[str | None, str]:
        return {doc.endpoint: doc.stage for doc in self.drains.docs()}


@pytest.fixture
def host() -> Host:
    return Host()


def test_a_drain_is_told_at_once_and_done_when_empty(host: Host) -> None:
    host.work["a"] = 1
    host.drains.begin("a")
    assert (host.changes, host.stages(), "a" in host.drains, "b" in host.drains) == (
        1,
        {"a": "draining"},
        True,
        False,
    )
    host.work["a"] = 0
    assert host.stages() == {"a": "drained"}
    host.drains.undo("a")
    assert (host.changes, host.stages(), host.drains.told("a").stage) == (2, {}, "active")


def test_the_node_is_drained_when_all_its_endpoints_are_empty(host: Host) -> None:
    host.work["b"] = 2
    host.drains.begin(None)
    assert (host.drains.told(None).in_flight, host.stages()) == (2, {None: "draining"})
    host.drains.begin("a")
    host.drains.undo(None)
    assert host.stages() == {}


def test_what_is_left_after_its_time_is_given_up_once(host: Host) -> None:
    host.work["a"] = 1
    host.drains.begin("a")
    host.clock.now += MOST_MS - 1
    host.drains.sweep()
    assert host.cuts == []
    host.clock.now += 1
    host.drains.sweep()
    host.drains.sweep()
    assert host.cuts == ["a"]


def test_a_whole_node_gives_up_what_is_left_everywhere(host: Host) -> None:
    host.drains.begin(None)
    host.clock.now += MOST_MS
    host.drains.sweep()
    assert host.cuts == ["a", "b"]


def test_an_endpoint_without_a_manifest_goes_when_it_is_empty_whatever_the_operator_says(host: Host) -> None:
    host.work["a"] = 1
    host.drains.begin("a")
    host.drains.leave("a")
    host.drains.undo("a")
    assert (host.drains.sweep(), host.stages()) == ([], {"a": "draining"})
    host.work["a"] = 0
    assert host.drains.sweep() == ["a"]
    host.drains.gone("a")
    assert host.stages() == {}


def test_a_manifest_that_comes_back_leaves_the_operators_drain(host: Host) -> None:
    host.drains.begin("a")
    host.drains.leave("a")
    host.drains.stay("a")
    assert host.stages() == {"a": "drained"}
    host.drains.stay("b")
    host.drains.undo("a")
    assert host.stages() == {}


def test_a_drained_endpoint_of_a_manifest_is_never_dropped(host: Host) -> None:
    host.drains.begin("a")
    assert host.drains.sweep() == []
