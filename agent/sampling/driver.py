"""Whether this host has an NVIDIA driver, card or library at all, and which versions lie on disk.

Read in the host thread. A host with none of them never starts the process that talks to the driver.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.sampling.files import Roots, read_text

LIBRARY: Final = "libnvidia-ml.so.1"
VENDOR: Final = "0x10de"
DISPLAY_CLASS: Final = "0x03"
WSL_FOLDER: Final = Path("/usr/lib/wsl/lib")


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSeen:
    """``present``: there is something to ask. ``loaded`` is the version of the driver in the kernel, None without
    one; ``on_disk`` the version of the library where it was last loaded from."""

    present: bool
    loaded: str | None = None
    on_disk: str | None = None

    @property
    def reboot_pending(self) -> bool:
        """Whether the library on disk belongs to another driver than the one that runs: clients that start now
        fail until the driver is loaded anew."""
        return None not in (self.loaded, self.on_disk) and self.loaded != self.on_disk


def look_for_driver(roots: Roots, search: str, library: str | None) -> DriverSeen:
    """What is there now. ``search`` is the library search path of the process (``LD_LIBRARY_PATH``), ``library``
    the real path the library was loaded from, if it ever was."""
    loaded = driver_version(read_text(roots.proc / "driver" / "nvidia" / "version") or "")
    folders = [Path(folder) for folder in search.split(os.pathsep) if folder]
    present = (
        (roots.proc / "driver" / "nvidia").exists()
        or any((folder / LIBRARY).exists() for folder in (*folders, WSL_FOLDER))
        or _has_card(roots)
    )
    return DriverSeen(present=present, loaded=loaded, on_disk=library_version(library))


def driver_version(text: str) -> str | None:
    """The version in ``NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb ...``."""
    words = text.partition("Module")[2].split()
    words += text.partition("Module for")[2].split()
    return next((word for word in words if word[0].isdigit() and "." in word), None)


def library_version(library: str | None) -> str | None:
    """The version that the library's link leads to now, from the end of its real name."""
    if library is None:
        return None
    link = Path(library).parent / LIBRARY
    if not link.exists():
        return None
    version = link.resolve().name.partition(".so.")[2]
    return version if "." in version else None


def _has_card(roots: Roots) -> bool:
    return any(
        read_text(device / "vendor") == VENDOR
        and (read_text(device / "class") or "").startswith(DISPLAY_CLASS)
        for device in (roots.sys / "bus" / "pci" / "devices").glob("*")
    )
