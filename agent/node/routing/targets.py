"""Where chosen endpoints are: own engines by their manifests, peers where their links run and by the addresses they sign.

Read on a request's path, so everything is a look-up. A peer's address that could not be connected comes last
next time. Refuses to know who chose and why.
"""

import ssl
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import lru_cache, partial
from typing import NamedTuple

from agent.board import Board
from agent.engines.classify import classify
from agent.engines.contract import EndpointStatus
from agent.engines.outside import Outside, is_literal, is_outside
from agent.identity.tls import TlsContexts
from agent.mesh.addresses import AddressBook, PeerAddress, Unfit
from agent.mesh.interfaces import IpAddress
from agent.node.routing.reachability import Reach
from agent.relay.ports import PeerRoute
from agent.settings.manifest import API_PATH, EngineKind
from router_core.ids import Id16, MeshId, NodeId, id16_of, id32_of
from router_core.placement.request.request import Endpoint as PlacedAt
from router_core.record.membership import Liveness, Member
from router_core.record.state import Static
from router_core.router.failure import Cause
from router_core.view.cluster import NodeView

CONNECTIONS_MOST = 256
_CONNECTIONS_SPARE = 8
_KINDS = frozenset(EngineKind)


class _Known(NamedTuple):
    """A peer's route, the addresses in it, and what both were made of."""

    static: Static
    member: Member
    build: int
    addresses: tuple[PeerAddress, ...]
    route: PeerRoute


class EngineTarget:
    """One own engine, as the relay sees it. ``outside`` judges where the name of a ``cloud`` endpoint leads."""

    def __init__(self, status: EndpointStatus, outside: Outside = is_outside) -> None:
        manifest = status.manifest
        self._status = status
        self.name = status.name
        self.ip, self.port = status.base
        self.host = manifest.url.authority.encode("ascii")
        self._path = None if manifest.url.path == API_PATH else manifest.url.path_of
        self.tls = system_trust() if manifest.url.scheme == "https" else None
        self.admits = outside if manifest.cloud and not is_literal(self.ip) else None
        self.pass_headers = frozenset(name.lower().encode("ascii") for name in manifest.pass_headers)
        self.authorization = status.credential.authorization if status.credential is not None else None
        self.off_host = manifest.remote_host or manifest.cloud
        self.connect_ms = manifest.connect_ms
        self.first_byte_ms = manifest.first_byte_ms
        self.idle_ms = manifest.idle_ms
        self.connections = min(CONNECTIONS_MOST, (status.slots or 1) + status.max_queue + _CONNECTIONS_SPARE)

    def path_of(self, path: bytes) -> bytes:
        """The engine's own path for one of the API's; nearly always that very one."""
        return path if self._path is None else self._path(path.decode("latin-1")).encode("latin-1")

    def upstream_name(self, served: str) -> str:
        """The engine's own spelling of a published name."""
        return self._status.native_id(served) or served

    def classify(self, status: int, prefix: bytes) -> Enum:
        """The failure class of an answer by its status and first bytes."""
        return classify(self._status.manifest.engine, status, prefix)


