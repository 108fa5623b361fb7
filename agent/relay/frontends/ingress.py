"""The ingress: requests of the mesh's routers for this node's own endpoints. It never routes on.

Everything is judged from the head: who (looked up per request), role and route, the announced model and length, the
endpoint, and its admission on fresh values. Only then is the body asked for. Every reply carries the node's newest
record. Errors of its own are told apart from an engine's by a header; after commit a broken answer is only cut.
"""

from collections.abc import Callable
from functools import partial

import msgspec

from agent.identity import routes
from agent.relay.dialects.facts import BodyFault
from agent.relay.dialects.relayed import RELAYED, SHOW, read
from agent.relay.forwarding.access_lines import line_of_answer
from agent.relay.forwarding.body import Parcel, is_heavy
from agent.relay.forwarding.context import Wiring
from agent.relay.forwarding.large_body import Reading
from agent.relay.forwarding.proxied_request import Courier
from agent.relay.frontends.codes import RETRY_AFTER_S, status_of
from agent.relay.frontends.lists import JSON
from agent.relay.http.acceptor import Roll
from agent.relay.http.frontend import Answer, Client, Work
from agent.relay.http.headers import Headers, lines_of, request_id_of
from agent.relay.http.parser import Request
from agent.relay.ports import Admission, Asked, Routed, RouteHeader, Turned
from agent.relay.upstream.route_header import encode_state, parse_route
from router_core import limits
from router_core.exchange.events import Reply
from router_core.ids import Id16, NodeId, NodeName, id8_of
from router_core.placement.ledger import Reservation
from router_core.placement.local import LocalWork
from router_core.placement.record import Choice, Estimate
from router_core.placement.request.request import Endpoint
from router_core.policy.exchange import ExchangePolicy, Hedge
from router_core.record.membership import Member
from router_core.record.state import Dialect
from router_core.router.failure import Cause

_UNTOLD = Id16(b"")
"""A peer's request names an endpoint of this node and not the node."""


class Call:
    """One admitted request: what its head announced, and its ticket in the local work until it has ended. A mere
    question has none."""

    __slots__ = ("_local", "_ticket", "dialect", "length", "member", "model", "route", "service_ms")

    def __init__(
        self,
        local: LocalWork,
        member: Member,
        route: RouteHeader,
        model: str,
        length: int,
        dialect: Dialect,
        service_ms: float,
        now: int,
        *,
        is_work: bool,
    ) -> None:
        self.member = member
        self.route = route
        self.model = model
        self.length = length
        self.dialect = dialect
        self.service_ms = service_ms
        self._local = local
        self._ticket: int | None = None
        if is_work:
            self._ticket = local.start(route.endpoint, service_ms / 1000, now, model)
            local.accepted(id8_of(member.id16), route.inst, route.seq, now)

    @property
    def is_work(self) -> bool:
        return self._ticket is not None

    def end(self) -> None:
        """The work has left; saying so twice is harmless."""
        if self._ticket is not None:
            self._local.finish(self._ticket)


class OneTarget:
    """The choice of a request that was chosen elsewhere: its endpoint, once."""

    def __init__(self, call: Call, at: Endpoint, now: int) -> None:
        self._call = call
        self._at = at
        self.until_ms: int | None = now + call.route.left_ms

    def consult(self) -> None:
        """It was chosen elsewhere."""

    def decide(
        self,
        *,
        attempt: int,
        tried: frozenset[Endpoint],
        refused: frozenset[Endpoint],
        now: int,
        declined: frozenset[Endpoint] = frozenset(),
    ) -> Routed | Turned:
        route = self._call.route
        usual_ms = self._call.service_ms if route.resident else float(route.left_ms)
        if tried or refused:
            return Turned(decision_id=route.decision_id, status=502, code="upstream_unreachable")
        return Routed(
            attempt=attempt,
            decision_id=route.decision_id,
            choice=_choice_of(route, self._at, self._call.model, usual_ms / 1000.0),
            reservation=Reservation(seq=0, route_seq=route.seq),
            inst=route.inst,
            request_class=route.request_class,
            left_ms=route.left_ms,
        )

    @property
    def hedge(self) -> Hedge:
        """A second attempt is its router's to make."""
        return Hedge.OFF

    def has_other(self, *, tried: frozenset[Endpoint], refused: frozenset[Endpoint], now: int) -> bool:
        """It has this one place."""
        return False

    def spare(
        self,
        *,
        beside: Routed,
        attempt: int,
        tried: frozenset[Endpoint],
        refused: frozenset[Endpoint],
        now: int,
    ) -> None:
        """It has this one place."""

    def held_ms(self, now: int) -> None:
        """What waits, waits at its router."""

    def first_token(self, attempt: int) -> None:
        """The work of a peer's request is not split into prompt and answer."""

    def end(self, attempt: int) -> None:
        self._call.end()


