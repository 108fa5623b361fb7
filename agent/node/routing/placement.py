"""Placing requests: what the relay asks becomes a request of the core, its decision a route, and both one record.

One ``Choosing`` per request. A decision and its reservation are one step. The record of the last decision that routed,
else of the one that held the request or turned it away, gets all attempts and the ending, and goes to the journal once.
Nothing of a request's text is ever here: the relay hands over counts and sizes.
"""

from collections.abc import Coroutine
from typing import Final, Protocol

from msgspec.structs import replace

from agent.authority.asking import Authority
from agent.effects.clock import Clock
from agent.node.routing.answers import session_word, turned
from agent.node.routing.request import request_of
from agent.observe.instruments import DecisionMetrics
from agent.relay.frontends.replies import API_SIDE, hints_header
from agent.relay.ports import AccessLine, Asked, AttemptReport, Queued, Routed, Turned
from router_core.placement.decision.authority import coarse
from router_core.placement.decision.decision import Decision
from router_core.placement.reasons import HintOutcome, Reason
from router_core.placement.record import Attempt, Choice, DecisionRecord
from router_core.placement.request.hints import HintFault, parse_hints
from router_core.placement.request.request import Endpoint, HintNote, Hints, Pin, PlacementRequest
from router_core.placement.scoring.survey import Survey, survey
from router_core.policy.exchange import Hedge
from router_core.policy.placement import PlacementPolicy
from router_core.record.state import Dialect
from router_core.router.attempt_log import AttemptLog
from router_core.router.outcome import Result
from router_core.router.router import Placement, Router

_ERRORS: Final = 400
_COMMITTED: Final = frozenset({Result.DONE, Result.BROKEN})


class Keeping(Protocol):
    """Where finished records go."""

    def put(self, record: DecisionRecord) -> None: ...


class Placing:
    """Makes a ``Choosing`` per request; hears of attempts and endings. Satisfies the relay's ``Placer``."""

    def __init__(
        self,
        router: Router,
        *,
        clock: Clock,
        journal: Keeping,
        metrics: DecisionMetrics,
        authority: Authority | None = None,
    ) -> None:
        self.router = router
        self.clock = clock
        self.metrics = metrics
        self.authority = authority
        self._journal = journal
        self.open: dict[str, Choosing] = {}
        """Requests under way, by the decision that tells of them."""

    @property
    def policy(self) -> PlacementPolicy:
        """The policy in force."""
        return self.router.policy

    def __call__(self, asked: Asked) -> "Choosing":
        """Read the hints once; the first decision comes when the relay asks for it."""
        hints = parse_hints(asked.headers, asked.facts.hints, session_headers=self.policy.session_headers)
        if isinstance(hints, HintFault):
            return Choosing(self, asked, None, fault=hints)
        session, pin = self.session_of(hints, asked.accepted_ms)
        return Choosing(self, asked, self.router.begin(request_of(asked, hints, session, pin)))

    def session_of(self, hints: Hints, now: int) -> tuple[bytes | None, Pin | None]:
        """The key of the session that a client names, and where it was last served."""
        return (None, None) if hints.session is None else self.router.session(hints.session, now)

    def opened(self, decision_id: str, choosing: "Choosing", before: str | None) -> None:
        """Of a request now tells ``decision_id`` (after decision ``before``), whose record waits for the ending."""
        if before is not None:
            self.open.pop(before, None)
        self.open[decision_id] = choosing

    def attempted(self, report: AttemptReport, out_tokens: int | None) -> None:
        """Note one attempt of a request placed here; those of peers' routers are theirs to note."""
        choosing = self.open.get(report.routed.decision_id) if report.side == API_SIDE else None
        if choosing is not None and choosing.placement is not None:
            _note(choosing.placement.log, choosing.asked.accepted_ms, report, out_tokens)

    def is_followed(self, line: AccessLine) -> bool:
        """True if the next request may ask at once what became of this one: it was a turn of a session."""
        choosing = self.open.get(line.decision_id or "")
        return choosing is not None and choosing.request is not None and choosing.request.session is not None

    def answered(self, line: AccessLine) -> None:
        """A request has ended: complete its record and journal it."""
        if line.side != API_SIDE or line.decision_id is None:
            return
        choosing = self.open.pop(line.decision_id, None)
        placement = None if choosing is None else choosing.placement
        if placement is None:
            return
        assert placement.decision is not None
        log = placement.log
        record = log.ended(
            placement.decision,
            placement.choice,
            status=line.status,
            code=line.code,
            total_ms=line.total_ms,
            first_byte_ms=line.first_byte_ms,
        )
        self.keep(record)
        if log.committed:
            placement.served(log.out_tokens or 0, self.clock.boot_ms())

    def keep(self, record: DecisionRecord) -> None:
        """Journal a finished record."""
        self.metrics.ended(record)
        self._journal.put(record)


