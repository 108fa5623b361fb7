"""What time alone does: verdicts on silence, links that waited too long, pings, loneliness, files."""

from router_core.ids import Id16
from router_core.mesh.membership.liveness import ALIVE, judge, stands_ms
from router_core.mesh.parts import Parts
from router_core.mesh.protocol.actions import Alarm, Persist
from router_core.mesh.protocol.events import SavedKey
from router_core.mesh.protocol.messages import Ping
from router_core.mesh.records.origin import Origin
from router_core.mesh.records.saved import RecordFloor, encode_addresses, encode_floors
from router_core.mesh.steps import link_life
from router_core.record.membership import Liveness
from router_core.record.stamp import ZERO
from router_core.record.state import Kind


def refresh(parts: Parts, origin: Origin, now: int) -> None:
    """Judge one origin by what is known now."""
    was = origin.state
    if was not in ALIVE or was is None:
        return
    state = judge(
        origin.evidence(now),
        was,
        parts.policy,
        lonely=parts.solitude.lonely,
        in_gap=parts.gap.active(now),
    )
    if not origin.enter(state, now):
        return
    if state is Liveness.SUSPECT and not parts.links_to(origin.id16):
        parts.dialler.dial_once(origin.id16)
    if state is Liveness.GONE:
        parts.hearsay.forget(origin.id16)
    parts.changed(origin, now, urgent=state in (Liveness.SUSPECT, Liveness.GONE))


def judge_all(parts: Parts, now: int) -> None:
    """Judge every origin anew and drop records that have expired."""
    for origin in parts.origins.values():
        if not parts.hearsay.is_silent or origin.lost_since is not None:
            _hear_voices(parts, origin, now)
        refresh(parts, origin, now)
        if origin.expire(now):
            parts.changed(origin, now, urgent=False)


def _hear_voices(parts: Parts, origin: Origin, now: int) -> None:
    v = origin.held(Kind.V)
    voices = parts.hearsay.voices(
        origin.id16, v.stamp if v is not None else ZERO, lambda id16: _counts(parts, id16)
    )
    if voices < parts.policy.lost_reporters:
        origin.lost_since = None
    elif origin.lost_since is None:
        origin.lost_since = now


def _counts(parts: Parts, reporter: Id16) -> bool:
    origin = parts.origins.get(reporter)
    return origin is not None and origin.state in ALIVE


def tend_links(parts: Parts, now: int) -> None:
    """Close links that waited too long and ping those that have been quiet."""
    for link in list(parts.links.values()):
        expiry = link.expired(now)
        if expiry is not None:
            link_life.expired(parts, link, expiry, now)
        elif link.wants_ping(now):
            nonce = parts.rng.getrandbits(32)
            link.ping(nonce, now)
            ping = Ping(nonce=nonce, boot_ms=now, degree=parts.degree, degree_cap=parts.policy.links_most)
            parts.send(link, ping, now)


def look_at(parts: Parts, now: int) -> int:
    """When time alone may change a link or a verdict, if nothing else happens; ``now`` for soon."""
    settled = parts.solitude.is_settled(parts.degree, parts.others_alive > 0)
    if parts.gap.active(now) or not settled or not parts.hearsay.is_silent:
        return now
    looks = [now + parts.policy.calm_tick_ms]
    looks += [link.look_at(now) for link in parts.links.values()]
    for origin in parts.origins.values():
        if origin.state in ALIVE and (stands := stands_ms(origin.evidence(now), parts.policy)) is not None:
            looks.append(now + stands)
    return min(looks)


def feel_alone(parts: Parts, now: int) -> None:
    """Update whether this node counts as alone, and report when it begins to."""
    if parts.solitude.update(now, parts.degree, parts.others_alive > 0):
        parts.publisher.hurry()
        if parts.solitude.lonely:
            parts.notify(Alarm.LONELY, members=parts.others_alive)


class Files:
    """Floors and addresses, written every 60 s if they changed, and at the end."""

    def __init__(self, parts: Parts, now: int) -> None:
        self._parts = parts
        self._at = now + parts.policy.floors_every_ms
        self._written = _floors(parts)

    def save(self, now: int, *, last: bool = False) -> list[Persist]:
        if now < self._at and not last:
            return []
        self._at = now + self._parts.policy.floors_every_ms
        out: list[Persist] = []
        floors = _floors(self._parts)
        if floors != self._written:
            self._written = floors
            out.append(Persist(SavedKey.FLOORS, encode_floors(floors)))
        if self._parts.addresses_moved:
            self._parts.addresses_moved = False
            out.append(Persist(SavedKey.ADDRESSES, encode_addresses(self._parts.addresses)))
        return out


def _floors(parts: Parts) -> tuple[RecordFloor, ...]:
    current = {**parts.floors, **{id16: origin.floor() for id16, origin in parts.origins.items()}}
    return tuple(current[id16] for id16 in sorted(current))
