"""One link: its phase, its timers, and the memory of what the other end has.

``known`` is the stamp per slot that the peer holds, has refused, or has in flight from us: raised when sending and
when receiving, set exactly by the peer's HAVE. ``dirty`` are the slots newer here than there, in the order they
became so. There is no queue of records: a flush reads current ones.

Phases: (dialling, in ``overlay``) -> GREETING -> SYNCING -> UP -> forgotten. A link knows no other link.
"""

from collections import deque
from enum import Enum
from typing import Final

from router_core import limits
from router_core.ids import Id16
from router_core.mesh.links.bucket import Bucket
from router_core.mesh.protocol.events import LinkId
from router_core.mesh.protocol.messages import HaveState, Heard, Hello
from router_core.policy.mesh import MeshPolicy
from router_core.record.stamp import ZERO, Stamp
from router_core.record.state import Kind

Slot = tuple[Id16, Kind]
STATE_KINDS: Final = (Kind.S, Kind.V, Kind.L)
RTTS: Final = 4


class LinkPhase(Enum):
    """How far a link has come since it was opened."""

    GREETING = "greeting"
    SYNCING = "syncing"
    UP = "up"


class Expiry(Enum):
    """Why a link has waited long enough."""

    NO_HELLO = "no_hello"
    NO_HAVE = "no_have"
    SILENT = "silent"
    SLOW = "slow"


