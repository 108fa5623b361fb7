"""What ``pairmesh doctor`` says of GPUs and of what presses this host. Pure: documents in, findings out."""

from collections.abc import Iterator
from typing import Final

from agent.admin.documents import CardDoc, GpuDoc, HostDoc, LibraryDoc, NvmlDoc
from agent.cli.findings import Finding, Health, bad, good, warn
from agent.cli.pressure_lines import pressed_lines

_MIB_PER_GIB: Final = 1_024
_CODES: Final = {
    3: "not supported",
    4: "no permission",
    9: "finds no driver",
    12: "is missing or cannot be loaded",
    15: "the GPU has fallen off the bus",
    18: "belongs to another version than the driver that runs",
    999: "unknown error",
    1_002: "pynvml is missing or shadowed",
}
_CURES: Final = {
    4: "the daemon's user may not open the device files: add it to their group (video, render), or recreate the container",
    9: "load the driver (modprobe nvidia), or install one that fits the kernel",
    12: "install the driver's NVML library (libnvidia-ml.so.1; on Debian libnvidia-ml1)",
    15: "reset the GPU or reboot",
    18: "reload the driver or reboot",
    999: "the driver does not answer; see dmesg. In a container: recreate it",
    1_002: "install nvidia-ml-py >= 12.560.30 and nothing else that provides pynvml",
}
_WSL_CURE: Final = (
    "under WSL2 the service needs /dev/dxg: copy systemd/drop-ins/wsl.conf to /etc/systemd/system/pairmesh.service.d/, "
    "then systemctl daemon-reload and restart; the library is Windows' own in /usr/lib/wsl/lib, from the driver of Windows"
)
_NOT_ASKED: Final = 'nvml = "off" in [sampling] of pairmesh.toml ends this warning'


def gpu(nvml: NvmlDoc, *, asked: bool = True) -> Iterator[Finding]:
    """``asked``: a daemon runs and has looked; else only what files tell is known."""
    if nvml.off:
        yield good("gpu", 'not looked at: nvml = "off"')
        return
    yield from (_card(card) for card in nvml.cards)
    if nvml.kernel is not None and nvml.on_disk is not None and nvml.kernel != nvml.on_disk:
        yield bad("gpu", f"driver {nvml.kernel} runs, its library on disk is {nvml.on_disk}: {_CURES[18]}")
    elif nvml.kernel is not None:
        yield good("gpu", f"driver {nvml.kernel}")
    if not asked:
        yield Finding(health=Health.SKIPPED, about="gpu", said="only a running daemon asks the driver")
        return
    yield from (_library(library, nvml) for library in nvml.libraries)
    yield from (_gpu(each) for each in nvml.gpus)
    if nvml.gpus:
        return
    expected = nvml.present or nvml.wsl
    if expected and nvml.state == "starting":
        yield warn("gpu", "the driver is being asked: try again in a moment")
    elif expected:
        yield warn("gpu", f"no GPU answers: {_cure(nvml)}; {_NOT_ASKED}")
    elif not nvml.cards:
        yield good("gpu", "no NVIDIA card, driver or library on this host")


def host(told: HostDoc) -> Iterator[Finding]:
    """What the host is short of, and what the cache of ZFS holds of its memory."""
    if told.arc_mib and told.available_mib is not None:
        yield good(
            "memory",
            f"{_gib(told.available_mib)} available, {_gib(told.arc_mib)} of it held by the cache of ZFS, which gives it "
            "back on demand",
        )
    yield from (warn("pressure", line) for line in pressed_lines(told.pressed))


def _card(card: CardDoc) -> Finding:
    if card.in_vm:
        return good(
            "gpu", f"card {card.bus_id} is bound to {card.driver}: it is a virtual machine's, not used here"
        )
    if card.driver is None:
        return warn(
            "gpu",
            f"card {card.bus_id} has no driver, so nothing here can use it: load NVIDIA's (modprobe nvidia), or bind it to "
            "vfio-pci if it is meant for a virtual machine",
        )
    if card.driver != "nvidia":
        return warn(
            "gpu", f"card {card.bus_id} is bound to {card.driver}: engines need NVIDIA's own driver for it"
        )
    return good("gpu", f"card {card.bus_id} is bound to {card.driver}")


def _library(library: LibraryDoc, nvml: NvmlDoc) -> Finding:
    path = library.path or "libnvidia-ml.so.1"
    if library.code == 0:
        return good("gpu", f"{path} answers")
    said = "its process ended or hung" if library.code is None else _worded(library.code)
    # That one of several places holds a stub is how WSL2 comes.
    answers = any(each.code == 0 for each in nvml.libraries)
    return (good if answers else warn)("gpu", f"{path}: {said}")


def _worded(code: int) -> str:
    words = _CODES.get(code)
    return f"code {code}" if words is None else f"{words} (code {code})"


def _gpu(each: GpuDoc) -> Finding:
    size = (
        ""
        if each.memory_mib is None
        else f", {_gib(each.memory_mib)}{' of host memory' if each.unified else ''}"
    )
    silent = f"; it does not tell {', '.join(each.unread)}" if each.unread else ""
    said = f"{each.name}{size}: {each.state}{silent}"
    if each.state in ("ok", "asleep", "unsupported"):
        return good("gpu", said)
    return warn("gpu", f"{said}; no new model is loaded there while it is so")


def _cure(nvml: NvmlDoc) -> str:
    codes = [library.code for library in nvml.libraries]
    if 0 in codes:
        return "the library answers but lists none: nvidia-smi -L shows what it sees"
    if nvml.wsl:
        return _WSL_CURE
    known = [code for code in _CURE_ORDER if code in codes]
    if known:
        return _CURES[known[0]]
    return "see the log for sampling.probe_refused; nvidia-smi shows whether the driver answers"


_CURE_ORDER: Final = (18, 4, 999, 1_002, 15, 9, 12)


def _gib(mib: int) -> str:
    return f"{mib / _MIB_PER_GIB:.1f} GiB"
