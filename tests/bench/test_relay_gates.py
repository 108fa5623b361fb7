"""When the relay's bench says no, and what it says of peers that it could not start."""

from pathlib import Path

import pytest

from tests.bench import relay_peers as peers
from tests.bench.bench_relay import Rounds, beside, broken_gates
from tests.bench.environments import Absent


def rounds(*rps: float, added_us: float = 100.0) -> Rounds:
    """Five rounds in which the relay passed ``rps`` and vllm-router 1,000 requests a second."""
    each = [added_us + 10] * len(rps)
    return Rounds(
        p50_us={"direct": [10.0] * len(rps), "pairmesh": each, "vllm-router": [210.0] * len(rps)},
        rps={"direct": [9_000.0] * len(rps), "pairmesh": list(rps), "vllm-router": [1_000.0] * len(rps)},
    )


def test_a_gate_holds_in_the_median_and_all_rounds_but_one() -> None:
    assert broken_gates(rounds(1_300, 1_300, 1_300, 1_300, 200)) == []
    assert len(broken_gates(rounds(1_300, 1_300, 1_300, 200, 200))) == 1
    assert len(broken_gates(rounds(1_100, 1_100, 1_100, 1_300, 1_300))) == 1
    assert len(broken_gates(rounds(1_300, 1_300, 1_300, 1_300, 1_300, added_us=251.0))) == 1


def test_streams_that_come_late_break_a_gate() -> None:
    seen = rounds(1_300)
    seen.stream_added_us = [(300.0, 4_000.0), (300.0, 4_900.0), (300.0, 90_000.0)]
    assert broken_gates(seen) == []
    seen.stream_added_us.append((300.0, 9_000.0))
    assert len(broken_gates(seen)) == 1


def test_a_peer_that_was_not_measured_breaks_no_gate() -> None:
    seen = rounds(100, 100, 100, 100, 100)
    del seen.p50_us["vllm-router"], seen.rps["vllm-router"]
    assert broken_gates(seen) == []


def test_ratios_are_the_relay_over_the_peer_round_by_round() -> None:
    figures = {figure.name: figure.value for figure in beside("vllm-router", rounds(500, 1_000, 4_000))}
    ratio = "relay.rps_ratio.c16.vllm-router"
    assert [figures[f"{ratio}{end}"] for end in ("", ".min", ".max", ".round1")] == [1.0, 0.5, 4.0, 0.5]
    assert figures["relay.added_p50_ratio.c1.vllm-router"] == 0.5


def test_a_program_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Absent, match="no-such-proxy is not installed"):
        peers.program("no-such-proxy")


def test_a_peer_that_ends_at_once_is_absent(tmp_path: Path) -> None:
    ends = peers.peer("broken", lambda upstreams, port, folder: ["false"], [1, 2], tmp_path, b"{}")
    with pytest.raises(Absent, match="it ended"), ends:
        pass
