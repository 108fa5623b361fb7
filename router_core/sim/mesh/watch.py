"""What must hold in every simulated step, whoever is at fault.

It looks at machines and at frames on the wire, never changes anything, and raises ``Violation`` with the number of the broken
rule. Liveness after faults stop is asked for by ``settled``.
"""

from typing import Final

from msgspec import Struct

from router_core.errors import PairmeshError
from router_core.ids import Id16
from router_core.mesh.links.link import STATE_KINDS, Slot
from router_core.mesh.protocol import events as ev
from router_core.mesh.protocol import messages as msg
from router_core.mesh.records.origin import HeldRecord
from router_core.record.envelope import Header, read_header
from router_core.record.membership import Liveness, ViewChange
from router_core.record.stamp import ZERO, Stamp
from router_core.record.state import Kind
from router_core.sim.mesh.crypto import Ledger
from router_core.sim.mesh.host import Host
from router_core.sim.mesh.net import Net

SETTLE_MS: Final = 12_000
LINK_PROVEN_MS: Final = 5_000
DEAD_SHOWN_MS: Final = 8_000
AGE_SLACK_MS: Final = 200
ROUTED: Final = (Liveness.FRESH, Liveness.LATE)
BAD: Final = (Liveness.SUSPECT, Liveness.GONE)


class Violation(PairmeshError):
    """A rule of the mesh was broken in simulation."""


class _Life(Struct):
    """What was seen of one process life of one host."""

    number: int
    floors: dict[Slot, Stamp]
    newest: dict[Slot, Stamp]
    held: dict[Slot, HeldRecord]
    past_epoch: int


