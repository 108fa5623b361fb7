"""``pair-1.0``: pressure, ranking, choice. Numbers are the check vectors of its description."""

from typing import Any

import pytest

from router_core.sim.placement.baselines.pair import (
    JobEvent,
    Proxy,
    Scheduler,
    Smoothed,
    Snapshot,
    Telemetry,
    next_band,
    owns,
    smooth,
    supersedes,
)


def a_snapshot(loads: dict[str, tuple[int, int]], generation: int = 1) -> Snapshot:
    """A ranking of nodes with these (pending, pressure)."""
    order = sorted(loads, key=lambda node: (sum(loads[node]), loads[node][1], node))
    return Snapshot(
        generation=generation,
        order=tuple(order),
        pending={node: pending for node, (pending, _) in loads.items()},
        pressure={node: pressure for node, (_, pressure) in loads.items()},
    )


def a_proxy(loads: dict[str, tuple[int, int]]) -> Proxy:
    proxy = Proxy()
    proxy.apply(a_snapshot(loads))
    return proxy


def picks(proxy: Proxy, count: int, *owners: str) -> list[str]:
    return [proxy.choose(owners).order[0] for _ in range(count)]


def test_1_utilisation_is_smoothed_before_it_counts() -> None:
    states, known = [], None
    for sample in (0, 100, 100):
        known = smooth(known, sample)
        states.append((known.level, known.band))
    assert states == [(0.0, 0), (35.0, 0), (pytest.approx(57.75), 1)]


def test_2_a_sample_counts_for_ten_seconds() -> None:
    telemetry = Telemetry()
    telemetry.sample("a", 90, age_ms=9_999, now=50_000)
    assert telemetry.pressure("a", 50_001) == 3
    assert telemetry.pressure("a", 50_002) == 1


@pytest.mark.parametrize(
    ("band", "level", "after"),
    [(1, 35.0, 1), (1, 34.9, 0), (2, 64.9, 1), (3, 79.9, 2), (0, 90, 3), (3, 20, 0)],
)
def test_3_bands_have_edges_of_their_own_on_the_way_down(band: int, level: int | float, after: int) -> None:
    assert next_band(band, level) == after


def test_4_nodes_are_ordered_by_pending_and_pressure() -> None:
    scheduler = Scheduler(["a", "b", "c"])
    for node, percent in (("a", 90), ("b", 0), ("c", 75)):
        scheduler.telemetry.sample(node, percent, 0, 0)
    scheduler.told(JobEvent(key=("b", 1), state="queued", node="b", seq=1), 0)
    snapshot = scheduler.rank(0)
    assert snapshot is not None
    assert (snapshot.pending, snapshot.pressure) == ({"a": 0, "b": 1, "c": 0}, {"a": 3, "b": 0, "c": 2})
    assert snapshot.order == ("b", "c", "a")


def test_5_own_reservations_count_until_the_next_snapshot() -> None:
    proxy = a_proxy({"a": (0, 3), "b": (1, 0), "c": (0, 2)})
    assert picks(proxy, 3, "a", "b", "c") == ["b", "b", "c"]
    assert [proxy.load(node) for node in "abc"] == [3, 3, 3]


def test_6_the_least_loaded_is_filled_up_first() -> None:
    proxy = a_proxy({"a": (0, 0), "b": (2, 0), "c": (4, 0)})
    assert picks(proxy, 6, "a", "b", "c") == ["a", "a", "a", "b", "a", "b"]
    assert [proxy.load(node) for node in "abc"] == [4, 4, 4]


def test_7_a_burst_on_idle_nodes_is_spread_evenly() -> None:
    chosen = picks(a_proxy(dict.fromkeys("abcd", (0, 0))), 100, *"abcd")
    assert {node: chosen.count(node) for node in "abcd"} == dict.fromkeys("abcd", 25)


def test_8_all_facades_share_the_reservations() -> None:
    proxy = a_proxy({"a": (0, 0), "b": (0, 0)})
    chosen = [proxy.choose(("a", "b") if turn % 2 else ("b", "a")).order[0] for turn in range(50)]
    assert (chosen.count("a"), chosen.count("b")) == (25, 25)


def test_9_of_idle_nodes_the_smaller_uuid_gets_everything_whatever_its_speed() -> None:
    scheduler, proxy = Scheduler(["slow", "tall-and-fast"]), Proxy()
    for number in range(10):
        snapshot = scheduler.rank(number)
        if snapshot is not None:
            proxy.apply(snapshot)
        chosen = proxy.choose(["tall-and-fast", "slow"])
        assert chosen.order[0] == "slow"
        scheduler.told(JobEvent(key=("o", number), state="queued", node="slow", seq=2 * number), number)
        scheduler.told(
            JobEvent(key=("o", number), state="completed", node="slow", seq=2 * number + 1), number
        )
        proxy.release(chosen)


