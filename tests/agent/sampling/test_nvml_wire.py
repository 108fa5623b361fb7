"""The lines between the daemon and the process beside it."""

import ctypes
import json
from contextlib import suppress

import pynvml
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.sampling.nvml_wire import (
    IMPLAUSIBLE,
    LINE_MOST,
    Fields,
    NvmlRefusal,
    NvmlReply,
    decode_reply,
    encode_request,
    number_of,
    text_of,
)
from router_core.errors import RemoteFault


def test_a_request_is_one_line() -> None:
    line = encode_request(7, "fast", uuids=("GPU-1\n",))
    assert line.endswith(b"\n")
    assert json.loads(line) == {"id": 7, "op": "fast", "uuids": ["GPU-1\n"]}
    assert line.count(b"\n") == 1


def test_a_reply_has_values_and_refusals_by_gpu_and_field() -> None:
    reply = decode_reply(
        b'{"id":3,"ok":true,"t":9,"gpu":{"GPU-1":{"util":4,"name":"x","vram_free":{"e":15}}}}', 3
    )
    assert (reply.ok, reply.t) == (True, 9)
    assert reply.gpu == {"GPU-1": {"util": 4, "name": "x", "vram_free": NvmlRefusal(15)}}


@pytest.mark.parametrize(
    "line", [b'{"id":4,"ok":true}', b'{"ok":true}', b'{"id":3,"ok":1}', b'{"id":3,"ok":true,"gpu":[]}']
)
def test_anything_else_is_a_fault(line: bytes) -> None:
    with pytest.raises(RemoteFault):
        decode_reply(line, 3)


@settings(max_examples=100, deadline=None)
@given(line=st.one_of(st.binary(max_size=300), st.text(max_size=300).map(str.encode)))
def test_any_bytes_are_a_reply_or_a_fault(line: bytes) -> None:
    with suppress(RemoteFault):
        assert isinstance(decode_reply(line, 1), NvmlReply)


@settings(max_examples=100, deadline=None)
@given(value=st.one_of(st.none(), st.integers(), st.text(), st.builds(NvmlRefusal, st.integers(0, 2_000))))
def test_a_number_is_in_its_range_or_refused(value: int | str | NvmlRefusal | None) -> None:
    found = number_of({"x": value}, "x", 0, 100)
    assert isinstance(found, NvmlRefusal) or (0 <= found <= 100 and found == value)
    assert number_of({}, "x", 0, 100) == NvmlRefusal(IMPLAUSIBLE)


def test_texts_are_short_and_printable() -> None:
    fields: Fields = {
        "good": "NVIDIA H200",
        "long": "x" * 257,
        "odd": "a\x1b[2J",
        "number": 3,
        "none": None,
    }
    assert [text_of(fields, name) for name in (*fields, "absent")] == [
        "NVIDIA H200",
        None,
        None,
        None,
        None,
        None,
    ]


def test_a_full_host_fits_into_a_line() -> None:
    numbers = dict.fromkeys(("vram_total", "vram_free", "vram_used", "util"), 2**43)
    gpu = numbers | {"name": "x" * 96}
    assert len(json.dumps({"gpu": {f"GPU-{n:036d}": gpu for n in range(16)}})) < LINE_MOST / 10


def test_the_fakes_layouts_are_those_of_the_binding() -> None:
    assert ctypes.sizeof(pynvml.c_nvmlMemory_t) == 24
    assert ctypes.sizeof(pynvml.c_nvmlMemory_v2_t) == 40
    assert pynvml.c_nvmlMemory_v2_t.reserved.offset == 16
    assert pynvml.c_nvmlMemory_v2_t.used.offset == 32
    assert pynvml.nvmlMemory_v2 == 0x02000028
    assert ctypes.sizeof(pynvml.c_nvmlUtilization_t) == 8
    assert ctypes.sizeof(pynvml.nvmlPciInfo_t) == 68
    assert pynvml.nvmlPciInfo_t.busId.offset == 36
