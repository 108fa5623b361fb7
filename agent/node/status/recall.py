"""Decisions by their id: those of requests under way, and those the journal keeps."""

from collections.abc import Callable

from msgspec.structs import replace

from agent.node.routing.placement import Placing
from agent.observe.journal import Journal
from router_core.placement.record import DecisionRecord


class Recalling:
    """Satisfies the admin API's ``Decisions``. A request under way has a record without attempts and outcome.

    ``settle`` is called before each look: it brings in what has ended and is not journaled yet.
    """

    def __init__(self, placing: Placing, journal: Journal, settle: Callable[[], None]) -> None:
        self._placing = placing
        self._journal = journal
        self._settle = settle

    async def recent(
        self, limit: int, *, action: str | None = None, reason: str | None = None, since_ms: int | None = None
    ) -> list[DecisionRecord]:
        """The newest decisions first, as ``Journal.recent``."""
        self._settle()
        return await self._journal.recent(limit, action=action, reason=reason, since_ms=since_ms)

    async def get(self, decision_id: str) -> DecisionRecord | None:
        """One decision, or None."""
        self._settle()
        under_way = self._placing.open.get(decision_id)
        if under_way is not None and under_way.decision is not None:
            record, clock = under_way.decision.record, self._placing.clock
            return replace(record, at_ms=clock.wall_ms() - (clock.boot_ms() - record.boot_ms))
        return await self._journal.get(decision_id)
