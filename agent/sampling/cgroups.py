"""What cgroups allow and count: memory left, CPU quota, CPU time and memory stalls; v2, v1, hybrid or none.

Limits are looked up from a start folder to the root and the tightest one wins. The daemon's own unit never
counts, since its limits say nothing about the host.
"""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from agent.sampling.files import Roots, read_field, read_number, read_text, whole

CGROUP_MOUNT: Final = "/sys/fs/cgroup"
NO_LIMIT_V1: Final = 2**62
USER_SLICES: Final = "user.slice/*/*/app.slice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """One mounted tree. ``own_start`` is where the limits above this process begin: its cgroup, or the one above it if
    that is the unit of a service; the mount itself if it lies outside what is mounted. ``unit_slices`` are the folders
    in which units are looked for by name."""

    v2: bool
    folder: Path
    own_start: Path
    unit_slices: tuple[Path, ...]

    @classmethod
    def mounted(cls, folder: Path, root: str, own: str, *, v2: bool) -> "Hierarchy":
        """The tree whose cgroup ``root`` is shown at ``folder``; this process is in the cgroup ``own``."""
        return cls(
            v2=v2,
            folder=folder,
            own_start=_own_start(folder, root, own),
            unit_slices=(folder / "system.slice", *folder.glob(USER_SLICES)),
        )

    def unit(self, name: str) -> Path | None:
        """The folder of a unit name or of a cgroup path; None if there is none."""
        if ".." in PurePosixPath(name).parts:
            return None
        within = (self.folder,) if "/" in name else self.unit_slices
        return next((found for each in within if (found := each / name.strip("/")).is_dir()), None)

    def upward(self, start: Path) -> tuple[Path, ...]:
        """``start`` and every folder above it, up to the mount."""
        above = len(start.parts) - len(self.folder.parts) if start.is_relative_to(self.folder) else 0
        return (start, *start.parents[:above])


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
            unified = Hierarchy.mounted(folder, place[3], owns.get("", "/"), v2=True)
            continue
        for name in kind[2].split(","):
            if name in ("memory", "cpu", "cpuacct"):
                controllers[name] = Hierarchy.mounted(folder, place[3], owns.get(name, "/"), v2=False)
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


def _own_start(folder: Path, root: str, own: str) -> Path:
    try:
        inner = PurePosixPath(own).relative_to(root)
    except ValueError:
        return folder
    found = folder / inner
    if ".." in inner.parts or not found.is_dir():
        return folder
    return found.parent if found.name.endswith(".service") and found != folder else found


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
