"""A line for every engine that takes requests no more, only as a last resort, or again, with the reason: nobody else
writes one."""

from collections.abc import Callable, Mapping

from agent.engines.contract import EndpointHealth, EndpointStatus
from agent.observe.log import Log


class EngineLog:
    """``engine_changed`` after each look at an engine; ``endpoints`` are those that are watched. One that was not looked
    at yet has no reason, and one that starts is given the time."""

    def __init__(self, log: Log, endpoints: Callable[[], Mapping[str, EndpointStatus]]) -> None:
        self._log = log
        self._endpoints = endpoints
        self._told: dict[str, tuple[bool, str | None]] = {}

    def engine_changed(self, status: EndpointStatus) -> None:
        before = self._told.pop(status.name, None)
        up = status.health.is_sound
        if status.name not in self._endpoints() or (not up and status.reason is None):
            return
        told = self._told[status.name] = up, status.reason
        if told == before or (before is None and status.health is EndpointHealth.STARTING):
            return
        fields = {"endpoint": status.name, "engine": status.manifest.engine.value}
        if up:
            self._log.info("engine.up", **fields, models=len(status.owned))
        elif status.health.takes_requests:
            self._log.warning("engine.failing", **fields, reason=status.reason)
        else:
            self._log.warning("engine.down", **fields, reason=status.reason)
