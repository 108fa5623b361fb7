"""The own records: when they are due, how they are numbered, and what happens when one comes back.

Nothing is published before the epoch of this process life is on disk, nor before the mesh was listened to. The first
record of an epoch is S. Changes that cannot wait go out within a bucket. A genuine own record that this life did not
write means a lost, stale or cloned disk: the epoch is raised above it (ratchet); three ratchets in a minute mean two
of us, and this one falls silent, and tries again each 20 s.
"""

from collections import deque
from random import Random
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from router_core.ids import Id16
from router_core.mesh.links.bucket import Bucket
from router_core.mesh.protocol.actions import Persist
from router_core.mesh.protocol.events import SavedKey
from router_core.mesh.protocol.messages import HaveState
from router_core.mesh.records.origin import HeldRecord
from router_core.mesh.records.saved import encode_epoch
from router_core.policy.mesh import MeshPolicy
from router_core.record.codec import encode_leave, encode_static, encode_volatile
from router_core.record.crypto import Signer
from router_core.record.envelope import DUE_MAX_MS, DUE_MIN_MS, Header, Sref, seal, sref_of
from router_core.record.fit import fit_static, fit_volatile
from router_core.record.stamp import SEQ_LAST
from router_core.record.state import Flag, Kind, Leave, LeaveReason, LostLink, Static, Volatile

EPOCH_LAST: Final = 2**63 - 1
"""A node whose records reached it can rise above none of them: it needs a new identity."""
_LOST_MOST: Final = tuple(LostLink(id16=bytes(16), epoch=2**63 - 1, seq=2**63 - 1) for _ in range(8))


class Me(Struct, frozen=True, kw_only=True):
    """The own node: its id and its raw public key."""

    id16: Id16
    key32: bytes


