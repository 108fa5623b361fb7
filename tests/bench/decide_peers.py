"""Other routers' selection of a node, each asked in a process and an environment of its own.

Who cannot be installed, started or asked is ``Absent``, with the reason. What each selection is, and on which facts of
the same nodes it works, is in ``selection_worker``.
"""

import contextlib
import json
import select
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from router_core.placement.candidates.candidate import Row
from tests.bench.environments import Absent, environment, plain

REPLY_S = 60.0
WORKER = Path(__file__).with_name("selection_worker.py")

PINNED = {"litellm": "1.110.2", "ollama-herd": "0.11.4", "sollol": "0.9.66"}


class Peer:
    """A running worker."""

    def __init__(self, name: str, process: "subprocess.Popen[str]") -> None:
        self.name = name
        self._process = process

    def build(self, rows: Sequence[Row]) -> None:
        """Make nodes like ``rows`` the peer's own."""
        nodes = [[row.node_name, 1 / row.token_s, row.in_flight, row.resident] for row in rows]
        self._ask(f"build {json.dumps(nodes)}")

    def batch(self, count: int, runs: int) -> list[float]:
        """Microseconds of each of ``runs`` selections among ``count`` nodes."""
        took = [int(each) / 1000 for each in self._ask(f"batch {count} {runs}").split()]
        if len(took) != runs:
            raise Absent(f"{self.name} answered {len(took)} timings to {runs} selections")
        return took

    def _ask(self, line: str) -> str:
        """The answer to ``line``, one at a time."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.write(line + "\n")
            stdin.flush()
        if not select.select([stdout], [], [], REPLY_S)[0]:
            raise Absent(f"{self.name} gives no answer within {REPLY_S:.0f} s")
        told = stdout.readline().strip()
        if not told:
            raise Absent(f"{self.name} ended before it answered")
        if told.startswith("failed "):
            raise Absent(f"{self.name} cannot be asked: {told.removeprefix('failed ')}")
        return told


@contextlib.contextmanager
def peer(name: str, home: Path) -> Iterator[Peer]:
    """A worker of the pinned release, which finds ``home`` empty; raises ``Absent``."""
    python = environment(name, PINNED[name]) / "bin" / "python"
    with worker(name, [str(python), "-I", str(WORKER), name], home) as started:
        yield started


@contextlib.contextmanager
def worker(name: str, command: Sequence[str], home: Path) -> Iterator[Peer]:
    """``command``, which answers lines as ``selection_worker`` does."""
    # LiteLLM would fetch its list of prices.
    env = plain() | {"HOME": str(home), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, text=True, env=env) as process:
        try:
            yield Peer(name, process)
        finally:
            process.kill()
            with contextlib.suppress(BrokenPipeError):
                process.communicate()
