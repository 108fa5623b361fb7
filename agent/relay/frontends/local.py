"""The local API: which requests are let in, and how errors are told to API clients.

Order of checks, all before the body is read: Host, Origin, loop, route and method, media type, the node's phase, room.
Refuses to know how endpoints are chosen and reached.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address

from msgspec import Struct

from agent.relay.dialects import relayed
from agent.relay.dialects.facts import BodyFault
from agent.relay.forwarding.access_lines import line_of_answer
from agent.relay.forwarding.body import Parcel, is_heavy
from agent.relay.forwarding.context import Wiring
from agent.relay.forwarding.large_body import Reading
from agent.relay.forwarding.proxied_request import Courier
from agent.relay.frontends.codes import RETRY_AFTER_S, is_passing, message_of, status_of
from agent.relay.frontends.lists import JSON, Lists, greeting, health, running, version
from agent.relay.frontends.replies import API_SIDE, ApiVoice
from agent.relay.frontends.routes import MODEL, Closed, Route, View, route_for
from agent.relay.http.acceptor import Roll
from agent.relay.http.frontend import Answer, Client, Work
from agent.relay.http.headers import Headers, request_id_of, value_of
from agent.relay.http.parser import Head, Request
from agent.relay.ports import Asked, Listing, Phase, Placer
from router_core import limits
from router_core.placement.request.hints import PREFIX, TRANSPORT
from router_core.record.state import Dialect

_HINT_PREFIX = PREFIX.encode("ascii")
_MESH_OWN = frozenset(name.encode("ascii") for name in TRANSPORT)
_JSON_TYPE = b"application/json"
_OF_PAGES = frozenset({b"origin", b"sec-fetch-site"})
_OF_BROWSERS = frozenset({b"origin", b"referer", b"cookie"})
_DEFAULT_PORTS = {b"http": b":80", b"https": b":443"}
_EXPOSED: Headers = [
    (
        b"access-control-expose-headers",
        b"x-request-id, retry-after, server-timing, x-should-retry, "
        + b", ".join(
            b"x-pairmesh-" + name
            for name in (
                b"node",
                b"model",
                b"decision-id",
                b"reason",
                b"attempts",
                b"match",
                b"hints",
                b"session",
            )
        ),
    )
]
"""What scripts of a page may read of a reply besides the few headers that they always may."""
_PREFLIGHT_AGE = b"600"
_DOTTED = re.compile(rb"([^:]+)\.((?::\d{1,5})?)")


def _has_passed(headers: Headers) -> bool:
    """True if a mesh has had this request before."""
    return any(name == b"via" and b"pairmesh" in value.lower() for name, value in headers)


def _undotted(host: bytes) -> bytes:
    """``host`` without the one dot that may end a name."""
    dotted = _DOTTED.fullmatch(host)
    return host if dotted is None else dotted[1] + dotted[2]


def _normal(origin: bytes) -> bytes:
    """``origin`` as browsers send it: without the port that its scheme stands for."""
    port = _DEFAULT_PORTS.get(origin.partition(b":")[0])
    return origin.removesuffix(port) if port is not None else origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Doors:
    """Who may knock. ``hosts`` are exact ``name:port`` (or ``name`` for port 80), ``origins`` exact origins;
    ``loopback`` says that only this host can reach the listener."""

    hosts: frozenset[bytes]
    origins: frozenset[bytes] = frozenset()
    loopback: bool = False

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
            origins=frozenset(_normal(origin.encode("ascii")) for origin in origins),
            loopback=ip_address(ip).is_loopback,
        )

    def judge(self, head: Head) -> str | None:
        """A fault code, or None. ``null`` is no origin, and a browser's cross-site request needs an allowed one."""
        host = head.single[b"host"].lower()
        if host not in self.hosts and _undotted(host) not in self.hosts:
            return "host_refused"
        if head.named.keys().isdisjoint(_OF_PAGES):
            return None
        origin = site = None
        for name, value in head.headers:
            if name == b"origin":
                if origin is not None:
                    return "origin_refused"
                origin = value
            elif name == b"sec-fetch-site":
                site = value.lower()
        if origin is not None:
            return None if _normal(origin) in self.origins else "origin_refused"
        return "origin_refused" if site in (b"cross-site", b"same-site") else None

    def takes_as_json(self, head: Head) -> bool:
        """Whether the body may be read. A bare ``curl -d`` names another type, or none; that is believed of this host's own
        programs, and never of a browser's page."""
        told = head.single.get(b"content-type", b"")
        if b"content-encoding" in head.named:
            return False
        if told == _JSON_TYPE:
            return True
        kind = told.partition(b";")[0].strip().lower()
        if kind == _JSON_TYPE:
            return True
        return self.loopback and not any(
            name in _OF_BROWSERS or name.startswith(b"sec-fetch-") for name, _ in head.headers
        )

    def cors(self, head: Head) -> Headers:
        """The headers that let an allowed origin read the reply; none for anybody else."""
        if not self.origins:
            return []
        told = [value for name, value in head.headers if name == b"origin"]
        if len(told) != 1 or _normal(told[0]) not in self.origins:
            return []
        return [(b"access-control-allow-origin", told[0]), (b"vary", b"Origin"), *_EXPOSED]


