"""Bugs planted one at a time, to see that the simulation finds them: each overrides one decision of one part."""

from collections.abc import Callable
from random import Random
from typing import Final

from router_core.mesh.links.link import Link
from router_core.mesh.machine import Mesh
from router_core.mesh.membership.liveness import ObserverGap, Solitude
from router_core.mesh.parts import Crypto
from router_core.mesh.records.origin import Origin
from router_core.mesh.records.publisher import Me, Publisher
from router_core.mesh.records.receiver import DropReason, Judgement, Receiver
from router_core.mesh.records.saved import Saved
from router_core.policy.mesh import MeshPolicy
from router_core.record.envelope import Header, Sealed
from router_core.record.stamp import StampVerdict
from router_core.record.state import Kind


class EpochUnchecked(Receiver):
    """A lower seq is older, whatever the epoch."""

    def _stamp_verdict(self, origin: Origin, header: Header, signed: bytes) -> StampVerdict:
        held = origin.held(Kind(header.kind))
        older = held is not None and header.seq <= held.stamp.seq
        return StampVerdict.OLDER if older else StampVerdict.NEWER


class FloorIgnored(Receiver):
    def _stamp_verdict(self, origin: Origin, header: Header, signed: bytes) -> StampVerdict:
        verdict = super()._stamp_verdict(origin, header, signed)
        return StampVerdict.NEWER if verdict is StampVerdict.BELOW_FLOOR else verdict


class Unconfirmed(Receiver):
    """The first V counts as a sign of life, whoever brings it."""

    def judge(self, sealed: Sealed, link: Link | None, now: int) -> Judgement:
        judgement = super().judge(sealed, link, now)
        if judgement.reason is DropReason.ACCEPTED and judgement.origin is not None:
            judgement.origin.confirmed = True
        return judgement


class SignatureUnchecked(Receiver):
    def _is_genuine(self, origin: Origin, sealed: Sealed) -> bool:
        return True


class NoObserverGap(ObserverGap):
    """Own stalls go unnoticed."""

    def observe(self, now: int) -> int:
        return 0


class NeverLonely(Solitude):
    """Lets everybody go while it is the one cut off."""

    def update(self, now: int, links_up: int, somebody_alive: bool) -> bool:
        super().update(now, links_up, somebody_alive)
        self.lonely = False
        return False


class EarlySpeech(Publisher):
    """Publishes before the epoch is on disk."""

    @property
    def is_persisted(self) -> bool:
        return True

    def may_speak(self, now: int) -> bool:
        return self._volatile is not None and self._static is not None and not self.left


class NoRatchet(Publisher):
    """An own record from another life is ignored."""

    def is_foreign(self, header: Header, signed: bytes) -> bool:
        return False


Part = type[Receiver | Publisher | ObserverGap | Solitude]


class _Mutant(Mesh):
    """A machine with one part exchanged before its first event."""

    def __init__(
        self,
        me: Me,
        policy: MeshPolicy,
        crypto: Crypto,
        rng: Random,
        saved: Saved,
        now: int,
        part: Part,
    ) -> None:
        super().__init__(me, policy, crypto, rng, saved, now)
        parts = self.parts
        if issubclass(part, Receiver):
            receiver = part(me.id16, me.key32, crypto, parts.receiver.disputes)
            receiver.mesh8 = parts.receiver.mesh8
            parts.receiver, parts.origins = receiver, receiver.origins
        elif issubclass(part, Publisher):
            parts.publisher = part(me, parts.publisher.mesh8, saved.epoch, crypto, policy, rng, now)
        elif issubclass(part, ObserverGap):
            parts.gap = part(policy, now)
        else:
            parts.solitude = part(policy, now)


def planted(part: Part) -> Callable[..., Mesh]:
    """A maker of machines that have this bug."""

    def make(me: Me, policy: MeshPolicy, crypto: Crypto, rng: Random, saved: Saved, now: int) -> Mesh:
        return _Mutant(me, policy, crypto, rng, saved, now, part)

    return make


MUTANTS: Final[tuple[tuple[Part, tuple[str, ...]], ...]] = (
    (EpochUnchecked, ("crash",)),
    (FloorIgnored, ("replay_dead",)),
    (Unconfirmed, ("replay_dead",)),
    (SignatureUnchecked, ("forge",)),
    (NoObserverGap, ("stall",)),
    (NeverLonely, ("isolate",)),
    (EarlySpeech, ("disk_lost",)),
    (NoRatchet, ("disk_lost",)),
)
"""Each bug, and the faults that bring it to light."""
