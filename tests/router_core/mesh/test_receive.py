"""The receive pipeline: one vector for each reason, and what follows from it."""

from collections.abc import Callable

import msgpack
import pytest

from router_core.mesh.protocol import messages as msg
from router_core.mesh.protocol.actions import PauseReading, ResumeReading
from router_core.mesh.protocol.events import (
    FrameReceived,
    LinkId,
    LinkOpened,
    RecordHeard,
    Resumed,
    RosterChanged,
    Ticked,
)
from router_core.record.codec import encode
from router_core.record.membership import Liveness
from router_core.record.stamp import Stamp
from router_core.record.state import Kind, LostLink, Role, Volatile
from tests.router_core.mesh.rig import (
    MESH,
    OTHER_MESH,
    Peer,
    Rig,
    alarms,
    byes,
    closed,
    dials,
    forged,
    frames,
)

NO_BYE: list[msg.ByeCode] = []
PROTOCOL = [msg.ByeCode.PROTOCOL]
Make = Callable[[Rig, Peer], msg.Heard]


def item_of(elements: list[object]) -> msg.Heard:
    return msg.Heard(0, msgpack.packb(elements), bytes(64))


def header_of(peer: Peer, now: int, **changed: object) -> list[object]:
    """A header's elements, by position, some replaced."""
    elements: list[object] = [1, 1, MESH[:8], peer.id16, 7, 1, 1, now, 2_000, None, b""]
    for position, value in changed.items():
        elements[int(position[1:])] = value
    return elements


def stranger(rig: Rig, peer: Peer) -> msg.Heard:
    return Peer(77, rig.ledger).v(rig.now)


def of_other_kind(kind: int) -> Make:
    return lambda rig, peer: item_of(header_of(peer, rig.now, _1=kind))


VECTORS: list[tuple[str, Make, list[msg.ByeCode]]] = [
    ("bad_header", lambda rig, peer: msg.Heard(0, b"\x90", bytes(64)), PROTOCOL),
    ("bad_header", lambda rig, peer: msg.Heard(0, b"\xc1", bytes(64)), PROTOCOL),
    ("bad_header", lambda rig, peer: item_of(header_of(peer, rig.now, _3=b"short")), PROTOCOL),
    ("bad_header", lambda rig, peer: item_of(header_of(peer, rig.now, _8=1_999)), PROTOCOL),
    ("bad_header", lambda rig, peer: item_of(header_of(peer, rig.now, _6=0)), PROTOCOL),
    ("unsupported_version", lambda rig, peer: item_of(header_of(peer, rig.now, _0=2)), NO_BYE),
    ("unknown_kind", of_other_kind(4), NO_BYE),
    ("unknown_kind", of_other_kind(5), NO_BYE),
    ("unknown_kind", of_other_kind(99), NO_BYE),
    ("over_cap", lambda rig, peer: item_of(header_of(peer, rig.now, _10=bytes(2_048))), PROTOCOL),
    ("wrong_mesh", lambda rig, peer: peer.v(rig.now, mesh_id=OTHER_MESH), [msg.ByeCode.WRONG_MESH]),
    ("unknown_origin", stranger, NO_BYE),
    ("bad_signature", lambda rig, peer: forged(peer.v(rig.now)), [msg.ByeCode.BAD_SIGNATURE]),
    ("bad_body", lambda rig, peer: peer.record(Kind.V, b"\x93\x01", rig.now), NO_BYE),
    ("bad_body", lambda rig, peer: peer.record(Kind.V, encode([70_000]), rig.now), NO_BYE),
    ("accepted", lambda rig, peer: peer.v(rig.now), NO_BYE),
    (
        "accepted",
        lambda rig, peer: peer.record(
            Kind.V, encode([0, None, [], [], [], [], [], [], None, [], [], [], 9]), rig.now
        ),
        NO_BYE,
    ),
]


@pytest.mark.parametrize(("reason", "make", "expected"), VECTORS)
def test_each_reason_has_its_consequence(reason: str, make: Make, expected: list[msg.ByeCode]) -> None:
    rig = Rig()
    peer = rig.peers[0]
    link = rig.link_up(peer)
    actions = rig.records(link, make(rig, peer))
    assert rig.reason(reason) == 1
    assert byes(actions, link) == expected
    assert (closed(actions) == [link]) == bool(expected)


