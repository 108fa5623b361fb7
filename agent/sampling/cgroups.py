"""What cgroups allow and count: memory left, CPU quota, CPU time and memory stalls; v2, v1, hybrid or none.

Limits are looked up from a start folder to the root and the tightest one wins. The daemon's own unit never
counts, since its limits say nothing about the host.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from agent.sampling.files import Roots, read_field, read_number, read_text, whole

CGROUP_MOUNT: Final = "/sys/fs/cgroup"
NO_LIMIT_V1: Final = 2**62
USER_UNITS: Final = "user.slice/*/*/app.slice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """One mounted tree. ``folder`` shows the cgroup ``root``; ``own`` is this process's cgroup in it."""

    v2: bool
    folder: Path
    root: str
    own: str

    def start(self, cgroup: str) -> Path:
        """The folder of ``cgroup``; the mount itself if the cgroup lies outside what is mounted."""
        try:
            inner = PurePosixPath(cgroup).relative_to(self.root)
        except ValueError:
            return self.folder
        found = self.folder / inner
        return found if ".." not in inner.parts and found.is_dir() else self.folder

    def own_start(self) -> Path:
        """Our own folder, or the one above it if it is the unit of a service."""
        found = self.start(self.own)
        return found.parent if found.name.endswith(".service") and found != self.folder else found

    def unit(self, name: str) -> Path | None:
        """The folder of a unit name or of a cgroup path; None if there is none."""
        if ".." in PurePosixPath(name).parts:
            return None
        if "/" in name:
            named = self.folder / name.strip("/")
            return named if named.is_dir() else None
        system = self.folder / "system.slice" / name
        if system.is_dir():
            return system
        plain = not set(name) & set("*?[]")
        return next(self.folder.glob(f"{USER_UNITS}/{name}"), None) if plain else None

    def upward(self, start: Path) -> Iterator[Path]:
        """``start`` and every folder above it, up to the mount."""
        yield start
        while start != self.folder and self.folder in start.parents:
            start = start.parent
            yield start


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The trees that carry memory limits, CPU limits and CPU counters; None where a controller is missing."""

    memory: Hierarchy | None = None
    cpu: Hierarchy | None = None
    cpuacct: Hierarchy | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """The tightest memory limit above a start: bytes left, the limit, and the cgroup (v2) whose stalls tell."""

    left_bytes: int
    limit_bytes: int
    stalls: Path | None


def find_layout(roots: Roots) -> Layout:
    """Which cgroup trees are mounted, from ``mountinfo``; mounts outside the cgroup root are ignored."""
    owns = _own_cgroups(roots)
    controllers: dict[str, Hierarchy] = {}
    unified: Hierarchy | None = None
    for line in (read_text(roots.proc / "self" / "mountinfo") or "").splitlines():
        fields, _, tail = line.partition(" - ")
        place, kind = fields.split(), tail.split()
        if len(place) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        folder = _below(roots, place[4])
        if folder is None:
            continue
        if kind[0] == "cgroup2":
            unified = Hierarchy(v2=True, folder=folder, root=place[3], own=owns.get("", "/"))
            continue
        for name in kind[2].split(","):
            if name in ("memory", "cpu", "cpuacct"):
                controllers[name] = Hierarchy(v2=False, folder=folder, root=place[3], own=owns.get(name, "/"))
    enabled = (read_text(unified.folder / "cgroup.controllers") or "").split() if unified else []
    if unified is not None and "memory" in enabled:
        return Layout(memory=unified, cpu=unified if "cpu" in enabled else None, cpuacct=unified)
    return Layout(**controllers)


def _own_cgroups(roots: Roots) -> dict[str, str]:
    """Our cgroup by controller; that of v2 by the empty name."""
    found = {}
    for line in (read_text(roots.proc / "self" / "cgroup") or "").splitlines():
        _, _, tail = line.partition(":")
        names, _, path = tail.partition(":")
        found.update(dict.fromkeys(names.split(","), path))
    return found


def _below(roots: Roots, mount: str) -> Path | None:
    try:
        return roots.cg / PurePosixPath(mount).relative_to(CGROUP_MOUNT)
    except ValueError:
        return None


def memory_limit(tree: Hierarchy, start: Path) -> MemoryLimit | None:
    """The limit above ``start`` that leaves least memory; page cache that can go counts as free."""
    found: list[MemoryLimit] = []
    for folder in tree.upward(start):
        limit, used = _memory_v2(folder) if tree.v2 else _memory_v1(folder)
        if limit is not None and used is not None:
            left = max(0, limit - used)
            found.append(MemoryLimit(left_bytes=left, limit_bytes=limit, stalls=folder if tree.v2 else None))
    return min(found, key=lambda each: each.left_bytes, default=None)


def _memory_v2(folder: Path) -> tuple[int | None, int | None]:
    limit = read_number(folder / "memory.max")
    if limit is None:
        return None, None
    return limit, _used(folder / "memory.current", folder / "memory.stat", "inactive_file")


def _memory_v1(folder: Path) -> tuple[int | None, int | None]:
    limit = read_number(folder / "memory.limit_in_bytes")
    if limit is None or limit >= NO_LIMIT_V1:
        return None, None
    return limit, _used(folder / "memory.usage_in_bytes", folder / "memory.stat", "total_inactive_file")


def _used(usage: Path, stat: Path, cache: str) -> int | None:
    used = read_number(usage)
    return None if used is None else max(0, used - (read_field(stat, cache) or 0))


def cpu_quota(tree: Hierarchy, start: Path) -> float | None:
    """The least CPU quota above ``start``, in cores; None without one."""
    quotas = [_quota_v2(folder) if tree.v2 else _quota_v1(folder) for folder in tree.upward(start)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_v2(folder: Path) -> float | None:
    parts = (read_text(folder / "cpu.max") or "").split()
    return _cores(whole(parts[0]), whole(parts[1])) if len(parts) == 2 else None


def _quota_v1(folder: Path) -> float | None:
    return _cores(read_number(folder / "cpu.cfs_quota_us"), read_number(folder / "cpu.cfs_period_us"))


def _cores(quota_us: int | None, period_us: int | None) -> float | None:
    return quota_us / period_us if quota_us and period_us else None


def cpu_time_us(tree: Hierarchy, folder: Path) -> int | None:
    """CPU microseconds spent in the cgroup of ``folder`` since it began."""
    if tree.v2:
        return read_field(folder / "cpu.stat", "usage_usec")
    spent_ns = read_number(folder / "cpuacct.usage")
    return None if spent_ns is None else spent_ns // 1_000
