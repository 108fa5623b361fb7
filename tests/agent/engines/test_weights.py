"""What a weight file weighs, whether or not it is there."""

from pathlib import Path

from agent.engines.weights import file_bytes, weight_file


def test_the_file_is_the_argument_after_model_if_it_is_absolute() -> None:
    assert weight_file(("llama-server", "--port", "0", "--model", "/m/a.gguf")) == Path("/m/a.gguf")
    assert weight_file(("llama-server", "-m", "/m/b.gguf", "-c", "1")) == Path("/m/b.gguf")
    assert weight_file(("llama-server", "--model", "models/a.gguf")) is None
    assert weight_file(("llama-server", "--model")) is None
    assert weight_file(()) is None


def test_parts_of_a_split_file_are_weighed_together(tmp_path: Path) -> None:
    for part in (1, 2, 3):
        (tmp_path / f"big-{part:05}-of-00003.gguf").write_bytes(bytes(part))
    assert file_bytes(tmp_path / "big-00001-of-00003.gguf") == 6
    (tmp_path / "big-00002-of-00003.gguf").unlink()
    assert file_bytes(tmp_path / "big-00001-of-00003.gguf") is None


def test_a_missing_or_empty_file_is_unknown(tmp_path: Path) -> None:
    assert file_bytes(tmp_path / "gone.gguf") is None
    (tmp_path / "empty.gguf").touch()
    assert file_bytes(tmp_path / "empty.gguf") is None
    (tmp_path / "some.gguf").write_bytes(b"abc")
    assert file_bytes(tmp_path / "some.gguf") == 3
