"""What a client was answered is explained at once, and journaled however soon the node stops."""

import asyncio
import sqlite3
from pathlib import Path

import msgspec

from router_core.placement.record import DecisionRecord
from tests.agent.relay.client import ask, post
from tests.bench.bench_relay import BODY, StaticUpstream, served
from tests.support.cluster import Node


async def test_a_reply_has_its_record_at_once_and_keeps_it_when_the_node_stops_with_it(
    tmp_path: Path,
) -> None:
    upstream = await asyncio.get_running_loop().create_server(StaticUpstream, "127.0.0.1", 0)
    port = upstream.sockets[0].getsockname()[1]
    node = Node(name="alone", ip="127.0.0.1", base=tmp_path)
    node.write_settings([])
    (node.config / "endpoints" / "static.toml").write_text(
        f'engine = "openai"\nurl = "http://127.0.0.1:{port}"\nslots = 4\n'
    )
    await node.start()
    try:
        await served(node.ports["api"], models=1)
        first, last = [await asked(node) for _ in range(2)]
        shown = await node.get(f"/v1/decisions/{last}")
        assert shown["outcome"]["status"] == 200
        last = await asked(node)
    finally:
        assert await node.term() == 0
        upstream.close()
    with sqlite3.connect(node.state / "journal.sqlite") as journal:
        kept = dict(journal.execute("select id, body from decisions").fetchall())
    for decision in (first, last):
        record = msgspec.msgpack.decode(kept[decision], type=DecisionRecord)
        assert record.outcome is not None
        assert [attempt.result for attempt in record.attempts] == ["done"]


async def asked(node: Node) -> str:
    """One chat; the decision that its reply names."""
    reply = await ask(node.ports["api"], post(node.ports["api"], BODY))
    assert reply.status == 200, reply
    return reply.headers["x-pairmesh-decision-id"]