class NodeTargets:
    """Satisfies the relay's ``Targets``. ``ways`` are the addresses that links to a member run over, True for those that
    were dialled."""

    def __init__(
        self,
        *,
        board: Board,
        endpoints: Callable[[], Mapping[str, EndpointStatus]],
        members: Callable[[], Mapping[Id16, Member]],
        contexts: TlsContexts,
        book: AddressBook,
        ways: Callable[[Id16], Sequence[tuple[IpAddress, bool]]],
        reach: Reach,
        is_draining: Callable[[], bool],
        outside: Outside = is_outside,
    ) -> None:
        self._board = board
        self._endpoints = endpoints
        self._members = members
        self._contexts = contexts
        self._book = book
        self._ways = ways
        self._reach = reach
        reach.subscribe(self.moved)
        self._is_draining = is_draining
        self._outside = outside
        self._known: dict[str, tuple[EndpointStatus, EngineTarget]] = {}
        self._routes: dict[NodeId, _Known] = {}

    def members_changed(self, members: Mapping[Id16, Member], _mesh_id: MeshId) -> None:
        """The roster changed: what is known of the ways to nodes that left it goes with them."""
        self._routes = {node: known for node, known in self._routes.items() if known.member.id16 in members}

    def local(self, endpoint: str) -> EngineTarget | None:
        """An own engine that takes requests now, else None."""
        status = self._endpoints().get(endpoint)
        if status is None or not status.health.takes_requests or self._is_draining():
            return None
        known = self._known.get(endpoint)
        if known is None or not _is_same_engine(known[0], status):
            known = self._known[endpoint] = (status, EngineTarget(status, self._outside))
        return known[1]

    def peer(self, node: NodeId) -> PeerRoute | None:
        """The ingress of a member of the roster that told an address we may dial, else None."""
        id16 = id16_of(id32_of(node))
        member = self._members().get(id16)
        seen = self._board.current.nodes.get(id16)
        if member is None or seen is None or seen.static is None:
            return None
        known, build = self._routes.get(node), self._contexts.build
        if (
            known is None
            or known.static is not seen.static
            or known.member is not member
            or known.build != build
        ):
            known = self._found(node, member, seen.static, build)
            if known is None:
                return None
            self._routes[node] = known
        return known.route

    def has_told(self, node: NodeId) -> bool:
        """True if ``node`` has told anything of itself yet."""
        seen = self._board.current.nodes.get(id16_of(id32_of(node)))
        return seen is not None and seen.static is not None

    def moved(self, node: NodeId) -> None:
        """The ways to ``node`` are others now."""
        self._routes.pop(node, None)

    def unreached(self, node: NodeId, cause: Cause) -> None:
        """No address last given out for ``node`` could be connected."""
        known = self._routes.get(node) if self.peer(node) is not None else None
        self._reach.failed(node, cause, known.addresses if known is not None else ())

    def left_out(self, node: NodeId) -> tuple[tuple[PeerAddress, Unfit], ...]:
        """The addresses for requests that ``node`` names and that are not dialled, with the reason."""
        route, seen = self.peer(node), self._board.current.nodes.get(id16_of(id32_of(node)))
        if seen is None or seen.static is None:
            return ()
        known = self._routes.get(node) if route is not None else None
        return self._book.left_out(seen.static.addrs, known.addresses if known is not None else ())

    def _found(self, node: NodeId, member: Member, static: Static, build: int) -> _Known | None:
        found = self._book.choose_ingress(member, static.addrs, self._ways(member.id16))
        if not found:
            return None
        failed = self._reach.failed_at(node)
        ordered = (*[at for at in found if at not in failed], *[at for at in failed if at in found])
        route = PeerRoute(
            node=node,
            addresses=tuple([(str(at.ip), at.port) for at in ordered]),
            context=self._contexts.client,
            build=build,
            pin=member.der,
            reached=partial(self._reach.heard, node),
        )
        return _Known(static=static, member=member, build=build, addresses=ordered, route=route)

    def peer_classify(self, node: NodeId, endpoint: str, status: int, prefix: bytes) -> Enum:
        """The failure class of a peer's engine, by the kind its record names."""
        return classify(self._kind(node, endpoint), status, prefix)

    def liveness(self, node: NodeId) -> Liveness:
        """The mesh's verdict; a node that is not in the view is gone."""
        seen = self._board.current.nodes.get(id16_of(id32_of(node)))
        return seen.liveness if seen is not None else Liveness.GONE

    def picture(self, endpoint: PlacedAt) -> NodeView | None:
        """The newest picture of the node that offers ``endpoint``."""
        node, _, _ = endpoint.partition("/")
        return self._board.current.nodes.get(id16_of(id32_of(NodeId(node))))

    def _kind(self, node: NodeId, endpoint: str) -> EngineKind:
        seen = self._board.current.nodes.get(id16_of(id32_of(node)))
        if seen is not None and seen.static is not None:
            for facts in seen.static.engines:
                if facts.name == endpoint and facts.kind in _KINDS:
                    return EngineKind(facts.kind)
        return EngineKind.OPENAI


@lru_cache(maxsize=1)
def system_trust() -> ssl.SSLContext:
    """Verifies names by the certificate authorities that this system trusts; made at the first use."""
    return ssl.create_default_context()


def _is_same_engine(old: EndpointStatus, new: EndpointStatus) -> bool:
    """True if a target made of ``old`` is one of ``new``: load and age, which change with every request, are not in
    it."""
    return old is new or (
        old.manifest is new.manifest
        and old.owned is new.owned
        and old.credential is new.credential
        and old.slots == new.slots
    )
