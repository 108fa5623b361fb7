"""Links from open to close, what they remember, and whom the machine dials. One transcript per rule."""

import itertools
from random import Random

import pytest

from router_core.ids import mesh8_of
from router_core.mesh.links.link import Link
from router_core.mesh.membership.overlay import Dialler
from router_core.mesh.protocol import messages as msg
from router_core.mesh.protocol.events import (
    DialFailed,
    DialFailure,
    FrameReceived,
    LinkBusy,
    LinkClosed,
    LinkId,
    LinkOpened,
    LinkReady,
    PeerSighted,
    PersistDone,
    RosterChanged,
    SavedKey,
)
from router_core.policy.mesh import MeshPolicy
from router_core.record.codec import decode_volatile
from router_core.record.membership import Liveness
from router_core.record.stamp import Stamp
from router_core.record.state import Address, Dispatch, Kind, Static, Volatile
from tests.router_core.mesh.rig import (
    MESH,
    OTHER_MESH,
    Rig,
    alarms,
    byes,
    closed,
    dials,
    frames,
    headers,
)


def hellos(actions: list, link: LinkId) -> list[msg.Hello]:  # type: ignore[type-arg]
    return [message for message in frames(actions, link) if isinstance(message, msg.Hello)]


# --- phases ---


def test_hello_goes_first_and_have_answers_hello() -> None:
    rig = Rig()
    peer = rig.peers[0]
    rig.fresh(rig.peers[1])
    link = rig.open(peer)
    (hello,) = hellos(rig.actions, link)
    assert (hello.id16, hello.mesh8, hello.epoch) == (rig.me.id16, mesh8_of(MESH), 4)
    (have,) = frames(rig.say(link, peer.hello(rig.now)), link)
    assert isinstance(have, msg.Have)
    known = {entry.id16: entry for entry in have.states}
    other = rig.peers[1]
    assert (known[other.id16].sseq, known[other.id16].vseq) == (1, 2)
    assert known[rig.me.id16].epoch == 4


def test_without_a_hello_for_five_seconds_a_link_ends() -> None:
    rig = Rig()
    link = rig.open(rig.peers[0])
    assert closed(rig.pass_ms(4_900)) == []
    assert closed(rig.pass_ms(200)) == [link]


def test_without_have_for_ten_seconds_a_link_ends() -> None:
    rig = Rig()
    link = rig.open(rig.peers[0])
    rig.say(link, rig.peers[0].hello(rig.now))
    assert closed(rig.pass_ms(9_900)) == []
    assert closed(rig.pass_ms(200)) == [link]


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"mesh8": mesh8_of(OTHER_MESH)}, msg.ByeCode.WRONG_MESH),
        ({"proto_min": 2, "proto_max": 3}, msg.ByeCode.VERSION),
        ({"proto_max": 0, "proto_min": 0}, msg.ByeCode.VERSION),
        ({"id16": bytes(16)}, msg.ByeCode.PROTOCOL),
    ],
)
def test_a_hello_that_does_not_fit_is_answered_by_its_code(
    changed: dict[str, object], code: msg.ByeCode
) -> None:
    rig = Rig()
    link = rig.open(rig.peers[0])
    assert byes(rig.say(link, rig.peers[0].hello(rig.now, **changed)), link) == [code]


def test_a_later_protocol_that_still_speaks_ours_is_welcome() -> None:
    rig = Rig()
    link = rig.open(rig.peers[0])
    assert not byes(rig.say(link, rig.peers[0].hello(rig.now, proto_min=1, proto_max=9)), link)


def test_anything_but_hello_first_is_a_protocol_error() -> None:
    rig = Rig()
    link = rig.open(rig.peers[0])
    assert byes(rig.say(link, msg.Ping(nonce=1, boot_ms=1)), link) == [msg.ByeCode.PROTOCOL]


def test_a_link_to_ourselves_ends() -> None:
    rig = Rig()
    actions = rig.handle(LinkOpened(link=LinkId(50), peer=rig.me.id16, dialled=True))
    assert byes(actions) == [msg.ByeCode.SELF]


def test_a_stranger_is_shown_out() -> None:
    rig = Rig()
    actions = rig.handle(LinkOpened(link=LinkId(50), peer=type(rig.me.id16)(bytes(16)), dialled=False))
    assert closed(actions) == [LinkId(50)]


