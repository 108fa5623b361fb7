"""What sampling says about itself."""

import json

from msgspec.structs import replace

from agent.effects.clock import SystemClock
from agent.observe.log import Log
from agent.sampling.report import SamplingReport
from router_core.pressure.level import Transition
from router_core.pressure.machine import NotifyLevel
from router_core.pressure.samples import GpuIdentity, GpuSample, GpuStanding, Sampled, measured, missing
from router_core.record.state import Flag, GpuState, Level
from tests.support.host_samples import host

CHANGE = Transition(
    signal="memory.avail", resource="memory", before=Level.NONE, after=Level.HIGH, value=7.0, threshold=9.0,
    unit="B", held_ms=30, reason="",
)  # fmt: skip
QUIET = Sampled(
    at_ms=0, profile="server", host=None, mem_avail_bytes=missing(0), cpu_busy_pct=missing(0),
    cpu_external_pct=missing(0), resources=(), flags=Flag(0),
)  # fmt: skip


class Desk:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.now = 0
        self.report = SamplingReport(Log(self.lines.append, SystemClock()), lambda: self.now)

    def said(self) -> list[dict[str, object]]:
        return [{k: v for k, v in json.loads(line).items() if k != "at"} for line in self.lines]

    def change(self, **changes: object) -> None:
        self.report.notify(NotifyLevel(transition=replace(CHANGE, **changes), profile="server"))


def test_a_change_of_level_is_told_with_its_numbers() -> None:
    desk = Desk()
    desk.change()
    (line,) = desk.said()
    assert line == {
        "level": "info", "event": "sampling.level_changed", "resource": "memory", "signal": "memory.avail",
        "from": "none", "to": "high", "value": 7.0, "threshold": 9.0, "unit": "B", "held_ms": 30, "profile": "server",
    }  # fmt: skip


def test_a_signal_gone_unknown_gives_a_reason_instead_of_a_value() -> None:
    desk = Desk()
    desk.change(after=None, value=None, threshold=None, reason="unknown")
    (line,) = desk.said()
    assert (line["to"], line["reason"]) == ("unknown", "unknown")
    assert "value" not in line


def test_a_signal_first_seen_at_rest_is_not_told() -> None:
    desk = Desk()
    desk.change(before=None, after=Level.NONE, reason="first")
    assert desk.lines == []
    desk.change(before=None, after=Level.HIGH, reason="first")
    assert len(desk.lines) == 1


def test_a_flapping_signal_is_told_six_times_a_minute_and_the_rest_is_counted() -> None:
    desk = Desk()
    for desk.now in range(0, 10_000, 1_000):
        desk.change(value=float(desk.now))
    desk.change(signal="memory.some")
    desk.change(gpu="ab12")
    assert [line["signal"] for line in desk.said()] == ["memory.avail"] * 6 + ["memory.some", "memory.avail"]
    assert desk.said()[-1]["gpu"] == "ab12"
    desk.now = 61_000
    desk.change(value=1.0)
    assert desk.said()[-1]["suppressed"] == 4


def test_a_silent_host_is_told_once_an_hour_and_its_return_once() -> None:
    desk = Desk()
    stuck = replace(QUIET, host_silent=True, host=host(5))
    for at_ms in (0, 1_000, 3_599_999, 3_600_000):
        desk.report.sampled(replace(stuck, at_ms=at_ms))
    desk.report.sampled(replace(QUIET, flags=Flag.DEGRADED))
    desk.report.sampled(QUIET)
    assert [line["event"] for line in desk.said()] == ["sampling.host_stuck"] * 2 + ["sampling.host_back"]


def test_a_failed_read_is_told_by_class_only() -> None:
    desk = Desk()
    desk.report.failed(ValueError("/srv/alice"))
    assert desk.said() == [{"level": "warning", "event": "sampling.read_failed", "error": "ValueError"}]


def test_the_age_of_a_sample_is_absent_until_there_is_one() -> None:
    desk = Desk()
    assert all(family.series == [] for family in desk.report.collect())
    desk.report.sampled(replace(QUIET, host=host(1_000)))
    desk.now = 3_500
    family, *rest = desk.report.collect()
    assert list(family.series) == [("", "", ("host",), 2.5)]
    assert all(family.series == [] for family in rest)


def test_a_gpu_is_told_by_the_hash_of_its_uuid_and_what_is_unknown_is_absent() -> None:
    desk = Desk()
    sample = GpuSample(
        identity=GpuIdentity(key="ab12", name="card"),
        state=GpuState.OK,
        util_pct=measured(40, 1_000),
        vram_free_bytes=missing(1_000),
    )
    gpu = GpuStanding(
        sample=sample, external_pct=measured(12.5, 1_000), source=4, level=Level.NONE, score=0.0
    )
    desk.report.sampled(replace(QUIET, gpus=(gpu,)))
    desk.now = 2_000
    told = {family.name: [row[2:] for row in family.series] for family in desk.report.collect()}
    assert told == {
        "pairmesh_sample_age_seconds": [(("gpu",), 1.0)],
        "pairmesh_gpu_utilization_percent": [(("ab12",), 40)],
        "pairmesh_gpu_external_percent": [(("ab12",), 12.5)],
        "pairmesh_gpu_memory_free_bytes": [],
        "pairmesh_gpu_state": [(("ab12",), 0)],
    }
