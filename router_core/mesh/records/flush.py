"""From dirty slots to RECS: what of it goes out now, in which order, within the limits of one flush.

It reads current records through ``NewestRecords`` and writes nothing but the link's own memory.
"""

from random import Random
from typing import Final, Protocol

from router_core.mesh.links.link import Link, Slot
from router_core.mesh.protocol.actions import SendFrame
from router_core.mesh.protocol.messages import Heard, Recs, encode, pack
from router_core.mesh.records.origin import HeldRecord
from router_core.policy.mesh import MeshPolicy

_AGE_MOST: Final = 2**32 - 1


class NewestRecords(Protocol):
    """Where the newest record of a slot lies, and how old it is."""

    def newest(self, slot: Slot) -> HeldRecord | None: ...

    def age_hint_ms(self, slot: Slot, now: int) -> int: ...


def flush_delay_ms(policy: MeshPolicy, rng: Random, urgent: bool) -> int:
    """How long a change may wait for others to go with it."""
    if urgent:
        return policy.urgent_flush_ms
    spread = policy.flush_ms * policy.flush_jitter_pct // 100
    return policy.flush_ms + rng.randint(-spread, spread)


def flush(link: Link, shelf: NewestRecords, policy: MeshPolicy, rng: Random, now: int) -> list[SendFrame]:
    """The frames of one flush. What does not fit stays dirty for the next one.

    Slots without a record any more are no longer dirty. ``known`` is raised for exactly what is returned.
    """
    link.flush_at = None
    if link.busy_since is not None:
        return []
    slots: list[tuple[Slot, HeldRecord]] = []
    for slot in link.send_order():
        held = shelf.newest(slot)
        if held is None:
            link.dirty.pop(slot)
        else:
            slots.append((slot, held))
    frames: list[SendFrame] = []
    sent = size = 0
    records = [
        Heard(min(shelf.age_hint_ms(slot, now), _AGE_MOST), held.sealed.signed, held.sealed.sig)
        for slot, held in slots
    ]
    for group in pack(records)[: policy.flush_messages]:
        data = encode(Recs(group))
        if frames and size + len(data) > policy.flush_bytes:
            break
        frames.append(SendFrame(link.id, data))
        size += len(data)
        for slot, held in slots[sent : sent + len(group)]:
            link.sent(slot, held.stamp)
        sent += len(group)
    if link.dirty:
        link.flush_at = now + flush_delay_ms(policy, rng, urgent=False)
    if frames:
        link.sent_at = now
    return frames
