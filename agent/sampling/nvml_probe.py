"""The process that talks to the NVIDIA driver, so that a driver that hangs or crashes takes nobody with it.

Started by path; needs the standard library and ``pynvml`` (loaded from the file it is told), imports nothing else.
One JSON request a line on stdin, one JSON reply a line on stdout, in order; it ends at the end of stdin, at ``quit``
or on SIGTERM, after ``nvmlShutdown``. Round each driver call it notes in a mapped file which GPU and which call is at
work. It keeps no values, judges none, retries nothing.
"""

import ctypes
import importlib.util
import json
import mmap
import os
import resource
import signal
import struct
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

PROTOCOL = 1
LINE_MOST = 256 * 1024
BINDING_MISSING = 1002
SYMBOL_MISSING = 1001
LIBRARY_MISSING = 12
OLDER = (13, 25, 26, SYMBOL_MISSING)
ASK_OLDER = (*OLDER, 3, 999)
"""Under Windows' own Linux the newer call of memory fails with 999 where the older one answers (XuehaiPan/nvitop#30)."""
NOT_FOUND = 6
NEEDED = "nvmlDeviceGetComputeRunningProcesses_v3"
PR_SET_PDEATHSIG = 1
PROGRESS = struct.Struct("<4sIIIQQ")
NOBODY = 2**32 - 1
SYMBOLS = (
    "nvmlInit", "nvmlShutdown", "nvmlSystemGetDriverVersion", "nvmlSystemGetNVMLVersion",
    "nvmlSystemGetCudaDriverVersion_v2", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID",
    "nvmlDeviceGetName", "nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetPersistenceMode", "nvmlDeviceGetDisplayActive",
    "nvmlDeviceGetAddressingMode", "nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetMemoryBusWidth",
    "nvmlDeviceGetMaxClockInfo", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetUtilizationRates",
)  # fmt: skip
"""Every call this process makes; the progress file names one by its place."""
MEMORY_CLOCK = 2


class Failed(Exception):
    """A driver call failed with ``code``."""

    def __init__(self, code: int, where: str) -> None:
        super().__init__(code, where)
        self.code = code
        self.where = where


class Progress:
    """The mapped file that shows the parent which call is under way."""

    def __init__(self, path: str) -> None:
        fd = os.open(path, os.O_RDWR)
        self._map = mmap.mmap(fd, 64)
        os.close(fd)
        self._calls = 0

    def begin(self, gpu: int, symbol: int) -> None:
        self._calls += 1
        now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        PROGRESS.pack_into(self._map, 0, b"PMP1", gpu, symbol, 1, self._calls, now)

    def end(self) -> None:
        struct.pack_into("<I", self._map, 12, 0)


