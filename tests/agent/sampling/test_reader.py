"""The host reader over folder trees, and once on the real host."""

import errno
import os
from collections import namedtuple
from pathlib import Path

import psutil
import pytest

from agent.sampling.files import KeptFile, Roots
from agent.sampling.host import Tick
from agent.sampling.reader import HostReader
from agent.sampling.stalls import RETRY_MS
from router_core.pressure.samples import HostSample, ReadingStatus
from tests.support.trees import PSI, V2_MOUNT, plant, roots

CpuTimes = namedtuple("CpuTimes", "user nice system idle iowait irq softirq steal guest guest_nice")
Memory = namedtuple("Memory", "total available free")
GIB = 1024**3
VMSTAT = "pswpin 10\npswpout 5\noom_kill 2\nnr_free_pages 77\n"


class Host:
    """A reader over trees with an own clock and own psutil figures."""

    def __init__(self, found: Roots) -> None:
        self.roots = found
        self.now = 1_000
        self.error: Exception | None = None
        self.available = 40 * GIB
        self.reader = HostReader(
            found,
            lambda: self.now,
            cpu_times=self._cpu,
            virtual_memory=self._memory,
            own_cpu_ns=lambda: 5_000_000,
        )

    def _cpu(self) -> CpuTimes:
        if self.error is not None:
            raise self.error
        return CpuTimes(10.0, 1.0, 4.0, 50.0, 2.0, 0.5, 0.25, 3.0, 9.0, 1.0)

    def _memory(self) -> Memory:
        if self.error is not None:
            raise self.error
        return Memory(total=64 * GIB, available=self.available, free=GIB)

    def read(self, *units: str, step_ms: int = 1_000) -> HostSample:
        self.now += step_ms
        return self.reader.read(Tick(units=units)).sample


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(roots(tmp_path, proc={"pressure/memory": PSI.format(some=100, full=40), "vmstat": VMSTAT}))


def test_available_memory_is_read_and_guest_time_is_left_out(host: Host) -> None:
    sample = host.read()
    assert (sample.mem_avail_bytes.value, sample.mem_total_bytes.value) == (40 * GIB, 64 * GIB)
    times = sample.cpu_times.value
    assert times is not None
    assert (times.busy, times.idle, times.steal) == ((10.0, 1.0, 4.0, 0.5, 0.25), 52.0, 3.0)
    assert sample.own_cpu_us.value == 5_000
    assert sample.taken_ms == host.now


def arcstats(size: int, c_min: int) -> dict[str, str]:
    rows = {"hits": 7, "c": 30 * GIB, "c_min": c_min, "c_max": 32 * GIB, "size": size, "data_size": 5}
    lines = "".join(f"{name:<32}4    {value}\n" for name, value in rows.items())
    return {
        "spl/kstat/zfs/arcstats": f"13 1 0x01 98 26656 1920163911 65418\nname                            type data\n{lines}"
    }


