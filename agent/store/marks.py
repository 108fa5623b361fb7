"""The marks a node must not forget: its epoch, and the floors below which no record of a peer may come back.

``epoch`` is raised and synced before the first publish. When both copies are lost or damaged the count starts
at 1 and the node's own record, heard from peers, lifts it.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from msgspec import Struct

from agent.effects.aside import Aside, quietly
from agent.store.atomic import last_of
from agent.store.checked import Damaged, older_or_none, read_checked, read_checked_or_last, write_checked
from router_core.ids import Id16
from router_core.record.envelope import Sealed
from router_core.record.stamp import ZERO, Stamp
from router_core.record.state import U63


class Floor(Struct, frozen=True, array_like=True):
    """The newest stamps of S, V and L of one origin, a zero stamp where none was held, and the record that proves it."""

    static: Stamp
    volatile: Stamp
    leave: Stamp = ZERO
    proof: Sealed | None = None


class MarkFiles:
    """``epoch`` and ``floors`` below one state folder. ``aside`` hears of each file of a newer version."""

    def __init__(self, state: Path, aside: Aside = quietly) -> None:
        self._epoch = state / "epoch"
        self._floors = state / "floors"
        self._aside = aside

    def epoch(self) -> int:
        """The highest epoch this node may have used (0: none known); the next process life uses one more."""
        try:
            epoch = older_or_none(partial(read_checked, self._epoch, U63), self._aside)
        except Damaged:
            epoch = None
        if epoch is not None:
            return epoch
        try:
            before = older_or_none(partial(read_checked, last_of(self._epoch), U63), self._aside)
        except Damaged:
            before = None
        return 0 if before is None else before + 1

    def save_epoch(self, epoch: int) -> None:
        """Store ``epoch`` and sync it; raises ``OSError``."""
        write_checked(self._epoch, epoch)

    def floors(self) -> dict[Id16, Floor]:
        """The floors last saved; empty if there are none or none can be believed."""
        try:
            stored = older_or_none(
                partial(read_checked_or_last, self._floors, dict[bytes, Floor]), self._aside
            )
        except Damaged:
            return {}
        return {Id16(key): floor for key, floor in (stored or {}).items() if len(key) == 16}

    def save_floors(self, floors: Mapping[Id16, Floor]) -> None:
        """Store ``floors``; raises ``OSError``."""
        write_checked(self._floors, dict(floors))
