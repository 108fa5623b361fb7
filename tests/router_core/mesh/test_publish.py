"""The own records: epochs, ratchet, clones, buckets. One transcript per rule."""

import itertools

import pytest

from router_core.ids import mesh8_of
from router_core.mesh.protocol import messages as msg
from router_core.mesh.protocol.events import (
    LeaveRequested,
    LinkClosed,
    LinkId,
    PersistDone,
    RosterChanged,
    SavedKey,
)
from router_core.mesh.records.publisher import EPOCH_LAST
from router_core.mesh.records.saved import encode_epoch
from router_core.record.codec import decode_leave, decode_volatile, encode
from router_core.record.envelope import Header, read_header, seal, sref_of
from router_core.record.stamp import SEQ_LAST
from router_core.record.state import (
    EngineLoad,
    Flag,
    GpuLoad,
    Kind,
    LeaveReason,
    LostLink,
    ResidentModel,
    Static,
    Volatile,
)
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
    persists,
)


def flags(header: Header) -> Flag:
    return Flag(decode_volatile(header.body).flags)


def own(rig: Rig, *, epoch: int, inst: int, seq: int, kind: Kind = Kind.V) -> msg.Heard:
    """A genuine record of the node under test, as another life of it would have sealed it."""
    header = Header(
        kind=kind,
        mesh8=mesh8_of(MESH),
        id16=rig.me.id16,
        epoch=epoch,
        inst=inst,
        seq=seq,
        mono_ms=5,
        due_ms=2_000 if kind is Kind.V else 0,
        body=encode(Volatile() if kind is Kind.V else Static()),
    )
    sealed = seal(header, rig.me.crypto)
    return msg.Heard(0, sealed.signed, sealed.sig)


def test_a_start_persists_the_next_epoch_and_says_nothing_before_it_is_on_disk() -> None:
    rig = Rig(epoch=41, start=False)
    actions = rig.bodies()
    assert persists(actions)[0].data == encode_epoch(42)
    link = rig.open(rig.peers[0])
    rig.pass_ms(4_000)
    assert not frames(rig.actions)
    assert not dials(rig.actions)
    link = rig.open(rig.peers[1])
    actions = rig.handle(PersistDone(SavedKey.EPOCH, True))
    (hello,) = frames(actions, link)
    assert isinstance(hello, msg.Hello)
    assert hello.epoch == 42


def test_a_refusing_disk_degrades_and_is_asked_again_each_minute() -> None:
    rig = Rig(start=False)
    rig.bodies()
    assert alarms(rig.handle(PersistDone(SavedKey.EPOCH, False))) == ["epoch_not_persisted"]
    link = rig.link_up(rig.peers[0])
    sent = headers(rig.actions, link)
    assert [header.kind for header in sent] == [Kind.S, Kind.V]
    assert Flag.DEGRADED in flags(sent[1])
    assert not persists(rig.pass_ms(59_000, alive=(link,)))
    assert len(persists(rig.pass_ms(1_500, alive=(link,)))) == 1
    rig.handle(PersistDone(SavedKey.EPOCH, True))
    assert Flag.DEGRADED not in flags(headers(rig.pass_ms(1_200, alive=(link,)), link)[0])


def test_it_listens_before_it_talks() -> None:
    rig = Rig()
    rig.pass_ms(1_900)
    assert rig.parts.publisher.held(Kind.V) is None
    rig.pass_ms(150)
    assert rig.parts.publisher.held(Kind.V) is not None
    quick = Rig()
    quick.link_up(quick.peers[0])
    assert quick.parts.publisher.held(Kind.V) is not None


def test_the_first_record_of_an_epoch_is_s_and_v_names_it() -> None:
    rig = Rig()
    link = rig.link_up(rig.peers[0])
    s, v = headers(rig.actions, link)
    assert (s.kind, s.seq, v.kind, v.seq) == (Kind.S, 1, Kind.V, 2)
    held = rig.parts.publisher.held(Kind.S)
    assert v.sref == sref_of(1, held.sealed.signed)


