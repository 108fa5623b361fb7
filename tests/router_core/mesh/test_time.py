"""Ages by two clocks, token buckets, own stalls, loneliness, and the table of verdicts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_core.mesh.links.bucket import Bucket
from router_core.mesh.membership.liveness import LivenessEvidence, ObserverGap, Solitude, judge
from router_core.mesh.records.age import Base
from router_core.policy.mesh import MeshPolicy
from router_core.record.membership import Liveness

POLICY = MeshPolicy()
U, F, L, S, G = (
    Liveness.UNCONFIRMED,
    Liveness.FRESH,
    Liveness.LATE,
    Liveness.SUSPECT,
    Liveness.GONE,
)


@given(
    st.lists(st.tuples(st.integers(1, 2_000), st.integers(0, 400)), min_size=1, max_size=60),
    st.integers(-200, 200),
)
@settings(max_examples=100, deadline=None)
def test_an_age_errs_by_path_delay_and_drift_alone(steps: list[tuple[int, int]], ppm: int) -> None:
    base = Base(300_000)
    true, least = 0, 10**9
    for wait, delay in steps:
        true += wait
        origin = 77_000 + true + true * ppm // 1_000_000
        base.sample(true + delay, origin)
        least = min(least, delay)
        drift = 600_000 * 200 // 1_000_000 + 2
        assert -least - drift <= base.age(true + delay, origin) - delay <= drift


def test_a_relay_can_only_make_a_record_look_older() -> None:
    base = Base(300_000)
    base.sample(1_000, 500)
    before = base.age(2_000, 1_400)
    base.sample(9_000, 600)
    assert base.age(2_000, 1_400) == before
    assert base.age(9_000, 600) == 7_900


def test_a_negative_age_lowers_the_base() -> None:
    base = Base(300_000)
    base.sample(1_000, 0)
    assert base.age(1_000, 300) == 0
    assert base.value == 700


def test_the_base_forgets_what_is_older_than_two_buckets() -> None:
    base = Base(300_000)
    base.sample(0, 1_000)
    base.sample(300_000, 300_500)
    assert base.value == -1_000
    base.sample(600_000, 600_600)
    assert base.value == -600


def test_a_bucket_gives_its_burst_and_then_its_rate() -> None:
    bucket = Bucket(2_000, 5, 0)
    assert sum(bucket.take(0) for _ in range(9)) == 5
    assert bucket.ready_at(0) == 500
    assert not bucket.take(499)
    assert bucket.take(500)
    assert sum(bucket.take(100_000) for _ in range(9)) == 5


def test_a_bucket_in_debt_pays_it_back_first() -> None:
    bucket = Bucket(1_000, 2, 0)
    bucket.spend(0, 5)
    assert bucket.ready_at(0) == 4_000


def evidence(age: int, confirmed: bool = True, due: int = 2_000, **more: object) -> LivenessEvidence:
    return LivenessEvidence(age_ms=age, due_ms=due, confirmed=confirmed, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seen", "was", "verdict"),
    [
        (evidence(0), U, F),
        (evidence(0, confirmed=False), U, U),
        (evidence(59_999, confirmed=False), U, U),
        (evidence(60_001, confirmed=False), U, G),
        (evidence(2_500), F, F),
        (evidence(2_501), F, L),
        (evidence(5_000), L, L),
        (evidence(5_001), L, S),
        (evidence(60_000), S, S),
        (evidence(60_001), S, G),
        (evidence(60_001, due=20_000), S, S),
        (evidence(200_001, due=20_000), S, G),
        (evidence(0), S, F),
        (evidence(0), G, G),
        (evidence(100, broken_ms=2_999), F, F),
        (evidence(100, broken_ms=3_000), F, S),
        (evidence(100, broken_ms=1, refused=True), F, S),
        (evidence(100, lost_ms=999), F, F),
        (evidence(100, lost_ms=1_000), F, S),
        (evidence(2_600, lost_ms=1_000), L, S),
    ],
)
def test_the_table_of_verdicts(seen: LivenessEvidence, was: Liveness, verdict: Liveness) -> None:
    assert judge(seen, was, POLICY) is verdict


@pytest.mark.parametrize("was", [F, L, S])
@pytest.mark.parametrize("age", [0, 3_000, 6_000, 70_000])
def test_within_a_gap_nothing_worsens(was: Liveness, age: int) -> None:
    order = [F, L, S, G]
    verdict = judge(evidence(age), was, POLICY, in_gap=True)
    assert order.index(verdict) <= order.index(was)


def test_a_lonely_node_lets_nobody_go() -> None:
    assert judge(evidence(10**7), S, POLICY, lonely=True) is S
    assert judge(evidence(10**7, confirmed=False), U, POLICY, lonely=True) is U


def test_a_tick_more_than_half_a_second_late_is_a_gap_of_two_seconds() -> None:
    gap = ObserverGap(POLICY, 0)
    gap.ticked(100, 0)
    assert gap.observe(700) == 0
    assert gap.observe(701) == 501
    assert gap.active(2_700)
    assert not gap.active(2_701)
    assert gap.observe(702) == 0


def test_loneliness_needs_three_and_a_half_seconds_and_somebody_alive() -> None:
    alone = Solitude(POLICY, 0)
    assert not alone.update(3_400, 0, True)
    assert not alone.update(3_600, 0, False)
    assert alone.update(3_700, 0, True)
    assert alone.lonely
    assert not alone.update(4_000, 1, True)
    assert alone.lonely
    assert alone.update(6_000, 1, True)
    assert not alone.lonely