def test_more_than_forty_links_are_too_many() -> None:
    rig = Rig(peers=41)
    links = [rig.open(peer) for peer in rig.peers]
    assert byes(rig.actions, links[40]) == [msg.ByeCode.FULL]
    assert len(rig.parts.links) == 40


def test_a_silent_link_dies_after_three_and_a_half_seconds_without_a_bye() -> None:
    rig = Rig()
    link = rig.fresh(rig.peers[0])
    assert closed(rig.pass_ms(3_400)) == []
    actions = rig.pass_ms(200)
    assert closed(actions) == [link]
    assert not byes(actions)


def test_a_ping_goes_out_after_a_second_without_another_message_and_its_pong_tells_the_round_trip() -> None:
    rig = Rig()
    peer = rig.peers[0]
    link = rig.open(peer)
    rig.say(link, peer.hello(rig.now))
    pings = [message for message in frames(rig.pass_ms(1_050), link) if isinstance(message, msg.Ping)]
    assert len(pings) == 1
    rig.now += 7
    rig.say(link, msg.Pong(nonce=pings[0].nonce, boot_ms=rig.now))
    rtt = rig.parts.links[link].rtt_ms
    assert rtt is not None
    assert 7 <= rtt <= 60
    (pong,) = frames(rig.say(link, msg.Ping(nonce=9, boot_ms=rig.now)), link)
    assert isinstance(pong, msg.Pong)
    assert pong.nonce == 9


def pings(actions: list, link: LinkId) -> list[msg.Ping]:  # type: ignore[type-arg]
    return [message for message in frames(actions, link) if isinstance(message, msg.Ping)]


