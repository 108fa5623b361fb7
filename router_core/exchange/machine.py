"""One request's life, from the parsed body to its one honest end.

Owns: which attempts are under way, when nothing more may be tried, how long to wait for room, the commit at the first
body byte, every limit before and after it. Rules: nothing reaches the client before ``Commit``; after it no attempt
follows; each attempt ends in exactly one ``Outcome``; an event of an abandoned attempt changes nothing, so byte against
abandon is one atomic claim, won by whichever is handled first. No prediction ends an attempt: that it is overdue is
noted, and at most a second one is made beside it. It knows nothing of sockets, bodies, dialects and how a
target was chosen.
"""

from collections.abc import Callable
from enum import Enum

from router_core.exchange import events as ev
from router_core.placement.request.request import Endpoint
from router_core.policy.exchange import ExchangePolicy, Hedge
from router_core.router.failure import (
    OWN,
    UNBEGUN,
    Cause,
    FailureClass,
    Verdict,
    declines,
    exhausted_code,
    is_server_error,
    judge,
)
from router_core.router.outcome import Outcome, Result


class State(Enum):
    """How far one request has come."""

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
_BROKE_OFF = frozenset({Result.FAILED, Result.BROKEN})
_TELLS_REFUSAL = frozenset({Result.REFUSED, Result.FAILED})
ENDED = frozenset({State.DONE, State.FAILED, State.CANCELLED, State.REFUSED})
_BEFORE_COMMIT = frozenset({State.DIALLING, State.AWAITING})


class _Attempt:
    """One attempt under way. ``limits`` are the boot times at which one of its own causes ends it."""

    __slots__ = (
        "continued",
        "failure",
        "is_doubted",
        "limits",
        "number",
        "overdue_at",
        "redialled",
        "refusal",
        "spare_at",
        "state",
        "status",
        "target",
    )

    def __init__(self, number: int, target: ev.Target, now: int) -> None:
        self.number = number
        self.target = target
        self.state = State.DIALLING
        self.redialled = self.continued = self.is_doubted = False
        self.status: int | None = None
        self.failure: FailureClass | None = None
        self.refusal: str | None = None
        self.overdue_at: int | None = None
        self.spare_at: int | None = None
        self.limits: dict[Cause, int] = {Cause.CONNECT_TIMEOUT: now + target.connect_ms}


