"""What status pages show of the mesh machine: plain facts, copied out, nothing to hold on to."""

from msgspec import Struct

from router_core.ids import Id16
from router_core.mesh.parts import Parts
from router_core.record.membership import Liveness
from router_core.record.stamp import Stamp
from router_core.record.state import Kind


class MemberStatus(Struct, frozen=True, kw_only=True):
    """One other member. ``state`` is None if nothing was ever heard of it; stamps are None for what is not held.
    ``conflict_ms`` is how long it is still taken for one identity in several places, ``behind_ms`` for one whose disk
    fell behind, ``quarantine_ms`` how long nothing of it is taken at all; ``link_fault`` is why the last link to it ended unplanned, None once one is up."""

    id16: Id16
    state: Liveness | None
    confirmed: bool
    age_ms: int | None
    link_up: bool
    link_fault: str | None
    rtt_ms: int | None
    volatile: Stamp | None
    static: Stamp | None
    leave: Stamp | None
    conflict_ms: int
    behind_ms: int
    quarantine_ms: int


class LinkStatus(Struct, frozen=True, kw_only=True):
    """One open link. ``dirty`` is how many records wait to be sent over it; unknown times are None."""

    link: int
    peer: Id16
    phase: str
    dialled: bool
    up_ms: int | None
    rtt_ms: int | None
    dirty: int


class MeshStatus(Struct, frozen=True, kw_only=True):
    """The whole machine at one moment. ``epoch``, ``seq`` are the own newest; ``lonely`` marks the view isolated."""

    id16: Id16
    epoch: int
    inst: int
    seq: int
    lonely: bool
    conflicted: bool
    degraded: bool
    exhausted: bool
    members: tuple[MemberStatus, ...]
    links: tuple[LinkStatus, ...]
    counts: tuple[tuple[str, str, int], ...]


def picture(parts: Parts, now: int) -> MeshStatus:
    """The status of the whole mesh machine at ``now``."""
    publisher = parts.publisher
    return MeshStatus(
        id16=parts.me.id16,
        epoch=publisher.epoch,
        inst=publisher.inst,
        seq=publisher.seq,
        lonely=parts.solitude.lonely,
        conflicted=publisher.conflicted,
        degraded=publisher.degraded,
        exhausted=publisher.exhausted,
        members=tuple(_member(parts, id16, now) for id16 in sorted(parts.origins)),
        links=tuple(
            LinkStatus(
                link=link.id,
                peer=link.peer,
                phase=link.phase.value,
                dialled=link.dialled,
                up_ms=now - link.up_at if link.up_at is not None else None,
                rtt_ms=link.rtt_ms,
                dirty=len(link.dirty),
            )
            for link in parts.links.values()
        ),
        counts=tuple(
            (kind, reason, count) for (kind, reason), count in sorted(parts.receiver.counts.items())
        ),
    )


def _member(parts: Parts, id16: Id16, now: int) -> MemberStatus:
    origin = parts.origins[id16]
    up = [link for link in parts.links_to(id16) if link.is_up]
    stamps = [held.stamp if (held := origin.held(kind)) else None for kind in (Kind.V, Kind.S, Kind.L)]
    return MemberStatus(
        id16=id16,
        state=origin.state,
        confirmed=origin.confirmed,
        age_ms=origin.age_ms(now),
        link_up=bool(up),
        link_fault=origin.link_fault,
        rtt_ms=parts.rtt_ms_to(id16),
        volatile=stamps[0],
        static=stamps[1],
        leave=stamps[2],
        conflict_ms=max(0, origin.conflict_until - now),
        behind_ms=max(0, origin.behind_until - now),
        quarantine_ms=max(0, origin.quarantined_until - now),
    )
