"""Drives one request: turns the exchange machine's actions into IO, and what IO does into its events.

One ``Courier`` per request, called straight from the protocols' callbacks; a task is only spawned to dial.
Whatever happens, an attempt's reservation and counters are given back where the attempt ends. Refuses to know
framing (the connections do that), dialects (a ``Voice`` tells errors) and how an endpoint is chosen.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from agent.relay.answering import Answering
from agent.relay.attempt import HELD_ANSWER, Attempt, Mode, attempt_report
from agent.relay.front import Client
from agent.relay.intake import Request
from agent.relay.parcel import Parcel
from agent.relay.places import Place, attempt_target, classify, engine_request, peer_request
from agent.relay.pool import ConnectFailed
from agent.relay.ports import Asked, Choosing, Queued, Routed, Turned
from agent.relay.route import format_route, route_of
from agent.relay.upstream import AnswerHead, UpstreamConnection
from agent.relay.wiring import Voice, Wiring, tell_breakers
from router_core.exchange import events as ev
from router_core.exchange.failure import Cause, FailureClass
from router_core.exchange.machine import ENDED, Exchange, State
from router_core.exchange.patience import silence_limit_ms
from router_core.placement.request import Endpoint
from router_core.policy.exchange import ExchangePolicy
from router_core.record.membership import Liveness


class Courier:
    """One request. ``choosing`` chooses for it; ``admitted`` says that a local endpoint took it already."""

    __slots__ = (
        "_admitted",
        "_answer",
        "_asked",
        "_attempt",
        "_choosing",
        "_client",
        "_closed",
        "_consulting",
        "_dialling",
        "_flowing_ms",
        "_inbox",
        "_machine",
        "_now",
        "_parcel",
        "_place",
        "_request",
        "_routed",
        "_slow_client",
        "_stepping",
        "_suspect",
        "_ticket",
        "_turned",
        "_upstream",
        "_voice",
        "_w",
        "due",
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
        self._client = client
        self._request = request
        self._asked = asked
        self._parcel = parcel
        self._answer = Answering(voice, client, request, asked, parcel)
        self._admitted = admitted
        self._machine = Exchange(policy or wiring.policy, until_ms=choosing.until_ms)
        self._inbox: list[ev.Event] = []
        self._stepping = False
        self._consulting: asyncio.Task[Any] | None = None
        self._now = 0.0
        self.due: int | None = None
        self._dialling: asyncio.Task[Any] | None = None
        self._upstream: UpstreamConnection | None = None
        self._attempt: Attempt | None = None
        self._routed: Routed | None = None
        self._place: Place | None = None
        self._turned: Turned | None = None
        self._flowing_ms: float | None = None
        self._ticket: int | None = None
        self._slow_client = self._suspect = self._closed = False

    def start(self) -> "Courier":
        """Begin; returns itself."""
        counsel = self._choosing.consult()
        self._w.in_hand.add(self)
        if counsel is None:
            self._hear(_BEGUN)
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
        self._hear(_BEGUN)

    # --- what the client does --------------------------------------------------------------------------------

    def client_gone(self) -> None:
        self._hear(ev.ClientGone())

    def client_stalled(self) -> None:
        self._slow_client = True
        self._hear(ev.ClientGone())

    def pause(self) -> None:
        self._flowing_ms = None
        if self._upstream is not None:
            self._upstream.transport.pause_reading()

    def resume(self) -> None:
        self._flowing_ms = self._tick()
        if self._upstream is not None:
            self._upstream.transport.resume_reading()

    # --- what the node does ----------------------------------------------------------------------------------

    @property
    def is_held(self) -> bool:
        """True while the request waits for room."""
        return self._ticket is not None

    def shut_down(self) -> None:
        """The node stops now: tell the client the truth."""
        self._hear(ev.ShuttingDown())

    def time_passed(self) -> None:
        """``due`` has come."""
        last = None if self._attempt is None else self._attempt.last_byte_ms
        self._hear(ev.TimePassed(last_byte_ms=None if last is None else int(last)))

    @property
    def last_byte_ms(self) -> float | None:
        """When the latest byte of the current answer came, boot ms; None before the first."""
        return None if self._attempt is None else self._attempt.last_byte_ms

    def give_up(self) -> None:
        """The endpoint is silent to everybody. A peer's request waits as long as its own router lets it."""
        if not self._admitted:
            self._hear(ev.EndpointFellSilent())

    def cut_off(self, at: Endpoint) -> None:
        """The endpoint is given up: if this request is there, it goes elsewhere, or its client is told the truth."""
        if self._routed is not None and self._routed.at == at and self._attempt is not None:
            self._abort_upstream()
            self._step(ev.Lost(attempt=self._machine.attempt, cause=Cause.GONE))

    def silent_at(self, now: int) -> Endpoint | None:
        """The endpoint, if it keeps the client waiting in mid-answer for longer than is to be expected."""
        routed, flowing_ms = self._routed, self._flowing_ms
        if routed is None or flowing_ms is None or self._answer.first_byte_ms is None:
            return None
        last_ms = max(flowing_ms, self._now_at().last_byte_ms or 0.0)
        return routed.at if now - last_ms > silence_limit_ms(routed.gap_ms) else None

    def review(self) -> None:
        """Liveness may have changed: look at the peer this request depends on."""
        node = None if self._routed is None else self._routed.node
        if node is None:
            return
        liveness = self._w.targets.liveness(node)
        if liveness in (Liveness.GONE, Liveness.LEFT, Liveness.REMOVED):
            self._hear(ev.NodeGone())
        elif (liveness is Liveness.SUSPECT) is not self._suspect:
            self._suspect = not self._suspect
            self._hear(ev.NodeSuspected() if self._suspect else ev.NodeRecovered())

    # --- what the upstream does ------------------------------------------------------------------------------

    def continued(self) -> None:
        attempt = self._now_at()
        attempt.continued = True
        self._hear(ev.Continued(attempt=self._machine.attempt))

    def head(self, head: AnswerHead, length: int | None) -> None:
        """A head asks for nothing and moves no deadline: the machine hears of it with what comes next."""
        attempt = self._attempt
        assert attempt is not None
        attempt.heard_head(head, length, self._tick())
        if attempt.peer and (state := attempt.heard_peer(head.headers)) is not None:
            self._w.heard_state(*state)
        if attempt.mode is Mode.PASS:
            if attempt.peer and not attempt.continued:
                self._abort_upstream()
                self._step(ev.Lost(attempt=self._machine.attempt, cause=Cause.PROTOCOL))
            else:
                self._inbox.append(ev.HeadReceived(attempt=self._machine.attempt, status=head.status))
        elif attempt.peer and not attempt.continued and self._upstream is not None:
            self._upstream.send_no_body()

    def data(self, data: bytes, ended: bool) -> None:
        attempt, machine = self._attempt, self._machine
        assert attempt is not None
        if ended:
            self._upstream = None
        now = self._tick()
        if data:
            attempt.heard_bytes(data, now)
        if attempt.mode is not Mode.PASS:
            attempt.held.append(data)
            if ended or attempt.size >= HELD_ANSWER:
                self._judge(attempt, ended)
            return
        number = machine.attempt
        if machine.state is State.STREAMING:
            if data:
                self._client.push(data)
            if not ended:
                self._client.flush()
                return
        elif data:
            attempt.held.append(data)
            first = ev.FirstByteReceived(attempt=number)
            if not ended:
                self._step(first)
                return
            self._inbox.append(first)
        if ended:
            self._step(ev.BodyEnded(attempt=number))

    def lost(self, cause: Cause, stale: bool) -> None:
        self._upstream = None
        self._hear(ev.Lost(attempt=self._machine.attempt, cause=cause, stale=stale))

    def _judge(self, attempt: Attempt, whole: bool) -> None:
        """A held-back answer is all there, or as much of it as is waited for."""
        number, status = self._machine.attempt, attempt.status
        if attempt.mode is Mode.REFUSED:
            self._step(ev.IngressRefused(attempt=number, cause=attempt.refusal))
            return
        if attempt.mode is Mode.FAULT:
            failure = FailureClass.BUSY if status == 503 else FailureClass.DEAD
            whole = False
        else:
            failure = classify(self._w.targets, self._routed, attempt)
        attempt.mode = Mode.PASS
        self._step(ev.Answered(attempt=number, status=status, failure=failure, whole=whole))
        if whole:
            self._step(ev.BodyEnded(attempt=number))

    # --- the machine -----------------------------------------------------------------------------------------

    def _tick(self) -> float:
        """Read the clock: boot ms, the time of all that follows from one call of the loop's."""
        self._now = now = self._w.clock.boot_us() / 1000
        return now

    def _hear(self, event: ev.Event) -> None:
        """Something happened just now."""
        self._tick()
        self._step(event)

    def _step(self, event: ev.Event) -> None:
        """Hand the machine what has happened, in order, and perform what it asks for, one event at a time."""
        inbox = self._inbox
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
            self._w.holding.leave(ticket)
        if machine.state in ENDED:
            self._close()
            return
        due, self.due = self.due, machine.deadline
        if self.due is not None and (due is None or self.due < due):
            self._w.in_hand.wake_at(self.due, now)

    def _decide(self, action: ev.Decide) -> None:
        chosen = self._choosing.decide(
            attempt=action.attempt,
            tried=action.tried,
            refused=action.refused,
            now=int(self._now),
        )
        if isinstance(chosen, Turned):
            self._turned = chosen
            self._step(_turned_away(chosen))
            return
        if isinstance(chosen, Queued):
            self._hold(chosen)
            return
        self._routed, self._turned = chosen, None
        self._suspect = False
        self._place = place = self._w.places.of(chosen)
        engine = None if place is None else place.engine
        self._step(ev.Decided(target=attempt_target(self._w.policy, engine, chosen, self._asked.facts)))

    def _hold(self, queued: Queued) -> None:
        self._turned = queued.turned
        if self._ticket is None:
            self._ticket = queued.waiting.ticket
            self._w.holding.join(queued.waiting, self._woken)
        self._step(ev.Queued(until_ms=queued.until_ms, turned=_turned_away(queued.turned)))

    def _woken(self) -> None:
        self._hear(ev.Woken())

    def _doubt(self, action: ev.DoubtEndpoint) -> None:
        if self._asked.is_work:
            picture = self._w.targets.picture(action.endpoint)
            self._w.silence.missed(action.endpoint, action.since_ms, picture)

    def _dial(self, action: ev.Dial) -> None:
        routed = self._routed
        assert routed is not None
        now = self._now
        self._attempt = Attempt(peer=action.target.peer, dispatched_ms=now)
        self._w.breakers.dispatched(routed.at, int(now))
        if not self._admitted and self._asked.is_work:
            self._w.dispatch.note(routed.service_ms / 1000, int(now))
        number = self._machine.attempt
        if self._place is None:
            self._step(ev.Lost(attempt=number, cause=Cause.GONE))
            return
        connection = self._w.pool.take(self._place.target)
        if connection is None:
            self._redial(ev.Redial(attempt=number))
            return
        self._connected(connection)

    def _redial(self, action: ev.Redial) -> None:
        self._dialling = self._w.tasks.spawn(self._connect(action.attempt), "relay-dial")

    async def _connect(self, number: int) -> None:
        place = self._place
        assert place is not None
        try:
            connection = await self._w.pool.connect(place.target, place.options)
        except ConnectFailed as failed:
            self._dialling = None
            self._hear(ev.Lost(attempt=number, cause=failed.cause))
            return
        self._dialling = None
        if self._closed or self._machine.attempt != number or self._machine.state is not State.DIALLING:
            connection.abort()
            return
        self._tick()
        self._connected(connection)

    def _connected(self, connection: UpstreamConnection) -> None:
        self._upstream = connection
        self._now_at().connected_ms = self._now
        connection.start(self)
        self._step(ev.Connected(attempt=self._machine.attempt))

    def _send(self, _action: ev.SendRequest) -> None:
        routed, upstream, attempt = self._routed, self._upstream, self._attempt
        assert routed is not None
        assert upstream is not None
        assert attempt is not None
        attempt.sent_ms = self._now
        if self._asked.is_work:
            self._w.silence.sent(routed.at, self)
        rng = self._w.rng
        if routed.node is not None:
            attempt.body = self._parcel.as_model(routed.served)
            route = format_route(route_of(routed, self._machine.attempt))
            length = len(attempt.body)
            upstream.send_head(peer_request(self._request, self._asked, routed, route, length, rng))
            return
        engine = None if self._place is None else self._place.engine
        assert engine is not None
        body = self._parcel.as_model(engine.upstream_name(routed.served))
        head = engine_request(self._request, self._asked, engine, self._machine.attempt, len(body), rng)
        upstream.send(head, body)
        attempt.wait(self._w.first_bytes, routed.endpoint, routed.served)

    def _send_body(self, _action: ev.SendBody) -> None:
        attempt = self._now_at()
        if self._upstream is not None:
            self._upstream.send_body(attempt.body)

    def _commit(self, _action: ev.Commit) -> None:
        routed, attempt = self._routed, self._attempt
        assert routed is not None
        assert attempt is not None
        self._flowing_ms = self._now
        self._choosing.first_token(routed.seq)
        self._answer.begin(attempt, routed, self._machine.attempt, self._now)
        if self._upstream is not None:
            self._client.flush()

    def _finish(self, _action: ev.Finish) -> None:
        self._client.end()

    def _reply(self, action: ev.Reply) -> None:
        held_ms = self._choosing.held_ms(int(self._now))
        self._answer.refuse(action, self._attempt, self._turned, self._routed, self._machine.attempt, held_ms)

    def _reply_answer(self, _action: ev.ReplyAnswer) -> None:
        routed = self._routed
        assert routed is not None
        self._answer.pass_whole(self._now_at(), routed, self._machine.attempt)

    def _tell_error(self, action: ev.TellError) -> None:
        self._answer.cut(action.code, self._now_at())

    def _cancel_upstream(self, _action: ev.CancelUpstream) -> None:
        if self._dialling is not None:
            self._dialling.cancel()
            self._dialling = None
        self._abort_upstream()

    def _abort_upstream(self) -> None:
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            upstream.abort()

    def _end_attempt(self, action: ev.EndAttempt) -> None:
        outcome, routed, attempt = action.outcome, self._routed, self._attempt
        assert routed is not None
        assert attempt is not None
        if attempt.waiting is not None:
            attempt.waited()
        self._w.silence.ended(routed.at, self)
        if outcome.result in ev.SERVED:
            self._choosing.finish(routed.seq)
        else:
            self._choosing.fail(routed.seq)
        tell_breakers(self._w.breakers, outcome, int(self._now))
        self._w.observer.attempted(attempt_report(self._voice.side, self._asked, routed, outcome, attempt))
        self._w.holding.news()

    # --- the end ---------------------------------------------------------------------------------------------

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._consulting is not None:
            self._consulting.cancel()
        answer = self._answer
        answer.release_body(self._attempt)
        self._w.in_hand.discard(self)
        if self._machine.state is State.CANCELLED:
            answer.cancelled("slow_client" if self._slow_client else "client_gone")
        self._w.observer.answered(
            answer.line(self._attempt, self._turned, self._routed, self._machine.attempt, self._now)
        )

    def _fail(self, exc: Exception, unperformed: Iterator[ev.Action]) -> None:
        """A fault of our own: give back everything this request holds, tell who watches."""
        self._inbox.clear()
        for action in (*unperformed, *self._machine.handle(ev.ClientGone(), int(self._now))):
            if isinstance(action, ev.CancelUpstream | ev.EndAttempt):
                _PERFORM[type(action)](self, action)
        self._answer.code = "internal"
        self._client.abort()
        self._w.observer.failed("exchange", exc)

    def _now_at(self) -> Attempt:
        assert self._attempt is not None
        return self._attempt


_BEGUN = ev.BodyParsed()


def _turned_away(turned: Turned) -> ev.TurnedAway:
    return ev.TurnedAway(status=turned.status, code=turned.code, retry_after_s=turned.retry_after_s)


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
    ev.DoubtEndpoint: Courier._doubt,
    ev.EndAttempt: Courier._end_attempt,
}
