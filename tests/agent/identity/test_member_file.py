import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.identity.certificate import build_certificate
from agent.identity.keys import NodeKey
from agent.identity.member_file import (
    MOST,
    MemberFile,
    addresses_of,
    parse_member_file,
    write_member_file,
)
from router_core.errors import RemoteFault
from router_core.ids import MeshId, NodeName, id32_of_key
from router_core.trust.mesh_choice import MeshClaim

KEY = NodeKey.from_seed(bytes(32))
MEMBER = MemberFile(
    id32=id32_of_key(KEY.key32),
    der=build_certificate(KEY.private),
    name=NodeName("box"),
    admission=3,
    claim=MeshClaim(MeshId(bytes(range(16))), False),
    addresses=addresses_of(["192.168.1.20", "fd00::1"], 7_433, 7_434),
)
TEXT = json.loads(write_member_file(MEMBER))


def test_a_written_file_parses_to_the_same_member() -> None:
    assert parse_member_file(write_member_file(MEMBER)) == MEMBER


def test_people_can_read_it() -> None:
    assert (TEXT["node_id"], TEXT["name"], TEXT["paired"]) == (MEMBER.node_id, "box", False)
    assert [address["ip"] for address in TEXT["addresses"]] == ["192.168.1.20", "fd00::1"]
    assert write_member_file(MEMBER).count(b"\n") > 10


def reason(**changes: object) -> str:
    with pytest.raises(RemoteFault) as caught:
        parse_member_file(json.dumps({**TEXT, **changes}).encode())
    return caught.value.reason


@pytest.mark.threat("T17")
@pytest.mark.parametrize(
    "changes",
    [
        {"format": "other"},
        {"name": "No Name"},
        {"name": "a\n"},
        {"mesh_id": "00" * 15},
        {"mesh_id": "00" * 16 + "\n"},
        {"admission": 0},
        {"admission": 2**32},
        {"admission": "3"},
        {"paired": 1},
        {"certificate": "?"},
        {"extra": 1},
        {"addresses": [{"ip": "host.example", "mesh_port": 7_433, "ingress_port": 7_434}]},
        {"addresses": [{"ip": "10.0.0.1", "mesh_port": 80, "ingress_port": 7_434}]},
        {"addresses": TEXT["addresses"] * 5},
    ],
)
def test_anything_else_is_malformed(changes: dict[str, Any]) -> None:
    assert reason(**changes) == "malformed"


def test_a_later_version_is_told_apart_whatever_else_it_holds() -> None:
    assert reason(version=2, extra=1) == "unsupported_version"


def test_a_certificate_that_is_not_the_one_of_the_id_is_refused() -> None:
    other = json.loads(
        write_member_file(
            MemberFile(
                id32=MEMBER.id32,
                der=build_certificate(NodeKey.from_seed(bytes([1]) * 32).private),
                name=MEMBER.name,
                admission=1,
                claim=MEMBER.claim,
                addresses=(),
            )
        )
    )
    assert reason(certificate=other["certificate"]) == "bad_cert"
    assert reason(certificate="AAAA") == "bad_cert"


@pytest.mark.threat("T17")
@pytest.mark.parametrize("content", [b"", b"{", b"[" * 15_000, b"\xff", b"{}", b"null", b" " * (MOST + 1)])
def test_a_file_that_is_no_member_file_is_malformed(content: bytes) -> None:
    with pytest.raises(RemoteFault, match="malformed"):
        parse_member_file(content)


@pytest.mark.threat("T17")
@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, 2_000), byte=st.integers(0, 255))
def test_an_altered_file_is_the_member_or_a_remote_fault(at: int, byte: int) -> None:
    content = bytearray(write_member_file(MEMBER))
    content[at % len(content)] = byte
    try:
        assert parse_member_file(bytes(content)).der == MEMBER.der
    except RemoteFault:
        return
