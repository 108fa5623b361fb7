"""One simulated host: a boot clock that drifts, a disk, and at most one running mesh machine.

The host is the driver the machine expects: it delivers events in order, performs actions, wakes the machine at its deadline.
While stalled it queues; while its process is down it drops.
"""

from collections.abc import Callable
from random import Random
from typing import Protocol

from router_core.ids import Id16, MeshId
from router_core.mesh.machine import Mesh
from router_core.mesh.protocol import actions as act
from router_core.mesh.protocol import events as ev
from router_core.mesh.records.publisher import Me
from router_core.mesh.records.saved import read_saved
from router_core.policy.mesh import MeshPolicy
from router_core.record.membership import Member, ViewChange
from router_core.record.state import Address, HostLoad, Static, Volatile
from router_core.sim.mesh.crypto import FakeCrypto
from router_core.sim.mesh.net import Pipe
from router_core.sim.timeline import Timeline

MakeMesh = Callable[..., Mesh]
DISK_MS = 3
BODY_EVERY_MS = 2_000


class Surroundings(Protocol):
    """What a host asks of the world around it."""

    timeline: Timeline

    def dial(self, host: "Host", peer: Id16) -> None: ...

    def end_closed(self, host: "Host", link: ev.LinkId) -> None: ...

    def before_step(self, host: "Host", event: ev.Event) -> None: ...

    def after_step(self, host: "Host", event: ev.Event, actions: list[act.Action]) -> None: ...


