"""Placing requests: what the relay asks becomes a request of the core, its decision a route, and both one record.

One ``Choosing`` per request. A decision and its reservation are one step. The record of the last decision that routed,
else of the one that held the request or turned it away, gets all attempts and the ending, and goes to the journal once.
Nothing of a request's text is ever here: the relay hands over counts and sizes.
"""

import itertools
import math
from collections.abc import Callable, Coroutine
from random import Random
from typing import Protocol

from msgspec.structs import replace

from agent.authority.asking import Authority
from agent.effects.clock import Clock
from agent.node.answers import hints_header, routed, session_word, turned
from agent.node.asking import request_of
from agent.node.course import Course
from agent.observe.instruments import DecisionMetrics
from agent.relay.ports import AccessLine, Asked, AttemptReport, Queued, Routed, Turned
from agent.relay.voice import API_SIDE
from router_core.placement.advice import coarse
from router_core.placement.decide import decide
from router_core.placement.decision import Decision, HoldTerms
from router_core.placement.decision_id import DecisionIds
from router_core.placement.demand import Counted, Demand
from router_core.placement.eligibility import targets_of, until_ms_of
from router_core.placement.fleet import Fleet
from router_core.placement.hints import HintFault, parse_hints
from router_core.placement.hold import after_wait, waiting_of
from router_core.placement.ledger import Ledger
from router_core.placement.reasons import HintOutcome, Reason
from router_core.placement.record import Choice, DecisionRecord
from router_core.placement.request import Endpoint, HintNote, Hints, Pin, PlacementRequest, RequestClass
from router_core.placement.sessions import Sessions, session_key
from router_core.placement.survey import Survey, has_other, survey
from router_core.policy.exchange import Hedge
from router_core.policy.placement import PlacementPolicy
from router_core.record.state import Dialect

_ENDLESS_MS = 10**9


class Keeping(Protocol):
    """Where finished records go."""

    def put(self, record: DecisionRecord) -> None: ...


