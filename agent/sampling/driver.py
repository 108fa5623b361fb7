"""What of NVIDIA's driver this host has: cards and who drives them, libraries in their usual places, versions.

Read in the host thread, by files alone. A host with nothing to ask never starts the process that talks to the driver:
a card that belongs to a virtual machine, or to another driver, is nobody's to ask.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agent.sampling.files import Roots, read_text

LIBRARY: Final = "libnvidia-ml.so.1"
VENDOR: Final = "0x10de"
DISPLAY_CLASS: Final = "0x03"
VM_DRIVERS: Final = frozenset({"vfio-pci", "pci-stub", "pciback", "xen-pciback"})
"""Drivers that keep a card for a virtual machine."""
FREE_DRIVERS: Final = frozenset({"nouveau", "nova_core", "nova-core", "NovaCore"})
"""Linux' own drivers: NVIDIA's library knows nothing of their cards."""
WSL_DEVICE: Final = "dxg"
WSL_FOLDER: Final = Path("/usr/lib/wsl/lib")
"""Windows shares its driver's libraries here; a distribution's package may put a stub before them (Syllo/nvtop#441)."""
LINKER_CACHE: Final = Path("/etc/ld.so.cache")
USUAL_FOLDERS: Final = tuple(
    Path(folder)
    for folder in (
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
        "/usr/local/nvidia/lib64",
        "/run/opengl-driver/lib",
    )
)
"""Distributions', containers' on Google's nodes, NixOS': some of them in no linker's cache."""
CACHE_MOST: Final = 8 * 1024 * 1024
_CACHED: Final = re.compile(rb"\0(/[^\0]{1,4000}/libnvidia-ml\.so\.1)(?=\0)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """An NVIDIA card on the bus; ``driver`` is the kernel driver it is bound to, None for none."""

    bus_id: str
    driver: str | None

    @property
    def in_vm(self) -> bool:
        """Whether it is kept for a virtual machine."""
        return self.driver in VM_DRIVERS

    @property
    def askable(self) -> bool:
        """Whether NVIDIA's driver has it."""
        return self.driver is not None and self.driver not in VM_DRIVERS | FREE_DRIVERS


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryPlaces:
    """Where libraries are looked for beside the linker's own search, so that a test can hand in folders."""

    wsl: Path = WSL_FOLDER
    cache: Path = LINKER_CACHE
    usual: tuple[Path, ...] = USUAL_FOLDERS


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSeen:
    """``present``: there is something to ask; where cards show on the bus, only they count. ``loaded`` is the version of the driver in the kernel, None without
    one; ``on_disk`` the version of the library where it was last loaded from. ``cards`` are all on the bus, ``nodes``
    the driver's device files, ``wsl``: this is Windows' own Linux. ``libraries`` are the real paths of libraries found,
    without what the linker finds by itself."""

    present: bool
    loaded: str | None = None
    on_disk: str | None = None
    cards: tuple[Card, ...] = ()
    nodes: tuple[str, ...] = ()
    wsl: bool = False
    libraries: tuple[str, ...] = field(default=())

    @property
    def reboot_pending(self) -> bool:
        """Whether the library on disk belongs to another driver than the one that runs: clients that start now
        fail until the driver is loaded anew."""
        return None not in (self.loaded, self.on_disk) and self.loaded != self.on_disk

    def differs(self, before: "DriverSeen") -> bool:
        """Whether something changed since ``before`` that makes a failed start worth trying again."""
        return (self.loaded, self.cards, self.nodes, self.libraries) != (
            before.loaded,
            before.cards,
            before.nodes,
            before.libraries,
        )


def look_for_driver(
    roots: Roots, search: str, library: str | None, places: LibraryPlaces | None = None
) -> DriverSeen:
    """What is there now. ``search`` is the library search path of the process (``LD_LIBRARY_PATH``), ``library``
    the real path the library was loaded from, if it ever was."""
    places = places or LibraryPlaces()
    loaded = driver_version(read_text(roots.proc / "driver" / "nvidia" / "version") or "")
    cards = find_cards(roots)
    folders = [Path(folder) for folder in search.split(os.pathsep) if folder]
    present = (
        any(card.askable for card in cards)
        if cards
        else (roots.proc / "driver" / "nvidia").exists()
        or any((folder / LIBRARY).exists() for folder in (*folders, places.wsl))
    )
    wsl = (roots.dev / WSL_DEVICE).exists() or places.wsl.is_dir()
    return DriverSeen(
        present=present,
        loaded=loaded,
        on_disk=library_version(library),
        cards=cards,
        nodes=tuple(
            sorted(
                node.name
                for pattern in ("nvidia[0-9]*", "nvidiactl", WSL_DEVICE)
                for node in roots.dev.glob(pattern)
            )
        ),
        wsl=wsl,
        libraries=find_libraries(places, folders, wsl=wsl) if present else (),
    )


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


def find_libraries(places: LibraryPlaces, folders: Iterable[Path], *, wsl: bool) -> tuple[str, ...]:
    """The real paths of all libraries in their usual places, each once; Windows' own first where it is at home."""
    usual = [folder / LIBRARY for folder in places.usual]
    cached = [Path(os.fsdecode(path)) for path in _CACHED.findall(_cache(places.cache))]
    searched = [folder / LIBRARY for folder in folders]
    own = [places.wsl / LIBRARY] if wsl else []
    found = (os.path.realpath(path) for path in (*own, *searched, *cached, *usual) if path.exists())
    return tuple(dict.fromkeys(found))


def find_cards(roots: Roots) -> tuple[Card, ...]:
    """Every NVIDIA display or compute card on the bus, by its address."""
    return tuple(
        Card(bus_id=device.name, driver=_bound_to(device))
        for device in sorted((roots.sys / "bus" / "pci" / "devices").glob("*"))
        if read_text(device / "vendor") == VENDOR
        and (read_text(device / "class") or "").startswith(DISPLAY_CLASS)
    )


def _bound_to(device: Path) -> str | None:
    link = device / "driver"
    return link.resolve().name if link.exists() else None


def _cache(path: Path) -> bytes:
    """The linker's cache: whatever its version, paths stand in it between zero bytes."""
    try:
        with path.open("rb") as file:
            return file.read(CACHE_MOST)
    except OSError:
        return b""