class Watch:
    def __init__(self, ledger: Ledger, net: Net, hosts: list[Host]) -> None:
        self._ledger = ledger
        self._net = net
        self._hosts = hosts
        self._lives: dict[int, _Life] = {}
        self._seen: dict[int, dict[Slot, Stamp]] = {}
        self._identities: dict[tuple[bytes, int, int, int], bytes] = {}
        self._sealed_at: dict[tuple[bytes, int, int, int], int] = {}
        self._last: tuple[bytes, list[tuple[Header, bytes]]] = (b"", [])
        self._epoch_used: dict[int, int] = {}
        self.newest: dict[Slot, msg.Heard] = {}
        self.checks = 0
        self.disk_is_true: dict[int, bool] = {}
        self.estranged: dict[frozenset[int], None] = {}

    # --- hooks ---

    def connected(self, near: ev.LinkId, far: ev.LinkId) -> None:
        self._seen[near] = self._seen[far] = {}

    def before(self, host: Host, event: ev.Event) -> None:
        life = self._lives.get(host.index)
        if life is None or life.number != host.life:
            assert host.mesh is not None
            floors = {}
            for id16, floor in host.mesh.parts.floors.items():
                floors[id16, Kind.V] = Stamp(floor.v_epoch, floor.v_seq)
                floors[id16, Kind.S] = Stamp(floor.s_epoch, floor.s_seq)
            self._lives[host.index] = _Life(host.life, floors, {}, {}, self._epoch_used.get(host.index, 0))

    def after(self, host: Host, event: ev.Event) -> None:
        if host.mesh is None or isinstance(event, ev.Ticked):
            return
        self.checks += 1
        self._check_held(host)
        if isinstance(event, ev.FrameReceived):
            self._check_known(host, event.link)

    def sent(self, host: Host, link: ev.LinkId, data: bytes, *, honest: bool = True) -> None:
        """A frame goes out; ``honest`` if the machine made it."""
        if data[0] == msg.MessageType.HAVE:
            have = msg.decode(data)
            assert isinstance(have, msg.Have)
            for entry in have.states:
                for kind, seq in zip(STATE_KINDS, (entry.sseq, entry.vseq, entry.lseq), strict=True):
                    self._see(link, (Id16(entry.id16), kind), Stamp(entry.epoch, seq))
        if data[0] != msg.MessageType.RECS:
            return
        for header, signed in self._records(data, honest):
            slot = (Id16(header.id16), Kind(header.kind))
            self._see(link, slot, Stamp(header.epoch, header.seq))
            if not honest:
                continue
            owner = next(other for other in self._hosts if other.id16 == slot[0])
            if not self._ledger.is_genuine(owner.key32, signed):
                raise Violation(f"3: host {host.index} relays a record nobody signed")
            if slot[0] == host.id16:
                self._check_own(host, header, signed)

    def changed(self, host: Host, change: ViewChange) -> None:
        """A host tells its view of one origin."""
        assert host.mesh is not None
        now = self._net.timeline.now
        subjects = [other for other in self._hosts if other.id16 == change.origin]
        if change.state is Liveness.GONE and host.mesh.parts.degree == 0 and now - host.started_at > 0:
            since = self._unlinked_ms(host)
            if since >= host.mesh.parts.policy.lonely_after_ms + 500:
                raise Violation(f"lonely: host {host.index} lets {subjects[0].index} go without any link")
        if change.state in ROUTED:
            self._check_routed(host, subjects, change)
        if change.state in BAD and len(subjects) == 1:
            self._check_demotion(host, subjects[0], change)

    # --- rules ---

    def _check_held(self, host: Host) -> None:
        assert host.mesh is not None
        life = self._lives[host.index]
        for id16, origin in host.mesh.parts.origins.items():
            for kind in STATE_KINDS:
                held = origin.held(kind)
                slot = (id16, kind)
                if held is None or life.held.get(slot) is held:
                    continue
                life.held[slot] = held
                if not self._ledger.is_genuine(origin.key32, held.sealed.signed):
                    raise Violation(
                        f"2: host {host.index} stores a record that {origin.member.name} never signed"
                    )
                newest = life.newest.get(slot, ZERO)
                named = kind is Kind.S and origin.static is not None and origin.held(Kind.V) is not None
                if held.stamp <= newest and not named:
                    raise Violation(
                        f"1: {slot[1].name} of {origin.member.name} at {host.index} falls to {held.stamp}"
                    )
                if held.stamp <= life.floors.get(slot, ZERO) and not named:
                    raise Violation(
                        f"1: {slot[1].name} of {origin.member.name} at {host.index} is below the floor"
                    )
                life.newest[slot] = max(newest, held.stamp)

    def _check_known(self, host: Host, link_id: ev.LinkId) -> None:
        assert host.mesh is not None
        link = host.mesh.parts.links.get(link_id)
        if link is None:
            return
        seen = self._seen[link_id]
        for slot, stamp in link.known.items():
            if stamp > seen.get(slot, ZERO):
                raise Violation(
                    f"5: host {host.index} believes {slot[1].name} {stamp} to be known, it is not"
                )
        if len(link.dirty) > 3 * len(self._hosts):
            raise Violation(f"6: {len(link.dirty)} dirty slots on one link")

    def _check_own(self, host: Host, header: Header, signed: bytes) -> None:
        life = self._lives[host.index]
        self._epoch_used[host.index] = max(header.epoch, self._epoch_used.get(host.index, 0))
        identity = (header.id16, header.epoch, header.inst, header.seq)
        first = self._identities.setdefault(identity, signed)
        if first != signed:
            raise Violation(f"7: host {host.index} sealed two records as {header.epoch}.{header.seq}")
        self._sealed_at.setdefault(identity, self._ledger.sealed_at(signed))
        on_disk = host.saved_epoch
        if (
            host.disk_ok
            and host.mesh is not None
            and not host.mesh.parts.publisher.degraded
            and on_disk < header.epoch
        ):
            raise Violation(f"4: host {host.index} speaks in epoch {header.epoch}, its disk knows {on_disk}")
        if self.disk_is_true.get(host.index, True) and header.epoch <= life.past_epoch:
            raise Violation(f"4: host {host.index} speaks again in epoch {header.epoch}")

    def _check_routed(self, host: Host, subjects: list[Host], change: ViewChange) -> None:
        now = self._net.timeline.now
        dead = [other.stopped_at for other in subjects if not other.is_running]
        awake = now - host.stall_ended_at > LINK_PROVEN_MS
        if (
            awake
            and len(dead) == len(subjects)
            and all(at is not None and now - at > DEAD_SHOWN_MS for at in dead)
        ):
            raise Violation(f"dead: host {host.index} shows {subjects[0].index} as {change.state.value}")
        sealed_at = self._sealed_at.get((change.origin, change.epoch, change.inst, change.seq))
        disturbed = min(now - host.stall_ended_at, self._net.calm_for_ms(host.index, subjects[0].index))
        if (
            sealed_at is None
            or now - host.started_at < 10_000
            or len(subjects) > 1
            or disturbed < LINK_PROVEN_MS
        ):
            return
        true_age = now - sealed_at
        age = host.now - change.mono_ms - change.base_ms
        path = self._net.latency_ms(subjects[0].index, host.index)
        if not true_age - path - AGE_SLACK_MS <= age <= true_age + AGE_SLACK_MS:
            raise Violation(f"11: host {host.index} thinks a record of {true_age} ms to be {age} ms old")

    def _check_demotion(self, host: Host, subject: Host, change: ViewChange) -> None:
        now = self._net.timeline.now
        calm = self._net.calm_for_ms(host.index, subject.index)
        subject_calm = subject.is_running and now - subject.disturbed_at > SETTLE_MS and not subject.leaving
        if frozenset((host.index, subject.index)) in self.estranged:
            return
        if not subject_calm or calm < SETTLE_MS or subject.is_stalled:
            return
        if now - host.stall_ended_at < LINK_PROVEN_MS and self._others_calm(host):
            raise Violation(f"9: a stall of host {host.index} makes {subject.index} {change.state.value}")
        link_up_ms = self._link_up_ms(host, subject)
        if now - host.disturbed_at > SETTLE_MS and link_up_ms is not None and link_up_ms >= LINK_PROVEN_MS:
            raise Violation(f"8: host {subject.index} lives and is {change.state.value} at {host.index}")

    def _others_calm(self, host: Host) -> bool:
        """Nothing but ``host`` itself was disturbed lately."""
        now = self._net.timeline.now
        return all(
            other is host
            or (other.is_running and not other.is_stalled and now - other.disturbed_at > SETTLE_MS)
            for other in self._hosts
        )

    # --- looking ---

    def _link_up_ms(self, host: Host, subject: Host) -> int | None:
        assert host.mesh is not None
        spans = [
            host.now - link.up_at
            for link in host.mesh.parts.links.values()
            if link.peer == subject.id16 and link.up_at is not None
        ]
        return max(spans, default=None)

    def _unlinked_ms(self, host: Host) -> int:
        assert host.mesh is not None
        return host.mesh.parts.solitude.unlinked_ms(host.now)

    def _see(self, link: ev.LinkId, slot: Slot, stamp: Stamp) -> None:
        seen = self._seen.get(link)
        if seen is not None and stamp > seen.get(slot, ZERO):
            seen[slot] = stamp

    def _records(self, data: bytes, honest: bool) -> list[tuple[Header, bytes]]:
        if self._last[0] is not data:
            recs = msg.decode(data)
            assert isinstance(recs, msg.Recs)
            records = []
            for item in recs.items:
                header = read_header(item.signed, self._mesh8())
                records.append((header, item.signed))
                if honest:
                    self.newest[Id16(header.id16), Kind(header.kind)] = item
            self._last = (data, records)
        return self._last[1]

    def _mesh8(self) -> bytes:
        return next(host.mesh.parts.receiver.mesh8 for host in self._hosts if host.mesh is not None)

    # --- after faults stop ---

    def settled(self) -> None:
        """Connected running hosts agree on one another; raises ``Violation`` if they do not."""
        running = [host for host in self._hosts if host.is_running]
        for host in running:
            assert host.mesh is not None
            for other in running:
                apart = frozenset((host.index, other.index)) in self.estranged
                if other.id16 != host.id16 and not apart:
                    self._check_agreement(host, other)

    def _check_agreement(self, host: Host, other: Host) -> None:
        assert other.mesh is not None
        change = host.view.get(other.id16)
        if change is None or change.state is not Liveness.FRESH:
            state = change.state.value if change is not None else None
            raise Violation(f"13: host {host.index} sees {other.index} as {state}")
        publisher = other.mesh.parts.publisher
        own = publisher.held(Kind.V)
        if own is None or change.epoch != publisher.epoch or own.stamp.seq - change.seq > 3:
            raise Violation(f"13: host {host.index} lags behind {other.index}")
        if change.static is None:
            raise Violation(f"13: host {host.index} lacks S of {other.index}")
        up = [link for link in _links(host, other) if link]
        if len(up) != 1:
            raise Violation(f"12: {len(up)} links from {host.index} to {other.index}")


def _links(host: Host, other: Host) -> list[bool]:
    assert host.mesh is not None
    return [link.is_up for link in host.mesh.parts.links.values() if link.peer == other.id16]
