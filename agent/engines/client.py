"""HTTP toward one engine, for polling only: bounded, without redirects, and to that engine's address alone.

Every failure becomes :class:`EngineUnreachable` (no usable answer) or :class:`EngineMisspoke` (an answer that
does not mean what it must). Only GET is known here, and the one POST that merely asks, so nothing can be
generated, loaded or changed.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Mapping
from hashlib import blake2b
from ipaddress import ip_address
from types import MappingProxyType
from typing import Any

import aiohttp
import msgspec
from aiohttp.http_exceptions import HttpProcessingError
from msgspec import Struct

from agent.engines.contract import Credential, EngineMisspoke, EngineUnreachable
from agent.engines.listing import INLINE_BYTES, EngineList, read_listing, unpacked
from agent.engines.outside import Outside, is_literal, is_outside
from agent.settings.manifest import Manifest
from router_core import limits

FAST_S = 2.0
SLOW_S = 5.0
SHOW_S = 10.0
CONNECTIONS = 2
KEEP_IDLE_S = 3.0
EVENT_SILENCE_S = 90.0
EVENT_LINE = 128 * limits.KIB
EVENTS_IN_A_ROW = 32
"""After so many events others have their turn, however fast an engine tells them."""
RECEIVE_BYTES = 16 * limits.KIB
"""What the kernel keeps of an answer: what it hands over in one piece is parsed in one piece, and an engine may fill it with
interim answers, each of which costs as much as a whole one."""
PROBE_HEADER = "X-NVPAIR-Engine-Identity-Probe"

BROKEN = (aiohttp.ClientError, HttpProcessingError, TimeoutError, OSError, ValueError)
"""Whatever a connection or an answer can fail with. Their texts may quote what was received: only the class
is kept."""

AddressInfo = tuple[int, int, int, str, tuple[Any, ...]]


class EngineReply(Struct, frozen=True, gc=False, kw_only=True):
    """One whole answer. Header names are in lower case; of duplicates the first is kept."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The decoded body. Raises :class:`EngineMisspoke` ``not_json``."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise EngineMisspoke("not_json", f"status {self.status}", self.status) from None

    def require(self) -> "EngineReply":
        """This reply if it is a 200. Raises :class:`EngineMisspoke` with the reason otherwise."""
        if self.status == 200:
            return self
        if self.status in (401, 403):
            raise EngineMisspoke("auth", f"status {self.status}", self.status)
        if 300 <= self.status < 400:
            raise EngineMisspoke("redirect", f"status {self.status}", self.status)
        if self.status == 503 and b"loading" in self.body[:512].lower():
            raise EngineMisspoke("loading", "", self.status)
        raise EngineMisspoke("status", f"status {self.status}", self.status)


class AddressRefused(OSError):
    """The address a connection was about to be made to is not this engine's."""


