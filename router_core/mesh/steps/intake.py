"""What a received message does: dispatch, verification in portions, and the consequences of each verdict.

At most 16 verifications happen per step; what is left of a message waits on its link, which is not read meanwhile,
and links take turns when the driver resumes.
"""

from typing import Final

from router_core import limits
from router_core.errors import RemoteFault
from router_core.ids import Id16
from router_core.mesh.links.link import Link, LinkPhase
from router_core.mesh.parts import Parts
from router_core.mesh.protocol.actions import Alarm, PauseReading, ResumeReading
from router_core.mesh.protocol.messages import (
    Bye,
    ByeCode,
    Have,
    Heard,
    Hello,
    Message,
    Ping,
    Pong,
    Recs,
    Want,
    decode,
)
from router_core.mesh.records.origin import Origin
from router_core.mesh.records.receiver import PENALTIES, DropReason, Judgement
from router_core.mesh.steps import link_life
from router_core.mesh.steps.upkeep import refresh
from router_core.record.envelope import Header, Sealed
from router_core.record.stamp import Stamp
from router_core.record.state import Flag, Kind, Leave, Volatile

_FRAMES_WAITING: Final = 64
"""Messages a paused link may still deliver from its driver's hands."""


def frame(parts: Parts, link: Link, data: bytes, now: int) -> None:
    """One binary message arrived."""
    link.heard_at = now
    link.spend(len(data), now)
    if link.backlog or link.frames:
        link.frames.append(data)
        if len(link.frames) > _FRAMES_WAITING:
            link_life.drop(parts, link, ByeCode.PROTOCOL, now, penalty=True)
            return
    else:
        _take(parts, link, data, now)
    if link.id in parts.links and not link.paused and not link.may_read(now):
        link.paused = True
        parts.out.append(PauseReading(link.id))


def resume(parts: Parts, now: int) -> None:
    """Go on with what waits, one record per link and turn, within this step's verifications."""
    while parts.waiting and parts.verifications_left > 0:
        link = parts.links[next(iter(parts.waiting))]
        del parts.waiting[link.id]
        if link.backlog:
            _record(parts, link, link.backlog.popleft(), now)
        elif link.frames:
            _take(parts, link, link.frames.popleft(), now)
        if link.id in parts.links:
            if link.backlog or link.frames:
                parts.waiting[link.id] = None
            else:
                parts.waiting.pop(link.id, None)
    for link in list(parts.links.values()):
        unpause(parts, link, now)


def unpause(parts: Parts, link: Link, now: int) -> None:
    """Read a link again when nothing of it waits and its byte bucket is out of debt."""
    if link.paused and link.may_read(now):
        link.paused = False
        parts.out.append(ResumeReading(link.id))


def _take(parts: Parts, link: Link, data: bytes, now: int) -> None:
    try:
        message = decode(data)
    except RemoteFault as fault:
        _punish(parts, link, DropReason(fault.reason), now)
        parts.receiver.count_message(DropReason(fault.reason))
        return
    if message is None:
        _useless(parts, link, now)
    else:
        _message(parts, link, message, now)


def _useless(parts: Parts, link: Link, now: int) -> None:
    """A message that told nothing: a few are ordinary, a stream of them ends the link, for longer each time."""
    if link.id in parts.links and not link.may_be_useless(now):
        flooded(parts, link, now)


