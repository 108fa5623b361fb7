"""What decisions are called."""

from itertools import groupby
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from router_core.placement.decision.decide import decide
from router_core.placement.decision.ids import DecisionIds, new_id
from tests.support.fleets import NOW, POLICY, a_fleet, a_request, a_row

ALPHABET = frozenset("abcdefghijklmnopqrstuvwxyz234567")


@given(st.integers(0, 2**32))
def test_ids_are_26_characters_and_never_alike(seed: int) -> None:
    ids = DecisionIds(Random(seed))
    given_out = [ids.new() for _ in range(600)]
    assert len({each[4:] for each in given_out}) == len(given_out)
    assert {len(each) for each in given_out} == {26}
    assert ALPHABET.issuperset("".join(given_out))


@given(st.integers(0, 2**32))
def test_ids_given_one_after_another_begin_alike(seed: int) -> None:
    ids = DecisionIds(Random(seed))
    runs = [(begins, len(list(run))) for begins, run in groupby(ids.new()[:4] for _ in range(1_024))]
    assert len(runs) <= 4
    assert sum(count for _, count in runs) == 1_024


def test_a_decision_is_called_as_it_is_told_to_be() -> None:
    fleet, request = a_fleet(a_row("a")), a_request()
    assert decide(request, fleet, POLICY, NOW, Random(1), called="x" * 26).id == "x" * 26
    assert decide(request, fleet, POLICY, NOW, Random(1)).id == new_id(Random(1))
