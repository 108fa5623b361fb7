"""What is known of every NVIDIA GPU: replies folded into identities and readings, and what errors mean.

A GPU is its UUID; indices are never kept. One field that fails leaves the others alone, one GPU that is lost leaves
the others alone. Codes: https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceEnumvs.html (``nvmlReturn_t``).
Pure: it asks nothing itself and says what to ask (``wanted``, ``list_due``) and when to give up (``verdict``).
"""

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from agent.sampling.nvml_states import NO_PERMISSION, Absence
from agent.sampling.nvml_wire import (
    IMPLAUSIBLE,
    MEMORY_MOST,
    SYMBOL_MISSING,
    Fields,
    NvmlRefusal,
    NvmlReply,
    number_of,
    text_of,
)
from router_core.pressure.samples import (
    GpuIdentity,
    GpuSample,
    HostSample,
    Reading,
    ReadingStatus,
    measured,
    missing,
    unsupported,
)
from router_core.record.state import GpuState

NOT_SUPPORTED, NOT_FOUND, UNKNOWN_ERROR = 3, 6, 999
OURS: Final = frozenset({1, 2, 5})
"""Uninitialised, invalid argument, already initialised: our own misuse of the library."""
BACKEND: Final = frozenset({9, 12, 18})
"""No driver, no library, library and driver of different versions."""
GONE: Final = frozenset({8, 15, 16, 28})
"""Power cable, fallen off the bus, reset required, in use elsewhere: no more calls to this GPU."""
OLD_LIBRARY: Final = frozenset({13, 25, 26, SYMBOL_MISSING})
QUIET: Final = frozenset({IMPLAUSIBLE, NO_PERMISSION, NOT_FOUND, 7, 21})
"""Codes that say nothing about the health of library or process."""
ATS: Final = 2
"""``NVML_DEVICE_ADDRESSING_MODE_ATS``: the GPU walks the host's page tables, as those built into the processor do."""
SHARED_NAMES: Final = ("GB10", "Thor", "Orin", "Tegra")
"""What drivers that tell no addressing mode call such GPUs."""
SHARED_SHARE: Final = 0.9
STREAK: Final = 3
REVOKED_MS: Final = 10_000
RECYCLE_MS: Final = 600_000
LIST_MS: Final = 30_000
DROP_MS: Final = 600_000
PERCENT: Final = 100
BUS_BITS_MOST, MHZ_MOST, CC_MOST, ADDRESSING_MOST = 65_536, 100_000, 1_000, 255


@dataclass(slots=True)
class _Gpu:
    """``own_memory``: it once told of memory that cannot be the host's; ``shares``: it once showed that it has none."""

    identity: GpuIdentity
    addressing: int | None
    own_memory: bool = False
    shares: bool = False
    total: Reading[int] = field(default_factory=lambda: missing(0))
    free: Reading[int] = field(default_factory=lambda: missing(0))
    util: Reading[int] = field(default_factory=lambda: missing(0))
    lost_ms: int | None = None
    streak: int = 0


