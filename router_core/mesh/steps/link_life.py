"""The life of links: open, HELLO, HAVE, up, and what each kind of end means.

An end of a link that was up is planned (duplicate, going down, trimmed) or abnormal; the latter is told to all by
``lost`` in the own V and answered by one dial at once. Two links of one identity in two process lives are settled
by epoch.
"""

from typing import Final

from router_core import limits
from router_core.ids import Id16
from router_core.mesh.links.link import STATE_KINDS, Expiry, Link, Slot
from router_core.mesh.membership.overlay import Duel, same_life_duel
from router_core.mesh.parts import Parts
from router_core.mesh.protocol.actions import Alarm
from router_core.mesh.protocol.events import LinkClosed, LinkOpened
from router_core.mesh.protocol.messages import (
    PLANNED,
    PROTOCOL,
    Bye,
    ByeCode,
    Have,
    HaveState,
    Heard,
    Hello,
    Recs,
    encode_haves,
)
from router_core.mesh.records.origin import HeldRecord
from router_core.record.membership import Liveness
from router_core.record.stamp import Stamp
from router_core.record.state import Kind

_CODES: Final = {code.value: code for code in ByeCode}


def opened(parts: Parts, event: LinkOpened, now: int) -> None:
    """Take a new link: close it with a reason if it cannot be had, else send HELLO."""
    link = Link(event.link, event.peer, event.dialled, parts.policy, now)
    parts.links[link.id] = link
    if event.peer != parts.me.id16:
        parts.dialler.opened(event.peer, event.dialled, now)
    penalty_ms = parts.dialler.penalty_ms(event.peer, now)
    if event.peer == parts.me.id16:
        parts.close(link, ByeCode.SELF, now)
    elif event.peer not in parts.origins or parts.publisher.left:
        parts.close(link, ByeCode.GOING_DOWN if parts.publisher.left else ByeCode.REMOVED, now)
    elif penalty_ms:
        parts.close(link, ByeCode.PROTOCOL, now, retry_after_ms=penalty_ms)
    elif len(parts.links) > parts.policy.links_most or len(parts.links_to(event.peer)) > limits.LINKS_PER_ID:
        drop(parts, link, ByeCode.FULL, now)
    else:
        if event.dialled and event.addr is not None:
            _remember(parts, event)
        greet(parts, link, now)


def greet(parts: Parts, link: Link, now: int) -> None:
    """Send HELLO, once the epoch in it is on disk; a HELLO that was faster is taken then."""
    if link.hello_sent_ms is not None or not parts.publisher.is_persisted or link.id not in parts.links:
        return
    link.hello_sent_ms = now
    own = Hello(
        mesh8=parts.receiver.mesh8,
        id16=parts.me.id16,
        epoch=parts.publisher.epoch,
        inst=parts.publisher.inst,
        boot_ms=now,
        degree=parts.degree,
        degree_cap=parts.policy.links_most,
    )
    parts.send(link, own, now)
    if link.early_hello is not None:
        hello(parts, link, link.early_hello, now)


def _remember(parts: Parts, event: LinkOpened) -> None:
    known = parts.addresses.get(event.peer, ())
    if event.addr is not None and known[:1] != (event.addr,):
        rest = tuple(addr for addr in known if addr != event.addr)
        parts.addresses[event.peer] = (event.addr, *rest)[: parts.policy.addresses_kept]
        parts.addresses_moved = True


def hello(parts: Parts, link: Link, message: Hello, now: int) -> None:
    """The peer's first message."""
    if link.hello_sent_ms is None and link.early_hello is None:
        link.early_hello = message
        return
    if (refusal := _hello_refusal(parts, link, message)) is not None:
        drop(parts, link, refusal, now)
        return
    link.greet(message, now)
    for other in parts.links_to(link.peer):
        if other is not link and other.hello is not None and not _settle(parts, other, link, now):
            return
    states = [entry for origin in parts.origins.values() if (entry := origin.have()) is not None]
    if (own := parts.publisher.have()) is not None:
        states.append(own)
    for data in encode_haves(states):
        parts.send_data(link, data, now)


