"""When the machine wants to be woken: rarely in a calm mesh, and never too late for what time alone changes."""

from collections.abc import Callable
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_core.mesh.membership.liveness import LivenessEvidence, judge, stands_ms
from router_core.mesh.protocol import messages as msg
from router_core.mesh.protocol.events import DialFailed, DialFailure, LinkBusy, LinkClosed, LinkId, Ticked
from router_core.policy.mesh import MeshPolicy
from router_core.record.membership import Liveness
from router_core.record.state import LostLink, Volatile
from tests.router_core.mesh.rig import Rig, closed, frames

POLICY = MeshPolicy()


def wakes(rig: Rig, ms: int, heard: Callable[[], None] = lambda: None) -> int:
    """How often the machine is woken in ``ms``; ``heard`` is what others say each second."""
    count, end, second = 0, rig.now + ms, rig.now
    while rig.now < end:
        if rig.now >= second:
            heard()
            second += 1_000
        rig.now = max(rig.now + 1, min(end, second, rig.mesh.deadline))
        if rig.now >= rig.mesh.deadline:
            rig.handle(Ticked())
            count += 1
    return count


def test_a_node_that_knows_nobody_is_woken_for_its_records_and_twice_a_second() -> None:
    rig = Rig(peers=0)
    rig.pass_ms(5_000)
    assert wakes(rig, 60_000) <= 60 * 3


def test_a_node_of_a_calm_mesh_is_woken_no_more_than_four_times_a_second() -> None:
    rig = Rig()
    links = [rig.fresh(peer) for peer in rig.peers]
    rig.pass_ms(3_000, alive=tuple(links))

    def heard() -> None:
        for link, peer in zip(links, rig.peers, strict=True):
            rig.records(link, peer.v(rig.now))

    assert wakes(rig, 60_000, heard) <= 60 * 4
    assert [rig.state(peer) for peer in rig.peers] == [Liveness.FRESH] * 2


def test_a_peer_switched_off_for_the_night_keeps_nobody_awake() -> None:
    rig = Rig(peers=1)
    rig.fresh(rig.peers[0])
    rig.pass_ms(200_000, answer=DialFailure.TIMEOUT)
    assert rig.parts.solitude.lonely
    assert wakes(rig, 60_000) <= 60 * 4


def test_a_link_is_pinged_one_second_after_the_last_message_and_ended_after_silence() -> None:
    rig = Rig(peers=1)
    link = rig.fresh(rig.peers[0])
    rig.pass_ms(10)
    rig.parts.publisher.left = True
    sent_at = rig.parts.links[link].sent_at
    assert [type(message) for message in frames(rig.pass_ms(sent_at + 1_000 - rig.now))] == [msg.Ping]
    heard_at = rig.parts.links[link].heard_at
    rig.pass_ms(heard_at + 3_499 - rig.now)
    assert link in rig.parts.links
    assert closed(rig.pass_ms(1)) == [link]


LOST = Volatile(lost=(LostLink(id16=bytes(16), epoch=7, seq=1),))


@pytest.mark.parametrize(
    "happen",
    [
        lambda rig, link: rig.handle(LinkClosed(link)),
        lambda rig, link: rig.handle(LinkBusy(link)),
        lambda rig, link: rig.handle(DialFailed(rig.peers[1].id16, DialFailure.TIMEOUT)),
        lambda rig, link: rig.open(rig.peers[1]),
        lambda rig, link: rig.records(link, rig.peers[0].v(rig.now, LOST)),
    ],
    ids=["link closed", "link busy", "dial failed", "link opened", "link lost elsewhere"],
)
def test_the_next_look_is_a_tenth_of_a_second_after_what_may_change_soon(
    happen: Callable[[Rig, LinkId], object],
) -> None:
    rig = Rig()
    link, other = (rig.fresh(peer) for peer in rig.peers)
    while rig.parts.gap.next_tick_at <= rig.now + 100:
        rig.pass_ms(10, alive=(link, other))
    happen(rig, link)
    assert rig.parts.gap.next_tick_at == rig.now + 100


evidences = st.builds(
    LivenessEvidence,
    age_ms=st.integers(0, 70_000),
    due_ms=st.sampled_from([2_000, 2_700, 20_000]),
    confirmed=st.booleans(),
    broken_ms=st.none() | st.integers(0, 4_000),
    refused=st.booleans(),
    lost_ms=st.none() | st.integers(0, 2_000),
)