class GpuBook:
    """``count(code)`` hears of every error; ``lost(key, code)`` of a GPU that is gone, ``back(key)`` of its return."""

    def __init__(
        self,
        *,
        count: Callable[[int], None],
        lost: Callable[[str, int], None],
        back: Callable[[str], None],
    ) -> None:
        self._count = count
        self._lost = lost
        self._back = back
        self._gpus: dict[str, _Gpu] = {}
        self._listed_ms = 0
        self._revoked: deque[int] = deque(maxlen=STREAK)
        self._answered = False
        self._recycled_ms: int | None = None
        self.verdict: Absence | None = None

    @property
    def wanted(self) -> tuple[str, ...]:
        """The UUIDs worth asking about."""
        return tuple(uuid for uuid, gpu in self._gpus.items() if gpu.lost_ms is None)

    @property
    def empty(self) -> bool:
        """Whether no GPU is known."""
        return not self._gpus

    def list_due(self, now: int) -> bool:
        """Whether to look for lost GPUs."""
        lost = any(gpu.lost_ms is not None for gpu in self._gpus.values())
        return lost and now - self._listed_ms >= LIST_MS

    def listed(self, reply: NvmlReply, now: int) -> None:
        """Take the identities of all GPUs. One that is missing is lost, and forgotten 10 min later."""
        self._listed_ms, self.verdict = now, None
        if reply.unreadable_e is not None:
            self._count(reply.unreadable_e)
        for uuid, fields in reply.gpu.items():
            identity = _identity(uuid, fields)
            gpu = self._gpus.get(uuid)
            if gpu is None:
                gpu = self._gpus[uuid] = _Gpu(identity=identity, addressing=None)
            elif gpu.lost_ms is not None:
                gpu.lost_ms = None
                self._back(identity.key)
            addressing = number_of(fields, "addressing", 0, ADDRESSING_MOST)
            if isinstance(addressing, int):
                gpu.addressing = addressing
            gpu.identity = identity
            self._memory(gpu, fields, reply.t)
        for uuid, gpu in list(self._gpus.items()):
            if uuid in reply.gpu:
                continue
            self._lose(gpu, reply.unreadable_e or NOT_FOUND, now)
            if gpu.lost_ms is not None and now - gpu.lost_ms >= DROP_MS:
                del self._gpus[uuid]

    def read(self, reply: NvmlReply, now: int) -> None:
        """Take the readings of the GPUs asked about. ``verdict`` then says whether the process must go."""
        self.verdict = None
        codes: list[set[int]] = []
        for uuid, fields in reply.gpu.items():
            gpu = self._gpus.get(uuid)
            if gpu is not None and gpu.lost_ms is None:
                codes.append(self._read(gpu, fields, reply.t, now))
        if codes and all(seen == {UNKNOWN_ERROR} for seen in codes) and self._answered:
            self._revoked.append(now)
            if len(self._revoked) == STREAK and now - self._revoked[0] <= REVOKED_MS:
                self._revoked.clear()
                self.verdict = Absence.DENIED
                return
        elif codes:
            self._answered = self._answered or any(not seen for seen in codes)
            self._revoked.clear()
        self._judge(codes, now)

    def _read(self, gpu: _Gpu, fields: Fields, taken_ms: int, now: int) -> set[int]:
        handle = fields.get("handle")
        if isinstance(handle, NvmlRefusal):
            self._count(handle.e)
            self._lose(gpu, handle.e, now)
            return set()
        util, of_memory = number_of(fields, "util", 0, PERCENT), number_of(fields, "util_memory", 0, PERCENT)
        if "util_memory" in fields and _is_implausible(of_memory):
            util = NvmlRefusal(IMPLAUSIBLE)
        gpu.util = self._reading(util, taken_ms)
        self._memory(gpu, fields, taken_ms)
        codes = {gpu.util.code, gpu.free.code} - {0}
        gone = codes & GONE
        if gone:
            self._lose(gpu, min(gone), now)
            return set()
        gpu.streak = gpu.streak + 1 if _ailing(codes) else 0
        return codes

    def _judge(self, codes: list[set[int]], now: int) -> None:
        every: set[int] = set().union(*codes)
        ailing = every & OURS or any(gpu.streak >= STREAK for gpu in self._gpus.values())
        rested = self._recycled_ms is None or now - self._recycled_ms >= RECYCLE_MS
        if every & BACKEND:
            self.verdict = Absence.INIT
        elif ailing and rested:
            self._recycled_ms = now
            self.verdict = Absence.RECYCLE
            for gpu in self._gpus.values():
                gpu.streak = 0

    def _memory(self, gpu: _Gpu, fields: Fields, taken_ms: int) -> None:
        """Take one reply about memory. Of one that cannot be true nothing is believed: a free 0 beside a total of 0 is
        no full card."""
        total = number_of(fields, "vram_total", 1, MEMORY_MOST)
        most = total if isinstance(total, int) else MEMORY_MOST
        used, free = number_of(fields, "vram_used", 0, most), number_of(fields, "vram_free", 0, most)
        if any(_is_implausible(field) for field in (total, used, free)):
            total = free = NvmlRefusal(IMPLAUSIBLE)
        gpu.total = self._reading(total, taken_ms, told=False)
        gpu.free = self._reading(used if isinstance(used, NvmlRefusal) else free, taken_ms)
        if gpu.total.value is not None:
            gpu.identity = replace(gpu.identity, vram_total_bytes=gpu.total.value)

    def _reading(self, value: int | NvmlRefusal, taken_ms: int, *, told: bool = True) -> Reading[int]:
        if isinstance(value, int):
            return measured(value, taken_ms)
        if told:
            self._count(value.e)
        never = value.e == NOT_SUPPORTED or value.e in OLD_LIBRARY
        return unsupported(taken_ms, value.e) if never else missing(taken_ms, value.e)

    def _lose(self, gpu: _Gpu, code: int, now: int) -> None:
        if gpu.lost_ms is None:
            gpu.lost_ms = now
            self._listed_ms = now
            gpu.util, gpu.free = missing(now, code), missing(now, code)
            self._lost(gpu.identity.key, code)

    def unread(self) -> dict[str, tuple[str, ...]]:
        """By GPU key, the readings without a value, with their code where there is one."""
        return {
            gpu.identity.key: tuple(
                f"{name} ({reading.code})" if reading.code else name
                for name, reading in (("utilisation", gpu.util), ("memory", gpu.free))
                if reading.value is None
            )
            for gpu in self._gpus.values()
        }

    def samples(self, absence: GpuState | None, host: HostSample | None) -> tuple[GpuSample, ...]:
        """Every GPU by bus id. ``absence`` is the state of all while nobody answers for them; ``host`` tells of
        memory that GPUs share with it."""
        known = sorted(self._gpus.values(), key=lambda gpu: (gpu.identity.bus_id, gpu.identity.key))
        return tuple(_sample(gpu, absence, host) for gpu in known)


