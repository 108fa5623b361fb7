"""Drives one request: turns the exchange machine's actions into IO, and what IO does into its events.

One ``Courier`` per request, called straight from the protocols' callbacks; a task is only spawned to dial.
Whatever happens, an attempt's reservation and counters are given back where the attempt ends. Refuses to know
framing (the connections do that), dialects (a ``Voice`` tells errors) and how an endpoint is chosen.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from agent.effects.clock import Clock
from agent.effects.tasks import Tasks
from agent.relay.attempt import Attempt, Mode
from agent.relay.dispatch import DispatchRate
from agent.relay.headers import Headers, engine_head, passed_down, passed_up, peer_head, value_of
from agent.relay.intake import Request
from agent.relay.listener import Answer, ServerConnection
from agent.relay.parcel import Parcel
from agent.relay.ports import (
    AccessLine,
    Admission,
    Asked,
    AttemptReport,
    Choosing,
    HeardState,
    Observer,
    Routed,
    Targets,
    Turned,
)
from agent.relay.route import decode_state, format_route, route_of
from agent.relay.upstream import ConnectFailed, Options, Pool, Target, UpstreamConnection
from router_core.exchange import events as ev
from router_core.exchange.breaker import Breakers
from router_core.exchange.failure import Cause, FailureClass
from router_core.exchange.machine import ENDED, Exchange, State
from router_core.exchange.patience import first_byte_limit_ms
from router_core.policy.exchange import ExchangePolicy
from router_core.record.membership import Liveness

HELD_ANSWER = 16_384
"""An error answer is held back, and kept for replay, up to this size."""

_CLASSIFIED = 512
_ENGINE_IDLE_MS = 3_000
_ENGINE_IDLE_MOST = 32
_PEER_IDLE_MS = 60_000
_PEER_IDLE_MOST = 8
_PEER_MOST = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """What every courier of one listener shares."""

    clock: Clock
    policy: ExchangePolicy
    pool: Pool
    tasks: Tasks
    targets: Targets
    admission: Admission
    breakers: Breakers
    dispatch: DispatchRate
    observer: Observer
    heard_state: HeardState
    rng: Random
    in_hand: "set[Courier]"


class Voice(Protocol):
    """How errors and the mesh's own headers are told on one listener."""

    side: str

    def refusal(
        self, told: ev.Reply, asked: Asked, turned: Turned | None, routed: Routed | None, attempts: int
    ) -> Answer:
        """A whole error reply of our own."""

    def stream_error(self, code: str, *, mid_event: bool) -> bytes:
        """What is written before a broken event stream is cut; empty to only cut."""

    def headers(self, asked: Asked, routed: Routed, attempts: int, status: int) -> Headers:
        """Headers added to an upstream's reply."""


