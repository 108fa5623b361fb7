"""The driver of the mesh machine: events in, actions out, one task.

Rules kept here: the machine is touched by this task alone (``fresh_state`` runs between two of its steps, on the
same loop); actions are performed in order and none of them waits; what IO answers comes back as an event; after a
step of many verifications the loop gets its turn first. What the records mean is not known here.
"""

import asyncio
import ssl
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from typing import Final, Protocol

from aiohttp import web

from agent.effects.clock import Clock
from agent.effects.sqlite_file import cause_of
from agent.effects.tasks import Failed, Tasks
from agent.mesh.addresses import AddressBook, PeerAddress, Unfit
from agent.mesh.dialling import DialOutcome
from agent.mesh.inbox import Inbox
from agent.mesh.interfaces import IpAddress
from agent.mesh.link import LinkConnection
from agent.mesh.links import DIAL_S, Links
from agent.mesh.traffic import Traffic, TrafficCounts
from router_core.ids import Id16, MeshId, NodeId, id16_of, id32_of
from router_core.mesh.protocol.actions import (
    Action,
    CloseLink,
    Dial,
    Notify,
    PauseReading,
    Persist,
    ResumeReading,
    SendFrame,
    ViewChanged,
)
from router_core.mesh.protocol.events import (
    BodyChanged,
    DialFailed,
    DialFailure,
    Event,
    FrameReceived,
    LeaveRequested,
    LinkBusy,
    LinkClosed,
    LinkFlooded,
    LinkOpened,
    LinkReady,
    PeerSighted,
    PersistDone,
    RecordHeard,
    Resumed,
    RosterChanged,
    SavedKey,
    Ticked,
)
from router_core.mesh.status import MeshStatus
from router_core.record.envelope import Sealed
from router_core.record.membership import Member, ViewChange
from router_core.record.state import Address, LeaveReason, Static, Volatile

LEAVE_S: Final = 0.5
LOWEST_PORT: Final = 1_024

_FAILURES: Final = {
    DialOutcome.NO_ADDRESS: DialFailure.NO_ADDRESS,
    DialOutcome.REFUSED: DialFailure.REFUSED,
    DialOutcome.TIMED_OUT: DialFailure.TIMEOUT,
    DialOutcome.IDENTITY_MISMATCH: DialFailure.UNTRUSTED,
    DialOutcome.TLS_FAILED: DialFailure.UNTRUSTED,
    DialOutcome.REJECTED: DialFailure.UNTRUSTED,
}
"""All other outcomes read as ``UNREACHABLE``: a connection that died early was refused or crashed, who knows."""


class Machine(Protocol):
    """The face of ``router_core.mesh.machine.Mesh``."""

    @property
    def deadline(self) -> int | None: ...

    @property
    def backlog(self) -> bool: ...

    def handle(self, event: Event, now: int) -> list[Action]: ...

    def fresh_state(self, now: int) -> tuple[Sealed | None, list[Action]]: ...

    def picture(self, now: int) -> MeshStatus: ...