@pytest.mark.parametrize(
    ("reason", "data"), [("too_big", b""), ("unknown_type", b"\x09\x90"), ("malformed", b"\x03\xc1")]
)
def test_a_bad_message_ends_the_link_and_its_sender_is_left_alone_for_a_minute(
    reason: str, data: bytes
) -> None:
    rig = Rig()
    link, other = rig.link_up(rig.peers[0]), rig.link_up(rig.peers[1])
    actions = rig.handle(FrameReceived(link, data))
    assert rig.reason(reason) == 1
    assert byes(actions, link) == PROTOCOL
    (bye,) = [message for message in frames(actions, link) if isinstance(message, msg.Bye)]
    assert bye.retry_after_ms == 60_000
    back = rig.open(rig.peers[0])
    assert closed(rig.actions[-2:]) == [back]
    assert dials(rig.pass_ms(59_000, alive=(other,))) == []
    assert rig.peers[0].id16 in dials(rig.pass_ms(8_000, alive=(other,)))


def test_no_role_may_not_speak() -> None:
    rig = Rig(roles=Role.OBSERVER)
    link = rig.link_up(rig.peers[0])
    assert byes(rig.records(link, rig.peers[0].v(rig.now))) == NO_BYE
    assert rig.reason("no_role") == 1


def test_records_of_a_removed_member_are_dropped_and_its_link_ends() -> None:
    rig = Rig()
    gone, stays = rig.peers
    link, other = rig.fresh(gone), rig.link_up(stays)
    rest = tuple(member for member in rig.members if member.id16 != gone.id16)
    actions = rig.handle(RosterChanged(members=rest, mesh_id=MESH))
    assert byes(actions, link) == [msg.ByeCode.REMOVED]
    assert rig.view[gone.id16].state is Liveness.REMOVED
    rig.records(other, gone.v(rig.now))
    assert rig.reason("removed_origin") == 1


def test_stamps_decide_between_newer_duplicate_older_and_equivocation() -> None:
    rig = Rig()
    peer = rig.peers[0]
    link = rig.link_up(peer)
    first = peer.v(rig.now, seq=5)
    rig.records(link, first, first, peer.v(rig.now, seq=4))
    assert [rig.reason(name) for name in ("accepted", "duplicate", "older")] == [1, 1, 1]
    assert not alarms(rig.records(link, peer.v(rig.now, seq=4)))
    actions = rig.records(link, peer.v(rig.now, Volatile(level=1), seq=5))
    assert rig.reason("equivocation") == 1
    assert alarms(actions) == ["equivocation"]
    rig.pass_ms(60)
    assert rig.view[peer.id16].volatile == Volatile()


def test_a_forged_equivocation_is_a_bad_signature() -> None:
    rig = Rig()
    peer = rig.peers[0]
    link = rig.link_up(peer)
    rig.records(link, peer.v(rig.now, seq=5))
    actions = rig.records(link, forged(peer.v(rig.now, Volatile(level=1), seq=5)))
    assert byes(actions, link) == [msg.ByeCode.BAD_SIGNATURE]
    assert alarms(actions) == ["bad_signature"]


def test_a_duplicate_is_dropped_before_its_signature_is_looked_at() -> None:
    rig = Rig()
    peer = rig.peers[0]
    link = rig.link_up(peer)
    item = peer.v(rig.now)
    rig.records(link, item)
    assert byes(rig.records(link, forged(item))) == NO_BYE
    assert rig.reason("duplicate") == 1


def test_an_epoch_jump_of_two_to_the_forty_is_accepted() -> None:
    rig = Rig()
    peer = rig.peers[0]
    link = rig.link_up(peer)
    peer.restart(2**40)
    rig.records(link, peer.v(rig.now))
    assert rig.parts.origins[peer.id16].epoch == 2**40


def test_known_is_raised_by_what_arrives_whatever_comes_of_it() -> None:
    rig = Rig()
    peer = rig.peers[0]
    link = rig.link_up(peer)
    rig.records(link, peer.v(rig.now, seq=9))
    rig.records(link, peer.v(rig.now, seq=8))
    assert rig.parts.links[link].known[peer.id16, Kind.V] == Stamp(peer.epoch, 9)


def test_an_origin_gets_twenty_records_and_then_five_a_second() -> None:
    rig = Rig()
    peer = rig.peers[0]
    link = rig.link_up(peer)
    rig.records(link, *(peer.v(rig.now) for _ in range(30)))
    assert rig.reason("accepted") == 20
    assert rig.reason("rate") == 10
    rig.pass_ms(1_000)
    rig.records(link, *(peer.v(rig.now) for _ in range(10)))
    assert rig.reason("accepted") == 25


