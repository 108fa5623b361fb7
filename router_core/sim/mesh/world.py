"""A whole cluster in one thread: hosts, connections, and what can befall them. One seed, one history.

Everything random comes from the seed; every step is folded into ``trace`` (a hash), so two runs of one seed can be
compared. What must hold is checked by ``watch`` while it happens.
"""

from collections.abc import Callable
from functools import partial
from hashlib import sha256
from random import Random
from typing import Final

from router_core.ids import Id16, MeshId
from router_core.mesh.machine import Mesh
from router_core.mesh.protocol import actions as act
from router_core.mesh.protocol import events as ev
from router_core.policy.mesh import MeshPolicy
from router_core.record.state import LeaveReason
from router_core.sim.mesh.crypto import FakeCrypto, Ledger, simulated_member
from router_core.sim.mesh.host import Host, MakeMesh
from router_core.sim.mesh.net import Net, Pipe
from router_core.sim.mesh.watch import Watch
from router_core.sim.timeline import Timeline

MESH_ID: Final = MeshId(bytes(range(16)))
DIAL_TIMEOUT_MS: Final = 5_000
QUICK: Final = MeshPolicy(backoff_max_s=3, gone_min_s=20, gone_redial_s=5)


class World:
    """``hosts[i]`` run machines made by ``make_mesh``; ``clones`` adds hosts that share the identity of host 0."""

    def __init__(
        self,
        seed: int,
        nodes: int,
        *,
        policy: MeshPolicy = QUICK,
        make_mesh: MakeMesh = Mesh,
        clones: int = 0,
    ) -> None:
        self.timeline = Timeline()
        self.rng = Random(seed)
        self.policy = policy
        self.ledger = Ledger(self.timeline)
        self.net = Net(self.timeline, self.rng, nodes + clones)
        pairs = [simulated_member(index) for index in range(nodes)]
        self.members = tuple(member for member, _ in pairs)
        self.hosts: list[Host] = []
        for index in range(nodes + clones):
            member, key32 = pairs[index if index < nodes else 0]
            crypto = FakeCrypto(key32, self.ledger)
            self.hosts.append(Host(self, index, member, key32, crypto, self.rng.getrandbits(64), make_mesh))
        self.dials: list[tuple[int, int, Id16]] = []
        self.tap: Callable[[bytes], None] | None = None
        self._links = 0
        self._far: dict[ev.LinkId, tuple[Host, ev.LinkId]] = {}
        self._orphans: dict[int, list[ev.LinkId]] = {}
        self._trace = sha256()
        self.watch = Watch(self.ledger, self.net, self.hosts)

    @property
    def trace(self) -> str:
        """Hash of every event and action so far."""
        return self._trace.hexdigest()

    def run_until(self, t: int) -> None:
        self.timeline.run_until(t)

    # --- processes ---

    def start(self, index: int) -> None:
        host = self.hosts[index]
        if not host.is_running:
            self._reset_orphans(index)
            host.start(self.members, MESH_ID, self.policy)

    def start_all(self, spread_ms: int = 500) -> None:
        for host in self.hosts:
            self.timeline.at(self.rng.randint(0, spread_ms), partial(self.start, host.index))

    def kill(self, index: int) -> None:
        """SIGKILL: the kernel closes every connection."""
        host = self.hosts[index]
        host.stop()
        for link in list(host.ends):
            self.end_closed(host, link)

    def power_off(self, index: int) -> None:
        """Silence: nothing is closed, nothing answers, until ``power_on``."""
        host = self.hosts[index]
        host.stop()
        self._isolate(index)
        self._orphans.setdefault(index, []).extend(host.ends)
        for pipe in host.ends.values():
            pipe.break_off()

    def power_on(self, index: int) -> None:
        """The machine is back; its kernel resets connections it does not know."""
        self._rejoin(index)
        self.start(index)

    def suspend(self, index: int, duration_ms: int) -> None:
        """The host sleeps; its boot clock goes on."""
        self._isolate(index)
        self.hosts[index].stall(duration_ms)
        self.hosts[index].disturbed_at = self.timeline.now + duration_ms
        self.timeline.after(duration_ms, lambda: self._rejoin(index))

    def stall(self, index: int, duration_ms: int) -> None:
        self.hosts[index].stall(duration_ms)
        self.hosts[index].disturbed_at = self.timeline.now + duration_ms

    def leave(self, index: int) -> None:
        """A planned stop, with all its words; the process ends half a second later."""
        host = self.hosts[index]
        if not host.is_running:
            return
        host.leaving = True
        life = host.life
        host.deliver(ev.LeaveRequested(LeaveReason.SHUTDOWN))
        self.timeline.after(500, lambda: self.kill(index) if host.life == life and host.is_running else None)

    def _isolate(self, index: int) -> None:
        for other in range(len(self.hosts)):
            if other != index:
                self.net.cut(index, other)
                self.net.cut(other, index)

    def _rejoin(self, index: int) -> None:
        for other in range(len(self.hosts)):
            if other != index:
                self.net.heal(index, other)
                self.net.heal(other, index)

    def _reset_orphans(self, index: int) -> None:
        host = self.hosts[index]
        for link in self._orphans.pop(index, []):
            host.ends.pop(link, None)
            far = self._far.pop(link, None)
            if far is not None:
                self._end_lost(*far)

    # --- connections ---

    def dial(self, host: Host, peer: Id16) -> None:
        targets = [other for other in self.hosts if other.id16 == peer and other is not host]
        target = targets[self.rng.randrange(len(targets))]
        self.dials.append((self.timeline.now, host.index, peer))
        out, back = (
            self.net.latency_ms(host.index, target.index),
            self.net.latency_ms(target.index, host.index),
        )
        life, began = host.life, self.timeline.now
        self.timeline.after(out + back, lambda: self._handshake(host, life, target, began))

    def _handshake(self, host: Host, life: int, target: Host, began: int) -> None:
        if host.life != life or not host.is_running:
            return
        net, ends = self.net, (host.index, target.index)
        if net.is_cut(*ends) or net.is_cut(*reversed(ends)) or target.is_stalled:
            if self.timeline.now - began >= DIAL_TIMEOUT_MS:
                host.deliver(ev.DialFailed(target.id16, ev.DialFailure.TIMEOUT))
            else:
                self.timeline.after(250, lambda: self._handshake(host, life, target, began))
        elif not target.is_running:
            host.deliver(ev.DialFailed(target.id16, ev.DialFailure.REFUSED))
        else:
            delay = 2 * net.latency_ms(*ends) + 4
            self.timeline.after(delay, lambda: self._connect(host, life, target, target.life))

    def _connect(self, host: Host, life: int, target: Host, target_life: int) -> None:
        if host.life != life or not host.is_running:
            return
        if target.life != target_life or not target.is_running:
            host.deliver(ev.DialFailed(target.id16, ev.DialFailure.UNTRUSTED))
            return
        self._links += 2
        near, far = ev.LinkId(self._links), ev.LinkId(self._links + 1)
        for source, sink, link, sink_link in ((host, target, near, far), (target, host, far, near)):
            pipe = Pipe(self.net, source.index, sink.index, sink_link, self._deliver)
            pipe.on_timeout = partial(self._end_lost, source, link)
            pipe.on_busy = partial(_say_busy, source, link)
            source.ends[link] = pipe
            self._far[link] = (sink, sink_link)
        self.watch.connected(near, far)
        back = self.net.latency_ms(target.index, host.index)
        opened = ev.LinkOpened(link=near, peer=target.id16, dialled=True)
        self.timeline.after(back, lambda: host.deliver(opened) if host.life == life else None)
        target.deliver(ev.LinkOpened(link=far, peer=host.id16, dialled=False))

    def _deliver(self, link: ev.LinkId, data: bytes | None) -> None:
        for host in self.hosts:
            if link in host.ends:
                if data is None:
                    self._end_lost(host, link)
                else:
                    host.deliver(ev.FrameReceived(link, data))
                return

    def _end_lost(self, host: Host, link: ev.LinkId) -> None:
        """This end learns that its connection is over."""
        pipe = host.ends.pop(link, None)
        if pipe is not None:
            pipe.break_off()
            host.deliver(ev.LinkClosed(link))

    def end_closed(self, host: Host, link: ev.LinkId) -> None:
        """This end closes: what was written still goes, then the end mark."""
        pipe = host.ends.pop(link, None)
        if pipe is not None:
            pipe.write(None)

    def reset(self, a: int, b: int) -> None:
        """Every connection between two hosts breaks at both ends."""
        for link in list(self.hosts[a].ends):
            far = self._far[link]
            if far[0].index == b:
                self._end_lost(self.hosts[a], link)
                self._end_lost(*far)

    def inject(self, a: int, b: int, data: bytes) -> bool:
        """Host ``a`` says ``data`` to ``b`` over a link of theirs; False if there is none."""
        for link, pipe in self.hosts[a].ends.items():
            if self._far[link][0].index == b:
                self.watch.sent(self.hosts[a], link, data, honest=False)
                pipe.write(data)
                return True
        return False

    # --- steps ---

    def before_step(self, host: Host, event: ev.Event) -> None:
        self.watch.before(host, event)

    def after_step(self, host: Host, event: ev.Event, actions: list[act.Action]) -> None:
        digest = self._trace
        digest.update(b"%d %d " % (self.timeline.now, host.index))
        digest.update(type(event).__name__.encode())
        for action in actions:
            digest.update(type(action).__name__.encode())
            if isinstance(action, act.SendFrame):
                digest.update(action.data)
                if self.tap is not None:
                    self.tap(action.data)
                self.watch.sent(host, action.link, action.data)
            elif isinstance(action, act.ViewChanged):
                for change in action.changes:
                    digest.update(change.origin + change.state.value.encode())
                    self.watch.changed(host, change)
        self.watch.after(host, event)


def _say_busy(host: Host, link: ev.LinkId, busy: bool) -> None:
    host.deliver(ev.LinkBusy(link) if busy else ev.LinkReady(link))