def flooded(parts: Parts, link: Link, now: int) -> None:
    """End the link of a peer that sends far more than it has to tell."""
    away_ms = parts.dialler.penalise_flood(link.peer, now)
    parts.receiver.count_message(DropReason.FLOODING)
    parts.notify(Alarm.FLOODING, peer=link.peer.hex(), away_s=away_ms // 1_000)
    link_life.drop(parts, link, ByeCode.PROTOCOL, now, retry_after_ms=away_ms)


def _message(parts: Parts, link: Link, message: Message, now: int) -> None:
    if isinstance(message, Ping | Pong | Want) or (isinstance(message, Have) and link.is_up):
        _useless(parts, link, now)
        if link.id not in parts.links:
            return
    if isinstance(message, Hello):
        link_life.hello(parts, link, message, now)
    elif isinstance(message, Bye):
        link_life.bye(parts, link, message, now)
    elif link.phase is LinkPhase.GREETING:
        link_life.drop(parts, link, ByeCode.PROTOCOL, now, penalty=True)
    elif isinstance(message, Recs):
        _records(parts, link, message, now)
    elif isinstance(message, Ping):
        _clock(parts, link, message.boot_ms, now)
        pong = Pong(nonce=message.nonce, boot_ms=now, degree=parts.degree, degree_cap=parts.policy.links_most)
        parts.send(link, pong, now)
    elif isinstance(message, Pong):
        link.pong(message.nonce, now)
        _clock(parts, link, message.boot_ms, now)
    elif isinstance(message, Have):
        link_life.have(parts, link, message, now)
    else:
        _want(parts, link, message, now)


def _clock(parts: Parts, link: Link, boot_ms: int, now: int) -> None:
    origin = parts.origins[link.peer]
    if link.hello is not None and origin.epoch == link.hello.epoch:
        origin.hear_clock(now, boot_ms)


def _want(parts: Parts, link: Link, message: Want, now: int) -> None:
    for item in message.items:
        if item.kind not in (Kind.V, Kind.S, Kind.L):
            continue
        slot = (Id16(item.id16), Kind(item.kind))
        held = parts.newest(slot)
        if held is not None and held.stamp >= Stamp(item.epoch, item.seq) and link.may_answer(slot, now):
            parts.mark(link, slot, now, urgent=True)


def _records(parts: Parts, link: Link, message: Recs, now: int) -> None:
    items = list(message.items)
    useful = False
    for at, item in enumerate(items):
        if parts.verifications_left <= 0:
            link.backlog.extend(items[at:])
            parts.waiting[link.id] = None
            break
        useful = _record(parts, link, item, now) is DropReason.ACCEPTED or useful
        if link.id not in parts.links:
            return
    if not useful:
        _useless(parts, link, now)


def _record(parts: Parts, link: Link | None, item: Heard, now: int) -> DropReason:
    judgement = parts.receiver.judge(Sealed(item.signed, item.sig), link, now)
    if judgement.verified:
        parts.verifications_left -= 1
    reason = judgement.reason
    if reason is DropReason.ACCEPTED:
        accept(parts, judgement, link, now)
    elif reason in PENALTIES:
        if link is not None:
            _punish(parts, link, reason, now)
    elif reason is DropReason.OWN and judgement.header is not None:
        own_record(parts, judgement.header, judgement.sealed.signed, now)
    elif reason is DropReason.EQUIVOCATION and judgement.header is not None:
        parts.notify(Alarm.EQUIVOCATION, origin=judgement.header.id16.hex(), seq=judgement.header.seq)
    elif reason is DropReason.BAD_BODY and judgement.origin is not None:
        parts.notify(Alarm.QUARANTINED, origin=judgement.origin.id16.hex())
        parts.changed(judgement.origin, now, urgent=True)
    elif (
        reason in (DropReason.OLDER, DropReason.BELOW_FLOOR)
        and link is not None
        and judgement.header is not None
    ):
        _behind(parts, link, judgement.header, now)
    return reason


def _behind(parts: Parts, link: Link, header: Header, now: int) -> None:
    """The peer itself sends what is older than what another life of it wrote: its disk fell behind, or there are two.

    It is shown the newest record held of it, whoever brought that, and rises above by itself.
    """
    origin = parts.origins.get(link.peer)
    if origin is None or header.id16 != link.peer or link.hello is None:
        return
    held = origin.proof
    same_life = held is None or (held.stamp.epoch, held.inst) == (header.epoch, header.inst)
    if held is None or same_life or held.stamp.epoch < header.epoch:
        return
    if link.may_show_own(now):
        origin.behind_until = now + parts.policy.show_own_every_ms + parts.policy.conflict_ms
        parts.send(link, Recs((Heard(0, held.sealed.signed, held.sealed.sig),)), now)


def heard_elsewhere(parts: Parts, signed: bytes, sig: bytes, now: int) -> None:
    """A record that came in a refusal: the same pipeline, and no link to blame."""
    if len(signed) <= limits.RECORD_HEADER and len(sig) == 64:
        _record(parts, None, Heard(0, signed, sig), now)


def _punish(parts: Parts, link: Link, reason: DropReason, now: int) -> None:
    if reason is DropReason.BAD_SIGNATURE:
        parts.notify(Alarm.BAD_SIGNATURE, peer=link.peer.hex())
    link_life.drop(parts, link, PENALTIES[reason], now, penalty=True)


def accept(parts: Parts, judgement: Judgement, link: Link | None, now: int) -> None:
    """Store a judged record: then age, liveness, other links, view."""
    header, origin, body = judgement.header, judgement.origin, judgement.body
    assert header is not None
    assert origin is not None
    assert body is not None
    was_in_conflict = now < origin.conflict_until
    origin.store(header, judgement.sealed, body, now)
    if now < origin.conflict_until and not was_in_conflict:
        policy = parts.policy
        parts.notify(
            Alarm.RESTARTS,
            origin=origin.id16.hex(),
            epoch=origin.epoch,
            more_than=policy.epoch_rises_most,
            within_s=policy.epoch_rise_window_ms // 1_000,
            shunned_s=policy.conflict_ms // 1_000,
        )
    parts.losses.forget(origin.id16)
    urgent = isinstance(body, Leave) or (isinstance(body, Volatile) and bool(body.flags & Flag.URGENT))
    for own_link in parts.links_to(origin.id16):
        if own_link.is_up and own_link.hello is not None:
            origin.confirm(own_link.hello.epoch, own_link.hello.inst)
            if header.epoch == own_link.hello.epoch:
                origin.hear_clock(own_link.hello_at, own_link.hello.boot_ms)
    if isinstance(body, Volatile):
        parts.hearsay.hear(origin.id16, body.lost)
        _refute(parts, body)
    elif isinstance(body, Leave):
        parts.hearsay.forget(origin.id16)
        flood(parts, origin, now)
    if (sref := origin.missing_static) is not None:
        parts.want((origin.id16, Kind.S), header.epoch, sref.seq, link, now)
    refresh(parts, origin, now)
    parts.changed(origin, now, urgent=urgent)


def _refute(parts: Parts, body: Volatile) -> None:
    """Somebody lists us as lost at our newest V: a newer one says otherwise."""
    own = parts.publisher.held(Kind.V)
    for entry in body.lost:
        if entry.id16 == parts.me.id16 and own is not None and Stamp(entry.epoch, entry.seq) >= own.stamp:
            parts.publisher.hurry()


def flood(parts: Parts, origin: Origin, now: int) -> None:
    """L goes to every link that does not know it."""
    left = origin.held(Kind.L)
    slot = (origin.id16, Kind.L)
    for link in parts.links_up():
        if left is not None and link.peer != origin.id16 and link.lacks(slot, left.stamp):
            parts.mark(link, slot, now, urgent=True)


def own_record(parts: Parts, header: Header, signed: bytes, now: int) -> None:
    """A genuine record of ours came back."""
    if not parts.publisher.is_foreign(header, signed):
        return
    was_conflicted = parts.publisher.conflicted
    was_exhausted = parts.publisher.exhausted
    persist = parts.publisher.ratchet(header.epoch, now)
    if persist is not None:
        parts.out.append(persist)
    if parts.publisher.exhausted and not was_exhausted:
        parts.notify(Alarm.EPOCH_EXHAUSTED, peer=parts.me.id16.hex(), epoch=header.epoch)
    if parts.publisher.conflicted and not was_conflicted:
        parts.notify(Alarm.DUPLICATE_IDENTITY, peer=parts.me.id16.hex(), epoch=parts.publisher.epoch)
