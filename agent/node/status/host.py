"""This host for people: memory, what presses it, and what its GPU driver answers. Read from memory, on demand."""

from typing import Final

from agent.admin.documents import CardDoc, GpuDoc, HostDoc, LibraryDoc, NvmlDoc, PressedDoc
from agent.sampling.driver import DriverSeen
from agent.sampling.loop import Sampler
from agent.sampling.nvml import NvmlClient
from router_core.pressure.level import Pressed
from router_core.pressure.samples import GpuSample, HostSample

_MIB: Final = 1024 * 1024


def host_doc(sampler: Sampler, nvml: NvmlClient | None) -> HostDoc:
    """What was measured last; ``nvml`` is None where the settings say not to ask."""
    sampled = sampler.latest
    host = None if sampled is None else sampled.host
    available = None if sampled is None else sampled.mem_avail_bytes.value
    total = None if host is None else host.mem_total_bytes.value
    return HostDoc(
        memory_mib=None if total is None else total // _MIB,
        available_mib=None if available is None else available // _MIB,
        arc_mib=0 if host is None else host.arc_bytes // _MIB,
        pressed=tuple(_pressed_doc(each) for each in sampler.pressed()),
        nvml=NvmlDoc(off=True) if nvml is None else _nvml_doc(nvml, host),
    )


def _nvml_doc(nvml: NvmlClient, host: HostSample | None) -> NvmlDoc:
    driver = nvml.driver or DriverSeen(present=False)
    unread = nvml.unread()
    return NvmlDoc(
        present=driver.present,
        state=nvml.state.value,
        kernel=driver.loaded,
        on_disk=driver.on_disk,
        wsl=driver.wsl,
        cards=tuple(
            CardDoc(bus_id=card.bus_id, driver=card.driver, in_vm=card.in_vm) for card in driver.cards
        ),
        libraries=tuple(LibraryDoc(path=tried.path, code=tried.code) for tried in nvml.tried),
        gpus=tuple(_gpu_doc(gpu, unread.get(gpu.identity.key, ())) for gpu in nvml.samples(host)),
    )


def _gpu_doc(gpu: GpuSample, unread: tuple[str, ...]) -> GpuDoc:
    identity = gpu.identity
    total = identity.vram_total_bytes
    return GpuDoc(
        name=identity.name,
        state=gpu.state.name.lower(),
        unified=identity.unified,
        memory_mib=None if total is None else total // _MIB,
        unread=tuple(field for field in unread if not (identity.unified and field.startswith("memory"))),
    )


def _pressed_doc(pressed: Pressed) -> PressedDoc:
    return PressedDoc(
        resource=pressed.resource,
        signal=pressed.signal,
        level=pressed.level.name.lower(),
        value=pressed.value,
        threshold=pressed.threshold,
        unit=pressed.unit,
        gpu=pressed.gpu,
    )
