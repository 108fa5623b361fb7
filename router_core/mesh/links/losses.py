"""Links that broke abnormally: those of this node, told in its V, and those that other members tell of.

An own entry lives 30 s, until a new link to that node, or until a newer V of it. One voice counts for nothing: a
subject is lost by hearsay only while at least two others list it at a stamp not older than the one held here.
"""

from collections.abc import Callable

from router_core import limits
from router_core.ids import Id16
from router_core.policy.mesh import MeshPolicy
from router_core.record.stamp import Stamp
from router_core.record.state import LostLink


class OwnLosses:
    """What goes into the own V as ``lost``."""

    def __init__(self, policy: MeshPolicy) -> None:
        self._policy = policy
        self._entries: dict[Id16, tuple[Stamp, int]] = {}

    def add(self, peer: Id16, newest: Stamp, now: int) -> None:
        self._entries.pop(peer, None)
        self._entries[peer] = (newest, now + self._policy.lost_kept_ms)

    def forget(self, peer: Id16) -> None:
        """A new link, or a newer V."""
        self._entries.pop(peer, None)

    def current(self, now: int) -> tuple[LostLink, ...]:
        """At most 8, newest first."""
        for peer in [peer for peer, (_, until) in self._entries.items() if now >= until]:
            del self._entries[peer]
        newest = list(self._entries.items())[: -limits.LOST - 1 : -1]
        return tuple(LostLink(id16=peer, epoch=at.epoch, seq=at.seq) for peer, (at, _) in newest)


class Hearsay:
    """Who lists whom as lost in its current V."""

    def __init__(self) -> None:
        self._lists: dict[Id16, tuple[LostLink, ...]] = {}

    def hear(self, reporter: Id16, lost: tuple[LostLink, ...]) -> None:
        """The reporter's newest V has this list."""
        if lost:
            self._lists[reporter] = lost
        else:
            self._lists.pop(reporter, None)

    def forget(self, reporter: Id16) -> None:
        self._lists.pop(reporter, None)

    @property
    def is_silent(self) -> bool:
        return not self._lists

    def voices(self, subject: Id16, held: Stamp, counts: Callable[[Id16], bool]) -> int:
        """How many other members for whom ``counts`` is true list ``subject`` at ``held`` or later."""
        return sum(
            reporter != subject
            and counts(reporter)
            and any(entry.id16 == subject and Stamp(entry.epoch, entry.seq) >= held for entry in lost)
            for reporter, lost in self._lists.items()
        )
