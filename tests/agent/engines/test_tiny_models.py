"""The models the tests and the demo run on."""

import hashlib
import struct
from pathlib import Path

import pytest

from tests.support.tiny_gguf import main, make_vocabulary, write_model


@pytest.mark.parametrize(("size_mb", "quant"), [(2, "F16"), (2, "Q8_0"), (40, "F16"), (40, "Q8_0")])
def test_a_model_has_about_the_size_asked_for(tmp_path: Path, size_mb: float, quant: str) -> None:
    write_model(tmp_path / "m.gguf", size_mb=size_mb, quant=quant)
    assert (tmp_path / "m.gguf").stat().st_size == pytest.approx(size_mb * 1e6, rel=0.15)


def test_the_same_arguments_give_the_same_bytes_and_a_seed_others(tmp_path: Path) -> None:
    digests = []
    for seed in (1, 1, 2):
        write_model(tmp_path / "m.gguf", seed=seed)
        digests.append(hashlib.sha256((tmp_path / "m.gguf").read_bytes()).hexdigest())
    assert digests[0] == digests[1] != digests[2]


def test_the_command_line_writes_what_the_function_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path / "a.gguf"), "--name", "x", "--ctx", "512", "--eos-every", "24"]) == 0
    write_model(tmp_path / "b.gguf", name="x", ctx=512, eos_every=24)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    assert "a.gguf" in capsys.readouterr().out


def test_a_file_begins_with_magic_version_and_counts(tmp_path: Path) -> None:
    shape = write_model(tmp_path / "m.gguf")
    magic, version, tensors, facts = struct.unpack("<4sIQQ", (tmp_path / "m.gguf").read_bytes()[:24])
    assert (magic, version, tensors) == (b"GGUF", 3, 3 + 9 * shape.layers)
    assert facts == 27


def test_every_spoken_token_is_a_word_that_merging_can_reach() -> None:
    vocabulary = make_vocabulary()
    tokens = set(vocabulary.tokens)
    spoken = [token for token, said in zip(vocabulary.tokens, vocabulary.spoken, strict=True) if said]
    assert len(spoken) == 400
    assert len(tokens) == len(vocabulary.tokens)
    for word in spoken:
        assert word[1:].isascii()
        assert word[1:].islower()
        assert all(word[:end] in tokens for end in range(1, len(word) + 1))
