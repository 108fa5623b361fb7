"""Whether an engine, here or at a peer, still gives signs of life, as its owner's newest record tells. Pure.

An owner calls an engine failing that is silent (answers nothing at all), or of which it doubts that it works (stuck: it
answers questions and does nothing; deaf: it has more to do than ever before when it answered). Which of the two shows in
the age of what the engine last told: of a doubt its owner tells none.
"""

from enum import Enum

from router_core.record.state import EngineState
from router_core.view.cluster import NodeView

_SILENT_DS = 20
_RECORDS = 2
"""Records in a row, younger than the request, that know nothing of any request there."""


class Vital(Enum):
    """Whether an engine gives signs of life."""

    ALIVE = "alive"
    SILENT = "silent"
    DOUBTFUL = "doubtful"


class Watch:
    """One attempt's memory of the records that it has looked at."""

    __slots__ = ("_empty", "_seq")

    def __init__(self) -> None:
        self._seq = -1
        self._empty = 0

    def look(self, node: NodeView | None, endpoint: str, asked_ms: float | None) -> Vital:
        """What the record of ``node`` says of ``endpoint``. ``asked_ms``: when a peer asked for the body of a request that
        it counts; None if it is not to be looked for there."""
        if node is None or node.volatile is None or node.static is None:
            return Vital.ALIVE
        volatile = node.volatile
        place = next((at for at, engine in enumerate(node.static.engines) if engine.name == endpoint), None)
        if place is None or place >= len(volatile.engines):
            return Vital.ALIVE
        engine = volatile.engines[place]
        if asked_ms is not None and node.seq != self._seq and node.taken_ms > asked_ms:
            self._seq = node.seq
            self._empty = self._empty + 1 if not engine.ours else 0
        if self._empty >= _RECORDS:
            return Vital.SILENT
        if engine.state != EngineState.FAILING:
            return Vital.ALIVE
        return Vital.SILENT if (engine.age_ds or 0) >= _SILENT_DS else Vital.DOUBTFUL
