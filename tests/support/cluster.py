"""A whole cluster on one host: real daemons, real llama.cpp engines, real TLS, each node on its own loopback address.

Used by the demo and by the end-to-end tests. Every process is a child of this one and is ended by pid; every
folder lies below one base folder. A node is ready when its own notify message says so, never after a sleep.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.llama import LlamaServer
from tests.support.ports import HeldPort

READY_S = 20.0
STOP_S = 15.0
SHARED_HOST_SIGNALS = ("cpu.some", "cpu.ext", "io.some", "memory.some", "memory.full")
"""Pressure signals that nodes on one host must turn off: each would see the others' engines as external load."""


@dataclass(kw_only=True)
class Node:
    """One daemon: its folders, its addresses, its process."""

    name: str
    ip: str
    base: Path
    ports: dict[str, int] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None
    node_id: str = ""
    prefix: tuple[str, ...] = ()
    """Words before the daemon's own command line."""
    flags: tuple[str, ...] = ()
    """Flags after ``run``."""
    entry: tuple[str, ...] = ("-m", "agent", "run")
    """What Python runs; another build of the daemon takes flags of its own."""
    more_env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for folder in (self.state, self.runtime, self.config, self.config / "endpoints"):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.chmod(0o700)
        if not self.ports:
            self._held = {what: HeldPort(self.ip) for what in ("api", "mesh", "ingress", "admin")}
            self.ports = {what: held.port for what, held in self._held.items()}

    @property
    def state(self) -> Path:
        return self.base / "state"

    @property
    def runtime(self) -> Path:
        return self.base / "run"

    @property
    def config(self) -> Path:
        return self.base / "config"

    @property
    def log(self) -> Path:
        return self.base / "daemon.log"

    @property
    def api(self) -> str:
        return f"http://{self.ip}:{self.ports['api']}"

    @property
    def admin(self) -> str:
        return f"http://{self.ip}:{self.ports['admin']}"

    @property
    def env(self) -> dict[str, str]:
        kept = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
        return kept | {
            "STATE_DIRECTORY": str(self.state),
            "RUNTIME_DIRECTORY": str(self.runtime),
            "CONFIGURATION_DIRECTORY": str(self.config),
        }

    def write_settings(self, peers: Sequence[str], extra: str = "") -> None:
        """Write pairmesh.toml: loopback addresses, static peers, short back-offs, signals of a shared host off."""
        listen = {what: f"{self.ip}:{port}" for what, port in self.ports.items()}
        off = "\n".join(f'"{name}" = "off"' for name in SHARED_HOST_SIGNALS)
        (self.config / "pairmesh.toml").write_text(
            f'name = "{self.name}"\n'
            f'[api]\nlisten = "{listen["api"]}"\n'
            f'[mesh]\nlisten = "{listen["mesh"]}"\nallow_networks = ["127.0.0.0/8"]\n'
            f"peers = {json.dumps(list(peers))}\nbackoff_max_s = 3\ngone_min_s = 20\ngone_redial_s = 5\n"
            f'[ingress]\nlisten = "{listen["ingress"]}"\n'
            f'[admin]\nlisten = "{listen["admin"]}"\n'
            f"[engines]\nautodetect = false\n"
            f'[sampling]\nnvml = "off"\n[sampling.pressure]\n{off}\n{extra}'
        )

    def write_endpoint(
        self, engine: LlamaServer, name: str = "llama", *, jit_load: bool = True, extra: str = ""
    ) -> None:
        (self.config / "endpoints" / f"{name}.toml").write_text(
            f'engine = "llamacpp"\nurl = "{engine.url}"\njit_load = {str(jit_load).lower()}\n{extra}'
        )

    async def start(self) -> None:
        """Start the daemon and wait for its READY=1; raises RuntimeError with the end of its log if it ends first."""
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as notify:
            path = self.base / "notify"
            path.unlink(missing_ok=True)
            notify.bind(str(path))
            notify.setblocking(False)
            with self.log.open("ab") as log:
                self.process = await asyncio.create_subprocess_exec(
                    *self.prefix,
                    sys.executable,
                    *self.entry,
                    *self.flags,
                    env=self.env | self.more_env | {"NOTIFY_SOCKET": str(path)},
                    stdout=log,
                    stderr=log,
                )
            ended = asyncio.ensure_future(self.process.wait())
            ready = asyncio.ensure_future(self._ready(notify))
            done, _ = await asyncio.wait({ended, ready}, timeout=READY_S, return_when=asyncio.FIRST_COMPLETED)
            for task in (ended, ready):
                task.cancel()
            # Else the loop would let go of the socket's number when it is another socket's already.
            await asyncio.gather(ended, ready, return_exceptions=True)
            if ready not in done:
                raise RuntimeError(f"{self.name} did not become ready; its log ends with:\n{self.log_tail()}")

    @staticmethod
    async def _ready(notify: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while b"READY=1" not in (await loop.sock_recv(notify, 4096)).split(b"\n"):
            pass

    def log_tail(self, lines: int = 20) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    async def kill(self) -> None:
        """SIGKILL, then reap."""
        await self._end(signal.SIGKILL)

    async def term(self) -> int:
        """SIGTERM; the exit status. SIGKILL and RuntimeError after 15 s."""
        return await self._end(signal.SIGTERM)

    async def _end(self, sign: signal.Signals) -> int:
        process = self.process
        if process is None or process.returncode is not None:
            return 0 if process is None else int(process.returncode or 0)
        process.send_signal(sign)
        try:
            return await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()
            raise RuntimeError(f"{self.name} did not stop within {STOP_S} s:\n{self.log_tail()}") from None

    async def get(self, path: str) -> Any:
        """A JSON document of the admin API, through the socket."""
        return await self._admin("GET", path, None)

    async def members(self) -> dict[str, Any]:
        """What this node believes about every member, by name."""
        return {member["name"]: member for member in (await self.get("/v1/status"))["members"]}

    async def do(self, verb: str, **arguments: Any) -> Any:
        """Run a state-changing verb through the socket."""
        return await self._admin("POST", f"/v1/do/{verb}", arguments)

    async def _admin(self, method: str, path: str, body: Any) -> Any:
        connector = aiohttp.UnixConnector(str(self.runtime / "admin.sock"))
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.request(method, f"http://localhost{path}", json=body) as reply,
        ):
            answer = await reply.json(content_type=None)
            if reply.status != 200:
                raise RuntimeError(f"{self.name}: {method} {path}: {reply.status} {answer}")
            return answer

    async def cli(self, *words: str) -> tuple[int, str, str]:
        """Run ``pairmesh WORDS`` against this node's daemon; (exit status, stdout, stderr)."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "agent",
            *words,
            env=self.env,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        return int(process.returncode or 0), out.decode(), err.decode()


async def pair(nodes: Sequence[Node]) -> None:
    """Pair running nodes by file, every pair in both directions."""
    exported: dict[str, Any] = {}
    for node in nodes:
        status, out, err = await node.cli("trust", "export")
        if status:
            raise RuntimeError(f"{node.name}: trust export: {err}")
        file = node.base / f"{node.name}.trust"
        file.write_text(out)
        exported[node.name] = file
        node.node_id = (await node.get("/v1/status"))["own"]["id"]
    for node in nodes:
        for other in nodes:
            if other is not node:
                status, _, err = await node.cli(
                    "trust", "add", str(exported[other.name]), "--id", other.node_id
                )
                if status:
                    raise RuntimeError(f"{node.name}: trust add {other.name}: {err}")


async def wait_for(check: Callable[[], Any], within_s: float, what: str, every_s: float = 0.02) -> Any:
    """Await ``check()`` (a coroutine function) until it returns something truthy; RuntimeError after ``within_s``."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while not (value := await check()):
        if loop.time() > deadline:
            raise RuntimeError(f"not within {within_s} s: {what}")
        await asyncio.sleep(every_s)
    return value


@dataclass(kw_only=True)
class Cluster:
    """Daemons and the engines beside them."""

    base: Path
    nodes: list[Node]
    engines: list[LlamaServer]

    def __getitem__(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    async def aclose(self) -> None:
        for node in self.nodes:
            with contextlib.suppress(RuntimeError, ProcessLookupError):
                await node.term()
        for engine in self.engines:
            engine.stop()

    async def full_view(self, within_s: float = 15.0) -> None:
        """Wait until every node routes to every other and sees its engine's models."""
        for node in self.nodes:
            await wait_for(
                partial(self._sees_all, node), within_s, f"{node.name} sees {len(self.nodes)} nodes"
            )

    async def _sees_all(self, node: Node) -> bool:
        members = await node.members()
        ready = [
            seen
            for seen in members.values()
            if seen["routable"] and any(e["models"] for e in seen["engines"])
        ]
        return len(ready) == len(self.nodes)


@contextlib.asynccontextmanager
async def closing(cluster: Cluster) -> AsyncIterator[Cluster]:
    try:
        yield cluster
    finally:
        await cluster.aclose()
