"""Tuning: one number at a time, equal requests, and nothing is taken over that chance could explain."""

from argparse import ArgumentParser, Namespace

import pytest
from msgspec.structs import replace

from router_core.errors import LocalMisuse
from router_core.policy.placement import PlacementPolicy
from router_core.sim.placement import tuning
from router_core.sim.placement.report import Mean
from router_core.sim.placement.tuning import KNOBS, SHIPPED, Effect, Part, Try
from scripts import simulate, simulate_tune
from scripts.shared_data import built_in
from scripts.simulate_placement import read_scenario, sized
from tests.sim.placement.test_reports import a_result

SHIPS = PlacementPolicy()
SLOWER = Try(path="weights.speed", value=0.05)


def an_effect(value: float, half: float | None, tried: Try = SLOWER, scenario: str = "herd") -> Effect:
    return Effect(tried=tried, scenario=scenario, change=Mean(value=value, half=half, n=4))


def test_every_knob_is_a_number_of_the_policy_and_tries_half_or_twice_of_it() -> None:
    for path in KNOBS:
        shipped = tuning.value_of(SHIPS, path)
        tries = tuning.halved_and_doubled(SHIPS, path)
        assert tries
        for tried in tries:
            assert tried.path == path
            assert tried.value in (shipped / 2, 2 * shipped)
            assert tuning.value_of(tuning.changed(SHIPS, {path: tried.value}), path) == tried.value


def test_a_try_that_the_policy_does_not_allow_is_left_out() -> None:
    assert [tried.value for tried in tuning.halved_and_doubled(SHIPS, "weights.speed")] == [0.5]


@pytest.mark.parametrize("path", ["weights", "weights.luck", "luck", "name", "tie_fixed.more"])
def test_what_is_no_number_of_the_policy_is_refused(path: str) -> None:
    with pytest.raises(LocalMisuse, match="is no number of the policy"):
        tuning.changed(SHIPS, {path: 1.0})


def test_a_value_the_policy_does_not_allow_is_refused() -> None:
    with pytest.raises(LocalMisuse, match="weight speed"):
        tuning.changed(SHIPS, {"weights.speed": 2.0})


def test_the_parts_share_no_request_and_no_client() -> None:
    supply = built_in()
    train, held = (tuning.part_of(supply, part) for part in Part)
    for name, lengths in supply.lengths.items():
        assert [*train.lengths[name], *held.lengths[name]] == list(lengths)
    assert len(train.clients) + len(held.clients) == len(supply.clients)
    assert not set(train.clients) & set(held.clients)


def told(*words: str) -> Namespace:
    parser = ArgumentParser()
    simulate_tune.add_arguments(parser)
    return parser.parse_args([*words, "--built-in", "--jobs=1"])


def test_what_was_chosen_is_judged_on_requests_that_nothing_was_chosen_on() -> None:
    args = told("herd", "--seeds=2", "--requests=60")
    scenarios = [sized(read_scenario("herd"), args.requests)]
    taken = {"weights.speed": 0.4}

    def effects_on(part: Part) -> list[Effect]:
        tried = Try(path="all of these")
        return tuning.effects(
            simulate_tune.played(scenarios, [SHIPPED, tried], {tried: taken}, part, args, None)
        )

    assert simulate_tune.judge(scenarios, taken, args, None) == effects_on(Part.HELD_OUT)
    assert effects_on(Part.HELD_OUT) != effects_on(Part.TRAINING)
    train, held = (set(simulate_tune.seeds_of(part, 999)) for part in Part)
    assert not train & held


@pytest.mark.parametrize(
    "wrong",
    ["--seeds=0", "--seeds=1000", "--requests=0", "--load=0", "--load=-1", "--load=inf", "--load=nan"],
)
def test_as_many_seeds_as_would_be_those_of_the_other_part_are_a_wrong_request(wrong: str) -> None:
    with pytest.raises(SystemExit):
        told(wrong)


def test_equal_runs_have_no_effect_and_runs_are_compared_by_scenario_and_seed() -> None:
    shipped = [a_result(seed=seed, ttft_p95=float(seed)) for seed in (1, 2, 3)]
    (effect,) = tuning.effects({SHIPPED: shipped, SLOWER: shipped})
    assert effect.change == Mean(value=0.0, half=0.0, n=3)
    dearer = [replace(one, ttft_p95=one.ttft_p95 * 8) for one in shipped]
    (effect,) = tuning.effects({SHIPPED: shipped, SLOWER: dearer})
    assert effect.change.value == pytest.approx(0.693, abs=0.001), "ln of the third root of 8"
    assert tuning.surely(effect.change) == 1


def test_a_try_tells_each_figure_and_whether_any_run_differed() -> None:
    shipped = [a_result(seed=seed) for seed in (1, 2, 3)]
    (effect,) = tuning.effects({SHIPPED: shipped, SLOWER: shipped})
    assert effect.same
    later = [replace(one, total_p95=2 * one.total_p95) for one in shipped]
    (effect,) = tuning.effects({SHIPPED: shipped, SLOWER: later})
    assert not effect.same
    assert effect.change.value == 0.0, "whole answers are no part of the cost"
    assert effect.figures["whole p95"].value == pytest.approx(0.693, abs=0.001)


def test_only_what_is_surely_better_somewhere_and_surely_worse_nowhere_is_taken_over() -> None:
    assert tuning.better([an_effect(-0.2, 0.1)]) == {"weights.speed": 0.05}
    assert tuning.better([an_effect(-0.2, 0.3)]) == {}, "chance explains it"
    assert tuning.better([an_effect(-0.2, None)]) == {}, "one seed says nothing"
    assert tuning.better([an_effect(-0.2, 0.1), an_effect(0.1, 0.05, scenario="skew")]) == {}
    more = Try(path="weights.speed", value=0.2)
    assert tuning.better([an_effect(-0.2, 0.1), an_effect(-0.3, 0.1, more)]) == {"weights.speed": 0.2}


def test_the_verb_prints_each_try_and_what_it_would_take_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "simulate tune herd --knobs tie_fixed --seeds 2 --requests 60 --built-in --jobs 1"
    monkeypatch.setattr("sys.argv", words.split())
    assert simulate.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["tie_fixed", "tie_fixed"]
    assert lines[2].startswith("surely better on the training part:")


def test_the_held_out_part_can_be_played_at_a_load_and_chooses_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "simulate tune herd --knobs tie_fixed --seeds 1 --requests 40 --part held-out --load 0.5 --built-in --jobs 1"
    monkeypatch.setattr("sys.argv", words.split())
    assert simulate.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:6] for line in lines[:2]] == [
        ["tie_fixed", "0.01", "->", value, "herd", "held-out"] for value in ("0.005", "0.02")
    ]
    assert lines[2].startswith("1 seeds")


def test_an_unknown_knob_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["simulate", "tune", "herd", "--knobs", "luck", "--built-in"])
    assert simulate.main() == 2
    assert "knob 'luck' is unknown" in capsys.readouterr().err
