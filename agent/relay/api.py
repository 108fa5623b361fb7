"""The local API: which requests are let in, and how errors are told to API clients.

Order of checks, all before the body is read: Host, Origin, loop, route and method, media type, the node's phase, room.
Refuses to know how endpoints are chosen and reached.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from msgspec import Struct

from agent.relay.accept import Roll
from agent.relay.codes import RETRY_AFTER_S, message_of, status_of
from agent.relay.dialects import openai
from agent.relay.dialects.facts import BodyFault
from agent.relay.driver import Courier
from agent.relay.front import Answer, Client, Work
from agent.relay.headers import Headers, request_id_of, value_of
from agent.relay.intake import Request
from agent.relay.lines import line_of_answer
from agent.relay.lists import JSON, Lists, greeting, health
from agent.relay.parcel import Parcel
from agent.relay.ports import Asked, Listing, Phase, Placer, Routed, Turned
from agent.relay.wiring import Wiring
from router_core import limits
from router_core.exchange.events import Reply
from router_core.record.state import Dialect

_HINT_PREFIX = b"x-pairmesh-"
_MESH_OWN = frozenset({b"x-pairmesh-route", b"x-pairmesh-state", b"x-pairmesh-model", b"x-pairmesh-length"})
_MODEL = b"/v1/models/"
_JSON_TYPE = b"application/json"
_PREFLIGHT_AGE = b"600"


class View(Enum):
    """Answers that need no endpoint."""

    MODELS = "models"
    MODEL = "model"
    HEALTH = "health"
    GREETING = "greeting"


class Route(Struct, frozen=True):
    """One path: its methods, and the dialect of its body or the view that answers it. ``template`` is logged."""

    template: str
    methods: tuple[bytes, ...]
    what: Dialect | View


_POST = (b"POST",)
_GET = (b"GET", b"HEAD")
ROUTES: dict[bytes, Route] = {
    b"/v1/chat/completions": Route("/v1/chat/completions", _POST, Dialect.CHAT),
    b"/v1/completions": Route("/v1/completions", _POST, Dialect.COMPLETION),
    b"/v1/embeddings": Route("/v1/embeddings", _POST, Dialect.EMBED),
    b"/v1/models": Route("/v1/models", _GET, View.MODELS),
    b"/health": Route("/health", _GET, View.HEALTH),
    b"/": Route("/", _GET, View.GREETING),
}
_ONE_MODEL = Route("/v1/models/{id}", _GET, View.MODEL)


def route_for(path: bytes) -> Route | None:
    """The route of a raw path."""
    route = ROUTES.get(path)
    if route is None and path.startswith(_MODEL) and len(path) > len(_MODEL):
        return _ONE_MODEL
    return route


@dataclass(frozen=True, slots=True, kw_only=True)
class Doors:
    """Who may knock. ``hosts`` are exact ``name:port`` (or ``name`` for port 80), ``origins`` exact origins."""

    hosts: frozenset[bytes]
    origins: frozenset[bytes] = frozenset()

    @classmethod
    def of(
        cls, address: tuple[str, int], hosts: tuple[str, ...] = (), origins: tuple[str, ...] = ()
    ) -> "Doors":
        """The doors of a listener at ``address``: its own literal address, ``localhost``, and the named hosts."""
        ip, port = address
        literal = f"[{ip}]" if ":" in ip else ip
        names = {f"localhost:{port}", f"{literal}:{port}"}
        for host in hosts:
            bare = host.rpartition("]")[2] if host.startswith("[") else host
            names.add(host.lower() if ":" in bare else f"{host.lower()}:{port}")
        if port == 80:
            names |= {"localhost", literal}
        return cls(
            hosts=frozenset(name.encode("ascii") for name in names),
            origins=frozenset(origin.encode("ascii") for origin in origins),
        )

    def judge(self, request: Request) -> str | None:
        """A fault code, or None. ``null`` is no origin, and a browser's cross-site request needs an allowed one."""
        host = request.single[b"host"].lower()
        if host not in self.hosts and host.replace(b".:", b":").rstrip(b".") not in self.hosts:
            return "host_refused"
        origin = site = None
        for name, value in request.headers:
            if name == b"origin":
                if origin is not None:
                    return "origin_refused"
                origin = value
            elif name == b"sec-fetch-site":
                site = value.lower()
        if origin is not None:
            return None if origin in self.origins else "origin_refused"
        return "origin_refused" if site in (b"cross-site", b"same-site") else None

    def cors(self, request: Request) -> Headers:
        """The headers that let an allowed origin read the reply; none for anybody else."""
        origin = value_of(request.headers, b"origin") if self.origins else None
        if origin is None or origin not in self.origins:
            return []
        return [(b"access-control-allow-origin", origin), (b"vary", b"Origin")]


