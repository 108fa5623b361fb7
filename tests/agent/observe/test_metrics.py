"""Claims about the exposition: unknown is absent, labels are capped, the text parses."""

import math
import re
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.observe.metrics import Counter, Family, Histogram, Registry, Shape, gauge_family
from router_core import limits
from router_core.errors import LocalMisuse

_LINE = re.compile(
    r'[a-z_:][a-z0-9_:]*(\{[a-z_]+="(?:[^"\\\n]|\\.)*"(,[a-z_]+="(?:[^"\\\n]|\\.)*")*\})? [0-9.e+-]+'
)


def rendered(*collectors: object) -> list[str]:
    failures: list[BaseException] = []
    registry = Registry(failures.append)
    registry.add(*collectors)  # type: ignore[arg-type]
    assert not failures
    lines = registry.render().splitlines()
    return [line for line in lines if "pairmesh_collectors_failed" not in line]


def test_a_family_is_named_from_the_start_and_shows_what_was_counted() -> None:
    """So that dashboards and alerts find it: https://prometheus.io/docs/practices/instrumentation/#avoid-missing-metrics"""
    decisions = Counter("pairmesh_decisions_total", "Decisions.", ("action", "reason"))
    assert rendered(decisions) == [
        "# HELP pairmesh_decisions_total Decisions.",
        "# TYPE pairmesh_decisions_total counter",
    ]
    decisions.inc("route", "native")
    decisions.inc("route", "native", by=2)
    assert rendered(decisions) == [
        "# HELP pairmesh_decisions_total Decisions.",
        "# TYPE pairmesh_decisions_total counter",
        'pairmesh_decisions_total{action="route",reason="native"} 3',
    ]


def test_what_has_no_labels_or_known_ones_starts_at_nothing() -> None:
    plain = Counter("pairmesh_plain_total", "Plain.")
    known = Counter("pairmesh_known_total", "Known.", ("class",), [("batch",)])
    seconds = Histogram("pairmesh_seconds", "Time.", bounds=(1.0,))
    waits = Histogram("pairmesh_wait_seconds", "Time.", ("class",), bounds=(1.0,), known=[("batch",)])
    assert [line for line in rendered(plain, known, seconds, waits) if not line.startswith("#")] == [
        'pairmesh_known_total{class="batch"} 0',
        "pairmesh_plain_total 0",
        'pairmesh_seconds_bucket{le="1"} 0',
        'pairmesh_seconds_bucket{le="+Inf"} 0',
        "pairmesh_seconds_sum 0",
        "pairmesh_seconds_count 0",
        'pairmesh_wait_seconds_bucket{class="batch",le="1"} 0',
        'pairmesh_wait_seconds_bucket{class="batch",le="+Inf"} 0',
        'pairmesh_wait_seconds_sum{class="batch"} 0',
        'pairmesh_wait_seconds_count{class="batch"} 0',
    ]


@pytest.mark.parametrize("unknown", [None, math.nan, math.inf, -math.inf])
def test_unknown_and_non_finite_values_are_absent_not_zero(unknown: float | None) -> None:
    class Pulled:
        def collect(self) -> Iterable[Family]:
            yield gauge_family("pairmesh_age_seconds", "Age.", ("source",), {("a",): unknown, ("b",): 1.5})

    assert rendered(Pulled())[2:] == ['pairmesh_age_seconds{source="b"} 1.5']


@pytest.mark.threat("T38")
def test_ten_thousand_models_make_no_more_series_than_the_cap() -> None:
    counter = Counter("pairmesh_in_flight_total", "By model.", ("model",))
    for number in range(10_000):
        counter.inc(f"model-{number}")
    lines = rendered(counter)[2:]
    assert len(lines) == limits.LABEL_VALUES + 1
    assert f'pairmesh_in_flight_total{{model="other"}} {10_000 - limits.LABEL_VALUES}' in lines


@pytest.mark.threat("T38")
def test_a_pulled_family_is_capped_as_well() -> None:
    values: dict[tuple[str, ...], float | None] = {(f"e{n}",): 1.0 for n in range(200)}
    family = gauge_family("pairmesh_in_flight", "By endpoint.", ("endpoint",), values, Shape.GAUGE)
    assert len(family.series) == limits.LABEL_VALUES + 1
    assert sum(value for *_, value in family.series) == 200


def test_a_histogram_counts_cumulatively() -> None:
    seconds = Histogram("pairmesh_decision_seconds", "Time.", bounds=(0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        seconds.observe(value)
    assert rendered(seconds)[1:] == [
        "# TYPE pairmesh_decision_seconds histogram",
        'pairmesh_decision_seconds_bucket{le="0.1"} 2',
        'pairmesh_decision_seconds_bucket{le="1"} 3',
        'pairmesh_decision_seconds_bucket{le="+Inf"} 4',
        "pairmesh_decision_seconds_sum 7.65",
        "pairmesh_decision_seconds_count 4",
    ]


def test_two_collectors_of_one_name_share_one_head() -> None:
    one, two = Counter("pairmesh_x_total", "X.", ("dir",)), Counter("pairmesh_x_total", "X.", ("dir",))
    one.inc("in")
    two.inc("out")
    assert [line for line in rendered(one, two) if line.startswith("#")] == [
        "# HELP pairmesh_x_total X.",
        "# TYPE pairmesh_x_total counter",
    ]


def test_a_failing_collector_costs_its_own_families_and_is_reported() -> None:
    class Broken:
        def collect(self) -> Iterable[Family]:
            raise RuntimeError("broken")

    failures: list[BaseException] = []
    registry = Registry(failures.append)
    good = Counter("pairmesh_good_total", "Good.")
    registry.add(Broken(), good)
    text = registry.render()
    assert "pairmesh_good_total 0" in text
    assert "pairmesh_collectors_failed 1" in text
    assert len(failures) == 1


def test_wrong_names_and_label_counts_are_our_misuse() -> None:
    with pytest.raises(LocalMisuse):
        Counter("Bad-Name", "")
    with pytest.raises(LocalMisuse):
        Counter("pairmesh_x_total", "", ("a", "b")).inc("only-one")
    with pytest.raises(LocalMisuse):
        Histogram("pairmesh_x", "", bounds=(1.0, 0.5))


@settings(max_examples=100)
@given(labels=st.lists(st.text(st.characters(), max_size=40), max_size=5), by=st.integers(0, 2**60))
def test_any_label_value_gives_lines_a_scraper_reads(labels: list[str], by: int) -> None:
    counter = Counter("pairmesh_x_total", "X \n \\.", ("name",))
    for label in labels:
        counter.inc(label, by=by)
    for line in rendered(counter):
        assert line.startswith("#") or _LINE.fullmatch(line), line
        assert line.encode("utf-8")
