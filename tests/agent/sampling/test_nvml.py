"""The driver's process through the real binding, against a fake library: what happens to drivers in real life."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agent.effects.clock import SystemClock
from agent.observe.log import Log
from agent.sampling.driver import LIBRARY, Card, DriverSeen
from agent.sampling.nvml import PROBE, NvmlClient, binding_file
from agent.sampling.nvml_report import ProbeReport
from agent.sampling.nvml_states import ProbeState, ProbeTimes
from router_core.policy.pressure import MIB
from router_core.pressure.samples import GpuSample, ReadingStatus
from router_core.record.state import GpuState
from tests.support.fake_nvml import FakeDriver, build
from tests.support.until import until

SEEN = DriverSeen(present=True, loaded="550.54.14")
SHORT = ProbeTimes(
    hello_ms=5_000, fast_ms=500, list_ms=500, hung_ms=1_500, quit_ms=300, grace_ms=300, grace_hung_ms=300, kill_ms=500, end_grace_ms=400,
    end_ms=700, crash_ms=(50, 400), hang_ms=(50, 400), init_ms=(50, 400), binding_ms=(50, 400),
)  # fmt: skip


def seen_with(**changes: Any) -> DriverSeen:
    return replace(SEEN, **changes)


TWO = "gpu 0 util=10\ngpu 1 util=20"


class Desk:
    """A client with its fake driver, and what it said."""

    def __init__(
        self, folder: Path, *, binding: str | None = None, fake: FakeDriver | None = None, **over: Any
    ) -> None:
        self.folder = folder
        self.lines: list[dict[str, Any]] = []
        self.failures: list[BaseException] = []
        self.states: list[ProbeState] = []
        self.answers = 0
        binding = binding_file() if binding is None else binding
        clock = SystemClock()
        log = Log(lambda line: self.lines.append(json.loads(line)), clock)
        fields: dict[str, Any] = {
            "clock": clock,
            "rng": Random(1),
            "folder": folder,
            "environ": {} if fake is None else fake.environ,
            "binding": binding,
            "report": ProbeReport(log, binding),
            "failed": lambda name, error: self.failures.append(error),
            "times": SHORT,
        }
        self.client = NvmlClient(**(fields | over))

    def ask(self) -> None:
        def answered() -> None:
            self.answers += 1

        if not self.states or self.states[-1] is not self.client.state:
            self.states.append(self.client.state)
        self.client.ask(answered)

    async def reach(self, what: Callable[[], object], within_s: float = 10.0) -> None:
        """Tick until ``what`` is so."""

        def tried() -> bool:
            self.ask()
            return bool(what())

        await until(tried, within_s, picture=lambda: (self.client.state, self.samples(), self.lines[-3:]))

    async def reach_state(self, state: ProbeState) -> None:
        await self.reach(lambda: self.client.state is state)

    def samples(self) -> tuple[GpuSample, ...]:
        return self.client.samples(None)

    def gpu_states(self) -> list[GpuState]:
        return [sample.state for sample in self.samples()]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == f"sampling.{name}"]


@asynccontextmanager
async def running(desk: Desk, seen: DriverSeen = SEEN) -> AsyncIterator[Desk]:
    desk.client.driver_seen(seen)
    try:
        yield desk
    finally:
        pid = desk.client.pid
        await desk.client.aclose()
        assert desk.client.state is ProbeState.ENDED
        assert not list(desk.folder.glob("nvml-progress-*"))
        if pid is not None:
            await until(lambda: not Path(f"/proc/{pid}/stat").exists(), picture=lambda: pid)
        assert desk.failures == []


@pytest.fixture
def fake(tmp_path: Path) -> FakeDriver:
    return FakeDriver(tmp_path, script=TWO)


async def test_identity_memory_and_use_come_through_the_real_binding(
    tmp_path: Path, fake: FakeDriver
) -> None:
    fake.write(
        "gpu 0 name=NVIDIA_H200 uuid=GPU-7 util=37 total=1000 reserved=100 used=300 cc=90 buswidth=6144 memclk=3201"
    )
    async with running(Desk(tmp_path, fake=fake)) as desk:
        await desk.reach(lambda: desk.answers)
        (sample,) = desk.samples()
        assert (sample.util_pct.value, sample.vram_free_bytes.value) == (37, 600 * MIB)
        gpu = sample.identity
        assert (gpu.name, gpu.cc10, gpu.vram_total_bytes) == ("NVIDIA H200", 90, 1_000 * MIB)
        assert gpu.mem_bw_gbs == 2 * 3_201 * 6_144 // 8_000
        assert desk.client.library == str(fake.library / "libnvidia-ml.so.1")
        fake.write("gpu 0 uuid=GPU-7 util=93 total=1000 used=900")
        await desk.reach(lambda: desk.samples()[0].util_pct.value == 93)
    calls = fake.calls()
    assert (calls["nvmlInitWithFlags"], calls["nvmlShutdown"]) == (1, 1)
    assert "nvmlDeviceGetComputeRunningProcesses_v3" not in calls


async def test_a_host_without_driver_starts_nothing_and_says_nothing(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    for _ in range(3):
        desk.client.driver_seen(DriverSeen(present=False))
        desk.ask()
    assert (desk.client.state, desk.client.pid, desk.lines, desk.samples()) == (ProbeState.OFF, None, [], ())
    assert {desk.client.expected, desk.client.degraded, desk.client.outstanding} == {False}
    await desk.client.aclose()


async def test_a_card_without_a_library_is_tried_again_and_used_once_the_driver_is_there(
    tmp_path: Path,
) -> None:
    library = tmp_path / "lib"
    environ = {"LD_LIBRARY_PATH": str(library), "PAIRMESH_FAKE_NVML": str(tmp_path / "script")}
    async with running(Desk(tmp_path, environ=environ)) as desk:
        await desk.reach(lambda: desk.events("probe_refused"))
        assert desk.events("probe_refused")[0]["code"] == 12
        assert (desk.client.degraded, desk.samples()) == (False, ())
        FakeDriver(tmp_path, script=TWO)
        await desk.reach(lambda: len(desk.samples()) == 2)
        assert len(desk.events("probe_refused")) == 1


async def test_a_library_and_a_driver_that_differ_ask_for_a_reboot_until_they_match(
    tmp_path: Path, fake: FakeDriver
) -> None:
    fake.write(TWO + "\nfail nvmlInitWithFlags rc=18")
    async with running(Desk(tmp_path, fake=fake)) as desk:
        await desk.reach(lambda: desk.events("reboot_pending"))
        assert desk.client.reboot_pending
        fake.write(TWO)
        await desk.reach_state(ProbeState.READY)
        assert not desk.client.reboot_pending


async def test_a_stub_that_refuses_never_hides_the_library_that_works(tmp_path: Path) -> None:
    stub = FakeDriver(tmp_path / "stub", "STUB", script=TWO)
    real = build(tmp_path / "real")
    cure = seen_with(libraries=(str(tmp_path / "gone.so"), str(real / LIBRARY)))
    async with running(Desk(tmp_path, fake=stub), cure) as desk:
        await desk.reach(lambda: len(desk.samples()) == 2)
        assert desk.client.library == str(real / LIBRARY)
        assert [(tried.path, tried.code) for tried in desk.client.tried] == [
            (str(stub.library / LIBRARY), 9),
            (str(tmp_path / "gone.so"), 12),
            (str(real / LIBRARY), 0),
        ]
        assert desk.events("probe_refused") == []
        os.kill(desk.client.pid or 0, signal.SIGKILL)
        await desk.reach(lambda: desk.states[-2:] == [ProbeState.BACKOFF, ProbeState.STARTING])
        await desk.reach_state(ProbeState.READY)
        assert [tried.code for tried in desk.client.tried] == [0], "what worked comes first"


async def test_a_library_that_ends_the_process_is_told_and_the_next_one_is_used(tmp_path: Path) -> None:
    stub = FakeDriver(tmp_path / "stub", "BROKEN", script=TWO)
    real = build(tmp_path / "real")
    async with running(Desk(tmp_path, fake=stub), seen_with(libraries=(str(real / LIBRARY),))) as desk:
        await desk.reach_state(ProbeState.READY)
        assert [tried.code for tried in desk.client.tried] == [None, 0]


async def test_a_card_that_a_virtual_machine_has_starts_nothing_and_is_used_once_it_is_back(
    tmp_path: Path, fake: FakeDriver
) -> None:
    desk = Desk(tmp_path, fake=fake)
    desk.client.driver_seen(seen_with(present=False, cards=(Card(bus_id="a", driver="vfio-pci"),)))
    desk.ask()
    assert (desk.client.state, desk.client.expected, fake.calls()) == (ProbeState.OFF, False, {})
    async with running(desk):
        await desk.reach(lambda: len(desk.samples()) == 2)


async def test_a_library_without_cards_is_begun_anew_when_one_comes(tmp_path: Path, fake: FakeDriver) -> None:
    fake.write("count 0")
    async with running(Desk(tmp_path, fake=fake)) as desk:
        await desk.reach_state(ProbeState.READY)
        fake.write(TWO)
        desk.client.driver_seen(seen_with(nodes=("nvidia0",)))
        await desk.reach(lambda: len(desk.samples()) == 2)


@pytest.mark.parametrize("version", ["nvmlDeviceGetMemoryInfo_v2"])
@pytest.mark.parametrize("code", [3, 999])
async def test_memory_that_only_the_older_call_tells_is_read(
    tmp_path: Path, fake: FakeDriver, version: str, code: int
) -> None:
    fake.write(f"gpu 0 total=1000 reserved=100 used=0\nfail {version} rc={code}")
    async with running(Desk(tmp_path, fake=fake)) as desk:
        await desk.reach(lambda: desk.answers)
        assert desk.samples()[0].vram_free_bytes.value == 900 * MIB


async def test_a_shadowed_binding_is_named_once_and_the_node_goes_on(
    tmp_path: Path, fake: FakeDriver
) -> None:
    shadow = tmp_path / "pynvml.py"
    shadow.write_text("nvmlInit = None\n")
    async with running(Desk(tmp_path, fake=fake, binding=str(shadow))) as desk:
        await desk.reach(lambda: desk.client.state is ProbeState.BACKOFF)
        await desk.reach_state(ProbeState.STARTING)
        await desk.reach_state(ProbeState.BACKOFF)
        (line,) = desk.events("binding_shadowed")
        assert (line["level"], line["found"]) == ("error", str(shadow))
        assert fake.calls() == {}


async def test_a_missing_binding_is_no_crash(tmp_path: Path, fake: FakeDriver) -> None:
    async with running(Desk(tmp_path, fake=fake, binding="")) as desk:
        await desk.reach(lambda: desk.events("binding_shadowed"))


@pytest.mark.parametrize(
    ("variant", "script", "free_mib"),
    [
        ("NO_MEMV2", "gpu 0 total=1000 reserved=100 used=0", 900),
        ("NO_ADDRESSING", "gpu 0 total=1000 reserved=100 used=0", 900),
        ("NO_V3", "gpu 0 total=1000 reserved=100 used=0", 900),
    ],
)
async def test_older_drivers_are_read_by_older_calls(
    tmp_path: Path, variant: str, script: str, free_mib: int
) -> None:
    fake = FakeDriver(tmp_path, variant, script=script)
    async with running(Desk(tmp_path, fake=fake)) as desk:
        await desk.reach(lambda: desk.answers)
        (sample,) = desk.samples()
        assert (sample.vram_free_bytes.value, sample.util_pct.value) == (free_mib * MIB, 0)
        assert sample.state is GpuState.OK


async def test_fields_the_platform_lacks_are_unsupported_and_the_rest_is_fine(
    tmp_path: Path, fake: FakeDriver
) -> None:
    fake.write("gpu 0 util=- cc=- display=- persistence=- buswidth=- memclk=-")
    async with running(Desk(tmp_path, fake=fake)) as desk:
        await desk.reach(lambda: desk.answers)
        (sample,) = desk.samples()
        assert sample.util_pct.status is ReadingStatus.UNSUPPORTED
        assert sample.vram_free_bytes.value is not None
        gpu = sample.identity
        assert (gpu.cc10, gpu.display, gpu.persistence, gpu.mem_bw_gbs) == (None, None, None, None)


async def test_a_gpu_that_falls_off_the_bus_leaves_the_other_alone(tmp_path: Path, fake: FakeDriver) -> None:
    async with running(Desk(tmp_path, fake=fake)) as desk:
        await desk.reach(lambda: desk.answers)
        fake.write(TWO + "\nfail * gpu=1 rc=15")
        await desk.reach(lambda: desk.gpu_states() == [GpuState.OK, GpuState.LOST])
        before = desk.samples()[0].identity.key
        (line,) = desk.events("gpu_lost")
        assert (line["gpu"], line["code"]) == (desk.samples()[1].identity.key, 15)
        fake.write("gpu 0 util=55\ncount 1")
        await desk.reach(lambda: desk.samples()[0].util_pct.value == 55)
        assert desk.samples()[0].identity.key == before
        assert desk.gpu_states() == [GpuState.OK, GpuState.LOST]
        assert desk.client.state is ProbeState.READY
        assert not desk.client.degraded


async def test_a_hung_call_never_holds_up_the_loop_and_costs_one_restart(
    tmp_path: Path, fake: FakeDriver
) -> None:
    async with running(Desk(tmp_path, fake=fake)) as desk:
        await desk.reach(lambda: desk.answers)
        first = desk.client.pid
        fake.write(TWO + "\nslow nvmlDeviceGetUtilizationRates gpu=1 ms=45000")
        await desk.reach_state(ProbeState.HUNG)
        assert desk.gpu_states() == [GpuState.UNRESPONSIVE] * 2
        hung = desk.client.degraded
        (line,) = desk.events("probe_hung")
        assert (line["call"], line["index"]) == ("nvmlDeviceGetUtilizationRates", 1)
        fake.write(TWO)
        await desk.reach(lambda: desk.client.state is ProbeState.READY and desk.client.pid != first)
        await desk.reach(lambda: desk.gpu_states() == [GpuState.OK] * 2)
        assert (hung, desk.client.degraded) == (True, False)
        order = [state for state in desk.states if state in (ProbeState.HUNG, ProbeState.STOPPING)]
        assert order == [ProbeState.HUNG, ProbeState.STOPPING]


async def test_the_daemon_can_end_while_a_call_hangs(tmp_path: Path, fake: FakeDriver) -> None:
    desk = Desk(tmp_path, fake=fake)
    async with running(desk):
        await desk.reach(lambda: desk.answers)
        fake.write(TWO + "\nslow nvmlDeviceGetUtilizationRates ms=45000")
        await desk.reach_state(ProbeState.HUNG)
    assert "nvmlShutdown" not in fake.calls()


async def test_a_late_answer_is_used(tmp_path: Path, fake: FakeDriver) -> None:
    times = ProbeTimes(**{**_fields(SHORT), "hung_ms": 8_000})
    async with running(Desk(tmp_path, fake=fake, times=times)) as desk:
        await desk.reach(lambda: desk.answers)
        pid = desk.client.pid
        fake.write("gpu 0 util=71\ngpu 1\nslow nvmlDeviceGetMemoryInfo_v2 gpu=0 ms=900 times=1")
        await desk.reach_state(ProbeState.HUNG)
        await desk.reach_state(ProbeState.READY)
        await desk.reach(lambda: desk.samples()[0].util_pct.value == 71)
        assert desk.client.pid == pid


async def test_a_stopped_process_is_continued_or_replaced_and_never_doubled(
    tmp_path: Path, fake: FakeDriver
) -> None:
    times = ProbeTimes(**{**_fields(SHORT), "hung_ms": 8_000})
    async with running(Desk(tmp_path, fake=fake, times=times)) as desk:
        await desk.reach(lambda: desk.answers)
        pid = desk.client.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await desk.reach_state(ProbeState.HUNG)
        os.kill(pid, signal.SIGCONT)
        await desk.reach_state(ProbeState.READY)
        assert desk.client.pid == pid
    impatient = Desk(tmp_path, fake=fake)
    async with running(impatient) as desk:
        await desk.reach(lambda: desk.answers)
        pid = desk.client.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await desk.reach(lambda: desk.client.pid not in (None, pid))
        assert not Path(f"/proc/{pid}").exists(), "the first one is reaped before the second is started"


async def test_a_killed_process_is_started_again(tmp_path: Path, fake: FakeDriver) -> None:
    async with running(Desk(tmp_path, fake=fake)) as desk:
        await desk.reach(lambda: desk.answers)
        pids = {desk.client.pid}
        for _ in range(3):
            pid = desk.client.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await desk.reach(lambda: desk.client.state is ProbeState.READY and desk.client.pid not in pids)
            pids.add(desk.client.pid)
        assert desk.client._report.restarts.value("crash") == 3


async def test_a_crash_of_the_library_costs_one_restart_and_names_the_call(
    tmp_path: Path, fake: FakeDriver
) -> None:
    async with running(Desk(tmp_path, fake=fake)) as desk:
        await desk.reach(lambda: desk.answers)
        fake.write(TWO + "\ncrash nvmlDeviceGetMemoryInfo_v2 gpu=1 how=segv")
        await desk.reach(lambda: desk.events("probe_crashed"))
        line = desk.events("probe_crashed")[0]
        assert (line["call"], line["index"], line["cause"]) == ("nvmlDeviceGetMemoryInfo", 1, "crash")
        fake.write(TWO)
        await desk.reach(lambda: desk.gpu_states() == [GpuState.OK] * 2)


async def test_revoked_access_is_told_with_its_cure_and_restarts_stay_bounded(
    tmp_path: Path, fake: FakeDriver
) -> None:
    async with running(Desk(tmp_path, fake=fake)) as desk:
        await desk.reach(lambda: desk.answers)
        fake.write(
            TWO + "\nfail nvmlDeviceGetUtilizationRates rc=999\nfail nvmlDeviceGetMemoryInfo_v2 rc=999"
        )
        await desk.reach(lambda: GpuState.DENIED in desk.gpu_states())
        await desk.reach(lambda: desk.events("access_revoked"))
        (line,) = desk.events("access_revoked")
        assert "recreate the container" in line["cure"]
        assert desk.client.degraded
        fake.write(TWO)
        await desk.reach(lambda: desk.gpu_states() == [GpuState.OK] * 2)


GARBAGE = {
    "garbage": b"not json\n",
    "a wrong id": b'{"id":7,"ok":true}\n',
    "a wrong type": b'{"id":1,"ok":"yes"}\n',
    "a list": b"[1]\n",
    "a line of 300 KiB": b"x" * 300 * 1024 + b"\n",
    "a deep nest": b"[" * 100_000 + b"\n",
    "another protocol": b'{"id":1,"ok":true,"v":9}\n',
}


@pytest.mark.parametrize("said", list(GARBAGE), ids=str)
async def test_a_process_that_talks_nonsense_is_replaced(tmp_path: Path, said: str) -> None:
    answer = tmp_path / "answer"
    answer.write_bytes(GARBAGE[said])
    program = (
        "import shutil, sys; sys.stdin.readline(); "
        f"shutil.copyfileobj(open({str(answer)!r}, 'rb'), sys.stdout.buffer); sys.stdout.flush(); sys.stdin.read()"
    )
    desk = Desk(tmp_path, command=(sys.executable, "-I", "-S", "-c", program))
    async with running(desk):
        await desk.reach(lambda: desk.client._report.restarts.value("crash"))
        assert desk.events("probe_garbled")
        assert desk.samples() == ()


async def test_a_program_that_cannot_be_started_is_tried_again(tmp_path: Path) -> None:
    desk = Desk(tmp_path, command=(str(tmp_path / "nothing"),))
    async with running(desk):
        await desk.reach(lambda: (desk.client._report.restarts.value("crash") or 0) >= 2)


async def test_a_noisy_library_is_cut_short(tmp_path: Path) -> None:
    program = "import sys; [print('x' * 999, file=sys.stderr) for _ in range(50)]; sys.stderr.flush(); sys.stdin.read()"
    desk = Desk(tmp_path, command=(sys.executable, "-I", "-S", "-c", program))
    async with running(desk):
        await desk.reach(lambda: len(desk.events("probe_said")) >= 5)
        assert len(desk.events("probe_said")) == 5
        assert max(len(line["line"]) for line in desk.events("probe_said")) <= 200


async def test_the_process_ends_when_its_input_does(tmp_path: Path, fake: FakeDriver) -> None:
    progress = tmp_path / "progress"
    progress.write_bytes(bytes(64))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", str(PROBE), "--parent", str(os.getpid()), "--nvml", binding_file(),
        "--progress", str(progress), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=fake.environ,
    )  # fmt: skip
    out, _ = await asyncio.wait_for(process.communicate(b'{"id":1,"op":"hello","v":1}\n'), 10)
    assert process.returncode == 0
    assert json.loads(out)["ok"]
    assert fake.calls()["nvmlShutdown"] == 1


async def test_the_process_serves_nobody_but_its_parent(tmp_path: Path, fake: FakeDriver) -> None:
    progress = tmp_path / "progress"
    progress.write_bytes(bytes(64))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", str(PROBE), "--parent", "1", "--nvml", binding_file(),
        "--progress", str(progress), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=fake.environ,
    )  # fmt: skip
    out, _ = await asyncio.wait_for(process.communicate(b'{"id":1,"op":"hello","v":1}\n'), 10)
    assert (process.returncode, out, fake.calls()) == (0, b"", {})


async def test_the_process_inherits_the_library_path_and_nothing_else(
    tmp_path: Path, fake: FakeDriver
) -> None:
    environ = fake.environ | {"PATH": "/bin", "SECRET_TOKEN": "x"}
    async with running(Desk(tmp_path, environ=environ)) as desk:
        await desk.reach(lambda: desk.answers)
        own = Path(f"/proc/{desk.client.pid}/environ").read_bytes().split(b"\0")
        names = {pair.partition(b"=")[0].decode() for pair in own if pair}
        assert names == {*fake.environ, "LANG"}


def _fields(times: ProbeTimes) -> dict[str, Any]:
    return {name: getattr(times, name) for name in times.__slots__}
