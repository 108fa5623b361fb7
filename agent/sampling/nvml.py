"""The daemon's side of the process that talks to the NVIDIA driver: starts it, asks it, ends it, on the loop.

When to do so is the supervisor's decision (``nvml_states``), what replies mean the book's (``nvml_gpus``). No call
here waits: questions are written and forgotten, answers come as lines. The process inherits nothing but the library
search path, and dies with this one.
"""

import asyncio
import mmap
import os
import struct
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Final

from agent.effects.clock import Clock
from agent.effects.tasks import Tasks
from agent.sampling import nvml_states as states
from agent.sampling.driver import DriverSeen
from agent.sampling.nvml_gpus import GpuBook
from agent.sampling.nvml_report import ProbeReport
from agent.sampling.nvml_states import MISMATCH, Absence, ProbeState, ProbeTimes, Supervisor
from agent.sampling.nvml_wire import LINE_MOST, NvmlReply, decode_reply, encode_request
from router_core.errors import RemoteFault
from router_core.pressure.samples import GpuSample, HostSample
from router_core.record.state import GpuState

PROBE: Final = Path(__file__).with_name("nvml_probe.py")
PROTOCOL: Final = 1
PROGRESS_BYTES: Final = 64
PROGRESS: Final = struct.Struct("<4sIIIQQ")
NOBODY: Final = 2**32 - 1
INHERITED: Final = ("LD_LIBRARY_PATH", "PAIRMESH_FAKE_NVML", "PAIRMESH_FAKE_NVML_COUNTERS")


THE_LINKERS: Final = ""
"""Stands for the library that the linker finds by itself."""
TRIED_MOST: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One library and how its start ended: ``path`` is None if the linker found none, ``code`` the driver's, None if
    its process ended or hung instead."""

    path: str | None
    code: int | None


class Libraries:
    """Which library to try next: what worked last, then the linker's, then all others, each file once a round."""

    def __init__(self) -> None:
        self._found: tuple[str, ...] = ()
        self._worked: str | None = None
        self._left: list[str] = []
        self._trying: str | None = None
        self._tried: dict[str | None, int | None] = {}

    @property
    def tried(self) -> tuple[Tried, ...]:
        """What the last round came to, so far."""
        return tuple(Tried(path=path, code=code) for path, code in self._tried.items())

    @property
    def more(self) -> bool:
        """Whether there is one that this round has not tried."""
        return bool(self._left)

    def found(self, libraries: tuple[str, ...]) -> None:
        """These lie in their usual places now."""
        self._found = libraries[: TRIED_MOST - 1]

    def next(self) -> str:
        """The one to try; a round begins when every one had its turn."""
        if not self._left:
            worked = () if self._worked is None else (self._worked,)
            self._left = list(dict.fromkeys((*worked, THE_LINKERS, *self._found)))
            self._tried = {}
        self._trying = self._left.pop(0)
        return self._trying

    def answered(self, path: str | None, code: int) -> None:
        """The one being tried was loaded from ``path`` and began with ``code``."""
        path = path or self._trying or None
        self._tried[path] = code
        self._trying = None
        if path is not None:
            self._left = [each for each in self._left if each != path]
        if code == 0:
            self._worked, self._left = path, []

    def ended(self) -> None:
        """The process ended; if it had not answered, its library is to blame."""
        if self._trying is not None:
            self._tried[self._trying or None] = None
            self._trying = None


def binding_file() -> str:
    """The file that ``import pynvml`` would load; empty if there is none."""
    spec = find_spec("pynvml")
    return (spec.origin or "") if spec is not None else ""