class Exchange:
    """The machine: ``handle`` events, perform the returned actions in order, wake it at ``deadline``.

    ``until_ms`` is the boot time that ends the wait for a first byte, and after which nothing is dispatched any more;
    None for no such bound. ``hedge`` is when a second attempt is made beside one that goes on. Times are boot
    milliseconds.
    """

    def __init__(
        self, policy: ExchangePolicy, *, until_ms: int | None = None, hedge: Hedge = Hedge.OFF
    ) -> None:
        self._policy = policy
        self._until = until_ms
        self._hedge = hedge
        self.state = State.RECEIVED
        self.attempt = 0
        self._current: _Attempt | None = None
        self._others: list[_Attempt] = []
        self._dispatches = 0
        self._spared = 0
        self._tried: frozenset[Endpoint] = frozenset()
        self._refused: frozenset[Endpoint] = frozenset()
        self._erred: tuple[Endpoint, ...] = ()
        self._declined: frozenset[Endpoint] = frozenset()
        self._refusals = 0
        self._held_until: int | None = None
        self._in_vain: ev.TurnedAway | None = None
        self._spared_error = False
        self._answer_kept: int | None = None
        self._last_cause: Cause | None = None
        self._last_refusal: str | None = None

    @property
    def deadline(self) -> int | None:
        """Boot milliseconds at which ``TimePassed`` is due, or None."""
        if self.state is State.HELD:
            return self._held_until
        current = self._current
        if current is None:
            return None
        due = min(current.limits.values(), default=None)
        if self.state is not State.STREAMING:
            for at in (self._until, current.overdue_at, current.spare_at):
                if at is not None and (due is None or at < due):
                    due = at
            for other in self._others:
                for at in (*other.limits.values(), other.overdue_at, other.spare_at):
                    if at is not None and (due is None or at < due):
                        due = at
        return due

    @property
    def tried(self) -> frozenset[Endpoint]:
        """Endpoints that failed this request."""
        return self._tried

    @property
    def refused(self) -> frozenset[Endpoint]:
        """Endpoints that would not have it."""
        return self._refused

    @property
    def dispatches(self) -> int:
        """Attempts counted so far."""
        return self._dispatches

    def handle(self, event: ev.Event, now: int) -> list[ev.Action]:
        """Fold one event in. Events that do not belong to the current state or to an attempt under way give no action."""
        if isinstance(event, ev.UpstreamEvent):
            current = self._current
            if current is None or (event.attempt != current.number and not self._turn_to(event.attempt)):
                return []
        step = _TABLE[self.state].get(type(event))
        return step(self, event, now) if step is not None else []

    def _turn_to(self, number: int) -> bool:
        """Make another attempt under way the current one; False if there is none of this number."""
        for place, other in enumerate(self._others):
            if other.number == number and self._current is not None:
                self._others[place] = self._current
                self._current = other
                self.state = other.state
                return True
        return False

    # --- before an attempt -----------------------------------------------------------------------------------

    def _begin(self, _event: ev.Event, _now: int) -> list[ev.Action]:
        return self._decide()

    def _decide(self) -> list[ev.Action]:
        self.state = State.DECIDING
        return [
            ev.Decide(
                tried=self._tried,
                refused=self._refused,
                declined=self._declined,
                attempt=self.attempt + 1,
            )
        ]

    def _dial(self, event: ev.Decided, now: int) -> list[ev.Action]:
        self.state = State.DIALLING
        self.attempt += 1
        self._dispatches += 1
        self._answer_kept = self._last_cause = self._last_refusal = None
        self._current = _Attempt(self.attempt, event.target, now)
        return [ev.Dial(target=event.target, attempt=self.attempt)]

    def _turn_away(self, event: ev.TurnedAway, _now: int) -> list[ev.Action]:
        if self.attempt and event.status != _TOO_MANY:
            return self._give_up()
        self._end(State.REFUSED)
        return [ev.Reply(status=event.status, code=event.code, retry_after_s=event.retry_after_s)]

    def _hold(self, event: ev.Queued, _now: int) -> list[ev.Action]:
        self.state = State.HELD
        self._held_until = event.until_ms
        self._in_vain = event.turned
        return []

    def _wake(self, _event: ev.Woken, _now: int) -> list[ev.Action]:
        """Decide again: whoever refused before the wait may have room by now."""
        self._refused = frozenset()
        return self._decide()

    def _held_too_long(self, _event: ev.TimePassed, now: int) -> list[ev.Action]:
        if self._in_vain is None or self._held_until is None or self._held_until > now:
            return []
        return self._turn_away(self._in_vain, now)

    # --- a second attempt beside one that goes on --------------------------------------------------------------

    def _look_for_spare(self, attempt: _Attempt) -> list[ev.Action]:
        attempt.spare_at = None
        attempt.is_doubted = True
        if self._dispatches >= self._policy.attempts:
            return []
        tried = self._tried.union([each.target.endpoint for each in self._under_way()])
        return [
            ev.Decide(
                tried=tried,
                refused=self._refused,
                declined=self._declined,
                attempt=self.attempt + 1,
                spare=True,
            )
        ]

    def _dial_spare(self, event: ev.Decided, now: int) -> list[ev.Action]:
        assert self._current is not None
        self.attempt += 1
        self._dispatches += 1
        self._others.append(_Attempt(self.attempt, event.target, now))
        return [ev.Dial(target=event.target, attempt=self.attempt)]

    def _without_spare(self, _event: ev.NoSpare, now: int) -> list[ev.Action]:
        self._now_at().spare_at = now + self._policy.spare_retry_ms
        return []

    def _doubtful(self, _event: ev.EndpointDoubtful, _now: int) -> list[ev.Action]:
        attempt = self._current
        assert attempt is not None
        waits = attempt.is_doubted and attempt.spare_at is not None
        if self._hedge is Hedge.OFF or self._others or attempt.state is not State.AWAITING or waits:
            return []
        return self._look_for_spare(attempt)

    def _under_way(self) -> list[_Attempt]:
        return [self._now_at(), *self._others]

    # --- an attempt before commit ----------------------------------------------------------------------------

    def _send(self, _event: ev.Connected, now: int) -> list[ev.Action]:
        attempt = self._current
        assert attempt is not None
        self.state = attempt.state = State.AWAITING
        del attempt.limits[Cause.CONNECT_TIMEOUT]
        if attempt.target.peer:
            attempt.limits[Cause.NO_CONTINUE] = now + self._policy.continue_ms
        else:
            self._await(attempt, now)
        return [ev.SendRequest(attempt=attempt.number)]

    def _await(self, attempt: _Attempt, now: int) -> None:
        target = attempt.target
        attempt.overdue_at = overdue_at = now + target.overdue_ms
        if target.first_byte_ms:
            attempt.limits[Cause.FIRST_BYTE] = now + target.first_byte_ms
        if self._hedge is Hedge.OFF:
            return
        attempt.spare_at = overdue_at
        if self._hedge is Hedge.HUNG:
            attempt.spare_at = max(overdue_at, now + self._policy.hung_ms)
        if self._until is not None:
            third = max(self._policy.overdue_floor_ms, (self._until - now) // 3)
            attempt.spare_at = min(attempt.spare_at, now + third)

    def _go_on(self, _event: ev.Continued, now: int) -> list[ev.Action]:
        attempt = self._current
        assert attempt is not None
        if attempt.continued or not attempt.target.peer:
            return []
        attempt.continued = True
        del attempt.limits[Cause.NO_CONTINUE]
        self._await(attempt, now)
        return [ev.SendBody(attempt=attempt.number)]

    def _hold_head(self, event: ev.HeadReceived, _now: int) -> list[ev.Action]:
        if self._current is not None:
            self._current.status = event.status
        return []

    def _commit(self, event: ev.FirstByteReceived, now: int) -> list[ev.Action]:
        attempt = self._current
        assert attempt is not None
        if attempt.status is None:
            return []
        self.state = attempt.state = State.STREAMING
        attempt.limits = {}
        if attempt.target.idle_ms:
            attempt.limits[Cause.IDLE] = now + attempt.target.idle_ms
        steps: list[ev.Action] = []
        if self._others:
            for other in self._others:
                steps.append(ev.CancelUpstream(attempt=other.number))
                steps.append(self._end_attempt(other, Result.CANCELLED, None))
            self._others.clear()
        steps.append(ev.Commit(attempt=attempt.number))
        if self._erred and attempt.status < 400:
            steps += [ev.BlameEndpoint(endpoint=endpoint) for endpoint in self._erred]
        return steps

    def _commit_empty(self, event: ev.BodyEnded, now: int) -> list[ev.Action]:
        if self._now_at().status is None:
            return []
        commit = self._commit(ev.FirstByteReceived(attempt=event.attempt), now)
        return commit + self._finish(event, now)

    def _answered(self, event: ev.Answered, now: int) -> list[ev.Action]:
        attempt = self._current
        assert attempt is not None
        attempt.status, attempt.failure = event.status, event.failure
        verdict = judge(event.status, event.failure)
        if self._others:
            return self._leave(attempt, None, now)
        if verdict is Verdict.COMMIT or (verdict is Verdict.NEXT_ONCE and self._spared_error):
            return self._commit(ev.FirstByteReceived(attempt=event.attempt), now)
        if verdict is Verdict.NEXT_ONCE:
            self._spared_error = True
        kept = attempt.number if event.whole else None
        return self._leave(attempt, None, now, kept=kept)

    def _turned_back(self, event: ev.IngressRefused, now: int) -> list[ev.Action]:
        attempt = self._current
        assert attempt is not None
        self._last_refusal = attempt.refusal = event.cause
        if self._refusals >= self._policy.refusals:
            return self._leave(attempt, None, now)
        self._refusals += 1
        self._dispatches -= 1
        if attempt.target.patient:
            self._refused |= {attempt.target.endpoint}
        else:
            self._declined |= {attempt.target.endpoint}
        ended = self._end_attempt(attempt, Result.REFUSED, None)
        return [ended, *self._go_elsewhere(now)]

    def _lost(self, event: ev.Lost, now: int) -> list[ev.Action]:
        attempt = self._current
        assert attempt is not None
        if event.stale and not attempt.redialled:
            attempt.redialled = True
            self.state = attempt.state = State.DIALLING
            attempt.overdue_at = attempt.spare_at = None
            attempt.limits = {Cause.CONNECT_TIMEOUT: now + attempt.target.connect_ms}
            return [ev.Redial(attempt=attempt.number)]
        return self._leave(attempt, event.cause, now)

    def _no_sign_of_life(self, event: ev.NoSignOfLife, now: int) -> list[ev.Action]:
        return self._leave(self._now_at(), event.cause, now)

    def _leave(
        self, attempt: _Attempt, cause: Cause | None, now: int, *, kept: int | None = None
    ) -> list[ev.Action]:
        """End ``attempt``, the current one, as failed; go on with another one, or to the next endpoint if one may still be
        tried. ``kept``: its answer is at hand, should it be the last."""
        self._last_cause = cause
        self._tried |= {attempt.target.endpoint}
        if attempt.status is not None and attempt.failure is not None:
            if is_server_error(attempt.status, attempt.failure):
                self._erred += (attempt.target.endpoint,)
            unbegun = declines(attempt.status, attempt.failure)
        else:
            unbegun = cause in UNBEGUN
        if unbegun and self._spared < self._policy.spared:
            self._spared += 1
            self._dispatches -= 1
        steps = [
            ev.CancelUpstream(attempt=attempt.number),
            self._end_attempt(attempt, Result.FAILED, cause),
        ]
        self._answer_kept = kept
        return steps + self._go_elsewhere(now)

    def _go_elsewhere(self, now: int) -> list[ev.Action]:
        """The current attempt has ended before it committed."""
        self._current = None
        if self._others:
            self._current = other = self._others.pop()
            self.state = other.state
            if other.state is State.AWAITING and other.is_doubted and other.spare_at is None:
                other.spare_at = now + self._policy.spare_retry_ms
            return []
        if self._dispatches >= self._policy.attempts or self._past_until(now):
            return self._give_up()
        return self._decide()

    def _give_up(self) -> list[ev.Action]:
        """Nothing may be tried any more: the last upstream's own answer, else the truth about the last attempt."""
        self._end(State.FAILED)
        if self._answer_kept is not None:
            return [ev.ReplyAnswer(attempt=self._answer_kept)]
        if self._last_refusal is not None:
            return [ev.Reply(status=429, code=self._last_refusal, retry_after_s=None)]
        status, code = exhausted_code(self._last_cause)
        return [ev.Reply(status=status, code=code, retry_after_s=None)]

    # --- after commit ----------------------------------------------------------------------------------------

    def _finish(self, _event: ev.BodyEnded, _now: int) -> list[ev.Action]:
        attempt = self._current
        assert attempt is not None
        self._end(State.DONE)
        result = Result.DONE if (attempt.status or 0) < 400 else Result.ANSWERED
        return [ev.Finish(attempt=attempt.number), self._end_attempt(attempt, result, None)]

    def _break(self, event: ev.Lost, _now: int) -> list[ev.Action]:
        return self._tell(event.cause, "upstream_lost")

    def _tell(self, cause: Cause | None, code: str) -> list[ev.Action]:
        attempt = self._current
        assert attempt is not None
        self._end(State.FAILED)
        result = Result.CANCELLED if cause is None else Result.BROKEN
        return [
            ev.CancelUpstream(attempt=attempt.number),
            ev.TellError(code=code),
            self._end_attempt(attempt, result, cause),
        ]

    def _time_in_stream(self, event: ev.TimePassed, now: int) -> list[ev.Action]:
        """Before the answer itself has begun, it has as long as the wait for a first byte would."""
        attempt = self._current
        assert attempt is not None
        limits, last_ms = attempt.limits, event.last_byte_ms
        if last_ms is not None:
            if Cause.IDLE in limits:
                idle_at = last_ms + attempt.target.idle_ms
                limits[Cause.IDLE] = idle_at if event.content else max(idle_at, self._until or 0)
            if Cause.SUSPECT in limits:
                floor = last_ms + self._policy.suspect_after_commit_ms
                limits[Cause.SUSPECT] = max(limits[Cause.SUSPECT], floor)
        due = [cause for cause, at in limits.items() if at <= now]
        if not due:
            return []
        cause = min(due, key=lambda each: limits[each])
        return self._tell(cause, "upstream_timeout" if cause is Cause.IDLE else "upstream_lost")

    def _suspected(self, _event: ev.NodeSuspected, now: int) -> list[ev.Action]:
        attempt = self._current
        assert attempt is not None
        if attempt.target.peer:
            attempt.limits.setdefault(Cause.SUSPECT, now + self._policy.suspect_after_commit_ms)
        return []

    def _recovered(self, _event: ev.NodeRecovered, _now: int) -> list[ev.Action]:
        self._now_at().limits.pop(Cause.SUSPECT, None)
        return []

    # --- at any time -----------------------------------------------------------------------------------------

    def _time(self, _event: ev.TimePassed, now: int) -> list[ev.Action]:
        """Of attempts without a byte: those whose limits are over end, those that are late are noted."""
        if self._past_until(now):
            return self._out_of_time()
        steps: list[ev.Action] = []
        for attempt in self._under_way():
            if attempt.overdue_at is not None and attempt.overdue_at <= now:
                attempt.overdue_at = None
                steps.append(ev.NoteOverdue(attempt=attempt.number, endpoint=attempt.target.endpoint))
        for attempt in self._under_way():
            due = [cause for cause, at in attempt.limits.items() if at <= now]
            if due:
                cause = min(due, key=attempt.limits.__getitem__)
                if attempt is not self._current:
                    self._turn_to(attempt.number)
                steps += self._leave(attempt, cause, now)
                return steps
        newest = max(self._under_way(), key=lambda each: each.number)
        for attempt in self._under_way():
            if attempt.spare_at is not None and attempt.spare_at <= now:
                attempt.spare_at = None
                if attempt is newest:
                    if attempt is not self._current:
                        self._turn_to(attempt.number)
                    return steps + self._look_for_spare(attempt)
        return steps

    def _out_of_time(self) -> list[ev.Action]:
        steps: list[ev.Action] = []
        for attempt in self._under_way():
            steps.append(ev.CancelUpstream(attempt=attempt.number))
            steps.append(self._end_attempt(attempt, Result.FAILED, Cause.DEADLINE))
        self._last_cause, self._last_refusal, self._answer_kept = Cause.DEADLINE, None, None
        return steps + self._give_up()

    def _cancel(self, _event: ev.ClientGone, _now: int) -> list[ev.Action]:
        attempts = self._under_way() if self._current is not None else []
        self._end(State.CANCELLED)
        steps: list[ev.Action] = []
        for attempt in attempts:
            steps.append(ev.CancelUpstream(attempt=attempt.number))
            steps.append(self._end_attempt(attempt, Result.CANCELLED, None))
        return steps

    def _stop(self, _event: ev.ShuttingDown, now: int) -> list[ev.Action]:
        if self.state is State.STREAMING:
            return self._tell(None, "shutting_down")
        cancelled = self._cancel(ev.ClientGone(), now)
        return [*cancelled, ev.Reply(status=503, code="shutting_down", retry_after_s=None)]

    # --- shared ----------------------------------------------------------------------------------------------

    def _now_at(self) -> _Attempt:
        assert self._current is not None
        return self._current

    def _past_until(self, now: int) -> bool:
        return self._until is not None and now >= self._until

    def _end(self, state: State) -> None:
        self.state = state
        self._current = None
        self._others.clear()

    def _end_attempt(self, attempt: _Attempt, result: Result, cause: Cause | None) -> ev.EndAttempt:
        return ev.EndAttempt(
            outcome=Outcome(
                attempt=attempt.number,
                endpoint=attempt.target.endpoint,
                result=result,
                cause=cause,
                status=attempt.status,
                failure=attempt.failure,
                refusal=attempt.refusal if result in _TELLS_REFUSAL else None,
                fault=result in _BROKE_OFF and cause is not None and cause not in OWN,
            )
        )


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
            ev.NoSignOfLife: Exchange._no_sign_of_life,
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
            ev.NoSignOfLife: Exchange._no_sign_of_life,
            ev.EndpointDoubtful: Exchange._doubtful,
            ev.Decided: Exchange._dial_spare,
            ev.NoSpare: Exchange._without_spare,
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
            ev.TimePassed: Exchange._time_in_stream,
            ev.ClientGone: Exchange._cancel,
            ev.ShuttingDown: Exchange._stop,
        }
    ),
    State.DONE: {},
    State.FAILED: {},
    State.CANCELLED: {},
    State.REFUSED: {},
}
