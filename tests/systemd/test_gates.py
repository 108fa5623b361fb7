"""The gates of the unit let the shipped one pass and nothing worse."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GATE = ROOT / "scripts" / "check_unit"

pytestmark = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is missing")


def gate(folder: Path) -> tuple[int, str]:
    done = subprocess.run([GATE, folder], capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stderr


def changed(folder: Path, old: str, new: str) -> Path:
    """A copy of what is shipped with one line of the unit changed."""
    copy = shutil.copytree(ROOT / "systemd", folder / "systemd")
    unit = copy / "pairmesh.service"
    text = unit.read_text()
    assert f"\n{old}\n" in text
    unit.write_text(text.replace(f"\n{old}\n", f"\n{new}\n"))
    return copy


def test_the_shipped_unit_passes_without_a_word() -> None:
    assert gate(ROOT / "systemd") == (0, "")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("NoNewPrivileges=yes", "NoNewPriviledges=yes", "Unknown key"),
        ("WatchdogSec=30", "WatchdogSec=soon", "soon"),
        ("CapabilityBoundingSet=", "CapabilityBoundingSet=CAP_SYS_PTRACE CAP_SYS_ADMIN CAP_DAC_OVERRIDE", "exposure"),
        ("SystemCallFilter=~@privileged @resources @obsolete", "SystemCallFilter=", "exposure"),
    ],
)  # fmt: skip
def test_a_misspelt_key_a_bad_value_and_a_weaker_sandbox_do_not_pass(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    status, stderr = gate(changed(tmp_path, old, new))
    assert status == 1
    assert said in stderr


def test_a_bad_drop_in_does_not_pass(tmp_path: Path) -> None:
    copy = changed(tmp_path, "WatchdogSec=30", "WatchdogSec=30")
    (copy / "drop-ins" / "attribution.conf").write_text("[Service]\nProtectProk=default\n")
    status, stderr = gate(copy)
    assert status == 1
    assert "ProtectProk" in stderr


def test_without_the_tool_the_gate_says_that_it_was_skipped(tmp_path: Path) -> None:
    for tool in ("bash", "dirname"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    done = subprocess.run(
        ["bash", GATE], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0
    assert "skipped: systemd-analyze is not installed" in done.stderr
