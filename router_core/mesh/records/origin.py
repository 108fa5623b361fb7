"""All that is held of one other node: its records as they came, their stamps, floors, and the signs of life.

It stores what the receive pipeline accepted and answers questions; it verifies nothing and sends nothing. A
record of a higher epoch drops those of lower ones; L drops V and S and leaves a floor that only a higher epoch
passes.
"""

from typing import Final

from msgspec import Struct

from router_core.errors import LocalMisuse, RemoteFault
from router_core.ids import Id16
from router_core.mesh.links.bucket import Bucket
from router_core.mesh.membership.liveness import LivenessEvidence
from router_core.mesh.protocol.messages import HaveState
from router_core.mesh.records.age import Base
from router_core.mesh.records.keys import key_of
from router_core.mesh.records.saved import RecordFloor
from router_core.policy.mesh import MeshPolicy
from router_core.record.envelope import DUE_MIN_MS, Header, Sealed, Sref, read_header, sref_of
from router_core.record.membership import Liveness, Member, ViewChange
from router_core.record.stamp import ZERO, Stamp, StampVerdict, judge
from router_core.record.state import Address, Kind, Leave, Static, Volatile

_SEQ_ABOVE_ALL: Final = 2**63 - 1
_KINDS: Final = (Kind.V, Kind.S, Kind.L)
Body = Volatile | Static | Leave


class HeldRecord(Struct, frozen=True, gc=False, kw_only=True):
    """One stored record: the bytes as they came, and what its header said."""

    sealed: Sealed
    kind: Kind
    stamp: Stamp
    inst: int
    mono_ms: int
    due_ms: int
    sref: Sref | None

    @classmethod
    def of(cls, header: Header, sealed: Sealed) -> "HeldRecord":
        return cls(
            sealed=sealed,
            kind=Kind(header.kind),
            stamp=Stamp(header.epoch, header.seq),
            inst=header.inst,
            mono_ms=header.mono_ms,
            due_ms=header.due_ms,
            sref=header.sref,
        )