class Choosing:
    """One request being placed. ``placement`` is None if a narrowing hint could not be understood, which ``fault``
    tells."""

    __slots__ = ("_placing", "asked", "fault", "placement")

    def __init__(
        self,
        placing: Placing,
        asked: Asked,
        placement: Placement | None,
        *,
        fault: HintFault | None = None,
    ) -> None:
        self.asked = asked
        self.placement = placement
        self.fault = fault
        self._placing = placing

    @property
    def request(self) -> PlacementRequest | None:
        """What is asked of placement."""
        return None if self.placement is None else self.placement.request

    @property
    def decision(self) -> Decision | None:
        """The decision that tells of the request."""
        return None if self.placement is None else self.placement.decision

    @property
    def until_ms(self) -> int | None:
        return None if self.placement is None else self.placement.until_ms

    def consult(self) -> Coroutine[None, None, None] | None:
        """Have the authority's answer before the first decision; once, whatever becomes of the request."""
        placing, placement = self._placing, self.placement
        authority = placing.authority
        if authority is None or placement is None:
            return None
        request, fleet, now = placement.request, placing.router.fleet, placing.clock.boot_ms()
        seen = survey(request, fleet, fleet.policy, now)
        decision_id = placing.router.new_id()
        counsel = authority.at_hand(request, seen, decision_id)
        if counsel is None:
            visible = coarse(seen, request, fleet, fleet.policy, now)
            return _ask(authority, placement, visible, decision_id)
        placement.request = replace(request, advice=counsel)
        return None

    def decide(
        self,
        *,
        attempt: int,
        tried: frozenset[Endpoint],
        refused: frozenset[Endpoint],
        now: int,
        declined: frozenset[Endpoint] = frozenset(),
    ) -> Routed | Turned | Queued:
        """Choose on the newest view and reserve, in one step."""
        placing, placement = self._placing, self.placement
        if placement is None:
            return self._misunderstood()
        before, waited = placement.decision, placement.log.is_waiting
        began_us = placing.clock.boot_us()
        decision = placement.decide(now, attempt=attempt, tried=tried, refused=refused, declined=declined)
        if decision.hold is None or not waited:
            placing.metrics.decided(decision, (placing.clock.boot_us() - began_us) / 1e6)
        if placement.decision is decision:
            placing.opened(decision.id, self, None if before is None else before.id)
        choice = decision.chosen
        if choice is not None:
            return self._routed(placement, attempt, decision, choice, now)
        told_by = placement.decision
        refusal = turned(decision, None if told_by is None else told_by.id)
        if decision.hold is None:
            return refusal
        waiting = placement.waiting(decision)
        return Queued(waiting=waiting, until_ms=decision.hold.until_ms, turned=refusal)

    @property
    def hedge(self) -> Hedge:
        """The policy's word, unless the answer leaves something behind where it is given."""
        keeps = self.asked.dialect is Dialect.RESPONSES
        return Hedge.OFF if self.placement is None or keeps else self._placing.policy.hedge

    def has_other(self, *, tried: frozenset[Endpoint], refused: frozenset[Endpoint], now: int) -> bool:
        """Whether an endpoint that gives signs of life could take the request now, beside these. Reserves nothing."""
        placement = self.placement
        return placement is not None and placement.has_other(now, tried=tried, refused=refused)

    def spare(
        self,
        *,
        beside: Routed,
        attempt: int,
        tried: frozenset[Endpoint],
        refused: frozenset[Endpoint],
        now: int,
    ) -> Routed | None:
        """A second attempt, for which the record stays that of the first one's decision."""
        placement = self.placement
        if placement is None:
            return None
        decision = placement.spare(now, beside=beside.choice, attempt=attempt, tried=tried, refused=refused)
        if decision is None or decision.chosen is None:
            return None
        return self._routed(placement, attempt, decision, decision.chosen, now)

    def held_ms(self, now: int) -> int | None:
        return None if self.placement is None else self.placement.held_ms(now)

    def first_token(self, attempt: int) -> None:
        if self.placement is not None:
            self.placement.first_token(attempt)

    def end(self, attempt: int) -> None:
        if self.placement is not None:
            self.placement.end(attempt)

    def _misunderstood(self) -> Turned:
        """Refuse a request with a malformed hint."""
        reason = Reason.HINT_MALFORMED
        assert self.fault is not None
        note = HintNote(hint=self.fault.hint, outcome=HintOutcome.EXCLUDED, detail=reason.value)
        self._placing.metrics.misunderstood(note)
        return Turned(
            decision_id=None,
            status=reason.status,
            code=reason.value,
            hints=hints_header((note,)),
            words=f"{self.fault.where}: {self.fault.detail}",
        )

    def _routed(
        self, placement: Placement, attempt: int, decision: Decision, choice: Choice, now: int
    ) -> Routed:
        request, router = placement.request, self._placing.router
        return Routed(
            attempt,
            decision.id,
            choice,
            placement.reservation(attempt),
            router.ledger.inst,
            request.hints.request_class.value,
            max(0, placement.until_ms - now),
            decision=decision,
            held_ms=placement.log.held_ms,
            session=session_word(request, choice, router.policy),
        )


async def _ask(authority: Authority, placement: Placement, seen: Survey, decision_id: str) -> None:
    request = placement.request
    placement.request = replace(request, advice=await authority.ask(request, seen, decision_id))


def _note(log: AttemptLog, arrived_ms: int, report: AttemptReport, out_tokens: int | None) -> None:
    """Keep in ``log`` how one attempt went."""
    marks, outcome = report.marks, report.outcome
    first = marks.first_byte_ms if marks is not None else None
    streamed = marks.content_events if marks is not None else None
    attempt = Attempt(
        row=report.routed.choice.label,
        start_ms=round(report.dispatched_ms - arrived_ms),
        connect_ms=round(report.connected_ms - arrived_ms) if report.connected_ms is not None else None,
        first_byte_ms=round(first - arrived_ms) if first is not None else None,
        result=outcome.cause.value if outcome.cause is not None else outcome.result.value,
        refused=outcome.refusal,
    )
    log.note(
        attempt,
        committed=outcome.result in _COMMITTED
        or (first is not None and outcome.status is not None and outcome.status < _ERRORS),
        dispatched_ms=report.dispatched_ms,
        first_token_ms=marks.first_content_ms if marks is not None else None,
        out_tokens=out_tokens if out_tokens is not None else streamed,
    )
