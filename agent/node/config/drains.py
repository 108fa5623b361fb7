"""Which of this node's endpoints take nothing new: by an operator's word, or because their manifest went away.

Active, draining, drained. What drains takes no new work at once; what is under way goes on for ``MOST_MS`` and is
given up then. A drain ends by ``undo``, or with the process. Refuses to know who publishes it.
"""

from collections.abc import Callable, Iterable

from msgspec import Struct

from agent.admin.documents import DrainDoc
from agent.effects.clock import Clock

MOST_MS = 300_000


class _Drain(Struct, kw_only=True):
    """``asked``: an operator did; ``leaving``: its manifest is gone. ``given_up``: what was left has been cut off."""

    since_ms: int
    asked: bool = False
    leaving: bool = False
    given_up: bool = False


class Drains:
    """The drains of one node; None stands for the node, endpoints to come included. ``in_flight`` counts requests at an
    endpoint, ``cut`` gives up those that are left there, ``changed`` hears of every beginning and end of a drain."""

    def __init__(
        self,
        *,
        endpoints: Callable[[], Iterable[str]],
        in_flight: Callable[[str], int],
        cut: Callable[[str], None],
        changed: Callable[[], None],
        clock: Clock,
    ) -> None:
        self._endpoints = endpoints
        self._in_flight = in_flight
        self._cut = cut
        self._changed = changed
        self._clock = clock
        self._drains: dict[str | None, _Drain] = {}

    def __contains__(self, endpoint: object) -> bool:
        """Whether this endpoint, or the whole node, was told to drain."""
        return endpoint in self._drains

    def begin(self, endpoint: str | None) -> None:
        """An operator wants the endpoint, or the node, to take nothing new."""
        self._begun(endpoint).asked = True
        self._changed()

    def undo(self, endpoint: str | None) -> None:
        """The operator takes it back; of the node, for all its endpoints. One without a manifest goes on draining."""
        for name in [endpoint] if endpoint is not None else tuple(self._drains):
            if name in self._drains:
                self._drains[name].asked = False
                self._end(name)
        self._changed()

    def leave(self, endpoint: str) -> None:
        """The endpoint has no manifest any more."""
        drain = self._begun(endpoint)
        if not drain.leaving:
            drain.leaving = True
            self._changed()

    def stay(self, endpoint: str) -> None:
        """The endpoint has a manifest."""
        drain = self._drains.get(endpoint)
        if drain is not None and drain.leaving:
            drain.leaving = False
            self._end(endpoint)
            self._changed()

    def gone(self, endpoint: str) -> None:
        """The endpoint is not watched any more."""
        del self._drains[endpoint]
        self._changed()

    def told(self, endpoint: str | None) -> DrainDoc:
        """How far the endpoint, or the node, is."""
        drain = self._drains.get(endpoint)
        left = sum(map(self._in_flight, self._names(endpoint)))
        stage = "active" if drain is None else "draining" if left else "drained"
        leaving = drain is not None and drain.leaving
        why = "its manifest is gone or not fit" if leaving else "" if drain is None else "asked for"
        return DrainDoc(endpoint=endpoint, stage=stage, in_flight=left, why=why)

    def docs(self) -> tuple[DrainDoc, ...]:
        """Everything that drains."""
        return tuple(self.told(name) for name in self._drains)

    def sweep(self) -> list[str]:
        """Give up what is overdue; the endpoints that leave and are empty, which need not be watched longer."""
        now = self._clock.boot_ms()
        for name, drain in tuple(self._drains.items()):
            if now - drain.since_ms >= MOST_MS and not drain.given_up:
                drain.given_up = True
                for endpoint in self._names(name):
                    self._cut(endpoint)
        return [
            name
            for name, drain in self._drains.items()
            if name is not None and drain.leaving and not self._in_flight(name)
        ]

    def _names(self, endpoint: str | None) -> tuple[str, ...]:
        return tuple(self._endpoints()) if endpoint is None else (endpoint,)

    def _begun(self, endpoint: str | None) -> _Drain:
        return self._drains.setdefault(endpoint, _Drain(since_ms=self._clock.boot_ms()))

    def _end(self, endpoint: str | None) -> None:
        drain = self._drains[endpoint]
        if not (drain.asked or drain.leaving):
            del self._drains[endpoint]
