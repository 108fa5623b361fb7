"""An HTTP server that answers with what it was given, and remembers every call."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

FRAMING = {"content-length", "transfer-encoding", "connection", "keep-alive", "date"}


@dataclass(frozen=True, slots=True)
class Sample:
    """A recorded answer, or a made-up one."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


def read_sample(path: Path) -> Sample:
    """The answer in a recorded exchange."""
    raw = path.read_bytes()
    while raw.startswith(b">"):
        raw = raw.partition(b"\n")[2]
    head, _, body = raw.partition(b"\n\n")
    status, *lines = head.decode().splitlines()
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        if name.lower() not in FRAMING:
            headers[name] = value.strip()
    return Sample(int(status.split()[1]), headers, body)


Answer = Sample | Callable[[web.Request], Awaitable[web.StreamResponse]]


class ReplayServer:
    """Answers by path and query, then by path, else 404. ``routes`` may be changed while it runs."""

    def __init__(self, routes: Mapping[str, Answer], *, server: str | None = None) -> None:
        self.routes: dict[str, Answer] = dict(routes)
        self.calls: list[tuple[str, str]] = []
        self.port = 0
        self._server = server

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.calls.append((request.method, request.path_qs))
        answer = self.routes.get(request.path_qs) or self.routes.get(request.path) or Sample(404)
        if not isinstance(answer, Sample):
            return await answer(request)
        headers = dict(answer.headers)
        if self._server is not None:
            headers["Server"] = self._server
        return web.Response(status=answer.status, headers=headers, body=answer.body)

    @contextlib.asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator["ReplayServer"]:
        """Listen on loopback for the length of the block."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handle_signals=False)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", port)
            await site.start()
            self.port = runner.addresses[0][1]
            yield self
        finally:
            await runner.cleanup()