def _ailing(codes: set[int]) -> bool:
    return bool(codes - QUIET - OLD_LIBRARY - {NOT_SUPPORTED})


def _is_implausible(field: int | NvmlRefusal) -> bool:
    return isinstance(field, NvmlRefusal) and field.e == IMPLAUSIBLE


def _sample(gpu: _Gpu, absence: GpuState | None, host: HostSample | None) -> GpuSample:
    identity, free = gpu.identity, gpu.free
    if host is not None and _shares_memory(gpu, host):
        identity = replace(identity, unified=True, vram_total_bytes=host.mem_total_bytes.value)
        free = host.mem_avail_bytes
    state = GpuState.OK
    if gpu.lost_ms is not None:
        state = GpuState.LOST
    elif absence is not None:
        state = absence
    elif NO_PERMISSION in (gpu.free.code, gpu.util.code):
        state = GpuState.DENIED
    elif free.status is ReadingStatus.UNSUPPORTED:
        state = GpuState.UNSUPPORTED
    elif free.value is None and gpu.util.value is None:
        state = GpuState.UNKNOWN
    return GpuSample(identity=identity, state=state, util_pct=gpu.util, vram_free_bytes=free)


def _shares_memory(gpu: _Gpu, host: HostSample) -> bool:
    """Whether the GPU's memory is the host's: it is built into the processor, and tells of no memory, of an impossible
    one or of all that the host has. Drivers differ, and change their mind (XuehaiPan/nvitop#208, Syllo/nvtop#449).
    Memory that cannot be the host's settles it; a lost GPU shows nothing new."""
    whole, total = host.mem_total_bytes.value, gpu.total
    if gpu.lost_ms is None and whole is not None:
        as_large = total.value is not None and total.value >= SHARED_SHARE * whole
        built_in = gpu.addressing == ATS or any(name in gpu.identity.name for name in SHARED_NAMES)
        if total.value is not None and not as_large:
            gpu.own_memory = True
        elif built_in and (as_large or total.code in (NOT_SUPPORTED, IMPLAUSIBLE)):
            gpu.shares = True
    return gpu.shares and not gpu.own_memory


def _identity(uuid: str, fields: Fields) -> GpuIdentity:
    bits, mhz = number_of(fields, "bus_bits", 1, BUS_BITS_MOST), number_of(fields, "mem_mhz", 1, MHZ_MOST)
    bandwidth = 2 * mhz * bits // 8_000 if isinstance(bits, int) and isinstance(mhz, int) else None
    capability = number_of(fields, "cc10", 0, CC_MOST)
    return GpuIdentity(
        key=hashlib.sha256(uuid.encode()).digest()[:8].hex(),
        name=text_of(fields, "name") or "NVIDIA GPU",
        bus_id=text_of(fields, "bus") or "",
        cc10=capability if isinstance(capability, int) else None,
        display=_switch(fields, "display"),
        persistence=_switch(fields, "persistence"),
        mem_bw_gbs=bandwidth,
    )


def _switch(fields: Fields, name: str) -> bool | None:
    value = number_of(fields, name, 0, 1)
    return bool(value) if isinstance(value, int) else None
