"""One request's life, from the parsed body to its one honest end.

Owns: which attempt is current, when nothing more may be tried, how long to wait for room, the commit at the first body
byte, every deadline before and after it. Rules: nothing reaches the client before ``Commit``; after it no attempt
follows; each attempt ends in exactly one ``Outcome``; an event of an abandoned attempt changes nothing, so byte against
abandon is one atomic claim, won by whichever is handled first. Refuses to know: sockets, bodies, dialects, how a target
was chosen.
"""

from collections.abc import Callable
from enum import Enum

from router_core.exchange import events as ev
from router_core.exchange.failure import OWN, Cause, FailureClass, Verdict, exhausted_code, is_fault, judge
from router_core.placement.request import Endpoint
from router_core.policy.exchange import ExchangePolicy


class State(Enum):
    RECEIVED = "received"
    DECIDING = "deciding"
    HELD = "held"
    DIALLING = "dialling"
    AWAITING = "awaiting"
    STREAMING = "streaming"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REFUSED = "refused"

    __hash__ = object.__hash__


_TOO_MANY = 429
_BROKE_OFF = frozenset({ev.Result.FAILED, ev.Result.BROKEN})
_BLAMELESS = frozenset({ev.Result.CANCELLED, ev.Result.REFUSED})
_TELLS_REFUSAL = frozenset({ev.Result.REFUSED, ev.Result.FAILED})
ENDED = frozenset({State.DONE, State.FAILED, State.CANCELLED, State.REFUSED})