class NvmlClient:
    """A ``GpuSource``. All calls are made on the loop; ``failed`` hears of a task of ours that raised."""

    def __init__(
        self,
        *,
        clock: Clock,
        rng: Random,
        folder: Path,
        environ: Mapping[str, str],
        binding: str,
        report: ProbeReport,
        failed: Callable[[str, BaseException], None],
        times: ProbeTimes | None = None,
        command: tuple[str, ...] = (sys.executable, "-I", "-S", str(PROBE)),
    ) -> None:
        self._clock = clock
        self._progress_path = folder / f"nvml-progress-{os.getpid()}"
        self._environ = {name: environ[name] for name in INHERITED if name in environ}
        self._binding = binding
        self._report = report
        self._command = command
        self._times = times or ProbeTimes()
        self._states = Supervisor(rng, self._times)
        self._book = GpuBook(
            count=lambda code: report.errors.inc(str(code)), lost=report.lost, back=report.back
        )
        self._tasks = Tasks(failed)
        self._driver: DriverSeen | None = None
        self._libraries = Libraries()
        self._process: Process | None = None
        self._progress: mmap.mmap | None = None
        self._symbols: tuple[str, ...] = ()
        self._versions: dict[str, str] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._number = 0
        self._op: str | None = None
        self._when_answered: Callable[[], None] = _nobody
        self._ended = asyncio.Event()
        self.library: str | None = None

    # --- what the sampler sees --------------------------------------------------------------------------------

    @property
    def state(self) -> ProbeState:
        return self._states.state

    @property
    def pid(self) -> int | None:
        """The process in use, if there is one."""
        return None if self._process is None else self._process.pid

    @property
    def outstanding(self) -> bool:
        return self._op in ("fast", "list")

    @property
    def expected(self) -> bool:
        if self.state is ProbeState.READY and self._book.empty:
            return False
        return self._driver is not None and self._driver.present and self._driver.loaded is not None

    @property
    def degraded(self) -> bool:
        machine = self._states
        if machine.state in (ProbeState.HUNG, ProbeState.UNDEAD) or machine.cause is Absence.DENIED:
            return True
        absent = machine.state in (ProbeState.BACKOFF, ProbeState.STARTING, ProbeState.STOPPING)
        return absent and machine.served and machine.cause is not Absence.RECYCLE

    @property
    def reboot_pending(self) -> bool:
        pending = self._driver is not None and self._driver.reboot_pending
        return pending or self._states.code == MISMATCH

    def driver_seen(self, driver: DriverSeen) -> None:
        before, self._driver = self._driver, driver
        self._libraries.found(driver.libraries)
        changed = before is not None and driver.differs(before)
        if changed and self._book.empty:
            # NVML counts the devices once, when it begins.
            self._happened(states.Unwanted(Absence.RECYCLE))
        self._happened(states.HardwareSeen(driver.present, changed))

    def ask(self, answered: Callable[[], None]) -> None:
        now = self._clock.boot_ms()
        if self.state is not ProbeState.READY or self._op is not None:
            return
        if self._book.list_due(now):
            self._when_answered = answered
            self._send("list", self._times.list_ms)
        elif wanted := self._book.wanted:
            self._when_answered = answered
            self._send("fast", self._times.fast_ms, uuids=wanted)

    def samples(self, host: HostSample | None) -> tuple[GpuSample, ...]:
        return self._book.samples(self._absence(), host)

    async def aclose(self) -> None:
        """End the process, with patience; it is left behind if it cannot die."""
        self._happened(states.EndRequested())
        await self._ended.wait()
        if self._timer is not None:
            self._timer.cancel()
        await self._tasks.aclose()
        self._forget_progress()

    def _absence(self) -> GpuState | None:
        machine = self._states
        if machine.state is ProbeState.READY:
            return None
        if machine.state in (ProbeState.HUNG, ProbeState.UNDEAD):
            return GpuState.UNRESPONSIVE
        return GpuState.DENIED if machine.cause is Absence.DENIED else GpuState.UNKNOWN

    @property
    def driver(self) -> DriverSeen | None:
        """What the host thread saw last of the driver."""
        return self._driver

    @property
    def tried(self) -> tuple[Tried, ...]:
        """The libraries of the last start and how each answered."""
        return self._libraries.tried

    @property
    def versions(self) -> dict[str, str]:
        """The versions that the library told, of driver, library and CUDA."""
        return self._versions

    def unread(self) -> dict[str, tuple[str, ...]]:
        """By GPU key, the fields that it does not tell."""
        return self._book.unread()

    # --- the driver of the machine ----------------------------------------------------------------------------

    def _happened(self, event: states.Event) -> None:
        now = self._clock.boot_ms()
        for action in self._states.handle(event, now):
            self._perform(action, now)
        self._arm(now)

    def _arm(self, now: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._states.deadline is not None:
            wait_s = max(0, self._states.deadline - now) / 1_000
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._happened, states.WaitPassed())

    def _perform(self, action: states.Action, now: int) -> None:
        match action:
            case states.Start():
                self._tasks.spawn(self._live(), "gpu probe")
            case states.Quit():
                self._write(encode_request(self._number + 1, "quit"))
            case states.Terminate():
                self._signal("terminate")
            case states.Kill():
                self._signal("kill")
            case states.StateChanged():
                if action.state is ProbeState.ENDED:
                    self._ended.set()
                self._report.changed(action, self._culprit(), now)

    def _signal(self, name: str) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                getattr(self._process, name)()

    def _send(self, op: str, within_ms: int | None, **arguments: object) -> None:
        self._number += 1
        self._op = op
        self._write(encode_request(self._number, op, **arguments))
        if within_ms is not None:
            self._happened(states.QuestionSent(within_ms))

    def _write(self, line: bytes) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError, RuntimeError):
                self._process.stdin.write(line)

    # --- one process ------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        """The life of one process, from its start until it is reaped."""
        library = self._libraries.next()
        try:
            self._map_progress()
            process = await asyncio.create_subprocess_exec(
                *self._command,
                *("--parent", str(os.getpid())),
                *("--nvml", self._binding),
                *("--library", library),
                *("--progress", str(self._progress_path)),
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                limit=LINE_MOST,
                env=self._environ | {"LANG": "C.UTF-8"},
            )
        except OSError as error:
            self._report.protocol_fault(type(error).__name__)
            self._gone()
            return
        self._process = process
        if self.state is not ProbeState.STARTING:
            process.terminate()
        self._tasks.spawn(self._hear(process), "gpu probe stderr")
        self._send("hello", None, v=PROTOCOL, skip=[])
        try:
            await self._listen(process)
            await process.wait()
        finally:
            self._process = None
        self._gone()

    def _gone(self) -> None:
        self._op = None
        self._tell_answered()
        self._libraries.ended()
        self._happened(states.Exited(self._libraries.more))
        self._forget_progress()

    async def _listen(self, process: Process) -> None:
        """Take replies until the end of the stream; after a fault what still comes is thrown away."""
        stream = process.stdout
        assert stream is not None
        try:
            while line := await stream.readline():
                if self.state is not ProbeState.STOPPING:
                    self._received(decode_reply(line, self._number))
        except (RemoteFault, ValueError) as fault:
            self._report.protocol_fault(str(fault) if isinstance(fault, RemoteFault) else "long line")
            self._happened(states.Unwanted(Absence.CRASH))
            while await stream.read(LINE_MOST):
                pass

    async def _hear(self, process: Process) -> None:
        stream = process.stderr
        assert stream is not None
        while chunk := await stream.read(4_096):
            for line in chunk.splitlines():
                self._report.said(line, self._clock.boot_ms())

    def _received(self, reply: NvmlReply) -> None:
        op, self._op = self._op, None
        if op is None:
            raise RemoteFault(f"reply {reply.id} twice")
        now = self._clock.boot_ms()
        self._report.seconds.observe(reply.dt_us / 1_000_000, op)
        if op == "hello":
            self._greeted(reply, now)
            return
        self._happened(states.ReplyReceived())
        if not reply.ok:
            self._report.errors.inc(str(reply.e))
            self._happened(states.Unwanted(Absence.INIT))
        elif op == "list":
            self._book.listed(reply, now)
        else:
            self._book.read(reply, now)
            if self._book.verdict is not None:
                self._happened(states.Unwanted(self._book.verdict))
        self._tell_answered()

    def _greeted(self, reply: NvmlReply, now: int) -> None:
        if reply.ok and reply.v != PROTOCOL:
            raise RemoteFault(f"protocol {reply.v}, {PROTOCOL} wanted")
        self._libraries.answered(reply.lib, 0 if reply.ok else reply.e)
        if reply.ok:
            self.library = reply.lib
            self._symbols = tuple(reply.symbols)
            self._versions = {
                name: version for name, version in reply.versions.items() if isinstance(version, str)
            }
            self._book.listed(reply, now)
            self._progress_path.unlink(missing_ok=True)
        else:
            self._report.errors.inc(str(reply.e))
        self._happened(states.HelloAnswered(0 if reply.ok else reply.e))

    def _tell_answered(self) -> None:
        answered, self._when_answered = self._when_answered, _nobody
        answered()

    # --- the file that names the culprit ----------------------------------------------------------------------

    def _map_progress(self) -> None:
        self._forget_progress()
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self._progress_path, flags, 0o600)
        try:
            os.ftruncate(fd, PROGRESS_BYTES)
            self._progress = mmap.mmap(fd, PROGRESS_BYTES)
        finally:
            os.close(fd)

    def _forget_progress(self) -> None:
        self._progress_path.unlink(missing_ok=True)
        if self._progress is not None:
            self._progress.close()
            self._progress = None

    def _culprit(self) -> dict[str, object]:
        """The call at work when the process was last heard of, in the words of a log line."""
        if self._progress is None:
            return {}
        magic, gpu, symbol, in_call, calls, _ = PROGRESS.unpack_from(self._progress)
        if magic != b"PMP1" or not in_call:
            return {}
        named = self._symbols[symbol] if symbol < len(self._symbols) else symbol
        return {"call": named, "calls": calls} | ({} if gpu == NOBODY else {"index": gpu})


def _nobody() -> None:
    """Nobody waits for the answer."""
