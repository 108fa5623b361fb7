"""Whether there is anything to ask, and which versions lie on disk."""

from pathlib import Path

import pytest

from agent.sampling.driver import DriverSeen, driver_version, library_version, look_for_driver
from tests.support.trees import plant, roots

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (dvs-builder)\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\n"
CARD = "bus/pci/devices/0000:01:00.0"


@pytest.mark.parametrize(
    ("text", "version"), [(OPEN, "570.124.06"), (CLOSED, "550.54.14"), ("", None), ("Module", None)]
)
def test_the_version_of_the_loaded_driver_is_found(text: str, version: str | None) -> None:
    assert driver_version(text) == version


def test_a_host_without_driver_card_and_library_has_nothing(tmp_path: Path) -> None:
    other = {f"{CARD}/vendor": "0x1002\n", f"{CARD}/class": "0x030000\n"}
    assert look_for_driver(roots(tmp_path, sys=other), "/nowhere", None) == DriverSeen(present=False)


def test_a_loaded_driver_a_card_or_a_library_is_something_to_ask(tmp_path: Path) -> None:
    loaded = roots(tmp_path / "a", proc={"driver/nvidia/version": CLOSED})
    assert look_for_driver(loaded, "", None) == DriverSeen(present=True, loaded="550.54.14")
    card = roots(tmp_path / "b", sys={f"{CARD}/vendor": "0x10de\n", f"{CARD}/class": "0x030200\n"})
    assert look_for_driver(card, "", None) == DriverSeen(present=True)
    sound = roots(tmp_path / "c", sys={f"{CARD}/vendor": "0x10de\n", f"{CARD}/class": "0x040300\n"})
    assert not look_for_driver(sound, "", None).present
    plant(tmp_path / "d", {"libnvidia-ml.so.1": ""})
    assert look_for_driver(roots(tmp_path / "e"), f"/x:{tmp_path / 'd'}", None).present


def test_a_library_of_another_version_than_the_driver_needs_a_reboot(tmp_path: Path) -> None:
    folder = plant(tmp_path / "lib", {"libnvidia-ml.so.550.54.14": "", "libnvidia-ml.so.560.35.03": ""})
    link = folder / "libnvidia-ml.so.1"
    link.symlink_to("libnvidia-ml.so.550.54.14")
    host = roots(tmp_path, proc={"driver/nvidia/version": CLOSED})
    loaded_from = str(folder / "libnvidia-ml.so.550.54.14")
    assert not look_for_driver(host, "", loaded_from).reboot_pending
    link.unlink()
    link.symlink_to("libnvidia-ml.so.560.35.03")
    assert look_for_driver(host, "", loaded_from).reboot_pending


def test_a_library_without_a_version_says_nothing(tmp_path: Path) -> None:
    folder = plant(tmp_path, {"libnvidia-ml.so.1": ""})
    assert library_version(str(folder / "libnvidia-ml.so.1")) is None
    assert library_version(str(tmp_path / "gone" / "x")) is None