class Exchange:
    """The machine: ``handle`` events, perform the returned actions in order, wake it at ``deadline``.

    ``until_ms`` is the boot time after which nothing is dispatched any more, None for no such bound. Times are
    boot milliseconds.
    """

    def __init__(self, policy: ExchangePolicy, *, until_ms: int | None = None) -> None:
        self._policy = policy
        self._until = until_ms
        self.state = State.RECEIVED
        self.attempt = 0
        self._dispatches = 0
        self._tried: frozenset[Endpoint] = frozenset()
        self._refused: frozenset[Endpoint] = frozenset()
        self._spared_refusal = False
        self._refusals = 0
        self._in_vain: ev.TurnedAway | None = None
        self._spared_connects = 0
        self._spared_error = False
        self._target: ev.Target | None = None
        self._redialled = False
        self._continued = False
        self._status: int | None = None
        self._failure: FailureClass | None = None
        self._awaited_since = 0
        self._limits: dict[Cause, int] = {}
        self._answer_kept = False
        self._last_cause: Cause | None = None
        self._last_refusal: str | None = None

    @property
    def deadline(self) -> int | None:
        """Boot milliseconds at which ``TimePassed`` is due, or None."""
        return min(self._limits.values()) if self._limits else None

    @property
    def dispatches(self) -> int:
        """Attempts counted so far."""
        return self._dispatches

    def handle(self, event: ev.Event, now: int) -> list[ev.Action]:
        """Fold one event in. Events that do not belong to the current state or attempt give no action."""
        if isinstance(event, ev.UpstreamEvent) and event.attempt != self.attempt:
            return []
        step = _TABLE[self.state].get(type(event))
        return step(self, event, now) if step is not None else []

    # --- before an attempt -----------------------------------------------------------------------------------

    def _begin(self, _event: ev.Event, _now: int) -> list[ev.Action]:
        return self._decide()

    def _decide(self) -> list[ev.Action]:
        self.state = State.DECIDING
        self._limits = {}
        return [ev.Decide(tried=self._tried, refused=self._refused, attempt=self.attempt + 1)]

    def _dial(self, event: ev.Decided, now: int) -> list[ev.Action]:
        self.state = State.DIALLING
        self.attempt += 1
        self._dispatches += 1
        self._target = event.target
        self._redialled = self._continued = self._answer_kept = False
        self._status = self._failure = self._last_cause = self._last_refusal = None
        self._limits = {Cause.CONNECT_TIMEOUT: now + event.target.connect_ms}
        if self._until is not None:
            self._limits[Cause.DEADLINE] = self._until
        return [ev.Dial(target=event.target, attempt=self.attempt)]

    def _turn_away(self, event: ev.TurnedAway, _now: int) -> list[ev.Action]:
        if self.attempt and event.status != _TOO_MANY:
            return self._give_up()
        self._end(State.REFUSED)
        return [ev.Reply(status=event.status, code=event.code, retry_after_s=event.retry_after_s)]

    def _hold(self, event: ev.Queued, _now: int) -> list[ev.Action]:
        self.state = State.HELD
        self._limits = {Cause.DEADLINE: event.until_ms}
        self._in_vain = event.turned
        return []

    def _wake(self, _event: ev.Woken, _now: int) -> list[ev.Action]:
        """Decide again: whoever refused before the wait may have room by now."""
        self._refused = frozenset()
        self._spared_refusal = self._refusals >= self._policy.refusals
        return self._decide()

    def _held_too_long(self, _event: ev.TimePassed, now: int) -> list[ev.Action]:
        if self._in_vain is None or self._limits[Cause.DEADLINE] > now:
            return []
        return self._turn_away(self._in_vain, now)

    # --- an attempt before commit ----------------------------------------------------------------------------

    def _send(self, _event: ev.Connected, now: int) -> list[ev.Action]:
        target = self._current()
        self.state = State.AWAITING
        del self._limits[Cause.CONNECT_TIMEOUT]
        if target.peer:
            self._limits[Cause.NO_CONTINUE] = now + self._policy.continue_ms
        else:
            self._await(target, now)
        return [ev.SendRequest(attempt=self.attempt)]

    def _await(self, target: ev.Target, now: int) -> None:
        self._awaited_since = now
        self._limits[Cause.FIRST_BYTE] = now + target.first_byte_ms

    def _go_on(self, _event: ev.Continued, now: int) -> list[ev.Action]:
        target = self._current()
        if self._continued or not target.peer:
            return []
        self._continued = True
        del self._limits[Cause.NO_CONTINUE]
        self._await(target, now)
        return [ev.SendBody(attempt=self.attempt)]

    def _hold_head(self, event: ev.HeadReceived, _now: int) -> list[ev.Action]:
        self._status = event.status
        return []

    def _commit(self, event: ev.FirstByteReceived, now: int) -> list[ev.Action]:
        if self._status is None:
            return []
        target = self._current()
        self.state = State.STREAMING
        self._limits = {Cause.IDLE: now + target.idle_ms}
        return [ev.Commit(attempt=self.attempt)]

    def _commit_empty(self, event: ev.BodyEnded, now: int) -> list[ev.Action]:
        if self._status is None:
            return []
        commit = self._commit(ev.FirstByteReceived(attempt=event.attempt), now)
        return commit + self._finish(event, now)

    def _answered(self, event: ev.Answered, now: int) -> list[ev.Action]:
        self._status, self._failure = event.status, event.failure
        verdict = judge(event.status, event.failure)
        if verdict is Verdict.COMMIT or (verdict is Verdict.NEXT_ONCE and self._spared_error):
            return self._commit(ev.FirstByteReceived(attempt=event.attempt), now)
        if verdict is Verdict.NEXT_ONCE:
            self._spared_error = True
        self._answer_kept = event.whole
        return self._fail_over(None, now)

    def _turned_back(self, event: ev.IngressRefused, now: int) -> list[ev.Action]:
        self._last_refusal = event.cause
        if self._spared_refusal:
            return self._fail_over(None, now)
        self._spared_refusal = True
        self._refusals += 1
        self._dispatches -= 1
        self._refused |= {self._current().endpoint}
        ended = self._end_attempt(ev.Result.REFUSED, None)
        if self._past_until(now):
            return [ended, *self._give_up()]
        return [ended, *self._decide()]

    def _lost(self, event: ev.Lost, now: int) -> list[ev.Action]:
        if event.stale and not self._redialled:
            self._redialled = True
            self.state = State.DIALLING
            self._limits = {k: v for k, v in self._limits.items() if k is Cause.DEADLINE}
            self._limits[Cause.CONNECT_TIMEOUT] = now + self._current().connect_ms
            return [ev.Redial(attempt=self.attempt)]
        if event.cause is Cause.CONNECT_REFUSED and self._spared_connects < self._policy.refused_connects:
            self._spared_connects += 1
            self._dispatches -= 1
        return self._fail_over(event.cause, now)

    def _fail_over(self, cause: Cause | None, now: int) -> list[ev.Action]:
        """End the attempt as failed; go on to the next endpoint if one may still be tried."""
        self._last_cause = cause
        self._tried |= {self._current().endpoint}
        steps: list[ev.Action] = [
            ev.CancelUpstream(attempt=self.attempt),
            self._end_attempt(ev.Result.FAILED, cause),
        ]
        if self._dispatches >= self._policy.attempts or self._past_until(now):
            return steps + self._give_up()
        return steps + self._decide()

    def _give_up(self) -> list[ev.Action]:
        """Nothing may be tried any more: the last upstream's own answer, else the truth about the last attempt."""
        self._end(State.FAILED)
        if self._answer_kept:
            return [ev.ReplyAnswer(attempt=self.attempt)]
        if self._last_refusal is not None:
            return [ev.Reply(status=429, code=self._last_refusal, retry_after_s=None)]
        status, code = exhausted_code(self._last_cause)
        return [ev.Reply(status=status, code=code, retry_after_s=None)]

    # --- after commit ----------------------------------------------------------------------------------------

    def _finish(self, _event: ev.BodyEnded, _now: int) -> list[ev.Action]:
        self._end(State.DONE)
        result = ev.Result.DONE if (self._status or 0) < 400 else ev.Result.ANSWERED
        return [ev.Finish(attempt=self.attempt), self._end_attempt(result, None)]

    def _break(self, event: ev.Lost, _now: int) -> list[ev.Action]:
        return self._tell(event.cause, "upstream_lost")

    def _tell(self, cause: Cause | None, code: str) -> list[ev.Action]:
        self._end(State.FAILED)
        result = ev.Result.CANCELLED if cause is None else ev.Result.BROKEN
        return [
            ev.CancelUpstream(attempt=self.attempt),
            ev.TellError(code=code),
            self._end_attempt(result, cause),
        ]

    # --- at any time -----------------------------------------------------------------------------------------

    def _time(self, event: ev.TimePassed, now: int) -> list[ev.Action]:
        if self.state is State.STREAMING and event.last_byte_ms is not None:
            self._limits[Cause.IDLE] = event.last_byte_ms + self._current().idle_ms
            if Cause.SUSPECT in self._limits:
                floor = event.last_byte_ms + self._policy.suspect_after_commit_ms
                self._limits[Cause.SUSPECT] = max(self._limits[Cause.SUSPECT], floor)
        due = [cause for cause, at in self._limits.items() if at <= now]
        if not due:
            return []
        cause = min(due, key=lambda c: self._limits[c])
        if self.state is State.STREAMING:
            return self._tell(cause, "upstream_timeout" if cause is Cause.IDLE else "upstream_lost")
        endpoint = self._current().endpoint
        steps = self._fail_over(cause, now)
        if cause is Cause.FIRST_BYTE:
            steps.append(ev.DoubtEndpoint(endpoint=endpoint, since_ms=self._awaited_since))
        return steps

    def _fell_silent(self, _event: ev.EndpointFellSilent, now: int) -> list[ev.Action]:
        return self._fail_over(Cause.SILENT, now)

    def _suspected(self, _event: ev.NodeSuspected, now: int) -> list[ev.Action]:
        if self._current().peer:
            streaming = self.state is State.STREAMING
            wait = (
                self._policy.suspect_after_commit_ms if streaming else self._policy.suspect_before_commit_ms
            )
            self._limits.setdefault(Cause.SUSPECT, now + wait)
        return []

    def _recovered(self, _event: ev.NodeRecovered, _now: int) -> list[ev.Action]:
        self._limits.pop(Cause.SUSPECT, None)
        return []

    def _gone(self, _event: ev.NodeGone, now: int) -> list[ev.Action]:
        if self.state is State.STREAMING:
            return self._tell(Cause.GONE, "upstream_lost")
        return self._fail_over(Cause.GONE, now)

    def _cancel(self, event: ev.ClientGone, _now: int) -> list[ev.Action]:
        attempt_open = self.state in _ATTEMPT_OPEN
        self._end(State.CANCELLED)
        if not attempt_open:
            return []
        return [ev.CancelUpstream(attempt=self.attempt), self._end_attempt(ev.Result.CANCELLED, None)]

    def _stop(self, event: ev.ShuttingDown, now: int) -> list[ev.Action]:
        if self.state is State.STREAMING:
            return self._tell(None, "shutting_down")
        cancelled = self._cancel(ev.ClientGone(), now)
        return [*cancelled, ev.Reply(status=503, code="shutting_down", retry_after_s=None)]

    # --- shared ----------------------------------------------------------------------------------------------

    def _current(self) -> ev.Target:
        assert self._target is not None
        return self._target

    def _past_until(self, now: int) -> bool:
        return self._until is not None and now >= self._until

    def _end(self, state: State) -> None:
        self.state = state
        self._limits = {}

    def _end_attempt(self, result: ev.Result, cause: Cause | None) -> ev.EndAttempt:
        blamed = result in _BROKE_OFF and cause is not None and cause not in OWN
        if not blamed and self._failure is not None and self._status is not None:
            blamed = is_fault(self._status, self._failure)
        return ev.EndAttempt(
            outcome=ev.Outcome(
                attempt=self.attempt,
                endpoint=self._current().endpoint,
                result=result,
                cause=cause,
                status=self._status,
                failure=self._failure,
                refusal=self._last_refusal if result in _TELLS_REFUSAL else None,
                fault=blamed and result not in _BLAMELESS,
            )
        )


