"""The check for real GPU hosts, run against the fake driver."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.fake_nvml import FakeDriver

PROGRAM = Path(__file__).resolve().parents[3] / "scripts" / "gpu_check.py"


def run(folder: Path, environ: dict[str, str]) -> tuple[int, dict[str, Any]]:
    """Its exit status and what it wrote."""
    told = folder / "told.json"
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--json", str(told)],
        env=environ,
        capture_output=True,
        timeout=60,
        check=False,
    )
    return done.returncode, json.loads(told.read_text())


def test_it_measures_what_it_can_and_says_what_it_cannot(tmp_path: Path) -> None:
    fake = FakeDriver(tmp_path, script="gpu 0 name=Fake_Card util=3\ngpu 1 util=-")
    status, found = run(tmp_path, fake.environ)
    steps = found["steps"]
    assert (status, found["broken"]) == (0, [])
    assert steps["starts"]["gpus"] == ["Fake Card", "NVIDIA Fake 1"]
    assert (steps["idle"]["reads"], steps["idle"]["util_max"]) == (500, 3)
    assert steps["idle"]["fields_refused"] == [
        {"util": {"e": 3}, "util_memory": {"e": 3}}
        | {"vram_total": 24576 << 20, "vram_free": 24064 << 20, "vram_used": 0}
    ]
    assert "CUDA" in steps["load"]["unable"]
    assert steps["stopped"] == {"silent": True, "late_answer": True}
    assert fake.calls()["nvmlShutdown"] == fake.calls()["nvmlInitWithFlags"] == 5


def test_where_the_driver_is_not_loaded_every_step_says_so(tmp_path: Path) -> None:
    fake = FakeDriver(tmp_path, script="fail nvmlInitWithFlags rc=9")
    status, found = run(tmp_path, fake.environ)
    assert status == 0
    told = [step["unable"] for step in found["steps"].values()]
    assert all("answers 9" in why or "CUDA" in why for why in told)


def test_a_driver_that_does_not_end_in_time_breaks_the_rule(tmp_path: Path) -> None:
    fake = FakeDriver(tmp_path, script="gpu 0\nslow nvmlShutdown ms=2100 times=1")
    status, found = run(tmp_path, fake.environ)
    assert (status, found["broken"]) == (1, ["ended within 2 s"])
