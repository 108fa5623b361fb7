"""Whom to dial, and when: a full mesh that starts fast and never gives up.

A starting node dials everybody; later the smaller id dials at once and the larger after 5 s without a link.
After an abnormal end the other end is dialled once at once. Else decorrelated jitter (the delay is drawn between the
least and three times the last one, up to a cap) for ever. Nodes gone or left are tried at random, one each 30 s.
Of two links between one pair both ends keep the same.
"""

from collections.abc import Iterable
from enum import Enum
from random import Random

from router_core.ids import Id16
from router_core.mesh.links.link import Link
from router_core.policy.mesh import MeshPolicy
from router_core.record.membership import Liveness


class _Pursuit:
    """One peer we may dial."""

    __slots__ = (
        "at_once",
        "backoff_ms",
        "dialled_at",
        "dialling",
        "first",
        "flood_ms",
        "next_at",
        "once_at",
        "penalty_until",
        "unlinked_since",
    )

    def __init__(self, now: int, first: bool, policy: MeshPolicy) -> None:
        self.first = first
        self.at_once = False
        self.backoff_ms = policy.backoff_min_ms
        self.next_at = now
        self.dialling = False
        self.dialled_at: int | None = None
        self.once_at: int | None = None
        self.penalty_until = now
        self.flood_ms = 0
        self.unlinked_since = now


