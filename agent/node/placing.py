"""Placing requests: what the relay asks becomes a request of the core, its decision a route, and both one record.

One ``Choosing`` per request. A decision and its reservation are one step. The record of the last decision that routed,
else of the one that held the request or turned it away, gets all attempts and the ending, and goes to the journal once.
Nothing of a request's text is ever here: the relay hands over counts and sizes.
"""

import itertools
import math
from collections.abc import Callable, Coroutine
from functools import lru_cache
from random import Random
from typing import Protocol

from msgspec.structs import replace

from agent.authority.asking import Authority
from agent.effects.clock import Clock
from agent.observe.instruments import DecisionMetrics
from agent.relay.ports import AccessLine, Asked, AttemptReport, Queued, Routed, Turned
from router_core.exchange.events import Result
from router_core.placement.decide import decide, new_id
from router_core.placement.decision import Decision, HoldTerms, record_of
from router_core.placement.demand import Demand, demand_key
from router_core.placement.eligibility import targets_of
from router_core.placement.fleet import Fleet
from router_core.placement.hints import HintFault, parse_hints
from router_core.placement.hold import waiting_of
from router_core.placement.ledger import Ledger
from router_core.placement.offers import offer_of
from router_core.placement.reasons import HintOutcome, Reason
from router_core.placement.record import Attempt, Choice, DecisionRecord, Ending
from router_core.placement.request import Endpoint, HintNote, Hints, Pin, PlacementRequest, RequestClass
from router_core.placement.sessions import Sessions, session_key
from router_core.placement.survey import Survey, survey
from router_core.policy.placement import Match, PlacementPolicy
from router_core.record.state import Capability

API = "api"
"""The side on which requests are placed; what peers send in was placed by them."""

_ERRORS = 400
_COMMITTED = frozenset({Result.DONE, Result.BROKEN})
_CANCELLED = {"client_gone": "client", "slow_client": "slow_client"}


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

    @property
    def policy(self) -> PlacementPolicy:
        """The policy in force: that of the fleet, so that rows and choice are always of one."""
        return self.fleet().policy

    def __call__(self, asked: Asked) -> "Choosing":
        """Read the hints once; the first decision comes when the relay asks for it."""
        hints = parse_hints(asked.headers, asked.facts.hints, session_headers=self.policy.session_headers)
        if isinstance(hints, HintFault):
            return Choosing(self, asked, None, fault=hints)
        session, pin = self.session_of(hints, asked.accepted_ms)
        return Choosing(self, asked, _request_of(asked, hints, session, pin))

    def session_of(self, hints: Hints, now: int) -> tuple[bytes | None, Pin | None]:
        """The key of the session that a client names, and where it was last served."""
        if hints.session is None:
            return None, None
        key = session_key(hints.session, self._secret)
        return key, self._sessions.find(key, now)

    def spilled(self, request_class: RequestClass, is_on: bool | None) -> None:
        """Whether requests of this class leave the mesh from now on; None says nothing about it."""
        if is_on:
            self.spilling.add(request_class)
        elif is_on is False:
            self.spilling.discard(request_class)

    def opened(self, decision_id: str, choosing: "Choosing", before: str | None) -> None:
        """Of a request now tells ``decision_id`` (after decision ``before``), whose record waits for the ending."""
        if before is not None:
            self.open.pop(before, None)
        self.open[decision_id] = choosing

    def attempted(self, report: AttemptReport, out_tokens: int | None) -> None:
        """Note one attempt of a request placed here; those of peers' routers are theirs to note."""
        choosing = self.open.get(report.routed.decision_id) if report.side == API else None
        if choosing is not None:
            choosing.note(report, out_tokens)

    def is_followed(self, line: AccessLine) -> bool:
        """True if the next request may ask at once what became of this one: it was a turn of a session."""
        choosing = self.open.get(line.decision_id or "")
        return choosing is not None and choosing.request is not None and choosing.request.session is not None

    def answered(self, line: AccessLine) -> None:
        """A request has ended: complete its record and journal it."""
        if line.side != API or line.decision_id is None:
            return
        choosing = self.open.pop(line.decision_id, None)
        if choosing is None:
            return
        record = choosing.ended(line)
        self.keep(record)
        if choosing.request is not None and choosing.request.session is not None and choosing.committed:
            self._pin(choosing, choosing.request.session)

    def keep(self, record: DecisionRecord) -> None:
        """Journal a finished record."""
        self.metrics.ended(record)
        self._journal.put(record)

    def _pin(self, choosing: "Choosing", session: bytes) -> None:
        choice = choosing.choice
        if choice is None:
            return
        tokens = choice.prompt_tokens + (choosing.out_tokens or 0)
        at_ms = self.clock.boot_ms()
        self._sessions.pin(
            session, Pin(endpoint=choice.endpoint, model=choice.model, tokens=tokens, at_ms=at_ms)
        )


