"""The limits of own endpoints whose engines batch and do not tell how many requests they take: measured by what passes.

One per endpoint and run of the daemon; what it comes to is published as the endpoint's slots.
"""

from collections.abc import Callable, Mapping

from agent.effects.clock import Clock
from agent.engines.contract import EndpointStatus
from agent.relay.ports import AttemptReport
from router_core.profile.concurrency import ConcurrencyLimit
from router_core.router.failure import FailureClass
from router_core.router.outcome import Result


class OwnLimits:
    """``told(endpoint, slots)`` hears of each limit that moved."""

    def __init__(
        self,
        endpoints: Callable[[], Mapping[str, EndpointStatus]],
        told: Callable[[str, int], None],
        clock: Clock,
    ) -> None:
        self._endpoints = endpoints
        self._told = told
        self._clock = clock
        self._limits: dict[str, ConcurrencyLimit] = {}

    def work_changed(self, endpoint: str, in_flight: int) -> None:
        """A request entered or left an own endpoint."""
        now = self._clock.boot_ms()
        if (limit := self._limit(endpoint, now)) is not None and limit.changed(in_flight, now):
            self._told(endpoint, limit.value)

    def attempted(self, report: AttemptReport, tokens: int | None) -> None:
        """An attempt at an own endpoint ended; its answer had so many ``tokens``, as far as that is known."""
        choice, marks = report.routed.choice, report.marks
        now = self._clock.boot_ms()
        limit = self._limit(choice.endpoint_name, now) if choice.is_self else None
        if limit is None:
            return
        moved = False
        if report.outcome.failure is FailureClass.BUSY:
            moved = limit.busy(now)
        elif report.outcome.result is Result.DONE and marks is not None and choice.resident:
            sent, first = marks.sent_ms, marks.first_content_ms
            if marks.content_events is not None and first is not None:
                moved = limit.ended(sent, now, took_ms=first - sent)
            elif marks.content_events is None and tokens:
                moved = limit.ended(sent, now, took_ms=marks.last_byte_ms - sent, tokens=tokens)
        if moved:
            self._told(choice.endpoint_name, limit.value)

    def _limit(self, endpoint: str, now: int) -> ConcurrencyLimit | None:
        status = self._endpoints().get(endpoint)
        if status is None or status.measured_slots is None:
            self._limits.pop(endpoint, None)
            return None
        limit = self._limits.get(endpoint)
        if limit is None:
            limit = self._limits[endpoint] = ConcurrencyLimit(now)
        return limit
