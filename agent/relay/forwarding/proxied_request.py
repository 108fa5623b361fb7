"""Drives one request: turns the exchange machine's actions into IO, and what IO does into its events.

One ``Courier`` per request and one ``Leg`` per attempt, called straight from the protocols' callbacks; a task is only
spawned to dial. Whatever happens, an attempt's reservation and counters are given back where the attempt ends. Refuses
to know framing (the connections do that), dialects (a ``Voice`` tells errors) and how an endpoint is chosen.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from agent.relay.forwarding.answer import Answering
from agent.relay.forwarding.body import Parcel
from agent.relay.forwarding.context import Voice, Wiring
from agent.relay.forwarding.signs_of_life import Vital, Watch
from agent.relay.http.frontend import Client
from agent.relay.http.headers import value_of
from agent.relay.http.parser import Request
from agent.relay.ports import Asked, Choosing, Queued, Routed, Turned
from agent.relay.upstream.attempt import HELD_ANSWER, Attempt, Mode, attempt_report
from agent.relay.upstream.connection import AnswerHead, UpstreamConnection
from agent.relay.upstream.pool import ConnectFailed
from agent.relay.upstream.route_header import route_of
from agent.relay.upstream.targets import Place, attempt_target, classify, engine_request, peer_request
from router_core.exchange import events as ev
from router_core.exchange.machine import ENDED, Exchange, State
from router_core.placement.request.request import Endpoint
from router_core.policy.exchange import ExchangePolicy
from router_core.record.membership import Liveness
from router_core.router.failure import Cause, FailureClass
from router_core.router.patience import silence_limit_ms

LOOK_EVERY_MS = 500.0
"""How often it is looked whether an attempt without a sign of life could go elsewhere."""
_LOST_PEERS = (Liveness.GONE, Liveness.LEFT, Liveness.REMOVED)


class Leg(Attempt):
    """One attempt: its notes, its connection, and what it hears from there."""

    __slots__ = (
        "courier",
        "dialling",
        "look_ms",
        "number",
        "place",
        "routed",
        "suspect",
        "upstream",
        "watch",
    )

    def __init__(self, courier: "Courier", routed: Routed, place: Place | None, dispatched_ms: float) -> None:
        super().__init__(peer=not routed.choice.is_self, dispatched_ms=dispatched_ms)
        self.courier = courier
        self.number = routed.attempt
        self.routed = routed
        self.place = place
        self.upstream: UpstreamConnection | None = None
        self.dialling: asyncio.Task[Any] | None = None
        self.suspect = False
        self.look_ms = 0.0
        self.watch: Watch | None = None

    def abort(self) -> None:
        """Stop dialling, or drop the connection."""
        if self.dialling is not None:
            self.dialling.cancel()
            self.dialling = None
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            upstream.abort()

    def continued(self) -> None:
        self.asked_for_body = True
        self.courier.hear(ev.Continued(attempt=self.number))

    def head(self, head: AnswerHead, length: int | None) -> None:
        """A head asks for nothing and moves no deadline: the machine hears of it with what comes next."""
        courier = self.courier
        self.heard_head(head, length, courier.tick())
        if self.peer and (state := self.heard_peer(head.headers)) is not None:
            courier.heard_state(*state)
        if self.mode is Mode.PASS:
            if self.peer and not self.asked_for_body:
                self.abort()
                courier.step(ev.Lost(attempt=self.number, cause=Cause.PROTOCOL))
            else:
                courier.inbox.append(ev.HeadReceived(attempt=self.number, status=head.status))
        elif self.peer and not self.asked_for_body and self.upstream is not None:
            self.upstream.send_no_body()

    def data(self, data: bytes, ended: bool) -> None:
        courier = self.courier
        if ended:
            self.upstream = None
        now = courier.tick()
        if data:
            self.heard_bytes(data, now)
        if self.mode is not Mode.PASS:
            self.held.append(data)
            if ended or self.size >= HELD_ANSWER:
                courier.judge(self, ended)
            return
        number = self.number
        if courier.is_streaming:
            if data:
                courier.client.push(data)
            if not ended:
                courier.client.flush()
                return
        elif data:
            self.held.append(data)
            first = ev.FirstByteReceived(attempt=number)
            if not ended:
                courier.step(first)
                return
            courier.inbox.append(first)
        if ended:
            courier.step(ev.BodyEnded(attempt=number))

    def lost(self, cause: Cause, stale: bool) -> None:
        self.upstream = None
        self.courier.hear(ev.Lost(attempt=self.number, cause=cause, stale=stale))


class Courier:
    """One request. ``choosing`` chooses for it; ``admitted`` says that a local endpoint took it already."""

    __slots__ = (
        "_admitted",
        "_answer",
        "_asked",
        "_choosing",
        "_chosen",
        "_closed",
        "_consulting",
        "_flowing_ms",
        "_last",
        "_legs",
        "_machine",
        "_now",
        "_parcel",
        "_request",
        "_slow_client",
        "_stepping",
        "_ticket",
        "_turned",
        "_voice",
        "_w",
        "client",
        "due",
        "inbox",
    )

    def __init__(
        self,
        wiring: Wiring,
        choosing: Choosing,
        voice: Voice,
        client: Client,
        request: Request,
        asked: Asked,
        parcel: Parcel,
        *,
        admitted: bool = False,
        policy: ExchangePolicy | None = None,
    ) -> None:
        self._w = wiring
        self._choosing = choosing
        self._voice = voice
        self.client = client
        self._request = request
        self._asked = asked
        self._parcel = parcel
        self._answer = Answering(voice, client, request, asked, parcel)
        self._admitted = admitted
        self._machine = Exchange(policy or wiring.policy, until_ms=choosing.until_ms, hedge=choosing.hedge)
        self.inbox: list[ev.Event] = []
        """What has happened, for the machine to hear with what comes next."""
        self._stepping = False
        self._consulting: asyncio.Task[Any] | None = None
        self._now = 0.0
        self.due: int | None = None
        self._chosen: tuple[Routed, Place | None] | None = None
        self._legs: list[Leg] = []
        self._last: Leg | None = None
        self._turned: Turned | None = None
        self._flowing_ms: float | None = None
        self._ticket: int | None = None
        self._slow_client = self._closed = False

    def start(self) -> "Courier":
        """Begin; returns itself."""
        counsel = self._choosing.consult()
        self._w.in_hand.add(self)
        if counsel is None:
            self.hear(_BEGUN)
        else:
            self._consulting = self._w.tasks.spawn(self._consult(counsel), "consult")
        return self

    async def _consult(self, counsel: Coroutine[None, None, None]) -> None:
        """Whatever comes of it, the request goes on."""
        try:
            await counsel
        except Exception as exc:
            self._w.observer.failed("consult", exc)
        self._consulting = None
        self.hear(_BEGUN)

    # --- what the client does --------------------------------------------------------------------------------

    def client_gone(self) -> None:
        self.hear(ev.ClientGone())

    def client_stalled(self) -> None:
        self._slow_client = True
        self.hear(ev.ClientGone())

    def pause(self) -> None:
        self._flowing_ms = None
        if self._last is not None and self._last.upstream is not None:
            self._last.upstream.transport.pause_reading()

    def resume(self) -> None:
        self._flowing_ms = self.tick()
        if self._last is not None and self._last.upstream is not None:
            self._last.upstream.transport.resume_reading()

    # --- what the node does ----------------------------------------------------------------------------------

    @property
    def is_held(self) -> bool:
        """True while the request waits for room."""
        return self._ticket is not None

    def shut_down(self) -> None:
        """The node stops now: tell the client the truth."""
        self.hear(ev.ShuttingDown())

    def time_passed(self) -> None:
        """``due`` has come."""
        leg = self._last
        if leg is None or leg.last_byte_ms is None:
            self.hear(ev.TimePassed())
        else:
            begun = leg.stream is None or leg.tail.first_content_ms is not None
            self.hear(ev.TimePassed(last_byte_ms=int(leg.last_byte_ms), content=begun))

    def cut_off(self, at: Endpoint) -> None:
        """The endpoint is given up: if this request is there, it goes elsewhere, or its client is told the truth."""
        for leg in tuple(self._legs):
            if leg.routed.choice.endpoint == at:
                self._give_up(leg)

    def _give_up(self, leg: Leg) -> None:
        leg.abort()
        self.hear(ev.Lost(attempt=leg.number, cause=Cause.GONE))

    def sent_to(self, at: Endpoint) -> Iterator[Attempt]:
        """Attempts of work at this endpoint whose requests were sent."""
        if self._asked.is_work:
            yield from [
                leg for leg in self._legs if leg.routed.choice.endpoint == at and leg.sent_ms is not None
            ]

    def silent_at(self, now: int) -> Endpoint | None:
        """The endpoint, if it keeps the client waiting in mid-answer for longer than is to be expected."""
        leg, flowing_ms = self._last, self._flowing_ms
        if leg is None or flowing_ms is None or self._answer.first_byte_ms is None:
            return None
        last_ms = max(flowing_ms, leg.last_byte_ms or 0.0)
        routed = leg.routed
        return routed.choice.endpoint if now - last_ms > silence_limit_ms(routed.gap_ms) else None

    def review(self) -> None:
        """The view may have changed: look at what is known of the peers and engines this request depends on."""
        for leg in tuple(self._legs):
            choice = leg.routed.choice
            if not choice.is_self:
                liveness = self._w.targets.liveness(choice.node_id)
                if liveness in _LOST_PEERS:
                    self._give_up(leg)
                    continue
                if (liveness is Liveness.SUSPECT) is not leg.suspect:
                    leg.suspect = not leg.suspect
                    self.hear(ev.NodeSuspected() if leg.suspect else ev.NodeRecovered())
            if leg.first_byte_ms is None and not self._admitted:
                self._look(leg)

    def _look(self, leg: Leg) -> None:
        """Whether there is still a sign of life where an attempt waits for its first byte. Without one it moves, if another
        endpoint can take the request; else it waits on, for silence is no proof."""
        choice, cause = leg.routed.choice, Cause.SUSPECT
        if not leg.suspect:
            asked_ms = leg.body_ms if leg.peer else leg.sent_ms
            counted = self._asked.is_work and leg.peer
            picture = self._w.targets.picture(choice.endpoint)
            watch = leg.watch = leg.watch or Watch()
            vital = watch.look(picture, choice.endpoint_name, asked_ms if counted else None)
            if vital is Vital.ALIVE or leg.sent_ms is None:
                return
            if vital is Vital.DOUBTFUL:
                self.hear(ev.EndpointDoubtful(attempt=leg.number))
                return
            cause = Cause.SILENT
        if self.tick() < leg.look_ms:
            return
        leg.look_ms = self._now + LOOK_EVERY_MS
        tried = frozenset([*self._machine.tried, *[each.routed.choice.endpoint for each in self._legs]])
        if len(self._legs) == 1 and not self._choosing.has_other(
            tried=tried, refused=self._machine.refused, now=int(self._now)
        ):
            return
        if cause is Cause.SILENT:
            self._w.router.overdue(choice.endpoint, leg, self._now)
        self.hear(ev.NoSignOfLife(attempt=leg.number, cause=cause))

    # --- what an upstream does -------------------------------------------------------------------------------

    def heard_state(self, signed: bytes, signature: bytes) -> None:
        """A peer's reply brought its newest record along."""
        self._w.heard_state(signed, signature)

    def judge(self, leg: Leg, whole: bool) -> None:
        """A held-back answer is all there, or as much of it as is waited for."""
        number, status = leg.number, leg.status
        if leg.mode is Mode.REFUSED:
            self.step(ev.IngressRefused(attempt=number, cause=leg.refusal))
            return
        if leg.mode is Mode.FAULT and status != _OVERLOADED:
            if not whole:
                leg.abort()
            cause = Cause.FIRST_BYTE if leg.refusal == "upstream_timeout" else Cause.PEER_FAULT
            self.step(ev.Lost(attempt=number, cause=cause))
            return
        if leg.mode is Mode.FAULT:
            failure, whole = FailureClass.BUSY, False
        else:
            failure = classify(self._w.targets, leg.routed, leg)
        leg.mode = Mode.PASS
        self.step(ev.Answered(attempt=number, status=status, failure=failure, whole=whole))
        if whole:
            self.step(ev.BodyEnded(attempt=number))

    # --- the machine -----------------------------------------------------------------------------------------

    @property
    def is_streaming(self) -> bool:
        """The answer has begun."""
        return self._machine.state is State.STREAMING

    def tick(self) -> float:
        """Read the clock: boot ms, the time of all that follows from one call of the loop's."""
        self._now = now = self._w.clock.boot_us() / 1000
        return now

    def hear(self, event: ev.Event) -> None:
        """Something happened just now."""
        self.tick()
        self.step(event)

    def step(self, event: ev.Event) -> None:
        """Hand the machine what has happened, in order, and perform what it asks for, one event at a time."""
        inbox = self.inbox
        inbox.append(event)
        if self._stepping or self._closed:
            return
        self._stepping = True
        machine, now = self._machine, int(self._now)
        actions: Iterator[ev.Action] = iter(())
        try:
            while inbox:
                actions = iter(machine.handle(inbox.pop(0), now))
                for action in actions:
                    _PERFORM[type(action)](self, action)
        except Exception as exc:
            self._fail(exc, actions)
        finally:
            self._stepping = False
        if self._ticket is not None and machine.state is not State.HELD:
            ticket, self._ticket = self._ticket, None
            self._w.router.queue.leave(ticket, now)
        if machine.state in ENDED:
            self._close()
            return
        due, self.due = self.due, machine.deadline
        if self.due is not None and (due is None or self.due < due):
            self._w.in_hand.wake_at(self.due, now)

    def _decide(self, action: ev.Decide) -> None:
        if action.spare:
            self._decide_spare(action)
            return
        chosen = self._choosing.decide(
            attempt=action.attempt,
            tried=action.tried,
            refused=action.refused,
            declined=action.declined,
            now=int(self._now),
        )
        if isinstance(chosen, Turned):
            self._turned = chosen
            self.step(_turned_away(chosen))
        elif isinstance(chosen, Queued):
            self._hold(chosen)
        else:
            self._turned = None
            self._go_to(chosen)

    def _decide_spare(self, action: ev.Decide) -> None:
        beside = self._legs[-1].routed
        chosen = self._choosing.spare(
            beside=beside,
            attempt=action.attempt,
            tried=action.tried,
            refused=action.refused,
            now=int(self._now),
        )
        if chosen is None:
            self.step(ev.NoSpare())
        else:
            self._go_to(chosen)

    def _go_to(self, chosen: Routed) -> None:
        place = self._w.places.of(chosen)
        self._chosen = chosen, place
        engine = None if place is None else place.engine
        self.step(ev.Decided(target=attempt_target(self._w.policy, engine, chosen, self._asked.facts)))

    def _hold(self, queued: Queued) -> None:
        self._turned = queued.turned
        if self._ticket is None:
            self._ticket = queued.waiting.ticket
            self._w.router.queue.join(queued.waiting, self._woken, int(self._now))
        self.step(ev.Queued(until_ms=queued.until_ms, turned=_turned_away(queued.turned)))

    def _woken(self) -> None:
        self.hear(ev.Woken())

    def _overdue(self, action: ev.NoteOverdue) -> None:
        leg = self._leg(action.attempt)
        leg.overdue = True
        if self._asked.is_work and not self._admitted:
            self._w.router.overdue(action.endpoint, leg, self._now)

    def _blame(self, action: ev.BlameEndpoint) -> None:
        self._w.router.blame(action.endpoint, int(self._now))

    def _dial(self, _action: ev.Dial) -> None:
        assert self._chosen is not None
        routed, place = self._chosen
        now = self._now
        choice = routed.choice
        leg = self._last = Leg(self, routed, place, now)
        self._legs.append(leg)
        placed_here = not self._admitted and self._asked.is_work
        work_s = choice.prefill_s + choice.decode_s if placed_here else None
        self._w.router.dispatched(choice.endpoint, int(now), work_s)
        if place is None:
            self.step(ev.Lost(attempt=leg.number, cause=Cause.GONE))
            return
        connection = self._w.pool.take(place.target)
        if connection is None:
            self._redial(ev.Redial(attempt=leg.number))
            return
        self._connected(leg, connection)

    def _redial(self, action: ev.Redial) -> None:
        leg = self._leg(action.attempt)
        leg.dialling = self._w.tasks.spawn(self._connect(leg), "relay-dial")

    async def _connect(self, leg: Leg) -> None:
        place = leg.place
        assert place is not None
        try:
            connection = await self._w.pool.connect(place.target, place.options)
        except ConnectFailed as failed:
            leg.dialling = None
            self.hear(ev.Lost(attempt=leg.number, cause=failed.cause))
            return
        if leg.dialling is None or self._closed:
            connection.abort()
            return
        leg.dialling = None
        self.tick()
        self._connected(leg, connection)

    def _connected(self, leg: Leg, connection: UpstreamConnection) -> None:
        leg.upstream = connection
        leg.connected_ms = self._now
        connection.start(leg)
        self.step(ev.Connected(attempt=leg.number))

    def _send(self, action: ev.SendRequest) -> None:
        """A fault of our own before anything was sent is a failed attempt: another place may need less of us."""
        leg = self._leg(action.attempt)
        try:
            self._send_on(leg)
        except Exception as exc:
            self._w.observer.failed("dispatch", exc)
            self.step(ev.Lost(attempt=leg.number, cause=Cause.INTERNAL))

    def _send_on(self, leg: Leg) -> None:
        routed, upstream = leg.routed, leg.upstream
        choice = routed.choice
        assert upstream is not None
        leg.sent_ms = self._now
        if self._asked.is_work:
            self._w.router.sent(choice.endpoint, leg)
        rng = self._w.rng
        if not choice.is_self:
            leg.body = self._parcel.as_model(choice.model)
            route = route_of(routed)
            length = len(leg.body)
            upstream.send_head(peer_request(self._request, self._asked, routed, route, length, rng))
            return
        engine = None if leg.place is None else leg.place.engine
        assert engine is not None
        body = self._parcel.as_model(engine.upstream_name(choice.model))
        head = engine_request(self._request, self._asked, engine, leg.number, len(body), rng)
        upstream.send(head, body)
        leg.wait(self._w.first_bytes, choice.endpoint_name, choice.model)

    def _send_body(self, action: ev.SendBody) -> None:
        leg = self._leg(action.attempt)
        leg.body_ms = self._now
        if leg.upstream is not None:
            leg.upstream.send_body(leg.body)

    def _commit(self, action: ev.Commit) -> None:
        leg = self._last = self._leg(action.attempt)
        self._flowing_ms = self._now
        self._w.router.heard(leg.routed.choice.endpoint)
        self._choosing.first_token(leg.number)
        self._answer.begin(leg, leg.routed, self._machine.attempt, self._now)
        if leg.upstream is not None:
            self.client.flush()

    def _finish(self, _action: ev.Finish) -> None:
        self.client.end()

    def _reply(self, action: ev.Reply) -> None:
        held_ms, leg = self._choosing.held_ms(int(self._now)), self._last
        routed = None if leg is None else leg.routed
        self._answer.refuse(action, leg, self._turned, routed, self._machine.attempt, held_ms)

    def _reply_answer(self, _action: ev.ReplyAnswer) -> None:
        leg = self._last
        assert leg is not None
        self._answer.pass_whole(leg, leg.routed, self._machine.attempt)

    def _tell_error(self, action: ev.TellError) -> None:
        assert self._last is not None
        self._answer.cut(action.code, self._last)

    def _cancel_upstream(self, action: ev.CancelUpstream) -> None:
        self._leg(action.attempt).abort()

    def _end_attempt(self, action: ev.EndAttempt) -> None:
        outcome, now = action.outcome, int(self._now)
        self._answer.cause = outcome.cause
        leg = self._leg(outcome.attempt)
        self._legs.remove(leg)
        if self._legs and self._last is leg:
            self._last = self._legs[-1]
        if leg.waiting is not None:
            leg.waited()
        asked, router = self._asked, self._w.router
        request = asked.caller, self._request.head.path, asked.body_bytes
        router.ended(
            outcome,
            leg,
            self._now,
            request=request,
            full_ms=None if outcome.failure is None else _told_ms(leg),
        )
        self._choosing.end(leg.number)
        self._w.observer.attempted(attempt_report(self._voice.side, asked, leg.routed, outcome, leg))
        router.queue.news(now)

    # --- the end ---------------------------------------------------------------------------------------------

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._consulting is not None:
            self._consulting.cancel()
        answer, leg = self._answer, self._last
        answer.release_body(leg)
        self._w.in_hand.discard(self)
        if self._machine.state is State.CANCELLED:
            answer.cancelled("slow_client" if self._slow_client else "client_gone")
        routed = None if leg is None else leg.routed
        self._w.observer.answered(answer.line(leg, self._turned, routed, self._machine.attempt, self._now))

    def _fail(self, exc: Exception, unperformed: Iterator[ev.Action]) -> None:
        """A fault of our own: give back everything this request holds, tell who watches."""
        self.inbox.clear()
        for action in (*unperformed, *self._machine.handle(ev.ClientGone(), int(self._now))):
            if isinstance(action, ev.CancelUpstream | ev.EndAttempt):
                _PERFORM[type(action)](self, action)
        self._w.observer.failed("exchange", exc)
        if self._answer.status or not self._apologise():
            self._answer.code = "internal"
            self.client.abort()

    def _apologise(self) -> bool:
        """Tell a client whose answer has not begun that there will be none; False if not even that can be done."""
        told = ev.Reply(status=502, code="upstream_unreachable", retry_after_s=None)
        try:
            self._answer.refuse(told, None, None, None, self._machine.attempt, None)
        except Exception as exc:
            self._w.observer.failed("refusal", exc)
            return False
        return True

    def _leg(self, number: int) -> Leg:
        """The open attempt of this number."""
        last = self._last
        if last is not None and last.number == number:
            return last
        return next(leg for leg in self._legs if leg.number == number)


_BEGUN = ev.BodyParsed()
_OVERLOADED = 503


def _turned_away(turned: Turned) -> ev.TurnedAway:
    return ev.TurnedAway(status=turned.status, code=turned.code, retry_after_s=turned.retry_after_s)


def _told_ms(leg: Leg) -> float | None:
    """How long an endpoint that is full asks to be left alone, None if it does not say."""
    told = value_of(leg.headers, b"retry-after")
    return 1000.0 * int(told) if told is not None and told.isdigit() and len(told) < 6 else None


_PERFORM: dict[type[ev.Action], Callable[[Courier, Any], None]] = {
    ev.Decide: Courier._decide,
    ev.Dial: Courier._dial,
    ev.Redial: Courier._redial,
    ev.SendRequest: Courier._send,
    ev.SendBody: Courier._send_body,
    ev.Commit: Courier._commit,
    ev.Finish: Courier._finish,
    ev.Reply: Courier._reply,
    ev.ReplyAnswer: Courier._reply_answer,
    ev.TellError: Courier._tell_error,
    ev.CancelUpstream: Courier._cancel_upstream,
    ev.NoteOverdue: Courier._overdue,
    ev.BlameEndpoint: Courier._blame,
    ev.EndAttempt: Courier._end_attempt,
}
