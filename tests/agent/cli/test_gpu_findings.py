"""Claims about what doctor says of GPUs: which card has which driver, which library answers with which code, and the cure."""

import pytest

from agent.admin.documents import CardDoc, GpuDoc, HostDoc, LibraryDoc, NvmlDoc, PressedDoc
from agent.cli import gpu_findings
from agent.cli.findings import Finding, Health
from agent.cli.pressure_lines import pressed_lines

CARD = CardDoc(bus_id="0000:01:00.0", driver="nvidia")
STUB = LibraryDoc(path="/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1", code=9)
WINDOWS = "/usr/lib/wsl/lib/libnvidia-ml.so.1"


def said(nvml: NvmlDoc, *healths: Health, asked: bool = True) -> str:
    found = list(gpu_findings.gpu(nvml, asked=asked))
    assert {each.about for each in found} <= {"gpu"}
    return "\n".join(each.said for each in found if each.health in (healths or tuple(Health)))


def test_a_host_without_anything_of_nvidia_is_well() -> None:
    assert said(NvmlDoc(), Health.GOOD) == "no NVIDIA card, driver or library on this host"
    assert said(NvmlDoc(off=True), Health.GOOD).endswith('nvml = "off"')


def test_what_answers_is_named_with_its_library_driver_and_card() -> None:
    unread = ("utilisation (3)",)
    gpus = (GpuDoc(name="NVIDIA RTX", state="ok", unified=False, memory_mib=24_576, unread=unread),)
    libraries = (STUB, LibraryDoc(path=WINDOWS, code=0))
    told = said(
        NvmlDoc(
            present=True,
            state="ready",
            kernel="550.1",
            cards=(CARD,),
            libraries=libraries,
            gpus=gpus,
            wsl=True,
        ),
        Health.GOOD,
    )
    assert "card 0000:01:00.0 is bound to nvidia" in told
    assert "driver 550.1" in told
    assert f"{WINDOWS} answers" in told
    assert f"{STUB.path}: finds no driver (code 9)" in told
    assert "NVIDIA RTX, 24.0 GiB: ok; it does not tell utilisation (3)" in told


def test_under_wsl_without_a_gpu_library_code_and_cure_are_named() -> None:
    told = said(NvmlDoc(present=True, state="backoff", wsl=True, libraries=(STUB,)), Health.WARNING)
    assert f"{STUB.path}: finds no driver (code 9)" in told
    assert "systemd/drop-ins/wsl.conf" in told
    assert 'nvml = "off"' in told


@pytest.mark.parametrize(
    ("codes", "cure"),
    [
        ((9,), "modprobe nvidia"),
        ((12,), "install the driver's NVML library"),
        ((12, 18), "reload the driver or reboot"),
        ((9, 4), "may not open the device files"),
        ((999,), "recreate it"),
        ((1_002,), "nvidia-ml-py"),
        ((0,), "nvidia-smi -L"),
        ((None,), "sampling.probe_refused"),
    ],
)
def test_a_card_that_does_not_answer_has_a_cure_for_each_code(
    codes: tuple[int | None, ...], cure: str
) -> None:
    libraries = tuple(LibraryDoc(path=f"/{n}", code=code) for n, code in enumerate(codes))
    told = said(NvmlDoc(present=True, state="backoff", cards=(CARD,), libraries=libraries), Health.WARNING)
    assert cure in told
    assert "no GPU answers" in told


def test_cards_of_virtual_machines_and_without_driver_are_told_apart() -> None:
    passed = CardDoc(bus_id="0000:41:00.0", driver="vfio-pci", in_vm=True)
    bare, free = CardDoc(bus_id="b", driver=None), CardDoc(bus_id="c", driver="nouveau")
    nvml = NvmlDoc(cards=(passed, bare, free))
    assert (
        said(nvml, Health.GOOD)
        == "card 0000:41:00.0 is bound to vfio-pci: it is a virtual machine's, not used here"
    )
    warnings = said(nvml, Health.WARNING)
    assert "card b has no driver" in warnings
    assert "modprobe nvidia" in warnings
    assert "card c is bound to nouveau: engines need NVIDIA's own driver" in warnings


def test_a_driver_replaced_on_disk_asks_for_a_reboot() -> None:
    told = said(NvmlDoc(present=True, kernel="550.1", on_disk="560.2", state="ready"), Health.BAD)
    assert told == "driver 550.1 runs, its library on disk is 560.2: reload the driver or reboot"


def test_without_a_daemon_only_files_are_told() -> None:
    nvml = NvmlDoc(present=True, kernel="550.1", cards=(CARD,))
    assert "only a running daemon asks the driver" in said(nvml, Health.SKIPPED, asked=False)
    assert said(nvml, Health.WARNING, Health.BAD, asked=False) == ""


def test_the_share_of_zfs_and_what_presses_the_host_are_told_with_values() -> None:
    pressed = PressedDoc(
        resource="memory", signal="memory.avail", level="critical", value=2.0**29, threshold=2.0**30, unit="B"
    )
    slow = PressedDoc(resource="cpu", signal="cpu.some", level="high", value=71.3, threshold=60.0, unit="%")
    lines = list(pressed_lines((pressed, slow)))
    assert lines[0] == "memory is critical: memory.avail is 0.5 GiB, the bound is 1.0 GiB"
    assert lines[1] == "cpu is high: cpu.some is 71%, the bound is 60%"
    found: list[Finding] = list(
        gpu_findings.host(HostDoc(available_mib=23_040, arc_mib=21_504, pressed=(pressed,)))
    )
    assert found[0].said.startswith("22.5 GiB available, 21.0 GiB of it held by the cache of ZFS")
    assert found[1] == Finding(health=Health.WARNING, about="pressure", said=lines[0])
