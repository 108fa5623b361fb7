"""Knocking at one address of one member: TCP, pinned TLS, WebSocket upgrade, all or nothing.

Rules kept here: literal addresses only, no proxy from the environment, no redirect followed, the certificate must
carry the dialled member's name *and* be the very bytes pinned for it. Each dial has its own connector, so no
connection made for one member is ever used for another, and closing it leaves nothing open.
"""

import asyncio
import errno
import socket
import ssl
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any, Final

import aiohttp

from agent.identity.listener import tune
from agent.identity.routes import Port
from agent.identity.tls import is_pinned, server_name
from agent.mesh.addresses import PeerAddress
from agent.mesh.interfaces import IpAddress
from agent.mesh.link import CLOSE_S, WebSocket
from router_core import limits
from router_core.record.membership import Member

LINK_PATH: Final = "/mesh/v1/link"
SUBPROTOCOL: Final = "pairmesh.v1"


class DialOutcome(Enum):
    """How a dial ended. ``LOST`` is a connection that died before its first byte: unauthorised, or crashed."""

    LINKED = "linked"
    NO_ADDRESS = "no_address"
    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    TIMED_OUT = "timed_out"
    IDENTITY_MISMATCH = "identity_mismatch"
    TLS_FAILED = "tls_failed"
    LOST = "lost"
    REJECTED = "rejected"
    NO_DESCRIPTORS = "no_descriptors"


class _RedirectedAway(Exception):
    """The peer answered with a redirect."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A link socket that is up and pinned; ``session`` must be closed by whoever owns it."""

    socket: WebSocket
    transport: asyncio.Transport
    session: aiohttp.ClientSession
    endpoint: PeerAddress


async def knock(
    member: Member, endpoint: PeerAddress, tls: ssl.SSLContext, source: IpAddress | None
) -> Opened | DialOutcome:
    """Dial ``member`` at ``endpoint``. The caller sets the time limit; cancelling leaves no socket behind."""
    transports: list[asyncio.Transport] = []
    session = _session(source, transports)
    opened = False
    try:
        ws = await session.ws_connect(
            f"wss://{endpoint}{LINK_PATH}",
            protocols=(SUBPROTOCOL,),
            ssl=tls,
            server_hostname=server_name(member.node_id),
            timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_S),
            autoping=False,
            compress=0,
            max_msg_size=limits.WEBSOCKET_MAX,
        )
        transport = transports[-1]
        if transport.is_closing():
            return DialOutcome.LOST
        if not is_pinned(transport, member.der):
            return DialOutcome.IDENTITY_MISMATCH
        if ws.protocol != SUBPROTOCOL:
            return DialOutcome.REJECTED
        opened = True
        return Opened(ws, transport, session, endpoint)
    except (aiohttp.ClientError, OSError, _RedirectedAway) as exc:
        return _outcome(exc)
    finally:
        if not opened:
            await session.close()


def _session(source: IpAddress | None, transports: list[asyncio.Transport]) -> aiohttp.ClientSession:
    """A session for one dial; the transport of the upgraded connection is appended to ``transports``."""

    def new_socket(info: Any) -> socket.socket:
        family, kind, protocol, _, _ = info
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            tune(sock, Port.LINK)
            if source is not None and source.version == (6 if family == socket.AF_INET6 else 4):
                sock.bind((str(source), 0))
        except OSError:
            sock.close()
            raise
        return sock

    async def upgraded(
        _session: aiohttp.ClientSession, _ctx: SimpleNamespace, params: aiohttp.TraceRequestEndParams
    ) -> None:
        connection = params.response.connection
        if connection is not None and connection.transport is not None:
            transports.append(connection.transport)

    async def redirected(
        _session: aiohttp.ClientSession, _ctx: SimpleNamespace, _params: aiohttp.TraceRequestRedirectParams
    ) -> None:
        raise _RedirectedAway

    trace = aiohttp.TraceConfig()
    trace.on_request_end.append(upgraded)
    trace.on_request_redirect.append(redirected)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=1,
            force_close=True,
            use_dns_cache=False,
            happy_eyeballs_delay=None,
            socket_factory=new_socket,
        ),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        skip_auto_headers=("User-Agent",),
        trust_env=False,
        auto_decompress=False,
        trace_configs=[trace],
    )


def _outcome(exc: Exception) -> DialOutcome:
    match exc:
        case aiohttp.ClientConnectorCertificateError():
            return DialOutcome.IDENTITY_MISMATCH
        case aiohttp.ClientConnectorSSLError():
            return DialOutcome.TLS_FAILED
        case aiohttp.ClientConnectorError():
            return _of_errno(exc.os_error)
        case aiohttp.WSServerHandshakeError() | _RedirectedAway():
            return DialOutcome.REJECTED
        case aiohttp.ClientError():
            return DialOutcome.LOST
        case OSError():
            return _of_errno(exc)
        case _:
            return DialOutcome.LOST


def _of_errno(exc: OSError) -> DialOutcome:
    match exc.errno:
        case errno.ECONNREFUSED:
            return DialOutcome.REFUSED
        case errno.EMFILE | errno.ENFILE:
            return DialOutcome.NO_DESCRIPTORS
        case errno.ECONNRESET | errno.EPIPE:
            return DialOutcome.LOST
        case errno.ETIMEDOUT:
            return DialOutcome.TIMED_OUT
        case _:
            return DialOutcome.UNREACHABLE