class Persistence(Protocol):
    """Where the machine's memory is kept; called in a thread."""

    def save(self, key: SavedKey, data: bytes, members: Mapping[Id16, Member]) -> None:
        """Write atomically; raises ``OSError``. ``members`` gives ids their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverListeners:
    """Callbacks of the driver, called on its own task; none of them may wait."""

    on_view: Callable[[Sequence[ViewChange]], None]
    notify: Callable[[str, dict[str, str | int]], None]
    failed: Failed
    on_link: Callable[[Id16, bool], None] = lambda _peer, _opened: None
    """A connection for a link to the member was made (True) or ended."""


class Driver:
    """Owns one machine and its links. ``run`` is its task; all other methods are called on the same loop.

    ``roster_changed`` must be called once before anything can be dialled. ``dial_s`` is the time of one dial.
    """

    def __init__(
        self,
        machine: Machine,
        *,
        clock: Clock,
        tls: Callable[[], ssl.SSLContext],
        source: IpAddress | None,
        book: AddressBook,
        shelf: Persistence,
        told: DriverListeners,
        dial_s: float = DIAL_S,
    ) -> None:
        self._machine = machine
        self._clock = clock
        self._book = book
        self._shelf = shelf
        self._told = told
        self._members: dict[Id16, Member] = {}
        self._traffic = Traffic()
        self._inbox = Inbox()
        self._left = asyncio.Event()
        self.stepped_ms = clock.boot_ms()
        """When the machine last took a step; before the first, when the driver was made."""
        self.dial_faults: dict[Id16, str] = {}
        """In a word, how the last dial of a member ended, as long as no link to it was opened since."""
        self.left_out: dict[Id16, tuple[tuple[PeerAddress, Unfit], ...]] = {}
        """The addresses of a member that its last dial left out, with the reason."""
        self.unstored: dict[str, str] = {}
        """What could not be stored the last time, and why."""
        self.begun = asyncio.Event()
        """Set after the machine's first step: from then on it speaks with this process life's epoch."""
        self._tasks = Tasks(told.failed)
        self._links = Links(
            self, tls=tls, source=source, traffic=self._traffic, tasks=self._tasks, dial_s=dial_s
        )
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mesh-store")

    # --- the loop -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Drive until cancelled; then every link is cut and what was to be saved is on disk."""
        try:
            while True:
                now = self._clock.boot_ms()
                event = self._next(now)
                if event is not None:
                    self._perform(self._machine.handle(event, now))
                    self.stepped_ms = now
                    self.begun.set()
                    self._finish(event)
                await self._rest()
        finally:
            self._links.abort()
            await self._tasks.aclose()
            await asyncio.to_thread(self._writer.shutdown)

    async def _rest(self) -> None:
        """The loop gets one turn if more is to be done at once, else until something comes or is due."""
        deadline = self._machine.deadline
        left_ms = None if deadline is None else deadline - self._clock.boot_ms()
        if self._machine.backlog or (left_ms is not None and left_ms <= 0):
            await asyncio.sleep(0)
        else:
            await self._inbox.wait(None if left_ms is None else left_ms / 1_000)

    def _next(self, now: int) -> Event | None:
        """Time first, that a busy inbox never looks like a stall; then work left over; then what came in."""
        deadline = self._machine.deadline
        if deadline is not None and deadline <= now:
            return Ticked()
        return Resumed() if self._machine.backlog else self._inbox.take()

    def _finish(self, event: Event) -> None:
        match event:
            case FrameReceived():
                if link := self._links.get(event.link):
                    link.read_on()
            case LeaveRequested():
                self._left.set()

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case SendFrame():
                    link = self._links.get(action.link)
                    if link is not None and not link.send(action.data):
                        self._inbox.put(LinkBusy(action.link))
                case CloseLink():
                    if link := self._links.get(action.link):
                        link.close()
                case PauseReading():
                    if link := self._links.get(action.link):
                        link.pause()
                case ResumeReading():
                    if link := self._links.get(action.link):
                        link.resume()
                case Dial():
                    self._dial(action)
                case Persist():
                    self._persist(action)
                case ViewChanged():
                    self._told.on_view(action.changes)
                case Notify():
                    self._told.notify(action.code.value, dict(action.fields))

    def _dial(self, action: Dial) -> None:
        member = self._members.get(action.peer)
        endpoints = self._book.choose(member, action.addrs) if member is not None else ()
        if member is not None:
            self.left_out[action.peer] = self._book.unfit_for_links(member, action.addrs)
        if member is None or not endpoints:
            self.dial_failed(action.peer, DialOutcome.NO_ADDRESS)
            return
        self._links.dial(member, endpoints)

    def _persist(self, action: Persist) -> None:
        """One writer thread, so answers come in the order of the requests."""
        save = partial(self._shelf.save, action.key, action.data, self._members)
        writing = asyncio.get_running_loop().run_in_executor(self._writer, save)
        writing.add_done_callback(partial(self._persisted, action.key))

    def _persisted(self, key: SavedKey, writing: asyncio.Future[None]) -> None:
        exc = None if writing.cancelled() else writing.exception()
        self.unstored.pop(key.value, None)
        if isinstance(exc, OSError):
            self.unstored[key.value] = cause_of(exc)
            self._told.notify("not_stored", {"file": key.value, "cause": cause_of(exc)})
        elif exc is not None:
            self._told.failed(f"persist {key.value}", exc)
        self._inbox.put(PersistDone(key, exc is None))

    # --- what links tell -------------------------------------------------------------------------------------

    def opened(self, link: LinkConnection) -> None:
        addr = None if link.dialled is None else _address(link.dialled)
        dialled = link.dialled is not None
        self.dial_faults.pop(link.peer, None)
        self._inbox.put(LinkOpened(link=link.number, peer=link.peer, dialled=dialled, addr=addr))
        self._told.on_link(link.peer, True)

    def closed(self, link: LinkConnection) -> None:
        self._inbox.put(LinkClosed(link.number))
        self._told.on_link(link.peer, False)

    def heard(self, link: LinkConnection, data: bytes) -> None:
        self._inbox.put(FrameReceived(link.number, data))

    def drained(self, link: LinkConnection) -> None:
        self._inbox.put(LinkReady(link.number))

    def flooded(self, link: LinkConnection) -> None:
        self._inbox.put(LinkFlooded(link.number))

    def dialled(self, peer: Id16, endpoint: PeerAddress, outcome: DialOutcome) -> None:
        if outcome is DialOutcome.LINKED:
            self._book.worked(peer, endpoint)
        else:
            self._book.failed(peer, endpoint)
        if outcome is DialOutcome.IDENTITY_MISMATCH:
            self._told.notify("dial_identity_mismatch", {"peer": peer.hex(), "address": str(endpoint)})

    def dial_failed(self, peer: Id16, outcome: DialOutcome) -> None:
        if peer in self._members:
            self.dial_faults[peer] = outcome.value
        self._inbox.put(DialFailed(peer, _FAILURES.get(outcome, DialFailure.UNREACHABLE)))

    # --- what the daemon calls -------------------------------------------------------------------------------

    async def serve(self, request: web.BaseRequest, member: Member) -> web.StreamResponse:
        """Answer an admitted request for the link path."""
        return await self._links.serve(request, member.id16)

    def body_changed(
        self, volatile: Volatile, static: Static, *, urgent: bool = False, due_ms: int | None = None
    ) -> None:
        """The newest own bodies; of several pairs between two steps the last one is published."""
        self._inbox.replace(BodyChanged(volatile=volatile, static=static, urgent=urgent, due_ms=due_ms))

    def roster_changed(self, members: Mapping[Id16, Member], mesh_id: MeshId) -> None:
        """Everybody who may speak now, this node aside. Links of others are ended by the machine."""
        self._members = dict(members)
        self.dial_faults = {peer: why for peer, why in self.dial_faults.items() if peer in members}
        self.left_out = {peer: left for peer, left in self.left_out.items() if peer in members}
        self._book.admit_members(self._members)
        self._inbox.replace(RosterChanged(members=tuple(self._members.values()), mesh_id=mesh_id))

    def record_heard(self, signed: bytes, sig: bytes) -> None:
        """A sealed record that came in a refusal; dropped and counted if 64 of them wait already."""
        if not self._inbox.hear(RecordHeard(signed, sig)):
            self._traffic.refused["heard_full"] += 1

    def sighted(self, node_id: NodeId, endpoints: Sequence[PeerAddress]) -> None:
        """Discovery, or its own file, says where ``node_id`` is; of a member, the back-off starts over."""
        if self._book.sight(node_id, endpoints):
            self._inbox.put(PeerSighted(id16_of(id32_of(node_id))))

    def moved(self, own: Container[IpAddress]) -> None:
        """This host's addresses are ``own`` now: what hung on others is over, and everybody may be dialled anew."""
        self._links.forsake(own)
        self._book.forget_failures()
        for peer in self._members:
            self._inbox.put(PeerSighted(peer))

    def local_ips(self) -> frozenset[IpAddress]:
        """The own addresses that links run over."""
        return self._links.local_ips()

    def remote_ips(self) -> frozenset[IpAddress]:
        """The addresses of members that links run over."""
        return frozenset(ip for link in self._links if (ip := link.remote_ip) is not None)

    def ways_to(self, peer: Id16) -> tuple[tuple[IpAddress, bool], ...]:
        """The addresses that links to a member run over, and whether it was dialled there; dialled ones first."""
        found = [(link.remote_ip, link.dialled is not None) for link in self._links.to(peer)]
        known = [(ip, dialled) for ip, dialled in found if ip is not None]
        return tuple(sorted(dict.fromkeys(known), key=lambda way: not way[1]))

    def fresh_state(self) -> Sealed | None:
        """The newest own sealed V, publishing one first if the event bucket allows; None before the first."""
        sealed, actions = self._machine.fresh_state(self._clock.boot_ms())
        self._perform(actions)
        return sealed

    async def leave(self, reason: LeaveReason) -> None:
        """Publish L, say BYE on every link, and wait for them to end, at most 500 ms."""
        self._inbox.put(LeaveRequested(reason))
        try:
            async with asyncio.timeout(LEAVE_S):
                await self._left.wait()
                await self._links.gone()
        except TimeoutError:
            self._links.abort()

    def picture(self) -> MeshStatus:
        """What the machine knows, for status and metrics: members, links and counts of records by reason."""
        return self._machine.picture(self._clock.boot_ms())

    @property
    def open_links(self) -> int:
        """Sockets held for links, those that are closing included."""
        return len(self._links)

    def dialled_links(self, peer: Id16) -> int:
        """Links to ``peer`` that this node dialled."""
        return sum(link.peer == peer and link.dialled is not None for link in self._links)

    def counted(self) -> TrafficCounts:
        """Totals of traffic since start."""
        return self._traffic.snapshot()


def _address(endpoint: PeerAddress) -> Address | None:
    if endpoint.port < LOWEST_PORT:
        return None
    return Address(ip=ip_address(endpoint.ip).packed, mesh_port=endpoint.port, ingress_port=endpoint.port)