class IngressFront:
    """Serves the ingress listener. ``endpoint_key`` gives placement's key of a local endpoint by its name."""

    side = "ingress"

    def __init__(
        self,
        *,
        wiring: Wiring,
        admission: Admission,
        local: LocalWork,
        endpoint_key: Callable[[str], Endpoint],
        policy: ExchangePolicy,
        roll: Roll,
    ) -> None:
        self._w = wiring
        self._admission = admission
        self._local = local
        self._key = endpoint_key
        self._policy = policy
        self._roll = roll
        self._states = StateHeader(admission)

    def opened(self, connection: Client) -> None:
        self._roll.join(connection)

    def closed(self, connection: Client) -> None:
        self._roll.leave(connection)
        self._drop_call(connection)

    def judge(self, connection: Client, request: Request) -> Answer | None:
        self._drop_call(connection)
        member = self._admission.member(connection.peer_certificate() or b"")
        if member is None:
            connection.abort()
            return _told(status_of("role"), "role", _ERROR)
        method, path = request.head.method.decode("latin-1"), request.head.path.decode("latin-1")
        verdict = routes.allowed(routes.Port.INGRESS, method, path, member.roles)
        dialect = RELAYED.get(request.head.path)
        if verdict is routes.RouteVerdict.FORBIDDEN:
            return _told(status_of("role"), "role", _ERROR)
        if verdict is routes.RouteVerdict.NOT_FOUND or dialect is None:
            return _told(status_of("route_unknown"), "route_unknown", _ERROR)
        if request.head.single.get(b"content-type") != b"application/json":
            return self._error("media_type", keep=False)
        route, model, length = _announced(request)
        if route is None or model is None or length is None:
            return self._error("route_malformed", keep=False)
        if length > limits.REQUEST_BODY:
            return self._error("body_too_large", keep=False)
        if len(self._w.in_hand) >= limits.REQUESTS_IN_FLIGHT:
            return self._error("overloaded")
        now = self._w.clock.boot_ms()
        is_work = request.head.path != SHOW
        if is_work:
            cause = self._admission.admit(route, model, dialect)
        else:
            cause = self._admission.asked_about(route, model, dialect)
        if cause is not None:
            return self._refused(cause)
        service_ms = self._admission.service_ms(route, model) if is_work else 0.0
        connection.caller = Call(
            self._local, member, route, model, length, dialect, service_ms, now, is_work=is_work
        )
        return None

    def serve(self, connection: Client, request: Request, body: bytes | bytearray) -> Answer | Work:
        call = connection.caller
        assert isinstance(call, Call)
        start = partial(self._start, connection, request, call)
        if not is_heavy(body):
            return start(Parcel.read(read, call.dialect, body))
        return Reading(
            self._w,
            connection,
            start=start,
            answered=partial(self.answered, connection, request),
            stopping=partial(self._stopping, connection),
        ).begin(call.dialect, body)

    def _start(
        self, connection: Client, request: Request, call: Call, parcel: Parcel | BodyFault
    ) -> Answer | Work:
        """The body has been read."""
        matches = not isinstance(parcel, BodyFault) and len(parcel.body) == call.length
        if isinstance(parcel, BodyFault) or not matches or parcel.facts.model != call.model:
            self._drop_call(connection)
            return self._error("route_mismatch")
        if parcel.facts.unloads:
            self._drop_call(connection)
            return self._error("engine_admin_disabled")
        connection.caller = None
        asked = Asked(
            request_id=request_id_of(request.head.named.get(b"x-request-id")) or call.route.decision_id,
            dialect=call.dialect,
            facts=parcel.facts,
            headers=(),
            caller=call.member.node_id,
            body_bytes=len(parcel.body),
            accepted_ms=request.accepted_ms,
            is_work=call.is_work,
        )
        choosing = OneTarget(call, self._key(call.route.endpoint), request.accepted_ms)
        voice = IngressVoice(self._states)
        courier = Courier(
            self._w, choosing, voice, connection, request, asked, parcel, admitted=True, policy=self._policy
        )
        return courier.start()

    def fault(self, connection: Client, request: Request | None, code: str) -> Answer:
        self._drop_call(connection)
        return _told(status_of(code), code, _ERROR)

    def answered(self, connection: Client, request: Request | None, answer: Answer) -> None:
        known = request is not None and request.head.path in RELAYED
        template = request.head.path.decode("ascii") if known and request is not None else None
        now = self._w.clock.boot_ms()
        self._w.observer.answered(line_of_answer(self.side, request, template, answer, now))

    def _stopping(self, connection: Client) -> Answer:
        self._drop_call(connection)
        return self._error("shutting_down", keep=False)

    def _drop_call(self, connection: Client) -> None:
        call, connection.caller = connection.caller, None
        if isinstance(call, Call):
            call.end()

    def _error(self, code: str, *, keep: bool = True) -> Answer:
        return _told(status_of(code), code, _ERROR, self._states.headers(), keep=keep)

    def _refused(self, cause: str) -> Answer:
        return _told(429, cause, b"x-pairmesh-refused", self._states.headers(), keep=True)


