from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.identity.keys import Ed25519Verifier, NodeKey
from router_core import limits
from router_core.errors import LocalMisuse, RemoteFault
from router_core.ids import id16_of, id32_of_key
from router_core.record import codec
from router_core.record.crypto import ENDORSE_DOMAIN, RECORD_DOMAIN
from router_core.record.envelope import (
    HEADER_MOST,
    Header,
    Sealed,
    Sref,
    read_header,
    seal,
    sref_of,
    verify,
)
from router_core.record.state import Kind
from tests.support.sealing import unseal

KEY = NodeKey.from_seed(bytes(32))
OTHER = NodeKey.from_seed(bytes([1]) * 32)
VERIFIER = Ed25519Verifier()
MESH8 = b"mesh-id8"
V = Header(
    kind=Kind.V,
    mesh8=MESH8,
    id16=id16_of(id32_of_key(KEY.key32)),
    epoch=3,
    inst=9,
    seq=7,
    mono_ms=1_000,
    due_ms=2_000,
    sref=Sref(1, b"digest-8"),
    body=b"\x90",
)


def reason(signed: bytes, mesh8: bytes = MESH8) -> str:
    with pytest.raises(RemoteFault) as caught:
        read_header(signed, mesh8)
    return caught.value.reason


def elements(header: Header = V) -> list[object]:
    return list(msgpack.unpackb(codec.encode(header)))


def test_what_is_sealed_unseals_to_the_same_header() -> None:
    assert unseal(seal(V, KEY), MESH8, KEY.key32, VERIFIER) == V


def test_the_layout_is_that_of_the_wire() -> None:
    assert elements() == [1, 1, MESH8, V.id16, 3, 9, 7, 1_000, 2_000, [1, b"digest-8"], b"\x90"]


def test_no_header_is_longer_than_its_budget() -> None:
    longest = replace(
        V,
        epoch=2**63 - 1,
        inst=2**32 - 1,
        seq=2**63 - 1,
        mono_ms=2**63 - 1,
        due_ms=60_000,
        body=bytes(32_000),
    )
    longest = replace(longest, sref=Sref(2**63 - 1, bytes(8)))
    assert len(codec.encode(longest)) - 32_000 == HEADER_MOST


@pytest.mark.threat("T13")
def test_every_flipped_byte_of_a_sealed_record_is_refused() -> None:
    sealed = seal(V, KEY)
    for at in range(len(sealed.signed)):
        altered = bytearray(sealed.signed)
        altered[at] ^= 0x01
        with pytest.raises(RemoteFault):
            unseal(Sealed(bytes(altered), sealed.sig), MESH8, KEY.key32, VERIFIER)
    for at in range(len(sealed.sig)):
        altered = bytearray(sealed.sig)
        altered[at] ^= 0x01
        with pytest.raises(RemoteFault, match="bad_signature"):
            unseal(Sealed(sealed.signed, bytes(altered)), MESH8, KEY.key32, VERIFIER)


@pytest.mark.threat("T13")
def test_a_record_signed_by_another_node_is_refused() -> None:
    assert not verify(seal(V, OTHER), KEY.key32, VERIFIER)


def test_a_signature_of_another_domain_does_not_count() -> None:
    signed = codec.encode(V)
    assert verify(Sealed(signed, KEY.sign(RECORD_DOMAIN + signed)), KEY.key32, VERIFIER)
    assert not verify(Sealed(signed, KEY.sign(ENDORSE_DOMAIN + signed)), KEY.key32, VERIFIER)
    assert not verify(Sealed(signed, KEY.sign(signed)), KEY.key32, VERIFIER)


def test_a_key_or_signature_of_the_wrong_length_is_false_not_an_error() -> None:
    assert not VERIFIER.verify(b"short", bytes(64), b"")
    assert not VERIFIER.verify(KEY.key32, b"short", b"")


@pytest.mark.threat("T28")
@pytest.mark.parametrize("version", [0, 2, 200])
def test_another_version_is_unsupported_whatever_its_layout(version: int) -> None:
    assert reason(msgpack.packb([version, 1, b"whatever"])) == "unsupported_version"


@pytest.mark.parametrize("kind", [0, 4, 5, 6, 200])
def test_a_kind_that_is_no_state_record_is_unknown(kind: int) -> None:
    assert reason(codec.encode(replace(V, kind=kind))) == "unknown_kind"


def test_a_record_of_another_mesh_is_told_apart() -> None:
    assert reason(codec.encode(V), b"another8") == "wrong_mesh"


@pytest.mark.threat("T16")
@pytest.mark.parametrize(
    ("kind", "cap"), [(Kind.V, limits.V_SIGNED), (Kind.S, limits.S_SIGNED), (Kind.L, limits.L_SIGNED)]
)
def test_the_cap_of_a_kind_is_exact(kind: Kind, cap: int) -> None:
    header = replace(V, kind=kind)
    if kind != Kind.V:
        header = replace(header, due_ms=0, sref=None)
    overhead = len(codec.encode(replace(header, body=bytes(cap - 200)))) - (cap - 200)
    fits = codec.encode(replace(header, body=bytes(cap - overhead)))
    assert len(fits) == cap
    assert read_header(fits, MESH8).kind == kind
    assert reason(codec.encode(replace(header, body=bytes(cap - overhead + 1)))) == "over_cap"
    with pytest.raises(LocalMisuse, match=str(cap)):
        seal(replace(header, body=bytes(cap - overhead + 1)), KEY)


def test_a_blob_above_every_cap_is_over_cap() -> None:
    assert reason(bytes(limits.RECORD_HEADER + 1)) == "over_cap"


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": 0},
        {"seq": 0},
        {"due_ms": 0},
        {"due_ms": 1_999},
        {"due_ms": 60_001},
        {"mesh8": b"short"},
        {"id16": b"short"},
        {"inst": 2**32},
        {"epoch": 2**63},
        {"kind": Kind.S},
        {"kind": Kind.S, "due_ms": 0},
        {"kind": Kind.L, "sref": None},
        {"body": "text"},
    ],
)
def test_a_value_out_of_place_is_a_bad_header(change: dict[str, Any]) -> None:
    assert reason(codec.encode(replace(V, **change))) == "bad_header"


@pytest.mark.parametrize("cut", range(11))
def test_a_header_cut_short_is_a_bad_header(cut: int) -> None:
    whole = elements()
    whole[9] = None
    assert reason(msgpack.packb(whole[:cut])) == "bad_header"


def test_what_follows_the_body_is_ignored() -> None:
    assert read_header(msgpack.packb([*elements(), 7, [1]]), MESH8) == V


def test_a_header_is_judged_without_touching_the_body() -> None:
    assert read_header(codec.encode(replace(V, body=b"\xc1 no msgpack")), MESH8).body == b"\xc1 no msgpack"


def test_an_sref_names_one_static_record() -> None:
    signed = codec.encode(V)
    assert sref_of(5, signed) == sref_of(5, signed)
    assert sref_of(5, signed) != sref_of(5, signed + b"x")
    assert len(sref_of(5, signed).digest8) == 8


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=200))
def test_any_bytes_are_a_header_or_a_remote_fault(data: bytes) -> None:
    assert reason(data) in {"bad_header", "unsupported_version", "unknown_kind", "over_cap", "wrong_mesh"}
