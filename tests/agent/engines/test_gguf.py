"""What is read of a weight file: its descent, from its beginning, and nothing from what is no such file."""

import os
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.engines.contract import OwnedModel
from agent.engines.gguf import HEAD, UNKNOWN, Descent, base_of, descent_of
from agent.engines.weights import WeightFiles
from tests.support import tiny_gguf


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def fact(key: str, value: str | int) -> bytes:
    if isinstance(value, str):
        return text(key) + struct.pack("<I", 8) + text(value)
    return text(key) + struct.pack("<II", 4, value)


def words(key: str, *values: str) -> bytes:
    return text(key) + struct.pack("<IIQ", 9, 8, len(values)) + b"".join(map(text, values))


def a_file(*facts: bytes, version: int = 3, count: int | None = None) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, 0, len(facts) if count is None else count) + b"".join(facts)


FULL = a_file(
    fact("general.architecture", "llama"),
    fact("general.basename", "Toy"),
    words("general.tags", "a", "bc"),
    fact("general.finetune", "Instruct"),
    fact("general.size_label", "2B"),
    fact("general.version", "v0.3"),
    fact("general.file_type", 15),
    words("tokenizer.ggml.tokens", *("token" for _ in range(20_000))),
)


def test_a_files_beginning_tells_base_family_and_quantisation(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(FULL)
    assert len(FULL) > HEAD
    assert descent_of(path) == Descent(base="toy-instruct-2b-v0.3", family="llama", quant="Q4_K_M")


def test_a_base_needs_a_name_and_a_size() -> None:
    assert base_of("Toy", None, "2B", None) == "toy-2b"
    assert base_of("Toy", "Chat", None, "v1") is None
    assert base_of(None, None, "2B", None) is None


def test_the_models_of_these_tests_tell_what_they_were_written_with(tmp_path: Path) -> None:
    tiny_gguf.write_model(tmp_path / "q8.gguf", quant="Q8_0", name="tiny")
    assert descent_of(tmp_path / "q8.gguf") == Descent(base=None, family="llama", quant="Q8_0")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"GGUF",
        FULL.replace(b"GGUF", b"GGML", 1),
        a_file(fact("general.architecture", "llama"), version=9),
        a_file(fact("general.architecture", "two\nlines")),
        a_file(fact("general.architecture", "x" * 49)),
        a_file(fact("general.file_type", 99)),
        a_file(text("general.architecture") + struct.pack("<I", 8) + struct.pack("<Q", 2**63)),
        a_file(text("general.architecture") + struct.pack("<I", 77)),
    ],
)
def test_what_is_no_such_file_or_tells_nonsense_tells_nothing(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    assert descent_of(path) == UNKNOWN


def test_a_file_that_is_not_there_or_is_no_file_is_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    assert descent_of(tmp_path / "pipe.gguf") == UNKNOWN
    assert descent_of(tmp_path / "gone.gguf") == UNKNOWN
    assert descent_of(tmp_path) == UNKNOWN


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 600), st.binary(max_size=16))
def test_a_damaged_file_never_raises(tmp_path_factory: pytest.TempPathFactory, at: int, noise: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(FULL[:at] + noise + FULL[at + len(noise) : 1_000])
    descent_of(path)


async def test_the_file_knows_the_descent_better_than_the_engine(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(FULL)
    owned = OwnedModel(native_id="m", name="m", quant="Q4_0", family="other", size_bytes=7)
    silent = OwnedModel(native_id="n", name="n")
    files = WeightFiles(on_this_host=True)
    told, same = await files.add_facts((owned, silent), {"m": path, "n": None})
    assert (told.base, told.family, told.quant) == ("toy-instruct-2b-v0.3", "llama", "Q4_K_M")
    assert told.size_bytes == 7
    assert same is silent


async def test_no_file_is_looked_at_for_an_engine_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(FULL)
    owned = OwnedModel(native_id="m", name="m")
    assert await WeightFiles(on_this_host=False).add_facts((owned,), {"m": path}) == [owned]


def test_a_folder_in_a_files_place_leaves_nothing_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    assert descent_of(tmp_path) == Descent()
    assert len(os.listdir("/proc/self/fd")) == before