def test_v_comes_each_second_and_promises_two() -> None:
    rig = Rig()
    link = rig.link_up(rig.peers[0])
    sent = headers(rig.pass_ms(20_000, alive=(link,)), link)
    assert all(header.kind == Kind.V and header.due_ms == 2_000 for header in sent)
    assert 18 <= len(sent) <= 23
    gaps = [later.mono_ms - earlier.mono_ms for earlier, later in itertools.pairwise(sent)]
    assert all(899 <= gap <= 1_101 for gap in gaps)
    assert len(set(gaps)) > 3


def test_the_pace_follows_the_size_of_the_mesh_in_steps_of_a_quarter() -> None:
    rig = Rig()
    publisher = rig.parts.publisher
    periods = []
    for step in range(1, 9):
        publisher.retune(600, rig.now + step * 10_000)
        periods.append(publisher.period_ms)
    assert periods[:3] == [1_250, 1_562, 1_952]
    assert periods[-1] == 4_000
    publisher.retune(1, rig.now + 85_000)
    assert publisher.period_ms == 4_000
    publisher.retune(1, rig.now + 100_000)
    assert publisher.period_ms == 3_000


@pytest.mark.parametrize(
    ("epoch", "inst", "seq", "raised"),
    [
        (9, 5, 1, 10),
        (4, 5, 1, 5),
        (4, 0, 50, 5),
        (2**40, 5, 1, 2**40 + 1),
        (3, 5, 10**6, None),
        (4, 0, 2, None),
    ],
)
def test_a_genuine_own_record_of_another_life_raises_the_epoch(
    epoch: int, inst: int, seq: int, raised: int | None
) -> None:
    rig = Rig(epoch=3)
    link = rig.link_up(rig.peers[0])
    publisher = rig.parts.publisher
    before = publisher.inst
    item = own(rig, epoch=epoch, inst=inst or before, seq=seq)
    if raised is None and epoch == 4:
        held = publisher.held(Kind.V)
        item = msg.Heard(0, held.sealed.signed, held.sealed.sig)
    actions = rig.records(link, item)
    assert rig.reason("own") == 1
    if raised is None:
        assert (publisher.epoch, publisher.inst) == (4, before)
        return
    assert persists(actions)[0].data == encode_epoch(raised)
    assert publisher.inst != before
    assert not headers(actions, link)
    sent = headers(rig.handle(PersistDone(SavedKey.EPOCH, True)), link)
    assert [(header.kind, header.epoch) for header in sent] == [(Kind.S, raised), (Kind.V, raised)]


def test_other_bytes_at_an_own_stamp_are_another_life() -> None:
    rig = Rig()
    link = rig.link_up(rig.peers[0])
    publisher = rig.parts.publisher
    rig.records(link, own(rig, epoch=publisher.epoch, inst=publisher.inst, seq=publisher.seq))
    assert publisher.epoch == 5


def test_an_own_record_with_a_bad_signature_is_held_against_the_link() -> None:
    rig = Rig()
    link = rig.link_up(rig.peers[0])
    item = own(rig, epoch=99, inst=1, seq=1)
    actions = rig.records(link, msg.Heard(0, item.signed, bytes(64)))
    assert byes(actions, link) == [msg.ByeCode.BAD_SIGNATURE]
    assert rig.parts.publisher.epoch == 4


def test_three_ratchets_in_a_minute_end_in_one_conflict_v_and_a_new_try_after_twenty_seconds() -> None:
    rig = Rig()
    link = rig.link_up(rig.peers[0])
    actions = []
    for epoch in (10, 20, 30):
        actions = rig.records(link, own(rig, epoch=epoch, inst=1, seq=1))
        if epoch < 30:
            rig.handle(PersistDone(SavedKey.EPOCH, True))
    assert alarms(actions) == ["duplicate_identity"]
    (last,) = headers(rig.handle(PersistDone(SavedKey.EPOCH, True)), link)
    assert Flag.CONFLICT in flags(last)
    silent_ms = rig.policy.conflict_retry_ms
    assert not headers(rig.pass_ms(silent_ms - 100, alive=(link,)), link)
    sent = headers(rig.pass_ms(1_000, alive=(link,)), link)
    assert [header.kind for header in sent[:2]] == [Kind.S, Kind.V]
    assert Flag.CONFLICT not in flags(sent[1])


