"""Where finished attempts and requests go: the record, the profiles, the engines' monitors, metrics, the log.

What a fault teaches is told at once. A request that went well waits a moment, so that its bookkeeping keeps neither its
own client nor anybody else's waiting: at most ``SETTLE_S`` and ``WAITING_MOST``, always in order, and never longer than
until somebody asks (``settle``). The end of a turn of a session does not wait: the next turn asks where it was served.
Nothing here sees a body: windows of an answer are read once for speeds and dropped.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from agent.engines.watch import EngineWatch
from agent.node.routing.learning import Learning, Lesson
from agent.node.routing.placement import Placing
from agent.node.routing.targets import NodeTargets
from agent.node.state.concurrency import OwnLimits
from agent.observe.access import AccessLog
from agent.observe.capture import report_crash
from agent.observe.instruments import RelayMetrics
from agent.observe.log import Log
from agent.observe.metrics import Family
from agent.relay.ports import AccessLine, AttemptReport
from router_core.placement.reasons import Reason
from router_core.router.failure import Cause, FailureClass
from router_core.router.outcome import Result

SETTLE_S: Final = 0.002
WAITING_MOST: Final = 256
NEWS_SAMPLES: Final = 5
"""What the first answers of a model at an endpoint tell changes the next choice, so it is taken in before that."""
"""Ended requests that wait for their bookkeeping; each holds the windows of an answer, 20 KiB at most."""
_DENIED = frozenset({FailureClass.ABSENT, FailureClass.ROUTE})
_UNREACHED = frozenset({Cause.CONNECT_REFUSED, Cause.CONNECT_FAILED, Cause.CONNECT_TIMEOUT})


class Observing:
    """Satisfies the relay's ``Observer``."""

    def __init__(
        self,
        *,
        placing: Placing,
        learning: Learning,
        engines: EngineWatch,
        targets: NodeTargets,
        metrics: RelayMetrics,
        access: AccessLog,
        log: Log,
        limits: OwnLimits | None = None,
        learned: Callable[[], None] | None = None,
    ) -> None:
        self._limits = limits
        self._learned = learned
        self._is_news = False
        self._placing = placing
        self._learning = learning
        self._engines = engines
        self._targets = targets
        self._metrics = metrics
        self._access = access
        self._log = log
        self._waiting: deque[tuple[AttemptReport, Lesson | None] | AccessLine] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def attempted(self, report: AttemptReport) -> None:
        """One attempt ended. A fault in its books is ours, and strikes no request."""
        try:
            self._attempted(report)
        except Exception as exc:
            self.failed("observing", exc)

    def _attempted(self, report: AttemptReport) -> None:
        """What an attempt teaches depends on what the engine does now: that much is noted at once."""
        lesson = self._learning.lesson_of(report) if report.is_work else None
        self._is_news = self._is_news or (lesson is not None and lesson.row.samples < NEWS_SAMPLES)
        if report.outcome.result is Result.DONE:
            if report.routed.choice.is_self and report.is_work:
                self._engines.report_served(report.routed.choice.endpoint_name, report.dialect)
            self._waiting.append((report, lesson))
            return
        self.settle()
        self._note(report, lesson)
        self._tell_watchers(report)

    def answered(self, line: AccessLine) -> None:
        """One request ended: its line in the access log, its record in the journal."""
        waiting = self._waiting
        waiting.append(line)
        if len(waiting) >= WAITING_MOST or self._is_news or self._placing.is_followed(line):
            self.settle()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SETTLE_S, self.settle)

    def settle(self) -> None:
        """Keep the books of everything that has ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting = self._waiting
        while waiting:
            ended = waiting.popleft()
            try:
                if isinstance(ended, AccessLine):
                    self._close(ended)
                else:
                    self._note(*ended)
            except Exception as exc:
                self.failed("observing", exc)
        if self._is_news and self._learned is not None:
            self._learned()
        self._is_news = False

    def collect(self) -> Iterable[Family]:
        """Nothing of its own: what others expose is to be up to date."""
        self.settle()
        return ()

    def _note(self, report: AttemptReport, lesson: Lesson | None) -> None:
        timings = self._learning.learn(lesson) if lesson is not None else None
        tokens = timings.gen_tokens if timings is not None else None
        self._placing.attempted(report, tokens)
        if self._limits is not None and report.is_work:
            self._limits.attempted(report, tokens)
        outcome, routed = report.outcome, report.routed
        if self._log.is_debugging:
            self._log.debug(
                "attempt",
                side=report.side,
                decision=routed.decision_id,
                endpoint=outcome.endpoint,
                number=outcome.attempt,
                result=outcome.result,
                cause=outcome.cause,
                status=outcome.status,
                failure=outcome.failure,
                refusal=outcome.refusal,
            )

    def _tell_watchers(self, report: AttemptReport) -> None:
        outcome, choice = report.outcome, report.routed.choice
        if not choice.is_self:
            if outcome.cause in _UNREACHED or outcome.cause is Cause.IDENTITY:
                self._targets.unreached(choice.node_id, outcome.cause)
            return
        if outcome.cause in _UNREACHED:
            refused = outcome.cause is not Cause.CONNECT_TIMEOUT
            self._engines.report_connect_failed(choice.endpoint_name, refused=refused)
        elif outcome.failure is FailureClass.AUTH:
            self._engines.report_auth(choice.endpoint_name)
        elif outcome.failure in _DENIED and report.is_work:
            self._engines.report_denied(choice.endpoint_name, choice.model, report.dialect)

    def _close(self, line: AccessLine) -> None:
        self._placing.answered(line)
        if line.code == Reason.MODEL_ABSENT.value:
            self._engines.look_for_models()
        metrics = self._metrics
        metrics.seconds.observe(line.total_ms / 1000.0, "total")
        if line.first_byte_ms is not None:
            metrics.seconds.observe(line.first_byte_ms / 1000.0, "first_byte")
        metrics.bytes.inc("in", by=line.bytes_in)
        metrics.bytes.inc("out", by=line.bytes_out)
        if line.code is not None and line.attempts == 0:
            metrics.rejected.inc(line.code)
        self._access.put(line)

    def failed(self, where: str, exc: BaseException) -> None:
        """A fault of our own code; the request it struck, if any, was ended."""
        report_crash(self._log, "relay.failed", exc, place=where)


class EngineWaits:
    """Satisfies the relay's ``FirstBytes``: an engine's monitor may infer from it that a model is being loaded."""

    def __init__(self, engines: EngineWatch) -> None:
        self.sent = engines.report_sent
        self.heard = engines.report_heard
