"""The HTTP face of the mesh port: who is on the line, what they may do, and nothing else.

Whoever connects is looked up by certificate at every request (a connection outlives a removal by moments); the
table of routes denies by default; no body is ever read here.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from agent.identity.routes import NOT_FOUND, Port, allowed
from agent.identity.tls import peer_der
from agent.mesh.dialling import LINK_PATH
from router_core.record.membership import Member

MemberByDer = Callable[[bytes], Member | None]
Link = Callable[[web.BaseRequest, Member], Awaitable[web.StreamResponse]]
Document = Callable[[], Awaitable[web.StreamResponse]]


class Door:
    """``link`` makes links; ``documents`` answers the other routes of this port, by path."""

    def __init__(
        self, by_der: MemberByDer, link: Link, documents: Mapping[str, Document] | None = None
    ) -> None:
        self._by_der = by_der
        self._link = link
        self._documents = dict(documents or {})

    def server(self) -> web.Server:
        """The protocol factory for the accept task of the mesh port."""
        return web.Server(self.answer, access_log=None)

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        member = self._member(request.transport)
        if member is None:
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=403)
        refusal = allowed(Port.LINK, request.method, request.raw_path, member.roles)
        if refusal is not None:
            return _refusal(refusal)
        if request.raw_path == LINK_PATH:
            return await self._link(request, member)
        document = self._documents.get(request.raw_path)
        return _refusal(NOT_FOUND) if document is None else await document()

    def _member(self, transport: asyncio.BaseTransport | None) -> Member | None:
        der = peer_der(transport)
        return None if der is None else self._by_der(der)


def _refusal(status: int) -> web.Response:
    response = web.Response(status=status)
    response.force_close()
    return response
