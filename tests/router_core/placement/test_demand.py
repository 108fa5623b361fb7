"""What is asked for, counted: smoothed, bounded, and the same for all who count."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_core import limits
from router_core.ids import Id8
from router_core.placement.demand import Demand, demand_key, keys_of
from router_core.record.codec import encode
from tests.support.fleets import a_row

A, B = demand_key(None, "a"), demand_key(None, "b")


def test_a_steady_rate_is_told_as_it_is() -> None:
    demand = Demand()
    for second in range(3_600):
        demand.note(A, 2.0, 1_000 * second)
    (row,) = demand.rows(3_600_000)
    assert row.rpm == pytest.approx(60, abs=1)
    assert row.work_c == pytest.approx(200, abs=2)


def test_what_is_asked_no_more_fades_and_is_left_out() -> None:
    demand = Demand()
    for second in range(600):
        demand.note(A, 1.0, 1_000 * second)
    assert demand.rows(600_000)
    assert demand.rows(600_000 + 3_600_000) == ()


def test_the_models_asked_for_most_are_told_and_the_table_forgets_the_oldest() -> None:
    demand = Demand(tau_ms=60_000)
    keys = [demand_key(None, f"m{n}") for n in range(2 * limits.DEMAND_MODELS)]
    for n, key in enumerate(keys):
        demand.note(key, 0.0, n)
    assert len(demand) == limits.DEMAND_MODELS
    for _ in range(5):
        demand.note(keys[-1], 0.0, 1_000)
    rows = demand.rows(1_000)
    assert len(rows) == limits.DEMAND
    assert rows[0].key8 == keys[-1]


@given(st.lists(st.tuples(st.sampled_from([A, B]), st.integers(0, 10**7), st.floats(0, 1e9)), max_size=50))
def test_rows_always_fit_the_record(asked: list[tuple[Id8, int, float]]) -> None:
    demand = Demand()
    for key, now, work_s in asked:
        demand.note(key, work_s, now)
    for row in demand.rows(10**7):
        encode(row)
        assert row.rpm >= 1


def test_a_model_is_known_by_its_digest_and_by_every_name_it_goes_by() -> None:
    row = a_row("a", engine="ollama", model="llama3.2:latest", digest=bytes(32))
    assert {
        demand_key(bytes(32), "x"),
        demand_key(None, "llama3.2"),
        demand_key(None, "llama3.2:latest"),
    } == keys_of(row)
    assert keys_of(a_row("a")) == {demand_key(None, "tiny")}
