"""All links of this node: those others opened, those we dialled, and the table of what is up.

Rules kept here: at most four dials are under way; each socket has one owning task, and however that ends, the
driver is told. How many may come in is the listener's business; what is said on a link is not known here.
"""

import asyncio
import itertools
import ssl
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Final, Protocol

from aiohttp import web

from agent.effects.tasks import Tasks
from agent.mesh.addresses import PeerAddress
from agent.mesh.dialling import SUBPROTOCOL, DialOutcome, Opened, knock
from agent.mesh.interfaces import IpAddress
from agent.mesh.link import CLOSE_S, LinkConnection, LinkEars
from agent.mesh.traffic import Traffic
from router_core import limits
from router_core.ids import Id16
from router_core.mesh.protocol.events import LinkId
from router_core.record.membership import Member

DIALS: Final = 4
DIAL_S: Final = limits.TLS_HANDSHAKE / 1_000
"""All addresses of one dial share this time: one that stays silent costs its own share only."""


class Ears(LinkEars, Protocol):
    """Whom links tell what happens; the driver. None of these waits."""

    def opened(self, link: LinkConnection) -> None: ...

    def closed(self, link: LinkConnection) -> None: ...

    def dialled(self, peer: Id16, endpoint: PeerAddress, outcome: DialOutcome) -> None:
        """One address of a dial gave ``outcome``."""

    def dial_failed(self, peer: Id16, outcome: DialOutcome) -> None:
        """All addresses failed; ``outcome`` is that of the first, the best."""


class Links:
    """``source`` is the address to dial from, None for any; ``tls`` gives the client context as of now."""

    def __init__(
        self,
        ears: Ears,
        *,
        tls: Callable[[], ssl.SSLContext],
        source: IpAddress | None,
        traffic: Traffic,
        tasks: Tasks,
        dial_s: float = DIAL_S,
    ) -> None:
        self._dial_s = dial_s
        self._ears = ears
        self._tls = tls
        self._source = source
        self._traffic = traffic
        self._tasks = tasks
        self._numbers = itertools.count(1)
        self._live: dict[LinkId, LinkConnection] = {}
        self._slots = asyncio.Semaphore(DIALS)
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[LinkConnection]:
        return iter(list(self._live.values()))

    def get(self, number: LinkId) -> LinkConnection | None:
        """The live link of that number, or None if it is gone."""
        return self._live.get(number)

    async def serve(self, request: web.BaseRequest, peer: Id16) -> web.StreamResponse:
        """Turn an admitted request for the link path into a link, and own it to its end."""
        ws = web.WebSocketResponse(
            timeout=CLOSE_S,
            protocols=(SUBPROTOCOL,),
            autoping=False,
            compress=False,
            max_msg_size=limits.WEBSOCKET_MAX,
        )
        if request.headers.get("Sec-WebSocket-Protocol") != SUBPROTOCOL or not ws.can_prepare(request):
            return web.Response(status=400)
        await ws.prepare(request)
        transport = request.transport
        if transport is not None:
            self._traffic.accepted += 1
            await self._own(
                LinkConnection(self._number(), peer, ws, transport, dialled=None, traffic=self._traffic)
            )
        return ws

    def dial(self, member: Member, endpoints: Sequence[PeerAddress]) -> None:
        """Start dialling; ends in ``opened`` or ``dial_failed`` after at most five seconds."""
        self._tasks.spawn(self._dial(member, endpoints), f"dial {member.node_id[:8]}")

    def local_ips(self) -> frozenset[IpAddress]:
        """The own addresses that links run over."""
        return frozenset(ip for link in self if (ip := link.local_ip) is not None)

    def to(self, peer: Id16) -> Iterator[LinkConnection]:
        """The live links to one member."""
        return (link for link in self if link.peer == peer)

    def forsake(self, own: Container[IpAddress]) -> None:
        """Cut every link over an address that this host has no more: nothing comes through it again."""
        for link in self:
            if (ip := link.local_ip) is not None and not ip.is_loopback and ip not in own:
                link.abort()

    async def gone(self) -> None:
        """Wait until no link is left."""
        await self._empty.wait()

    def abort(self) -> None:
        """Cut every link."""
        for link in self:
            link.abort()

    async def _dial(self, member: Member, endpoints: Sequence[PeerAddress]) -> None:
        peer = member.id16
        reached: Opened | DialOutcome = DialOutcome.LOST
        try:
            async with self._slots:
                reached = await self._first_reached(member, endpoints)
        finally:
            if not isinstance(reached, Opened):
                self._ears.dial_failed(peer, reached)
        if not isinstance(reached, Opened):
            return
        try:
            number = self._number()
            await self._own(
                LinkConnection(
                    number,
                    peer,
                    reached.socket,
                    reached.transport,
                    dialled=reached.endpoint,
                    traffic=self._traffic,
                )
            )
        finally:
            await reached.session.close()

    async def _first_reached(self, member: Member, endpoints: Sequence[PeerAddress]) -> Opened | DialOutcome:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._dial_s
        first: DialOutcome | None = None
        for tried, endpoint in enumerate(endpoints):
            share_s = (deadline - loop.time()) / (len(endpoints) - tried)
            reached: Opened | DialOutcome
            try:
                async with asyncio.timeout(share_s):
                    reached = await knock(member, endpoint, self._tls(), self._source)
            except TimeoutError:
                reached = DialOutcome.TIMED_OUT
            outcome = DialOutcome.LINKED if isinstance(reached, Opened) else reached
            self._traffic.dials[outcome.value] += 1
            self._ears.dialled(member.id16, endpoint, outcome)
            if isinstance(reached, Opened):
                return reached
            first = first or reached
        return first or DialOutcome.NO_ADDRESS

    def _number(self) -> LinkId:
        return LinkId(next(self._numbers))

    async def _own(self, link: LinkConnection) -> None:
        self._live[link.number] = link
        self._empty.clear()
        self._ears.opened(link)
        try:
            await link.run(self._ears)
        finally:
            del self._live[link.number]
            if not self._live:
                self._empty.set()
            self._ears.closed(link)