class Choosing:
    """One request being placed. ``request`` is None if a narrowing hint could not be understood, which ``fault`` tells."""

    def __init__(
        self,
        placing: Placing,
        asked: Asked,
        request: PlacementRequest | None,
        *,
        fault: HintFault | None = None,
    ) -> None:
        self.asked = asked
        self.request = request
        self.fault = fault
        self.decision: Decision | None = None
        self.choice: Choice | None = None
        self.committed = False
        self.out_tokens: int | None = None
        self._placing = placing
        self._attempts: list[Attempt] = []
        self._dispatched_ms = 0.0
        self._first_token_ms: float | None = None
        self._counted = False
        self._told_by: str | None = None
        self._ticket: int | None = None
        self._held_since_ms: int | None = None
        self._waiting_since_ms: int | None = None
        self._held_ms: int | None = None
        self.until_ms = None if request is None else _until_ms(request, placing.policy)
        """Boot time after which nothing is dispatched any more."""

    def consult(self) -> Coroutine[None, None, None] | None:
        """Have the authority's answer before the first decision; once, whatever becomes of the request."""
        placing, request = self._placing, self.request
        authority = placing.authority
        if authority is None or request is None:
            return None
        seen = survey(request, placing.fleet(), placing.policy, placing.clock.boot_ms())
        decision_id = new_id(placing.rng)
        counsel = authority.at_hand(request, seen, decision_id)
        if counsel is None:
            return self._ask(authority, request, seen, decision_id)
        self.request = replace(request, advice=counsel)
        return None

    async def _ask(
        self, authority: Authority, request: PlacementRequest, seen: Survey, decision_id: str
    ) -> None:
        self.request = replace(request, advice=await authority.ask(request, seen, decision_id))

    def decide(
        self, *, attempt: int, tried: frozenset[Endpoint], refused: frozenset[Endpoint], now: int
    ) -> Routed | Turned | Queued:
        """Choose on the newest view and reserve, in one step."""
        placing = self._placing
        request = self.request
        if request is None:
            return self._misunderstood()
        if attempt > 1 or self._held_since_ms is not None:
            request = replace(
                request,
                attempt=attempt,
                tried=tried,
                refused=refused,
                held_since_ms=self._held_since_ms,
                waits=self._waiting_since_ms is not None,
            )
        began_us = placing.clock.boot_us()
        fleet = placing.fleet()
        decision = decide(request, fleet, fleet.policy, now, placing.rng)
        waits_on = decision.hold is not None and self._waiting_since_ms is not None
        if not waits_on:
            placing.metrics.decided(decision, (placing.clock.boot_us() - began_us) / 1e6)
            self._count(request.model, decision, fleet, now)
            self._note_wait(decision.hold, now)
            self._keep(decision)
        placing.spilled(request.hints.request_class, decision.spill_on)
        if decision.chosen is not None:
            return self._routed(decision, decision.chosen, now)
        turned = _turned(decision, self._told_by)
        return turned if decision.hold is None else self._queued(request, decision.hold, turned)

    def _misunderstood(self) -> Turned:
        """The refusal of a request whose hints narrow it nobody knows how."""
        reason = Reason.HINT_MALFORMED
        assert self.fault is not None
        note = HintNote(hint=self.fault.hint, outcome=HintOutcome.EXCLUDED, detail=reason.value)
        self._placing.metrics.misunderstood(note)
        return Turned(decision_id=None, status=reason.status, code=reason.value, hints=hints_header((note,)))

    def _count(self, asked: str, decision: Decision, fleet: Fleet, now: int) -> None:
        """Count the request once as demand for the model it asks for, if anybody offers it, served or not."""
        if self._counted:
            return
        self._counted = True
        offer = offer_of(asked, fleet, fleet.policy)
        if offer is None or not offer.rows:
            return
        choice = decision.chosen
        served = fleet.row(choice.endpoint, choice.model) if choice is not None else None
        row = served if served in offer.rows else offer.rows[0]
        assert row is not None
        work_s = decision.hold.seconds if decision.hold is not None else 0.0
        if choice is not None:
            work_s = choice.prefill_s + choice.decode_s
        self._placing.demand.note(demand_key(row.digest, row.names[0]), work_s, now)

    def first_token(self, seq: int) -> None:
        self._placing.ledger.first_token(seq)

    def finish(self, seq: int) -> None:
        self._placing.ledger.finish(seq)

    def fail(self, seq: int) -> None:
        self._placing.ledger.fail(seq)

    def note(self, report: AttemptReport, out_tokens: int | None) -> None:
        """Keep how one attempt went."""
        marks, outcome = report.marks, report.outcome
        arrived = self.asked.accepted_ms
        first = marks.first_byte_ms if marks is not None else None
        streamed = marks.content_events if marks is not None else None
        self.committed = outcome.result in _COMMITTED or (
            first is not None and outcome.status is not None and outcome.status < _ERRORS
        )
        self.out_tokens = out_tokens if out_tokens is not None else streamed
        self._dispatched_ms = report.dispatched_ms
        self._first_token_ms = marks.first_content_ms if marks is not None else None
        self._attempts.append(
            Attempt(
                row=report.routed.label,
                start_ms=round(report.dispatched_ms - arrived),
                connect_ms=round(report.connected_ms - arrived) if report.connected_ms is not None else None,
                first_byte_ms=round(first - arrived) if first is not None else None,
                result=outcome.cause.value if outcome.cause is not None else outcome.result.value,
                refused=outcome.refusal,
            )
        )

    def ended(self, line: AccessLine) -> DecisionRecord:
        """The record with its attempts and ending. Predictions are of one attempt, so errors count from its dispatch,
        and an answer that did not come as a stream says nothing about its first token."""
        assert self.decision is not None
        self._note_wait(None, round(self.asked.accepted_ms + line.total_ms))
        est = self.choice.est if self.choice is not None and self.committed and line.code is None else None
        dispatched_ms, first_ms = self._dispatched_ms, self._first_token_ms
        ttft_ms = first_ms - dispatched_ms if first_ms is not None else None
        ect_ms = self.asked.accepted_ms + line.total_ms - dispatched_ms
        return replace(
            record_of(self.decision),
            attempts=tuple(self._attempts),
            outcome=Ending(
                status=line.status,
                total_ms=round(line.total_ms),
                ttft_ms=round(line.first_byte_ms) if line.first_byte_ms is not None else None,
                out_tokens=self.out_tokens,
                held_ms=self._held_ms,
                cancelled_by=_CANCELLED.get(line.code or ""),
                err_ttft=_ln_error(ttft_ms, est.ttft) if est is not None else None,
                err_ect=_ln_error(ect_ms, est.ect) if est is not None else None,
            ),
        )

    def _keep(self, decision: Decision) -> None:
        """``decision`` tells of the request from now on, unless it chose nobody after another one did."""
        if decision.chosen is None and self.choice is not None:
            return
        self.decision, self.choice = decision, decision.chosen
        self._placing.opened(decision.id, self, self._told_by)
        self._told_by = decision.id

    def _note_wait(self, hold: HoldTerms | None, now: int) -> None:
        """A wait for room begins, or has ended."""
        if hold is not None:
            self._waiting_since_ms, self._held_since_ms = now, hold.since_ms
        elif self._waiting_since_ms is not None:
            self._held_ms = (self._held_ms or 0) + now - self._waiting_since_ms
            self._waiting_since_ms = None

    def _queued(self, request: PlacementRequest, hold: HoldTerms, turned: Turned) -> Queued:
        if self._ticket is None:
            self._ticket = next(self._placing.tickets)
        return Queued(waiting=waiting_of(request, hold, self._ticket), until_ms=hold.until_ms, turned=turned)

    def _routed(self, decision: Decision, choice: Choice, now: int) -> Routed:
        reservation = self._placing.ledger.reserve(choice, now)
        until = self.until_ms
        return Routed(
            decision_id=decision.id,
            at=choice.endpoint,
            node=None if choice.is_self else choice.node_id,
            label=f"@{choice.node_name}/{choice.endpoint_name}",
            endpoint=choice.endpoint_name,
            served=choice.model,
            reason=decision.reason.value,
            seq=reservation.seq,
            inst=self._placing.ledger.inst,
            route_seq=reservation.route_seq,
            prompt_tokens=choice.prompt_tokens,
            output_tokens=choice.output_tokens,
            request_class=decision.evidence.request.hints.request_class.value,
            wait_ms=choice.max_wait_ms,
            left_ms=max(0, until - now) if until is not None else choice.max_wait_ms,
            resident=choice.resident,
            ttft_ms=1000.0 * choice.est.ttft,
            load_ms=1000.0 * choice.est.load,
            ect_ms=1000.0 * choice.est.ect,
            service_ms=1000.0 * (choice.prefill_s + choice.decode_s),
            queue_ms=1000.0 * choice.est.wait,
            net_ms=1000.0 * choice.est.net,
            hints=hints_header(decision.hints),
            match=choice.match.value if choice.match is not Match.EXACT else None,
            session=self._session(choice),
            held_ms=self._held_ms,
        )

    def _session(self, choice: Choice) -> str | None:
        """What becomes of the client's session by this choice; None if it named none."""
        request = self.request
        if request is None or request.session is None:
            return None
        if not self._placing.policy.affinity_bonus:
            return "off"
        pin = request.pin
        if pin is None:
            return "miss"
        return "hit" if (pin.endpoint, pin.model) == (choice.endpoint, choice.model) else "moved"


