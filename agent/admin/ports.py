"""What the admin API asks of the daemon: it reads through these and changes nothing but by a verb."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from msgspec import Struct

from agent.admin.documents import StatusDoc
from agent.admin.questions import ExplainBody
from router_core.placement.record import DecisionRecord
from router_core.placement.request.hints import HintFault
from router_core.policy.placement import PlacementPolicy

Verb = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
"""Takes the arguments and gives the answer, both as JSON objects; raises ``VerbRefused`` to say no."""

Verbs = Mapping[str, Verb]
"""By the name in ``POST /v1/do/NAME``."""


class VerbRefused(Exception):
    """A verb that cannot be done: ``code`` is a short word for programs, ``detail`` a sentence for people."""

    def __init__(self, code: str, detail: str = "") -> None:
        super().__init__(code)
        self.code = code
        self.detail = detail


class NoRoute(Struct, frozen=True, kw_only=True):
    """A request that cannot be made, as the API has no route for it."""

    detail: str


class Status(Protocol):
    """The daemon's own picture, built on demand."""

    def status(self) -> StatusDoc:
        """This node, its members, its engines, now."""

    def view(self) -> dict[str, Any]:
        """The current cluster view, records spelled out."""


class Decisions(Protocol):
    """The reading side of the journal."""

    async def get(self, decision_id: str) -> DecisionRecord | None:
        """One decision, or None."""

    async def recent(
        self, limit: int, *, action: str | None = None, reason: str | None = None, since_ms: int | None = None
    ) -> list[DecisionRecord]:
        """The newest first."""


class DryRuns(Protocol):
    """Decisions that nobody carries out."""

    def explain(self, asked: ExplainBody) -> DecisionRecord | HintFault | NoRoute:
        """What would be decided now. Reserves, keeps and counts nothing."""

    def replay(self, record: DecisionRecord, policy: PlacementPolicy | None) -> DecisionRecord:
        """The choice of ``record`` again, from its factors, by ``policy``, else the one in force. Raises
        ``NotReplayable``."""


class Exposition(Protocol):
    """The metrics."""

    def render(self) -> str:
        """Prometheus text format."""