def test_the_way_is_measured_every_ten_seconds_however_much_is_said() -> None:
    rig = Rig()
    link = rig.link_up(rig.peers[0])
    began, asked = rig.now, []
    for number in range(60):
        said = rig.bodies(Volatile(disp=Dispatch(total=number, rps_c=0, work_c=0)), urgent=True)
        asked += [ping.boot_ms - began for ping in pings(said + rig.pass_ms(500, alive=(link,)), link)]
    assert [at // 1_000 for at in asked] == [10, 20]


def test_the_round_trip_that_the_view_is_told_is_the_least_of_the_last_four() -> None:
    rig = Rig()
    peer = rig.peers[0]
    link = rig.fresh(peer)
    rig.pass_ms(100)
    assert rig.view[peer.id16].rtt_ms is None

    def told_after(*ways_ms: int) -> int | None:
        for way_ms in ways_ms:
            while not (asked := pings(rig.pass_ms(500, alive=(link,)), link)):
                assert rig.now < 2_000_000
            (ping,) = asked
            rig.now = ping.boot_ms + way_ms
            rig.say(link, msg.Pong(nonce=ping.nonce, boot_ms=rig.now))
        rig.records(link, peer.v(rig.now))
        rig.pass_ms(100, alive=(link,))
        return rig.view[peer.id16].rtt_ms

    assert told_after(40, 7, 300) == 7
    assert told_after(60, 50, 90) == 50
    rig.handle(LinkClosed(link=link))
    rig.records(rig.link_up(rig.peers[1]), peer.v(rig.now))
    rig.pass_ms(100)
    assert rig.view[peer.id16].rtt_ms is None


def test_no_round_trip_is_told_of_the_time_that_we_slept() -> None:
    rig = Rig()
    peer = rig.peers[0]
    link = rig.fresh(peer)
    (ping,) = pings(rig.pass_ms(1_000, alive=(link,)), link)
    rig.now += 3_600_000
    rig.say(link, msg.Pong(nonce=ping.nonce, boot_ms=rig.now))
    rig.records(link, peer.v(rig.now))
    rig.pass_ms(100, alive=(link,))
    assert rig.view[peer.id16].rtt_ms is None


def test_a_link_that_cannot_be_written_for_ten_seconds_is_slow() -> None:
    rig = Rig()
    link = rig.fresh(rig.peers[0])
    rig.handle(LinkBusy(link))
    rig.pass_ms(9_900, alive=(link,))
    assert byes(rig.pass_ms(300, alive=(link,)), link) == [msg.ByeCode.SLOW]


def test_a_busy_link_gets_fewer_and_fresher_records() -> None:
    rig = Rig()
    link = rig.fresh(rig.peers[0])
    rig.handle(LinkBusy(link))
    assert not headers(rig.pass_ms(5_000, alive=(link,)), link)
    (newest,) = headers(rig.handle(LinkReady(link)), link)
    assert newest.seq == rig.parts.publisher.seq


def test_a_hello_that_comes_before_our_epoch_is_on_disk_waits_for_it() -> None:
    rig = Rig(start=False)
    rig.bodies()
    peer = rig.peers[0]
    link = rig.open(peer)
    assert not frames(rig.say(link, peer.hello(rig.now)))
    answer = frames(rig.handle(PersistDone(SavedKey.EPOCH, True)), link)
    assert [type(message) for message in answer] == [msg.Hello, msg.Have]
    assert rig.parts.links[link].hello is not None


def test_ids_of_no_member_fill_no_memory() -> None:
    rig = Rig()
    link = rig.open(rig.peers[0])
    rig.say(link, rig.peers[0].hello(rig.now))
    for chunk in range(50):
        states = tuple(msg.HaveState((chunk * 256 + n).to_bytes(16, "big"), 1, 1, 1, 1) for n in range(256))
        rig.say(link, msg.Have(chunk=chunk, chunks=65_535, states=states))
    assert not rig.parts.links[link].known
    assert not rig.parts.origins[rig.peers[1].id16].have()


# --- duplicates and clones ---


@pytest.mark.parametrize("first_dialled", [True, False])
def test_of_two_links_of_one_life_the_one_dialled_by_the_smaller_id_stays(first_dialled: bool) -> None:
    rig = Rig()
    peer = rig.peers[0]
    first = rig.link_up(peer, dialled=first_dialled)
    second = rig.link_up(peer, dialled=not first_dialled)
    smaller_dialled = rig.me.id16 < peer.id16
    kept, lost = (first, second) if first_dialled is smaller_dialled else (second, first)
    assert list(rig.parts.links) == [kept]
    assert byes(rig.actions, lost) == [msg.ByeCode.DUP_LINK]
    assert rig.parts.losses.current(rig.now) == ()


@pytest.mark.parametrize("dialled", [True, False])
def test_of_two_links_dialled_by_one_end_the_later_stays(dialled: bool) -> None:
    rig = Rig()
    peer = rig.peers[0]
    first = rig.link_up(peer, dialled=dialled)
    rig.now += 40
    second = rig.link_up(peer, dialled=dialled)
    assert list(rig.parts.links) == [second]
    assert byes(rig.actions, first) == [msg.ByeCode.DUP_LINK]


def test_a_restarted_peer_replaces_its_old_link() -> None:
    rig = Rig()
    peer = rig.peers[0]
    first = rig.fresh(peer)
    rig.now += 40
    peer.restart()
    second = rig.link_up(peer)
    assert list(rig.parts.links) == [second]
    assert byes(rig.actions, first) == [msg.ByeCode.DUP_IDENTITY]
    assert not alarms(rig.actions)


def test_two_lives_in_one_epoch_lose_both_links_and_raise_the_alarm() -> None:
    rig = Rig()
    peer = rig.peers[0]
    rig.fresh(peer)
    rig.now += 40
    peer.restart(peer.epoch)
    rig.link_up(peer)
    assert not rig.parts.links
    assert alarms(rig.actions) == ["duplicate_identity"]


def test_an_old_life_that_still_sends_raises_the_alarm() -> None:
    rig = Rig()
    peer = rig.peers[0]
    old = rig.fresh(peer)
    rig.now += 40
    new = rig.open(peer)
    rig.now += 40
    rig.say(old, msg.Pong(nonce=0, boot_ms=1))
    peer.restart()
    rig.say(new, peer.hello(rig.now))
    assert list(rig.parts.links) == [new]
    assert alarms(rig.actions) == ["duplicate_identity"]


def test_a_peer_that_forgot_itself_is_shown_its_own_record() -> None:
    rig = Rig()
    peer = rig.peers[0]
    link = rig.fresh(peer)
    rig.handle(LinkClosed(link))
    peer.restart(2)
    again = rig.link_up(peer)
    shown = [header for header in headers(rig.actions, again) if header.id16 == peer.id16]
    assert [(header.kind, header.epoch) for header in shown] == [(Kind.V, 7)]


def test_a_peer_that_left_and_forgot_itself_is_shown_its_leave() -> None:
    rig = Rig()
    peer = rig.peers[0]
    link = rig.fresh(peer)
    rig.records(link, peer.leave(rig.now))
    rig.handle(LinkClosed(link))
    peer.restart(1)
    again = rig.link_up(peer)
    assert [header.kind for header in headers(rig.actions, again) if header.id16 == peer.id16] == [Kind.L]


# --- memory and flush ---


def test_have_sets_known_exactly_and_only_what_is_missing_is_sent() -> None:
    rig = Rig()
    peer, other = rig.peers
    rig.fresh(other)
    link = rig.open(peer)
    rig.say(link, peer.hello(rig.now))
    own = rig.parts.publisher
    have = msg.HaveState(rig.me.id16, own.epoch, 1, own.seq, 0)
    actions = rig.say(link, msg.Have(chunk=0, chunks=1, states=(have,)))
    assert not headers(actions + rig.pass_ms(50), link)
    assert rig.parts.links[link].known[rig.me.id16, Kind.S] == Stamp(own.epoch, 1)


def test_chunks_out_of_order_end_the_link() -> None:
    rig = Rig()
    link = rig.open(rig.peers[0])
    rig.say(link, rig.peers[0].hello(rig.now), msg.Have(chunk=0, chunks=3))
    assert byes(rig.say(link, msg.Have(chunk=2, chunks=3)), link) == [msg.ByeCode.PROTOCOL]


def test_records_of_others_are_not_relayed_but_a_leave_is_at_once() -> None:
    rig = Rig(peers=3)
    one, two = rig.fresh(rig.peers[0]), rig.link_up(rig.peers[1])
    actions = rig.records(one, rig.peers[0].v(rig.now)) + rig.pass_ms(600, alive=(one, two))
    assert all(header.id16 == rig.me.id16 for header in headers(actions, two))
    actions = rig.records(one, rig.peers[0].leave(rig.now)) + rig.pass_ms(6)
    (left,) = [header for header in headers(actions, two) if header.kind == Kind.L]
    assert left.id16 == rig.peers[0].id16
    assert not [header for header in headers(actions, one) if header.kind == Kind.L]
    assert rig.state(rig.peers[0]) is Liveness.LEFT
    late = rig.link_up(rig.peers[2])
    rig.pass_ms(6)
    assert [header.id16 for header in headers(rig.actions, late) if header.kind == Kind.L] == [
        rig.peers[0].id16
    ]


def test_a_leave_that_comes_back_is_not_sent_again() -> None:
    rig = Rig()
    one, two = rig.fresh(rig.peers[0]), rig.link_up(rig.peers[1])
    left = rig.peers[0].leave(rig.now)
    rig.records(one, left)
    rig.pass_ms(50)
    start = len(rig.actions)
    rig.records(two, left)
    rig.pass_ms(600, alive=(one, two))
    assert not [header for header in headers(rig.actions[start:]) if header.kind == Kind.L]


def test_a_missing_s_is_wanted_once_a_second_from_another_link_each_time() -> None:
    rig = Rig()
    peer, other = rig.peers
    link, second = rig.link_up(peer), rig.link_up(other)
    peer.s(rig.now)
    asked: list[LinkId] = []
    for _ in range(30):
        actions = rig.records(link, peer.v(rig.now)) + rig.pass_ms(200, alive=(link, second))
        asked += [at for at in (link, second) for m in frames(actions, at) if isinstance(m, msg.Want)]
    assert 5 <= len(asked) <= 7
    assert all(a != b for a, b in itertools.pairwise(asked))
    assert rig.view[peer.id16].static is None


def test_a_wanted_record_is_sent_whatever_known_says_but_not_in_a_loop() -> None:
    rig = Rig()
    link = rig.fresh(rig.peers[0])
    rig.pass_ms(50)
    want = msg.Want((msg.Wanted(rig.me.id16, Kind.S, 4, 1), msg.Wanted(rig.me.id16, Kind.S, 9, 1)))
    actions = []
    for _ in range(10):
        actions += rig.say(link, want) + rig.pass_ms(10)
    assert [header.kind for header in headers(actions, link) if header.kind == Kind.S] == [Kind.S]


def test_a_have_gap_asks_for_s_of_the_unlinked_and_for_unknown_own_records() -> None:
    rig = Rig()
    peer, far = rig.peers
    states = (msg.HaveState(far.id16, 7, 3, 4, 0), msg.HaveState(rig.me.id16, 90, 1, 2, 0))
    link = rig.link_up(peer, states=states)
    wanted = [item for m in frames(rig.actions, link) if isinstance(m, msg.Want) for item in m.items]
    assert {(item.id16, item.kind) for item in wanted} == {
        (far.id16, Kind.S),
        (rig.me.id16, Kind.S),
        (rig.me.id16, Kind.V),
    }


def test_flush_sends_leaves_first_and_then_s_before_v_of_one() -> None:
    rig = Rig()
    link = Link(LinkId(1), rig.peers[0].id16, False, MeshPolicy(), 0)
    a, b = rig.peers[0].id16, rig.peers[1].id16
    for slot in ((a, Kind.V), (b, Kind.V), (a, Kind.S), (b, Kind.L)):
        link.mark(slot, 10)
    assert link.send_order() == [(b, Kind.L), (a, Kind.S), (a, Kind.V), (b, Kind.V)]
    link.sent((a, Kind.S), Stamp(1, 1))
    assert link.send_order() == [(b, Kind.L), (b, Kind.V), (a, Kind.V)]


# --- ends ---


@pytest.mark.parametrize("code", [msg.ByeCode.DUP_LINK, msg.ByeCode.GOING_DOWN, msg.ByeCode.TRIM])
def test_a_planned_end_is_not_told_as_lost_and_not_dialled_at_once(code: msg.ByeCode) -> None:
    rig = Rig()
    peer = rig.peers[0]
    link = rig.fresh(peer)
    actions = rig.say(link, msg.Bye(code=code))
    assert closed(actions) == [link]
    assert rig.parts.losses.current(rig.now) == ()
    assert peer.id16 not in dials(actions)


@pytest.mark.parametrize("code", [None, msg.ByeCode.SLOW, msg.ByeCode.PROTOCOL, 99])
def test_an_abnormal_end_is_told_as_lost_and_dialled_once_at_once(code: int | None) -> None:
    rig = Rig()
    peer = rig.peers[0]
    link = rig.fresh(peer)
    rig.pass_ms(10_000, alive=(link,))
    start = rig.handle(LinkClosed(link)) if code is None else rig.say(link, msg.Bye(code=code))
    assert dials(start).count(peer.id16) == 1
    assert [entry.id16 for entry in rig.parts.losses.current(rig.now)] == [peer.id16]
    assert rig.parts.losses.current(rig.now + 30_000) == ()


def test_a_link_that_breaks_again_and_again_is_not_dialled_in_a_tight_loop() -> None:
    rig = Rig(peers=1)
    peer = rig.peers[0]
    count = 0
    for _ in range(200):
        link = rig.fresh(peer)
        count += len(dials(rig.handle(LinkClosed(link))))
        rig.handle(DialFailed(peer.id16, DialFailure.UNTRUSTED))
        count += len(dials(rig.pass_ms(50)))
    assert count <= 25


# --- dialling ---


def test_a_starting_node_dials_everybody_four_at_once() -> None:
    rig = Rig(peers=9)
    first = dials(rig.actions)
    assert len(first) == 4
    for peer in list(first):
        rig.handle(DialFailed(peer, DialFailure.REFUSED))
    rig.pass_ms(100)
    asked = dials(rig.actions)
    assert len(set(asked)) == 8


def test_later_the_smaller_id_dials_at_once_and_the_larger_after_five_seconds() -> None:
    rig = Rig(peers=1)
    link = rig.fresh(rig.peers[0])
    other = Rig(peers=8).peers[1:]
    members = (*rig.members, *(peer.member for peer in other))
    actions = rig.handle(RosterChanged(members=members, mesh_id=MESH))
    at_once = dials(actions)
    assert at_once
    assert all(rig.me.id16 < peer for peer in at_once)
    later = dials(rig.pass_ms(4_800, alive=(link,), answer=DialFailure.TIMEOUT))
    assert all(rig.me.id16 < peer for peer in later)
    last = dials(rig.pass_ms(1_500, alive=(link,), answer=DialFailure.TIMEOUT))
    assert any(peer < rig.me.id16 for peer in last)


def test_back_off_grows_with_jitter_up_to_its_cap_and_never_ends() -> None:
    rig = Rig(peers=1, policy=MeshPolicy(backoff_max_s=8))
    peer = rig.peers[0].id16
    gaps: list[int] = []
    last = rig.now
    rig.handle(DialFailed(peer, DialFailure.REFUSED))
    for _ in range(10_000):
        if peer in dials(rig.pass_ms(20)):
            gaps.append(rig.now - last)
            last = rig.now
            rig.handle(DialFailed(peer, DialFailure.REFUSED))
    assert len(gaps) > 25
    assert max(gaps) <= 8_300
    assert min(gaps[1:]) >= 480
    assert len({gap // 100 for gap in gaps}) > 6


def test_two_nodes_back_off_out_of_step() -> None:
    def delays(seed: int) -> list[int]:
        dialler = Dialler(Rig().me.id16, MeshPolicy(), Random(seed), 0)
        out, last = [], 500
        for _ in range(6):
            last = dialler.next_backoff_ms(last)
            out.append(last)
        return out

    assert delays(1) != delays(2)


@pytest.mark.parametrize("sign", ["sighting", "connection"])
def test_a_sign_of_life_starts_the_back_off_over(sign: str) -> None:
    rig = Rig(peers=1)
    peer = rig.peers[0]
    for _ in range(12):
        rig.pass_ms(40_000)
        rig.handle(DialFailed(peer.id16, DialFailure.TIMEOUT))
    if sign == "sighting":
        assert peer.id16 in dials(rig.handle(PeerSighted(peer.id16)))
    else:
        link = rig.open(peer)
        rig.handle(LinkClosed(link))
        assert peer.id16 in dials(rig.pass_ms(7_000))


def test_a_peer_that_asks_for_patience_gets_it() -> None:
    rig = Rig(peers=1)
    link = rig.fresh(rig.peers[0])
    rig.pass_ms(6_000, alive=(link,))
    rig.say(link, msg.Bye(code=msg.ByeCode.FULL, retry_after_ms=45_000))
    assert not dials(rig.pass_ms(44_000))
    assert dials(rig.pass_ms(8_000))


def test_told_addresses_and_those_that_worked_are_dialled() -> None:
    rig = Rig(peers=1)
    peer = rig.peers[0]
    told = Address(ip=b"\x0a\x00\x00\x01", mesh_port=7_433, ingress_port=7_434)
    worked = Address(ip=b"\x0a\x00\x00\x02", mesh_port=7_433, ingress_port=7_434)
    link = LinkId(77)
    rig.handle(LinkOpened(link=link, peer=peer.id16, dialled=True, addr=worked))
    rig.say(link, peer.hello(rig.now), msg.Have(chunk=0, chunks=1))
    rig.records(link, peer.s(rig.now, Static(addrs=(told,))), peer.v(rig.now))
    rig.pass_ms(6_000, alive=(link,))
    (dial,) = [action for action in rig.handle(LinkClosed(link)) if hasattr(action, "addrs")]
    assert dial.addrs == (told, worked)


def test_hanging_dials_do_not_hold_their_places_for_ever() -> None:
    rig = Rig(peers=6)
    assert len(dials(rig.actions)) == 4
    rig.pass_ms(12_000)
    assert len(set(dials(rig.actions))) == 6


def test_a_frame_that_breaks_a_link_leaves_the_others_alone() -> None:
    rig = Rig()
    one, two = rig.fresh(rig.peers[0]), rig.fresh(rig.peers[1])
    rig.handle(FrameReceived(one, b"\x01\xc1"))
    assert list(rig.parts.links) == [two]


def test_lost_is_listed_with_the_newest_stamp_held() -> None:
    rig = Rig()
    peer, other = rig.peers
    link, second = rig.fresh(peer), rig.link_up(other)
    rig.pass_ms(3_000, alive=(link, second))
    rig.records(link, peer.v(rig.now))
    (v,) = headers(rig.handle(LinkClosed(link)), second)
    assert [(entry.epoch, entry.seq) for entry in decode_volatile(v.body).lost] == [(peer.epoch, peer.seq)]
