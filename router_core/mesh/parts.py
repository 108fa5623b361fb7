"""The parts of one mesh machine, wired once, and the few moves all of its steps share.

Steps (link lifecycle, intake, upkeep) are functions over these parts; each part keeps its own rules. Actions are
collected in ``out`` in the order in which they are to be done.
"""

from collections.abc import Iterator, Sequence
from random import Random
from typing import Protocol

from router_core.ids import Id16, MeshId, mesh8_of
from router_core.mesh.links.bucket import Bucket
from router_core.mesh.links.link import Link, Slot
from router_core.mesh.links.losses import Hearsay, OwnLosses
from router_core.mesh.membership.liveness import ALIVE, ObserverGap, Solitude
from router_core.mesh.membership.overlay import Dialler
from router_core.mesh.protocol.actions import Action, Alarm, CloseLink, Notify, SendFrame, ViewChanged
from router_core.mesh.protocol.events import LinkId
from router_core.mesh.protocol.messages import (
    Bye,
    ByeCode,
    Heard,
    Message,
    Recs,
    Wanted,
    encode,
    encode_wants,
)
from router_core.mesh.records.flush import flush_delay_ms
from router_core.mesh.records.origin import HeldRecord, Origin
from router_core.mesh.records.publisher import Me, Publisher
from router_core.mesh.records.receiver import Receiver
from router_core.mesh.records.saved import RecordFloor, Saved
from router_core.policy.mesh import MeshPolicy
from router_core.record.crypto import Signer, Verifier
from router_core.record.membership import Liveness
from router_core.record.state import Address


class Crypto(Signer, Verifier, Protocol):
    """Signs with the own key, verifies with anybody's."""


