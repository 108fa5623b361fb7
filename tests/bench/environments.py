"""Packages to measure beside, each in a virtual environment of its own: below the temporary folder, kept for the next
run. What cannot be had is ``Absent``, with the reason.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

INSTALL_S = 300.0


class Absent(Exception):
    """What cannot be measured here; the message says why."""


def environment(package: str, version: str) -> Path:
    """The folder of an environment with this release, installed on first use; raises ``Absent``."""
    folder = Path(tempfile.gettempdir()) / "pairmesh-bench-peers" / f"{package}-{version}"
    whole = folder / "installed"
    if not whole.exists():
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", f"{package}=={version}"]
        try:
            for command in ([sys.executable, "-m", "venv", str(folder)], pip):
                subprocess.run(command, check=True, capture_output=True, timeout=INSTALL_S)
        except (subprocess.SubprocessError, OSError) as fault:
            raise Absent(f"{package} {version} cannot be installed: {type(fault).__name__}") from fault
        whole.touch()
    return folder


def plain() -> dict[str, str]:
    """Environment variables without proxies: everything here is on loopback."""
    return {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