def test_a_bad_body_quarantines_its_origin_for_longer_each_time_and_nothing_of_it_is_stored() -> None:
    rig = Rig()
    peer = rig.peers[0]
    link = rig.fresh(peer)
    for minutes in (1, 2, 4, 8, 10, 10):
        actions = rig.records(link, peer.record(Kind.V, b"\xc1", rig.now))
        assert alarms(actions) == ["quarantined"]
        rig.pass_ms(60)
        assert rig.view[peer.id16].quarantined
        rig.records(link, peer.v(rig.now))
        before = rig.reason("quarantined")
        rig.now += minutes * 60_000 - 1_000
        rig.handle(Ticked())
        link = rig.link_up(peer)
        rig.records(link, peer.v(rig.now))
        assert rig.reason("quarantined") == before + 1
        rig.now += 2_000
        rig.handle(Ticked())
    rig.records(link, peer.v(rig.now))
    rig.pass_ms(60)
    assert not rig.view[peer.id16].quarantined


def test_a_record_from_outside_links_passes_the_same_pipeline_and_blames_nobody() -> None:
    rig = Rig()
    peer = rig.peers[0]
    link = rig.link_up(peer)
    bad, good = forged(peer.v(rig.now)), peer.v(rig.now)
    assert not byes(rig.handle(RecordHeard(bad.signed, bad.sig)))
    assert rig.reason("bad_signature") == 1
    rig.handle(RecordHeard(good.signed, good.sig))
    rig.handle(RecordHeard(bytes(100_000), bytes(64)))
    rig.handle(RecordHeard(good.signed, b"short"))
    assert rig.reason("accepted") == 1
    assert link in rig.parts.links


def test_a_step_verifies_sixteen_and_links_take_turns() -> None:
    rig = Rig(peers=30)
    one, two = rig.link_up(rig.peers[0]), rig.link_up(rig.peers[1])
    speakers = rig.peers[2:]
    first = [speaker.v(rig.now) for speaker in speakers]
    rig.now += 10
    second = [speaker.v(rig.now) for speaker in speakers]
    actions = rig.mesh.handle(FrameReceived(one, msg.encode(msg.Recs(tuple(first)))), rig.now)
    assert rig.reason("accepted") == 16
    assert PauseReading(one) in actions
    assert rig.mesh.backlog > 0
    rig.mesh.handle(FrameReceived(two, msg.encode(msg.Recs(tuple(second)))), rig.now)
    assert rig.reason("accepted") == 32
    done = []
    while rig.mesh.backlog > 0:
        before = rig.reason("accepted") + rig.reason("older")
        done += rig.mesh.handle(Resumed(), rig.now)
        assert rig.reason("accepted") + rig.reason("older") - before <= 2 * 16
    assert ResumeReading(one) in done
    assert ResumeReading(two) in done
    assert all(rig.parts.origins[speaker.id16].held(Kind.V).stamp.seq == 2 for speaker in speakers)


def test_what_a_paused_link_still_delivers_keeps_its_order() -> None:
    rig = Rig(peers=30)
    link = rig.link_up(rig.peers[0])
    items = tuple(speaker.v(rig.now) for speaker in rig.peers[1:])
    rig.mesh.handle(FrameReceived(link, msg.encode(msg.Recs(items))), rig.now)
    rig.mesh.handle(FrameReceived(link, msg.encode(msg.Bye(code=msg.ByeCode.GOING_DOWN))), rig.now)
    assert link in rig.parts.links
    while rig.mesh.backlog:
        rig.mesh.handle(Resumed(), rig.now)
    assert rig.reason("accepted") == 29
    assert link not in rig.parts.links


def test_a_link_above_its_byte_bucket_is_not_read_until_the_debt_is_paid() -> None:
    rig = Rig()
    link = rig.link_up(rig.peers[0])
    junk = b"\x80" + bytes(60_000)
    actions = []
    for _ in range(80):
        actions += rig.handle(FrameReceived(link, junk))
    assert actions.count(PauseReading(link)) == 1
    later = rig.pass_ms(2_000)
    assert ResumeReading(link) in later


def test_two_nodes_that_list_each_other_as_lost_exchange_two_v_a_second_and_settle() -> None:
    rig = Rig()
    peer = rig.peers[0]
    link = rig.fresh(peer)
    rig.pass_ms(3_000, alive=(link,))
    for _ in range(100):
        own = rig.parts.publisher.held(Kind.V).stamp
        lost = (LostLink(id16=rig.me.id16, epoch=own.epoch, seq=own.seq),)
        rig.records(link, peer.v(rig.now, Volatile(lost=lost)))
        rig.pass_ms(100)
    start = rig.parts.publisher.seq
    rig.pass_ms(5_000, alive=(link,))
    assert rig.parts.publisher.seq - start <= 6
    assert start <= 5 + 2 * 10 + 16


