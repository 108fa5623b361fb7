"""The pool of connections, against sockets that count."""

import asyncio
import contextlib
import ssl

from agent.relay.pool import ConnectFailed, Pool
from agent.relay.upstream import Options, Target
from router_core import limits
from tests.support.until import until

BURST = 24


async def test_a_burst_runs_few_handshakes_with_one_peer_at_a_time() -> None:
    pending: set[asyncio.StreamWriter] = set()
    seen: list[int] = []

    def accepted(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pending.add(writer)
        seen.append(len(pending))

    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    pool = Pool(asyncio.get_running_loop())
    options = Options(
        idle_ms=0,
        idle_most=0,
        most=2 * BURST,
        off_host=True,
        context=ssl.create_default_context(),
        server_name="x",
    )

    async def one() -> None:
        with contextlib.suppress(ConnectFailed):
            await pool.connect(Target("peer", "127.0.0.1", port), options)

    async with server:
        burst = [asyncio.create_task(one()) for _ in range(BURST)]
        await until(lambda: len(seen) >= limits.HANDSHAKES_TO_PEER)
        while not all(task.done() for task in burst):
            for writer in tuple(pending):
                pending.discard(writer)
                writer.transport.abort()
            await until(lambda: pending or all(task.done() for task in burst))
        await asyncio.gather(*burst)
    assert len(seen) == BURST
    assert max(seen) <= limits.HANDSHAKES_TO_PEER
    assert pool.open_connections == 0
