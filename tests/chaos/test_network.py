"""Forming, cuts and healing: three daemons in namespaces on one bridge."""

import pytest

from tests.support.chaos.mesh import Mesh

pytestmark = [pytest.mark.chaos, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]

D_CUT_S = 6.0
D_HEAL_S = 6.0
D_JOIN_S = 3.0
FORM_S = 5.0


async def test_nodes_that_only_share_a_bridge_find_each_other_by_multicast(whole: Mesh) -> None:
    for node in whole.nodes.values():
        assert "peers = []" in (node.config / "pairmesh.toml").read_text()
        members = await node.members()
        assert set(members) == {"a", "b", "c"}
    lines = await whole.burst("a", 24)
    assert {line["outcome"] for line in lines} == {"whole"}
    assert len({line["node"] for line in lines}) > 1, "work is spread"