class ApiFront:
    """Serves one API listener."""

    side = "api"

    def __init__(
        self,
        *,
        wiring: Wiring,
        place: Placer,
        listing: Callable[[], Listing],
        phase: Callable[[], Phase],
        doors: Doors,
        roll: Roll,
        session_headers: frozenset[bytes] = frozenset({b"x-claude-code-session-id"}),
    ) -> None:
        self._w = wiring
        self._place = place
        self._listing = listing
        self._phase = phase
        self._doors = doors
        self._roll = roll
        self._hint_names = session_headers | {b"x-session-id"}
        self._lists = Lists()

    # --- connections -----------------------------------------------------------------------------------------

    def opened(self, connection: Client) -> None:
        self._roll.join(connection)

    def closed(self, connection: Client) -> None:
        self._roll.leave(connection)

    # --- requests --------------------------------------------------------------------------------------------

    def judge(self, connection: Client, request: Request) -> Answer | None:
        code = self._doors.judge(request)
        if code is not None:
            return self._error(request, code, keep=False)
        if [name for name, value in request.headers if name == b"via" and b"pairmesh" in value.lower()]:
            return self._error(request, "loop_detected", keep=False)
        route = route_for(request.path)
        if route is None:
            return self._error(request, "route_unknown")
        if request.method not in route.methods:
            if request.method == b"OPTIONS":
                return self._preflight(request, route)
            allow = [(b"allow", b", ".join((*route.methods, b"OPTIONS")))]
            return self._error(request, "method", extra=allow)
        if isinstance(route.what, View):
            return self._error(request, "bad_request", keep=False) if request.has_body else None
        kind = request.single.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != _JSON_TYPE or value_of(request.headers, b"content-encoding") is not None:
            return self._error(request, "media_type", keep=False)
        phase = self._phase()
        if phase is not Phase.SERVING:
            code = "starting" if phase is Phase.STARTING else "shutting_down"
            return self._error(request, code, keep=False)
        if len(self._w.in_hand) >= limits.REQUESTS_IN_FLIGHT:
            return self._error(request, "overloaded", keep=False)
        return None

    def serve(self, connection: Client, request: Request, body: bytes | bytearray) -> Answer | Work:
        route = route_for(request.path)
        assert route is not None
        if isinstance(route.what, View):
            return self._viewed(request, route.what)
        parcel = Parcel.read(openai.read, route.what, body)
        if isinstance(parcel, BodyFault):
            return self._error(request, parcel.value)
        asked = Asked(
            request_id=request_id_of(request.headers) or f"{self._w.rng.getrandbits(128):032x}",
            dialect=route.what,
            facts=parcel.facts,
            headers=self._hints(request),
            caller="local",
            body_bytes=len(body),
            accepted_ms=request.accepted_ms,
        )
        voice = ApiVoice(self._doors.cors(request))
        return Courier(self._w, self._place(asked), voice, connection, request, asked, parcel).start()

    def fault(self, connection: Client, request: Request | None, code: str) -> Answer:
        return self._error(request, code, keep=False)

    def answered(self, connection: Client, request: Request | None, answer: Answer) -> None:
        route = None if request is None else route_for(request.path)
        template = None if route is None else route.template
        now = self._w.clock.boot_ms()
        self._w.observer.answered(line_of_answer(self.side, request, template, answer, now))

    def _hints(self, request: Request) -> tuple[tuple[str, str], ...]:
        told = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in request.headers
            if (name.startswith(_HINT_PREFIX) and name not in _MESH_OWN) or name in self._hint_names
        ]
        return tuple(told)

    def _viewed(self, request: Request, view: View) -> Answer:
        if view is View.HEALTH:
            answer: Answer | None = health(self._phase())
        elif view is View.GREETING:
            answer = greeting()
        elif view is View.MODELS:
            answer = self._lists.models(self._listing())
        else:
            answer = self._lists.model(self._listing(), request.path[len(_MODEL) :])
        if answer is None:
            return self._error(request, "model_absent")
        cors = self._doors.cors(request)
        if not cors:
            return answer
        return Answer(status=answer.status, headers=answer.headers + cors, body=answer.body)

    def _preflight(self, request: Request, route: Route) -> Answer:
        headers: Headers = [(b"allow", b", ".join((*route.methods, b"OPTIONS")))]
        cors = self._doors.cors(request)
        if cors:
            asked = value_of(request.headers, b"access-control-request-headers")
            headers += cors
            headers.append((b"access-control-allow-methods", b", ".join(route.methods)))
            headers.append((b"access-control-max-age", _PREFLIGHT_AGE))
            if asked is not None:
                headers.append((b"access-control-allow-headers", asked))
        return Answer(status=204, headers=headers, body=b"", keep=not request.has_body)

    def _error(
        self, request: Request | None, code: str, *, keep: bool = True, extra: Headers | None = None
    ) -> Answer:
        status = status_of(code)
        headers = JSON + (extra or [])
        if status in (429, 503):
            headers.append((b"retry-after", b"%d" % RETRY_AFTER_S))
        if request is not None:
            headers += self._doors.cors(request)
        body = openai.error(status, code, message_of(code))
        return Answer(status=status, headers=headers, body=body, code=code, keep=keep)