class Gist(Struct, frozen=True, kw_only=True):
    """What a head says that begins a relayed request, whatever its body. ``request_id`` is the client's own;
    ``hint_names`` are the headers besides ``x-pairmesh-*`` that ``hints`` were looked for in."""

    dialect: Dialect
    is_work: bool
    request_id: str | None
    hint_names: frozenset[bytes]
    hints: tuple[tuple[str, str], ...]
    voice: ApiVoice


class ApiFront:
    """Serves one API listener."""

    side = API_SIDE

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
        self._lists = Lists()
        self.name_sessions(session_headers)

    def name_sessions(self, headers: Iterable[bytes]) -> None:
        """Read these headers, besides ``x-session-id``, as names of sessions."""
        self._hint_names = frozenset({*headers, b"x-session-id"})

    # --- connections -----------------------------------------------------------------------------------------

    def opened(self, connection: Client) -> None:
        self._roll.join(connection)

    def closed(self, connection: Client) -> None:
        self._roll.leave(connection)

    # --- requests --------------------------------------------------------------------------------------------

    def judge(self, connection: Client, request: Request) -> Answer | None:
        head = request.head
        gist = head.gist
        if not isinstance(gist, Gist) or gist.hint_names is not self._hint_names:
            understood = self._understood(request)
            if not isinstance(understood, Gist):
                return understood
            head.gist = understood
        phase = self._phase()
        if phase is not Phase.SERVING:
            code = "starting" if phase is Phase.STARTING else "shutting_down"
            return self._error(request, code, keep=False)
        if len(self._w.in_hand) >= limits.REQUESTS_IN_FLIGHT:
            return self._error(request, "overloaded", keep=False)
        return None

    def _understood(self, request: Request) -> "Gist | Answer | None":
        """What the head of a request that is relayed says; a refusal, or None if it only wants to see something."""
        head = request.head
        code = self._doors.judge(head)
        if code is not None:
            return self._error(request, code, keep=False)
        if b"via" in head.named and _has_passed(head.headers):
            return self._error(request, "loop_detected", keep=False)
        route = route_for(head.path)
        if route is None:
            return self._error(request, "route_unknown")
        if head.method not in route.methods:
            if head.method == b"OPTIONS":
                return self._preflight(request, route)
            allow = [(b"allow", b", ".join((*route.methods, b"OPTIONS")))]
            return self._error(request, "method", extra=allow)
        if isinstance(route.what, Closed):
            return self._error(request, route.what.value, keep=not request.has_body)
        if isinstance(route.what, View):
            return self._error(request, "bad_request", keep=False) if request.has_body else None
        if not self._doors.takes_as_json(head):
            return self._error(request, "media_type", keep=False)
        return Gist(
            dialect=route.what,
            is_work=head.path != relayed.SHOW,
            request_id=request_id_of(head.named.get(b"x-request-id")),
            hint_names=self._hint_names,
            hints=self._hints(head),
            voice=ApiVoice(relayed.tongue_of(head.path), self._doors.cors(head)),
        )

    def serve(self, connection: Client, request: Request, body: bytes | bytearray) -> Answer | Work:
        gist = request.head.gist
        if not isinstance(gist, Gist):
            return self._viewed(request)
        start = partial(self._start, connection, request, gist)
        if not is_heavy(body):
            parcel = Parcel.read(relayed.read, gist.dialect, body)
            if isinstance(parcel, BodyFault):
                return self._error(request, parcel.value, words=relayed.why(gist.dialect, parcel, body))
            return start(parcel)
        return Reading(
            self._w,
            connection,
            start=start,
            answered=partial(self.answered, connection, request),
            stopping=partial(self._error, request, "shutting_down", keep=False),
        ).begin(gist.dialect, body)

    def _start(
        self, connection: Client, request: Request, gist: Gist, parcel: Parcel | BodyFault
    ) -> Answer | Work:
        """The body has been read."""
        if isinstance(parcel, BodyFault):
            return self._error(request, parcel.value)
        if parcel.facts.unloads:
            return self._error(request, Closed.ENGINE_ADMIN.value)
        asked = Asked(
            request_id=gist.request_id or self._w.rng.randbytes(16).hex(),
            dialect=gist.dialect,
            facts=parcel.facts,
            headers=gist.hints,
            caller="local",
            body_bytes=len(parcel.body),
            accepted_ms=request.accepted_ms,
            is_work=gist.is_work,
        )
        return Courier(self._w, self._place(asked), gist.voice, connection, request, asked, parcel).start()

    def fault(self, connection: Client, request: Request | None, code: str) -> Answer:
        return self._error(request, code, keep=False)

    def answered(self, connection: Client, request: Request | None, answer: Answer) -> None:
        route = None if request is None else route_for(request.head.path)
        template = None if route is None else route.template
        now = self._w.clock.boot_ms()
        self._w.observer.answered(line_of_answer(self.side, request, template, answer, now))

    def _hints(self, head: Head) -> tuple[tuple[str, str], ...]:
        named = head.named
        if self._hint_names.isdisjoint(named) and _HINT_PREFIX not in b"\n".join(named):
            return ()
        told = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in head.headers
            if (name.startswith(_HINT_PREFIX) and name not in _MESH_OWN) or name in self._hint_names
        ]
        return tuple(told)

    def _viewed(self, request: Request) -> Answer:
        route = route_for(request.head.path)
        assert route is not None
        view = route.what
        assert isinstance(view, View)
        if view is View.HEALTH:
            answer: Answer | None = health(self._phase())
        elif view is View.GREETING:
            answer = greeting()
        elif view is View.MODELS:
            answer = self._lists.models(self._listing())
        elif view is View.TAGS:
            answer = self._lists.tags(self._listing())
        elif view is View.PS:
            answer = running(self._listing(), self._w.clock.wall_ms())
        elif view is View.VERSION:
            answer = version(self._listing())
        else:
            answer = self._lists.model(self._listing(), request.head.path[len(MODEL) :])
        if answer is None:
            return self._error(request, "model_absent")
        cors = self._doors.cors(request.head)
        if not cors:
            return answer
        return Answer(status=answer.status, headers=answer.headers + cors, body=answer.body)

    def _preflight(self, request: Request, route: Route) -> Answer:
        headers: Headers = [(b"allow", b", ".join((*route.methods, b"OPTIONS")))]
        cors = self._doors.cors(request.head)
        if cors:
            asked = value_of(request.head.headers, b"access-control-request-headers")
            headers += cors
            headers.append((b"access-control-allow-methods", b", ".join(route.methods)))
            headers.append((b"access-control-max-age", _PREFLIGHT_AGE))
            if asked is not None:
                headers.append((b"access-control-allow-headers", asked))
        return Answer(status=204, headers=headers, body=b"", keep=not request.has_body)

    def _error(
        self,
        request: Request | None,
        code: str,
        *,
        keep: bool = True,
        extra: Headers | None = None,
        words: str | None = None,
    ) -> Answer:
        status = status_of(code)
        headers = JSON + (extra or [])
        if is_passing(status, code):
            headers.append((b"retry-after", b"%d" % RETRY_AFTER_S))
        if request is not None:
            headers += self._doors.cors(request.head)
        tongue = relayed.tongue_of(b"" if request is None else request.head.path)
        body = tongue.error(status, code, message_of(code, words=words))
        return Answer(status=status, headers=headers, body=body, code=code, keep=keep)