class EngineClient:
    """One session to one engine. Use from one event loop; ``aclose`` when done."""

    def __init__(
        self, manifest: Manifest, credential: Credential | None = None, outside: Outside = is_outside
    ) -> None:
        self._manifest = manifest
        self._outside = outside
        self._headers = {"Accept-Encoding": "identity", "User-Agent": "pairmesh"}
        if credential is not None:
            self._headers["Authorization"] = credential.authorization
        self._session: aiohttp.ClientSession | None = None
        self._listings: dict[tuple[str, str], tuple[bytes, EngineList]] = {}

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=CONNECTIONS,
                keepalive_timeout=KEEP_IDLE_S,
                use_dns_cache=False,
                socket_factory=self._guarded_socket,
            )
            self._session = aiohttp.ClientSession(
                str(self._manifest.url),
                connector=connector,
                trust_env=False,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
            )
        return self._session

    async def aclose(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _guarded_socket(self, info: AddressInfo) -> socket.socket:
        family, kind, protocol, _, address = info
        self._guard(address)
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        return made

    def _guard(self, address: tuple[Any, ...]) -> None:
        if not may_connect(self._manifest, str(address[0]), int(address[1]), self._outside):
            raise AddressRefused(f"{address[0]} is not the address of endpoint {self._manifest.name}")

    async def get(
        self, path: str, *, timeout_s: float = FAST_S, cap: int = limits.ENGINE_BODY, probe: bool = False
    ) -> EngineReply:
        """GET ``path``; a body above ``cap`` bytes is refused unread. Any status is an answer here."""
        headers = {PROBE_HEADER: "1"} if probe else {}
        return await self._ask("GET", path, timeout_s, cap, headers, None)

    async def show(self, model: str) -> EngineReply:
        """What Ollama's ``POST /api/show`` tells of ``model``: a question, although it is no GET."""
        headers = {"Content-Type": "application/json"}
        body = msgspec.json.encode({"model": model})
        return await self._ask("POST", "/api/show", SHOW_S, limits.ENGINE_BODY, headers, body)

    async def _ask(
        self, method: str, path: str, timeout_s: float, cap: int, headers: dict[str, str], body: bytes | None
    ) -> EngineReply:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._opened().request(
                method,
                self._manifest.url.path_of(path),
                allow_redirects=False,
                timeout=timeout,
                headers=headers,
                data=body,
            ) as answer:
                told = await _bounded(answer, cap)
                known = _lowered(answer.headers)
                return EngineReply(status=answer.status, headers=known, body=unpacked(told, known, cap))
        except BROKEN as error:
            raise _unreachable(error) from None

    async def get_json(self, path: str, *, timeout_s: float = FAST_S, cap: int = limits.ENGINE_BODY) -> Any:
        """The JSON of a 200 answer to GET ``path``."""
        return (await self.get(path, timeout_s=timeout_s, cap=cap)).require().json()

    async def get_listing(
        self, path: str, key: str, *, timeout_s: float = FAST_S, probe: bool = False
    ) -> EngineList:
        """The list at ``key`` of a 200 answer to GET ``path``; the very object of the last time if nothing changed."""
        reply = await self.get(path, timeout_s=timeout_s, cap=limits.ENGINE_LIST_BODY, probe=probe)
        return await self.listing_of(reply, path, key)

    async def listing_of(self, reply: EngineReply, path: str, key: str) -> EngineList:
        """As ``get_listing``, of an answer to GET ``path`` that is there."""
        body = reply.require().body
        digest = blake2b(body, digest_size=16).digest()
        before = self._listings.get((path, key))
        if before is not None and before[0] == digest:
            return before[1]
        if len(body) <= INLINE_BYTES:
            listing = read_listing(body, key)
        else:
            listing = await asyncio.to_thread(read_listing, body, key)
        self._listings[path, key] = digest, listing
        return listing

    async def touch(self) -> None:
        """Open a bare connection and close it, for engines without any health route."""
        url, loop = self._manifest.url, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(FAST_S):
                host = url.host
                if not is_literal(host):
                    found = await loop.getaddrinfo(host, url.port, type=socket.SOCK_STREAM)
                    host = str(found[0][4][0])
                self._guard((host, url.port))
                _, writer = await asyncio.open_connection(host, url.port)
        except AddressRefused as error:
            raise _unreachable(error) from None
        except TimeoutError as error:
            raise EngineUnreachable("timeout", type(error).__name__) from None
        except OSError as error:
            raise EngineUnreachable("connect", type(error).__name__) from None
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    async def events(self, path: str) -> AsyncGenerator[bytes, None]:
        """The ``data`` of server-sent events, one by one, until the stream ends.

        Raises :class:`EngineUnreachable` ``read`` at the end of the stream or after ``EVENT_SILENCE_S``
        without a byte, :class:`EngineMisspoke` ``too_large`` for a line above ``EVENT_LINE``. The first item is empty and says that the stream is open.
        """
        timeout = aiohttp.ClientTimeout(total=None, connect=FAST_S, sock_read=EVENT_SILENCE_S)
        try:
            async with self._opened().get(path, allow_redirects=False, timeout=timeout) as answer:
                if answer.status != 200 or answer.content_type != "text/event-stream":
                    raise EngineMisspoke("status", f"status {answer.status}", answer.status)
                yield b""
                told, rest = 0, b""
                async for piece in answer.content.iter_any():
                    *lines, rest = (rest + piece).split(b"\n")
                    if len(rest) > EVENT_LINE:
                        raise EngineMisspoke(
                            "too_large", f"a line of more than {EVENT_LINE} bytes", answer.status
                        )
                    for line in lines:
                        if line.startswith(b"data:"):
                            told += 1
                            if not told % EVENTS_IN_A_ROW:
                                await asyncio.sleep(0)
                            yield line[5:].strip()
        except BROKEN as error:
            raise _unreachable(error) from None
        raise EngineUnreachable("read", "event stream ended")


def may_connect(manifest: Manifest, host: str, port: int, outside: Outside = is_outside) -> bool:
    """Whether ``host`` (a literal) and ``port`` are this manifest's engine.

    Loopback, or exactly the manifest's address under ``remote_host``; a ``cloud`` name may resolve to any address
    that is ``outside``.
    """
    try:
        address = ip_address(host)
    except ValueError:
        return False
    if port != manifest.url.port:
        return False
    if str(address) == manifest.url.host or host == manifest.url.host:
        return address.is_loopback or manifest.remote_host
    return manifest.cloud and not is_literal(manifest.url.host) and outside(address)


async def _bounded(answer: aiohttp.ClientResponse, cap: int) -> bytes:
    if answer.content_length is not None and answer.content_length > cap:
        answer.close()
        raise EngineMisspoke("too_large", f"{answer.content_length} bytes, at most {cap}", answer.status)
    body = bytearray()
    async for chunk in answer.content.iter_any():
        body += chunk
        if len(body) > cap:
            answer.close()
            raise EngineMisspoke("too_large", f"more than {cap} bytes", answer.status)
    return bytes(body)


def _lowered(headers: Mapping[str, str]) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for name, value in headers.items():
        found.setdefault(name.lower(), value)
    return MappingProxyType(found)


def _unreachable(error: Exception) -> EngineUnreachable:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, AddressRefused):
            return EngineUnreachable("guard", "address refused")
        cause = cause.__cause__
    if isinstance(error, aiohttp.ClientConnectorError):
        return EngineUnreachable("connect", type(error).__name__)
    if isinstance(error, TimeoutError):
        return EngineUnreachable("timeout", type(error).__name__)
    return EngineUnreachable("read", type(error).__name__)
