"""Decisions by their id: those of requests under way, and those the journal keeps."""

from agent.node.placing import Placing
from agent.observe.journal import Journal
from router_core.placement.record import DecisionRecord


class Recalling:
    """Satisfies the admin API's ``Decisions``. A request under way has a record without attempts and outcome."""

    def __init__(self, placing: Placing, journal: Journal) -> None:
        self._placing = placing
        self._journal = journal
        self.recent = journal.recent

    async def get(self, decision_id: str) -> DecisionRecord | None:
        """One decision, or None."""
        under_way = self._placing.open.get(decision_id)
        if under_way is not None and under_way.decision is not None:
            return under_way.decision.record
        return await self._journal.get(decision_id)