class Parts:
    """The parts of one mesh machine and the operations that its steps share."""

    def __init__(
        self, me: Me, policy: MeshPolicy, crypto: Crypto, rng: Random, saved: Saved, now: int
    ) -> None:
        self.me = me
        self.policy = policy
        self.rng = rng
        self.mesh_id: MeshId = saved.mesh_id
        self.publisher = Publisher(me, mesh8_of(saved.mesh_id), saved.epoch, crypto, policy, rng, now)
        disputes = Bucket(policy.disputes_per_s_m, policy.disputes_burst, now)
        self.receiver = Receiver(me.id16, me.key32, crypto, disputes)
        self.receiver.mesh8 = mesh8_of(saved.mesh_id)
        self.origins: dict[Id16, Origin] = self.receiver.origins
        self.links: dict[LinkId, Link] = {}
        self.dialler = Dialler(me.id16, policy, rng, now)
        self.losses = OwnLosses(policy)
        self.hearsay = Hearsay()
        self.gap = ObserverGap(policy, now)
        self.solitude = Solitude(policy, now)
        self.floors: dict[Id16, RecordFloor] = {Id16(floor.id16): floor for floor in saved.floors}
        self.addresses: dict[Id16, tuple[Address, ...]] = {
            Id16(known.id16): known.addrs for known in saved.addresses
        }
        self.addresses_moved = False
        self.waiting: dict[LinkId, None] = {}
        self.verifications_left = 0
        self.out: list[Action] = []
        self.view_at: int | None = None
        self._changed: dict[Id16, Origin] = {}
        self._wanted: dict[Slot, tuple[int, LinkId]] = {}

    # --- pictures of the parts ---

    def links_up(self) -> Iterator[Link]:
        return (link for link in self.links.values() if link.is_up)

    def links_to(self, peer: Id16) -> list[Link]:
        return [link for link in self.links.values() if link.peer == peer]

    def rtt_ms_to(self, peer: Id16) -> int | None:
        """The round trip on the best link to ``peer``; None if there is none, or nothing was measured on it."""
        told = [link.rtt_ms for link in self.links_to(peer) if link.rtt_ms is not None]
        return min(told, default=None)

    @property
    def degree(self) -> int:
        return sum(link.is_up for link in self.links.values())

    @property
    def others_alive(self) -> int:
        return sum(origin.state in ALIVE for origin in self.origins.values())

    def newest(self, slot: Slot) -> HeldRecord | None:
        """The record of a slot that may be sent: nothing of those gone."""
        origin_id, kind = slot
        if origin_id == self.me.id16:
            return self.publisher.held(kind)
        origin = self.origins.get(origin_id)
        if origin is None or origin.state is Liveness.GONE:
            return None
        return origin.held(kind)

    def age_hint_ms(self, slot: Slot, now: int) -> int:
        origin = self.origins.get(slot[0])
        return (origin.age_ms(now) or 0) if origin is not None else 0

    # --- moves ---

    def send(self, link: Link, message: Message, now: int) -> None:
        self.send_data(link, encode(message), now)

    def send_data(self, link: Link, data: bytes, now: int) -> None:
        link.sent_at = now
        self.out.append(SendFrame(link.id, data))

    def notify(self, code: Alarm, **fields: str | int) -> None:
        self.out.append(Notify(code, tuple(fields.items())))

    def mark(self, link: Link, slot: Slot, now: int, *, urgent: bool) -> None:
        link.mark(slot, now + flush_delay_ms(self.policy, self.rng, urgent))

    def broadcast(self, records: Sequence[HeldRecord], now: int) -> None:
        """Own records go at once to every link that can take them."""
        if not records:
            return
        data = encode(Recs(tuple(Heard(0, held.sealed.signed, held.sealed.sig) for held in records)))
        slots = [(self.me.id16, held.kind) for held in records]
        for link in self.links_up():
            for slot, held in zip(slots, records, strict=True):
                if link.busy_since is None:
                    link.sent(slot, held.stamp)
                else:
                    self.mark(link, slot, now, urgent=True)
            if link.busy_since is None:
                self.send_data(link, data, now)

    def changed(self, origin: Origin, now: int, *, urgent: bool) -> None:
        """The view of this origin is to be told, soon or now."""
        self._changed[origin.id16] = origin
        at = now if urgent else now + self.policy.view_coalesce_ms
        if self.view_at is None or at < self.view_at:
            self.view_at = at

    def tell_view(self, now: int) -> None:
        """Emit the changes that have waited long enough."""
        if self.view_at is None or now < self.view_at:
            return
        self.view_at = None
        changes = tuple(origin.change(now, self.rtt_ms_to(origin.id16)) for origin in self._changed.values())
        self._changed.clear()
        self.out.append(ViewChanged(changes))

    def want(self, slot: Slot, epoch: int, seq: int, via: Link | None, now: int) -> None:
        """Ask one link for a record, each slot once a second, another link each time."""
        asked_at, last = self._wanted.get(slot, (now - self.policy.want_every_ms, LinkId(-1)))
        if now - asked_at < self.policy.want_every_ms:
            return
        candidates = [link for link in self.links.values() if link.hello is not None and link.id != last]
        if via is not None and via in candidates:
            chosen = via
        elif candidates:
            chosen = candidates[self.rng.randrange(len(candidates))]
        elif last in self.links:
            chosen = self.links[last]
        else:
            return
        self._wanted[slot] = (now, chosen.id)
        item = Wanted(slot[0], slot[1], epoch, seq)
        for data in encode_wants([item]):
            self.send_data(chosen, data, now)

    def forget_wants(self) -> None:
        """Drop requests for slots of ids that are no longer members."""
        self._wanted = {
            slot: at
            for slot, at in self._wanted.items()
            if slot[0] in self.origins or slot[0] == self.me.id16
        }

    def close(
        self,
        link: Link,
        code: ByeCode | None,
        now: int,
        *,
        retry_after_ms: int = 0,
    ) -> None:
        """Say BYE (unless ``code`` is None), close, forget; what the end means is up to ``link_life.ended``."""
        if code is not None:
            self.send(link, Bye(code=code, retry_after_ms=retry_after_ms), now)
        self.out.append(CloseLink(link.id, code))
        self.links.pop(link.id, None)
        self.waiting.pop(link.id, None)