def _until_ms(request: PlacementRequest, policy: PlacementPolicy) -> int:
    deadline_ms = request.hints.deadline_ms
    if deadline_ms is None:
        deadline_ms = targets_of(request.hints.request_class, policy).deadline_ms
    return request.arrival_ms + deadline_ms


def hints_header(notes: tuple[HintNote, ...]) -> str | None:
    """What became of each hint, as ``x-pairmesh-hints``; None if there was none."""
    if not notes:
        return None
    said = []
    for note in notes:
        outcome = note.outcome.value
        if note.outcome is HintOutcome.EXCLUDED and note.detail is not None:
            outcome = f"{outcome}({note.detail})"
        said.append(f"{note.hint}={outcome}")
    return ", ".join(said)


def _turned(decision: Decision, known_as: str | None) -> Turned:
    """The refusal; ``known_as`` is the decision under which the journal keeps the request."""
    return Turned(
        decision_id=known_as,
        status=decision.reason.status,
        code=decision.reason.value,
        retry_after_s=decision.retry_after_s,
        counts=tuple([(code.value, rows) for code, rows in decision.counts.items()]),
        nearest=decision.nearest,
        hints=hints_header(decision.hints),
    )


def _request_of(asked: Asked, hints: Hints, session: bytes | None, pin: Pin | None) -> PlacementRequest:
    facts = asked.facts
    return PlacementRequest(
        request_id=asked.request_id,
        dialect=asked.dialect,
        model=facts.model,
        arrival_ms=asked.accepted_ms,
        stream=facts.stream,
        text_bytes=facts.text_bytes,
        body_bytes=asked.body_bytes,
        images=facts.images,
        audio_parts=facts.audio_parts,
        output_cap=facts.max_tokens,
        choices=facts.n or 1,
        num_ctx=facts.num_ctx,
        requires=_requires(
            facts.tools,
            facts.images > 0,
            facts.audio_parts > 0,
            facts.json_schema,
            facts.logprobs,
            facts.stream,
        ),
        hints=hints,
        caller=asked.caller,
        session=session,
        pin=pin,
    )


@lru_cache(maxsize=64)
def _requires(*needed: bool) -> Capability:
    """The capabilities that are needed, of those that the facts of a body tell."""
    requires = Capability(0)
    for is_needed, capability in zip(needed, _OF_FACTS, strict=True):
        if is_needed:
            requires |= capability
    return requires


_OF_FACTS = (
    Capability.TOOLS,
    Capability.VISION,
    Capability.AUDIO_IN,
    Capability.JSON_SCHEMA,
    Capability.LOGPROBS,
    Capability.STREAMING,
)


def _ln_error(actual_ms: float | None, predicted_s: float) -> float | None:
    if actual_ms is None or actual_ms <= 0 or predicted_s <= 0:
        return None
    return math.log(actual_ms / (1000.0 * predicted_s))
