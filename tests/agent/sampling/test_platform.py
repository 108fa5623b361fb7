"""Which profile a host gets by itself."""

from pathlib import Path

import pytest

from agent.sampling.loop import ProfileChoice
from agent.sampling.platform import detect_profile
from tests.support.trees import roots

CHASSIS = "class/dmi/id/chassis_type"


@pytest.mark.parametrize(
    ("chassis", "profile"), [("3\n", "server"), ("10\n", "desktop"), ("31\n", "desktop"), ("junk", "server")]
)
def test_a_portable_case_is_a_desktop(tmp_path: Path, chassis: str, profile: str) -> None:
    assert detect_profile(roots(tmp_path, sys={CHASSIS: chassis})) == profile


def test_a_host_that_tells_nothing_is_a_server(tmp_path: Path) -> None:
    assert detect_profile(roots(tmp_path)) == "server"


def test_the_battery_of_a_mouse_does_not_count(tmp_path: Path) -> None:
    mouse = {"class/power_supply/hid/type": "Battery\n", "class/power_supply/hid/scope": "Device\n"}
    mains = {"class/power_supply/AC/type": "Mains\n"}
    assert detect_profile(roots(tmp_path, sys=mouse | mains)) == "server"
    assert detect_profile(roots(tmp_path, sys={"class/power_supply/BAT0/type": "Battery\n"})) == "desktop"


@pytest.mark.parametrize(
    ("driver", "status", "enabled", "profile"),
    [
        ("nvidia", "connected", "enabled", "desktop"),
        ("amdgpu", "disconnected", "enabled", "server"),
        ("i915", "connected", "disabled", "server"),
        ("ast", "connected", "enabled", "server"),
        ("virtio_gpu", "connected", "enabled", "server"),
    ],
)
def test_a_lit_display_on_a_real_graphics_card_is_a_desktop(
    tmp_path: Path, driver: str, status: str, enabled: str, profile: str
) -> None:
    connector = {"class/drm/card1-HDMI-A-1/status": status, "class/drm/card1-HDMI-A-1/enabled": enabled}
    found = roots(tmp_path, sys=connector)
    drivers = found.sys / "bus/pci/drivers" / driver
    drivers.mkdir(parents=True)
    device = found.sys / "class/drm/card1/device"
    device.mkdir(parents=True)
    (device / "driver").symlink_to(drivers)
    assert detect_profile(found) == profile


def test_a_profile_changes_after_two_equal_detections() -> None:
    choice = ProfileChoice("auto")
    assert choice.current == "server"
    seen = []
    for found in ("desktop", "server", "desktop", "server", "server", "desktop"):
        choice.detect(found)
        seen.append(choice.current)
    assert seen == ["desktop", "desktop", "desktop", "desktop", "server", "server"]


def test_an_operators_profile_is_never_overruled() -> None:
    choice = ProfileChoice("server")
    choice.detect("desktop")
    choice.detect("desktop")
    assert choice.current == "server"
