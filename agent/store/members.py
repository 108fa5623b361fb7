"""One file per subject of the roster, and one per peer for the addresses it was last reached at.

Statements are kept as the signed bytes they are; whether they still convince is for the reader to verify. A
roster file that cannot be believed, nor the one before it, is renamed ``.corrupt`` and the rest is used.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct

from agent.effects.aside import Aside, quietly
from agent.store.atomic import remove_file, set_aside
from agent.store.checked import Damaged, Newer, older_or_none, read_checked_or_last, write_checked
from agent.store.folders import too_new
from router_core import limits
from router_core.ids import NodeId, parse_node_id
from router_core.record.envelope import Sealed
from router_core.record.state import Address


class RosterFile(Struct, frozen=True, kw_only=True):
    """What is stored of one subject. All but the statements is there to be read by people and tools."""

    admission: int
    removed: bool
    endorsements: tuple[Sealed, ...]
    removal: Sealed | None
    der: bytes
    roles: int
    name: str


class RosterFiles:
    """``roster/<node_id>`` below one state folder."""

    def __init__(self, state: Path) -> None:
        self._folder = state / "roster"

    def load(self) -> tuple[dict[NodeId, RosterFile], list[NodeId]]:
        """All that can be believed, and whose files were quarantined. Raises ``RefuseToStart`` for a file of a newer
        version: without whom it tells of this node would be alone."""
        found: dict[NodeId, RosterFile] = {}
        quarantined: list[NodeId] = []
        for node_id in _node_ids(self._folder):
            path = self._folder / node_id
            try:
                file = read_checked_or_last(path, RosterFile)
            except Newer as newer:
                raise too_new(newer) from None
            except Damaged:
                self.quarantine(node_id)
                quarantined.append(node_id)
                continue
            if file is not None:
                found[node_id] = file
        return found, quarantined

    def save(self, node_id: NodeId, file: RosterFile) -> None:
        """Store one subject; raises ``OSError``. A removal is written twice, so that not even the copy kept
        for a damaged file still calls the subject a member."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        write_checked(self._folder / node_id, file)
        if file.removed:
            write_checked(self._folder / node_id, file)

    def quarantine(self, node_id: NodeId) -> None:
        """Set one subject's files aside: their content is whole but does not convince."""
        for path in (self._folder / node_id, self._folder / f"{node_id}.last"):
            if path.exists():
                set_aside(path)


class PeerFiles:
    """``peers/<node_id>``: the last good addresses, best first. Losing them costs a search, nothing else. ``aside`` hears
    of each file of a newer version."""

    def __init__(self, state: Path, aside: Aside = quietly) -> None:
        self._folder = state / "peers"
        self._aside = aside

    def load(self) -> dict[NodeId, tuple[Address, ...]]:
        """All that can be believed; a damaged file is dropped."""
        found: dict[NodeId, tuple[Address, ...]] = {}
        for node_id in _node_ids(self._folder):
            try:
                addresses = older_or_none(
                    partial(read_checked_or_last, self._folder / node_id, tuple[Address, ...]), self._aside
                )
            except Damaged:
                remove_file(self._folder / node_id)
                continue
            if addresses:
                found[node_id] = addresses[: limits.ADDRESSES]
        return found

    def save(self, node_id: NodeId, addresses: Sequence[Address]) -> None:
        """Store the first 8 of ``addresses``; raises ``OSError``."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        write_checked(self._folder / node_id, list(addresses[: limits.ADDRESSES]))

    def forget(self, node_id: NodeId) -> None:
        if self._folder.exists():
            remove_file(self._folder / node_id)


def _node_ids(folder: Path) -> list[NodeId]:
    """The subjects that have a file or a kept one, in order."""
    if not folder.is_dir():
        return []
    names = {path.name.removesuffix(".last") for path in folder.iterdir()}
    return sorted(node_id for name in names if (node_id := parse_node_id(name)) is not None)
