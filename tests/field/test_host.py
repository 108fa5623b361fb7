"""Hosts as people reported them: what a daemon makes of their memory, their GPU driver and their cards."""

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from tests.support.builds import TREE_VARIABLE, entry
from tests.support.cluster import Node, wait_for
from tests.support.fake_nvml import FakeDriver, build
from tests.support.fakes.ollama import FakeOllama
from tests.support.fakes.ollama_engine import FakeModel
from tests.support.field import Reply, chat
from tests.support.trees import plant

GIB = 1 << 30
VERSION = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\n"
ASKED = "nvmlDeviceGetUtilizationRates"
COLD = FakeModel(name="cold:4b", size=4 * GIB)


def meminfo(total: int, available: int) -> str:
    rows = {
        "MemTotal": total,
        "MemFree": available // 2,
        "MemAvailable": available,
        "Buffers": 0,
        "Cached": GIB,
    }
    return "".join(f"{name}:{size // 1024:>16} kB\n" for name, size in rows.items())


def arcstats(size: int, c_min: int) -> str:
    rows = {"c_min": c_min, "c_max": 31 * GIB, "size": size}
    head = "13 1 0x01 98 26656 1920163911 65418\nname                            type data\n"
    return head + "".join(f"{name:<32}4    {value}\n" for name, value in rows.items())


@contextlib.asynccontextmanager
async def one_host(
    base: Path,
    proc: Mapping[str, str],
    *,
    sys: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
) -> AsyncIterator[tuple[Node, FakeOllama]]:
    """A daemon on a host that is a folder tree, with an Ollama whose one model is cold."""
    tree = base / "tree"
    for folder in ("proc", "sys", "cg", "dev"):
        (tree / folder).mkdir(parents=True, exist_ok=True)
    usual = {"meminfo": meminfo(64 * GIB, 60 * GIB), "stat": Path("/proc/stat").read_text()}
    plant(tree / "proc", usual | dict(proc))
    plant(tree / "sys", sys or {})
    engine = FakeOllama(models=[COLD])
    async with engine.serving():
        node = Node(name="host", ip="127.0.0.2", base=base / "host", entry=entry("host-tree"))
        node.more_env = {TREE_VARIABLE: str(tree)} | dict(env or {})
        node.write_settings([])
        settings = node.config / "pairmesh.toml"
        settings.write_text(settings.read_text().replace('nvml = "off"', 'nvml = "auto"'))
        (node.config / "endpoints" / "ollama.toml").write_text(f'engine = "ollama"\nurl = "{engine.url}"\n')
        await node.start()
        try:
            await wait_for(lambda: _lists(node), 15, "the model is listed")
            yield node, engine
        finally:
            await node.term()


async def _lists(node: Node) -> bool:
    own = (await node.members())["host"]
    known = (await measured(node))["available_mib"] is not None
    return known and any(engine["models"] for engine in own["engines"])


async def measured(node: Node) -> dict[str, Any]:
    """The host as the daemon measured it."""
    found: dict[str, Any] = (await node.get("/v1/status"))["own"]["host"]
    return found


async def nvml_is(node: Node, state: str) -> dict[str, Any]:
    """What is known of the driver once the process that asks it is in ``state``."""

    async def there() -> dict[str, Any] | None:
        found: dict[str, Any] = (await measured(node))["nvml"]
        return found if found["state"] == state else None

    found: dict[str, Any] = await wait_for(there, 20, f"the probe is {state}")
    return found


async def the_gpu(node: Node, fake: FakeDriver) -> dict[str, Any]:
    """The one GPU after the driver was asked twice more."""
    before = fake.calls().get(ASKED, 0)

    async def read() -> dict[str, Any] | None:
        gpus = (await nvml_is(node, "ready"))["gpus"]
        return gpus[0] if gpus and fake.calls().get(ASKED, 0) > before + 1 else None

    found: dict[str, Any] = await wait_for(read, 20, "the GPU was read")
    return found


async def doctor(node: Node) -> str:
    """What it finds of GPUs and memory."""
    _, out, err = await node.cli("doctor", "--json")
    assert err == ""
    return "\n".join(
        each["said"] for each in json.loads(out) if each["about"] in ("gpu", "memory", "pressure")
    )


async def ask_cold(node: Node) -> Reply:
    return await chat(node, COLD.name, max_tokens=4)