class Courier:
    """One request. ``choosing`` chooses for it; ``admitted`` says that a local endpoint took it already."""

    def __init__(
        self,
        wiring: Wiring,
        choosing: Choosing,
        voice: Voice,
        client: ServerConnection,
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
        self._admitted = admitted
        self._machine = Exchange(policy or wiring.policy, until_ms=choosing.until_ms)
        self._inbox: deque[ev.Event] = deque()
        self._stepping = False
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0
        self._dialling: asyncio.Task[Any] | None = None
        self._upstream: UpstreamConnection | None = None
        self._attempt: Attempt | None = None
        self._routed: Routed | None = None
        self._turned: Turned | None = None
        self._status = 0
        self._code: str | None = None
        self._first_byte_ms: float | None = None
        self._slow_client = False
        self._suspect = False
        self._closed = False

    def start(self) -> "Courier":
        """Begin; returns itself."""
        self._w.in_hand.add(self)
        self._step(ev.BodyParsed())
        return self

    # --- what the client does --------------------------------------------------------------------------------

    def client_gone(self) -> None:
        self._step(ev.ClientGone())

    def client_stalled(self) -> None:
        self._slow_client = True
        self._step(ev.ClientGone())

    def pause(self) -> None:
        if self._upstream is not None:
            self._upstream.transport.pause_reading()

    def resume(self) -> None:
        if self._upstream is not None:
            self._upstream.transport.resume_reading()

    # --- what the node does ----------------------------------------------------------------------------------

    def shut_down(self) -> None:
        """The node stops now: tell the client the truth."""
        self._step(ev.ShuttingDown())

    def review(self) -> None:
        """Liveness may have changed: look at the peer this request depends on."""
        node = None if self._routed is None else self._routed.node
        if node is None:
            return
        liveness = self._w.targets.liveness(node)
        if liveness in (Liveness.GONE, Liveness.LEFT, Liveness.REMOVED):
            self._step(ev.NodeGone())
        elif (liveness is Liveness.SUSPECT) is not self._suspect:
            self._suspect = not self._suspect
            self._step(ev.NodeSuspected() if self._suspect else ev.NodeRecovered())

    # --- what the upstream does ------------------------------------------------------------------------------

    def continued(self) -> None:
        attempt = self._now_at()
        attempt.continued = True
        self._step(ev.Continued(attempt=self._machine.attempt))

    def head(self, status: int, headers: Headers, length: int | None) -> None:
        attempt = self._now_at()
        attempt.heard_head(status, headers, length, self._now_ms())
        if attempt.peer:
            self._hear_peer(attempt, headers)
        if attempt.mode is Mode.PASS:
            if attempt.peer and not attempt.continued:
                self._abort_upstream()
                self._step(ev.Lost(attempt=self._machine.attempt, cause=Cause.PROTOCOL))
            else:
                self._step(ev.HeadReceived(attempt=self._machine.attempt, status=status))
        elif attempt.peer and not attempt.continued and self._upstream is not None:
            self._upstream.send_no_body()

    def data(self, data: bytes, ended: bool) -> None:
        attempt = self._now_at()
        if ended:
            self._upstream = None
        if data:
            attempt.heard_bytes(data, self._now_ms())
        number = self._machine.attempt
        if attempt.mode is Mode.PASS:
            if self._machine.state is State.STREAMING:
                if data:
                    self._client.push(data)
                if not ended:
                    self._client.flush()
            elif data:
                attempt.held.append(data)
                self._step(ev.FirstByteReceived(attempt=number))
            if ended:
                self._step(ev.BodyEnded(attempt=number))
            return
        attempt.held.append(data)
        if ended or attempt.size >= HELD_ANSWER:
            self._judge(attempt, ended)

    def lost(self, cause: Cause, stale: bool) -> None:
        self._upstream = None
        self._step(ev.Lost(attempt=self._machine.attempt, cause=cause, stale=stale))

    def _hear_peer(self, attempt: Attempt, headers: Headers) -> None:
        told = value_of(headers, b"x-pairmesh-state")
        state = None if told is None else decode_state(told)
        if state is not None:
            self._w.heard_state(*state)
        refused = value_of(headers, b"x-pairmesh-refused")
        if refused is not None:
            attempt.mode, attempt.refusal = Mode.REFUSED, refused.decode("latin-1")[:32]
        elif value_of(headers, b"x-pairmesh-error") is not None:
            attempt.mode = Mode.FAULT

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
            failure = self._classify(attempt)
        attempt.mode = Mode.PASS
        self._step(ev.Answered(attempt=number, status=status, failure=failure, whole=whole))
        if whole:
            self._step(ev.BodyEnded(attempt=number))

    def _classify(self, attempt: Attempt) -> FailureClass:
        routed = self._routed
        assert routed is not None
        prefix = b"".join(attempt.held)[:_CLASSIFIED]
        targets = self._w.targets
        if routed.node is not None:
            return FailureClass[
                targets.peer_classify(routed.node, routed.endpoint, attempt.status, prefix).name
            ]
        endpoint = targets.local(routed.endpoint)
        if endpoint is None:
            return FailureClass.OTHER
        return FailureClass[endpoint.classify(attempt.status, prefix).name]

    # --- the machine -----------------------------------------------------------------------------------------

    def _step(self, event: ev.Event) -> None:
        """Hand an event to the machine and perform what it asks for, one event at a time."""
        self._inbox.append(event)
        if self._stepping or self._closed:
            return
        self._stepping = True
        try:
            while self._inbox:
                for action in self._machine.handle(self._inbox.popleft(), self._w.clock.boot_ms()):
                    _PERFORM[type(action)](self, action)
        except Exception as exc:
            self._fail(exc)
        finally:
            self._stepping = False
        if self._machine.state in ENDED:
            self._close()
        else:
            self._arm()

    def _arm(self) -> None:
        """One timer; a deadline that moved later is noticed when the timer fires."""
        due = self._machine.deadline
        if due is None or (self._timer is not None and self._timer_at <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = due
        delay = max(0, due - self._w.clock.boot_ms()) / 1000
        self._timer = self._loop.call_later(delay, self._time_passed)

    def _time_passed(self) -> None:
        self._timer = None
        last = None if self._attempt is None else self._attempt.last_byte_ms
        self._step(ev.TimePassed(last_byte_ms=None if last is None else int(last)))

    def _decide(self, action: ev.Decide) -> None:
        chosen = self._choosing.decide(
            attempt=action.attempt,
            tried=action.tried,
            refused=action.refused,
            now=self._w.clock.boot_ms(),
        )
        if isinstance(chosen, Turned):
            self._turned = chosen
            self._inbox.append(
                ev.TurnedAway(status=chosen.status, code=chosen.code, retry_after_s=chosen.retry_after_s)
            )
            return
        self._routed = chosen
        self._suspect = False
        connect_ms, configured, idle_ms = self._w.policy.connect_ms, 0, self._w.policy.idle_ms
        if chosen.node is None and (endpoint := self._w.targets.local(chosen.endpoint)) is not None:
            connect_ms, configured, idle_ms = endpoint.connect_ms, endpoint.first_byte_ms, endpoint.idle_ms
        limit = first_byte_limit_ms(
            ttft_ms=chosen.ttft_ms,
            load_ms=chosen.load_ms,
            ect_ms=chosen.ect_ms,
            stream=self._asked.facts.stream,
            configured_ms=configured,
            floor_ms=self._w.policy.first_byte_floor_ms,
        )
        target = ev.Target(
            endpoint=chosen.at,
            peer=chosen.node is not None,
            connect_ms=connect_ms,
            first_byte_ms=limit,
            idle_ms=idle_ms,
        )
        self._inbox.append(ev.Decided(target=target))

    def _dial(self, action: ev.Dial) -> None:
        routed = self._routed
        assert routed is not None
        now = self._now_ms()
        self._attempt = attempt = Attempt(peer=action.target.peer, dispatched_ms=now)
        self._w.breakers.dispatched(routed.at, int(now))
        if not self._admitted:
            self._w.dispatch.note(routed.service_ms / 1000)
        number = self._machine.attempt
        place = self._place(routed)
        if place is None:
            self._inbox.append(ev.Lost(attempt=number, cause=Cause.GONE))
            return
        attempt.target, attempt.options = place
        connection = self._w.pool.take(attempt.target)
        if connection is None:
            self._redial(ev.Redial(attempt=number))
            return
        self._connected(attempt, connection)

    def _redial(self, action: ev.Redial) -> None:
        self._dialling = self._w.tasks.spawn(self._connect(action.attempt), "relay-dial")

    async def _connect(self, number: int) -> None:
        attempt = self._now_at()
        assert attempt.target is not None
        assert attempt.options is not None
        try:
            connection = await self._w.pool.connect(attempt.target, attempt.options)
        except ConnectFailed as failed:
            self._dialling = None
            self._step(ev.Lost(attempt=number, cause=failed.cause))
            return
        self._dialling = None
        if self._closed or self._machine.attempt != number or self._machine.state is not State.DIALLING:
            connection.abort()
            return
        self._connected(attempt, connection)

    def _connected(self, attempt: Attempt, connection: UpstreamConnection) -> None:
        self._upstream = connection
        attempt.connected_ms = self._now_ms()
        connection.start(self)
        self._step(ev.Connected(attempt=self._machine.attempt))

    def _place(self, routed: Routed) -> tuple[Target, Options] | None:
        if routed.node is None:
            endpoint = self._w.targets.local(routed.endpoint)
            if endpoint is None:
                return None
            return Target(endpoint.name, endpoint.ip, endpoint.port), Options(
                idle_ms=_ENGINE_IDLE_MS,
                idle_most=_ENGINE_IDLE_MOST,
                most=endpoint.connections,
                off_host=endpoint.off_host,
            )
        peer = self._w.targets.peer(routed.node)
        if peer is None:
            return None
        return Target(peer.node, peer.ip, peer.port, peer.build), Options(
            idle_ms=_PEER_IDLE_MS,
            idle_most=_PEER_IDLE_MOST,
            most=_PEER_MOST,
            off_host=True,
            context=peer.context,
            server_name=f"{peer.node}.mesh.internal",
            pin=peer.pin,
        )

    def _send(self, _action: ev.SendRequest) -> None:
        routed, upstream, attempt = self._routed, self._upstream, self._now_at()
        assert routed is not None
        assert upstream is not None
        attempt.sent_ms = self._now_ms()
        request, asked = self._request, self._asked
        span = b"%016x" % self._w.rng.getrandbits(64)
        if routed.node is not None:
            attempt.body = self._parcel.as_model(routed.served)
            head = peer_head(
                path=request.path,
                node=routed.node,
                length=len(attempt.body),
                request_id=asked.request_id,
                passed=passed_up(request.headers, span),
                route=format_route(route_of(routed, self._machine.attempt)),
                model=routed.served,
            )
            upstream.send_head(head)
            return
        endpoint = self._w.targets.local(routed.endpoint)
        if endpoint is None:
            self._abort_upstream()
            self._inbox.append(ev.Lost(attempt=self._machine.attempt, cause=Cause.GONE))
            return
        body = self._parcel.as_model(endpoint.upstream_name(routed.served))
        head = engine_head(
            path=request.path,
            host=endpoint.host,
            length=len(body),
            request_id=asked.request_id,
            attempt=self._machine.attempt,
            passed=passed_up(request.headers, span, endpoint.pass_headers),
            authorization=endpoint.authorization,
        )
        upstream.send(head, body)

    def _send_body(self, _action: ev.SendBody) -> None:
        attempt = self._now_at()
        if self._upstream is not None:
            self._upstream.send_body(attempt.body)

    def _commit(self, _action: ev.Commit) -> None:
        routed, attempt = self._routed, self._now_at()
        assert routed is not None
        self._first_byte_ms = self._now_ms()
        self._status = attempt.status
        self._release_body()
        self._choosing.first_token(routed.seq)
        headers = passed_down(attempt.headers)
        if attempt.events:
            headers.append((b"x-accel-buffering", b"no"))
            if value_of(headers, b"cache-control") is None:
                headers.append((b"cache-control", b"no-cache"))
        headers += self._voice.headers(self._asked, routed, self._machine.attempt, attempt.status)
        self._client.begin(attempt.status, headers, attempt.length)
        for data in attempt.held:
            if data:
                self._client.push(data)
        attempt.held.clear()
        if self._upstream is not None:
            self._client.flush()

    def _finish(self, _action: ev.Finish) -> None:
        self._client.end()

    def _reply(self, action: ev.Reply) -> None:
        self._status, self._code = action.status, action.code
        self._release_body()
        self._client.reply(
            self._voice.refusal(action, self._asked, self._turned, self._routed, self._machine.attempt)
        )

    def _reply_answer(self, _action: ev.ReplyAnswer) -> None:
        attempt, routed = self._now_at(), self._routed
        assert routed is not None
        self._status = attempt.status
        self._release_body()
        body = b"".join(attempt.held)
        headers = passed_down(attempt.headers)
        headers += self._voice.headers(self._asked, routed, self._machine.attempt, attempt.status)
        self._client.reply(Answer(status=attempt.status, headers=headers, body=body))

    def _tell_error(self, action: ev.TellError) -> None:
        self._code = action.code
        attempt = self._now_at()
        last = b""
        if attempt.events:
            last = self._voice.stream_error(action.code, mid_event=attempt.tail.mid_event)
        self._client.cut(last)

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
        outcome, routed, attempt = action.outcome, self._routed, self._now_at()
        assert routed is not None
        now = int(self._now_ms())
        if outcome.result in (ev.Result.DONE, ev.Result.ANSWERED):
            self._choosing.finish(routed.seq)
        else:
            self._choosing.fail(routed.seq)
        breakers = self._w.breakers
        if outcome.fault:
            breakers.failed(routed.at, now, connection_refused=outcome.cause is Cause.CONNECT_REFUSED)
        elif outcome.result in (ev.Result.DONE, ev.Result.ANSWERED):
            breakers.succeeded(routed.at, now)
        else:
            breakers.released(routed.at)
        self._w.observer.attempted(
            AttemptReport(
                side=self._voice.side,
                request_id=self._asked.request_id,
                routed=routed,
                outcome=outcome,
                dispatched_ms=attempt.dispatched_ms,
                connected_ms=attempt.connected_ms,
                marks=attempt.marks(),
                head=attempt.tail.head,
                tail=attempt.tail.tail,
                body_bytes=attempt.size,
                text_bytes=self._asked.facts.text_bytes,
                dialect=self._asked.dialect,
            )
        )

    # --- the end ---------------------------------------------------------------------------------------------

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._release_body()
        self._w.in_hand.discard(self)
        if self._machine.state is State.CANCELLED and self._code is None:
            self._status, self._code = 499, "slow_client" if self._slow_client else "client_gone"
        asked, routed = self._asked, self._routed
        attempt = self._attempt
        self._w.observer.answered(
            AccessLine(
                side=self._voice.side,
                method=self._request.method.decode("ascii"),
                route=self._request.path.decode("ascii"),
                status=self._status,
                code=self._code,
                request_id=asked.request_id,
                decision_id=None if routed is None else routed.decision_id,
                peer=None if routed is None else routed.node,
                bytes_in=asked.body_bytes,
                bytes_out=0 if attempt is None else attempt.size,
                attempts=self._machine.attempt,
                total_ms=self._now_ms() - asked.accepted_ms,
                first_byte_ms=None
                if self._first_byte_ms is None
                else self._first_byte_ms - asked.accepted_ms,
            )
        )

    def _fail(self, exc: Exception) -> None:
        """A fault of our own: end everything this request holds, tell who watches."""
        opened = self._machine.state not in ENDED
        self._inbox.clear()
        if opened:
            for action in self._machine.handle(ev.ClientGone(), self._w.clock.boot_ms()):
                _PERFORM[type(action)](self, action)
        self._code = "internal"
        self._client.abort()
        self._w.observer.failed("exchange", exc)

    def _release_body(self) -> None:
        self._parcel.drop()
        if self._attempt is not None:
            self._attempt.body = b""
        self._client.release_body()

    def _now_at(self) -> Attempt:
        assert self._attempt is not None
        return self._attempt

    def _now_ms(self) -> float:
        return self._w.clock.boot_us() / 1000


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
    ev.EndAttempt: Courier._end_attempt,
}
