"""Whether there is anything to ask, and which versions lie on disk."""

from pathlib import Path

import pytest

from agent.sampling.driver import (
    LIBRARY,
    Card,
    DriverSeen,
    LibraryPlaces,
    driver_version,
    library_version,
    look_for_driver,
)
from agent.sampling.files import Roots
from tests.support.trees import plant, roots

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (dvs-builder)\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\n"
CARD = "bus/pci/devices/0000:01:00.0"


@pytest.mark.parametrize(
    ("text", "version"), [(OPEN, "570.124.06"), (CLOSED, "550.54.14"), ("", None), ("Module", None)]
)
def test_the_version_of_the_loaded_driver_is_found(text: str, version: str | None) -> None:
    assert driver_version(text) == version


NOWHERE = LibraryPlaces(wsl=Path("/nowhere"), cache=Path("/nowhere"), usual=())


def seen(found: Roots, search: str = "", places: LibraryPlaces = NOWHERE) -> DriverSeen:
    return look_for_driver(found, search, None, places)


def with_card(folder: Path, driver: str | None, *, kind: str = "0x030000", at: str = CARD) -> Roots:
    """A host with one card, bound to ``driver``."""
    found = roots(folder, sys={f"{at}/vendor": "0x10de\n", f"{at}/class": f"{kind}\n"})
    if driver is not None:
        (found.sys / "bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
        (found.sys / at / "driver").symlink_to(found.sys / "bus/pci/drivers" / driver)
    return found


def test_a_host_without_driver_card_and_library_has_nothing(tmp_path: Path) -> None:
    other = {f"{CARD}/vendor": "0x1002\n", f"{CARD}/class": "0x030000\n"}
    assert seen(roots(tmp_path, sys=other), "/nowhere") == DriverSeen(present=False)


def test_a_loaded_driver_a_card_or_a_library_is_something_to_ask(tmp_path: Path) -> None:
    loaded = roots(tmp_path / "a", proc={"driver/nvidia/version": CLOSED})
    assert seen(loaded) == DriverSeen(present=True, loaded="550.54.14")
    card = Card(bus_id="0000:01:00.0", driver="nvidia")
    assert seen(with_card(tmp_path / "b", "nvidia", kind="0x030200")) == DriverSeen(
        present=True, cards=(card,)
    )
    assert not seen(with_card(tmp_path / "c", "nvidia", kind="0x040300")).present
    plant(tmp_path / "d", {LIBRARY: ""})
    assert seen(roots(tmp_path / "e"), f"/x:{tmp_path / 'd'}").present


@pytest.mark.parametrize("driver", ["vfio-pci", "pci-stub", "nouveau", None])
def test_a_card_of_a_virtual_machine_or_of_no_or_another_driver_is_nobodys_to_ask(
    tmp_path: Path, driver: str | None
) -> None:
    plant(tmp_path / "lib", {LIBRARY: ""})
    found = with_card(tmp_path / "host", driver)
    plant(found.proc, {"driver/nvidia/version": CLOSED})
    told = seen(found, str(tmp_path / "lib"))
    assert not told.present
    assert told.cards == (Card(bus_id="0000:01:00.0", driver=driver),)
    assert told.cards[0].in_vm is (driver in ("vfio-pci", "pci-stub"))
    with_card(tmp_path / "host", "nvidia", at="bus/pci/devices/0000:02:00.0")
    assert seen(found).present


def test_every_place_is_looked_at_for_libraries_and_each_file_is_told_once(tmp_path: Path) -> None:
    folders = {name: plant(tmp_path / name, {LIBRARY: ""}) for name in ("wsl", "cached", "usual", "search")}
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / LIBRARY).symlink_to(folders["cached"] / LIBRARY)
    cache = tmp_path / "ld.so.cache"
    names = ["/lib/libc.so.6", f"{folders['cached']}/{LIBRARY}", f"{tmp_path}/gone/{LIBRARY}"]
    cache.write_bytes(b"ld.so-1.7.0\0glibc-ld.so.cache1.1" + bytes(40) + "\0".join(names).encode() + b"\0")
    places = LibraryPlaces(wsl=folders["wsl"], cache=cache, usual=(folders["usual"], tmp_path / "again"))
    found = roots(tmp_path / "host", dev={"dxg": ""})
    told = seen(found, str(folders["search"]), places)
    assert (told.present, told.wsl, told.nodes) == (True, True, ("dxg",))
    assert told.libraries == tuple(
        str(folders[name] / LIBRARY) for name in ("wsl", "search", "cached", "usual")
    )


def test_whatever_makes_a_failed_start_worth_another_try_is_noticed(tmp_path: Path) -> None:
    found = with_card(tmp_path, "vfio-pci")
    before = seen(found)
    assert not seen(found).differs(before)
    (found.sys / CARD / "driver").unlink()
    assert seen(found).differs(before)
    plant(found.dev, {"nvidia0": "", "nvidiactl": ""})
    assert seen(found).nodes == ("nvidia0", "nvidiactl")


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