@pytest.mark.parametrize("stored", [False, True], ids=["heard", "stored"])
def test_an_epoch_that_nothing_can_rise_above_is_told_once(stored: bool) -> None:
    rig = Rig(epoch=EPOCH_LAST if stored else 3)
    link = rig.link_up(rig.peers[0])
    told = alarms(rig.actions)
    told += alarms(rig.records(link, own(rig, epoch=EPOCH_LAST, inst=1, seq=9)))
    told += alarms(rig.records(link, own(rig, epoch=EPOCH_LAST, inst=1, seq=10)))
    assert told == ["epoch_exhausted"]
    assert rig.mesh.picture(rig.now).exhausted
    assert rig.parts.publisher.epoch == (EPOCH_LAST if stored else 4)


def test_used_up_numbers_start_a_new_epoch() -> None:
    rig = Rig()
    rig.link_up(rig.peers[0])
    rig.parts.publisher.seq = SEQ_LAST
    assert persists(rig.pass_ms(100))[0].data == encode_epoch(5)


def test_urgent_bodies_go_at_once_within_the_event_bucket() -> None:
    rig = Rig()
    link = rig.link_up(rig.peers[0])
    rig.pass_ms(3_000, alive=(link,))
    sent = []
    for level in range(8):
        sent += headers(rig.bodies(Volatile(level=level % 4), urgent=True), link)
    assert len(sent) == 5
    assert all(Flag.URGENT in flags(header) for header in sent)
    (late,) = headers(rig.pass_ms(500, alive=(link,)), link)
    assert decode_volatile(late.body).level == 7 % 4


def test_ten_thousand_urgent_bodies_make_two_v_a_second() -> None:
    rig = Rig()
    link = rig.link_up(rig.peers[0])
    count = 0
    for step in range(1_000):
        rig.pass_ms(10)
        if step % 50 == 0:
            rig.say(link, msg.Pong(nonce=0, boot_ms=rig.now + 5_000_000))
        count += len(headers(rig.bodies(Volatile(level=step % 4), urgent=True), link))
    assert count <= 5 + 2 * 10 + 12


def test_a_changed_s_waits_for_its_gap_and_its_bucket_and_v_never_speaks_of_another_s() -> None:
    rig = Rig()
    link = rig.link_up(rig.peers[0])
    start = len(rig.actions)
    for step in range(40):
        rig.bodies(Volatile(), Static(models_total=step + 1))
        rig.pass_ms(500, alive=(link,))
    sent = headers(rig.actions[start:], link)
    statics = [header for header in sent if header.kind == Kind.S]
    assert 4 <= len(statics) <= 7
    assert all(b.mono_ms - a.mono_ms >= 1_000 for a, b in itertools.pairwise(statics))
    for header in sent:
        if header.kind == Kind.V:
            before = [s for s in statics if s.seq < header.seq]
            assert header.sref is not None
            assert not before or header.sref.seq == before[-1].seq


def test_an_unchanged_s_is_never_announced_again() -> None:
    rig = Rig()
    link = rig.link_up(rig.peers[0])
    start = len(rig.actions)
    for _ in range(10):
        rig.bodies()
        rig.pass_ms(1_000, alive=(link,))
    assert all(header.kind == Kind.V for header in headers(rig.actions[start:], link))


