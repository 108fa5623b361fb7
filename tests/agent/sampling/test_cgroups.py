"""Limits and counters of cgroup v2, v1, hybrid and none, over folder trees."""

from pathlib import Path

import pytest

from agent.sampling.cgroups import cpu_quota, cpu_time_us, find_layout, memory_limit
from agent.sampling.files import Roots
from tests.support.trees import V2_MOUNT, plant, roots

V1_MOUNTS = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)
HYBRID_MOUNT = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
MIB = 1024**2
UNLIMITED_V1 = "9223372036854771712\n"


def memory_v2(current: int, limit: str = "max", cache: int = 0) -> dict[str, str]:
    return {
        "memory.current": f"{current}\n",
        "memory.max": f"{limit}\n",
        "memory.stat": f"anon 5\ninactive_file {cache}\n",
    }


def folder(name: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{name}/{file}": text for file, text in files.items()}


@pytest.fixture
def v2(tmp_path: Path) -> Roots:
    """An engine in its unit below a limited slice, and this daemon in a tightly limited unit of its own."""
    return roots(
        tmp_path,
        proc={"self/mountinfo": V2_MOUNT, "self/cgroup": "0::/system.slice/pairmesh.service\n"},
        cg={
            "cgroup.controllers": "cpu io memory pids\n",
            **folder("system.slice", {**memory_v2(600 * MIB, str(1000 * MIB), 100 * MIB), "cpu.max": "400000 100000\n"}),
            **folder("system.slice/ollama.service", {**memory_v2(100 * MIB, str(2000 * MIB)), "cpu.max": "max 100000\n", "cpu.stat": "usage_usec 123\nuser_usec 100\n"}),
            **folder("system.slice/pairmesh.service", {**memory_v2(10 * MIB, str(400 * MIB)), "cpu.max": "10000 100000\n"}),
        },
    )  # fmt: skip


def test_v2_keeps_the_tightest_limit_up_the_tree(v2: Roots) -> None:
    tree = find_layout(v2).memory
    assert tree is not None
    unit = tree.unit("ollama.service")
    assert unit is not None
    limit = memory_limit(tree, unit)
    assert limit is not None
    assert (limit.left_bytes, limit.limit_bytes) == (500 * MIB, 1000 * MIB)
    assert limit.stalls == v2.cg / "system.slice"
    assert cpu_quota(tree, unit) == 4.0
    assert cpu_time_us(tree, unit) == 123


def test_the_own_unit_is_not_asked(v2: Roots) -> None:
    tree = find_layout(v2).memory
    assert tree is not None
    assert tree.own_start == v2.cg / "system.slice"
    limit = memory_limit(tree, tree.own_start)
    assert limit is not None
    assert limit.left_bytes == 500 * MIB
    assert cpu_quota(tree, tree.own_start) == 4.0


def test_a_container_sees_its_limit_at_the_mount_itself(tmp_path: Path) -> None:
    found = roots(
        tmp_path,
        proc={"self/mountinfo": V2_MOUNT, "self/cgroup": "0::/\n"},
        cg={"cgroup.controllers": "memory\n", **memory_v2(300 * MIB, str(200 * MIB))},
    )
    layout = find_layout(found)
    assert layout.memory is not None
    assert layout.cpu is None
    limit = memory_limit(layout.memory, layout.memory.own_start)
    assert limit is not None
    assert limit.left_bytes == 0


@pytest.mark.parametrize("hybrid", [False, True])
def test_v1_and_hybrid_read_the_controllers_of_v1(tmp_path: Path, hybrid: bool) -> None:
    mounts = V1_MOUNTS.format(root="/") + (HYBRID_MOUNT if hybrid else "")
    found = roots(
        tmp_path,
        proc={"self/mountinfo": mounts, "self/cgroup": "4:memory:/jobs/one\n2:cpu,cpuacct:/jobs\n0::/\n"},
        cg={
            "memory/memory.limit_in_bytes": UNLIMITED_V1,
            "memory/jobs/one/memory.limit_in_bytes": f"{800 * MIB}\n",
            "memory/jobs/one/memory.usage_in_bytes": f"{500 * MIB}\n",
            "memory/jobs/one/memory.stat": f"inactive_file 1\ntotal_inactive_file {200 * MIB}\n",
            "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "cpu,cpuacct/jobs/cpu.cfs_quota_us": "150000\n",
            "cpu,cpuacct/jobs/cpu.cfs_period_us": "100000\n",
            "cpu,cpuacct/jobs/cpuacct.usage": "7654321\n",
            "unified/cgroup.controllers": "\n",
        },
    )
    layout = find_layout(found)
    assert layout.memory is not None
    assert layout.cpu is not None
    assert layout.cpuacct is not None
    limit = memory_limit(layout.memory, layout.memory.own_start)
    assert limit is not None
    assert (limit.left_bytes, limit.limit_bytes, limit.stalls) == (500 * MIB, 800 * MIB, None)
    assert cpu_quota(layout.cpu, layout.cpu.own_start) == 1.5
    assert cpu_time_us(layout.cpuacct, layout.cpuacct.own_start) == 7654


def test_a_v1_container_maps_its_cgroup_onto_the_mounted_root(tmp_path: Path) -> None:
    found = roots(
        tmp_path,
        proc={
            "self/mountinfo": V1_MOUNTS.format(root="/docker/abc"),
            "self/cgroup": "4:memory:/docker/abc\n",
        },
        cg={"memory/memory.limit_in_bytes": f"{64 * MIB}\n", "memory/memory.usage_in_bytes": f"{60 * MIB}\n"},
    )
    tree = find_layout(found).memory
    assert tree is not None
    limit = memory_limit(tree, tree.own_start)
    assert limit is not None
    assert limit.left_bytes == 4 * MIB


def test_without_cgroups_nothing_is_limited(tmp_path: Path) -> None:
    layout = find_layout(roots(tmp_path))
    assert (layout.memory, layout.cpu, layout.cpuacct) == (None, None, None)


@pytest.mark.parametrize("own", ["/../elsewhere", "/absent", "relative"])
def test_a_cgroup_outside_the_mount_starts_at_the_mount(v2: Roots, own: str) -> None:
    plant(v2.proc, {"self/cgroup": f"0::{own}\n"})
    tree = find_layout(v2).memory
    assert tree is not None
    assert tree.own_start == v2.cg


def test_units_are_found_by_name_in_system_and_user_slices_or_by_path(v2: Roots) -> None:
    user = "user.slice/user-1000.slice/user@1000.service/app.slice/llama-server.service"
    plant(v2.cg, {f"{user}/cpu.stat": "usage_usec 9\n"})
    tree = find_layout(v2).memory
    assert tree is not None
    assert tree.unit("llama-server.service") == v2.cg / user
    assert tree.unit("/system.slice/ollama.service") == v2.cg / "system.slice/ollama.service"
    assert [tree.unit(name) for name in ("absent.service", "../../etc", "*.service", "/absent")] == [None] * 4


def test_unreadable_numbers_are_no_limits(v2: Roots) -> None:
    plant(
        v2.cg,
        {
            "system.slice/memory.max": "lots\n",
            "system.slice/cpu.max": "\n",
            "system.slice/ollama.service/cpu.stat": "x\n",
        },
    )
    tree = find_layout(v2).memory
    assert tree is not None
    unit = tree.unit("ollama.service")
    assert unit is not None
    limit = memory_limit(tree, unit)
    assert limit is not None
    assert limit.limit_bytes == 2000 * MIB
    assert cpu_quota(tree, unit) is None
    assert cpu_time_us(tree, unit) is None
