import contextlib
import tracemalloc
from collections.abc import Callable

import msgpack
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.identity.keys import Ed25519Verifier, NodeKey
from router_core.errors import RemoteFault
from router_core.record import codec
from router_core.record.codec import (
    decode_leave,
    decode_static,
    decode_volatile,
    encode_leave,
    encode_static,
    encode_volatile,
)
from router_core.record.envelope import Header, Sealed, read_header
from router_core.record.state import (
    U63,
    EngineFacts,
    GpuFacts,
    GpuState,
    Label,
    Leave,
    LeaveReason,
    ModelFacts,
    Software,
    Static,
    Volatile,
)
from tests.router_core.record.bodies import statics, volatiles
from tests.support.sealing import unseal
from tests.vectors.make import HERE, MESH8, SEED, STATIC, VOLATILE, vectors


def sealed_of(data: bytes) -> Sealed:
    return codec.decode(data, Sealed, codec.LINK_MESSAGE, "bad_header")


SHORT = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
READERS: dict[str, Callable[[bytes], object]] = {
    "V": decode_volatile,
    "S": decode_static,
    "L": decode_leave,
    "header": lambda data: read_header(data, MESH8),
    "sealed": sealed_of,
    "link message": lambda data: codec.decode(data, tuple[U63, ...], codec.LINK_MESSAGE, "malformed"),
}
BAD = sorted(path.name for path in (HERE / "bad").glob("*.msgpack"))


def good(name: str) -> bytes:
    return (HERE / "good" / name).read_bytes()


def test_the_vectors_are_what_the_code_makes_of_them() -> None:
    stored = {
        str(path.relative_to(HERE)): path.read_bytes()
        for folder in ("good", "bad")
        for path in (HERE / folder).iterdir()
    }
    assert stored == vectors()


def test_good_vectors_read_as_the_values_they_were_made_from() -> None:
    assert decode_volatile(good("plain.v.msgpack")) == VOLATILE
    assert decode_volatile(good("empty.v.msgpack")) == Volatile()
    assert decode_static(good("plain.s.msgpack")) == STATIC
    assert decode_leave(good("shutdown.l.msgpack")) == Leave(reason=LeaveReason.SHUTDOWN)


def test_elements_appended_by_a_later_version_are_ignored() -> None:
    assert decode_volatile(good("appended.v.msgpack")) == VOLATILE


def test_codes_of_a_later_version_read_as_unknown() -> None:
    body = decode_volatile(good("unknown_codes.v.msgpack"))
    assert body.gpus[0].state == GpuState.UNKNOWN
    assert body.resources == VOLATILE.resources


def test_integers_longer_than_they_need_be_are_read_all_the_same() -> None:
    assert decode_volatile(good("long_integers.v.msgpack")).flags == 16


def test_a_stored_record_unseals_to_its_header_and_body() -> None:
    sealed = sealed_of(good("record.sealed.msgpack"))
    key = NodeKey.from_seed(SEED)
    header = unseal(sealed, MESH8, key.key32, Ed25519Verifier())
    assert (header.epoch, header.inst, header.seq, header.due_ms) == (5, 0xDEADBEEF, 42, 2_000)
    assert decode_volatile(header.body) == VOLATILE


@pytest.mark.threat("T17")
@pytest.mark.threat("T19")
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", BAD)
def test_a_bad_vector_is_one_remote_fault_in_every_reader(name: str, reader: str) -> None:
    with pytest.raises(RemoteFault):
        READERS[reader]((HERE / "bad" / name).read_bytes())


@pytest.mark.threat("T16")
@pytest.mark.parametrize("reader", READERS)
def test_a_blob_over_its_size_is_refused_before_it_is_read(reader: str) -> None:
    with pytest.raises(RemoteFault):
        READERS[reader](b"\x90" * 65_536)


@pytest.mark.threat("T16")
@pytest.mark.threat("T17")
@pytest.mark.parametrize(
    "bomb",
    [
        pytest.param(b"\xdd\x00\x0f\x42\x40" + b"\x90" * 1_000_000, id="a megabyte of empty arrays"),
        pytest.param((b"\xdc\x04\x00" + b"\x90" * 1_024) * 63, id="arrays of arrays"),
        pytest.param(b"\xdc\x04\x00" + (b"\xdc\x00\x3e" + b"\x90" * 62) * 1_008, id="a full tree"),
        pytest.param(b"\x91" * 65_000 + b"\x90", id="depth"),
        pytest.param(b"\xdc\x04\x00" * 20_000, id="arrays that promise more"),
    ],
)
def test_a_bomb_costs_little_memory(bomb: bytes) -> None:
    tracemalloc.start()
    try:
        for read in READERS.values():
            with pytest.raises(RemoteFault):
                read(bomb)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5_000_000