class NvmlLibrary:
    """The binding, the library, and the handles of the GPUs by UUID. ``library`` is the one to use, empty for what the
    linker finds."""

    def __init__(self, file: str, library: str, progress: Progress) -> None:
        self._file = file
        self._library = library
        self._progress = progress
        self._binding: Any = None
        self._handles: dict[str, tuple[int, Any]] = {}
        self._ready = False

    def load(self) -> None:
        """Load the binding by location and initialise the library."""
        if self._binding is None:
            spec = importlib.util.spec_from_file_location("pynvml", self._file)
            if spec is None or spec.loader is None or Path(self._file).name != "pynvml.py":
                raise Failed(BINDING_MISSING, "pynvml")
            module = importlib.util.module_from_spec(spec)
            sys.modules["pynvml"] = module
            try:
                spec.loader.exec_module(module)
            except (OSError, ImportError, SyntaxError) as error:
                raise Failed(BINDING_MISSING, type(error).__name__) from None
            if not hasattr(module, NEEDED):
                raise Failed(BINDING_MISSING, NEEDED)
            self._binding = module
        if not self._ready:
            if self._library:
                # The binding asks for it by its soname, and meets this one.
                try:
                    ctypes.CDLL(self._library)
                except OSError:
                    raise Failed(LIBRARY_MISSING, "dlopen") from None
            self.call("nvmlInit")
            self._ready = True

    def close(self) -> None:
        if self._ready:
            self._ready = False
            self.call("nvmlShutdown")

    def call(self, symbol: str, *args: Any, gpu: int = NOBODY, **named: Any) -> Any:
        """Call one function of the binding; raises ``Failed``."""
        function = getattr(self._binding, symbol, None)
        if function is None:
            raise Failed(SYMBOL_MISSING, symbol)
        self._progress.begin(gpu, SYMBOLS.index(symbol))
        try:
            return function(*args, **named)
        except self._binding.NVMLError as error:
            raise Failed(int(error.value), symbol) from None
        finally:
            self._progress.end()

    def symbols(self) -> dict[str, bool]:
        return {symbol: hasattr(self._binding, symbol) for symbol in SYMBOLS}

    def versions(self) -> dict[str, Any]:
        named = {
            "driver": "nvmlSystemGetDriverVersion",
            "nvml": "nvmlSystemGetNVMLVersion",
            "cuda": "nvmlSystemGetCudaDriverVersion_v2",
        }
        return {name: text(self._tried(symbol)) for name, symbol in named.items()}

    def _tried(self, symbol: str, *args: Any, gpu: int = NOBODY, **named: Any) -> Any:
        """What a call gives, or ``{"e": code}``."""
        try:
            return self.call(symbol, *args, gpu=gpu, **named)
        except Failed as failed:
            return {"e": failed.code}

    def identities(self) -> dict[str, Any]:
        """Every GPU that tells its UUID; how many did not, and the first reason. Old handles are void."""
        self._handles = {}
        found: dict[str, Any] = {}
        unreadable, reason = 0, None
        for index in range(self.call("nvmlDeviceGetCount")):
            try:
                handle = self.call("nvmlDeviceGetHandleByIndex", index, gpu=index)
                uuid = text(self.call("nvmlDeviceGetUUID", handle, gpu=index))
            except Failed as failed:
                unreadable, reason = unreadable + 1, reason or failed.code
                continue
            self._handles[uuid] = index, handle
            found[uuid] = self._identity(index, handle)
        return {"gpu": found, "unreadable": unreadable, "unreadable_e": reason}

    def _identity(self, index: int, handle: Any) -> dict[str, Any]:
        def get(symbol: str, *args: Any) -> Any:
            return self._tried(symbol, handle, *args, gpu=index)

        pci, capability = get("nvmlDeviceGetPciInfo_v3"), get("nvmlDeviceGetCudaComputeCapability")
        return {
            "name": text(get("nvmlDeviceGetName")),
            "bus": pci if isinstance(pci, dict) else text(pci.busId),
            "cc10": capability if isinstance(capability, dict) else 10 * capability[0] + capability[1],
            "display": get("nvmlDeviceGetDisplayActive"),
            "persistence": get("nvmlDeviceGetPersistenceMode"),
            "addressing": get("nvmlDeviceGetAddressingMode"),
            "bus_bits": get("nvmlDeviceGetMemoryBusWidth"),
            "mem_mhz": get("nvmlDeviceGetMaxClockInfo", MEMORY_CLOCK),
        } | self._memory(index, handle)

    def fast(self, uuids: list[str]) -> dict[str, Any]:
        """Memory and use of each GPU asked for."""
        read: dict[str, Any] = {}
        for uuid in uuids:
            if uuid not in self._handles:
                read[uuid] = {"handle": {"e": NOT_FOUND}}
                continue
            index, handle = self._handles[uuid]
            rates = self._tried("nvmlDeviceGetUtilizationRates", handle, gpu=index)
            used = {"util": rates, "util_memory": rates}
            if not isinstance(rates, dict):
                used = {"util": rates.gpu, "util_memory": rates.memory}
            read[uuid] = used | self._memory(index, handle)
        return {"gpu": read}

    def _memory(self, index: int, handle: Any) -> dict[str, Any]:
        """Total, free, used, in bytes. The older call counts what the driver reserves as used."""
        version = getattr(self._binding, "nvmlMemory_v2", None)
        memory: Any = {"e": SYMBOL_MISSING}
        if version is not None:
            memory = self._tried("nvmlDeviceGetMemoryInfo", handle, version=version, gpu=index)
        if isinstance(memory, dict) and memory["e"] in ASK_OLDER:
            older = self._tried("nvmlDeviceGetMemoryInfo", handle, gpu=index)
            if memory["e"] in OLDER or not isinstance(older, dict):
                memory = older
        names = {"vram_total": "total", "vram_free": "free", "vram_used": "used"}
        if isinstance(memory, dict):
            return dict.fromkeys(names, memory)
        return {name: getattr(memory, field) for name, field in names.items()}


def text(value: Any) -> Any:
    """Bytes as text; any other value as it is."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def library_path() -> str | None:
    """The real path of the loaded driver library."""
    with Path("/proc/self/maps").open(encoding="utf-8", errors="replace") as maps:
        return next((line.split(maxsplit=5)[5].strip() for line in maps if "libnvidia-ml.so" in line), None)


def answer(driver: NvmlLibrary, request: dict[str, Any]) -> dict[str, Any]:
    """The reply to one request, without its id."""
    op = request["op"]
    if op == "hello":
        began = time.monotonic_ns()
        driver.load()
        init_ms = (time.monotonic_ns() - began) // 1_000_000
        rss_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        said = {"v": PROTOCOL, "lib": library_path(), "init_ms": init_ms, "rss_kib": rss_kib}
        return said | {"symbols": driver.symbols(), "versions": driver.versions()} | driver.identities()
    if op == "list":
        return driver.identities()
    if op == "fast":
        return driver.fast(request["uuids"])
    raise ValueError(f"unknown op {op!r}")


def serve(driver: NvmlLibrary, requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer requests until there are no more, or until asked to quit."""
    while line := requests.readline(LINE_MOST):
        request = json.loads(line)
        began = time.monotonic_ns()
        if request["op"] == "quit":
            reply = {"id": request["id"], "ok": True}
        else:
            try:
                reply = {"id": request["id"], "ok": True} | answer(driver, request)
            except Failed as failed:
                reply = {"id": request["id"], "ok": False, "e": failed.code, "where": failed.where}
                reply["lib"] = library_path()
        reply["t"] = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000
        reply["dt_us"] = (time.monotonic_ns() - began) // 1_000
        replies.write(json.dumps(reply, separators=(",", ":")).encode() + b"\n")
        replies.flush()
        if request["op"] == "quit":
            return


def stop(_signum: int, _frame: FrameType | None) -> None:
    """Ends the process once the call at work has come back; later signals change nothing."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(0)


def main() -> None:
    """Run the NVML child: answer requests on standard input until it ends."""
    asked = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, stop)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(asked["--parent"]):
        return
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    driver = NvmlLibrary(asked["--nvml"], asked.get("--library", ""), Progress(asked["--progress"]))
    try:
        serve(driver, sys.stdin.buffer, replies)
    finally:
        driver.close()


if __name__ == "__main__":
    main()
