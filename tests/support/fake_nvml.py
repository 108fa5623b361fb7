"""Builds the fake driver library, writes its script and reads its counters."""

import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("fake_nvml.c")
FLAGS = ("-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-Wl,-soname,libnvidia-ml.so.1")
ONE_GPU = "gpu 0 util=0 total=24576 used=1024"


def build(folder: Path, *variants: str) -> Path:
    """A folder with ``libnvidia-ml.so.1`` in it; skips the test where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: the fake driver library cannot be built")
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "libnvidia-ml.so.1"
    defines = [f"-D{variant}" for variant in variants]
    subprocess.run([compiler, *FLAGS, *defines, "-o", str(target), str(SOURCE)], check=True, timeout=60)
    return folder


class FakeDriver:
    """One library with its script and its counters, all below ``folder``."""

    def __init__(self, folder: Path, *variants: str, script: str = ONE_GPU) -> None:
        self.library = build(folder / "lib", *variants)
        self.script = folder / "script"
        self.counters = folder / "counters"
        self.write(script)

    @property
    def environ(self) -> dict[str, str]:
        """What makes a process load the library and read the script."""
        return {
            "LD_LIBRARY_PATH": str(self.library),
            "PAIRMESH_FAKE_NVML": str(self.script),
            "PAIRMESH_FAKE_NVML_COUNTERS": str(self.counters),
        }

    def write(self, script: str) -> None:
        """Replace the script in one step."""
        fresh = self.script.with_name("script.new")
        fresh.write_text("\n".join(line.strip() for line in script.strip().splitlines()) + "\n")
        os.replace(fresh, self.script)

    def calls(self) -> dict[str, int]:
        """How often each function was called."""
        if not self.counters.exists() or self.counters.stat().st_size < 64:
            return {}
        raw = self.counters.read_bytes()
        (entries,) = struct.unpack_from("<I", raw, 8)
        rows = (struct.unpack_from("<48sQQ", raw, 64 + 64 * n) for n in range(entries))
        return {name.rstrip(b"\0").decode(): calls for name, calls, _ in rows}
