"""Tries the process that reads NVIDIA GPUs on this host: what its calls cost, idle and under load, and whether it can
be stopped, continued and ended.

Needs the standard library and ``pynvml``. Load comes from child processes that fill video memory through the CUDA
driver. Exit status 1 if a rule is not met; a step that cannot be tried says why and breaks no rule.
"""

import argparse
import ctypes
import importlib.util
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

PROBE = Path(__file__).resolve().parents[1] / "agent" / "sampling" / "nvml_probe.py"
STARTS, IDLE_READS, LOAD_READS, LOADERS = 3, 500, 300, 4
HELLO_S, FAST_P99_MS, UTIL_LEAST_PCT, END_S = 20.0, 50.0, 50, 2.0
LOAD_BYTES = 256 * 1024 * 1024
WARM_UP_S, STOPPED_S = 3.0, 1.0


class Unable(Exception):
    """A step cannot be tried here, for the reason it says."""


class Probe:
    """One reading process, talked to in its own lines."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("pynvml")
        if spec is None or spec.origin is None:
            raise Unable("pynvml is not installed: pip install nvidia-ml-py")
        with tempfile.NamedTemporaryFile(prefix="gpu-check-", delete=False) as progress:
            progress.write(bytes(64))
        self._progress = Path(progress.name)
        words = ("--parent", str(os.getpid()), "--nvml", spec.origin, "--progress", progress.name)
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(PROBE), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._number = 0
        self._rest = b""

    def send(self, op: str, **arguments: Any) -> None:
        self._number += 1
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"id": self._number, "op": op, **arguments}).encode() + b"\n")

    def receive(self, within_s: float) -> dict[str, Any] | None:
        """The next reply; None if there is none in time."""
        assert self.process.stdout is not None
        until = time.monotonic() + within_s
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, until - time.monotonic()))
            chunk = os.read(self.process.stdout.fileno(), 65_536) if ready else b""
            if not chunk:
                return None
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def ask(self, op: str, within_s: float, **arguments: Any) -> dict[str, Any]:
        self.send(op, **arguments)
        reply = self.receive(within_s)
        if reply is None:
            raise Unable(f"{op}: no answer within {within_s:g} s")
        if not reply["ok"]:
            raise Unable(f"{op}: the driver answers {reply['e']} to {reply['where']}")
        return reply

    def end(self) -> float:
        """Terminate; seconds until it had ended."""
        began = time.monotonic()
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self._progress.unlink(missing_ok=True)
        return time.monotonic() - began


@dataclass
class Report:
    """What was found, and which rules were broken."""

    steps: dict[str, Any] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def note(self, step: str, **found: Any) -> None:
        self.steps[step] = found
        print(step + ": " + ", ".join(f"{name} {_shown(value)}" for name, value in found.items()))

    def demand(self, rule: str, met: bool) -> None:
        if not met:
            self.broken.append(rule)
            print(f"BROKEN: {rule}")


def starts(report: Report) -> None:
    """Start, greet and end the process a few times."""
    hello_s, init_ms, ended_s = [], [], []
    reply: dict[str, Any] = {}
    for _ in range(STARTS):
        began = time.monotonic()
        probe = Probe()
        try:
            reply = probe.ask("hello", HELLO_S, v=1, skip=[])
        finally:
            ended_s.append(probe.end())
        hello_s.append(time.monotonic() - began - ended_s[-1])
        init_ms.append(reply["init_ms"])
    gpus = [fields["name"] for fields in reply["gpu"].values()]
    missing = sorted(name for name, there in reply["symbols"].items() if not there)
    report.note(
        "starts", gpus=gpus, versions=reply["versions"], init_ms=init_ms, hello_s=hello_s, end_s=ended_s,
        rss_kib=reply["rss_kib"], missing=missing,
    )  # fmt: skip
    report.demand(f"hello within {HELLO_S:g} s", max(hello_s) < HELLO_S)
    report.demand(f"ended within {END_S:g} s", max(ended_s) < END_S)


def reads(report: Report, step: str, times: int, *, loaded: bool, until: float) -> None:
    """Read all GPUs ``times`` times, or until time is up."""
    probe = Probe()
    loaders: list[subprocess.Popen[bytes]] = []
    try:
        while loaded and len(loaders) < LOADERS:
            loaders.append(_loader())
        uuids = list(probe.ask("hello", HELLO_S, v=1, skip=[])["gpu"])
        if loaded:
            time.sleep(WARM_UP_S)
            if any(loader.poll() is not None for loader in loaders):
                raise Unable("the load on the GPU did not start")
        took_ms: list[float] = []
        replies: list[dict[str, Any]] = []
        while len(took_ms) < times and time.monotonic() < until:
            reply = probe.ask("fast", 5.0, uuids=uuids)
            took_ms.append(reply["dt_us"] / 1_000)
            replies.append(reply["gpu"])
        if not took_ms:
            raise Unable("no time left")
    finally:
        for loader in loaders:
            loader.kill()
            loader.wait()
        probe.end()
    util = [fields["util"] for gpus in replies for fields in gpus.values() if isinstance(fields["util"], int)]
    odd = [
        fields for fields in replies[-1].values() if any(isinstance(value, dict) for value in fields.values())
    ]
    p99 = sorted(took_ms)[int(0.99 * (len(took_ms) - 1))]
    report.note(
        step, reads=len(took_ms), p50_ms=statistics.median(took_ms), p99_ms=p99, max_ms=max(took_ms),
        util_max=max(util, default=None), fields_refused=odd,
    )  # fmt: skip
    if loaded:
        report.demand(
            f"use of at least {UTIL_LEAST_PCT} % under load", max(util, default=0) >= UTIL_LEAST_PCT
        )
        report.demand(f"99 of 100 reads within {FAST_P99_MS:g} ms under load", p99 < FAST_P99_MS)


def stopped(report: Report) -> None:
    """Stop the process in the middle, continue it, and see that its late answer comes."""
    probe = Probe()
    try:
        uuids = list(probe.ask("hello", HELLO_S, v=1, skip=[])["gpu"])
        probe.process.send_signal(signal.SIGSTOP)
        probe.send("fast", uuids=uuids)
        silent = probe.receive(STOPPED_S) is None
        probe.process.send_signal(signal.SIGCONT)
        late = probe.receive(5.0)
    finally:
        probe.process.send_signal(signal.SIGCONT)
        probe.end()
    report.note("stopped", silent=silent, late_answer=late is not None)
    report.demand("a stopped process is silent and answers late", silent and late is not None)


def _loader() -> "subprocess.Popen[bytes]":
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Unable(f"no CUDA driver to make load with: {error}") from None
    return subprocess.Popen(
        [sys.executable, __file__, "--loader"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def load_for_ever() -> None:
    """Fill 256 MiB of video memory again and again; exit status 3 if the CUDA driver refuses."""
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    for call, *arguments in (
        ("cuInit", ctypes.c_uint(0)),
        ("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0)),
        ("cuDevicePrimaryCtxRetain", ctypes.byref(context), device),
        ("cuCtxSetCurrent", context),
        ("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(LOAD_BYTES)),
    ):
        if getattr(cuda, call)(*arguments):
            sys.exit(3)
    while cuda.cuMemsetD32_v2(memory, ctypes.c_uint(7), ctypes.c_size_t(LOAD_BYTES // 4)) == 0:
        cuda.cuCtxSynchronize()
    sys.exit(3)


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else json.dumps(value)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=180.0, help="time for all steps together")
    parser.add_argument("--json", type=Path, help="write what was found to this file")
    parser.add_argument("--loader", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if asked.loader:
        load_for_ever()
    until = time.monotonic() + asked.seconds
    report = Report()
    steps: dict[str, Callable[[], None]] = {
        "starts": partial(starts, report),
        "idle": partial(reads, report, "idle", IDLE_READS, loaded=False, until=until),
        "load": partial(reads, report, "load", LOAD_READS, loaded=True, until=until),
        "stopped": partial(stopped, report),
    }
    for name, step in steps.items():
        try:
            step()
        except Unable as why:
            report.steps[name] = {"unable": str(why)}
            print(f"{name}: cannot be tried: {why}")
    if asked.json is not None:
        asked.json.write_text(json.dumps({"steps": report.steps, "broken": report.broken}, indent=1) + "\n")
    return 1 if report.broken else 0


if __name__ == "__main__":
    sys.exit(main())