@pytest.mark.threat("T17")
@SHORT
@given(data=st.binary(max_size=300))
def test_any_bytes_are_a_value_or_a_remote_fault(data: bytes) -> None:
    for read in READERS.values():
        with contextlib.suppress(RemoteFault):
            read(data)


@pytest.mark.threat("T17")
@SHORT
@given(body=volatiles, at=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_an_altered_body_is_a_value_or_a_remote_fault(body: Volatile, at: int, byte: int) -> None:
    data = bytearray(encode_volatile(body))
    data[at % len(data)] = byte
    with contextlib.suppress(RemoteFault):
        assert isinstance(decode_volatile(bytes(data)), Volatile)


@SHORT
@given(body=volatiles)
def test_a_volatile_body_survives_its_encoding(body: Volatile) -> None:
    data = encode_volatile(body)
    assert encode_volatile(msgspec.msgpack.decode(data, type=Volatile)) == data
    assert codec.decode(data, Volatile, codec.V_BODY, "bad_body") == body


@SHORT
@given(body=statics)
def test_a_static_body_survives_its_encoding(body: Static) -> None:
    assert codec.decode(encode_static(body), Static, codec.S_BODY, "bad_body") == body


@pytest.mark.threat("T19")
@SHORT
@given(body=st.one_of(volatiles, statics))
def test_encoding_is_byte_for_byte_that_of_msgpack(body: Volatile | Static) -> None:
    data = codec.encode(body)
    elements = msgpack.unpackb(data)
    assert msgpack.packb(elements) == data
    assert codec.encode(elements) == data


def test_a_text_never_passes_for_bytes() -> None:
    with pytest.raises(RemoteFault):
        codec.decode(msgpack.packb(["AAAA"]), tuple[bytes, ...], codec.LINK_MESSAGE, "malformed")


@pytest.mark.threat("T43")
@pytest.mark.parametrize(
    "name", ["../../etc", "a..b", "a//b", "", ".hidden", "a b", "a\x00", "a\n", "‮abc", "a%2f" + "b" * 200]
)
def test_a_model_name_that_could_be_a_path_is_a_bad_body(name: str) -> None:
    body = Static(models=(ModelFacts(name="good", engine=0, aliases=(name,)),))
    with pytest.raises(RemoteFault, match="bad_body"):
        decode_static(encode_static(body))
    with pytest.raises(RemoteFault, match="bad_body"):
        decode_static(encode_static(Static(models=(ModelFacts(name=name, engine=0),))))


@pytest.mark.parametrize("name", ["", "engü", "a\r\nx: y", "a\x1b[2J", "A", "-a", "a b", "a" * 33, "a\n"])
def test_an_engine_name_that_could_be_more_than_a_name_is_a_bad_body(name: str) -> None:
    raw = encode_static(Static(engines=(EngineFacts(name=name, kind="openai"),)))
    with pytest.raises(RemoteFault, match="bad_body"):
        decode_static(raw)


def test_other_texts_of_a_record_read_as_printable_ascii() -> None:
    evil = "é\r\n\x1b"
    body = Static(
        software=Software(version=evil),
        gpus=(GpuFacts(uuid8=bytes(8), name=evil),),
        engines=(
            EngineFacts(name="a", kind=evil, version=evil, labels=(Label(key=evil, value="room " + evil),)),
        ),
        models=(ModelFacts(name="m", engine=0, family=evil, quant=evil),),
    )
    read = decode_static(encode_static(body))
    (engine,), (model,) = read.engines, read.models
    texts = (read.software.version, read.gpus[0].name, engine.kind, engine.version, model.family, model.quant)
    assert texts == ("????",) * 6
    assert engine.labels == (Label(key="????", value="room ????"),)


def test_an_address_is_four_or_sixteen_bytes() -> None:
    raw = msgpack.packb([[[bytes(5), 7_433, 7_434]]])
    with pytest.raises(RemoteFault, match="bad_body"):
        decode_static(raw)


def test_a_port_below_1024_is_a_bad_body() -> None:
    raw = msgpack.packb([[[bytes(4), 80, 7_434]]])
    with pytest.raises(RemoteFault, match="bad_body"):
        decode_static(raw)


def test_encode_leave_is_two_bytes() -> None:
    assert encode_leave(Leave(reason=LeaveReason.RESTART)) == b"\x91\x02"


def test_headers_files_and_messages_have_their_own_bounds() -> None:
    header = msgspec.structs.replace(_header(), body=bytes(3_000))
    with pytest.raises(RemoteFault, match="over_cap"):
        read_header(codec.encode(header), MESH8)
    assert sealed_of(codec.encode(Sealed(b"x", bytes(64)))) == Sealed(b"x", bytes(64))


def _header() -> Header:
    return Header(
        kind=1, mesh8=MESH8, id16=bytes(16), epoch=1, inst=1, seq=1, mono_ms=0, due_ms=2_000, body=b""
    )
