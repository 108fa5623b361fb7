"""What whole daemons cost at rest: N of them in full mesh on one host, each on a loopback address of its own.

CPU and memory are the kernel's counts of each process, CPU the median of three spans, since what shares a processor's
caches with an idle process can double what its work costs; bytes are those of its mesh sockets, TLS included, as ``ss``
tells them. Nothing is asked of the daemons while they are measured.
"""

import asyncio
import contextlib
import os
import re
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

from tests.bench.report import Figure, against
from tests.support.cluster import Node, wait_for

FORMED_S = 60.0
SETTLE_S = 10.0
WINDOW_S = 15.0
WINDOWS = 3
AT_ONCE = 2
CPU_LIMIT_PCT = 1.0
RSS_LIMIT_MIB = 80.0
_TICKS = os.sysconf("SC_CLK_TCK")
_SENT = re.compile(r"bytes_sent:(\d+)")


@asynccontextmanager
async def running(folder: Path, count: int) -> AsyncIterator[list[Node]]:
    """``count`` daemons without engines that know each other; one alone knows nobody."""
    nodes = [
        Node(name=f"n{number}", ip=f"127.9.{count}.{number + 1}", base=folder / f"{count}-{number}")
        for number in range(count)
    ]
    room = asyncio.Semaphore(AT_ONCE)

    async def start(node: Node) -> None:
        node.write_settings([])
        async with room:
            await node.start()

    try:
        await asyncio.gather(*map(start, nodes))
        await acquaint(nodes)
        await wait_for(lambda: _all_see(nodes), FORMED_S, f"{count} nodes see each other", every_s=0.5)
        yield nodes
    finally:
        for node in nodes:
            with contextlib.suppress(RuntimeError, ProcessLookupError):
                await node.kill()


async def acquaint(nodes: Sequence[Node]) -> None:
    """Exchange member files until all are in one mesh: whoever moves to another's mesh has to be added anew."""
    for last in (False, True):
        told = {node.name: await node.do("trust-export") for node in nodes}
        for node in nodes:
            for other in nodes:
                if other is node:
                    continue
                with contextlib.nullcontext() if last else contextlib.suppress(RuntimeError):
                    await node.do("trust-add", file=told[other.name]["file"], id=told[other.name]["id"])


async def _all_see(nodes: Sequence[Node]) -> bool:
    names = {node.name for node in nodes}
    for node in nodes:
        members = (await node.members()).items()
        if names - {name for name, member in members if member["liveness"] == "fresh"}:
            return False
    return True


def cpu_s(node: Node) -> float:
    """CPU seconds of the daemon so far, children that ended included."""
    assert node.process is not None
    told = Path(f"/proc/{node.process.pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, told[11:15])) / _TICKS


async def cpu_pct_at_rest(node: Node) -> float:
    """CPU of the daemon in percent of a core, the median of some spans."""
    loop = asyncio.get_running_loop()
    spans: list[float] = []
    for _ in range(WINDOWS):
        since, spent = loop.time(), cpu_s(node)
        await asyncio.sleep(WINDOW_S)
        spans.append((cpu_s(node) - spent) / (loop.time() - since) * 100)
    return median(spans)


def rss_mib(node: Node) -> float:
    """Resident memory of the daemon."""
    assert node.process is not None
    status = Path(f"/proc/{node.process.pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1024


async def mesh_bytes(nodes: Sequence[Node]) -> int | None:
    """Bytes that all nodes sent on mesh sockets now open; None if nobody here can tell."""
    if shutil.which("ss") is None:
        return None
    listening = {f"{node.ip}:{node.ports['mesh']}" for node in nodes}
    process = await asyncio.create_subprocess_exec(
        "ss", "-tinOH", "state", "established", stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    total = 0
    for line in out.decode().splitlines():
        ends = line.split()[2:4]
        sent = _SENT.search(line)
        if sent is not None and not listening.isdisjoint(ends):
            total += int(sent[1])
    return total


async def at_rest(folder: Path, count: int) -> list[Figure]:
    """The figures of ``count`` daemons."""
    async with running(folder, count) as nodes:
        await asyncio.sleep(SETTLE_S)
        loop = asyncio.get_running_loop()
        since, sent = loop.time(), await mesh_bytes(nodes)
        cpu_pct = await asyncio.gather(*map(cpu_pct_at_rest, nodes))
        window_s = loop.time() - since
        more = await mesh_bytes(nodes)
        rss = [rss_mib(node) for node in nodes]
    if count == 1:
        return [
            against("daemon.idle_cpu_pct", cpu_pct[0], "% of a core", CPU_LIMIT_PCT),
            against("daemon.idle_rss_mib", rss[0], "MiB", RSS_LIMIT_MIB),
        ]
    figures = [
        Figure(f"mesh.cpu_pct.n{count}", median(cpu_pct), "% of a core"),
        Figure(f"mesh.rss_mib.n{count}", median(rss), "MiB"),
    ]
    if sent is not None and more is not None:
        figures.append(Figure(f"mesh.bytes_per_s.n{count}", (more - sent) / count / window_s, "B/s"))
    return figures
