"""A daemon that must not start says why and what to do, and leaves with the status for bad configuration."""

import asyncio
import socket
from pathlib import Path

import pytest

from tests.support.cluster import Node, pair, wait_for

REFUSED = 78


@pytest.fixture
def node(tmp_path: Path) -> Node:
    made = Node(name="alone", ip="127.0.0.2", base=tmp_path / "n")
    made.write_settings([])
    return made


async def refusal(node: Node) -> str:
    """What ``pairmesh run`` prints when it refuses."""
    status, out, err = await asyncio.wait_for(node.cli("run"), 20)
    assert status == REFUSED, (status, out, err)
    return err


async def test_broken_toml_names_file_and_line(node: Node) -> None:
    (node.config / "pairmesh.toml").write_text('name = "alone"\n[api\nlisten = 1\n')
    said = await refusal(node)
    assert "pairmesh.toml:2:" in said
    assert "not TOML" in said


async def test_an_unknown_key_is_refused_with_the_nearest_known_one(node: Node) -> None:
    (node.config / "pairmesh.toml").write_text(
        '[api]\nlisen = "127.0.0.1:1"\n[sampling]\nprofile = "gaming"\n'
    )
    said = await refusal(node)
    assert "api.lisen" in said
    assert "listen" in said.replace("lisen", "")
    assert "sampling.profile" in said, "every fault is told at once"


async def test_a_policy_that_is_none_is_refused_with_every_fault(node: Node) -> None:
    (node.config / "policy.toml").write_text('preset = "fastest"\n[weights]\nslo = 7\nspeeed = 1\n')
    said = await refusal(node)
    for fault in ("preset", "weights.slo: out of range: 7", "weights.speeed"):
        assert fault in said
    (node.config / "policy.toml").unlink()
    (node.config / "policy.toml").mkdir()
    assert "policy.toml: unreadable: not a file" in await refusal(node)


async def test_a_port_in_use_names_the_key_to_change(node: Node) -> None:
    with socket.create_server((node.ip, node.ports["ingress"])):
        said = await refusal(node)
    assert "ingress.listen" in said
    assert str(node.ports["ingress"]) in said


async def test_a_key_that_others_can_read_is_refused(node: Node) -> None:
    await node.start()
    assert await node.term() == 0
    key = node.state / "identity" / "key.pem"
    key.chmod(0o640)
    said = await refusal(node)
    assert "key.pem" in said
    assert "chmod" in said


async def test_a_state_folder_of_a_lost_key_never_gets_a_new_identity(node: Node) -> None:
    await node.start()
    before = (await node.get("/v1/status"))["own"]["id"]
    await node.term()
    key = node.state / "identity" / "key.pem"
    kept = key.read_bytes()
    key.unlink()
    assert "key.pem" in await refusal(node)
    key.write_bytes(kept)
    key.chmod(0o600)
    await node.start()
    assert (await node.get("/v1/status"))["own"]["id"] == before
    await node.term()


async def test_a_corrupt_roster_file_is_set_aside_and_the_node_starts_with_the_rest(
    node: Node, tmp_path: Path
) -> None:
    other = Node(name="other", ip="127.0.0.3", base=tmp_path / "o")
    other.write_settings([])
    for one in (node, other):
        await one.start()
    await pair([node, other])
    assert "other" in await node.members()
    await node.term()
    await other.term()
    for copy in (node.state / "roster").iterdir():
        copy.write_bytes(b"damaged")
    await node.start()
    status = await node.get("/v1/status")
    assert "other" not in {member["name"] for member in status["members"]}
    assert any("set aside" in fault for fault in status["own"]["faults"])
    assert list((node.state / "roster").glob("*.corrupt"))
    await node.term()


async def test_a_bad_manifest_disables_that_endpoint_alone_and_is_shown(node: Node) -> None:
    (node.config / "endpoints" / "bad.toml").write_text(
        'engine = "llamacpp"\nurl = "http://10.0.0.1:1"\nslot = 2\n'
    )
    await node.start()
    faults = (await node.get("/v1/status"))["own"]["faults"]
    assert any("bad.toml" in fault and "url" in fault for fault in faults)
    assert any("bad.toml" in fault and "slot" in fault for fault in faults)
    assert await node.term() == 0


async def test_a_manifest_whose_key_cannot_be_read_disables_that_endpoint_alone(node: Node) -> None:
    (node.config / "endpoints" / "keyed.toml").write_text(
        'engine = "openai"\nurl = "http://127.0.0.1:9"\ncredential = "absent"\n'
    )
    await node.start()
    (fault,) = (await node.get("/v1/status"))["own"]["faults"]
    assert fault.startswith("endpoints: keyed: credential: the file that it names in ")
    assert await node.term() == 0


async def test_every_restart_raises_the_epoch(node: Node) -> None:
    epochs: list[int] = []
    kept = b""

    async def stored() -> bool:
        file = node.state / "epoch"
        return file.exists() and file.read_bytes() != kept

    for end in (node.term, node.kill, node.term):
        await node.start()
        await wait_for(stored, 10, "the epoch of this process life is on disk")
        epochs.append((await node.get("/v1/status"))["own"]["epoch"])
        kept = (node.state / "epoch").read_bytes()
        await end()
    assert epochs == sorted(set(epochs))


async def test_a_node_that_is_no_router_opens_no_api(node: Node) -> None:
    toml = node.config / "pairmesh.toml"
    toml.write_text(toml.read_text().replace('name = "alone"\n', 'name = "alone"\nrouter = false\n'))
    await node.start()
    assert "api" not in (await node.get("/v1/status"))["own"]["addresses"]
    with pytest.raises(OSError):
        await asyncio.open_connection(node.ip, node.ports["api"])
    assert await node.term() == 0
