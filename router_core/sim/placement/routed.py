"""Requests placed by anything with the face of ``decide``: the exchange machine that ships, driven at virtual time.

Reservation in the step of the decision, the hold queue, the ingress's own admission, one more decision after a refusal,
failover and the breaker: all as the daemon wires it. A client that is turned away with
``Retry-After`` comes back, and its waiting counts. Refuses to know how a choice is made.
"""

from collections.abc import Callable, Sequence
from functools import partial

from msgspec.structs import replace

from router_core.exchange import events as ev
from router_core.exchange.machine import ENDED, Exchange, State
from router_core.ids import id8_of
from router_core.placement.decision.decision import Decision
from router_core.placement.decision.ingress import IngressAsk, admit, own_row, service_s
from router_core.placement.request.request import PlacementRequest
from router_core.record.membership import Liveness
from router_core.record.state import Capability, Dialect
from router_core.router.failure import Cause
from router_core.router.outcome import Outcome as Ended
from router_core.router.outcome import Result as How
from router_core.router.patience import overdue_ms
from router_core.router.router import Decider, blame_of
from router_core.sim.placement.arrivals import TALK_BLOCK
from router_core.sim.placement.attempt import Attempt, learn
from router_core.sim.placement.engine import Job
from router_core.sim.placement.fleet_node import ENDPOINT
from router_core.sim.placement.fleet_world import Ask, FleetWorld

_RETRIED = frozenset({429, 503})


class Routed:
    """A dispatch: one decider for each router. ``on_choice`` hears of each decision before it is made, ``on_settled``
    of each request that has ended."""

    def __init__(
        self,
        world: FleetWorld,
        deciders: Sequence[Decider],
        *,
        on_choice: Callable[[Ask], None] | None = None,
        on_settled: Callable[[Ask], None] | None = None,
    ) -> None:
        self.world = world
        for router, decider in zip(world.routers, deciders, strict=True):
            router.core.decider = decider
        self.on_choice = on_choice or _unheard
        self.on_settled = on_settled or _unheard

    def start(self, ask: Ask) -> None:
        """A request has arrived at its client's router."""
        _Flight(self, ask).begin()


