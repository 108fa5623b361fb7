"""What the mesh costs: ``python -m tests.bench.bench_mesh [--json] [--nodes N] [--daemons N]``, on loopback and uvloop.

In one process, first bare links between two nodes whose machines say nothing of their own: CPU of one message sent and received,
CPU of one handshake a side, what a thousand link cycles leave behind. Then N nodes with real machines in full
mesh, idle: CPU and bytes out of each. Last whole daemons at rest: one alone, then N in full mesh. ``baseline`` is the
limit the mesh is designed for.
"""

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import uvloop

from router_core.mesh.protocol.actions import CloseLink, Dial, SendFrame
from router_core.mesh.protocol.events import Event, FrameReceived, LinkClosed, LinkId, LinkOpened
from tests.bench.mesh_daemons import at_rest
from tests.bench.report import Figure, against, emit
from tests.support.meshnode import Node, Person, person
from tests.support.meshpeer import Peer
from tests.support.scripted_machine import ScriptedMachine
from tests.support.until import until

MESSAGES: Final = 4_000
CYCLES: Final = 1_000
HANDSHAKES: Final = 200
WINDOW_S: Final = 10.0
RECORD_BYTES: Final = 270
"""A RECS item of a node with one GPU and one model; a link carries about one a second."""


async def pair(stack: AsyncExitStack, folder: Path) -> tuple[Node, Node]:
    people = [person(folder, number) for number in (1, 2)]
    roster = [who.member for who in people]
    b = await stack.enter_async_context(Node(people[1], ScriptedMachine(), host="127.0.0.3", roster=roster))
    a = await stack.enter_async_context(
        Node(people[0], ScriptedMachine(), host="127.0.0.2", roster=roster, peers=[b.hint])
    )
    return a, b


async def dial(a: Node, b: Node) -> tuple[LinkId, LinkId]:
    a.script.told.clear()
    b.script.told.clear()
    a.act(Dial(b.who.id16, ()))
    there = (await until(lambda: a.told(LinkOpened), 30))[0]
    here = (await until(lambda: b.told(LinkOpened), 30))[0]
    return there.link, here.link


async def close(a: Node, b: Node, link: LinkId) -> None:
    a.act(CloseLink(link, None))
    await until(lambda: a.told(LinkClosed) and b.told(LinkClosed), 30)


async def message_us(a: Node, b: Node, size: int, count: int) -> float:
    """CPU microseconds of one message, both ends together, bounced between two nodes."""
    there, here = await dial(a, b)
    data = b"\x00" * size
    done = asyncio.Event()
    left = count

    def bounce(link: LinkId) -> object:
        def reply(event: Event) -> list[object]:
            nonlocal left
            if not isinstance(event, FrameReceived):
                return []
            left -= 1
            if left <= 0:
                done.set()
                return []
            return [SendFrame(link, data)]

        return reply

    a.script.reply, b.script.reply = bounce(there), bounce(here)  # type: ignore[assignment]
    start = time.process_time()
    a.act(SendFrame(there, data))
    await done.wait()
    spent = time.process_time() - start
    a.script.reply = b.script.reply = lambda event: []
    await close(a, b, there)
    return spent / count * 1e6


async def handshake_ms(a: Node, b: Node) -> float:
    """CPU milliseconds of one link cycle, a side: TCP, TLS, upgrade, close."""
    start = time.process_time()
    for _ in range(HANDSHAKES):
        await close(a, b, (await dial(a, b))[0])
    return (time.process_time() - start) / HANDSHAKES / 2 * 1_000


def held() -> tuple[int, int]:
    """(descriptors, tasks) of this process."""
    return len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())


async def links(folder: Path) -> list[Figure]:
    async with AsyncExitStack() as stack:
        a, b = await pair(stack, folder)
        await close(a, b, (await dial(a, b))[0])
        small = await message_us(a, b, 300, MESSAGES)
        large = await message_us(a, b, 16_384, MESSAGES // 4)
        handshake = await handshake_ms(a, b)
        before = held()
        for _ in range(CYCLES):
            await close(a, b, (await dial(a, b))[0])
        after = held()
    return [
        against("CPU of send + receive, 300 B", small, "us", 200),
        against("CPU of send + receive, 16 KiB", large, "us", 400),
        against("CPU of a link cycle, a side", handshake, "ms", 2.5),
        Figure(f"descriptors more after {CYCLES:,} link cycles", after[0] - before[0], "", 0),
        Figure(f"tasks more after {CYCLES:,} link cycles", after[1] - before[1], "", 0),
    ]


async def meshed(folder: Path, count: int) -> list[Figure]:
    people: list[Person] = [person(folder, number) for number in range(1, count + 1)]
    roster = [who.member for who in people]
    async with AsyncExitStack() as stack:
        started = time.perf_counter()
        peers: list[Peer] = []
        for number, who in enumerate(people):
            peer = Peer(
                who, number, folder / f"state-{count}-{number}", roster, [other.hint for other in peers]
            )
            peers.append(await stack.enter_async_context(peer))
            peer.say()
        await until(lambda: all(peer.sees(*(o.who for o in peers if o is not peer)) for peer in peers), 60)
        formed_s = time.perf_counter() - started
        bytes_before = sum(peer.driver.counted().bytes_out for peer in peers)
        cpu, at = time.process_time(), time.perf_counter()
        await asyncio.sleep(WINDOW_S)
        window_s = time.perf_counter() - at
        cpu_pct = (time.process_time() - cpu) / window_s / count * 100
        sent = sum(peer.driver.counted().bytes_out for peer in peers) - bytes_before
    formula = (count - 1) * RECORD_BYTES
    return [
        Figure(f"{count} nodes until everybody sees everybody", formed_s, "s"),
        Figure(f"{count} nodes, idle: CPU of one", cpu_pct, "% of a core"),
        against(
            f"{count} nodes, idle: message bytes out of one", sent / count / window_s, "B/s", 1.5 * formula
        ),
    ]


async def measure(counts: Sequence[int], daemons: Sequence[int]) -> list[Figure]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        figures = await links(folder)
        for count in counts:
            figures += await meshed(folder, count)
        for count in daemons:
            figures += await at_rest(folder, count)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--nodes", type=int, action="append", help="sizes of the meshes (3 and 10)")
    parser.add_argument(
        "--daemons", type=int, action="append", help="numbers of whole daemons (1, 3, 10, 20)"
    )
    wanted = parser.parse_args()
    figures = uvloop.run(measure(wanted.nodes or (3, 10), wanted.daemons or (1, 3, 10, 20)))
    emit(figures, wanted.json)


if __name__ == "__main__":
    main()