_ATTEMPT_OPEN = frozenset({State.DIALLING, State.AWAITING, State.STREAMING})

Step = Callable[[Exchange, ev.Event, int], list[ev.Action]]


def _rows(rows: dict[type[ev.Event], object]) -> dict[type[ev.Event], Step]:
    return rows  # type: ignore[return-value]  # each step takes the event type of its own row


_TABLE: dict[State, dict[type[ev.Event], Step]] = {
    State.RECEIVED: _rows(
        {ev.BodyParsed: Exchange._begin, ev.ClientGone: Exchange._cancel, ev.ShuttingDown: Exchange._stop}
    ),
    State.DECIDING: _rows(
        {
            ev.Decided: Exchange._dial,
            ev.TurnedAway: Exchange._turn_away,
            ev.Queued: Exchange._hold,
            ev.ClientGone: Exchange._cancel,
            ev.ShuttingDown: Exchange._stop,
        }
    ),
    State.HELD: _rows(
        {
            ev.Woken: Exchange._wake,
            ev.TimePassed: Exchange._held_too_long,
            ev.ClientGone: Exchange._cancel,
            ev.ShuttingDown: Exchange._stop,
        }
    ),
    State.DIALLING: _rows(
        {
            ev.Connected: Exchange._send,
            ev.Lost: Exchange._lost,
            ev.NodeSuspected: Exchange._suspected,
            ev.NodeRecovered: Exchange._recovered,
            ev.NodeGone: Exchange._gone,
            ev.TimePassed: Exchange._time,
            ev.ClientGone: Exchange._cancel,
            ev.ShuttingDown: Exchange._stop,
        }
    ),
    State.AWAITING: _rows(
        {
            ev.Continued: Exchange._go_on,
            ev.HeadReceived: Exchange._hold_head,
            ev.FirstByteReceived: Exchange._commit,
            ev.BodyEnded: Exchange._commit_empty,
            ev.Answered: Exchange._answered,
            ev.IngressRefused: Exchange._turned_back,
            ev.Lost: Exchange._lost,
            ev.EndpointFellSilent: Exchange._fell_silent,
            ev.NodeSuspected: Exchange._suspected,
            ev.NodeRecovered: Exchange._recovered,
            ev.NodeGone: Exchange._gone,
            ev.TimePassed: Exchange._time,
            ev.ClientGone: Exchange._cancel,
            ev.ShuttingDown: Exchange._stop,
        }
    ),
    State.STREAMING: _rows(
        {
            ev.BodyEnded: Exchange._finish,
            ev.Lost: Exchange._break,
            ev.NodeSuspected: Exchange._suspected,
            ev.NodeRecovered: Exchange._recovered,
            ev.NodeGone: Exchange._gone,
            ev.TimePassed: Exchange._time,
            ev.ClientGone: Exchange._cancel,
            ev.ShuttingDown: Exchange._stop,
        }
    ),
    State.DONE: {},
    State.FAILED: {},
    State.CANCELLED: {},
    State.REFUSED: {},
}