class Origin:
    """State of one member. ``state`` is None until something was heard of it."""

    def __init__(
        self,
        member: Member,
        policy: MeshPolicy,
        now: int,
        floor: RecordFloor | None = None,
        mesh8: bytes = b"",
    ) -> None:
        self.member = member
        self.id16: Id16 = member.id16
        key32 = key_of(member)
        if key32 is None:
            raise LocalMisuse(f"the certificate of {member.node_id} does not hold its key")
        self.key32 = key32
        self.state: Liveness | None = None
        self.state_since = now
        self.epoch = 0
        self.confirmed = False
        self.refused = False
        self.broken_at: int | None = None
        self.link_fault: str | None = None
        """In a word, why the last link to it ended unplanned, by either end; None once one is up."""
        self.lost_since: int | None = None
        self.credit_ms = 0
        self.bucket = Bucket(policy.accept_per_s_m, policy.accept_burst, now)
        self.conflict_until = now
        self.behind_until = now
        """Until when it counts as sending what another life of it has overtaken."""
        self.quarantined_until = now
        self._quarantine_ms = 0
        self._policy = policy
        self._held: dict[Kind, HeldRecord] = {}
        self._static: Static | None = None
        self._static_sref: Sref | None = None
        self.volatile: Volatile | None = None
        self._floors: dict[Kind, Stamp] = dict.fromkeys(_KINDS, ZERO)
        self._proof: HeldRecord | None = None
        if floor is not None:
            self._floors[Kind.V] = Stamp(floor.v_epoch, floor.v_seq)
            self._floors[Kind.S] = Stamp(floor.s_epoch, floor.s_seq)
            self._floors[Kind.L] = Stamp(floor.l_epoch, floor.l_seq)
            self._proof = _read_proof(floor.proof, mesh8)
            if self._proof is not None and self._proof.kind is Kind.L:
                self.epoch, self.state = self._proof.stamp.epoch, Liveness.LEFT
                self._held[Kind.L] = self._proof
        self._base = Base(policy.base_bucket_ms)
        self._first_heard = now
        self._rises: list[int] = []

    # --- what is held ---

    def held(self, kind: Kind) -> HeldRecord | None:
        return self._held.get(kind)

    def verdict(self, header: Header, signed: bytes) -> StampVerdict:
        """What a record with this header is to us, by stamp alone.

        The S that the newest V names passes the floor, and replaces one of another process life at any stamp.
        """
        kind = Kind(header.kind)
        stamp = Stamp(header.epoch, header.seq)
        if header.epoch < self.epoch:
            return StampVerdict.OLDER
        if header.epoch < max(floor.epoch for floor in self._floors.values()):
            return StampVerdict.BELOW_FLOOR
        held = self._held.get(kind)
        named = kind is Kind.S and self._is_named(header, signed)
        if named and held is not None and held.inst != header.inst:
            held = None
        return judge(
            stamp,
            header.inst,
            own=False,
            held=held.stamp if held is not None else None,
            held_inst=held.inst if held is not None else 0,
            same_bytes=held is not None and held.sealed.signed == signed,
            floor=self._floors[kind],
            named=named,
        )

    def _is_named(self, header: Header, signed: bytes) -> bool:
        v = self._held.get(Kind.V)
        return v is not None and v.stamp.epoch == header.epoch and v.sref == sref_of(header.seq, signed)

    @property
    def static(self) -> Static | None:
        """The S that the newest V refers to, or any S while there is no V."""
        v = self._held.get(Kind.V)
        return self._static if v is None or v.sref == self._static_sref else None

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Where it says it may be dialled: hints, from any S held."""
        return self._static.addrs if self._static is not None else ()

    @property
    def missing_static(self) -> Sref | None:
        """The S that the newest V names and that is not held."""
        v = self._held.get(Kind.V)
        return v.sref if v is not None and v.sref is not None and self.static is None else None

    def have(self) -> HaveState | None:
        """The entry in HAVE; None for an origin of which nothing is to be told."""
        if self.state is None or self.state is Liveness.GONE or not self._held:
            return None
        seqs = [held.stamp.seq if (held := self._held.get(kind)) else 0 for kind in (Kind.S, Kind.V, Kind.L)]
        return HaveState(self.id16, self.epoch, *seqs)

    def floor(self) -> RecordFloor:
        """The floor to persist: nothing held or refused by it may come back to the next process."""
        v, s, left = (max(self._floors[kind], self._stamp(kind)) for kind in _KINDS)
        return RecordFloor(
            id16=self.id16,
            v_epoch=v.epoch,
            v_seq=v.seq,
            s_epoch=s.epoch,
            s_seq=s.seq,
            l_epoch=left.epoch,
            l_seq=left.seq,
            proof=self.proof.sealed if self.proof is not None else None,
        )

    @property
    def proof(self) -> HeldRecord | None:
        """The newest V or L ever held, else S: what an origin that forgot itself has to be shown."""
        return self._held.get(Kind.V) or self._held.get(Kind.L) or self._held.get(Kind.S) or self._proof

    def _stamp(self, kind: Kind) -> Stamp:
        held = self._held.get(kind)
        return held.stamp if held is not None else ZERO

    # --- storing ---

    def store(self, header: Header, sealed: Sealed, body: Body, now: int) -> None:
        """Keep an accepted record; ``header`` was judged ``NEWER``."""
        kind = Kind(header.kind)
        if self.state in (None, Liveness.GONE, Liveness.LEFT):
            self._enter(Liveness.UNCONFIRMED, now)
            self._first_heard = now
            self.credit_ms = 0
        if header.epoch > self.epoch:
            self._raise_epoch(header.epoch, now)
        before = self._held.get(kind)
        self._held[kind] = HeldRecord.of(header, sealed)
        if isinstance(body, Volatile):
            self._base.sample(now, header.mono_ms)
            self.volatile = body
            self.broken_at, self.refused, self.lost_since, self.credit_ms = None, False, None, 0
            if before is not None and header.mono_ms > before.mono_ms:
                self.confirmed = True
        elif isinstance(body, Static):
            self._static = body
            self._static_sref = sref_of(header.seq, sealed.signed)
        else:
            self._leave(header.epoch, now)

    def _raise_epoch(self, epoch: int, now: int) -> None:
        """A life that said goodbye before the next one began was in one place: only the other rises may tell of two."""
        if self.epoch and Kind.L not in self._held:
            window = now - self._policy.epoch_rise_window_ms
            self._rises = [*(at for at in self._rises if at > window), now]
            if len(self._rises) > self._policy.epoch_rises_most or now < self.conflict_until:
                self.conflict_until = now + self._policy.conflict_ms
        self._raise_floors()
        self.epoch = epoch
        self._forget_records()
        self._proof = None
        self._base = Base(self._policy.base_bucket_ms)
        self.confirmed = False
        self.broken_at, self.refused, self.lost_since = None, False, None
        self._first_heard = now
        self._enter(Liveness.UNCONFIRMED, now)

    def _leave(self, epoch: int, now: int) -> None:
        left = self._held[Kind.L]
        self._forget_records()
        self._held[Kind.L] = left
        for kind in (Kind.V, Kind.S):
            self._floors[kind] = max(self._floors[kind], Stamp(epoch, _SEQ_ABOVE_ALL))
        self._enter(Liveness.LEFT, now)

    def _forget_records(self) -> None:
        self._proof = self.proof
        self._held.clear()
        self._static = self._static_sref = self.volatile = None

    def _raise_floors(self) -> None:
        for kind in _KINDS:
            self._floors[kind] = max(self._floors[kind], self._stamp(kind))

    def forget(self) -> None:
        """Drop all records; their stamps stay as floor."""
        self._raise_floors()
        self._forget_records()

    def forget_mesh(self) -> None:
        """Drop all records with their proof, which another mesh would not take."""
        self.forget()
        self._proof = None

    def expire(self, now: int) -> bool:
        """Drop the records of a node gone or left for 15 minutes; their stamps stay as floor."""
        ended = self.state in (Liveness.GONE, Liveness.LEFT)
        if not ended or not self._held or now - self.state_since < self._policy.gone_kept_ms:
            return False
        self.forget()
        return True

    # --- signs of life ---

    def hear_clock(self, received_ms: int, origin_ms: int) -> None:
        """The origin told its boot clock over a direct link of this epoch and inst: it is alive, and known."""
        self._base.sample(received_ms, origin_ms)

    def confirm(self, epoch: int, inst: int) -> None:
        """The origin's own link is up in this process life."""
        v = self._held.get(Kind.V)
        if v is not None and (v.stamp.epoch, v.inst) == (epoch, inst):
            self.confirmed = True

    def age_ms(self, now: int) -> int | None:
        """Age of the newest V as the view shows it; None without one."""
        v = self._held.get(Kind.V)
        return self._base.age(now, v.mono_ms) if v is not None else None

    def evidence(self, now: int) -> LivenessEvidence:
        v = self._held.get(Kind.V)
        age = self._base.age(now, v.mono_ms) if v is not None else now - self._first_heard
        return LivenessEvidence(
            age_ms=max(0, age - self.credit_ms),
            due_ms=v.due_ms if v is not None else DUE_MIN_MS,
            confirmed=self.confirmed,
            broken_ms=now - self.broken_at if self.broken_at is not None else None,
            refused=self.refused,
            lost_ms=now - self.lost_since if self.lost_since is not None else None,
        )

    def enter(self, state: Liveness, now: int) -> bool:
        """Take over a verdict; True if it is another one."""
        if state is self.state:
            return False
        self._enter(state, now)
        return True

    def _enter(self, state: Liveness, now: int) -> None:
        self.state = state
        self.state_since = now

    # --- misbehaviour ---

    def quarantine(self, now: int) -> None:
        """60 s, doubling to 10 min with each further offence."""
        self._quarantine_ms = min(
            max(self._policy.quarantine_min_ms, 2 * self._quarantine_ms), self._policy.quarantine_max_ms
        )
        self.quarantined_until = now + self._quarantine_ms

    def is_shunned(self, now: int) -> bool:
        """Shown but not to be routed to: in quarantine, or one identity in several places."""
        return now < self.quarantined_until or now < self.conflict_until

    # --- pictures ---

    def change(self, now: int, rtt_ms: int | None) -> ViewChange:
        v, s = self._held.get(Kind.V), self._held.get(Kind.S)
        newest = v or s or self._held.get(Kind.L)
        return ViewChange(
            origin=self.id16,
            state=self.state or Liveness.GONE,
            confirmed=self.confirmed,
            epoch=self.epoch,
            inst=newest.inst if newest else 0,
            seq=newest.stamp.seq if newest else 0,
            mono_ms=newest.mono_ms if newest else 0,
            base_ms=self._base.value or 0,
            due_ms=v.due_ms if v else 0,
            volatile=self.volatile,
            static=self.static,
            quarantined=self.is_shunned(now),
            rtt_ms=rtt_ms,
        )


def _read_proof(proof: Sealed | None, mesh8: bytes) -> HeldRecord | None:
    if proof is None:
        return None
    try:
        return HeldRecord.of(read_header(proof.signed, mesh8), proof)
    except RemoteFault:
        return None
