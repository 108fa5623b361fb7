"""Models, real servers and recorded answers for the tests of the engines."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.fakes.replay import Sample, read_sample
from tests.support.llama import LlamaServer, LlamaUnavailable, find_binary
from tests.support.tiny_gguf import write_model

SAMPLES = Path(__file__).parent / "samples"
StartLlama = Callable[[Sequence[str]], LlamaServer]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``tiny.gguf``, ``mid.gguf`` and a ``broken.gguf`` that no engine loads."""
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "tiny.gguf")
    write_model(folder / "mid.gguf", size_mb=40)
    (folder / "broken.gguf").write_bytes(bytes(range(256)) * 256)
    return folder


@pytest.fixture
def start_llama(tmp_path: Path) -> Iterator[StartLlama]:
    """Start real servers that are gone at the end of the test; skips where none can run."""
    try:
        find_binary()
    except LlamaUnavailable as reason:
        pytest.skip(f"no real llama-server: {reason}")
    with ExitStack() as stack:

        def start(arguments: Sequence[str]) -> LlamaServer:
            server = LlamaServer(arguments, tmp_path / "llama.log")
            stack.callback(server.stop)
            server.start()
            return server

        yield start


@pytest.fixture
def sample() -> Callable[[str], Sample]:
    """A recorded answer by the name of its file, without ``.txt``."""
    return lambda name: read_sample(SAMPLES / f"{name}.txt")
