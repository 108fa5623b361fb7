"""The named metrics of requests, and what one decision adds to them.

Fed with finished records and plain numbers; knows no relay and no mesh. Label values come from closed sets of
ours, endpoints and models excepted, which the cap of ``metrics`` bounds.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from agent.observe.log import ORIGINS, Log
from agent.observe.metrics import Counter, Family, Histogram
from router_core.placement.decision.decision import Decision
from router_core.placement.reasons import Action, Reason
from router_core.placement.record import DecisionRecord
from router_core.placement.request.request import HintNote, RequestClass
from router_core.placement.residency.events import Trigger
from router_core.policy.authority import AuthorityMode

_DECISION_SECONDS: Final = (0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)
_LOAD_SECONDS: Final = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_WAIT_SECONDS: Final = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1_000.0)
_CLASSES: Final = tuple((each.value,) for each in RequestClass)
_LOADS: Final = (
    ("request", "ok"),
    ("request", "failed"),
    *itertools.product((trigger.value for trigger in Trigger), ("ok", "failed", "overdue")),
)
_LN_ERROR: Final = (-2.0, -1.0, -0.5, -0.2, -0.05, 0.05, 0.2, 0.5, 1.0, 2.0)


class DecisionMetrics:
    """What was decided and how it went. ``decided`` once per decision, ``ended`` once per request."""

    def __init__(self) -> None:
        self._decisions = Counter("pairmesh_decisions_total", "Decisions.", ("action", "reason"))
        self._seconds = Histogram(
            "pairmesh_decision_seconds", "Time one decision took.", bounds=_DECISION_SECONDS
        )
        self._excluded = Counter("pairmesh_excluded_total", "Rows left out of a choice.", ("code",))
        self._hints = Counter("pairmesh_hints_total", "Hints and what became of them.", ("hint", "outcome"))
        self._degraded = Counter("pairmesh_degraded_total", "Choices from what was left.", ("kind",))
        self._authority = Counter(
            "pairmesh_authority_total", "Decisions by what came of asking the authority.", ("outcome",)
        )
        self._errors = Histogram(
            "pairmesh_prediction_error_ln", "ln(actual / predicted).", ("kind",), bounds=_LN_ERROR
        )
        self._attempts = Counter("pairmesh_attempts_total", "Attempts by how they ended.", ("result",))
        self._refusals = Counter("pairmesh_refusals_total", "Requests a peer's ingress declined.", ("cause",))
        self._cancelled = Counter("pairmesh_cancelled_total", "Requests cut short.", ("by",))
        self._shed = Counter("pairmesh_shed_total", "Requests shed by saturation.", ("class",), _CLASSES)
        self._waits = Histogram(
            "pairmesh_queue_wait_seconds",
            "Time requests waited in the router for room.",
            ("class",),
            known=_CLASSES,
            bounds=_WAIT_SECONDS,
        )

    def decided(self, decision: Decision, seconds: float) -> None:
        self._decisions.inc(decision.action.value, decision.reason.value)
        self._seconds.observe(seconds)
        if decision.action is Action.SHED:
            self._shed.inc(decision.evidence.request.hints.request_class.value)
        for code, rows in decision.counts.items():
            self._excluded.inc(code.value, by=rows)
        for note in decision.hints:
            self._hints.inc(note.hint, note.outcome.value)
        for kind in decision.degraded:
            self._degraded.inc(kind)
        if decision.authority.mode is not AuthorityMode.OFF:
            self._authority.inc(decision.authority.outcome.value)

    def misunderstood(self, note: HintNote) -> None:
        """A request was refused for a hint, before anything was decided."""
        self._decisions.inc(Action.REJECT.value, Reason.HINT_MALFORMED.value)
        self._hints.inc(note.hint, note.outcome.value)

    def ended(self, record: DecisionRecord) -> None:
        for attempt in record.attempts:
            if attempt.refused is None:
                self._attempts.inc(attempt.result)
            else:
                self._refusals.inc(attempt.refused)
        end = record.outcome
        if end is None:
            return
        if end.held_ms is not None:
            self._waits.observe(end.held_ms / 1000.0, record.req.request_class)
        if end.cancelled_by is not None:
            self._cancelled.inc(end.cancelled_by)
        for kind, error in (("ttft", end.err_ttft), ("ect", end.err_ect)):
            if error is not None:
                self._errors.observe(error, kind)

    def collect(self) -> Iterable[Family]:
        return itertools.chain.from_iterable(
            instrument.collect()
            for instrument in (
                self._decisions,
                self._seconds,
                self._excluded,
                self._hints,
                self._degraded,
                self._authority,
                self._errors,
                self._attempts,
                self._refusals,
                self._cancelled,
                self._shed,
                self._waits,
            )
        )


class RelayMetrics:
    """Metrics of the relay, set from its reports."""

    def __init__(self) -> None:
        self.seconds = Histogram("pairmesh_relay_seconds", "Time of one request by phase.", ("phase",))
        self.bytes = Counter("pairmesh_relay_bytes_total", "Body bytes passed.", ("dir",))
        self.retries_reused = Counter(
            "pairmesh_relay_retries_reused_total", "Requests sent again because a kept connection had ended."
        )
        self.rejected = Counter("pairmesh_relay_rejected_total", "Requests refused at intake.", ("code",))

    def collect(self) -> Iterable[Family]:
        return itertools.chain.from_iterable(
            instrument.collect()
            for instrument in (
                self.seconds,
                self.bytes,
                self.retries_reused,
                self.rejected,
            )
        )


class LoadMetrics:
    """Models that engines of this node loaded: why, how that ended, how long it took."""

    def __init__(self) -> None:
        self.loads = Counter(
            "pairmesh_model_loads_total",
            "Loads of this node's engines, by a request or ahead of it.",
            ("trigger", "result"),
            known=_LOADS,
        )
        self.seconds = Histogram(
            "pairmesh_model_load_seconds",
            "Time from when a load was ordered or seen to a model that serves.",
            bounds=_LOAD_SECONDS,
        )

    def collect(self) -> Iterable[Family]:
        return itertools.chain(self.loads.collect(), self.seconds.collect())


class Alarms:
    """Turns what a machine wants told into one log line and one count. ``called`` tells of a node, given
    as it stands in the machine's fields, its name and its short id, None if it is nobody people know."""

    def __init__(
        self, log: Log, room: str, called: Callable[[str], tuple[str, str] | None] = lambda _: None
    ) -> None:
        self._log = log
        self._room = room
        self._called = called
        self._count = Counter(f"pairmesh_{room}_alarms_total", f"{room.capitalize()} alarms.", ("code",))

    def notify(self, code: str, fields: Mapping[str, object]) -> None:
        """``code`` is from a closed set of the machine's."""
        self._count.inc(code)
        told = dict(fields)
        for field in ORIGINS:
            id16 = fields.get(field)
            known = self._called(id16) if isinstance(id16, str) else None
            if known is not None:
                told[field], told[f"{field}_id"] = known
        self._log.warning(f"{self._room}.{code}", **told)

    def collect(self) -> Iterable[Family]:
        return self._count.collect()
