"""Reads the host: CPU, memory, stalls, paging and cgroups into one sample.

Every psutil, procfs, sysfs and cgroup call of the process is made here, always from the same thread. What a
source does not give is a reading without a value; nothing is latched, a source missing at first is tried again.
"""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import psutil

from agent.sampling.cgroups import (
    Hierarchy,
    Layout,
    MemoryLimit,
    cpu_quota,
    cpu_time_us,
    find_layout,
    memory_limit,
)
from agent.sampling.driver import look_for_driver
from agent.sampling.files import KeptFile, Roots, field_of, read_text, whole
from agent.sampling.host import HostAnswer, Tick
from agent.sampling.platform import detect_profile
from agent.sampling.stalls import NEVER, StallFile, counted
from router_core.pressure.samples import (
    CpuTimes,
    EngineCgroup,
    HostSample,
    Reading,
    measured,
    missing,
    unsupported,
)

LAYOUT_MS: Final = 30_000
NOT_BUSY: Final = frozenset({"idle", "iowait", "steal", "guest", "guest_nice"})
ARCSTATS: Final = Path("spl/kstat/zfs/arcstats")


class HostReader:
    """Reads one ``HostSample`` per call. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        roots: Roots,
        boot_ms: Callable[[], int],
        *,
        cpu_times: Callable[[], Any] = psutil.cpu_times,
        virtual_memory: Callable[[], Any] = psutil.virtual_memory,
        own_cpu_ns: Callable[[], int] = time.process_time_ns,
        library_path: str = "",
    ) -> None:
        self._roots = roots
        self._library_path = library_path
        self._boot_ms = boot_ms
        self._cpu_times = cpu_times
        self._virtual_memory = virtual_memory
        self._own_cpu_ns = own_cpu_ns
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._memory_stalls = StallFile(roots.proc / "pressure" / "memory", "some", "full")
        self._cpu_stalls = StallFile(roots.proc / "pressure" / "cpu", "some")
        self._io_stalls = StallFile(roots.proc / "pressure" / "io", "some")
        self._vmstat = KeptFile(roots.proc / "vmstat")
        self._arc = roots.proc / ARCSTATS
        self._layout: tuple[Layout, int] | None = None

    def read(self, tick: Tick) -> HostAnswer:
        """Everything a tick asks for. What a source does not give is a reading without a value."""
        now = self._boot_ms()
        layout = self._current_layout(now)
        engines, limit, quota = self._cgroups(layout, tick.units)
        available, total, arc = self._memory(now)
        some, full = self._memory_stalls.read(now, _stalls_beside(limit))
        swapped, kills = self._paging(now)
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        sample = HostSample(
            taken_ms=now,
            mem_avail_bytes=_least(available, None if limit is None else limit.left_bytes, now),
            mem_whole_bytes=_least(total, None if limit is None else limit.limit_bytes, now),
            mem_total_bytes=total,
            arc_bytes=arc,
            cpu_times=self._cpu(now),
            own_cpu_us=measured(self._own_cpu_ns() // 1_000, now),
            memory_some_us=some,
            memory_full_us=full,
            swapped_bytes=swapped,
            oom_kills=kills,
            cpu_some_us=self._cpu_stalls.read(now, {})[0],
            io_some_us=self._io_stalls.read(now, {})[0],
            cpus=os.cpu_count() or 1,
            cpu_capacity=usable if quota is None else min(float(usable), quota),
            cpu_quota=quota,
            mem_limit_bytes=None if limit is None else limit.limit_bytes,
            swap_on_zram=self._swap_on_zram(),
            engines=engines,
        )
        return HostAnswer(
            sample=sample,
            profile=detect_profile(self._roots) if tick.want_profile else None,
            driver=look_for_driver(self._roots, self._library_path, tick.library)
            if tick.want_driver
            else None,
        )

    def _current_layout(self, now: int) -> Layout:
        if self._layout is None or now - self._layout[1] >= LAYOUT_MS:
            self._layout = find_layout(self._roots), now
        return self._layout[0]

    def _cgroups(
        self, layout: Layout, units: tuple[str, ...]
    ) -> tuple[tuple[EngineCgroup, ...], MemoryLimit | None, float | None]:
        """Every engine's cgroup, and the loosest limits among them; without engines, the limits above ourselves."""
        engines: list[EngineCgroup] = []
        limits: list[MemoryLimit | None] = []
        quotas: list[float | None] = []
        trees = layout.memory, layout.cpu, layout.cpuacct
        for unit in dict.fromkeys(units):
            folders = {tree: tree.unit(unit) for tree in trees if tree is not None}
            memory, cpu, counter = (None if tree is None else folders[tree] for tree in trees)
            if memory is None and counter is None:
                continue
            limit = memory_limit(layout.memory, memory) if layout.memory and memory else None
            spent = cpu_time_us(layout.cpuacct, counter) if layout.cpuacct and counter else None
            engines.append(
                EngineCgroup(unit=unit, mem_left_bytes=limit.left_bytes if limit else None, cpu_us=spent)
            )
            limits.append(limit)
            quotas.append(cpu_quota(layout.cpu, cpu) if layout.cpu and cpu else None)
        if not engines:
            return (
                (),
                _own_limit(layout.memory),
                cpu_quota(layout.cpu, layout.cpu.own_start) if layout.cpu else None,
            )
        known = [limit for limit in limits if limit is not None]
        loosest = max(known, key=lambda each: each.left_bytes) if len(known) == len(limits) else None
        least = [quota for quota in quotas if quota is not None]
        return tuple(engines), loosest, max(least) if len(least) == len(quotas) else None

    def _cpu(self, now: int) -> Reading[CpuTimes]:
        try:
            times = self._cpu_times()
        except (OSError, RuntimeError) as error:
            return missing(now, _number(error))
        busy = tuple(getattr(times, name) for name in times._fields if name not in NOT_BUSY)
        idle = times.idle + getattr(times, "iowait", 0.0)
        return measured(CpuTimes(busy=busy, idle=idle, steal=getattr(times, "steal", 0.0)), now)

    def _memory(self, now: int) -> tuple[Reading[int], Reading[int], int]:
        """Memory that programs can have, all there is, and what of the former the cache of ZFS would give back."""
        try:
            memory = self._virtual_memory()
        except (OSError, RuntimeError) as error:
            return missing(now, _number(error)), missing(now, _number(error)), 0
        arc = min(shrinkable_arc(read_text(self._arc) or ""), max(0, memory.total - memory.available))
        return measured(memory.available + arc, now), measured(memory.total, now), arc

    def _paging(self, now: int) -> tuple[Reading[int], Reading[int]]:
        text, code = self._vmstat.read(), self._vmstat.error
        if text is None:
            gone: Reading[int] = unsupported(now, code) if code in NEVER else missing(now, code)
            return gone, gone
        pages = [count for name in ("pswpin", "pswpout") if (count := field_of(text, name)) is not None]
        swapped = sum(pages) * self._page_bytes if pages else None
        return counted(swapped, now), counted(field_of(text, "oom_kill"), now)

    def _swap_on_zram(self) -> bool:
        devices = (read_text(self._roots.proc / "swaps") or "").splitlines()[1:]
        return bool(devices) and all(
            Path(line.split()[0]).name.startswith("zram") for line in devices if line.strip()
        )


