"""One link: a WebSocket between two members, and the task that owns it.

Rules kept here: only binary messages of 1..65,535 bytes come in, others close the socket (1003, 1009); a message
is handed on and the next one is read only when the driver is done with it; a peer that does not read makes this
link, and no other, full. Whatever ends the link, the owner leaves nothing open behind it.

A link knows neither HELLO nor records: bytes in, bytes out.
"""

import asyncio
import contextlib
from collections import deque
from ipaddress import ip_address
from typing import Final, Protocol

from aiohttp import ClientWebSocketResponse, WebSocketError, WSCloseCode, WSMessage, WSMsgType
from aiohttp.web import WebSocketResponse

from agent.mesh.addresses import PeerAddress
from agent.mesh.interfaces import IpAddress
from agent.mesh.meter import Meter
from agent.mesh.traffic import Traffic
from router_core import limits
from router_core.ids import Id16
from router_core.mesh.protocol.events import LinkId

CLOSE_S: Final = 0.5
"""How long a closing link may take to flush what it has and hear the other end's close."""
READY_BYTES: Final = 64 * limits.KIB
OUTBOX_BYTES: Final = 512 * limits.KIB
"""More than this waiting for one peer means that somebody disregards readiness: the link is aborted."""
_DRAIN_POLL_S: Final = 0.02

WebSocket = ClientWebSocketResponse | WebSocketResponse


class LinkEars(Protocol):
    """Callbacks for what happens on a link. None of these waits."""

    def heard(self, link: "LinkConnection", data: bytes) -> None:
        """One message came in; nothing more is read until ``link.read_on``."""

    def drained(self, link: "LinkConnection") -> None:
        """The link was full and has room again."""

    def flooded(self, link: "LinkConnection") -> None:
        """Much more came in than messages; the connection is cut."""


class LinkConnection:
    """``number`` names the link for the machine; ``peer`` is the identity TLS proved, ``dialled`` whether by us."""

    def __init__(
        self,
        number: LinkId,
        peer: Id16,
        socket: WebSocket,
        transport: asyncio.Transport,
        *,
        dialled: PeerAddress | None,
        traffic: Traffic,
    ) -> None:
        self.number = number
        self.peer = peer
        self.dialled = dialled
        self._socket = socket
        self._transport = transport
        self._meter: Meter | None = None
        self._traffic = traffic
        self._outbox: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._wake = asyncio.Event()
        self._read_on = asyncio.Event()
        self._paused = False
        self._full = False
        self._close_code: int | None = None

    @property
    def local_ip(self) -> IpAddress | None:
        """The own address that it runs over."""
        return _ip(self._transport.get_extra_info("sockname"))

    @property
    def remote_ip(self) -> IpAddress | None:
        """The peer's address that it runs over, as this host sees it."""
        return _ip(self._transport.get_extra_info("peername"))

    @property
    def waiting_bytes(self) -> int:
        """Bytes written for the peer that have not left this process; a closed transport knows of none."""
        buffered = 0 if self._transport.is_closing() else self._transport.get_write_buffer_size()
        return self._waiting_bytes + buffered

    def send(self, data: bytes) -> bool:
        """Queue one message; never waits. False if that leaves more than 64 KiB waiting and ``drained`` will follow."""
        if self._close_code is not None:
            return True
        self._outbox.append(data)
        self._waiting_bytes += len(data)
        self._wake.set()
        if self._waiting_bytes > OUTBOX_BYTES:
            self._traffic.refused["slow"] += 1
            self.abort()
        became_full = not self._full and self.waiting_bytes > READY_BYTES
        self._full = self._full or became_full
        return not became_full

    def read_on(self) -> None:
        """The last message is done with."""
        if not self._paused:
            self._read_on.set()

    def pause(self) -> None:
        """Read nothing until ``resume``."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._read_on.set()

    def close(self, code: int = WSCloseCode.OK) -> None:
        """Flush what is queued, say ``code`` and end, within half a second whatever the peer does."""
        if self._close_code is None:
            self._close_code = code
            self._wake.set()
            self._read_on.set()
            asyncio.get_running_loop().call_later(CLOSE_S, self.abort)

    def abort(self) -> None:
        """Cut the connection now; the owner notices and ends."""
        with contextlib.suppress(AttributeError):  # asyncio of Python 3.11.2: a TLS transport closed twice
            self._transport.abort()
        self._read_on.set()

    async def run(self, ears: LinkEars) -> None:
        """Own the socket until it is gone."""
        if not self._transport.is_closing():
            self._transport.set_write_buffer_limits(high=READY_BYTES)
            self._measure(ears)
        sender = asyncio.create_task(self._send_all(ears), name=f"link {self.number} sender")
        try:
            await self._receive_all(ears)
            if self._close_code is not None:
                await asyncio.wait([sender], timeout=CLOSE_S)
        finally:
            sender.cancel()
            self.abort()
            await asyncio.gather(sender, return_exceptions=True)
            if self._meter is not None:
                self._meter.close()

    def _measure(self, ears: LinkEars) -> None:
        inner = self._transport.get_protocol()
        assert isinstance(inner, asyncio.Protocol)

        def exceeded() -> None:
            self._traffic.refused["flood"] += 1
            ears.flooded(self)
            self.abort()

        self._meter = Meter(inner, exceeded)
        self._transport.set_protocol(self._meter)

    async def _receive_all(self, ears: LinkEars) -> None:
        while True:
            message = await self._socket.receive()
            if message.type is not WSMsgType.BINARY or not message.data:
                self._refuse(message)
                return
            data: bytes = message.data
            if self._meter is not None:
                self._meter.taken(len(data))
            if self._close_code is not None:
                continue
            self._traffic.received(len(data))
            self._read_on.clear()
            ears.heard(self, data)
            await self._read_on.wait()

    def _refuse(self, message: WSMessage) -> None:
        """Count and answer what is no link message; a bad frame was answered when it was parsed."""
        if message.type in (WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED):
            return
        if message.type is not WSMsgType.ERROR:
            self._traffic.refused["not_binary"] += 1
            self.close(WSCloseCode.UNSUPPORTED_DATA)
        elif isinstance(message.data, WebSocketError):
            too_big = message.data.code == WSCloseCode.MESSAGE_TOO_BIG
            self._traffic.refused["too_big" if too_big else "bad_frame"] += 1

    async def _send_all(self, ears: LinkEars) -> None:
        with contextlib.suppress(ConnectionError):
            while self._close_code is None:
                self._wake.clear()
                await self._flush()
                if self._full and self.waiting_bytes <= READY_BYTES:
                    self._full = False
                    ears.drained(self)
                elif self._full:
                    await asyncio.sleep(_DRAIN_POLL_S)
                    continue
                await self._wake.wait()
            await self._flush()
            await self._socket.close(code=self._close_code)
        self.abort()

    async def _flush(self) -> None:
        while self._outbox:
            data = self._outbox.popleft()
            await self._socket.send_bytes(data)
            self._waiting_bytes -= len(data)
            self._traffic.sent(len(data))


def _ip(name: object) -> IpAddress | None:
    """The address of a socket's name; without the scope that a link-local one has."""
    return ip_address(str(name[0]).partition("%")[0]) if isinstance(name, tuple) and name else None
