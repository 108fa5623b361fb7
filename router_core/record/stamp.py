"""Order within one origin: (epoch, seq), and the verdict on a record that arrives.

There is no plausibility limit on jumps: only the owner's signature moves its counters. This module compares;
what follows from a verdict (drop, store, ratchet, alarm) is the mesh machine's.
"""

from enum import Enum
from typing import Final

from msgspec import Struct

SEQ_LAST: Final = 2**62
"""At this seq an origin starts a new epoch."""


class StampVerdict(Enum):
    """What an arriving record is to this reader."""

    NEWER = "newer"
    DUPLICATE = "duplicate"
    OLDER = "older"
    BELOW_FLOOR = "below_floor"
    EQUIVOCATION = "equivocation"
    OWN = "own"


class Stamp(Struct, frozen=True, gc=False, order=True):
    """(epoch, seq), compared in that order."""

    epoch: int
    seq: int


ZERO: Final = Stamp(0, 0)


def judge(
    stamp: Stamp,
    inst: int,
    *,
    own: bool,
    held: Stamp | None,
    held_inst: int,
    same_bytes: bool,
    floor: Stamp = ZERO,
    named: bool = False,
) -> StampVerdict:
    """The verdict on a record with ``stamp`` and ``inst``.

    ``own`` if it speaks of this node; ``held`` and ``held_inst`` the record of that slot here, if any;
    ``same_bytes`` if the two are byte-equal; ``floor`` the highest stamp that may not come back; ``named`` if it is
    an S that the newest V names by hash, which passes below the floor. An equal stamp of another process life
    (``inst``) is ``OLDER``: the first is kept and the clone shows at the links.
    """
    if own:
        return StampVerdict.OWN
    if held is not None and stamp <= held:
        if stamp < held or inst != held_inst:
            return StampVerdict.OLDER
        return StampVerdict.DUPLICATE if same_bytes else StampVerdict.EQUIVOCATION
    if stamp <= floor and not named:
        return StampVerdict.BELOW_FLOOR
    return StampVerdict.NEWER