def test_10_a_snapshot_wipes_a_reservation_it_does_not_know_of() -> None:
    proxy = a_proxy({"a": (0, 0), "b": (0, 0)})
    assert picks(proxy, 1, "a", "b") == ["a"]
    proxy.apply(a_snapshot({"a": (0, 0), "b": (0, 0)}, generation=2))
    assert picks(proxy, 1, "a", "b") == ["a"]


def test_11_unknown_pressure_lies_between_idle_and_busy() -> None:
    scheduler = Scheduler(["a", "b"])
    scheduler.telemetry.sample("a", 0, 0, 0)
    idle = scheduler.rank(0)
    for second in range(1, 4):
        scheduler.telemetry.sample("a", 100, 0, 1000 * second)
    busy = scheduler.rank(3_000)
    assert idle is not None
    assert busy is not None
    assert (idle.order[0], busy.order[0]) == ("a", "b")
    assert busy.pressure["a"] == 2


def test_12_after_an_invalid_sample_smoothing_starts_anew() -> None:
    telemetry, seen = Telemetry(), []
    for second, percent in enumerate((90, None, 90)):
        telemetry.sample("a", percent, 0, 2_000 * second)
        seen.append(telemetry.pressure("a", 2_000 * second))
    assert seen == [3, 1, 3]


def test_19_only_newer_snapshots_are_applied() -> None:
    proxy, applied = Proxy(), []
    for generation in (5, 4, 6):
        proxy.reserved["a"] = 1
        applied.append(proxy.apply(a_snapshot({"a": (0, 0)}, generation)))
        assert bool(proxy.reserved) != applied[-1]
    assert applied == [True, False, True]


def test_20_on_ollama_latest_may_be_left_out() -> None:
    assert owns("ollama", ["llama3:latest"], "llama3")
    assert not owns("ollama", ["llama3.1:latest"], "llama3")
    assert not owns("llamacpp", ["llama3:latest"], "llama3")


def test_a_pinned_node_comes_first_without_a_reservation() -> None:
    proxy = a_proxy({"a": (0, 0), "b": (9, 3)})
    assert proxy.choose(["a", "b"], pin="b").order == ("b", "a")
    assert not proxy.reserved


def test_before_any_snapshot_uuids_decide() -> None:
    assert Proxy().choose(["b", "a"]).order == ("a", "b")


def test_released_and_moved_reservations_leave_nothing_behind() -> None:
    proxy = a_proxy({"a": (0, 0), "b": (0, 0)})
    chosen = proxy.choose(["a", "b"])
    proxy.move(chosen, "b")
    assert proxy.reserved == {"b": 1}
    proxy.release(chosen)
    assert not proxy.reserved


def test_a_release_after_a_newer_snapshot_changes_nothing() -> None:
    proxy = a_proxy({"a": (0, 0)})
    old = proxy.choose(["a"])
    proxy.apply(a_snapshot({"a": (0, 0)}, generation=2))
    proxy.choose(["a"])
    proxy.release(old)
    assert proxy.reserved == {"a": 1}


@pytest.mark.parametrize(
    ("old", "new", "wins"),
    [
        ({"seq": 1}, {"seq": 2}, True),
        ({"seq": 2}, {"seq": 1}, False),
        ({"seq": 1, "state": "queued"}, {"seq": 1, "state": "running"}, True),
        ({"seq": 1, "state": "completed"}, {"seq": 9}, False),
        ({"seq": 1, "state": "errored", "inferred": True}, {"seq": 0}, True),
        ({"seq": 1}, {"seq": 9, "inferred": True}, False),
        ({"seq": 9, "state": "completed"}, {"seq": 1, "generation": 1}, True),
    ],
)
def test_the_better_founded_job_event_wins(old: dict[str, Any], new: dict[str, Any], wins: bool) -> None:
    base = {"key": ("o", 1), "state": "running", "node": "a"}
    assert supersedes(JobEvent(**(base | new)), JobEvent(**(base | old))) is wins


def test_ended_and_unplaced_jobs_count_nowhere() -> None:
    scheduler = Scheduler(["a"])
    for seq, (state, node) in enumerate(
        [("queued", "a"), ("queued", None), ("queued", "a"), ("errored", "a")]
    ):
        scheduler.told(JobEvent(key=("o", 1), state=state, node=node, seq=seq), 0)
        snapshot = scheduler.rank(0)
        pending = 1 if seq in (0, 2) else 0
        assert snapshot is None or snapshot.pending == {"a": pending}


def test_jobs_of_an_origin_that_left_are_forgotten() -> None:
    scheduler = Scheduler(["a", "b"])
    scheduler.told(JobEvent(key=("b", 1), state="running", node="a", seq=1), 0)
    scheduler.forget("b")
    snapshot = scheduler.rank(0)
    assert snapshot is not None
    assert snapshot.pending == {"a": 0}


def test_smoothing_clamps_what_it_is_told() -> None:
    assert smooth(None, 300) == Smoothed(level=100.0, band=3)
