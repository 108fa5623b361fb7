"""The verb ``drain``: have an endpoint of this node, or all of them, take nothing new, or take it back."""

from collections.abc import Callable, Collection
from typing import Annotated, Any, Protocol

from msgspec import Meta, Struct, to_builtins

from agent.admin.arguments import Audit, typed
from agent.admin.documents import DrainDoc
from agent.admin.ports import VerbRefused, Verbs


class DrainsPort(Protocol):
    """The drains of this node; None stands for the node. ``agent.node.config.drains.Drains`` has it."""

    def begin(self, endpoint: str | None) -> None: ...

    def undo(self, endpoint: str | None) -> None: ...

    def told(self, endpoint: str | None) -> DrainDoc: ...


class DrainArguments(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``endpoint`` None: the whole node."""

    endpoint: Annotated[str, Meta(max_length=64)] | None = None
    undo: bool = False


def drain_verbs(drains: DrainsPort, endpoints: Callable[[], Collection[str]], audit: Audit) -> Verbs:
    """The verb over ``drains``; ``endpoints`` are the names of this node's own."""

    async def drain(arguments: dict[str, Any]) -> dict[str, Any]:
        asked = typed(arguments, DrainArguments)
        if asked.endpoint is not None and asked.endpoint not in endpoints():
            known = ", ".join(sorted(endpoints())) or "none"
            raise VerbRefused("endpoint_unknown", f"this node has no such endpoint; it has: {known}")
        if asked.undo:
            drains.undo(asked.endpoint)
        else:
            drains.begin(asked.endpoint)
        told = drains.told(asked.endpoint)
        audit.audit(
            "drain.undone" if asked.undo else "drain.begun", endpoint=asked.endpoint, stage=told.stage
        )
        if asked.undo and told.stage != "active":
            raise VerbRefused("still_draining", told.why)
        answer: dict[str, Any] = to_builtins(told)
        return answer

    return {"drain": drain}