class Publisher:
    """Stamps, seals and keeps the own S, V and L."""

    def __init__(
        self, me: Me, mesh8: bytes, epoch: int, signer: Signer, policy: MeshPolicy, rng: Random, now: int
    ) -> None:
        self._me = me
        self._signer = signer
        self._policy = policy
        self._rng = rng
        self.mesh8 = mesh8
        self.epoch = epoch
        self.inst = 0
        self.seq = 0
        self.period_ms = policy.publish_min_ms
        self.left = False
        self.conflicted = False
        self.degraded = False
        self.exhausted = epoch >= EPOCH_LAST
        """An own record of the last epoch was heard or stored: nothing can rise above it."""
        self._held: dict[Kind, HeldRecord] = {}
        self._volatile: Volatile | None = None
        self._static: Static | None = None
        self._sref: Sref | None = None
        self._promise_ms = 0
        self._next: tuple[Volatile, Static] | None = None
        self._static_again = False
        self._urgent_waits = False
        self._farewell = False
        self._listen_until = now + policy.listen_first_ms
        self._silent_until: int | None = None
        self._writes: deque[bool] = deque()
        self._write_again_at: int | None = None
        self._sealed: Volatile | None = None
        """What the last V says."""
        self._volatile_at = now
        self._static_at = now - policy.static_gap_ms
        self._retune_at = now + policy.publish_retune_ms
        self._urgent = Bucket(policy.urgent_per_s_m, policy.urgent_burst, now)
        self._statics = Bucket(policy.static_per_s_m, policy.static_burst, now)
        self._ratchets: list[int] = []

    # --- the epoch ---

    def begin_epoch(self, above: int) -> Persist:
        """A new process life in the eyes of others: epoch ``above`` + 1, to be persisted before it is used.

        Above the last epoch there is none: it is used again, and whoever holds records of it takes no newer ones.
        """
        self.epoch = min(above + 1, EPOCH_LAST)
        self.inst = self._rng.getrandbits(32) or 1
        self.seq = 0
        self._held.clear()
        self._sref = None
        return self._persist()

    def _persist(self) -> Persist:
        self._writes.append(True)
        self._write_again_at = None
        return Persist(SavedKey.EPOCH, encode_epoch(self.epoch))

    def persisted(self, ok: bool, now: int) -> None:
        """An epoch was written, or the disk refused; then it goes on in memory and tries again."""
        if self._writes:
            self._writes.popleft()
        self.degraded = not ok
        self._write_again_at = None if ok else now + self._policy.persist_retry_ms

    def retry_persist(self, now: int) -> Persist | None:
        if self._write_again_at is None or now < self._write_again_at:
            return None
        self._writes.append(False)
        self._write_again_at = None
        return Persist(SavedKey.EPOCH, encode_epoch(self.epoch))

    @property
    def is_persisted(self) -> bool:
        """False while the first write of an epoch has not been answered; retries gate nothing."""
        return not any(self._writes)

    # --- bodies ---

    def set_bodies(self, volatile: Volatile, static: Static, urgent: bool, due_ms: int | None) -> None:
        """The newest bodies; raises ``LocalMisuse`` (and keeps the last ones) if they can never be sent.

        A V speaks in the positions of its own S. While a changed S has to wait for its bucket, the V that came with it
        goes out under the S in force if both list the same things in the same places; else it waits, too, and the last
        V of the S in force goes on being published.
        """
        fit_volatile(replace(volatile, lost=_LOST_MOST))
        if static != self._static:
            static = fit_static(static)
        self._promise_ms = due_ms or 0
        self._urgent_waits = self._urgent_waits or urgent
        if Kind.S not in self._held or static == self._static:
            self._volatile, self._static, self._next = volatile, static, None
        else:
            self._next = volatile, static
            if self._static is not None and _places(static) == _places(self._static):
                self._volatile = volatile

    def hurry(self) -> None:
        """Something of ours changed that cannot wait for the next V."""
        self._urgent_waits = True

    # --- when ---

    def listened(self, now: int) -> None:
        """The first link finished its HAVE exchange."""
        self._listen_until = min(self._listen_until, now)

    def retune(self, alive: int, now: int) -> None:
        """Follow the size of the mesh: ``clamp(N/150, 1, 10)`` s, by at most 25 % each 10 s."""
        if now < self._retune_at:
            return
        self._retune_at = now + self._policy.publish_retune_ms
        wanted = alive * 1_000 // self._policy.members_per_publish_second
        wanted = max(self._policy.publish_min_ms, min(self._policy.publish_max_ms, wanted))
        step = self.period_ms * self._policy.publish_retune_pct // 100
        self.period_ms = max(self.period_ms - step, min(self.period_ms + step, wanted))

    def may_speak(self, now: int) -> bool:
        silent = self._silent_until is not None and now < self._silent_until and not self._farewell
        return (
            self.is_persisted
            and now >= self._listen_until
            and not self.left
            and not silent
            and self._volatile is not None
            and self._static is not None
        )

    def due_at(self, now: int) -> int | None:
        """When ``publish`` has work next; None while nothing may be said."""
        if self.left or not self.is_persisted or self._volatile is None or self._static is None:
            return None
        if self._silent_until is not None and not self._farewell:
            return max(now, self._silent_until)
        if Kind.V not in self._held:
            return max(now, self._listen_until)
        due = self._volatile_at
        if self._urgent_waits:
            due = min(due, self._urgent.ready_at(now))
        if self._static_waits:
            due = min(due, self._static_ready_at(now))
        return max(due, self._listen_until)

    @property
    def _static_waits(self) -> bool:
        return self._next is not None or self._static_again

    def _static_ready_at(self, now: int) -> int:
        return max(self._static_at + self._policy.static_gap_ms, self._statics.ready_at(now))

    # --- publishing ---

    def publish(self, lonely: bool, lost: tuple[LostLink, ...], now: int) -> list[HeldRecord]:
        """Seal what is due, S before V. Returns the new records, to be sent at once."""
        if not self.may_speak(now):
            return []
        if self._silent_until is not None and not self._farewell:
            self._silent_until, self.conflicted = None, False
            self._ratchets.clear()
            self._static_again = True
        if self._farewell:
            self._farewell = False
            return [self._seal_volatile(lonely, lost, urgent=True, now=now)]
        out: list[HeldRecord] = []
        first = Kind.V not in self._held
        if first or (self._static_waits and now >= self._static_ready_at(now)):
            self._statics.spend(now, 1)
            out.append(self._seal_static(now))
        urgent = self._urgent_waits and self._urgent.take(now)
        if out or urgent or now >= self._volatile_at:
            out.append(self._seal_volatile(lonely, lost, urgent=urgent, now=now))
            if first:
                self._volatile_at = min(self._volatile_at, now + self._policy.second_volatile_ms)
        return out

    def fresh(self, lonely: bool, lost: tuple[LostLink, ...], now: int) -> HeldRecord | None:
        """A V of now if it would say something else than the last one, one may be published, and the bucket allows it."""
        if Kind.V not in self._held or self._volatile == self._sealed or not self.may_speak(now):
            return None
        if not self._urgent.take(now):
            return None
        return self._seal_volatile(lonely, lost, urgent=False, now=now)

    def leave(self, reason: LeaveReason, now: int) -> HeldRecord | None:
        """The last record; None if nothing was ever said in this epoch."""
        spoke = Kind.V in self._held
        held = self._seal(Kind.L, encode_leave(Leave(reason=reason)), now) if spoke else None
        self.left = True
        return held

    def start_over(self, mesh8: bytes) -> None:
        """Another mesh: everything is sealed anew."""
        self.mesh8 = mesh8
        self._held.clear()
        self._sref = None

    def _seal_static(self, now: int) -> HeldRecord:
        if self._next is not None:
            (self._volatile, self._static), self._next = self._next, None
        assert self._static is not None
        held = self._seal(Kind.S, encode_static(self._static), now)
        self._sref = sref_of(held.stamp.seq, held.sealed.signed)
        self._static_at = now
        self._static_again = False
        return held

    def _seal_volatile(
        self, lonely: bool, lost: tuple[LostLink, ...], *, urgent: bool, now: int
    ) -> HeldRecord:
        assert self._volatile is not None
        self._sealed = self._volatile
        flags = self._volatile.flags
        for holds, flag in (
            (lonely, Flag.LONELY),
            (self.conflicted, Flag.CONFLICT),
            (self.degraded, Flag.DEGRADED),
            (urgent, Flag.URGENT),
        ):
            if holds:
                flags |= flag
        body = fit_volatile(replace(self._volatile, flags=flags, lost=lost))
        spread = self.period_ms * self._policy.publish_jitter_pct // 100
        self._volatile_at = now + self.period_ms + self._rng.randint(-spread, spread)
        if urgent:
            self._urgent_waits = False
        return self._seal(Kind.V, encode_volatile(body), now)

    def _seal(self, kind: Kind, body: bytes, now: int) -> HeldRecord:
        self.seq += 1
        volatile = kind is Kind.V
        header = Header(
            kind=kind,
            mesh8=self.mesh8,
            id16=self._me.id16,
            epoch=self.epoch,
            inst=self.inst,
            seq=self.seq,
            mono_ms=now,
            due_ms=max(DUE_MIN_MS, min(DUE_MAX_MS, max(2 * self.period_ms, self._promise_ms)))
            if volatile
            else 0,
            sref=self._sref if volatile else None,
            body=body,
        )
        held = HeldRecord.of(header, seal(header, self._signer))
        self._held[kind] = held
        return held

    # --- what others hold of us ---

    def held(self, kind: Kind) -> HeldRecord | None:
        return self._held.get(kind)

    def have(self) -> HaveState | None:
        if not self._held:
            return None
        seqs = [held.stamp.seq if (held := self._held.get(kind)) else 0 for kind in (Kind.S, Kind.V, Kind.L)]
        return HaveState(self._me.id16, self.epoch, *seqs)

    @property
    def needs_epoch(self) -> bool:
        """The numbers of this epoch are used up."""
        return self.seq >= SEQ_LAST

    def is_foreign(self, header: Header, signed: bytes) -> bool:
        """Whether a genuine own record was not written by this process life as it stands."""
        if header.epoch != self.epoch:
            return header.epoch > self.epoch
        if header.inst != self.inst or header.seq > self.seq:
            return True
        held = self._held.get(Kind(header.kind))
        return held is not None and held.stamp.seq == header.seq and held.sealed.signed != signed

    def ratchet(self, heard_epoch: int, now: int) -> Persist | None:
        """Rise above an own record that another life wrote; None if the epochs are used up."""
        if self.left:
            return None
        if heard_epoch >= EPOCH_LAST:
            self.exhausted = True
            return None
        window = now - self._policy.ratchet_window_ms
        self._ratchets = [*(at for at in self._ratchets if at > window), now]
        if len(self._ratchets) >= self._policy.ratchets_most and self._silent_until is None:
            self.conflicted = True
            self._farewell = True
            self._silent_until = now + self._policy.conflict_retry_ms
        return self.begin_epoch(heard_epoch)


def _places(static: Static) -> tuple[object, ...]:
    """What V's positions refer to."""
    return (
        tuple(gpu.uuid8 for gpu in static.gpus),
        tuple(engine.name for engine in static.engines),
        tuple((model.engine, model.name) for model in static.models),
    )
