"""What the product did when the vectors were recorded, it does still. ``scripts/nets`` prints the same comparison."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nets.all import NETS
from tests.nets.canonical import VECTORS, mark, plain
from tests.nets.daemons import DAEMONS
from tests.nets.decisions import DECISIONS
from tests.nets.lives import LIVES
from tests.nets.net import MARK, Net, compare, differences, read
from tests.nets.simulated import SIMULATED

ROOT = Path(__file__).parents[2]
_MOST_BYTES = 1_000_000


@pytest.mark.parametrize("tens", range(10))
def test_a_thousand_decisions_are_those_on_file(tens: int) -> None:
    labels = [label for label in DECISIONS.labels() if int(label) // 10 == tens]
    assert len(labels) == 10
    assert compare(DECISIONS, read(DECISIONS), labels) == []


@pytest.mark.parametrize("label", LIVES.labels())
def test_twenty_lives_go_step_by_step_as_on_file(label: str) -> None:
    assert compare(LIVES, read(LIVES), [label]) == []


@pytest.mark.parametrize("label", SIMULATED.labels())
def test_a_simulated_scenario_comes_to_the_figures_on_file(label: str) -> None:
    assert compare(SIMULATED, read(SIMULATED), [label]) == []


def test_two_daemons_reply_to_mixed_requests_as_on_file() -> None:
    assert compare(DAEMONS, read(DAEMONS)) == []


@pytest.mark.parametrize("net", NETS.values(), ids=NETS)
def test_nothing_is_on_file_that_is_not_compared(net: Net) -> None:
    assert list(read(net).marks) == net.labels()


def test_the_vectors_stay_small() -> None:
    assert sum(path.stat().st_size for path in VECTORS.iterdir()) < _MOST_BYTES


def test_another_hash_seed_changes_nothing() -> None:
    code = (
        "from tests.nets.all import NETS; from tests.nets.canonical import mark;"
        "print([mark(NETS[name].run(label), 16) for name, label in "
        "(('decisions', '007'), ('lives', '01'), ('simulated', 'mesh reset'), ('simulated', 'placement frozen balanced'))"
        " if name in NETS])"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            cwd=ROOT,
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout
        for hash_seed in ("0", "1", "2")
    }
    assert len(told) == 1


# --- the comparison itself -------------------------------------------------------------------------------------


def test_one_changed_decision_is_found_and_named() -> None:
    recorded = read(DECISIONS)
    label = DECISIONS.labels()[3]
    marks = recorded.marks[label]
    at = 41 * MARK
    recorded.marks[label] = marks[:at] + ("0" if marks[at] != "0" else "1") + marks[at + 1 :]
    (told,) = compare(DECISIONS, recorded, [label])
    assert told.startswith(f"decisions {label}/41: differs")


def test_of_a_document_kept_whole_the_difference_is_shown() -> None:
    recorded = read(DECISIONS)
    label = DECISIONS.labels()[4]
    old = recorded.whole[f"{label}/0"]
    recorded.whole[f"{label}/0"] = old | {"retry_after_s": 1234}
    recorded.marks[label] = mark(recorded.whole[f"{label}/0"], MARK) + recorded.marks[label][MARK:]
    (told,) = compare(DECISIONS, recorded, [label])
    assert told == f"decisions {label}/0: retry_after_s: 1234 -> {plain(old['retry_after_s']) or 'null'}"


def test_a_line_that_is_gone_or_new_is_told() -> None:
    recorded = read(SIMULATED)
    recorded.marks.pop("mesh calm")
    assert compare(SIMULATED, recorded, ["mesh calm"]) == ["simulated mesh calm: is new"]


def test_numbers_compare_to_nine_digits_and_by_value() -> None:
    assert plain(0.1 + 0.2) == plain(0.3)
    assert plain(1.0) == plain(1)
    assert plain(0.12345678) != plain(0.12345679)
    assert list(differences({"a": [1, 2]}, {"a": [1, 3]})) == ["a[1]: 2 -> 3"]
    assert list(differences({"a": 1}, {"b": 1})) == ["a: 1 -> gone", "b: none -> 1"]