class Placing:
    """Makes a ``Choosing`` per request; hears of attempts and endings. Satisfies the relay's ``Placer``."""

    def __init__(
        self,
        *,
        fleet: Callable[[], Fleet],
        ledger: Ledger,
        sessions: Sessions,
        session_secret: bytes,
        rng: Random,
        clock: Clock,
        journal: Keeping,
        metrics: DecisionMetrics,
        spilling: set[RequestClass],
        demand: Demand,
        authority: Authority | None = None,
    ) -> None:
        self.fleet = fleet
        self.ledger = ledger
        self.rng = rng
        self.ids = DecisionIds(rng)
        self.clock = clock
        self.metrics = metrics
        self.authority = authority
        self.demand = demand
        self.spilling = spilling
        """Classes whose requests leave the mesh where they may."""
        self._sessions = sessions
        self._secret = session_secret
        self._journal = journal
        self.open: dict[str, Choosing] = {}
        """Requests under way, by the decision that tells of them."""
        self.tickets = itertools.count(1)
        """Numbers for those that wait."""
        self._counted = Counted(fleet())

    @property
    def policy(self) -> PlacementPolicy:
        """The policy in force: that of the fleet, so that rows and choice are always of one."""
        return self.fleet().policy

    def __call__(self, asked: Asked) -> "Choosing":
        """Read the hints once; the first decision comes when the relay asks for it."""
        policy = self.fleet().policy
        hints = parse_hints(asked.headers, asked.facts.hints, session_headers=policy.session_headers)
        if isinstance(hints, HintFault):
            return Choosing(self, asked, None, fault=hints)
        session, pin = self.session_of(hints, asked.accepted_ms)
        request = request_of(asked, hints, session, pin)
        targets = targets_of(request.hints.request_class, policy)
        return Choosing(self, asked, request, until_ms=until_ms_of(request, targets))

    def session_of(self, hints: Hints, now: int) -> tuple[bytes | None, Pin | None]:
        """The key of the session that a client names, and where it was last served."""
        if hints.session is None:
            return None, None
        key = session_key(hints.session, self._secret)
        return key, self._sessions.find(key, now)

    def spilled(self, request_class: RequestClass, is_on: bool) -> None:
        """Whether requests of this class leave the mesh from now on."""
        if is_on:
            self.spilling.add(request_class)
        else:
            self.spilling.discard(request_class)

    def wanted(self, asked: str, decision: Decision, fleet: Fleet, now: int) -> None:
        """Count a request as demand for the model it asks for, if anybody offers it, served or not."""
        counted = self._counted
        if counted.fleet is not fleet:
            counted = self._counted = Counted(fleet)
        choice = decision.chosen
        key8 = counted.key_of(asked, choice)
        if key8 is None:
            return
        if choice is not None:
            work_s = choice.prefill_s + choice.decode_s
        else:
            work_s = decision.hold.seconds if decision.hold is not None else 0.0
        self.demand.note(key8, work_s, now)

    def opened(self, decision_id: str, choosing: "Choosing", before: str | None) -> None:
        """Of a request now tells ``decision_id`` (after decision ``before``), whose record waits for the ending."""
        if before is not None:
            self.open.pop(before, None)
        self.open[decision_id] = choosing

    def attempted(self, report: AttemptReport, out_tokens: int | None) -> None:
        """Note one attempt of a request placed here; those of peers' routers are theirs to note."""
        choosing = self.open.get(report.routed.decision_id) if report.side == API_SIDE else None
        if choosing is not None:
            choosing.course.note(report, out_tokens)

    def is_followed(self, line: AccessLine) -> bool:
        """True if the next request may ask at once what became of this one: it was a turn of a session."""
        choosing = self.open.get(line.decision_id or "")
        return choosing is not None and choosing.request is not None and choosing.request.session is not None

    def answered(self, line: AccessLine) -> None:
        """A request has ended: complete its record and journal it."""
        if line.side != API_SIDE or line.decision_id is None:
            return
        choosing = self.open.pop(line.decision_id, None)
        if choosing is None:
            return
        assert choosing.decision is not None
        record = choosing.course.ended(line, choosing.decision, choosing.choice)
        self.keep(record)
        if (
            choosing.request is not None
            and choosing.request.session is not None
            and choosing.course.committed
        ):
            self._pin(choosing, choosing.request.session)

    def keep(self, record: DecisionRecord) -> None:
        """Journal a finished record."""
        self.metrics.ended(record)
        self._journal.put(record)

    def _pin(self, choosing: "Choosing", session: bytes) -> None:
        choice = choosing.choice
        if choice is None:
            return
        tokens = choice.prompt_tokens + (choosing.course.out_tokens or 0)
        at_ms = self.clock.boot_ms()
        self._sessions.pin(
            session, Pin(endpoint=choice.endpoint, model=choice.model, tokens=tokens, at_ms=at_ms)
        )


