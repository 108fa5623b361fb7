"""Loads that nobody here ordered: a request made an engine load its model, ours or another client's.

Told from what engines report between two looks. Rules: what this node ordered is counted by whoever ordered it; an engine
that was away is no evidence of a load; a load too short to be seen counts, and nobody knows how long it took.
"""

from collections.abc import Callable, Mapping
from typing import Final

from agent.effects.clock import Clock
from agent.engines.contract import EndpointStatus, ResidencyState
from agent.observe.instruments import LoadMetrics

REQUEST: Final = "request"
_AWAY: Final = (None, ResidencyState.FAILED)


class SeenLoads:
    """Counts into ``metrics``. ``ordered`` tells of a model (endpoint, name) whether its load is an order of ours."""

    def __init__(
        self,
        metrics: LoadMetrics,
        *,
        endpoints: Callable[[], Mapping[str, EndpointStatus]],
        ordered: Callable[[tuple[str, str]], bool],
        clock: Clock,
    ) -> None:
        self._metrics = metrics
        self._endpoints = endpoints
        self._ordered = ordered
        self._clock = clock
        self._held: dict[str, dict[str, ResidencyState]] = {}
        self._began_ms: dict[tuple[str, str], int] = {}

    def engine_changed(self, status: EndpointStatus) -> None:
        """What an engine holds now, after each look at it."""
        endpoint = status.name
        before = self._held.pop(endpoint, None)
        if status.load is None or endpoint not in self._endpoints():
            for key in [key for key in self._began_ms if key[0] == endpoint]:
                del self._began_ms[key]
            return
        held = self._held[endpoint] = {model.native_id: model.state for model in status.resident}
        for native in held.keys() | (before or {}).keys():
            was, now = None if before is None else before.get(native), held.get(native)
            if was is not now:
                self._moved(status, native, was, now, is_first=before is None)

    def _moved(
        self,
        status: EndpointStatus,
        native: str,
        was: ResidencyState | None,
        now: ResidencyState | None,
        *,
        is_first: bool,
    ) -> None:
        key = status.name, native
        if now is ResidencyState.LOADING:
            self._began_ms[key] = self._clock.boot_ms()
            return
        began_ms = self._began_ms.pop(key, None)
        name = next((owned.name for owned in status.owned if owned.native_id == native), None)
        if is_first or name is None or self._ordered((status.name, name)):
            return
        if now is ResidencyState.RESIDENT and was is not ResidencyState.UNLOADING:
            self._metrics.loads.inc(REQUEST, "ok")
            if began_ms is not None:
                self._metrics.seconds.observe((self._clock.boot_ms() - began_ms) / 1_000)
        elif was is ResidencyState.LOADING and now in _AWAY:
            self._metrics.loads.inc(REQUEST, "failed")
