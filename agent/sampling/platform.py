"""Whether somebody works at this host: the pressure profile that ``auto`` stands for."""

from pathlib import Path
from typing import Final

from agent.sampling.files import Roots, read_number, read_text

PORTABLE_CHASSIS: Final = frozenset({8, 9, 10, 14, 30, 31, 32})
"""SMBIOS chassis types: portable, laptop, notebook, sub-notebook, tablet, convertible, detachable."""
SERVER_DISPLAYS: Final = frozenset(
    {"ast", "mgag200", "bochs", "qxl", "virtio_gpu", "virtio-pci", "simpledrm", "simple-framebuffer"}
)
"""Drivers of management controllers and virtual machines, whose display nobody sits at."""


def detect_profile(roots: Roots) -> str:
    """``desktop`` with a portable case, a battery or a lit display on a real graphics card, else ``server``."""
    portable = read_number(roots.sys / "class" / "dmi" / "id" / "chassis_type") in PORTABLE_CHASSIS
    return "desktop" if portable or _has_battery(roots) or _has_display(roots) else "server"


def _has_battery(roots: Roots) -> bool:
    """A battery that powers the host; those of mice and headsets have the scope ``Device``."""
    supplies = (roots.sys / "class" / "power_supply").glob("*")
    return any(
        read_text(supply / "type") == "Battery" and read_text(supply / "scope") != "Device"
        for supply in supplies
    )


def _has_display(roots: Roots) -> bool:
    drm = roots.sys / "class" / "drm"
    return any(
        read_text(connector / "status") == "connected"
        and read_text(connector / "enabled") == "enabled"
        and _driver(drm / connector.name.partition("-")[0]) not in SERVER_DISPLAYS
        for connector in drm.glob("card*-*")
    )


def _driver(card: Path) -> str:
    """The name of the driver behind a card; empty if it has none."""
    driver = card / "device" / "driver"
    return driver.resolve().name if driver.exists() else ""
