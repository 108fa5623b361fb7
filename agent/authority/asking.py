"""Asks the external authority where a request should go: within one budget, so many at a time, no oftener than needed.

Rules: whatever the authority does, asking ends in time with a ``Counsel`` and the request goes on; an answer is asked for
again only when it may no longer be used; a row of failures stops the asking for a while, then one request tries again.
It knows nothing of what an answer changes.
"""

import asyncio
from collections import OrderedDict

import msgspec

from agent.authority.call import Caller, Unanswered
from agent.effects.clock import Clock
from agent.observe.log import Log
from router_core.placement.decision.authority import AnswerFault, parse_answer, question_of
from router_core.placement.reasons import AuthorityOutcome
from router_core.placement.request.request import Advice, Counsel, Endpoint, PlacementRequest
from router_core.placement.scoring.survey import Survey
from router_core.policy.authority import AuthorityPolicy

_AnswerKey = tuple[str, str, str, frozenset[Endpoint]]

_LATE = Unanswered(AuthorityOutcome.TIMEOUT)
_BUSY = Unanswered(AuthorityOutcome.TIMEOUT, "busy")
"""It had to wait for its turn, so that less than the whole budget was left to answer: not held against the authority."""


class Authority:
    """The authority that ``policy`` names. ``token`` is its bearer token, None for none. Use from one event loop."""

    def __init__(self, policy: AuthorityPolicy, *, token: str | None, clock: Clock, log: Log) -> None:
        self._policy = policy
        self._clock = clock
        self._log = log
        self._breaker = AuthorityBreaker(policy)
        self._answers = Answers(policy.answers_kept)
        self._slots = asyncio.Semaphore(policy.in_flight)
        self._caller = Caller(policy, token)

    def at_hand(self, request: PlacementRequest, seen: Survey, decision_id: str) -> Counsel | None:
        """What can be said without asking; None if somebody has to be asked. With fewer than two endpoints in the
        running no answer could change anything."""
        key, now = _answer_key(request, seen), self._clock.boot_ms()
        if len(key[-1]) < 2:
            return self._counsel(decision_id, AuthorityOutcome.OFF)
        advice = self._answers.find(key, now)
        if advice is not None:
            return self._counsel(decision_id, AuthorityOutcome.CACHED, advice=advice)
        if self._breaker.shut(now):
            return self._counsel(decision_id, AuthorityOutcome.BREAKER_OPEN)
        return None

    async def ask(self, request: PlacementRequest, seen: Survey, decision_id: str) -> Counsel:
        """Ask, and wait no longer than the budget. Cancelling it ends the question and counts for nothing."""
        began_us = self._clock.boot_us()
        trial = self._breaker.claim(self._clock.boot_ms())
        if trial is None:
            return self._counsel(decision_id, AuthorityOutcome.BREAKER_OPEN)
        answer: Advice | Unanswered | None = None
        try:
            answer = await self._answer(request, seen, decision_id)
        finally:
            good = None if answer is None or answer is _BUSY else isinstance(answer, Advice)
            turned = self._breaker.ended(self._clock.boot_ms(), trial=trial, good=good)
        ms = (self._clock.boot_us() - began_us) // 1_000
        if isinstance(answer, Unanswered):
            if turned:
                self._log.warning("authority.left_alone", outcome=answer.outcome.value, why=answer.why)
            return self._counsel(decision_id, answer.outcome, ms=ms, why=answer.why)
        if turned:
            self._log.info("authority.back")
        self._answers.keep(_answer_key(request, seen), answer, self._clock.boot_ms())
        return self._counsel(decision_id, AuthorityOutcome.USED, ms=ms, advice=answer)

    def _counsel(
        self,
        decision_id: str,
        outcome: AuthorityOutcome,
        *,
        ms: int = 0,
        advice: Advice | None = None,
        why: str | None = None,
    ) -> Counsel:
        return Counsel(
            mode=self._policy.mode, outcome=outcome, decision_id=decision_id, ms=ms, advice=advice, why=why
        )

    async def _answer(self, request: PlacementRequest, seen: Survey, decision_id: str) -> Advice | Unanswered:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._policy.budget_ms / 1_000
        late = _BUSY if self._slots.locked() else _LATE
        try:
            async with asyncio.timeout_at(until), self._slots:
                left_ms = max(1, round(1_000 * (until - loop.time())))
                question = msgspec.json.encode(question_of(request, seen, decision_id, left_ms))
                body = await self._caller.post(question)
        except TimeoutError:
            return late
        if isinstance(body, Unanswered):
            return body
        advice = parse_answer(body)
        if isinstance(advice, AnswerFault):
            return Unanswered(AuthorityOutcome.INVALID, advice.value)
        return advice


def _answer_key(request: PlacementRequest, seen: Survey) -> _AnswerKey:
    rows = frozenset(scored.row.key for scored in seen.scored)
    return seen.resolved, request.hints.request_class.value, seen.need.locality.value, rows


class Answers:
    """Answers that may be used again for a while; of more than ``most`` the one kept first is dropped."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[_AnswerKey, tuple[Advice, int]] = OrderedDict()

    def find(self, key: _AnswerKey, now: int) -> Advice | None:
        kept = self._kept.get(key)
        if kept is None:
            return None
        advice, until = kept
        if now < until:
            return advice
        del self._kept[key]
        return None

    def keep(self, key: _AnswerKey, advice: Advice, now: int) -> None:
        self._kept.pop(key, None)
        if advice.ttl_ms:
            self._kept[key] = (advice, now + advice.ttl_ms)
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)


class AuthorityBreaker:
    """Shut after so many failures in a row, for a fixed time; then one question at a time tries again. Times are boot
    milliseconds."""

    def __init__(self, policy: AuthorityPolicy) -> None:
        self._policy = policy
        self._failures = 0
        self._shut_until: int | None = None
        self._trial = False

    def shut(self, now: int) -> bool:
        """Whether nothing may be asked now."""
        return self._shut_until is not None and (now < self._shut_until or self._trial)

    def claim(self, now: int) -> bool | None:
        """The leave to ask: None if there is none, else whether this question is the trial."""
        if self.shut(now):
            return None
        trial = self._shut_until is not None
        self._trial |= trial
        return trial

    def ended(self, now: int, *, trial: bool, good: bool | None) -> bool:
        """A question that ``claim`` gave leave to has ended, ``good`` None if that says nothing. Whether it shut or
        opened the breaker; what was asked before it shut changes nothing any more."""
        if trial:
            self._trial = False
        if good is None or (self._shut_until is not None and not trial):
            return False
        if good:
            self._failures, self._shut_until = 0, None
            return trial
        self._failures += 1
        if trial or self._failures >= self._policy.failures:
            self._shut_until = now + self._policy.open_ms
        return self._shut_until is not None and not trial
