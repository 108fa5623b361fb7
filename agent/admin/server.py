"""The two listeners of the admin API: loopback TCP, which reads and asks, and ``admin.sock``, which also acts.

Order on TCP: target, Host, Origin, then route. Order on the socket: who is it, target, then route. A verb
does not exist on TCP. Every answer carries the headers of ``guard.HEADERS``, errors of the HTTP parser
included. Each listener holds ``limits.ADMIN_CONNECTIONS`` connections; more are closed at once.
"""

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from agent.admin.guard import HEADERS, RequestHead, RequestRefusal, hosts_for, judge, judge_target
from agent.admin.peercred import ReadPeer, SocketAdmission, peer_of
from agent.admin.routes import JSON, AdminReply, Routes, refused, verb_of
from agent.store.folders import SOCKET_PATH_MOST, RefuseToStart
from router_core import limits

Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

BACKLOG: Final = 128
STOP_S: Final = 1.0
PREFLIGHT_AGE_S: Final = 600


class AdminServer:
    """Both listeners over one set of routes. ``read_peer`` and ``admission`` are the socket's doorkeeper."""

    def __init__(
        self,
        routes: Routes,
        *,
        hosts: Sequence[str] = (),
        origins: Sequence[str] = (),
        admission: SocketAdmission | None = None,
        read_peer: ReadPeer = peer_of,
    ) -> None:
        self._routes = routes
        self._extra_hosts = hosts
        self._origins = frozenset(origins)
        self._hosts: frozenset[str] = frozenset()
        self._admission = admission or SocketAdmission.here()
        self._read_peer = read_peer
        self._open: list[tuple[asyncio.Server, web.Server]] = []
        self._socket: tuple[Path, int] | None = None

    @property
    def connections(self) -> int:
        """How many are open now, over both listeners."""
        return sum(len(server.connections) for _, server in self._open)

    async def listen_tcp(self, host: str, port: int) -> int:
        """Listen on a literal loopback address; the port bound. Raises OSError if it is taken."""
        if self._hosts:
            raise RuntimeError("already listening on TCP")
        server = _Server(self._answer_tcp)
        listener = await asyncio.get_running_loop().create_server(server, host, port, backlog=BACKLOG)
        bound = int(listener.sockets[0].getsockname()[1])
        self._hosts = hosts_for(host, bound, self._extra_hosts)
        self._open.append((listener, server))
        return bound

    async def listen_socket(self, path: Path) -> None:
        """Listen on a unix socket, 0660 for the group ``pairmesh`` if it is that group's, else 0600.

        Raises ``RefuseToStart``: ``socket_path_too_long``, ``socket_in_use`` (another daemon answers there),
        ``socket_blocked`` (something that is no socket is in the way), ``socket_not_made``. A full disk raises ``OSError``:
        it may not be full at the next start.
        """
        try:
            sock, inode = _bound(path, self._admission.group)
        except OSError as fault:
            if fault.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise RefuseToStart(
                "socket_not_made",
                f"{path} cannot be made ({fault.strerror}): let this user write {path.parent}, or set RUNTIME_DIRECTORY",
            ) from None
        server = _Server(self._answer_socket)
        listener = await asyncio.get_running_loop().create_unix_server(server, sock=sock, backlog=BACKLOG)
        self._socket = path, inode
        self._open.append((listener, server))

    async def aclose(self) -> None:
        """Stop listening, let answers under way end for a second, remove the socket if it is still ours."""
        for listener, _ in self._open:
            listener.close()
        for listener, server in self._open:
            await server.shutdown(STOP_S)
            await listener.wait_closed()
        self._open.clear()
        if self._socket is not None:
            _remove(*self._socket)
            self._socket = None

    async def _answer_tcp(self, request: web.BaseRequest) -> web.StreamResponse:
        headers = request.headers
        origins = headers.getall("Origin", [])
        asked = RequestHead(
            target=_target(request),
            hosts=headers.getall("Host", []),
            origins=origins,
            fetch_sites=headers.getall("Sec-Fetch-Site", []),
        )
        if (refusal := judge(asked, self._hosts, self._origins)) is not None:
            return _response(refused(refusal))
        cors = {"Access-Control-Allow-Origin": origins[0], "Vary": "Origin"} if origins else {}
        path, _, query = asked.target.partition("?")
        methods = self._routes.methods(path)
        if request.method == "OPTIONS" and origins and methods:
            return _response(AdminReply(status=204, body=b"", headers=_preflight(methods[0])), cors)
        return _response(await self._answer(request, methods, path, query), cors)

    async def _answer_socket(self, request: web.BaseRequest) -> web.StreamResponse:
        peer = self._read_peer(request.get_extra_info("socket"))
        if peer is None or not self._admission.admits(peer):
            return _response(refused(RequestRefusal.PEER))
        target = _target(request)
        if (refusal := judge_target(target)) is not None:
            return _response(refused(refusal))
        path, _, query = target.partition("?")
        if (verb := verb_of(path)) is not None:
            if request.method != "POST":
                return _response(refused(RequestRefusal.METHOD, Allow="POST"))
            body = await _json_body(request)
            if isinstance(body, RequestRefusal):
                return _response(refused(body))
            return _response(await self._routes.do(verb, body, peer.uid))
        return _response(await self._answer(request, self._routes.methods(path), path, query))

    async def _answer(
        self, request: web.BaseRequest, methods: tuple[str, ...], path: str, query: str
    ) -> AdminReply:
        if not methods:
            return refused(RequestRefusal.UNKNOWN)
        if request.method not in methods:
            return refused(RequestRefusal.METHOD, Allow=", ".join(methods))
        if request.method != "POST":
            return await self._routes.get(path, query)
        body = await _json_body(request)
        return refused(body) if isinstance(body, RequestRefusal) else await self._routes.post(path, body)


