"""The most requests lately in hand: a fall stays visible as long as it is asked about, and memory stays small."""

from hypothesis import given, settings
from hypothesis import strategies as st

from agent.node.state.peaks import Peaks


def test_nothing_was_ever_in_hand() -> None:
    assert Peaks().most(0) == 0


def test_a_fall_is_seen_from_before_it_and_not_from_after_it() -> None:
    peaks = Peaks()
    peaks.note(3, 10)
    peaks.note(1, 20)
    assert peaks.most(20) == 3
    assert peaks.most(21) == 1


@settings(max_examples=100)
@given(
    steps=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=40),
    asked=st.lists(st.integers(0, 60), max_size=5),
)
def test_it_answers_as_a_full_history_would(steps: list[tuple[int, int]], asked: list[int]) -> None:
    peaks, now = Peaks(), 0
    spans: list[tuple[int, int, int]] = []
    count, since = 0, 0
    for gap, then in steps:
        now += gap
        spans.append((since, now, count))
        count, since = then, now
        peaks.note(count, now)
    for start in sorted(asked):
        told = max([held for _, until, held in spans if until >= start], default=0)
        assert peaks.most(start) == max(told, count)


def test_memory_is_bounded_by_different_counts_not_by_requests() -> None:
    peaks = Peaks()
    for moment in range(10_000):
        peaks.note(moment % 3, moment)
    assert peaks.size <= 3