class ApiVoice:
    """Tells API clients in the OpenAI dialects. ``cors`` goes onto every reply of the request."""

    __slots__ = ("_cors",)

    side = ApiFront.side

    def __init__(self, cors: Headers) -> None:
        self._cors = cors

    def refusal(
        self, told: Reply, asked: Asked, turned: Turned | None, routed: Routed | None, attempts: int
    ) -> Answer:
        headers = [*JSON, (b"x-request-id", asked.request_id.encode("ascii"))]
        decision = routed.decision_id if turned is None and routed is not None else None
        counts: tuple[tuple[str, int], ...] = ()
        nearest: tuple[str, ...] = ()
        hints = None
        if turned is not None:
            decision, hints = turned.decision_id, turned.hints
            if turned.code == told.code:
                counts, nearest = turned.counts, turned.nearest
        if decision is not None:
            headers.append((b"x-pairmesh-decision-id", decision.encode("ascii")))
        headers.append((b"x-pairmesh-reason", told.code.encode("ascii")))
        if attempts > 1:
            headers.append((b"x-pairmesh-attempts", b"%d" % attempts))
            if told.status in (502, 504):
                headers.append((b"x-should-retry", b"false"))
        if hints is not None:
            headers.append((b"x-pairmesh-hints", hints.encode("ascii")))
        if told.status in (429, 503):
            headers.append((b"retry-after", b"%d" % (told.retry_after_s or RETRY_AFTER_S)))
        body = openai.error(told.status, told.code, message_of(told.code, counts, nearest))
        return Answer(status=told.status, headers=headers + self._cors, body=body, code=told.code)

    def stream_error(self, code: str, *, mid_event: bool) -> bytes:
        return openai.stream_error(code, message_of(code), mid_event=mid_event)

    def headers(self, asked: Asked, routed: Routed, attempts: int, status: int) -> Headers:
        headers = [
            (b"x-request-id", asked.request_id.encode("ascii")),
            (b"x-pairmesh-node", routed.label.encode("ascii")),
            (b"x-pairmesh-model", routed.served.encode("ascii")),
            (b"x-pairmesh-decision-id", routed.decision_id.encode("ascii")),
            (b"x-pairmesh-reason", routed.reason.encode("ascii")),
        ]
        if attempts > 1:
            headers.append((b"x-pairmesh-attempts", b"%d" % attempts))
            if status in (502, 504):
                headers.append((b"x-should-retry", b"false"))
        if routed.hints is not None:
            headers.append((b"x-pairmesh-hints", routed.hints.encode("ascii")))
        if routed.session is not None:
            headers.append((b"x-pairmesh-session", routed.session.encode("ascii")))
        return headers + self._cors
