"""The page about placement tells codes, numbers and a worked example as the code has them."""

import re

import pytest

from router_core.placement.candidates.candidate import Row
from router_core.placement.candidates.fleet import Live
from router_core.placement.reasons import EXCLUSIONS, Cause, Reason
from scripts import page_tables
from tests.docs.tables import page, plain, table
from tests.router_core.placement.test_worked_example import NET, REQUEST, row_a, row_b, row_c, row_d, row_e
from tests.support.fleets import NOW, a_choice, a_fleet, a_ledger, a_row, decided

PAGE = page("placement.md")
EXAMPLE = table(PAGE, "## Worked example")


def test_the_numbers_on_the_page_are_those_of_the_code() -> None:
    assert page_tables.stale() == [], "run scripts/docs"


def test_every_number_that_a_formula_names_is_in_the_table() -> None:
    told = {plain(row[0]) for row in table(PAGE, "## Numbers")}
    formulas = re.findall(r"^    .*$", PAGE, re.MULTILINE)
    scoring = PAGE[PAGE.index("## Scoring") : PAGE.index("## Queueing")]
    named = {word for formula in formulas for word in re.findall(r"[a-z]+(?:_[a-z]+)+", formula)}
    named |= set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", scoring))
    assert named - {"t_p", "t_full"} <= told


def test_the_page_lists_every_filter_in_order_with_its_status() -> None:
    told = [(int(row[0]), plain(row[1]), int(row[3])) for row in table(PAGE, "## Filters")]
    assert told == [(reason.order, reason.value, reason.status) for reason in EXCLUSIONS]


def test_the_page_lists_every_reason_of_a_choice() -> None:
    told = {plain(row[0]) for row in table(PAGE, "### Reasons")}
    assert told == {reason.value for reason in Reason if reason.status == 200}


def test_the_page_lists_every_cause_of_an_ingress() -> None:
    told = {plain(row[0]) for row in table(PAGE, "### The serving node's answer")}
    assert told == {cause.value for cause in Cause}


def example() -> dict[str, list[str]]:
    """The worked example by the code, as the page writes it."""
    rows = [row_a(), row_b(), row_c(), row_d(), row_e()]
    ledger = a_ledger()
    ledger.reserve(a_choice(a_row("a"), prefill_s=0.5, decode_s=0.5), NOW)
    decision = decided(REQUEST, a_fleet(*rows, live=Live(ledger=ledger)), NET)
    names = {row.key: row.node_name.upper() for row in rows}
    found = {}
    for row in rows:
        (candidate,) = [each for each in decision.record.candidates if each.row == row.key]
        est, f, out = candidate.est, candidate.f, candidate.out
        if out is not None and out.startswith("dominated:"):
            out = f"dominated by {names[out.removeprefix('dominated:')]}"
        found[names[row.key]] = [
            *inputs(row),
            *(f"{value:.3f}" for value in (est.ahead, est.ttft, est.tpot, est.ect, est.cost)),
            *(f"{value:.3f}" for value in (f.slo, f.memory, f.switch, f.speed, candidate.score)),
            out or "",
        ]
    return found


def inputs(row: Row) -> list[str]:
    speeds = [f"{1 / row.prefill_s_per_token:,.0f}", f"{1 / row.token_s:.0f}"]
    return [*speeds, str(row.k), f"{(NOW - row.taken_ms) / 1000:g}", f"{row.pressure:.2f}"]


@pytest.mark.parametrize("name", "ABCDE")
def test_the_worked_example_is_what_the_code_computes(name: str) -> None:
    told = {cells[0]: cells[1:] for cells in EXAMPLE}
    assert told[name] == example()[name], " | ".join(["", name, *example()[name], ""])


def test_the_factors_of_the_example_add_up_to_its_scores() -> None:
    weights = NET.weights
    for _, _, _, _, _, pressure, *_, slo, memory, switch, speed, score, _ in EXAMPLE:
        parts = (
            (weights.slo, slo),
            (weights.memory, memory),
            (weights.switch, switch),
            (weights.pressure, pressure),
            (weights.speed, speed),
        )
        assert sum(weight * float(factor) for weight, factor in parts) == pytest.approx(
            float(score), abs=0.002
        )