@settings(max_examples=300, deadline=None)
@given(evidences, st.sampled_from(list(Liveness)[:5]), st.data())
def test_a_verdict_stands_as_long_as_is_said(
    seen: LivenessEvidence, was: Liveness, data: st.DataObject
) -> None:
    stands = stands_ms(seen, POLICY)
    later = data.draw(st.integers(0, 200_000 if stands is None else stands - 1))

    def after(ms: int) -> LivenessEvidence:
        return LivenessEvidence(
            age_ms=seen.age_ms + ms,
            due_ms=seen.due_ms,
            confirmed=seen.confirmed,
            broken_ms=None if seen.broken_ms is None else seen.broken_ms + ms,
            refused=seen.refused,
            lost_ms=None if seen.lost_ms is None else seen.lost_ms + ms,
        )

    now = judge(seen, was, POLICY)
    assert judge(after(later), now, POLICY) is now


class Quiet(MeshPolicy):
    """Own records seldom wake the machine."""

    publish_min_ms: ClassVar[int] = 10_000


STATES = [None, *list(Liveness)[:5]]
"""From well to gone: what one machine skips, another may pass on its way."""


class Watched:
    """Three peers seen by a machine; ``eager``: it is also woken every 100 ms, needed or not. Before a word comes both have
    looked: else one that comes to the millisecond as something ends is too late for the one and in time for the other."""

    def __init__(self, eager: bool) -> None:
        self.rig = Rig(peers=3, policy=Quiet())
        self.eager = eager
        self.links: dict[int, LinkId] = {at: self.rig.fresh(peer) for at, peer in enumerate(self.rig.peers)}
        self.seen: list[tuple[set[int], ...]] = []
        """By 100 ms and peer, how bad each verdict was that was held meanwhile."""
        self._held: tuple[set[int], ...] = (set(), set(), set())

    def do(self, what: str, at: int, then_ms: int) -> None:
        rig, peer = self.rig, self.rig.peers[at]
        rig.handle(Ticked())
        self._note()
        self.links = {at: link for at, link in self.links.items() if link in rig.parts.links}
        link = self.links.get(at)
        if what == "all":
            for other, its in self.links.items():
                rig.records(its, rig.peers[other].v(rig.now))
        elif what == "link" and link is None:
            self.links[at] = rig.link_up(peer)
        elif what == "end" and link is not None:
            rig.handle(LinkClosed(link))
        elif what == "tell" and link is not None:
            rig.records(link, peer.v(rig.now))
        elif what == "relay" and link is not None:
            rig.records(link, rig.peers[(at + 1) % 3].v(rig.now))
        elif what == "lose" and link is not None:
            others = [LostLink(id16=lost.id16, epoch=7, seq=2**40) for lost in rig.peers if lost is not peer]
            rig.records(link, peer.v(rig.now, Volatile(lost=tuple(others))))
        for _ in range(then_ms // 100):
            if self.eager:
                rig.handle(Ticked())
            rig.pass_ms(100, answer=DialFailure.TIMEOUT)
            self._note()
            self.seen.append(self._held)
            self._held = (set(), set(), set())

    def _note(self) -> None:
        for held, peer in zip(self._held, self.rig.peers, strict=True):
            held.add(STATES.index(self.rig.state(peer)))


steps = st.tuples(
    st.sampled_from(["all", "all", "all", "link", "end", "tell", "relay", "lose", "wait"]),
    st.integers(0, 2),
    st.sampled_from([100, 300, 700, 1_000, 1_100, 2_300]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(steps, max_size=25))
def test_every_verdict_comes_as_soon_as_if_it_were_looked_for_ten_times_a_second(
    story: list[tuple[str, int, int]],
) -> None:
    eager, calm = Watched(eager=True), Watched(eager=False)
    for step in [*story, ("wait", 0, 7_000)]:
        eager.do(*step)
        calm.do(*step)
    for at in range(2, len(eager.seen) - 2):
        for near, found in zip(zip(*eager.seen[at - 2 : at + 3], strict=True), calm.seen[at], strict=True):
            held = set().union(*near)
            assert min(held) <= min(found) <= max(found) <= max(held), f"{100 * at} ms"
