"""How another router is asked for timings, and what is made of them."""

import sys
from functools import partial
from pathlib import Path

import pytest

from tests.bench.bench_decide import a_round, batch_of, broken_gates, figures_of, over_peers
from tests.bench.decide_peers import WORKER, Peer, worker
from tests.bench.environments import Absent
from tests.support.fleets import a_row

ROWS = [a_row("n0"), a_row("n1", tg=100.0, in_flight=2), a_row("n2", resident=False)]


def serving(build: str) -> list[str]:
    """A worker of the stand-in ``build``, an expression over the nodes it is given."""
    program = f"import sys, time; sys.path.append({str(WORKER.parent)!r})\nfrom selection_worker import serve\nserve({build})"
    return [sys.executable, "-I", "-c", program]


def asked(tmp_path: Path, build: str, *, runs: int = 5) -> list[float]:
    with worker("stand-in", serving(build), tmp_path) as other:
        other.build(ROWS)
        return other.batch(len(ROWS), runs)


def test_a_batch_is_so_many_timings_of_the_selection_alone(tmp_path: Path) -> None:
    took = asked(tmp_path, "lambda nodes: (lambda: time.sleep(0.002), lambda _: nodes[0][0])", runs=7)
    assert len(took) == 7
    assert min(took) >= 2_000


def test_a_worker_is_given_the_speed_load_and_warmth_of_each_row(tmp_path: Path) -> None:
    told = "[('n0', 50.0, 0, True), ('n1', 100.0, 2, True), ('n2', 50.0, 0, False)]"
    assert asked(tmp_path, f"lambda nodes: (lambda: 1 / (nodes == {told}), lambda _: 'n1')")


def test_a_worker_keeps_a_fleet_of_each_size(tmp_path: Path) -> None:
    slow_if_many = "lambda nodes: (lambda: time.sleep(0.001 * len(nodes)), lambda _: 'n0')"
    with worker("stand-in", serving(slow_if_many), tmp_path) as other:
        other.build(ROWS)
        other.build(ROWS[:1])
        assert min(other.batch(3, 2)) >= 3_000
        assert min(other.batch(1, 2)) >= 1_000


def test_what_a_peer_prints_is_no_answer(tmp_path: Path) -> None:
    assert len(asked(tmp_path, "lambda nodes: (lambda: print('1 2 3'), lambda _: 'n0')")) == 5


@pytest.mark.parametrize(
    ("build", "why"),
    [
        ("lambda nodes: 1 / 0", "stand-in cannot be asked: ZeroDivisionError: division by zero"),
        ("lambda nodes: (lambda: None, lambda _: 'other')", "chose 'other', which is none of the nodes"),
        ("lambda nodes: sys.exit(1)", "ended before it answered"),
    ],
)
def test_a_peer_that_cannot_choose_is_absent_with_the_reason(tmp_path: Path, build: str, why: str) -> None:
    with pytest.raises(Absent, match=why):
        asked(tmp_path, build)


class Paced(Peer):
    """Takes ``us`` for every selection."""

    def __init__(self, us: float) -> None:
        self.us = us

    def batch(self, count: int, runs: int) -> list[float]:
        return [self.us] * runs


def test_who_is_slow_is_asked_less_often_and_who_is_too_slow_not_at_all() -> None:
    assert [batch_of(Paced(us), 8)[1] for us in (10.0, 10_000.0, 400_000.0, 2_400_000.0)] == [600, 100, 2, 1]
    with pytest.raises(Absent, match=r"takes 2\.6 s"):
        batch_of(Paced(2_600_000.0), 8)


def test_a_round_asks_everybody_forth_and_back() -> None:
    order: list[str] = []

    def noted(name: str, _runs: int) -> list[float]:
        order.append(name)
        return [float(len(order))]

    took = a_round({name: (partial(noted, name), 1) for name in ("ours", "a", "b")})
    assert order == ["ours", "a", "b", "b", "a", "ours"]
    assert took == {"ours": [1.0, 6.0], "a": [2.0, 5.0], "b": [3.0, 4.0]}


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    rounds = [
        {"pairmesh": [mine], "a-b": [theirs]} for mine, theirs in ((10.0, 5.0), (20.0, 40.0), (30.0, 10.0))
    ]
    p50, p99 = over_peers(8, rounds)
    assert (p50.name, p99.name) == ("decide.p50_us.n8.over_a_b", "decide.p99_us.n8.over_a_b")
    assert (p50.value, p50.baseline, p50.ratio) == (20.0, 10.0, 2.0)


def test_a_gate_is_held_against_the_median_of_the_rounds() -> None:
    fine, slow = [49.0] * 100, [51.0] * 100
    assert broken_gates(figures_of("decide", 8, [fine, fine, slow])) == []
    assert broken_gates(figures_of("decide", 8, [fine, slow, slow])) == [
        "decide.p50_us.n8 is 51.0 us, at most 50.0 is allowed"
    ]


def test_p99_may_be_three_times_p50_at_every_size() -> None:
    tail = [10.0] * 98
    for count in (2, 8, 64, 1_000):
        assert broken_gates(figures_of("decide", count, [[*tail, 30.0, 30.0]])) == []
        assert broken_gates(figures_of("decide", count, [[*tail, 31.0, 31.0]])) == [
            f"decide.p99_us.n{count} is 31.0 us, at most 30.0 is allowed"
        ]


def test_only_decisions_have_gates() -> None:
    for name in ("decide.fresh", "decide.alike", "decide.record", "decide.round_robin"):
        assert broken_gates(figures_of(name, 8, [[1e9]])) == []