def shrinkable_arc(text: str) -> int:
    """Bytes that the ARC of ZFS gives back on demand, by the text of ``arcstats``: MemAvailable leaves them out
    (openzfs/zfs#10255). 0 without ZFS."""
    told = {}
    for line in text.splitlines():
        name, *rest = line.split()[:3] or [""]
        if name in ("size", "c_min") and len(rest) == 2:
            told[name] = whole(rest[1])
    size, least = told.get("size"), told.get("c_min")
    return 0 if size is None or least is None else max(0, size - least)


def _own_limit(tree: Hierarchy | None) -> MemoryLimit | None:
    return None if tree is None else memory_limit(tree, tree.own_start)


def _least(reading: Reading[int], limit: int | None, now: int) -> Reading[int]:
    """The lower of a host's value and a cgroup's; an unknown host value stays unknown."""
    return reading if reading.value is None or limit is None else measured(min(reading.value, limit), now)


def _stalls_beside(limit: MemoryLimit | None) -> dict[str, str | None]:
    """The memory stalls of the cgroup whose limit binds."""
    if limit is None or limit.stalls is None:
        return {}
    return {str(limit.stalls): read_text(limit.stalls / "memory.pressure")}


def _number(error: Exception) -> int:
    return (error.errno if isinstance(error, OSError) else None) or errno.EIO
