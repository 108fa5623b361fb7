"""What doctor says of two daemons while they are paired step by step, and when one of them ends."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, Node, closing, wait_for

IPS = {"alpha": "127.0.0.2", "beta": "127.0.0.3"}


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    nodes = [Node(name=name, ip=ip, base=tmp_path / name) for name, ip in IPS.items()]
    made = Cluster(base=tmp_path, nodes=nodes, engines=[])
    async with closing(made):
        for node in nodes:
            node.write_settings([f"@{o.name}={o.ip}:{o.ports['mesh']}" for o in nodes if o is not node])
            await node.start()
        yield made


async def add(at: Node, other: Node) -> None:
    file = other.base / "member.trust"
    file.write_text((await other.cli("trust", "export"))[1])
    node_id = (await other.get("/v1/status"))["own"]["id"]
    assert (await at.cli("trust", "add", str(file), "--id", node_id))[0] == 0


async def test_a_member_without_a_link_is_told_with_the_reason_and_what_to_do(cluster: Cluster) -> None:
    alpha, beta = cluster.nodes

    async def says(words: str) -> bool:
        return words in (await alpha.cli("doctor"))[1]

    await add(alpha, beta)
    words = "beta drops this node's connections: it may not know this node; add this node's file there"
    await wait_for(lambda: says(words), 20, words)
    assert "down: peer closed the connection" in (await alpha.cli("status"))[1]
    await add(beta, alpha)
    await wait_for(lambda: says("beta is fresh"), 20, "the link is up")
    await beta.kill()
    words = "beta has nobody listening at its known addresses: is pairmesh running there?"
    await wait_for(lambda: says(words), 20, words)
