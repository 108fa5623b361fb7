"""A machine that only remembers what it was told and answers as a test says, to drive links by hand."""

from collections.abc import Callable
from dataclasses import dataclass, field

from router_core.ids import Id16
from router_core.mesh.protocol.actions import Action
from router_core.mesh.protocol.events import Event
from router_core.mesh.status import MeshStatus
from router_core.record.envelope import Sealed

Reply = Callable[[Event], list[Action]]


@dataclass
class ScriptedMachine:
    """``reply`` maps an event to actions; ``deadline`` and ``backlog`` are set by the test."""

    reply: Reply = lambda event: []
    deadline: int | None = None
    backlog: bool = False
    sealed: Sealed | None = None
    fresh_actions: list[Action] = field(default_factory=list)
    queued: list[Action] = field(default_factory=list)
    told: list[Event] = field(default_factory=list)
    at: list[int] = field(default_factory=list)

    def handle(self, event: Event, now: int) -> list[Action]:
        self.told.append(event)
        self.at.append(now)
        queued, self.queued = self.queued, []
        return queued + self.reply(event)

    def fresh_state(self, now: int) -> tuple[Sealed | None, list[Action]]:
        return self.sealed, self.fresh_actions

    def picture(self, now: int) -> MeshStatus:
        return MeshStatus(
            id16=Id16(bytes(16)),
            epoch=1,
            inst=1,
            seq=len(self.told),
            lonely=False,
            conflicted=False,
            degraded=False,
            exhausted=False,
            members=(),
            links=(),
            counts=(),
        )