class Host:
    def __init__(
        self,
        world: Surroundings,
        index: int,
        member: Member,
        key32: bytes,
        crypto: FakeCrypto,
        seed: int,
        make_mesh: MakeMesh,
    ) -> None:
        rng = Random(seed)
        self.index = index
        self.member = member
        self.id16 = member.id16
        self.key32 = key32
        self.disk: dict[ev.SavedKey, bytes] = {}
        self.disk_ok = True
        self.mesh: Mesh | None = None
        self.life = 0
        self.ends: dict[ev.LinkId, Pipe] = {}
        self.view: dict[Id16, ViewChange] = {}
        self.alarms: list[act.Notify] = []
        self.started_at = 0
        self.stopped_at: int | None = None
        self.disturbed_at = 0
        self.stall_ended_at = -(10**9)
        self.leaving = False
        self._world = world
        self._crypto = crypto
        self._make_mesh = make_mesh
        self._rng = rng
        self._offset_ms = rng.randint(10_000, 10**9)
        self._ppm = rng.randint(-200, 200)
        self._stalled_until: int | None = None
        self._inbox: list[ev.Event] = []
        self._paused: dict[ev.LinkId, list[ev.Event]] = {}
        self._wake_at: int | None = None

    # --- clock ---

    @property
    def now(self) -> int:
        """The boot clock."""
        return self._boot_at(self._world.timeline.now)

    def _boot_at(self, t: int) -> int:
        return self._offset_ms + t + t * self._ppm // 1_000_000

    def _true_at(self, boot_ms: int) -> int:
        t = boot_ms - self._offset_ms
        t -= t * self._ppm // 1_000_000 + 1
        while self._boot_at(t) < boot_ms:
            t += 1
        return t

    # --- process ---

    @property
    def saved_epoch(self) -> int:
        """The epoch on disk, 0 if none."""
        saved, _ = read_saved(self.disk, MeshId(bytes(16)), ())
        return saved.epoch

    @property
    def is_running(self) -> bool:
        return self.mesh is not None

    @property
    def is_stalled(self) -> bool:
        return self._stalled_until is not None

    def start(self, members: tuple[Member, ...], mesh_id: MeshId, policy: MeshPolicy) -> None:
        saved, _ = read_saved(self.disk, mesh_id, members)
        self.life += 1
        self.view.clear()
        self.started_at = self.disturbed_at = self._world.timeline.now
        self.stopped_at = None
        self.leaving = False
        rng = Random(self._rng.getrandbits(64))
        me = Me(id16=self.id16, key32=self.key32)
        self.mesh = self._make_mesh(me, policy, self._crypto, rng, saved, self.now)
        port = 20_000 + self.index
        addrs = (Address(ip=bytes([10, 0, 0, self.index]), mesh_port=port, ingress_port=port + 1),)
        self._static = Static(addrs=addrs)
        self._change_body(self.life)

    def _change_body(self, life: int) -> None:
        if life != self.life or not self.is_running or self.leaving:
            return
        load = HostLoad(ram_available_mib=self._rng.randint(1_000, 60_000))
        self.deliver(
            ev.BodyChanged(volatile=Volatile(host=load), static=self._static, urgent=self._rng.random() < 0.1)
        )
        self._world.timeline.after(BODY_EVERY_MS, lambda: self._change_body(life))

    def stop(self) -> None:
        """The process ends now. What the kernel tells others is the world's part."""
        self.mesh = None
        self.stopped_at = self.disturbed_at = self._world.timeline.now
        self._inbox.clear()
        self._paused.clear()
        self._stalled_until = self._wake_at = None

    def stall(self, duration_ms: int) -> None:
        """A running process stands still for a while; everything queues."""
        if not self.is_running:
            return
        until = self._world.timeline.now + duration_ms
        self._stalled_until = max(until, self._stalled_until or 0)
        self._world.timeline.at(until, self._wake_up)

    def _wake_up(self) -> None:
        if self._stalled_until is None or self._world.timeline.now < self._stalled_until:
            return
        self._stalled_until = None
        self.stall_ended_at = self._world.timeline.now
        inbox, self._inbox = self._inbox, []
        for event in inbox:
            self.deliver(event)
        self._tick(self.life)

    # --- events ---

    def deliver(self, event: ev.Event) -> None:
        """Hand an event to the machine, later if we are stalled, never if nothing runs."""
        if self.mesh is None:
            return
        if self._stalled_until is not None:
            self._inbox.append(event)
        elif isinstance(event, ev.FrameReceived | ev.LinkClosed) and event.link in self._paused:
            self._paused[event.link].append(event)
        else:
            self._step(event)

    def _step(self, event: ev.Event) -> None:
        assert self.mesh is not None
        self._world.before_step(self, event)
        actions = self.mesh.handle(event, self.now)
        for action in actions:
            self._perform(action)
        self._world.after_step(self, event, actions)
        if self.mesh is not None:
            life = self.life
            if self.mesh.backlog:
                self._world.timeline.after(1, lambda: self._resume(life))
            self._plan_wake()

    def _resume(self, life: int) -> None:
        if life == self.life and self.mesh is not None and self.mesh.backlog:
            self.deliver(ev.Resumed())

    def _plan_wake(self) -> None:
        assert self.mesh is not None
        wake_at = max(self._world.timeline.now + 1, self._true_at(self.mesh.deadline))
        if self._wake_at is None or wake_at < self._wake_at:
            self._wake_at = wake_at
            life = self.life
            self._world.timeline.at(wake_at, lambda: self._tick(life))

    def _tick(self, life: int) -> None:
        if life != self.life or self.mesh is None or self._stalled_until is not None:
            return
        self._wake_at = None
        if self.now >= self.mesh.deadline:
            self.deliver(ev.Ticked())
        else:
            self._plan_wake()

    # --- actions ---

    def _perform(self, action: act.Action) -> None:
        if isinstance(action, act.SendFrame):
            if (pipe := self.ends.get(action.link)) is not None:
                pipe.write(action.data)
        elif isinstance(action, act.ViewChanged):
            self.view.update((change.origin, change) for change in action.changes)
        elif isinstance(action, act.CloseLink):
            self._paused.pop(action.link, None)
            self._world.end_closed(self, action.link)
        elif isinstance(action, act.Dial):
            self._world.dial(self, action.peer)
        elif isinstance(action, act.Persist):
            life = self.life
            self._world.timeline.after(DISK_MS, lambda: self._persist(action, life))
        elif isinstance(action, act.PauseReading):
            self._paused.setdefault(action.link, [])
        elif isinstance(action, act.ResumeReading):
            for event in self._paused.pop(action.link, ()):
                self.deliver(event)
        else:
            self.alarms.append(action)

    def _persist(self, action: act.Persist, life: int) -> None:
        if life != self.life or not self.is_running:
            return
        if self.disk_ok:
            self.disk[action.key] = action.data
        self.deliver(ev.PersistDone(action.key, self.disk_ok))
