"""An admin server on real sockets in a temporary folder, and ways to ask it."""

import asyncio
from pathlib import Path
from random import Random
from typing import Any

from aiohttp import ClientSession, TCPConnector, UnixConnector

from agent.admin.documents import StatusDoc
from agent.admin.ports import VerbRefused, Verbs
from agent.admin.routes import Routes
from agent.admin.server import AdminServer
from agent.effects.clock import SystemClock
from agent.node.status.dry_run import DryRuns
from agent.observe.journal import Journal
from agent.observe.log import Log
from agent.observe.metrics import Counter, Registry
from tests.agent.admin.documents import status
from tests.agent.node.rig import World, an_endpoint

CANARY = "CANARY7x1m2k9qp4z8w6r3t5y0abcd"


class Daemon:
    """An admin server with a real journal, registry and two nodes to place on, and verbs that remember what they were
    told."""

    def __init__(self, folder: Path, *, verbs: Verbs | None = None, **options: Any) -> None:
        self.lines: list[str] = []
        self.log = Log(self.lines.append, SystemClock())
        self.journal = Journal(folder / "journal.sqlite", SystemClock(), self.log)
        self.registry = Registry(lambda _: None)
        self.registry.add(self.journal, Counter("pairmesh_x_total", "X."))
        self.told: list[dict[str, Any]] = []
        self.path = folder / "admin.sock"
        self.port = 0
        self.document = status()
        self.world = World()
        self.world.own(an_endpoint())
        self.world.peer("beta", an_endpoint())
        self.dry_runs = DryRuns(self.world.placing, Random(3))
        self.routes = Routes(
            status=self,
            decisions=self.journal,
            dry_runs=self.dry_runs,
            exposition=self.registry,
            verbs=verbs or {"trust-list": self.listed, "trust-add": self.refuse, "trust-remove": self.crash},
            log=self.log,
        )
        self.server = AdminServer(self.routes, **options)

    def status(self) -> StatusDoc:
        return self.document

    def view(self) -> dict[str, Any]:
        return {"gen": 1, "nodes": []}

    async def listed(self, arguments: dict[str, Any]) -> dict[str, Any]:
        self.told.append(arguments)
        return {"members": []}

    async def refuse(self, _: dict[str, Any]) -> dict[str, Any]:
        raise VerbRefused("mesh_mismatch", "two paired meshes")

    async def crash(self, _: dict[str, Any]) -> dict[str, Any]:
        raise RuntimeError(CANARY)

    async def __aenter__(self) -> "Daemon":
        self.journal.start()
        self.port = await self.server.listen_tcp("127.0.0.1", 0)
        await self.server.listen_socket(self.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.aclose()
        await self.journal.aclose()

    async def tcp(
        self, path: str, method: str = "GET", body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        return await self._ask(TCPConnector(), f"http://127.0.0.1:{self.port}{path}", method, body, headers)

    async def sock(
        self, path: str, method: str = "GET", body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        connector = UnixConnector(str(self.path))
        headers.setdefault("Content_Type", "application/json")
        return await self._ask(connector, f"http://localhost{path}", method, body, headers)

    async def raw(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request)
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        return answer

    @staticmethod
    async def _ask(
        connector: TCPConnector | UnixConnector,
        url: str,
        method: str,
        body: bytes | None,
        headers: dict[str, str],
    ) -> tuple[int, dict[str, str], bytes]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with (
            ClientSession(connector=connector) as session,
            session.request(method, url, data=body, headers=named) as reply,
        ):
            return reply.status, dict(reply.headers), await reply.read()
