"""A line of the log for each member that comes, falls silent, goes, or is back: what an operator asks the log first."""

from collections.abc import Callable, Iterable
from typing import Final

from agent.observe.log import Log, Severity
from router_core.ids import Id16, short_id
from router_core.record.membership import Liveness, ViewChange
from router_core.view.cluster import ClusterView

_ALIVE: Final = frozenset({Liveness.FRESH, Liveness.LATE})
_SAID: Final = {
    Liveness.SUSPECT: (Severity.WARNING, "member.suspect"),
    Liveness.GONE: (Severity.WARNING, "member.gone"),
    Liveness.LEFT: (Severity.INFO, "member.left"),
}
"""An operator's removal is told as such; who was not heard in this process life yet is not told at all."""


class MemberLog:
    """``view`` is the current one, with the changes in it. Lateness is told by nobody: it comes and goes by itself."""

    def __init__(self, view: Callable[[], ClusterView], log: Log) -> None:
        self._view = view
        self._log = log
        self._told: dict[Id16, Liveness] = {}

    def heard(self, changes: Iterable[ViewChange]) -> None:
        """The mesh's verdict on these members, changed or not."""
        for change in changes:
            if change.state is Liveness.REMOVED:
                self._told.pop(change.origin, None)
                continue
            state = Liveness.FRESH if change.state in _ALIVE else change.state
            before = self._told.get(change.origin)
            if state is not before and (state is Liveness.FRESH or state in _SAID):
                if before is None and state is not Liveness.FRESH:
                    continue
                self._told[change.origin] = state
                self._tell(change.origin, state, before)

    def _tell(self, origin: Id16, state: Liveness, before: Liveness | None) -> None:
        view = self._view()
        member = view.members.get(origin)
        if member is None:
            del self._told[origin]
            return
        known = {"node": view.labels[member.node_id], "id": short_id(member.node_id)}
        if state is Liveness.FRESH:
            event = "member.new" if before is None else "member.back"
            self._log.event(Severity.INFO, event, known)
        else:
            severity, event = _SAID[state]
            self._log.event(severity, event, known)
