"""What is installed: every module of the product, and nothing that only a checkout needs."""

from pathlib import Path

from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parent.parent
SIMULATOR = "router_core/sim/"


def test_the_wheel_holds_every_module_but_those_of_the_simulator() -> None:
    found = {each.distribution_path for each in WheelBuilder(str(ROOT)).recurse_included_files()}
    modules = {
        path.relative_to(ROOT).as_posix()
        for package in ("agent", "router_core")
        for path in (ROOT / package).rglob("*.py")
    }
    assert any(path.startswith(SIMULATOR) for path in modules)
    assert {path for path in found if path.endswith(".py")} == {
        path for path in modules if not path.startswith(SIMULATOR)
    }
    assert not any(path.startswith((SIMULATOR, "tests/", "scripts/")) for path in found)