class Dialler:
    """Chooses which peers to dial and when: back-off, penalties, and members gone for long."""

    def __init__(self, own: Id16, policy: MeshPolicy, rng: Random, now: int) -> None:
        self._own = own
        self._policy = policy
        self._rng = rng
        self._pursuits: dict[Id16, _Pursuit] = {}
        self._gone_at = now + policy.gone_redial_ms
        self.look_at: int | None = None
        """When the next back-off or wait of a peer ends, as of the last choice."""

    def set_peers(self, peers: Iterable[Id16], now: int, *, starting: bool) -> None:
        """Pursue exactly ``peers``; what is known of those that stay is kept."""
        self._pursuits = {
            peer: self._pursuits.get(peer) or _Pursuit(now, starting, self._policy) for peer in sorted(peers)
        }

    # --- what happened ---

    def failed(self, peer: Id16, now: int) -> None:
        """A dial came to nothing, or its link died before it was up."""
        if pursuit := self._pursuits.get(peer):
            pursuit.dialling = False
            self._back_off(pursuit, now)

    def opened(self, peer: Id16, dialled: bool, now: int) -> None:
        if pursuit := self._pursuits.get(peer):
            if dialled:
                pursuit.dialling = False
                pursuit.first = False
            else:
                self._start_over(pursuit, now)

    def closed(self, peer: Id16, lived_ms: int | None, abnormal: bool, now: int) -> None:
        """The last link to ``peer`` ended; ``lived_ms`` is the time it was up, None if it never was."""
        pursuit = self._pursuits.get(peer)
        if pursuit is None:
            return
        pursuit.unlinked_since = now
        if lived_ms is not None and lived_ms >= self._policy.link_proven_ms:
            self._start_over(pursuit, now)
        if abnormal and lived_ms is not None:
            rested = pursuit.once_at is None or now - pursuit.once_at >= self._policy.link_proven_ms
            pursuit.at_once = rested
            if rested:
                return
        if lived_ms is None or lived_ms < self._policy.link_proven_ms:
            self._back_off(pursuit, now)

    def sighted(self, peer: Id16, now: int) -> None:
        if pursuit := self._pursuits.get(peer):
            self._start_over(pursuit, now)

    def dial_once(self, peer: Id16) -> None:
        """Dial past the back-off, once."""
        if pursuit := self._pursuits.get(peer):
            pursuit.at_once = True

    def penalise(self, peer: Id16, for_ms: int, now: int) -> None:
        """No dialling, past any other rule."""
        if pursuit := self._pursuits.get(peer):
            pursuit.penalty_until = max(pursuit.penalty_until, now + for_ms)
            pursuit.at_once = False

    def penalise_flood(self, peer: Id16, now: int) -> int:
        """Like ``penalise``, for longer each time; for how long."""
        policy = self._policy
        pursuit = self._pursuits.get(peer)
        if pursuit is None:
            return policy.penalty_ms
        pursuit.flood_ms = min(policy.flood_penalty_most_ms, max(policy.penalty_ms, 2 * pursuit.flood_ms))
        self.penalise(peer, pursuit.flood_ms, now)
        return pursuit.flood_ms

    def penalty_ms(self, peer: Id16, now: int) -> int:
        """How long the peer is still to be left alone."""
        pursuit = self._pursuits.get(peer)
        return max(0, pursuit.penalty_until - now) if pursuit else 0

    def _start_over(self, pursuit: _Pursuit, now: int) -> None:
        pursuit.backoff_ms = self._policy.backoff_min_ms
        rested_at = (pursuit.dialled_at or now - pursuit.backoff_ms) + pursuit.backoff_ms
        pursuit.next_at = min(max(now, rested_at), max(now, pursuit.next_at))

    def _back_off(self, pursuit: _Pursuit, now: int) -> None:
        pursuit.backoff_ms = self.next_backoff_ms(pursuit.backoff_ms)
        pursuit.next_at = now + pursuit.backoff_ms
        pursuit.first = False

    def next_backoff_ms(self, last_ms: int) -> int:
        """Decorrelated jitter."""
        least = self._policy.backoff_min_ms
        return min(self._policy.backoff_max_ms, self._rng.randint(least, max(least, 3 * last_ms)))

    # --- what to do ---

    def choose(self, now: int, linked: dict[Id16, None], states: dict[Id16, Liveness | None]) -> list[Id16]:
        """Peers to dial now, within 4 dials at once."""
        self._give_up_hanging(now)
        self.look_at = None
        room = self._policy.dials_most - sum(p.dialling for p in self._pursuits.values())
        if room <= 0:
            return []
        ready: list[tuple[bool, int, Id16]] = []
        ended: list[Id16] = []
        for peer, pursuit in self._pursuits.items():
            if pursuit.dialling or peer in linked:
                continue
            if now >= pursuit.penalty_until:
                if pursuit.at_once:
                    ready.append((False, 0, peer))
                    continue
                if states.get(peer) in (Liveness.GONE, Liveness.LEFT):
                    ended.append(peer)
                    continue
            ready_at = self._ready_at(peer, pursuit)
            if now >= ready_at:
                ready.append((True, pursuit.next_at, peer))
            elif self.look_at is None or ready_at < self.look_at:
                self.look_at = ready_at
        chosen = [peer for _, _, peer in sorted(ready)[:room]]
        if now >= self._gone_at:
            self._gone_at = now + self._policy.gone_redial_ms
            if ended and len(chosen) < room:
                chosen.append(self._rng.choice(ended))
        for peer in chosen:
            pursuit = self._pursuits[peer]
            pursuit.dialling, pursuit.dialled_at = True, now
            if pursuit.at_once:
                pursuit.at_once, pursuit.once_at = False, now
        return chosen

    def _ready_at(self, peer: Id16, pursuit: _Pursuit) -> int:
        """When it is our turn to dial: the larger id leaves the first seconds to the smaller."""
        at = max(pursuit.next_at, pursuit.penalty_until)
        if pursuit.first or self._own < peer:
            return at
        return max(at, pursuit.unlinked_since + self._policy.larger_dials_after_ms)

    def _give_up_hanging(self, now: int) -> None:
        for pursuit in self._pursuits.values():
            hangs = pursuit.dialling and pursuit.dialled_at is not None
            if hangs and now - (pursuit.dialled_at or now) > 2 * self._policy.opening_ms:
                pursuit.dialling = False
                self._back_off(pursuit, now)


class Duel(Enum):
    """What becomes of two links between one pair."""

    KEEP_OLD = "keep_old"
    KEEP_NEW = "keep_new"
    CLOSE_BOTH = "close_both"
    KEEP_BOTH = "keep_both"


def same_life_duel(own: Id16, old: Link, new: Link) -> Duel:
    """Two links of one process life: the one dialled by the smaller id stays.

    If one end dialled both, the later one stays: the dialler must have given up on the earlier. Its HELLO's boot time
    tells both ends the same; at equal times only the dialler closes.
    """
    if old.dialled is not new.dialled:
        smaller_dials = own < old.peer
        return Duel.KEEP_OLD if old.dialled is smaller_dials else Duel.KEEP_NEW
    if new.dialler_hello_ms == old.dialler_hello_ms:
        return Duel.KEEP_NEW if new.dialled else Duel.KEEP_BOTH
    return Duel.KEEP_NEW if new.dialler_hello_ms > old.dialler_hello_ms else Duel.KEEP_OLD
