"""Where a routed request is sent, how connections to there are made and kept, and what an error from there means."""

from random import Random

from msgspec import Struct

from agent.identity.certificate import server_name
from agent.relay.dialects.facts import Facts
from agent.relay.http.headers import engine_head, passed_up, peer_head
from agent.relay.http.parser import Request
from agent.relay.ports import Asked, LocalEndpoint, PeerRoute, Routed, RouteHeader, Targets
from agent.relay.upstream.attempt import Attempt
from agent.relay.upstream.connection import Options, Target
from agent.relay.upstream.route_header import format_ahead, format_route
from router_core.exchange import events
from router_core.placement.request.request import Endpoint
from router_core.policy.exchange import ExchangePolicy
from router_core.router.failure import FailureClass
from router_core.router.patience import overdue_ms

_CLASSIFIED = 512
_KNOWN_MOST = 1_024
_ENGINE_IDLE_MS = 3_000
_ENGINE_IDLE_MOST = 32
_PEER_IDLE_MS = 60_000
_PEER_IDLE_MOST = 8
_PEER_MOST = 64


class Place(Struct, frozen=True):
    """Where an attempt goes: ``engine`` is None on the way to a peer's ingress."""

    target: Target
    options: Options
    engine: LocalEndpoint | None = None


class Places:
    """Where chosen endpoints are. What is made of an engine or of a peer's ingress is kept as long as that is the same."""

    __slots__ = ("_known", "_targets")

    def __init__(self, targets: Targets) -> None:
        self._targets = targets
        self._known: dict[Endpoint, tuple[LocalEndpoint | PeerRoute, Place]] = {}

    def of(self, routed: Routed) -> Place | None:
        """The engine or the peer's ingress that ``routed`` names; None if it is not there any more."""
        choice = routed.choice
        if choice.is_self:
            found: LocalEndpoint | PeerRoute | None = self._targets.local(choice.endpoint_name)
        else:
            found = self._targets.peer(choice.node_id)
        if found is None:
            return None
        known = self._known.get(choice.endpoint)
        if known is None or known[0] is not found:
            if len(self._known) >= _KNOWN_MOST:
                self._known.clear()
            place = place_of_peer(found) if isinstance(found, PeerRoute) else _of_engine(found)
            known = self._known[choice.endpoint] = found, place
        return known[1]


def _of_engine(endpoint: LocalEndpoint) -> Place:
    """Engines close idle sockets after 5 s, so ours are given up at 3 s."""
    return Place(
        Target(endpoint.name, endpoint.ip, endpoint.port),
        Options(
            idle_ms=_ENGINE_IDLE_MS,
            idle_most=_ENGINE_IDLE_MOST,
            most=endpoint.connections,
            off_host=endpoint.off_host,
            context=endpoint.tls,
            server_name=endpoint.ip if endpoint.tls is not None else None,
            admits=endpoint.admits,
        ),
        endpoint,
    )


def place_of_peer(peer: PeerRoute) -> Place:
    """Both ends are ours."""
    return Place(
        Target(peer.node, build=peer.build),
        Options(
            idle_ms=_PEER_IDLE_MS,
            idle_most=_PEER_IDLE_MOST,
            most=_PEER_MOST,
            off_host=True,
            context=peer.context,
            server_name=server_name(peer.node),
            pin=peer.pin,
            addresses=peer.addresses,
            reached=peer.reached,
        ),
    )


def attempt_target(
    policy: ExchangePolicy, engine: LocalEndpoint | None, routed: Routed, facts: Facts
) -> events.Target:
    """What the exchange machine needs to know of where an attempt goes; ``engine`` is the own one, if it is one.

    The limits of an endpoint are kept where it is: at a peer's, by the peer.
    """
    choice = routed.choice
    est = choice.est
    return events.Target(
        endpoint=choice.endpoint,
        peer=not choice.is_self,
        connect_ms=policy.connect_ms if engine is None else engine.connect_ms,
        first_byte_ms=0 if engine is None else engine.first_byte_ms,
        idle_ms=0 if engine is None else engine.idle_ms,
        overdue_ms=overdue_ms(
            ttft_ms=1000.0 * est.ttft,
            load_ms=1000.0 * est.load,
            ect_ms=1000.0 * est.ect,
            stream=facts.stream,
            floor_ms=policy.overdue_floor_ms,
        ),
        patient=choice.ahead is None,
    )


def engine_request(
    request: Request, asked: Asked, endpoint: LocalEndpoint, attempt: int, length: int, rng: Random
) -> bytes:
    """The head that goes to an own engine. What is passed on of the client's is kept with its head, unless it is told
    anew each time or more goes to this endpoint than to others."""
    told = request.head
    passed, more = told.passed, endpoint.pass_headers
    if passed is None or more:
        passed = passed_up(told.headers, rng, more)
        if not more and b"traceparent" not in told.named:
            told.passed = passed
    return engine_head(
        path=endpoint.path_of(told.path),
        host=endpoint.host,
        length=length,
        request_id=asked.request_id,
        attempt=attempt,
        passed=passed,
        authorization=endpoint.authorization,
    )


def peer_request(
    request: Request, asked: Asked, routed: Routed, route: RouteHeader, length: int, rng: Random
) -> bytes:
    """The head that goes to a peer's ingress."""
    return peer_head(
        path=request.head.path,
        node=routed.choice.node_id,
        length=length,
        request_id=asked.request_id,
        passed=passed_up(request.head.headers, rng),
        route=format_route(route),
        ahead=format_ahead(route),
        model=routed.choice.model,
    )


def classify(targets: Targets, routed: Routed | None, attempt: Attempt) -> FailureClass:
    """The failure class of a held-back error answer, by the engine that gave it. Classes are shared by name."""
    if routed is None:
        return FailureClass.OTHER
    prefix = b"".join(attempt.held)[:_CLASSIFIED]
    choice = routed.choice
    if not choice.is_self:
        told = targets.peer_classify(choice.node_id, choice.endpoint_name, attempt.status, prefix)
    else:
        endpoint = targets.local(choice.endpoint_name)
        if endpoint is None:
            return FailureClass.OTHER
        told = endpoint.classify(attempt.status, prefix)
    return FailureClass[told.name]
