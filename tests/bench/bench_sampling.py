"""What sampling costs: ``python -m tests.bench.bench_sampling [--json] [--seconds N]``.

Real parts at their real pace of one tick a second: the host thread, the driver's process and the real binding over a
fake driver library, with 0, 2 and 8 GPUs. CPU is in percent of one core over the span, of the daemon's side and of
the process beside it; times of a read are what that process took. ``baseline`` is the stated limit; the figures of
0 and 8 GPUs have none.
"""

import argparse
import asyncio
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final

from agent.effects.clock import SystemClock
from agent.observe.log import Log
from agent.observe.metrics import Histogram
from agent.sampling.files import Roots
from agent.sampling.host import HostAnswer, Tick
from agent.sampling.loop import OwnWork, Sampler, SamplerPorts
from agent.sampling.nvml import NvmlClient, binding_file
from agent.sampling.nvml_report import ProbeReport
from agent.sampling.nvml_states import ProbeState
from agent.sampling.reader import HostReader
from agent.settings.load import SamplingSettings
from agent.settings.tuning import PressureTuning
from tests.bench.report import Figure, against, emit
from tests.support.fake_nvml import FakeDriver

GPUS: Final = (0, 2, 8)
GATED: Final = 2
SAMPLING_CPU_PCT, HOST_THREAD_CPU_PCT, PROBE_USS_MIB, TICK_P99_MS = 0.5, 0.2, 10.0, 2.0
SETTLE_S: Final = 2.0
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


class Stepped:
    """Awaits a coroutine and keeps how long each of its steps held the loop, in milliseconds."""

    def __init__(self, inner: Coroutine[Any, Any, None]) -> None:
        self._inner = inner
        self.held_ms: list[float] = []

    def __await__(self) -> Generator[Any, Any, None]:
        step: Callable[[], Any] = partial(self._inner.send, None)
        while True:
            began = time.perf_counter()
            try:
                wanted = step()
            except StopIteration:
                return
            finally:
                self.held_ms.append(1_000 * (time.perf_counter() - began))
            try:
                step = partial(self._inner.send, (yield wanted))
            except BaseException as error:
                step = partial(self._inner.throw, error)


class Remembering(Histogram):
    """A histogram that keeps every time of the op ``fast``, in microseconds."""

    def __init__(self) -> None:
        super().__init__("pairmesh_probe_op_seconds", "Times.", ("op",))
        self.fast_us: list[float] = []

    def observe(self, value: int | float, *labels: str) -> None:
        super().observe(value, *labels)
        if labels == ("fast",):
            self.fast_us.append(1e6 * value)


def cpu_s(pid: int | None) -> float:
    """CPU seconds of a process so far; 0 without one."""
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def uss_mib(pid: int) -> float:
    """Memory that only this process has."""
    rows = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines())
    return sum(int(row[1]) for row in rows if row[0] in ("Private_Clean:", "Private_Dirty:")) / 1_024


async def measure(gpus: int, seconds: float, folder: Path) -> list[Figure]:
    """One node's sampling for ``seconds`` with ``gpus`` fake GPUs."""
    clock = SystemClock()
    report = ProbeReport(Log(lambda line: None, clock), binding_file())
    report.seconds = times = Remembering()
    source, search = None, ""
    if gpus:
        fake = FakeDriver(folder, script="\n".join(f"gpu {n} util=50" for n in range(gpus)))
        search = fake.environ["LD_LIBRARY_PATH"]
        source = NvmlClient(
            clock=clock, rng=Random(1), folder=folder, environ=fake.environ, binding=binding_file(), report=report,
            failed=_raise,
        )  # fmt: skip
    reader = HostReader(Roots(), clock.boot_ms, library_path=search)
    thread_ms: list[float] = []

    def read(tick: Tick) -> HostAnswer:
        began = time.thread_time()
        answer = reader.read(tick)
        thread_ms.append(1_000 * (time.thread_time() - began))
        return answer

    ports = SamplerPorts(
        read=read,
        work=lambda: OwnWork(units=("llama-server.service",)),
        on_sampled=lambda sampled, urgent: None,
        on_notify=lambda note: None,
        on_failed=lambda error: _raise("host", error),
    )
    settings = SamplingSettings(profile="server", nvml="auto", pressure=PressureTuning())
    stepped = Stepped(Sampler(settings, clock, ports, gpus=source).run())
    task = asyncio.create_task(_awaited(stepped))
    await asyncio.sleep(SETTLE_S)
    if source is not None and source.state is not ProbeState.READY:
        raise RuntimeError(f"the fake driver is {source.state.value}, not ready")
    for kept in (thread_ms, stepped.held_ms, times.fast_us):
        kept.clear()
    pid = source.pid if source is not None else None
    own, beside, began = time.process_time(), cpu_s(pid), time.monotonic()
    rss_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    await asyncio.sleep(seconds)
    span = time.monotonic() - began
    daemon_pct, probe_pct = 100 * (time.process_time() - own) / span, 100 * (cpu_s(pid) - beside) / span
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - rss_kib
    figures = [
        Figure(f"sampling.daemon_cpu_pct.g{gpus}", daemon_pct, "%"),
        _held(gpus, "cpu_pct", daemon_pct + probe_pct, "%", SAMPLING_CPU_PCT),
        _held(gpus, "host_thread_cpu_pct", sum(thread_ms) / 10 / span, "%", HOST_THREAD_CPU_PCT),
        Figure(f"sampling.host_read_p50_ms.g{gpus}", statistics.median(thread_ms), "ms"),
        _held(gpus, "loop_hold_p99_ms", _p99(stepped.held_ms), "ms", TICK_P99_MS),
        Figure(f"sampling.rss_growth_mib.g{gpus}", grown_kib / 1_024, "MiB"),
    ]
    if pid is not None:
        figures += [
            Figure(f"sampling.probe_cpu_pct.g{gpus}", probe_pct, "%"),
            _held(gpus, "probe_uss_mib", uss_mib(pid), "MiB", PROBE_USS_MIB),
            Figure(f"sampling.fast_op_p50_us.g{gpus}", statistics.median(times.fast_us), "us"),
            Figure(f"sampling.fast_op_p99_us.g{gpus}", _p99(times.fast_us), "us"),
        ]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return figures


async def _awaited(stepped: Stepped) -> None:
    await stepped


def _raise(name: str, error: BaseException) -> None:
    raise RuntimeError(f"{name} failed") from error


def _held(gpus: int, name: str, value: float, unit: str, limit: float) -> Figure:
    full = f"sampling.{name}.g{gpus}"
    return against(full, value, unit, limit) if gpus == GATED else Figure(full, value, unit)


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--seconds", type=float, default=15.0, help="span of each of the three measurements")
    asked = parser.parse_args(argv)
    counts = GPUS if shutil.which("cc") else GPUS[:1]
    if len(counts) == 1:
        print(
            "no C compiler: the fake driver library cannot be built, only 0 GPUs are measured",
            file=sys.stderr,
        )
    figures: list[Figure] = []
    for gpus in counts:
        with tempfile.TemporaryDirectory() as folder:
            figures += asyncio.run(measure(gpus, asked.seconds, Path(folder)))
    emit(figures, asked.json)


if __name__ == "__main__":
    main()
