"""What the log says of members that come and go."""

import json
from typing import Any

from agent.node.status.member_log import MemberLog
from agent.observe.log import Log
from router_core import limits
from router_core.ids import NodeName, short_id
from router_core.record.membership import Liveness, ViewChange
from router_core.view.cluster import ClusterView
from router_core.view.fold import empty, fold
from tests.agent.node.rig import HandClock
from tests.support.cluster_views import a_change, a_member
from tests.support.fleets import ME, NOW


class Watched:
    def __init__(self, *names: str) -> None:
        self.lines: list[str] = []
        self.members = {member.id16: member for member in map(a_member, names)}
        self.view: ClusterView = fold(empty(ME, NodeName("me")), [], self.members, NOW)
        self.clock = HandClock()
        self.log = MemberLog(lambda: self.view, Log(self.lines.append, self.clock))

    def see(self, *changes: ViewChange) -> list[dict[str, Any]]:
        """The lines that these changes make."""
        self.lines.clear()
        self.log.heard(changes)
        return [json.loads(line) for line in self.lines]


def events(lines: list[dict[str, Any]]) -> list[str]:
    return [line["event"] for line in lines]


def test_each_turn_of_a_members_life_is_one_line() -> None:
    watched = Watched("a")
    (line,) = watched.see(a_change("a"))
    assert (line["event"], line["level"], line["node"]) == ("member.new", "info", "a")
    assert line["id"] == short_id(a_member("a").node_id)
    for state, said in (
        (Liveness.FRESH, []),
        (Liveness.LATE, []),
        (Liveness.SUSPECT, ["member.suspect"]),
        (Liveness.SUSPECT, []),
        (Liveness.LATE, ["member.back"]),
        (Liveness.SUSPECT, ["member.suspect"]),
        (Liveness.GONE, ["member.gone"]),
        (Liveness.FRESH, ["member.back"]),
        (Liveness.LEFT, ["member.left"]),
        (Liveness.FRESH, ["member.back"]),
    ):
        assert events(watched.see(a_change("a", state=state))) == said, state


def test_who_was_never_heard_is_not_told() -> None:
    watched = Watched("a")
    for state in (Liveness.UNCONFIRMED, Liveness.SUSPECT, Liveness.GONE):
        assert watched.see(a_change("a", state=state)) == []
    assert events(watched.see(a_change("a"))) == ["member.new"]


def test_a_removed_member_that_comes_again_is_new() -> None:
    watched = Watched("a")
    watched.see(a_change("a"))
    assert watched.see(a_change("a", state=Liveness.REMOVED)) == []
    assert events(watched.see(a_change("a"))) == ["member.new"]


def test_a_member_that_flaps_is_summed_up_and_hides_no_other() -> None:
    watched = Watched("a", "b")
    flapping = [a_change("a", state=state) for state in (Liveness.SUSPECT, Liveness.FRESH)]
    lines = watched.see(a_change("a"), a_change("b"), *(flapping * 200), a_change("b", state=Liveness.GONE))
    assert events(lines).count("member.suspect") == limits.LOG_LINES_PER_MIN
    assert lines[-1]["event"] == "member.gone"
    watched.lines.clear()
    watched.clock.now += 60_000
    watched.see()
    watched.log._log.sum_up()
    assert {json.loads(line)["suppressed"] for line in watched.lines} == {200 - limits.LOG_LINES_PER_MIN}