def _hello_refusal(parts: Parts, link: Link, message: Hello) -> ByeCode | None:
    if link.hello is not None or link.hello_sent_ms is None or message.id16 != link.peer:
        return ByeCode.PROTOCOL
    if message.proto_max < PROTOCOL or message.proto_min > PROTOCOL:
        return ByeCode.VERSION
    return ByeCode.WRONG_MESH if message.mesh8 != parts.receiver.mesh8 else None


def _settle(parts: Parts, old: Link, new: Link, now: int) -> bool:
    """Two links of one id. True if ``new`` stays."""
    assert old.hello is not None
    assert new.hello is not None
    if old.hello.inst == new.hello.inst:
        duel = same_life_duel(parts.me.id16, old, new)
        code = ByeCode.DUP_LINK
    else:
        duel = _two_lives_duel(old.hello, new.hello)
        code = ByeCode.DUP_IDENTITY
        still_sends = old.heard_at > new.opened_at and not parts.gap.active(now)
        if duel is Duel.CLOSE_BOTH or (duel is Duel.KEEP_NEW and still_sends):
            parts.notify(Alarm.DUPLICATE_IDENTITY, peer=new.peer.hex(), epoch=new.hello.epoch)
    if duel in (Duel.KEEP_NEW, Duel.CLOSE_BOTH):
        if code is ByeCode.DUP_IDENTITY:
            show_own_record(parts, old, now)
        drop(parts, old, code, now)
    if duel in (Duel.KEEP_OLD, Duel.CLOSE_BOTH):
        if code is ByeCode.DUP_IDENTITY:
            show_own_record(parts, new, now)
        drop(parts, new, code, now)
    return duel in (Duel.KEEP_NEW, Duel.KEEP_BOTH)


def _two_lives_duel(old: Hello, new: Hello) -> Duel:
    if old.epoch == new.epoch:
        return Duel.CLOSE_BOTH
    return Duel.KEEP_NEW if new.epoch > old.epoch else Duel.KEEP_OLD


def show_own_record(parts: Parts, link: Link, now: int) -> None:
    """Send the peer the newest record of itself held here, if its HELLO, or the HAVE after it, does not know of it.

    Another life of it must have written that, and only its own record makes it rise above.
    """
    origin = parts.origins.get(link.peer)
    held = origin.proof if origin is not None else None
    if held is None or link.hello is None or held.stamp.epoch < link.hello.epoch:
        return
    other_life = held.stamp.epoch > link.hello.epoch or held.inst != link.hello.inst
    slot: Slot = (link.peer, held.kind)
    if other_life or (link.is_up and link.lacks(slot, held.stamp)):
        link.sent(slot, held.stamp)
        parts.send(link, Recs((Heard(0, held.sealed.signed, held.sealed.sig),)), now)


def have(parts: Parts, link: Link, message: Have, now: int) -> None:
    """One chunk of what the peer holds; the last one brings the link up."""
    members = tuple(
        entry for entry in message.states if entry.id16 in parts.origins or entry.id16 == parts.me.id16
    )
    last = link.take_have(message.chunk, message.chunks, members)
    if last is None:
        drop(parts, link, ByeCode.PROTOCOL, now)
        return
    _want_gaps(parts, link, message, now)
    if not last:
        return
    if not link.is_up:
        link.rise(now)
        _rose(parts, link, now)
    _mark_missing(parts, link, now)


def _want_gaps(parts: Parts, link: Link, message: Have, now: int) -> None:
    """Ask for what the peer holds and nobody will send: own records unknown here, and S of those not linked.

    A V of an unlinked origin is not asked for: two stale ones from two peers would pass for a sign of life.
    """
    for entry in message.states:
        slot: Slot = (Id16(entry.id16), Kind.S)
        if slot[0] == parts.me.id16:
            _want_own(parts, link, entry, now)
            continue
        origin = parts.origins.get(slot[0])
        if origin is None or not entry.sseq or any(other.is_up for other in parts.links_to(slot[0])):
            continue
        held = origin.held(Kind.S)
        if origin.state is not Liveness.LEFT and (
            held is None or held.stamp < Stamp(entry.epoch, entry.sseq)
        ):
            parts.want(slot, entry.epoch, entry.sseq, link, now)