class _Server(web.Server):
    """aiohttp's low-level server with our own answers to what its parser refuses, and no access log."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer, access_log=None, keepalive_timeout=limits.KEEP_ALIVE_IDLE / 1_000)

    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(RequestHandler):
    __slots__ = ()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        manager = self._manager
        if manager is not None and len(manager.connections) > limits.ADMIN_CONNECTIONS:
            self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status >= 500:
            self.logger.error("admin answer failed", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("answer already begun")
        code = b'{"error":"malformed"}' if status < 500 else b'{"error":"internal"}'
        response = _response(AdminReply(status=status, body=code))
        response.force_close()
        return response


def _preflight(method: str) -> dict[str, str]:
    asked = {"Access-Control-Allow-Headers": "Content-Type"} if method == "POST" else {}
    return {
        "Access-Control-Allow-Methods": method,
        "Access-Control-Max-Age": str(PREFLIGHT_AGE_S),
        **asked,
    }


def _target(request: web.BaseRequest) -> str:
    return request.raw_path


async def _json_body(request: web.BaseRequest) -> bytes | RequestRefusal:
    if request.headers.get("Content-Encoding") or request.content_type != JSON:
        return RequestRefusal.MEDIA
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > limits.ADMIN_BODY:
            return RequestRefusal.TOO_LARGE
    return bytes(body)


def _response(reply: AdminReply, extra: dict[str, str] | None = None) -> web.Response:
    headers = {**HEADERS, "Server": "pairmesh", **reply.headers, **(extra or {})}
    if reply.body:
        headers["Content-Type"] = reply.content_type
    return web.Response(status=reply.status, body=reply.body, headers=headers)


def _bound(path: Path, group: int | None) -> tuple[socket.socket, int]:
    """A unix socket bound at ``path``, and its inode; its mode is right before it listens."""
    if len(os.fsencode(path)) > SOCKET_PATH_MOST:
        raise RefuseToStart("socket_path_too_long", f"{path} is longer than {SOCKET_PATH_MOST} bytes")
    _clear(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(str(path))
        path.chmod(0o660 if group is not None and _is_of(path, group) else 0o600)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock, path.stat().st_ino


def _is_of(path: Path, group: int) -> bool:
    """Whether ``path`` belongs to ``group``, or does now. A process of that group has made it so by binding, as a setgid
    folder has; the call that does it otherwise is one that a service's sandbox denies."""
    if path.stat().st_gid == group:
        return True
    if group not in os.getgroups():
        return False
    try:
        os.chown(path, -1, group)
    except PermissionError:
        return False
    return True


def _remove(path: Path, inode: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_ino == inode:
            path.unlink()


def _clear(path: Path) -> None:
    """Remove what a dead daemon left at ``path``."""
    if not os.path.lexists(path):
        return
    if not path.is_socket() or path.is_symlink():
        raise RefuseToStart("socket_blocked", f"{path} is not a socket: remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink()
            return
        except OSError:
            pass  # too busy to answer is not dead
    raise RefuseToStart(
        "socket_in_use",
        f"another daemon answers on {path}: stop it, or give this one a runtime folder of its own (RUNTIME_DIRECTORY)",
    )