async def test_memory_that_the_cache_of_zfs_holds_is_there_for_a_model(tmp_path: Path) -> None:
    """netdata/netdata#12843: 32 GiB, 1.5 of them available, 22 in the ARC, which shrinks to 1."""
    proc = {
        "meminfo": meminfo(32 * GIB, 3 * GIB // 2),
        "spl/kstat/zfs/arcstats": arcstats(22 * GIB, GIB),
    }
    async with one_host(tmp_path, proc) as (node, engine):
        found = await measured(node)
        assert (found["available_mib"], found["arc_mib"]) == (1_536 + 21 * 1_024, 21 * 1_024)
        assert found["pressed"] == []
        reply = await ask_cold(node)
        told = await doctor(node)
    assert (reply.status, engine.loads) == (200, [COLD.name])
    assert "22.5 GiB available, 21.0 GiB of it held by the cache of ZFS" in told


async def test_a_host_that_is_short_of_memory_says_which_signal_and_how_much(tmp_path: Path) -> None:
    async with one_host(tmp_path, {"meminfo": meminfo(32 * GIB, GIB // 2)}) as (node, _):
        await wait_for(lambda: _is_pressed(node), 10, "the level is critical")
        assert "memory is critical: memory.avail is 0.5 GiB, the bound is 0.8 GiB" in await doctor(node)
        assert "memory is critical" in (await node.cli("status"))[1]


async def _is_pressed(node: Node) -> bool:
    return bool((await measured(node))["pressed"])


async def test_a_stub_of_a_distribution_does_not_hide_the_library_of_windows(tmp_path: Path) -> None:
    """Syllo/nvtop#441: the first library found is a stub that finds no driver, the real one lies elsewhere."""
    fake = FakeDriver(tmp_path / "real", script="gpu 0 name=NVIDIA_RTX total=24576 util=-")
    stub = build(tmp_path / "stub", "STUB")
    env = fake.environ | {"LD_LIBRARY_PATH": f"{stub}:{fake.library}"}
    async with one_host(tmp_path, {}, env=env) as (node, _):
        await the_gpu(node, fake)
        found = await nvml_is(node, "ready")
        told = await doctor(node)
    assert [(library["path"], library["code"]) for library in found["libraries"]] == [
        (f"{stub}/libnvidia-ml.so.1", 9),
        (f"{fake.library}/libnvidia-ml.so.1", 0),
    ]
    assert f"{stub}/libnvidia-ml.so.1: finds no driver (code 9)" in told
    assert "NVIDIA RTX, 24.0 GiB: ok; it does not tell utilisation (3)" in told


async def test_under_wsl_without_the_device_doctor_names_library_code_and_cure(tmp_path: Path) -> None:
    """Syllo/nvtop#441, as the hardened unit meets it: no library works."""
    stub = build(tmp_path / "stub", "STUB")
    plant(tmp_path / "tree" / "dev", {"dxg": ""})
    async with one_host(tmp_path, {}, env={"LD_LIBRARY_PATH": str(stub)}) as (node, _):
        await nvml_is(node, "backoff")
        told = await doctor(node)
        assert (await ask_cold(node)).status == 200
    assert f"{stub}/libnvidia-ml.so.1: finds no driver (code 9)" in told
    assert "systemd/drop-ins/wsl.conf" in told


async def test_a_gpu_of_the_processor_whose_driver_tells_of_no_memory_serves(tmp_path: Path) -> None:
    """XuehaiPan/nvitop#208, Syllo/nvtop#449: success with a total of 0, then none told, then all of the host's."""
    fake = FakeDriver(tmp_path / "gpu", script="gpu 0 name=NVIDIA_N1X addr=2 total=0 reserved=0 util=7")
    async with one_host(tmp_path, {}, env=fake.environ) as (node, engine):
        for script in ("total=0", "total=-", "total=65536", "total=0"):
            fake.write(f"gpu 0 name=NVIDIA_N1X addr=2 reserved=0 util=7 {script}")
            gpu = await the_gpu(node, fake)
            assert (gpu["state"], gpu["unified"], gpu["memory_mib"]) == ("ok", True, 64 * 1_024)
        reply = await ask_cold(node)
    assert (reply.status, engine.loads) == (200, [COLD.name])


async def test_a_card_that_tells_impossible_figures_is_unknown_and_its_host_serves(tmp_path: Path) -> None:
    """A card of its own memory that answers success with a total and a free of 0."""
    fake = FakeDriver(tmp_path / "gpu", script="gpu 0 total=0 reserved=0 util=7")
    async with one_host(tmp_path, {}, env=fake.environ) as (node, _):
        gpu = await the_gpu(node, fake)
        assert (gpu["state"], gpu["unified"], gpu["unread"]) == ("ok", False, ["memory (1000)"])
        assert "it does not tell memory (1000)" in await doctor(node)
        assert (await ask_cold(node)).status == 200


async def test_a_card_of_a_virtual_machine_is_left_alone_and_told(tmp_path: Path) -> None:
    """The host of a machine with GPU passthrough: the driver is loaded, the card is bound to vfio-pci."""
    fake = FakeDriver(tmp_path / "gpu")
    card = "bus/pci/devices/0000:01:00.0"
    drivers = tmp_path / "tree" / "sys" / "bus/pci/drivers"
    (drivers / "vfio-pci").mkdir(parents=True)
    link = tmp_path / "tree" / "sys" / card / "driver"
    link.parent.mkdir(parents=True)
    link.symlink_to(drivers / "vfio-pci")
    files = {f"{card}/vendor": "0x10de\n", f"{card}/class": "0x030000\n"}
    proc = {"driver/nvidia/version": VERSION}
    async with one_host(tmp_path, proc, sys=files, env=fake.environ) as (node, _):
        found = (await measured(node))["nvml"]
        assert (found["present"], found["state"]) == (False, "off")
        told = await doctor(node)
        assert (await ask_cold(node)).status == 200
        own = (await node.members())["host"]
    assert fake.calls() == {}
    assert "card 0000:01:00.0 is bound to vfio-pci: it is a virtual machine's, not used here" in told
    assert "no_load" not in own["flags"]
