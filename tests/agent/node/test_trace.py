"""The trace file: whole lines of ids and numbers, and no reason for a daemon to stop."""

import json
import os
from pathlib import Path

import pytest

from agent.effects.clock import SystemClock
from agent.node.routing.trace import Trace
from agent.store.folders import RefuseToStart
from router_core.ids import Id16
from router_core.record.membership import Liveness, ViewChange


def change(seq: int) -> ViewChange:
    return ViewChange(
        origin=Id16(bytes(16)),
        state=Liveness.FRESH,
        confirmed=True,
        epoch=3,
        inst=1,
        seq=seq,
        mono_ms=0,
        base_ms=0,
        due_ms=2_000,
        volatile=None,
        static=None,
    )


def test_every_record_is_one_line_with_its_stamp(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace", SystemClock())
    trace.records([change(1), change(2)])
    trace.close()
    began, *lines = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
    assert began["e"] == "began"
    assert [(line["origin"], line["epoch"], line["seq"]) for line in lines] == [
        ("00" * 16, 3, 1),
        ("00" * 16, 3, 2),
    ]


def test_a_file_that_cannot_be_opened_is_a_refusal_to_start(tmp_path: Path) -> None:
    with pytest.raises(RefuseToStart, match="--trace"):
        Trace(tmp_path / "missing" / "trace", SystemClock())


def test_a_disk_that_is_full_ends_the_trace_and_nothing_else() -> None:
    trace = Trace(Path("/dev/full"), SystemClock())
    trace.records([change(1)])
    trace.close()


def test_a_pipe_that_nobody_empties_ends_the_trace_and_holds_up_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RefuseToStart, match="--trace"):
        Trace(tmp_path / "pipe", SystemClock())
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    trace = Trace(tmp_path / "pipe", SystemClock())
    for number in range(5_000):
        trace.records([change(number)])
    os.close(reader)
    trace.close()