def _want_own(parts: Parts, link: Link, entry: HaveState, now: int) -> None:
    for kind, seq in zip(STATE_KINDS, (entry.sseq, entry.vseq, entry.lseq), strict=True):
        if seq and Stamp(entry.epoch, seq) > Stamp(parts.publisher.epoch, parts.publisher.seq):
            parts.want((parts.me.id16, kind), entry.epoch, seq, link, now)


def _rose(parts: Parts, link: Link, now: int) -> None:
    parts.publisher.listened(now)
    parts.losses.forget(link.peer)
    origin = parts.origins[link.peer]
    origin.link_fault = None
    assert link.hello is not None
    if origin.epoch == link.hello.epoch:
        origin.hear_clock(link.hello_at, link.hello.boot_ms)
    if origin.state is not None:
        origin.confirm(link.hello.epoch, link.hello.inst)
        if origin.epoch == link.hello.epoch:
            origin.broken_at, origin.refused = None, False
        parts.changed(origin, now, urgent=False)


def _mark_missing(parts: Parts, link: Link, now: int) -> None:
    """After HAVE: own records, every L, and the peer's own records that it does not know."""
    slots: list[tuple[Slot, HeldRecord | None]] = [
        ((origin.id16, Kind.L), origin.held(Kind.L)) for origin in parts.origins.values()
    ]
    slots += [((parts.me.id16, kind), parts.publisher.held(kind)) for kind in (Kind.S, Kind.V)]
    for slot, held in slots:
        if held is not None and slot[0] != link.peer and link.lacks(slot, held.stamp):
            parts.mark(link, slot, now, urgent=True)
    show_own_record(parts, link, now)


def drop(
    parts: Parts,
    link: Link,
    code: ByeCode | None,
    now: int,
    *,
    penalty: bool = False,
    retry_after_ms: int = 0,
) -> None:
    """End a link ourselves. With ``penalty`` the peer is not dialled for 60 s, and is asked to wait as long."""
    if penalty:
        retry_after_ms = parts.policy.penalty_ms
        parts.dialler.penalise(link.peer, retry_after_ms, now)
    _note_fault(parts, link, code)
    parts.close(link, code, now, retry_after_ms=retry_after_ms)
    ended(parts, link, code in PLANNED, now)


def bye(parts: Parts, link: Link, message: Bye, now: int) -> None:
    """The peer ends the link."""
    if message.retry_after_ms:
        wait_ms = min(message.retry_after_ms, parts.policy.retry_after_most_ms)
        parts.dialler.penalise(link.peer, wait_ms, now)
    _note_fault(parts, link, _CODES.get(message.code, ByeCode.PROTOCOL))
    parts.close(link, None, now)
    ended(parts, link, message.code in PLANNED, now)


def _note_fault(parts: Parts, link: Link, code: ByeCode | None) -> None:
    origin = parts.origins.get(link.peer)
    if origin is not None and code is not None and code not in PLANNED:
        origin.link_fault = code.name.lower()


def closed(parts: Parts, event: LinkClosed, now: int) -> None:
    """The connection is gone without a word."""
    link = parts.links.pop(event.link, None)
    parts.waiting.pop(event.link, None)
    if link is not None:
        ended(parts, link, False, now)


def expired(parts: Parts, link: Link, expiry: Expiry, now: int) -> None:
    """A limit passed. A dead link gets no BYE: nobody would read it."""
    codes = {Expiry.SLOW: ByeCode.SLOW, Expiry.NO_HELLO: ByeCode.PROTOCOL, Expiry.NO_HAVE: ByeCode.PROTOCOL}
    drop(parts, link, codes.get(expiry), now)


def ended(parts: Parts, link: Link, planned: bool, now: int) -> None:
    """What the end of a forgotten link means, unless another one to the same peer is there."""
    others = parts.links_to(link.peer)
    lived_ms = now - link.up_at if link.up_at is not None else None
    if not others:
        parts.dialler.closed(link.peer, lived_ms, not planned, now)
    origin = parts.origins.get(link.peer)
    if origin is None or lived_ms is None or planned or any(other.is_up for other in others):
        return
    v = origin.held(Kind.V)
    if v is None or origin.state in (Liveness.GONE, Liveness.LEFT):
        return
    origin.broken_at = now
    parts.losses.add(link.peer, v.stamp, now)
    parts.publisher.hurry()
