"""The mesh machine: events in, actions out, one owner, no clock of its own.

``handle`` is a pure step over the machine's parts; ``deadline`` is when the driver sends ``Ticked`` at the latest.
The own body is folded into the view by the shell itself; the machine tells of other members only. Endorsements and
removals do not travel: the roster comes whole, from files, by ``RosterChanged``.
"""

from random import Random

from router_core import limits
from router_core.errors import LocalMisuse
from router_core.ids import MeshId
from router_core.mesh.parts import Crypto, Parts
from router_core.mesh.protocol import events as ev
from router_core.mesh.protocol.actions import Action, Alarm, Dial
from router_core.mesh.protocol.messages import ByeCode, Heard, Recs
from router_core.mesh.records.flush import flush
from router_core.mesh.records.publisher import Me
from router_core.mesh.records.saved import Saved
from router_core.mesh.status import MeshStatus, picture
from router_core.mesh.steps import intake, link_life, upkeep
from router_core.mesh.steps.roster import roster_changed
from router_core.policy.mesh import MeshPolicy
from router_core.record.envelope import Sealed
from router_core.record.state import Kind, LeaveReason


class Mesh:
    """One node's side of the mesh. The first event, whatever it is, starts it.

    ``parts`` are for the simulator's eyes.
    """

    def __init__(
        self, me: Me, policy: MeshPolicy, crypto: Crypto, rng: Random, saved: Saved, now: int
    ) -> None:
        self.parts = Parts(me, policy, crypto, rng, saved, now)
        self._policy = policy
        self._saved = saved
        self._started = False
        self._dial_soon = True
        self._deadline = now
        self._files: upkeep.Files | None = None

    # --- the face ---

    @property
    def deadline(self) -> int:
        """When ``Ticked`` is due, boot milliseconds; at most 100 ms after the last one while anything may change
        soon, 500 ms in a calm mesh."""
        return self._deadline

    @property
    def backlog(self) -> bool:
        """True if records wait: yield to the loop once, then send ``Resumed``."""
        return bool(self.parts.waiting)

    @property
    def mesh_id(self) -> MeshId:
        return self.parts.mesh_id

    def picture(self, now: int) -> MeshStatus:
        """A copy of what is known, for status pages and tests."""
        return picture(self.parts, now)

    def handle(self, event: ev.Event, now: int) -> list[Action]:
        """One step. Raises ``LocalMisuse`` only for what our own shell did wrong."""
        parts = self.parts
        if not self._started:
            self._start(now)
        slept_ms = parts.gap.observe(now)
        if slept_ms:
            self._slept(slept_ms)
        parts.verifications_left = limits.VERIFICATIONS_PER_STEP
        self._dispatch(event, now)
        self._settle(now)
        out, parts.out = parts.out, []
        return out

    def fresh_state(self, now: int) -> tuple[Sealed | None, list[Action]]:
        """The newest own V, sealed now if the event bucket allows it; None before the first one."""
        parts = self.parts
        held = parts.publisher.fresh(parts.solitude.lonely, parts.losses.current(now), now)
        if held is not None:
            parts.broadcast([held], now)
        newest = parts.publisher.held(Kind.V)
        out, parts.out = parts.out, []
        return (newest.sealed if newest is not None else None), out

    # --- steps ---

    def _start(self, now: int) -> None:
        self._started = True
        parts = self.parts
        roster_changed(parts, self._saved.members, self._saved.mesh_id, now, starting=True)
        parts.out.append(parts.publisher.begin_epoch(self._saved.epoch))
        if parts.publisher.exhausted:
            parts.notify(Alarm.EPOCH_EXHAUSTED, peer=parts.me.id16.hex(), epoch=parts.publisher.epoch)
        self._files = upkeep.Files(parts, now)

    def _slept(self, slept_ms: int) -> None:
        parts = self.parts
        for link in parts.links.values():
            link.forgive(slept_ms)
        for origin in parts.origins.values():
            origin.credit_ms += slept_ms

    def _dispatch(self, event: ev.Event, now: int) -> None:
        parts = self.parts
        if not isinstance(event, ev.Ticked | ev.FrameReceived | ev.BodyChanged):
            parts.gap.hasten(now)
        if isinstance(event, ev.FrameReceived):
            if (link := parts.links.get(event.link)) is not None:
                was_up = link.is_up
                intake.frame(parts, link, event.data, now)
                self._dial_soon = self._dial_soon or event.link not in parts.links
                if not was_up or self._dial_soon or link.paused or not parts.hearsay.is_silent:
                    parts.gap.hasten(now)
        elif isinstance(event, ev.Ticked):
            self._tick(now)
        elif isinstance(event, ev.BodyChanged):
            self._body_changed(event)
        elif isinstance(event, ev.Resumed):
            intake.resume(parts, now)
        elif isinstance(event, ev.LinkReady | ev.LinkBusy):
            self._link_writable(event, now)
        elif isinstance(event, ev.LinkFlooded):
            if (link := parts.links.get(event.link)) is not None:
                intake.flooded(parts, link, now)
                self._dial_soon = True
        elif isinstance(event, ev.RecordHeard):
            intake.heard_elsewhere(parts, event.signed, event.sig, now)
        elif isinstance(event, ev.LeaveRequested):
            self._leave(event.reason, now)
        else:
            self._dial_soon = True
            self._dispatch_peer(event, now)

    def _dispatch_peer(
        self,
        event: ev.LinkOpened
        | ev.LinkClosed
        | ev.DialFailed
        | ev.PeerSighted
        | ev.PersistDone
        | ev.RosterChanged,
        now: int,
    ) -> None:
        parts = self.parts
        if isinstance(event, ev.LinkOpened):
            link_life.opened(parts, event, now)
        elif isinstance(event, ev.LinkClosed):
            link_life.closed(parts, event, now)
        elif isinstance(event, ev.DialFailed):
            self._dial_failed(event, now)
        elif isinstance(event, ev.PeerSighted):
            parts.dialler.sighted(event.peer, now)
        elif isinstance(event, ev.RosterChanged):
            roster_changed(parts, event.members, event.mesh_id, now, starting=False)
        elif event.key is ev.SavedKey.EPOCH:
            parts.publisher.persisted(event.ok, now)
            if not event.ok:
                parts.notify(Alarm.EPOCH_NOT_PERSISTED, epoch=parts.publisher.epoch)
            for link in list(parts.links.values()):
                link_life.greet(parts, link, now)

    def _tick(self, now: int) -> None:
        parts = self.parts
        upkeep.tend_links(parts, now)
        upkeep.judge_all(parts, now)
        upkeep.feel_alone(parts, now)
        for link in parts.links.values():
            intake.unpause(parts, link, now)
        parts.publisher.retune(1 + parts.others_alive, now)
        if (persist := parts.publisher.retry_persist(now)) is not None:
            parts.out.append(persist)
        if self._files is not None:
            parts.out.extend(self._files.save(now))
        parts.gap.ticked(now, upkeep.look_at(parts, now))
        self._dial_soon = True

    def _body_changed(self, event: ev.BodyChanged) -> None:
        try:
            self.parts.publisher.set_bodies(event.volatile, event.static, event.urgent, event.due_ms)
        except LocalMisuse:
            self.parts.notify(Alarm.UNSENDABLE)

    def _link_writable(self, event: ev.LinkReady | ev.LinkBusy, now: int) -> None:
        link = self.parts.links.get(event.link)
        if link is None:
            return
        if isinstance(event, ev.LinkBusy):
            link.busy_since = link.busy_since if link.busy_since is not None else now
        else:
            link.busy_since = None
            if link.dirty:
                link.flush_at = now

    def _dial_failed(self, event: ev.DialFailed, now: int) -> None:
        parts = self.parts
        parts.dialler.failed(event.peer, now)
        origin = parts.origins.get(event.peer)
        if origin is not None and event.why is ev.DialFailure.REFUSED and origin.broken_at is not None:
            origin.refused = True
            upkeep.refresh(parts, origin, now)

    def _leave(self, reason: LeaveReason, now: int) -> None:
        parts = self.parts
        if parts.publisher.left:
            return
        left = parts.publisher.leave(reason, now)
        for link in list(parts.links.values()):
            if left is not None and link.is_up:
                parts.send(link, Recs((Heard(0, left.sealed.signed, left.sealed.sig),)), now)
            parts.close(link, ByeCode.GOING_DOWN, now)
        if self._files is not None:
            parts.out.extend(self._files.save(now, last=True))

    # --- what every step may make due ---

    def _settle(self, now: int) -> None:
        parts = self.parts
        if parts.publisher.needs_epoch and parts.publisher.is_persisted:
            parts.out.append(parts.publisher.begin_epoch(parts.publisher.epoch))
        self._publish(now)
        flushes: list[int | None] = []
        for link in parts.links.values():
            if link.flush_at is not None and link.flush_at <= now:
                parts.out.extend(flush(link, parts, self._policy, parts.rng, now))
            flushes.append(link.flush_at)
        parts.tell_view(now)
        if self._dial_soon:
            self._dial(now)
        dues = (parts.gap.next_tick_at, parts.view_at, parts.publisher.due_at(now), *flushes)
        self._deadline = min(due for due in dues if due is not None)

    def _publish(self, now: int) -> None:
        parts = self.parts
        due = parts.publisher.due_at(now)
        if due is not None and due <= now:
            records = parts.publisher.publish(parts.solitude.lonely, parts.losses.current(now), now)
            parts.broadcast(records, now)

    def _dial(self, now: int) -> None:
        self._dial_soon = False
        parts = self.parts
        if parts.publisher.left or not parts.publisher.is_persisted:
            return
        linked = {link.peer: None for link in parts.links.values()}
        states = {id16: origin.state for id16, origin in parts.origins.items()}
        for peer in parts.dialler.choose(now, linked, states):
            told, known = parts.origins[peer].addresses, parts.addresses.get(peer, ())
            parts.out.append(Dial(peer, tuple(dict.fromkeys((*told, *known)))))
        if parts.dialler.look_at is not None:
            parts.gap.hasten(now, parts.dialler.look_at)