class Choosing:
    """One request being placed. ``request`` is None if a narrowing hint could not be understood, which ``fault`` tells.
    After ``until_ms`` (boot time) nothing is dispatched any more."""

    __slots__ = (
        "_is_counted",
        "_placing",
        "_spare",
        "_ticket",
        "_told_by",
        "asked",
        "choice",
        "course",
        "decision",
        "fault",
        "request",
        "until_ms",
    )

    def __init__(
        self,
        placing: Placing,
        asked: Asked,
        request: PlacementRequest | None,
        *,
        until_ms: int | None = None,
        fault: HintFault | None = None,
    ) -> None:
        self.asked = asked
        self.request = request
        self.fault = fault
        self.decision: Decision | None = None
        self.choice: Choice | None = None
        self.course = Course(asked.accepted_ms)
        self._placing = placing
        self._is_counted = False
        self._told_by: str | None = None
        self._ticket: int | None = None
        self._spare: tuple[int, Choice] | None = None
        self.until_ms = until_ms

    def consult(self) -> Coroutine[None, None, None] | None:
        """Have the authority's answer before the first decision; once, whatever becomes of the request."""
        placing, request = self._placing, self.request
        authority = placing.authority
        if authority is None or request is None:
            return None
        fleet, policy, now = placing.fleet(), placing.policy, placing.clock.boot_ms()
        seen = survey(request, fleet, policy, now)
        decision_id = placing.ids.new()
        counsel = authority.at_hand(request, seen, decision_id)
        if counsel is None:
            return self._ask(authority, request, coarse(seen, request, fleet, policy, now), decision_id)
        self.request = replace(request, advice=counsel)
        return None

    async def _ask(
        self, authority: Authority, request: PlacementRequest, seen: Survey, decision_id: str
    ) -> None:
        self.request = replace(request, advice=await authority.ask(request, seen, decision_id))

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
        placing = self._placing
        request = self.request
        if request is None:
            return self._misunderstood()
        if attempt > 1:
            request = replace(request, attempt=attempt, tried=tried, refused=refused, declined=declined)
        if (since_ms := self.course.held_since_ms) is not None:
            waits = self.course.is_waiting
            request = after_wait(request, placing.policy, now, since_ms=since_ms, waits=waits)
        began_us = placing.clock.boot_us()
        fleet = placing.fleet()
        decision = decide(request, fleet, fleet.policy, now, placing.rng, called=placing.ids.new())
        waits_on = decision.hold is not None and self.course.is_waiting
        if not waits_on:
            placing.metrics.decided(decision, (placing.clock.boot_us() - began_us) / 1e6)
            if not self._is_counted:
                self._is_counted = True
                placing.wanted(request.model, decision, fleet, now)
            self.course.note_wait(decision.hold, now)
            self._keep(decision)
        if decision.spill_on is not None:
            placing.spilled(request.hints.request_class, decision.spill_on)
        if decision.chosen is not None:
            return self._reserve(decision, decision.chosen, fleet.policy, now)
        refusal = turned(decision, self._told_by)
        return refusal if decision.hold is None else self._queued(request, decision.hold, refusal)

    @property
    def hedge(self) -> Hedge:
        """The policy's word, unless the answer leaves something behind where it is given."""
        keeps = self.asked.dialect is Dialect.RESPONSES
        return Hedge.OFF if self.request is None or keeps else self._placing.policy.hedge

    def has_other(self, *, tried: frozenset[Endpoint], refused: frozenset[Endpoint], now: int) -> bool:
        """Whether an endpoint that gives signs of life could take the request now, beside these. Reserves nothing."""
        if self.request is None:
            return False
        request = replace(self.request, attempt=2, tried=tried, refused=refused)
        fleet = self._placing.fleet()
        return has_other(request, fleet, fleet.policy, now)

    def spare(
        self,
        *,
        beside: Routed,
        attempt: int,
        tried: frozenset[Endpoint],
        refused: frozenset[Endpoint],
        now: int,
    ) -> Routed | None:
        """A second attempt goes to a warm endpoint of the mesh with a free place, and nowhere while the first one waits for
        its model to be loaded: that would load it twice. The record stays that of the first one's decision."""
        placing, request, told_by = self._placing, self.request, self._told_by
        fleet = placing.fleet()
        row = fleet.row(beside.at, beside.served)
        if request is None or told_by is None or (row is not None and not row.resident):
            return None
        request = replace(request, attempt=attempt, tried=tried, refused=refused, spare=True)
        decision = decide(request, fleet, fleet.policy, now, placing.rng, called=told_by)
        choice = decision.chosen
        if choice is None:
            return None
        there = self._reserve(decision, choice, fleet.policy, now)
        self._spare = there.seq, choice
        return there

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

    def held_ms(self, now: int) -> int | None:
        return self.course.waited_ms(now)

    def first_token(self, seq: int) -> None:
        self._placing.ledger.first_token(seq)
        if self._spare is not None and self._spare[0] == seq:
            self.choice = self._spare[1]

    def finish(self, seq: int) -> None:
        self._placing.ledger.end(seq)

    def fail(self, seq: int) -> None:
        self._placing.ledger.end(seq)

    def _keep(self, decision: Decision) -> None:
        """``decision`` tells of the request from now on, unless it chose nobody after another one did."""
        if decision.chosen is None and self.choice is not None:
            return
        self.decision, self.choice = decision, decision.chosen
        self._placing.opened(decision.id, self, self._told_by)
        self._told_by = decision.id

    def _queued(self, request: PlacementRequest, hold: HoldTerms, refusal: Turned) -> Queued:
        if self._ticket is None:
            self._ticket = next(self._placing.tickets)
        return Queued(waiting=waiting_of(request, hold, self._ticket), until_ms=hold.until_ms, turned=refusal)

    def _reserve(self, decision: Decision, choice: Choice, policy: PlacementPolicy, now: int) -> Routed:
        placing, until = self._placing, self.until_ms
        return routed(
            decision,
            choice,
            placing.ledger.reserve(choice, now, math.ceil(1000.0 * choice.est.net)),
            inst=placing.ledger.inst,
            left_ms=max(0, until - now) if until is not None else _ENDLESS_MS,
            held_ms=self.course.held_ms,
            session=session_word(self.request, choice, policy),
        )