class _Flight:
    """One request under way."""

    def __init__(self, routed: Routed, ask: Ask) -> None:
        self._routed = routed
        self._world = world = routed.world
        self._ask = ask
        self._router = world.routers[ask.arrival.router]
        self._core = self._router.core
        self._try = 0
        self._ticket: int | None = None
        self._attempt: Attempt | None = None
        arrival = ask.arrival
        session = arrival.blocks[TALK_BLOCK].to_bytes(8, "big") if len(arrival.blocks) > TALK_BLOCK else None
        pin = self._core.sessions.find(session, world.now) if session is not None else None
        self._request = PlacementRequest(
            request_id=f"{ask.number}.0",
            dialect=Dialect.CHAT,
            model=arrival.model,
            arrival_ms=arrival.at_ms,
            stream=True,
            text_bytes=ask.text_bytes,
            body_bytes=ask.text_bytes,
            requires=Capability.STREAMING,
            session=session,
            pin=pin,
        )
        self._placement = self._core.begin(self._request)
        self._machine = Exchange(world.exchange, until_ms=self._placement.until_ms)

    def begin(self) -> None:
        self._tell(ev.BodyParsed())

    def _tell(self, event: ev.Event) -> None:
        for action in self._machine.handle(event, self._world.now):
            self._perform(action)
        deadline = self._machine.deadline
        if deadline is not None:
            self._world.timeline.at(deadline, partial(self._time, deadline, self._machine))

    def _time(self, at: int, machine: Exchange) -> None:
        if machine is self._machine and machine.deadline == at:
            streaming = machine.state is State.STREAMING
            self._tell(ev.TimePassed(last_byte_ms=at if streaming else None))

    def _perform(self, action: ev.Action) -> None:
        if isinstance(action, ev.Decide):
            self._choose(action)
        elif isinstance(action, ev.Dial):
            self._later(self._delay(self._current()), ev.Connected(attempt=action.attempt))
        elif isinstance(action, ev.SendRequest):
            self._send()
        elif isinstance(action, ev.SendBody):
            self._world.timeline.after(self._world.wire.link_ms, partial(self._submit, self._current()))
        elif isinstance(action, ev.CancelUpstream):
            self._cancel(self._current())
        elif isinstance(action, ev.NoteOverdue):
            self._core.overdue(action.endpoint, self, self._world.now)
        elif isinstance(action, ev.EndAttempt):
            self._ended(action.outcome)
        elif isinstance(action, ev.Finish):
            self._settle(200)
        elif isinstance(action, ev.Reply):
            self._turned_away(action)

    # --- deciding --------------------------------------------------------------------------------------------

    def _choose(self, action: ev.Decide) -> None:
        world, core = self._world, self._core
        self._routed.on_choice(self._ask)
        if not core.lateness.is_calm:
            core.sweep(world.now)
        self._router.fleet(world.now)
        decision = self._placement.decide(
            world.now,
            attempt=action.attempt,
            tried=action.tried,
            refused=action.refused,
            declined=action.declined,
        )
        if decision.hold is not None:
            self._wait(decision)
            return
        self._leave_queue()
        choice = decision.chosen
        if choice is None:
            self._later(0, _turned_away(decision))
            return
        place = world.place[choice.endpoint]
        self._attempt = Attempt(
            number=action.attempt,
            choice=choice,
            reservation=self._placement.reservation(action.attempt),
            sent_ms=world.now,
            place=place,
            misread=world.nodes[place].spec.misread,
            untold=world.nodes[place].spec.untold,
        )
        core.dispatched(choice.endpoint, world.now, choice.prefill_s + choice.decode_s)
        est = choice.est
        target = ev.Target(
            endpoint=choice.endpoint,
            peer=not choice.is_self,
            connect_ms=world.exchange.connect_ms,
            idle_ms=world.exchange.idle_ms if choice.is_self else 0,
            overdue_ms=overdue_ms(
                ttft_ms=1000.0 * est.ttft, load_ms=1000.0 * est.load, ect_ms=1000.0 * est.ect, stream=True
            ),
            patient=choice.ahead is None,
        )
        self._later(0, ev.Decided(target=target))

    def _wait(self, decision: Decision) -> None:
        """Everybody is full: wait in the router, or go on waiting."""
        waiting = self._placement.waiting(decision)
        if self._ticket is None:
            self._ticket = waiting.ticket
            woken = partial(self._if_current, self._machine, ev.Woken())
            self._core.queue.join(waiting, woken, self._world.now)
        assert decision.hold is not None
        self._tell(ev.Queued(until_ms=decision.hold.until_ms, turned=_turned_away(decision)))

    def _leave_queue(self) -> None:
        if self._ticket is not None:
            ticket, self._ticket = self._ticket, None
            self._core.queue.leave(ticket, self._world.now)

    # --- an attempt ------------------------------------------------------------------------------------------

    @property
    def last_byte_ms(self) -> float | None:
        """When the latest token came: now, while they come."""
        attempt = self._attempt
        if attempt is None or attempt.first_ms is None:
            return None
        silent = self._world.nodes[attempt.place].engine.frozen
        return attempt.first_ms if silent else self._world.now

    def review(self) -> None:
        """Whether to go elsewhere, if the node that this waits at is suspected."""
        world, router, attempt = self._world, self._router, self._attempt
        if attempt is None or attempt.first_ms is not None:
            return
        seen = router.picture(world.nodes[attempt.place].member.id16, world.now)
        if seen is None or seen.liveness is not Liveness.SUSPECT:
            return
        tried = self._machine.tried | {attempt.choice.endpoint}
        if self._placement.has_other(world.now, tried=tried, refused=self._machine.refused):
            self._tell(ev.NoSignOfLife(attempt=attempt.number, cause=Cause.SUSPECT))

    def _send(self) -> None:
        attempt = self._current()
        self._core.sent(attempt.choice.endpoint, self)
        self._router.waiting[self] = None
        if attempt.choice.is_self:
            self._submit(attempt)
        else:
            self._world.timeline.after(self._world.wire.link_ms, partial(self._at_ingress, attempt))

    def _at_ingress(self, attempt: Attempt) -> None:
        """The serving node's last word, before it takes the body."""
        world, choice = self._world, attempt.choice
        if attempt is not self._attempt:
            return
        fleet, local = world.fleet(attempt.place), world.nodes[attempt.place].local
        asked = IngressAsk(
            endpoint=choice.endpoint_name,
            model=choice.model,
            dialect=int(Dialect.CHAT),
            resident=choice.resident,
            ahead=choice.ahead,
            patient=choice.ahead is None,
        )
        cause = admit(asked, fleet)
        if cause is not None:
            self._ask.refusals += 1
            self._bring_state(attempt.place)
            self._later(world.wire.link_ms, ev.IngressRefused(attempt=attempt.number, cause=cause.value))
            return
        row = own_row(fleet, choice.endpoint_name, choice.model)
        work_s = service_s(row, choice.prompt_tokens, choice.output_tokens) if row is not None else 0.0
        attempt.ticket = local.start(ENDPOINT, work_s, world.now)
        router = id8_of(self._router.node.member.id16)
        local.accepted(router, self._core.ledger.inst, attempt.reservation.route_seq, world.now)
        self._later(world.wire.link_ms, ev.Continued(attempt=attempt.number))

    def _submit(self, attempt: Attempt) -> None:
        if attempt is not self._attempt:
            self._unbook(attempt)
            return
        arrival = self._ask.arrival
        attempt.job = Job(
            model=attempt.choice.model,
            prompt=arrival.prompt,
            output=arrival.output,
            on_first=partial(self._first_token, attempt),
            on_end=partial(self._answered, attempt),
            blocks=arrival.blocks,
        )
        self._world.nodes[attempt.place].engine.submit(attempt.job)

    def _bring_state(self, place: int) -> None:
        """The serving node's newest record goes along with its reply."""
        newest = self._world.tell_now(place)
        if newest is not None:
            self._world.timeline.after(self._world.wire.link_ms, partial(self._router.heard, newest))

    def _first_token(self, attempt: Attempt) -> None:
        if self._world.wire.replies and not attempt.choice.is_self:
            self._bring_state(attempt.place)
        self._world.timeline.after(self._delay(attempt), partial(self._hear_first, attempt))

    def _hear_first(self, attempt: Attempt) -> None:
        if attempt is not self._attempt or self._machine.state in ENDED:
            return
        attempt.first_ms = self._ask.first_ms = self._world.now
        self._placement.first_token(attempt.number)
        self._core.heard(attempt.choice.endpoint)
        self._tell(ev.HeadReceived(attempt=attempt.number, status=200))
        self._tell(ev.FirstByteReceived(attempt=attempt.number))

    def _answered(self, attempt: Attempt) -> None:
        self._unbook(attempt)
        if attempt is self._attempt:
            self._later(self._delay(attempt), ev.BodyEnded(attempt=attempt.number))

    def _cancel(self, attempt: Attempt) -> None:
        self._world.timeline.after(self._delay(attempt), partial(self._drop, attempt))

    def _drop(self, attempt: Attempt) -> None:
        if attempt.job is not None:
            self._world.nodes[attempt.place].engine.cancel(attempt.job)
        self._unbook(attempt)

    def _unbook(self, attempt: Attempt) -> None:
        if attempt.ticket is not None:
            self._world.nodes[attempt.place].local.finish(attempt.ticket)
            attempt.ticket = None

    def _ended(self, outcome: Ended) -> None:
        attempt, now = self._current(), self._world.now
        self._router.waiting.pop(self, None)
        self._placement.ended(outcome, self, now)
        if outcome.result is How.DONE:
            self._ask.node = attempt.place
            self._ask.cold = attempt.job is not None and attempt.job.cold
            self._placement.served(self._ask.arrival.output, now)
        learn(self._world, self._ask, attempt, blame_of(outcome))
        self._attempt = None
        self._core.queue.news(now)

    # --- the client ------------------------------------------------------------------------------------------

    def _turned_away(self, reply: ev.Reply) -> None:
        """A client that may come back does so when it was told to, as long as its patience lasts."""
        world, now = self._world, self._world.now
        self._leave_queue()
        back_ms = now + 1000 * (reply.retry_after_s or 1)
        if reply.status not in _RETRIED or back_ms >= self._placement.until_ms:
            self._settle(reply.status)
            return
        self._ask.retries += 1
        world.timeline.at(back_ms, self._again)

    def _again(self) -> None:
        self._try += 1
        request = replace(self._request, request_id=f"{self._ask.number}.{self._try}")
        self._placement = self._core.begin(request)
        self._machine = Exchange(self._world.exchange, until_ms=self._placement.until_ms)
        self.begin()

    def _settle(self, status: int) -> None:
        self._world.settle(self._ask, status)
        self._routed.on_settled(self._ask)

    # --- shared ----------------------------------------------------------------------------------------------

    def _later(self, delay_ms: int, event: ev.Event) -> None:
        self._world.timeline.after(delay_ms, partial(self._if_current, self._machine, event))

    def _if_current(self, machine: Exchange, event: ev.Event) -> None:
        if machine is self._machine:
            self._tell(event)

    def _current(self) -> Attempt:
        assert self._attempt is not None
        return self._attempt

    def _delay(self, attempt: Attempt) -> int:
        return 0 if attempt.choice.is_self else self._world.wire.link_ms


def _unheard(_ask: Ask) -> None:
    return None


def _turned_away(decision: Decision) -> ev.TurnedAway:
    reason = decision.reason
    return ev.TurnedAway(status=reason.status, code=reason.value, retry_after_s=decision.retry_after_s)