class Link:
    """One open link to a peer: its phase, its timers, and which records the peer has."""

    def __init__(self, link: LinkId, peer: Id16, dialled: bool, policy: MeshPolicy, now: int) -> None:
        self.id = link
        self.peer = peer
        self.dialled = dialled
        self.phase = LinkPhase.GREETING
        self.hello: Hello | None = None
        self.hello_at = now
        self.hello_sent_ms: int | None = None
        self.early_hello: Hello | None = None
        self.opened_at = now
        self.up_at: int | None = None
        self.heard_at = now
        self.sent_at = now
        self.busy_since: int | None = None
        self._rtts: deque[int] = deque(maxlen=RTTS)
        self.known: dict[Slot, Stamp] = {}
        self.dirty: dict[Slot, None] = {}
        self.flush_at: int | None = None
        self.backlog: deque[Heard] = deque()
        self.frames: deque[bytes] = deque()
        self.paused = False
        self._policy = policy
        self._phase_at = now
        self._told: dict[Id16, None] = {}
        self._answered: dict[Slot, int] = {}
        self._chunk_next = 0
        self._chunks = 0
        self._pinged: tuple[int, int] | None = None
        self._measured_at = now
        self._bytes = Bucket(limits.LINK_BYTES_PER_S * 1_000, limits.LINK_BYTES_BURST, now)
        self._messages = Bucket(policy.messages_per_s_m, policy.messages_burst, now)
        self._useless = Bucket(policy.useless_per_s_m, policy.useless_burst, now)
        self._disputes = Bucket(policy.disputes_per_s_m, policy.disputes_burst, now)
        self._shown_own_at: int | None = None

    # --- phases and timers ---

    @property
    def is_up(self) -> bool:
        return self.phase is LinkPhase.UP

    @property
    def rtt_ms(self) -> int | None:
        """The least of the last few round trips: a slow answer is the peer's, not the way's. None before the first."""
        return min(self._rtts, default=None)

    @property
    def dialler_hello_ms(self) -> int:
        """Boot time in the HELLO of the end that dialled: equal at both ends, it orders links between them."""
        if self.dialled:
            return self.hello_sent_ms or 0
        return self.hello.boot_ms if self.hello is not None else 0

    def greet(self, hello: Hello, now: int) -> None:
        """The peer's HELLO was found valid."""
        self.hello, self.hello_at = hello, now
        self.phase, self._phase_at = LinkPhase.SYNCING, now

    def rise(self, now: int) -> None:
        """The peer's last HAVE chunk is in."""
        self.phase, self._phase_at, self.up_at = LinkPhase.UP, now, now

    def forgive(self, gap_ms: int) -> None:
        """We slept; the time does not count against the peer."""
        self.heard_at += gap_ms
        self._phase_at += gap_ms
        self._pinged = None
        if self.busy_since is not None:
            self.busy_since += gap_ms

    def expired(self, now: int) -> Expiry | None:
        """Whether a limit of the phase has passed."""
        waited = now - self._phase_at
        if self.phase is LinkPhase.GREETING:
            return Expiry.NO_HELLO if waited >= self._policy.greeting_ms else None
        if self.phase is LinkPhase.SYNCING:
            return Expiry.NO_HAVE if waited >= self._policy.syncing_ms else None
        if now - self.heard_at >= self._policy.dead_ms:
            return Expiry.SILENT
        if self.busy_since is not None and now - self.busy_since >= self._policy.slow_ms:
            return Expiry.SLOW
        return None

    def wants_ping(self, now: int) -> bool:
        return self.phase is not LinkPhase.GREETING and now >= self._ping_at

    def look_at(self, now: int) -> int:
        """When time alone may change something here; ``now`` for soon."""
        if not self.is_up or self.paused or self.busy_since is not None:
            return now
        return min(self._ping_at, self.heard_at + self._policy.dead_ms)

    @property
    def _ping_at(self) -> int:
        """When silence of ours, or an old measurement of the way, asks for a ping."""
        return min(self.sent_at + self._policy.ping_ms, self._measured_at + self._policy.measure_ms)

    def ping(self, nonce: int, now: int) -> None:
        self._pinged = (nonce, now)
        self._measured_at = now

    def pong(self, nonce: int, now: int) -> None:
        """Take the round trip if this answers the last PING."""
        if self._pinged is not None and self._pinged[0] == nonce:
            self._rtts.append(now - self._pinged[1])
            self._pinged = None

    # --- what the peer has ---

    def take_have(self, chunk: int, chunks: int, states: tuple[HaveState, ...]) -> bool | None:
        """Set ``known`` by one chunk of the peer's HAVE; True at the last one, None if it is out of order."""
        if chunk != self._chunk_next or (chunk and chunks != self._chunks):
            return None
        if chunk == 0:
            self.known.clear()
        self._chunks = chunks
        for entry in states:
            for kind, seq in zip(STATE_KINDS, (entry.sseq, entry.vseq, entry.lseq), strict=True):
                if seq:
                    self.known[Id16(entry.id16), kind] = Stamp(entry.epoch, seq)
        last = chunk + 1 == chunks
        self._chunk_next = 0 if last else chunk + 1
        return last

    def raise_known(self, slot: Slot, stamp: Stamp) -> None:
        """The peer has this, refused it, or will have it when what we sent arrives."""
        known = self.known.get(slot)
        if known is None or stamp > known:
            self.known[slot] = stamp
            self.dirty.pop(slot, None)

    def lacks(self, slot: Slot, stamp: Stamp) -> bool:
        return self.known.get(slot, ZERO) < stamp

    def mark(self, slot: Slot, flush_at: int) -> None:
        """``slot`` is to be sent by ``flush_at`` at the latest."""
        self.dirty.setdefault(slot)
        if self.flush_at is None or flush_at < self.flush_at:
            self.flush_at = flush_at

    def may_answer(self, slot: Slot, now: int) -> bool:
        """A WANT for a slot is answered at most twice a second."""
        if now - self._answered.get(slot, -self._policy.want_answer_ms) < self._policy.want_answer_ms:
            return False
        self._answered[slot] = now
        return True

    def send_order(self) -> list[Slot]:
        """Dirty slots as they go out: L, then origins never told here, then longest dirty; S before V of one."""
        first: dict[Id16, int] = {}
        for at, (origin, _) in enumerate(self.dirty):
            first.setdefault(origin, at)
        return sorted(
            self.dirty,
            key=lambda slot: (
                slot[1] is not Kind.L,
                slot[0] in self._told,
                first[slot[0]],
                slot[1] is Kind.V,
            ),
        )

    def sent(self, slot: Slot, stamp: Stamp) -> None:
        self._told.setdefault(slot[0])
        self.dirty.pop(slot, None)
        self.raise_known(slot, stamp)

    # --- reading ---

    def spend(self, size: int, now: int) -> None:
        """One message of so many bytes was read."""
        self._bytes.spend(now, size)
        self._messages.spend(now, 1)

    def may_read(self, now: int) -> bool:
        """False while records wait for verification or one of the buckets is in debt."""
        return (
            not self.backlog
            and not self.frames
            and self._bytes.ready_at(now) <= now
            and self._messages.ready_at(now) <= now
        )

    def may_be_useless(self, now: int) -> bool:
        """Count a message that told nothing new; False if the peer sent too many of them."""
        return self._useless.take(now)

    def may_dispute(self, now: int) -> bool:
        """Whether a record that contradicts what is held is verified: it is, only so often."""
        return self._disputes.take(now)

    def may_show_own(self, now: int) -> bool:
        """Whether the peer is shown again what is held of it."""
        last = self._shown_own_at
        if last is not None and now - last < self._policy.show_own_every_ms:
            return False
        self._shown_own_at = now
        return True
