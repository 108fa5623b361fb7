import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.identity.certificate import build_certificate
from agent.identity.keys import Ed25519Verifier, NodeKey
from router_core.errors import LocalMisuse, RemoteFault
from router_core.ids import NodeName, id16_of, id32_of_key
from router_core.record.crypto import RECORD_DOMAIN
from router_core.record.envelope import Sealed
from router_core.trust.statements import (
    FULL_MEMBER,
    Endorsement,
    Removal,
    RemovalReason,
    Via,
    endorse,
    read_statement,
    remove,
    verify_statement,
)

MESH8 = b"mesh-id8"
SIGNER, SUBJECT = NodeKey.from_seed(bytes(32)), NodeKey.from_seed(bytes([1]) * 32)
ME, THEM = id32_of_key(SIGNER.key32), id32_of_key(SUBJECT.key32)
E = endorse(
    SIGNER,
    mesh8=MESH8,
    by=id16_of(ME),
    id32=THEM,
    admission=3,
    der=build_certificate(SUBJECT.private),
    roles=FULL_MEMBER,
    via=Via.FILE,
    name=NodeName("them"),
)
X = remove(SIGNER, mesh8=MESH8, by=id16_of(ME), id32=THEM, admission=3, reason=RemovalReason.REMOVED)


@pytest.mark.parametrize("statement", [E, X], ids=["E", "X"])
def test_a_statement_reads_as_what_was_signed(statement: Removal | Endorsement) -> None:
    assert read_statement(statement.sealed, MESH8) == statement
    assert verify_statement(statement, SIGNER.key32, Ed25519Verifier())
    assert not verify_statement(statement, SUBJECT.key32, Ed25519Verifier())


def test_the_layouts_are_those_of_the_wire() -> None:
    frame = msgpack.unpackb(E.sealed.signed)
    assert frame[:6] == [1, 4, MESH8, ME[:16], THEM[:16], 3]
    assert msgpack.unpackb(frame[6]) == [THEM, E.der, 11, 2, "them"]
    frame = msgpack.unpackb(X.sealed.signed)
    assert frame[:6] == [1, 5, MESH8, ME[:16], THEM[:16], 3]
    assert msgpack.unpackb(frame[6]) == [THEM, 1]


@pytest.mark.parametrize("statement", [E, X], ids=["E", "X"])
def test_a_signature_in_the_domain_of_records_does_not_count(statement: Removal | Endorsement) -> None:
    resigned = Sealed(statement.sealed.signed, SIGNER.sign(RECORD_DOMAIN + statement.sealed.signed))
    assert not verify_statement(read_statement(resigned, MESH8), SIGNER.key32, Ed25519Verifier())


def reason(signed: bytes, mesh8: bytes = MESH8) -> str:
    with pytest.raises(RemoteFault) as caught:
        read_statement(Sealed(signed, bytes(64)), mesh8)
    return caught.value.reason


def changed(at: int, value: object, statement: Endorsement | Removal = E) -> bytes:
    frame = msgpack.unpackb(statement.sealed.signed)
    frame[at] = value
    made: bytes = msgpack.packb(frame)
    return made


def test_a_statement_of_another_mesh_is_told_apart() -> None:
    assert reason(E.sealed.signed, b"another8") == "wrong_mesh"


@pytest.mark.parametrize(
    "signed",
    [
        changed(0, 2),
        changed(1, 1),
        changed(1, 6),
        changed(3, THEM[:16]),
        changed(4, bytes(16)),
        changed(5, 0),
        changed(5, 2**32),
        changed(6, b"\xc1"),
        changed(6, msgpack.packb([THEM, bytes(1_025), 11, 2, "them"])),
        changed(6, msgpack.packb([THEM, b"", 11, 9, "them"])),
        changed(6, msgpack.packb([THEM, b"", 11, 2, "No Name"])),
        changed(6, msgpack.packb([bytes(32), b"", 11, 2, "them"])),
        changed(6, msgpack.packb([bytes(32), 1]), X),
        changed(6, b"\x90" * 1_400, X),
    ],
)
@pytest.mark.threat("T17")
def test_anything_else_is_malformed(signed: bytes) -> None:
    assert reason(signed) == "malformed"


@pytest.mark.threat("T17")
@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=200))
def test_any_bytes_are_a_statement_or_a_remote_fault(data: bytes) -> None:
    assert reason(data) in {"malformed", "wrong_mesh"}


def test_a_node_does_not_endorse_itself() -> None:
    with pytest.raises(LocalMisuse):
        endorse(
            SIGNER,
            mesh8=MESH8,
            by=id16_of(ME),
            id32=ME,
            admission=1,
            der=b"",
            roles=1,
            via=Via.FILE,
            name=NodeName("me"),
        )
