"""The HTTP face of the mesh port: who is on the line, what they may do, and nothing else.

Whoever connects is looked up by certificate at every request (a connection outlives a removal by moments); the
table of routes denies by default; no body is ever read here.
"""

from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from agent.identity.routes import Port, RouteVerdict, allowed
from agent.identity.tls import peer_der
from router_core.record.membership import Member

ByDer = Callable[[], Mapping[bytes, Member]]
LinkMade = Callable[[web.BaseRequest, Member], Awaitable[web.StreamResponse]]


class Door:
    """``by_der`` gives the roster's present members by certificate, ``link`` makes a link of an admitted request."""

    def __init__(self, by_der: ByDer, link: LinkMade) -> None:
        self._by_der = by_der
        self._link = link

    def server(self) -> web.Server:
        """The protocol factory for the listener of the mesh port."""
        return web.Server(self.answer, access_log=None)

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Judge one request; only the link path leads anywhere."""
        transport = request.transport
        if transport is None or transport.is_closing():
            return _refusal(RouteVerdict.FORBIDDEN)
        member = self._by_der().get(peer_der(transport) or b"")
        if member is None:
            transport.abort()
            return _refusal(RouteVerdict.FORBIDDEN)
        verdict = allowed(Port.LINK, request.method, request.raw_path, member.roles)
        if verdict is not RouteVerdict.ALLOWED:
            return _refusal(verdict)
        return await self._link(request, member)


def _refusal(answer: RouteVerdict) -> web.Response:
    response = web.Response(status=answer.value)
    response.force_close()
    return response