def test_an_unknown_link_says_nothing() -> None:
    rig = Rig()
    assert not frames(rig.handle(FrameReceived(LinkId(999), b"\x05\x90")))


def _flood(rig: Rig, peer: Peer, kind: str) -> Callable[[], bytes]:
    replayed = peer.v(rig.now, seq=1)
    twin = peer.v(rig.now, Volatile(level=2), seq=2)
    made: dict[str, Callable[[], bytes]] = {
        "ping": lambda: msg.encode(msg.Ping(nonce=1, boot_ms=rig.now)),
        "pong": lambda: msg.encode(msg.Pong(nonce=1, boot_ms=rig.now)),
        "have": lambda: msg.encode(msg.Have(chunk=0, chunks=1)),
        "want": lambda: msg.encode(msg.Want((msg.Wanted(rig.me.id16, Kind.V, 1, 1),))),
        "ignored": lambda: b"\x80junk",
        "empty": lambda: msg.encode(msg.Recs(())),
        "replayed": lambda: msg.encode(msg.Recs((replayed,))),
        "equivocating": lambda: msg.encode(msg.Recs((twin,))),
        "strangers": lambda: msg.encode(msg.Recs((stranger(rig, peer),))),
    }
    return made[kind]


FLOODS = ["ping", "pong", "have", "want", "ignored", "empty", "replayed", "equivocating", "strangers"]


@pytest.mark.parametrize("kind", FLOODS)
def test_a_member_that_floods_is_closed_and_left_alone_for_longer_each_time(kind: str) -> None:
    rig = Rig()
    peer = rig.peers[0]
    for away_ms in (60_000, 120_000):
        link = rig.fresh(peer)
        make = _flood(rig, peer, kind)
        sent, told = 0, []
        while link in rig.parts.links and sent < 2 * rig.policy.useless_burst:
            told = rig.handle(FrameReceived(link, make()))
            sent += 1
            if sent % 10 == 0:
                rig.now += 1
        assert rig.policy.useless_burst <= sent <= rig.policy.useless_burst + 10
        assert alarms(told)[-1:] == ["flooding"]
        (goodbye,) = [message for message in frames(told, link) if isinstance(message, msg.Bye)]
        assert (goodbye.code, goodbye.retry_after_ms) == (msg.ByeCode.PROTOCOL, away_ms)
        assert byes(rig.handle(LinkOpened(link=LinkId(900), peer=peer.id16, dialled=False)), LinkId(900))
        rig.pass_ms(away_ms + 1)


def test_a_talkative_but_honest_member_is_no_flood() -> None:
    """Each second for five minutes: a V, a PING, a PONG, a record of a third that is known already, now and then a HAVE."""
    rig = Rig()
    peer, other = rig.peers
    link = rig.fresh(peer)
    known = other.v(rig.now)
    rig.records(link, known)
    for second in range(300):
        rig.records(link, peer.v(rig.now))
        for _ in range(4):
            rig.records(link, known)
            rig.say(link, msg.Ping(nonce=second, boot_ms=rig.now), msg.Pong(nonce=second, boot_ms=rig.now))
        if second % 10 == 0:
            rig.say(link, msg.Have(chunk=0, chunks=1))
        rig.pass_ms(1_000)
    assert link in rig.parts.links
    assert rig.reason("flooding") == 0


def test_a_link_above_its_message_budget_is_not_read_until_there_is_room_again() -> None:
    rig = Rig(peers=30)
    link = rig.link_up(rig.peers[0])
    actions = []
    for number in range(rig.policy.messages_burst + 10):
        speaker = rig.peers[number % 30]
        actions += rig.handle(FrameReceived(link, msg.encode(msg.Recs((speaker.v(rig.now),)))))
    assert actions.count(PauseReading(link)) == 1
    assert ResumeReading(link) in rig.pass_ms(1_000)


def test_records_that_contradict_what_is_held_are_verified_a_few_times_a_second_only() -> None:
    rig = Rig()
    peer = rig.peers[0]
    link = rig.fresh(peer)
    twins = tuple(peer.v(rig.now, seq=2, due_ms=2_001 + number) for number in range(40))
    rig.records(link, *twins)
    assert rig.reason("equivocation") == rig.policy.disputes_burst
    assert rig.reason("rate") == len(twins) - rig.policy.disputes_burst
    rig.pass_ms(1_000, alive=(link,))
    rig.records(link, *twins)
    assert rig.reason("equivocation") == rig.policy.disputes_burst + rig.policy.disputes_per_s_m // 1_000
