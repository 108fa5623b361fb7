"""Messages survive the wire, keep their limits, and anything else is one RemoteFault."""

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_core import limits
from router_core.errors import LocalMisuse, RemoteFault
from router_core.mesh.protocol import messages as msg

ID16 = st.binary(min_size=16, max_size=16)
EIGHT = st.binary(min_size=8, max_size=8)
U16 = st.integers(0, 2**16 - 1)
U32 = st.integers(0, 2**32 - 1)
U63 = st.integers(0, 2**63 - 1)
STATE = st.builds(msg.HaveState, ID16, U63, U63, U63, U63)
HEARD = st.builds(msg.Heard, U32, st.binary(max_size=200), st.binary(min_size=64, max_size=64))
MESSAGES = st.one_of(
    st.builds(
        msg.Hello,
        proto_min=U16,
        proto_max=U16,
        features=U32,
        mesh8=EIGHT,
        id16=ID16,
        epoch=U63,
        inst=U32,
        boot_ms=U63,
        roster8=EIGHT,
    ),
    st.builds(msg.Have, chunk=st.just(0), chunks=st.just(1), states=st.lists(STATE, max_size=5).map(tuple)),
    st.builds(msg.Recs, st.lists(HEARD, max_size=5).map(tuple)),
    st.builds(
        msg.Want, st.lists(st.builds(msg.Wanted, ID16, st.integers(0, 255), U63, U63), max_size=5).map(tuple)
    ),
    st.builds(msg.Ping, nonce=U32, boot_ms=U63),
    st.builds(msg.Pong, nonce=U32, boot_ms=U63),
    st.builds(msg.Bye, code=st.integers(0, 255), retry_after_ms=U32),
)


@given(MESSAGES)
@settings(max_examples=100, deadline=None)
def test_every_message_survives_the_wire(message: msg.Message) -> None:
    assert msg.decode(msg.encode(message)) == message


@given(st.binary(max_size=300))
@settings(max_examples=100, deadline=None)
def test_any_bytes_give_a_message_or_a_remote_fault(data: bytes) -> None:
    assert outcome(data) in ("message", "too_big", "unknown_type", "malformed")


def outcome(data: bytes) -> str:
    try:
        msg.decode(data)
    except RemoteFault as fault:
        return fault.reason
    return "message"


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\x90"


PING = msg.encode(msg.Ping(nonce=1, boot_ms=2))
HAVE_OUT_OF_RANGE = b"\x02" + msgpack.packb([3, 3, 1, [], []])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "too_big"),
        (bytes(limits.LINK_MESSAGE + 1), "too_big"),
        (b"\x00\x90", "unknown_type"),
        (b"\x08\x90", "unknown_type"),
        (b"\x7f\x90", "unknown_type"),
        (PING + b"\x00", "malformed"),
        (PING[:-1], "malformed"),
        (b"\x05" + msgpack.packb({"nonce": 1}), "malformed"),
        (b"\x05" + msgpack.packb([1.0, 2, bytes(8), 0, 0]), "malformed"),
        (b"\x05" + msgpack.packb([-1, 2, bytes(8), 0, 0]), "malformed"),
        (b"\x05" + msgpack.packb([1, 2, bytes(7), 0, 0]), "malformed"),
        (b"\x05" + msgpack.packb([1, 2, "12345678", 0, 0]), "malformed"),
        (b"\x05" + msgpack.packb([msgpack.ExtType(1, b"x"), 2, bytes(8), 0, 0]), "malformed"),
        (b"\x03" + nested(10_000), "malformed"),
        (b"\x03" + msgpack.packb([[0, b"x", bytes(64)]] * 65), "malformed"),
        (b"\x03" + msgpack.packb([[0, b"x", bytes(63)]]), "malformed"),
        (b"\x04" + msgpack.packb([[bytes(16), 1, 0, 0]] * 65), "malformed"),
        (b"\x02" + msgpack.packb([0, 1, 1, [[bytes(16), 1, 0, 0, 0]] * 257, []]), "malformed"),
        (HAVE_OUT_OF_RANGE, "malformed"),
    ],
)
def test_a_bad_message_is_refused_for_its_reason(data: bytes, reason: str) -> None:
    with pytest.raises(RemoteFault) as caught:
        msg.decode(data)
    assert caught.value.reason == reason


def test_types_of_later_protocols_are_ignored_and_so_are_trailing_elements() -> None:
    assert msg.decode(b"\x80anything") is None
    longer = b"\x05" + msgpack.packb([1, 2, bytes(8), 0, 0, "new", 9])
    assert msg.decode(longer) == msg.Ping(nonce=1, boot_ms=2)


@given(st.lists(st.integers(0, 5_000), max_size=80))
@settings(max_examples=60, deadline=None)
def test_packed_records_keep_their_order_and_the_limits_of_a_message(sizes: list[int]) -> None:
    items = [msg.Heard(0, bytes(size), bytes(64)) for size in sizes]
    groups = msg.pack(items)
    assert [item for group in groups for item in group] == items
    for group in groups:
        assert len(group) <= limits.RECORDS_PER_MESSAGE
        assert len(group) == 1 or len(msg.encode(msg.Recs(group))) <= limits.LINK_MESSAGE_SOFT + 16


def test_a_big_record_goes_alone_and_an_oversize_message_is_our_own_misuse() -> None:
    big, small = msg.Heard(0, bytes(32_768), bytes(64)), msg.Heard(0, b"x", bytes(64))
    assert [len(group) for group in msg.pack([small, big, small])] == [1, 1, 1]
    assert len(msg.encode(msg.Recs((big,)))) < limits.LINK_MESSAGE_SENT
    with pytest.raises(LocalMisuse):
        msg.encode(msg.Recs((big, big)))


@pytest.mark.parametrize(("count", "chunks"), [(0, 1), (1, 1), (256, 1), (257, 2), (1_025, 5)])
def test_have_comes_in_chunks_of_256(count: int, chunks: int) -> None:
    states = [msg.HaveState(index.to_bytes(16, "big"), 1, 2, 3, 0) for index in range(count)]
    haves = [msg.decode(data) for data in msg.encode_haves(states)]
    assert len(haves) == chunks
    assert [entry for have in haves if isinstance(have, msg.Have) for entry in have.states] == states
    assert all(isinstance(have, msg.Have) and have.chunks == chunks for have in haves)