class StateHeader:
    """The newest own record as a header, encoded once per record."""

    __slots__ = ("_admission", "_header", "_signature")

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._signature = b""
        self._header: Headers = []

    def headers(self) -> Headers:
        fresh = self._admission.fresh_state()
        if fresh is None:
            return []
        signed, signature = fresh
        if signature != self._signature:
            self._signature = signature
            self._header = [(b"x-pairmesh-state", encode_state(signed, signature))]
        return self._header


class IngressVoice:
    """Tells a router: a code in a header and a body of one member."""

    __slots__ = ("_states",)

    side = IngressFront.side

    def __init__(self, states: StateHeader) -> None:
        self._states = states

    def refusal(
        self,
        told: Reply,
        asked: Asked,
        turned: Turned | None,
        routed: Routed | None,
        attempts: int,
        held_ms: int | None,
        cause: Cause | None = None,
    ) -> Answer:
        return _told(told.status, told.code, _ERROR, self._states.headers(), keep=True)

    def stream_error(self, code: str, *, mid_event: bool) -> bytes:
        return b""

    def lines(self, asked: Asked, routed: Routed, attempts: int, status: int) -> bytes:
        return lines_of([(b"x-request-id", asked.request_id.encode("ascii")), *self._states.headers()])


def _choice_of(route: RouteHeader, at: Endpoint, model: str, usual_s: float) -> Choice:
    """What a peer's router chose of this node, as far as it tells: the endpoint and the sizes. ``usual_s`` is how long an
    answer may be expected to take."""
    est = Estimate(wait=0.0, load=0.0, prefill=0.0, net=0.0, tpot=0.0, ttft=usual_s, ect=usual_s, sd=0.0)
    return Choice(
        endpoint=at,
        node=_UNTOLD,
        node_id=NodeId(at.partition("/")[0]),
        node_name=NodeName(""),
        label="",
        endpoint_name=route.endpoint,
        engine="",
        model=model,
        is_self=True,
        resident=route.resident,
        prompt_tokens=route.prompt_tokens,
        output_tokens=route.output_tokens,
        ahead=None,
        prefill_s=0.0,
        decode_s=0.0,
        need_bytes=0,
        est=est,
    )


def _told(status: int, code: str, name: bytes, state: Headers | None = None, *, keep: bool = False) -> Answer:
    """A reply of the ingress itself; ``state`` only for a caller that has shown its role."""
    headers = [*JSON, (name, code.encode("ascii")), *(state or [])]
    if status in (429, 503):
        headers.append((b"retry-after", b"%d" % RETRY_AFTER_S))
    body = msgspec.json.encode({"code": code})
    return Answer(status=status, headers=headers, body=body, code=code, keep=keep)


def _announced(request: Request) -> tuple[RouteHeader | None, str | None, int | None]:
    """Route, model and body length as the head announces them, each None if missing, repeated or malformed."""
    told: dict[bytes, bytes] = {}
    for name, value in request.head.headers:
        if name in _ANNOUNCED:
            if name in told:
                return None, None, None
            told[name] = value
    ahead = told.get(b"x-pairmesh-ahead")
    route = parse_route(
        told.get(b"x-pairmesh-route", b"").decode("latin-1"),
        None if ahead is None else ahead.decode("latin-1"),
    )
    model = told.get(b"x-pairmesh-model", b"").decode("latin-1")
    length = told.get(b"x-pairmesh-length", b"")
    good = length.isdigit() and len(length) <= 9
    return route, model or None, int(length) if good else None


_ERROR = b"x-pairmesh-error"
_ANNOUNCED = frozenset({b"x-pairmesh-route", b"x-pairmesh-ahead", b"x-pairmesh-model", b"x-pairmesh-length"})