@pytest.mark.parametrize(
    ("size", "c_min", "left"),
    [(22 * GIB, GIB, 21 * GIB), (GIB, 2 * GIB, 0), (0, GIB, 0), (2**62, GIB, 64 * GIB - 3 * GIB // 2)],
)
def test_the_cache_of_zfs_is_available_down_to_its_minimum_and_never_beyond_all_memory(
    host: Host, size: int, c_min: int, left: int
) -> None:
    host.available = 3 * GIB // 2
    plant(host.roots.proc, arcstats(size, c_min))
    sample = host.read()
    assert (sample.mem_avail_bytes.value, sample.arc_bytes) == (3 * GIB // 2 + left, left)


@pytest.mark.parametrize(
    "text", ["", "name type data\nsize 4 x\nc_min 4 1\n", "size 4 5\n", "\n\nsize\n", "c_min 4 1"]
)
def test_a_host_whose_zfs_tells_nothing_usable_has_what_the_kernel_says(host: Host, text: str) -> None:
    plant(host.roots.proc, {"spl/kstat/zfs/arcstats": text})
    sample = host.read()
    assert (sample.mem_avail_bytes.value, sample.arc_bytes) == (40 * GIB, 0)


def test_a_limit_of_the_cgroup_holds_for_the_cache_of_zfs_too(tmp_path: Path) -> None:
    found = roots(
        tmp_path,
        proc={"self/mountinfo": V2_MOUNT, "self/cgroup": "0::/box\n", **arcstats(22 * GIB, GIB)},
        cg={
            "cgroup.controllers": "memory cpu\n",
            "box/memory.max": f"{8 * GIB}\n",
            "box/memory.current": f"{6 * GIB}\n",
            "box/memory.stat": "inactive_file 0\n",
        },
    )
    assert Host(found).read().mem_avail_bytes.value == 2 * GIB


def test_stall_counters_grow_with_the_kernels(host: Host) -> None:
    first = host.read()
    plant(host.roots.proc, {"pressure/memory": PSI.format(some=350, full=90)})
    second = host.read()
    assert first.memory_some_us.value is not None
    assert second.memory_some_us.value == first.memory_some_us.value + 250
    assert second.memory_full_us.value == 50


def test_a_pressure_file_without_full_supports_some_only(host: Host) -> None:
    plant(host.roots.proc, {"pressure/memory": "some avg10=0.00 avg60=0.00 avg300=0.00 total=7\n"})
    sample = host.read()
    assert sample.memory_some_us.status is ReadingStatus.OK
    assert sample.memory_full_us.status is ReadingStatus.UNSUPPORTED


def test_absent_stalls_are_unsupported_and_tried_again_every_hour(host: Host) -> None:
    (host.roots.proc / "pressure/memory").unlink()
    reading = host.read().memory_some_us
    assert (reading.status, reading.code) == (ReadingStatus.UNSUPPORTED, errno.ENOENT)
    plant(host.roots.proc, {"pressure/memory": PSI.format(some=1, full=1)})
    assert host.read().memory_some_us.status is ReadingStatus.UNSUPPORTED
    assert host.read(step_ms=RETRY_MS).memory_some_us.status is ReadingStatus.OK


def test_a_broken_source_is_unknown_and_tried_again_at_once(host: Host) -> None:
    (host.roots.proc / "pressure/memory").unlink()
    (host.roots.proc / "pressure/memory").mkdir()
    reading = host.read().memory_some_us
    assert (reading.status, reading.code) == (ReadingStatus.UNKNOWN, errno.EISDIR)
    (host.roots.proc / "pressure/memory").rmdir()
    plant(host.roots.proc, {"pressure/memory": PSI.format(some=1, full=1)})
    assert host.read().memory_some_us.status is ReadingStatus.OK


def test_figures_that_cannot_be_had_are_unknown_not_zero(host: Host) -> None:
    host.error = PermissionError(errno.EACCES, "no")
    sample = host.read()
    for reading in (sample.mem_avail_bytes, sample.mem_total_bytes, sample.cpu_times):
        assert (reading.status, reading.value, reading.code) == (ReadingStatus.UNKNOWN, None, errno.EACCES)
    host.error = None
    assert host.read().mem_avail_bytes.status is ReadingStatus.OK


def test_paging_counts_traffic_in_bytes_and_kills(host: Host) -> None:
    sample = host.read()
    page = os.sysconf("SC_PAGE_SIZE")
    assert (sample.swapped_bytes.value, sample.oom_kills.value) == (15 * page, 2)
    plant(host.roots.proc, {"vmstat": "nr_free_pages 1\n"})
    sample = host.read()
    assert (sample.swapped_bytes.status, sample.oom_kills.status) == (
        ReadingStatus.UNSUPPORTED,
        ReadingStatus.UNSUPPORTED,
    )


@pytest.mark.parametrize(
    ("devices", "zram"),
    [([], False), (["/dev/zram0"], True), (["/dev/zram0", "/dev/sda2"], False), (["/swapfile"], False)],
)
def test_swap_is_on_zram_only_if_all_of_it_is(host: Host, devices: list[str], zram: bool) -> None:
    lines = [f"{device} partition 1 0 100" for device in devices]
    plant(host.roots.proc, {"swaps": "\n".join(["Filename Type Size Used Priority", *lines]) + "\n"})
    assert host.read().swap_on_zram is zram


@pytest.fixture
def limited(host: Host) -> Host:
    plant(host.roots.proc, {"self/mountinfo": V2_MOUNT, "self/cgroup": "0::/system.slice/pairmesh.service\n"})
    unit = {
        "cpu.max": "150000 100000\n",
        "cpu.stat": "usage_usec 500\n",
        "memory.pressure": PSI.format(some=0, full=0),
    }
    memory = {"memory.max": f"{8 * GIB}\n", "memory.current": f"{6 * GIB}\n"}
    own = {"memory.max": f"{GIB // 4}\n", "memory.current": "1\n", "cpu.max": "1000 100000\n"}
    plant(host.roots.cg, {"cgroup.controllers": "cpu memory\n"})
    plant(host.roots.cg / "system.slice/ollama.service", unit | memory)
    plant(host.roots.cg / "system.slice/pairmesh.service", own)
    return host


def test_the_lower_of_host_and_engine_cgroup_is_reported(limited: Host) -> None:
    sample = limited.read("ollama.service", "absent.service")
    assert (sample.mem_avail_bytes.value, sample.mem_whole_bytes.value) == (2 * GIB, 8 * GIB)
    assert (sample.mem_total_bytes.value, sample.mem_limit_bytes) == (64 * GIB, 8 * GIB)
    assert sample.cpu_quota == 1.5
    assert sample.cpu_capacity <= 1.5
    (engine,) = sample.engines
    assert (engine.unit, engine.mem_left_bytes, engine.cpu_us) == ("ollama.service", 2 * GIB, 500)


def test_without_an_engine_the_limit_of_the_own_unit_is_ignored(limited: Host) -> None:
    sample = limited.read()
    assert sample.mem_avail_bytes.value == 40 * GIB
    assert (sample.mem_limit_bytes, sample.cpu_quota) == (None, None)


def test_the_loosest_engine_decides_and_an_unlimited_one_sets_no_limit(limited: Host) -> None:
    big = {
        "memory.max": f"{16 * GIB}\n",
        "memory.current": f"{6 * GIB}\n",
        "cpu.max": "max 100000\n",
        "cpu.stat": "usage_usec 1\n",
    }
    plant(limited.roots.cg / "system.slice/vllm.service", big)
    sample = limited.read("ollama.service", "vllm.service")
    assert (sample.mem_avail_bytes.value, sample.mem_limit_bytes, sample.cpu_quota) == (
        10 * GIB,
        16 * GIB,
        None,
    )
    plant(limited.roots.cg / "system.slice/vllm.service", {"memory.max": "max\n"})
    sample = limited.read("ollama.service", "vllm.service")
    assert (sample.mem_avail_bytes.value, sample.mem_limit_bytes) == (40 * GIB, None)


def test_stalls_inside_a_limit_count_as_much_as_those_of_the_host(limited: Host) -> None:
    first = limited.read("ollama.service").memory_full_us.value
    assert first is not None
    plant(
        limited.roots.cg / "system.slice/ollama.service", {"memory.pressure": PSI.format(some=900, full=800)}
    )
    plant(limited.roots.proc, {"pressure/memory": PSI.format(some=150, full=60)})
    sample = limited.read("ollama.service")
    assert sample.memory_full_us.value == first + 800
    plant(limited.roots.proc, {"pressure/memory": PSI.format(some=1_000, full=1_060)})
    assert limited.read("ollama.service").memory_full_us.value == first + 800 + 1_000


def test_a_kept_file_is_opened_anew_when_it_is_replaced_after_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x"
    kept = KeptFile(path)
    assert kept.read() is None
    assert kept.error == errno.ENOENT
    path.write_text("one")
    assert (kept.read(), kept.error) == ("one", 0)
    path.write_text("two")
    assert kept.read() == "two"
    kept.close()


def test_the_real_host_gives_plausible_figures() -> None:
    now = [1]

    def tick() -> int:
        now[0] += 1_000
        return now[0]

    reader = HostReader(Roots(), tick)
    answer = reader.read(Tick(want_profile=True))
    sample = answer.sample
    assert sample.mem_avail_bytes.value is not None
    assert sample.mem_total_bytes.value == psutil.virtual_memory().total
    assert 0 < sample.mem_avail_bytes.value <= sample.mem_total_bytes.value
    assert sample.cpu_times.value is not None
    assert sum(sample.cpu_times.value.busy) > 0
    assert sample.own_cpu_us.value is not None
    assert 0 < sample.cpu_capacity <= sample.cpus
    assert answer.profile in ("desktop", "server")
    again = reader.read(Tick())
    assert again.profile is None
    assert again.sample.cpu_times.value is not None
    assert sum(again.sample.cpu_times.value.busy) >= sum(sample.cpu_times.value.busy)
