"""What the machine believes of others as time, links and hearsay go by."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_core.ids import Id16, mesh8_of
from router_core.mesh.protocol import messages as msg
from router_core.mesh.protocol.events import (
    DialFailed,
    DialFailure,
    LinkClosed,
    LinkId,
    RecordHeard,
    SavedKey,
    Ticked,
)
from router_core.mesh.records.saved import RecordFloor, Saved, read_saved
from router_core.policy.mesh import MeshPolicy
from router_core.record.codec import decode_volatile
from router_core.record.membership import Liveness
from router_core.record.stamp import Stamp
from router_core.record.state import Flag, Kind, LostLink, Static, Volatile
from tests.router_core.mesh.rig import MESH, OTHER_MESH, Peer, Rig, alarms, dials, frames, headers, persists

U, F, LATE, S, G, LEFT = (
    Liveness.UNCONFIRMED,
    Liveness.FRESH,
    Liveness.LATE,
    Liveness.SUSPECT,
    Liveness.GONE,
    Liveness.LEFT,
)


def talk(rig: Rig, link: LinkId, peer: Peer, ms: int) -> None:
    """The peer publishes each second."""
    for _ in range(ms // 1_000):
        rig.records(link, peer.v(rig.now))
        rig.pass_ms(1_000, alive=(link,))


def test_an_origin_heard_of_by_others_is_unconfirmed_until_a_second_newer_v() -> None:
    rig = Rig()
    teller, far = rig.peers
    link = rig.link_up(teller)
    rig.records(link, far.s(rig.now), far.v(rig.now))
    rig.pass_ms(60)
    assert rig.state(far) is U
    assert not rig.view[far.id16].confirmed
    rig.pass_ms(900, alive=(link,))
    rig.records(link, far.v(rig.now))
    assert rig.state(far) is F


def test_an_own_link_in_the_same_life_confirms_at_once_and_one_of_another_life_does_not() -> None:
    rig = Rig()
    peer, other = rig.peers
    rig.fresh(peer)
    assert rig.state(peer) is F
    item = other.v(rig.now)
    other.restart()
    link = rig.link_up(other)
    rig.records(link, item)
    assert rig.state(other) is U


def test_silence_makes_late_suspect_and_gone_and_any_newer_v_brings_back() -> None:
    rig = Rig()
    peer, other = rig.peers
    link, alive = rig.fresh(peer), rig.fresh(other)

    def pass_ms(ms: int) -> None:
        for _ in range(ms // 500):
            rig.pass_ms(500, alive=(link, alive))

    pass_ms(2_500)
    assert rig.state(peer) is F
    pass_ms(500)
    assert rig.state(peer) is LATE
    pass_ms(2_500)
    assert rig.state(peer) is S
    pass_ms(54_000)
    assert rig.state(peer) is S
    pass_ms(1_000)
    assert rig.state(peer) is G
    rig.records(link, peer.v(rig.now))
    assert rig.state(peer) is F


def test_gone_leaves_have_and_its_records_go_after_a_quarter_of_an_hour_but_its_stamps_stay() -> None:
    rig = Rig()
    peer, other = rig.peers
    link, alive = rig.fresh(peer), rig.fresh(other)
    old = peer.v(rig.now)
    rig.records(link, old)
    rig.pass_ms(62_000, alive=(link, alive))
    assert rig.state(peer) is G
    assert rig.parts.newest((peer.id16, Kind.V)) is None
    rig.pass_ms(905_000, alive=(link, alive))
    origin = rig.parts.origins[peer.id16]
    assert origin.held(Kind.V) is None
    rig.records(alive, old)
    assert rig.reason("below_floor") == 1
    assert origin.state is G
    rig.records(alive, peer.v(rig.now))
    assert origin.state is not G


def test_after_a_hundred_leaves_have_is_back_to_its_first_size() -> None:
    rig = Rig(peers=101)
    alive = rig.link_up(rig.peers[100])

    def have_size() -> int:
        return sum(origin.have() is not None for origin in rig.parts.origins.values())

    first = have_size()
    for peer in rig.peers[:100]:
        rig.records(alive, peer.s(rig.now), peer.v(rig.now), peer.leave(rig.now))
    assert have_size() == first + 100
    rig.pass_ms(901_000, alive=(alive,))
    assert have_size() == first


def test_a_leave_drops_everything_below_and_only_a_higher_epoch_revives() -> None:
    rig = Rig()
    peer, other = rig.peers
    link, alive = rig.fresh(peer), rig.link_up(other)
    rig.records(link, peer.leave(rig.now))
    assert rig.state(peer) is LEFT
    assert rig.view[peer.id16].volatile is None
    rig.records(alive, peer.v(rig.now, seq=999))
    assert rig.reason("below_floor") == 1
    peer.restart()
    rig.records(alive, peer.v(rig.now))
    assert rig.state(peer) is U


def test_a_higher_epoch_drops_records_of_lower_ones() -> None:
    rig = Rig()
    peer = rig.peers[0]
    link = rig.fresh(peer)
    lower = peer.v(rig.now)
    peer.restart()
    rig.records(link, peer.s(rig.now))
    origin = rig.parts.origins[peer.id16]
    assert origin.held(Kind.V) is None
    rig.records(link, lower)
    assert rig.reason("older") == 1


def test_an_epoch_that_rises_more_than_three_times_in_ten_seconds_is_shunned_until_it_was_calm() -> None:
    rig = Rig(peers=2)
    peer, other = rig.peers
    link = rig.fresh(peer)
    for step in range(4):
        peer.restart()
        told = rig.records(link, peer.v(rig.now))
        assert alarms(told) == (["restarts"] if step == 3 else [])
        rig.pass_ms(100)
        assert rig.view[peer.id16].quarantined is (step == 3)
    shown = {member.id16: member for member in rig.mesh.picture(rig.now).members}
    assert (shown[peer.id16].conflict_ms, shown[other.id16].conflict_ms) == (rig.policy.conflict_ms - 100, 0)
    alive = rig.fresh(other)
    rig.pass_ms(60)
    assert not rig.view[other.id16].quarantined
    rig.pass_ms(rig.policy.conflict_ms, alive=(link, alive))
    rig.records(link, peer.v(rig.now))
    rig.pass_ms(100)
    assert not rig.view[peer.id16].quarantined


def test_a_replayed_goodbye_of_an_older_life_lowers_no_floor() -> None:
    """Records of a dead member, replayed by another one, never bring it back."""
    rig = Rig()
    peer, other = rig.peers
    old = [peer.leave(rig.now), peer.s(rig.now), peer.v(rig.now), peer.v(rig.now)]
    peer.restart(epoch=20)
    rig.fresh(peer)
    floor = rig.parts.origins[peer.id16].floor()
    again = Rig(saved=Saved(mesh_id=MESH, members=rig.members, epoch=9, floors=(floor,)))
    link = again.link_up(other)
    for item in old:
        again.records(link, item)
    assert again.state(peer) is None
    assert again.reason("below_floor") == len(old)
    assert again.parts.origins[peer.id16].floor() == floor


def test_a_goodbye_is_remembered_after_a_restart() -> None:
    rig = Rig()
    peer, other = rig.peers
    link = rig.fresh(peer)
    before = [peer.s(rig.now), peer.v(rig.now)]
    rig.records(link, peer.leave(rig.now))
    floor = rig.parts.origins[peer.id16].floor()
    again = Rig(saved=Saved(mesh_id=MESH, members=rig.members, epoch=9, floors=(floor,)))
    assert again.state(peer) is LEFT
    link = again.link_up(other)
    again.records(link, *before)
    assert again.state(peer) is LEFT
    peer.restart()
    again.records(link, peer.v(again.now))
    assert again.state(peer) is U


@pytest.mark.parametrize("restarted", [False, True], ids=["held", "from its proof"])
def test_a_linked_peer_that_fell_behind_is_shown_what_is_held_of_it(restarted: bool) -> None:
    rig = Rig()
    peer, other = rig.peers
    link, alive = rig.fresh(peer), rig.link_up(other)
    behind = (peer.epoch, peer.inst, peer.seq)
    peer.restart(epoch=30)
    rig.records(alive, peer.v(rig.now))
    peer.epoch, peer.inst, peer.seq = behind
    if restarted:
        floor = rig.parts.origins[peer.id16].floor()
        rig = Rig(saved=Saved(mesh_id=MESH, members=rig.members, epoch=9, floors=(floor,)))
        link = rig.link_up(peer)
        rig.pass_ms(rig.policy.show_own_every_ms, alive=(link,))
    told = rig.records(link, peer.v(rig.now))
    assert [header.epoch for header in headers(told, link) if header.id16 == peer.id16] == [30]
    again = rig.records(link, peer.v(rig.now))
    assert not [header for header in headers(again, link) if header.id16 == peer.id16], (
        "once each ten seconds"
    )
    shown = {member.id16: member.behind_ms for member in rig.mesh.picture(rig.now).members}
    assert shown[peer.id16] > 0
    peer.restart(epoch=31)
    rig.records(link, peer.s(rig.now), peer.v(rig.now), peer.v(rig.now + 1))
    assert rig.state(peer) is F


def test_lives_that_each_said_goodbye_are_no_conflict_however_fast_they_follow() -> None:
    rig = Rig()
    peer = rig.peers[0]
    link = rig.fresh(peer)
    for _ in range(5):
        rig.records(link, peer.leave(rig.now))
        peer.restart()
        told = rig.records(link, peer.s(rig.now), peer.v(rig.now))
        assert alarms(told) == []
        rig.pass_ms(100)
        assert not rig.view[peer.id16].quarantined
    for step in range(4):
        peer.restart()
        rig.records(link, peer.s(rig.now), peer.v(rig.now))
        rig.pass_ms(100)
        assert rig.view[peer.id16].quarantined is (step == 3), "a goodbye speaks for the life before it alone"


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6_000)), max_size=9))
@settings(max_examples=60, deadline=None)
def test_only_lives_that_ended_without_a_word_count_as_a_conflict(lives: list[tuple[bool, int]]) -> None:
    rig = Rig()
    peer = rig.peers[0]
    origin = rig.parts.origins[peer.id16]
    rig.records(rig.link_up(peer), peer.v(rig.now))
    silent, until = [], rig.now
    for goodbye, wait_ms in lives:
        rig.sleep_ms(wait_ms)
        items = [peer.leave(rig.now)] if goodbye else []
        peer.restart()
        for item in (*items, peer.v(rig.now)):
            rig.handle(RecordHeard(item.signed, item.sig))
        assert origin.epoch == peer.epoch
        if not goodbye:
            silent.append(rig.now)
            if len([at for at in silent if at > rig.now - 10_000]) > 3 or rig.now < until:
                until = rig.now + 300_000
        assert (rig.now < origin.conflict_until) is (rig.now < until)


# --- broken links and hearsay ---


def test_a_broken_link_and_a_refused_dial_make_suspect_at_once() -> None:
    rig = Rig()
    peer, other = rig.peers
    link = rig.fresh(peer)
    rig.fresh(other)
    rig.pass_ms(1_000)
    assert peer.id16 in dials(rig.handle(LinkClosed(link)))
    assert rig.state(peer) is F
    rig.handle(DialFailed(peer.id16, DialFailure.REFUSED))
    assert rig.state(peer) is S
    assert rig.view[peer.id16].state is S


def test_a_broken_link_and_a_dial_that_hangs_make_suspect_after_three_seconds() -> None:
    rig = Rig()
    peer, other = rig.peers
    link, alive = rig.fresh(peer), rig.fresh(other)
    rig.records(link, peer.v(rig.now))
    rig.handle(LinkClosed(link))
    rig.pass_ms(2_400, alive=(alive,))
    assert rig.state(peer) in (F, LATE)
    rig.pass_ms(700, alive=(alive,))
    assert rig.state(peer) is S


def test_a_new_link_in_the_same_life_clears_a_broken_one() -> None:
    rig = Rig()
    peer, other = rig.peers
    link, alive = rig.fresh(peer), rig.fresh(other)
    rig.handle(LinkClosed(link))
    again = rig.link_up(peer)
    rig.pass_ms(2_400, alive=(alive, again))
    assert rig.parts.origins[peer.id16].broken_at is None
    assert rig.parts.losses.current(rig.now) == ()


@pytest.mark.parametrize(
    ("voices", "older_by", "suspected"), [(1, 0, False), (2, 0, True), (2, 1, False), (3, 0, True)]
)
def test_two_others_that_list_it_as_lost_for_a_second_make_suspect(
    voices: int, older_by: int, suspected: bool
) -> None:
    rig = Rig(peers=4)
    subject = rig.peers[3]
    subject_link = rig.fresh(subject)
    links = [rig.fresh(peer) for peer in rig.peers[:3]]
    lost = (LostLink(id16=subject.id16, epoch=subject.epoch, seq=subject.seq - older_by),)
    for peer, link in list(zip(rig.peers, links, strict=False))[:voices]:
        rig.records(link, peer.v(rig.now, Volatile(lost=lost)))
    alive = (*links, subject_link)
    rig.pass_ms(1_000, alive=alive)
    assert rig.state(subject) is F
    rig.pass_ms(300, alive=alive)
    assert (rig.state(subject) is S) is suspected
    rig.records(subject_link, subject.v(rig.now))
    assert rig.state(subject) is F


def test_suspicion_dials_the_suspect_once() -> None:
    rig = Rig(peers=3)
    teller, far, _ = rig.peers
    link = rig.link_up(teller)
    for _ in range(2):
        rig.records(link, far.v(rig.now))
        rig.pass_ms(1_000, alive=(link,), answer=DialFailure.TIMEOUT)
    for _ in range(3):
        rig.handle(DialFailed(far.id16, DialFailure.TIMEOUT))
    before = dials(rig.actions).count(far.id16)
    while rig.state(far) is not S:
        rig.pass_ms(100, alive=(link,), answer=DialFailure.TIMEOUT)
    assert dials(rig.actions).count(far.id16) > before


# --- own stalls, loneliness ---


def test_a_stall_of_ten_seconds_with_queued_frames_demotes_nobody() -> None:
    rig = Rig()
    peer, other = rig.peers
    link, second = rig.fresh(peer), rig.fresh(other)
    rig.pass_ms(1_000, alive=(link, second))
    queued = []
    for step in range(3):
        queued.append((link, peer.v(rig.now + 1_000 * step)))
        queued.append((second, other.v(rig.now + 1_000 * step)))
    rig.sleep_ms(10_000)
    for at, item in queued:
        rig.records(at, item)
    rig.handle(LinkClosed(link))
    rig.handle(LinkClosed(second))
    rig.handle(Ticked())
    assert rig.state(peer) is F
    again, also = rig.link_up(peer), rig.link_up(other)
    rig.pass_ms(1_000, alive=(again, also))
    rig.records(again, peer.v(rig.now))
    rig.records(also, other.v(rig.now))
    rig.pass_ms(2_000, alive=(again, also))
    assert rig.state(peer) is F
    assert rig.state(other) is F


def test_a_suspend_of_eight_hours_evicts_nobody_and_the_view_tells_the_real_age() -> None:
    rig = Rig()
    peer = rig.peers[0]
    link = rig.fresh(peer)
    rig.pass_ms(500)
    rig.sleep_ms(8 * 3_600_000)
    rig.handle(Ticked())
    assert rig.state(peer) is F
    assert rig.parts.origins[peer.id16].age_ms(rig.now) >= 8 * 3_600_000
    assert link in rig.parts.links
    rig.pass_ms(3_000)
    assert rig.state(peer) is not G


def test_without_any_link_for_three_and_a_half_seconds_a_node_is_lonely_and_lets_nobody_go() -> None:
    rig = Rig()
    peer = rig.peers[0]
    link = rig.fresh(peer)
    rig.pass_ms(1_000, alive=(link,))
    rig.handle(LinkClosed(link))
    actions = rig.pass_ms(3_700, answer=DialFailure.TIMEOUT)
    assert alarms(actions) == ["lonely"]
    rig.pass_ms(120_000, answer=DialFailure.TIMEOUT)
    assert rig.state(peer) is S
    again = rig.link_up(peer)
    sent = headers(rig.actions + rig.pass_ms(10), again)
    own = [header for header in sent if header.kind == Kind.V and header.id16 == rig.me.id16]
    assert Flag.LONELY in Flag(decode_volatile(own[0].body).flags)
    talk(rig, again, peer, 4_000)
    assert not rig.parts.solitude.lonely
    assert rig.state(peer) is F


def test_a_node_whose_peers_all_left_is_not_lonely() -> None:
    rig = Rig(peers=1)
    peer = rig.peers[0]
    link = rig.fresh(peer)
    rig.records(link, peer.leave(rig.now))
    rig.say(link, msg.Bye(code=msg.ByeCode.GOING_DOWN))
    rig.pass_ms(10_000, answer=DialFailure.REFUSED)
    assert not rig.parts.solitude.lonely


# --- views and sref ---


def test_v_of_another_s_is_kept_and_its_positions_cannot_be_read() -> None:
    rig = Rig()
    peer = rig.peers[0]
    link = rig.fresh(peer)
    rig.pass_ms(60)
    assert rig.view[peer.id16].static == Static()
    newer = peer.s(rig.now, Static(models_total=9))
    rig.records(link, peer.v(rig.now, Volatile(level=2)))
    rig.pass_ms(60)
    assert rig.view[peer.id16].volatile == Volatile(level=2)
    assert rig.view[peer.id16].static is None
    rig.records(link, newer)
    rig.pass_ms(60)
    assert rig.view[peer.id16].static == Static(models_total=9)


def test_changes_wait_fifty_milliseconds_and_urgent_ones_do_not() -> None:
    rig = Rig()
    peer = rig.peers[0]
    link = rig.link_up(peer)
    rig.pass_ms(100)
    rig.view.clear()
    rig.records(link, peer.v(rig.now))
    assert not rig.view
    rig.pass_ms(49)
    assert not rig.view
    rig.pass_ms(1)
    assert rig.view[peer.id16].seq == 1
    rig.records(link, peer.v(rig.now, Volatile(flags=Flag.URGENT)))
    assert rig.view[peer.id16].seq == 2


def test_the_view_lets_a_reader_compute_the_age_itself() -> None:
    rig = Rig()
    peer = rig.peers[0]
    rig.fresh(peer)
    rig.pass_ms(700)
    change = rig.view[peer.id16]
    assert rig.now - change.mono_ms - change.base_ms == 700


# --- across restarts ---


def test_floors_are_written_each_minute_and_refuse_replays_after_a_restart() -> None:
    rig = Rig()
    peer = rig.peers[0]
    link = rig.fresh(peer)
    s, v = (rig.parts.origins[peer.id16].held(kind) for kind in (Kind.S, Kind.V))
    written = persists(rig.pass_ms(61_000, alive=(link,)), SavedKey.FLOORS)
    saved, damaged = read_saved({SavedKey.FLOORS: written[-1].data}, MESH, rig.members)
    assert not damaged
    floor = next(floor for floor in saved.floors if floor.id16 == peer.id16)
    assert Stamp(floor.v_epoch, floor.v_seq) == v.stamp
    again = Rig(saved=saved)
    link = again.link_up(again.peers[1])
    for held in (s, v):
        again.records(link, msg.Heard(0, held.sealed.signed, held.sealed.sig))
    assert again.reason("below_floor") == 2
    again.records(link, peer.v(again.now))
    assert again.state(peer) is U
    again.records(link, msg.Heard(0, s.sealed.signed, s.sealed.sig))
    assert again.parts.origins[peer.id16].static == Static()


def test_after_a_restart_a_forgetful_peer_is_still_shown_its_own_record() -> None:
    rig = Rig()
    peer = rig.peers[0]
    rig.fresh(peer)
    floor = rig.parts.origins[peer.id16].floor()
    again = Rig(saved=Saved(mesh_id=MESH, members=rig.members, epoch=9, floors=(floor,)))
    peer.restart(1)
    link = again.link_up(peer)
    assert [h.epoch for h in headers(again.actions, link) if h.id16 == peer.id16] == [7]


def test_damaged_files_count_as_lost() -> None:
    files = {SavedKey.EPOCH: b"\xc1", SavedKey.FLOORS: b"junk", SavedKey.ADDRESSES: b"\x90"}
    saved, damaged = read_saved(files, MESH, ())
    assert (saved.epoch, saved.floors, saved.addresses) == (0, (), ())
    assert damaged == (SavedKey.EPOCH, SavedKey.FLOORS)


def test_a_floor_of_a_stranger_survives() -> None:
    stranger = RecordFloor(id16=bytes(16), v_epoch=3, v_seq=4)
    rig = Rig(saved=Saved(mesh_id=MESH, members=Rig().members, floors=(stranger,)))
    link = rig.fresh(rig.peers[0])
    written = persists(rig.pass_ms(61_000, alive=(link,)), SavedKey.FLOORS)
    saved, _ = read_saved({SavedKey.FLOORS: written[-1].data}, MESH, ())
    assert stranger in saved.floors


def test_the_picture_shows_members_and_links() -> None:
    rig = Rig()
    peer, other = rig.peers
    rig.fresh(peer)
    shown = rig.mesh.picture(rig.now)
    by_id = {Id16(member.id16): member for member in shown.members}
    assert by_id[peer.id16].state is F
    assert by_id[peer.id16].link_up
    assert by_id[peer.id16].volatile == Stamp(7, 2)
    assert by_id[other.id16].state is None
    assert [link.phase for link in shown.links] == ["up"]
    assert ("V", "accepted", 1) in shown.counts


def test_why_a_link_ended_is_kept_until_the_next_one_is_up() -> None:
    rig = Rig()
    peer, other = rig.peers

    def faults() -> list[str | None]:
        shown = {member.id16: member.link_fault for member in rig.mesh.picture(rig.now).members}
        return [shown[peer.id16], shown[other.id16]]

    rig.say(rig.link_up(peer), msg.Bye(code=msg.ByeCode.VERSION))
    rig.say(rig.open(other), other.hello(rig.now, mesh8=mesh8_of(OTHER_MESH)))
    assert faults() == ["version", "wrong_mesh"], "as the other end says, and as this one finds"
    rig.say(rig.link_up(peer), msg.Bye(code=200))
    assert faults() == ["protocol", "wrong_mesh"], "what nobody knows yet"
    link = rig.fresh(peer)
    assert faults() == [None, "wrong_mesh"]
    rig.say(link, msg.Bye(code=msg.ByeCode.GOING_DOWN))
    assert faults()[0] is None, "it was to end"


def test_a_gone_member_is_dialled_at_random_now_and_then() -> None:
    rig = Rig(policy=MeshPolicy(gone_min_s=20, gone_redial_s=5))
    peer, other = rig.peers
    link, alive = rig.fresh(peer), rig.fresh(other)
    rig.handle(LinkClosed(link))
    rig.pass_ms(25_000, alive=(alive,), answer=DialFailure.TIMEOUT)
    assert rig.state(peer) is G
    count = dials(rig.pass_ms(30_000, alive=(alive,), answer=DialFailure.TIMEOUT)).count(peer.id16)
    assert 5 <= count <= 7
    assert frames(rig.actions)
