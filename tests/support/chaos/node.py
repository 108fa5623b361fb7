"""One daemon in its own namespace: started, paused, killed, its disk filled, its picture read."""

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.chaos import namespaces
from tests.support.chaos.engine import Engine
from tests.support.chaos.lan import Lan
from tests.support.chaos.load import Load, Plan
from tests.support.cluster import SHARED_HOST_SIGNALS, Node

PORTS = {"api": 11433, "mesh": 7433, "ingress": 7434, "admin": 7435}


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a process holds."""

    fds: int
    threads: int
    children: int
    rss_mib: float


@dataclass(kw_only=True)
class NodeProc(Node):
    """A node on a ``Lan``. Its state folder is a file system of its own, its trace outlives it."""

    lan: Lan
    engine: Engine | None = None
    mounted: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        self.ports = dict(PORTS)
        super().__post_init__()
        self.prefix = namespaces.entering(self.ns)
        self.flags = ("--trace", str(self.trace))

    @classmethod
    def on(cls, lan: Lan, name: str, base: Path, **more: Any) -> "NodeProc":
        """Node ``name`` on the host of that name."""
        return cls(name=name, ip=lan.ip(name), base=base / name, lan=lan, **more)

    @property
    def ns(self) -> str:
        return self.lan.hosts[self.name]

    @property
    def trace(self) -> Path:
        return self.base / "trace.jsonl"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def mount(self, *, size: str = "16m") -> None:
        """Give the state folder its own small disk."""
        namespaces.mount_tmpfs(self.state, f"{self.lan.name}-{self.name}", size=size)
        self.mounted = True

    def write_chaos_settings(self, peers: tuple[str, ...] = (), more: str = "") -> None:
        """As shipped, except signals of a shared host and the times that tests may shorten; ``more`` lines for the
        mesh."""
        off = "\n".join(f'"{name}" = "off"' for name in SHARED_HOST_SIGNALS)
        listed = ", ".join(f'"{peer}"' for peer in peers)
        (self.config / "pairmesh.toml").write_text(
            f'name = "{self.name}"\n[mesh]\npeers = [{listed}]\nbackoff_max_s = 3\ngone_min_s = 20\n'
            f"gone_redial_s = 5\n{more}\n"
            f'[engines]\nautodetect = false\n[sampling]\nnvml = "off"\n[sampling.pressure]\n{off}\n'
        )

    async def give_engine(self, *, slots: int = 8, first_byte_ms: int = 0, max_queue: int = 64) -> Engine:
        """Start a fake engine beside the node and declare it."""
        self.engine = Engine(folder=self.base / "engine", prefix=self.prefix, slots=slots)
        await self.engine.start()
        self.declare(
            "fake", "openai", self.engine.url, slots=slots, first_byte_ms=first_byte_ms, max_queue=max_queue
        )
        return self.engine

    def declare(
        self, name: str, kind: str, url: str, *, slots: int = 2, first_byte_ms: int = 0, max_queue: int = 64
    ) -> None:
        """Write an endpoint's manifest."""
        (self.config / "endpoints" / f"{name}.toml").write_text(
            f'engine = "{kind}"\nurl = "{url}"\nslots = {slots}\nmax_queue = {max_queue}\n'
            f"first_byte_ms = {first_byte_ms}\n"
        )

    def load(self, out: Path, **plan: Any) -> Load:
        """A load on this node's API, not yet started."""
        return Load(plan=Plan(out=str(out), **plan), prefix=self.prefix)

    def pause(self) -> None:
        """SIGSTOP: alive for the kernel, silent for everybody else."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    async def end(self) -> None:
        """Take the daemon, its engine and its disk away, whatever state they are in."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()
        if self.engine is not None:
            await self.engine.stop()
        if self.mounted:
            namespaces.unmount(self.state)

    async def sees(self) -> dict[str, str]:
        """Liveness of every member by name, as this node has it."""
        return {name: member["liveness"] for name, member in (await self.members()).items()}

    async def routes_to(self) -> set[str]:
        """Names of the nodes whose model it would place a request on."""
        return {
            name
            for name, member in (await self.members()).items()
            if member["routable"] and any(e["models"] and e["state"] == "ready" for e in member["engines"])
        }

    async def is_busy(self) -> bool:
        """Whether requests run on its engines."""
        return bool((await self.members())[self.name]["in_flight"])

    async def isolated(self) -> bool:
        """Whether it says of itself that it has no link."""
        return bool((await self.get("/v1/status"))["own"]["isolated"])

    async def epoch(self) -> int:
        return int((await self.get("/v1/status"))["own"]["epoch"])

    async def faults(self) -> list[str]:
        return list((await self.get("/v1/status"))["own"]["faults"])

    async def raw(self, path: str) -> bytes:
        """The bytes of a GET on the admin socket."""
        connector = aiohttp.UnixConnector(str(self.runtime / "admin.sock"))
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.get(f"http://localhost{path}") as reply,
        ):
            return await reply.read()

    def usage(self) -> Usage:
        """Read from /proc."""
        proc = Path(f"/proc/{self.pid}")
        facts = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines() if ":" in line)
        kids = (proc / "task" / str(self.pid) / "children").read_text().split()
        return Usage(
            fds=len(os.listdir(proc / "fd")),
            threads=int(facts["Threads"]),
            children=len(kids),
            rss_mib=int(facts["VmRSS"].split()[0]) / 1024,
        )


async def pair_by_file(nodes: list[NodeProc]) -> None:
    """Every node takes every other's file, without restarting anything."""
    exported = [await node.do("trust-export") for node in nodes]
    for node, own in zip(nodes, exported, strict=True):
        node.node_id = own["id"]
        for other in exported:
            if other is not own:
                await node.do("trust-add", file=other["file"], id=other["id"])


async def started(nodes: list[NodeProc]) -> None:
    """Start all at once; if one fails, all are ended."""
    results = await asyncio.gather(*(node.start() for node in nodes), return_exceptions=True)
    failures = [result for result in results if isinstance(result, BaseException)]
    if failures:
        for node in nodes:
            await node.end()
        raise failures[0]