def test_an_oversize_body_is_refused_once_at_the_origin_and_costs_nothing_afterwards() -> None:
    rig = Rig()
    link = rig.link_up(rig.peers[0])
    busy = ResidentModel(
        model=0, engine=0, state=2, running=65_535, waiting=65_535, mem_mib=2**32 - 1, ctx=2**32 - 1
    )
    most = EngineLoad(
        running=65_535, queued=65_535, slots=65_535, work_ds=2**32 - 1, obtainable_mib=2**32 - 1
    )
    card = GpuLoad(util_pct=100, external_util_pct=100, vram_free_mib=2**32 - 1, score_c=100, age_ds=65_535)
    actions = rig.bodies(Volatile(level=3, residents=(busy,) * 48, engines=(most,) * 16, gpus=(card,) * 16))
    assert alarms(actions) == ["unsendable"]
    later = rig.pass_ms(60_000, alive=(link,))
    assert not alarms(later)
    sent = headers(later, link)
    assert 50 <= len(sent) <= 70
    assert all(decode_volatile(header.body).level is None for header in sent)


def test_fresh_state_seals_a_new_v_while_the_bucket_allows() -> None:
    rig = Rig()
    assert rig.mesh.fresh_state(rig.now) == (None, [])
    link = rig.link_up(rig.peers[0])
    rig.pass_ms(10_000, alive=(link,))
    seqs: list[int] = []
    for level in range(1, 9):
        rig.bodies(Volatile(level=level))
        sealed, actions = rig.mesh.fresh_state(rig.now)
        assert sealed is not None
        seqs.append(read_header(sealed.signed, mesh8_of(MESH)).seq)
        assert len(headers(actions, link)) == (1 if len(seqs) <= 5 else 0)
    assert len(set(seqs)) == 5


def test_fresh_state_spends_nothing_while_there_is_no_news() -> None:
    rig = Rig()
    link = rig.link_up(rig.peers[0])
    rig.pass_ms(10_000, alive=(link,))
    told = {rig.mesh.fresh_state(rig.now)[0] for _ in range(100)}
    assert len(told) == 1
    rig.bodies(Volatile(level=2))
    sealed, _ = rig.mesh.fresh_state(rig.now)
    assert sealed is not None
    assert decode_volatile(read_header(sealed.signed, mesh8_of(MESH)).body).level == 2


def test_a_leave_is_said_once_to_all_before_the_links_close() -> None:
    rig = Rig()
    one, two = rig.link_up(rig.peers[0]), rig.link_up(rig.peers[1])
    actions = rig.handle(LeaveRequested(LeaveReason.RESTART))
    for link in (one, two):
        (left,) = headers(actions, link)
        assert left.kind == Kind.L
        assert decode_leave(left.body).reason == LeaveReason.RESTART
        assert byes(actions, link) == [msg.ByeCode.GOING_DOWN]
    assert closed(actions) == [one, two]
    rig.handle(LeaveRequested(LeaveReason.RESTART))
    later = rig.pass_ms(20_000)
    assert not frames(later)
    assert not dials(later)


def test_another_mesh_id_drops_links_and_records_and_seals_anew() -> None:
    rig = Rig()
    peer = rig.peers[0]
    link = rig.fresh(peer)
    actions = rig.handle(RosterChanged(members=rig.members, mesh_id=OTHER_MESH))
    assert byes(actions, link) == [msg.ByeCode.WRONG_MESH]
    assert rig.state(peer) is None
    assert rig.view[peer.id16].state.value == "gone"
    assert rig.view[peer.id16].volatile is None
    rig.pass_ms(100)
    held = rig.parts.publisher.held(Kind.V)
    assert read_header(held.sealed.signed, mesh8_of(OTHER_MESH)).epoch == 4


def test_own_losses_are_told_and_forgotten() -> None:
    rig = Rig()
    peer = rig.peers[0]
    link, other = rig.fresh(peer), rig.link_up(rig.peers[1])
    rig.pass_ms(600, alive=(link, other))
    sent = headers(rig.handle(LinkClosed(link)), other)
    assert Flag.URGENT in flags(sent[0])
    assert decode_volatile(sent[0].body).lost == (LostLink(id16=peer.id16, epoch=peer.epoch, seq=peer.seq),)
    again = rig.link_up(peer)
    newest = headers(rig.pass_ms(1_200, alive=(other, again)), LinkId(other))[-1]
    assert decode_volatile(newest.body).lost == ()
