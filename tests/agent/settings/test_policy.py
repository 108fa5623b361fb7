"""Loading, checking and printing ``policy.toml``."""

import dataclasses
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.settings.fault import Fault, toml
from agent.settings.policy import POLICY_FILE, PolicyRead, load_policy
from agent.settings.policy_schema import POLICY_KEYS, POLICY_SCHEMA
from agent.settings.policy_values import COMPARED
from agent.settings.reading import Schema
from agent.settings.removed import RemovedKey
from agent.settings.show import reference, show
from router_core.policy.placement import PRESETS, PlacementPolicy, Weights

CONSTANTS = {
    "nearest_names", "candidates_kept", "authority.in_flight", "authority.failures", "authority.open_ms",
    "authority.answers_kept", "scored_all", "scored_best", "scored_calm", "wait_doubt", "wait_doubt_each",
    "wait_by_size", "decode_share", "cost_least_s", "herd_share", "ahead_least", "patient_after",
}  # fmt: skip
"""Fields that no operator tunes."""


def write(folder: Path, text: str) -> Path:
    (folder / POLICY_FILE).write_text(text, encoding="utf-8")
    return folder


def loaded(folder: Path, text: str | None = None) -> PolicyRead:
    found = load_policy(folder if text is None else write(folder, text))
    assert isinstance(found, PolicyRead), found
    return found


def faults(folder: Path, text: str) -> dict[str, Fault]:
    found = load_policy(write(folder, text))
    assert isinstance(found, tuple), found
    return {fault.key: fault for fault in found}


def test_no_file_and_an_empty_one_are_balanced(tmp_path: Path) -> None:
    assert loaded(tmp_path).policy == loaded(tmp_path, "").policy == PlacementPolicy()


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_by_its_name_is_that_preset(tmp_path: Path, name: str) -> None:
    found = loaded(tmp_path, f'preset = "{name}"')
    assert (found.policy, found.policy.hash) == (PRESETS[name], PRESETS[name].hash)
    assert found.written["preset"].source == POLICY_FILE
    assert found.written["weights.slo"].source == f"preset {name}"


def test_a_number_beats_its_preset_and_says_where_it_comes_from(tmp_path: Path) -> None:
    found = loaded(
        tmp_path,
        """
        preset = "latency"
        [weights]
        memory = 0.3
        [class.interactive]
        deadline_s = 30.5
        tpot_s = "none"
        [herd]
        cap = 9
        """,
    )
    assert found.policy.weights == Weights(slo=0.7, memory=0.3, switch=0.1, pressure=0.1, speed=0.3)
    assert (found.policy.interactive.deadline_ms, found.policy.interactive.tpot_s) == (30_500, None)
    assert (found.policy.name, found.policy.herd_cap) == ("latency", 9.0)
    sources = {key: written.source for key, written in found.written.items()}
    assert (sources["weights.memory"], sources["weights.slo"]) == (POLICY_FILE, "preset latency")
    assert found.policy.hash != PRESETS["latency"].hash


def test_every_fault_is_reported_at_once(tmp_path: Path) -> None:
    found = faults(
        tmp_path,
        """
        preset = "latencey"
        weight = 1
        [weights]
        slo = 1.5
        speed = "much"
        [class.batch]
        deadline_s = 1
        [class.bulk]
        ttft_s = 1
        [herd]
        floor = 10
        [choice]
        veto_above = 0.2
        [session]
        headers = ["Authorization", "x y", "x-a", "x-a"]
        [aliases]
        gone = []
        twice = ["m", "m"]
        "a b" = ["../m"]
        """,
    )
    assert found.keys() == {
        "preset", "weight", "weights.slo", "weights.speed", "class.batch", "class.bulk", "herd", "choice",
        "session.headers", "aliases.gone", "aliases.twice", "aliases.a b",
    }  # fmt: skip
    assert found["preset"].nearest == "latency"
    assert found["weight"].nearest == "weights"
    assert str(found["weights.slo"]) == "policy.toml: weights.slo: out of range: 1.5; allowed: 0 to 1"
    assert found["class.bulk"].nearest == "class.batch"
    assert "before the first token" in found["class.batch"].problem


@pytest.mark.parametrize("name", COMPARED)
def test_a_policy_for_comparison_is_refused_with_the_place_where_it_runs(tmp_path: Path, name: str) -> None:
    fault = faults(tmp_path, f'preset = "{name}"')["preset"]
    assert "scripts/simulate placement" in fault.problem


@pytest.mark.parametrize(
    "text",
    [
        "preset = ",
        "weights = 3",
        "\0",
        "[weights]\nslo = nan",
        "[weights]\nslo = true",
        "x = " + "[" * 5_000,
        "[weights]\nslo = 0x" + "f" * 5_000,
        "weights.slo = {" + "b." * 30 + "c = 1}",
    ],
)
def test_a_broken_file_is_a_fault_and_no_crash(tmp_path: Path, text: str) -> None:
    assert len(faults(tmp_path, text)) == 1


def test_a_file_that_everybody_may_write_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "")
    (tmp_path / POLICY_FILE).chmod(0o666)
    found = load_policy(tmp_path)
    assert isinstance(found, tuple)
    (fault,) = found
    assert "writable by everybody" in fault.problem


def test_what_is_no_file_is_refused_and_waited_for_by_nobody(tmp_path: Path) -> None:
    (tmp_path / POLICY_FILE).mkdir()
    found = load_policy(tmp_path)
    assert isinstance(found, tuple)
    (fault,) = found
    assert str(fault) == f"{POLICY_FILE}: unreadable: not a file"
    (tmp_path / POLICY_FILE).rmdir()
    os.mkfifo(tmp_path / POLICY_FILE, 0o600)
    assert load_policy(tmp_path) == (fault,)


def test_aliases_keep_their_order_and_their_spelling(tmp_path: Path) -> None:
    found = loaded(tmp_path, '[aliases]\n"gpt-4o" = ["b:7b", "a"]\nX = ["x"]')
    assert found.policy.aliases == (("gpt-4o", ("b:7b", "a")), ("X", ("x",)))


def test_what_is_printed_loads_to_the_same_policy(tmp_path: Path) -> None:
    text = (
        'preset = "pack"\n[aliases]\na = ["b"]\n[class.batch]\ntpot_s = 0.5\n[session]\nheaders = ["X-Chat"]'
    )
    found = loaded(tmp_path, text)
    again = loaded(tmp_path, show(POLICY_SCHEMA, found.written))
    assert (again.policy, again.policy.hash) == (found.policy, found.policy.hash)
    assert found.policy.session_headers == ("x-chat",)


def test_every_field_of_the_policy_is_a_key_and_every_default_is_its_own() -> None:
    def names(part: object, above: str = "") -> set[str]:
        if not dataclasses.is_dataclass(part):
            return {above.removesuffix(".")}
        fields = [each.name for each in dataclasses.fields(part) if each.init]
        return set().union(*(names(getattr(part, name), f"{above}{name}.") for name in fields))

    keyed = [key.field for key in POLICY_KEYS]
    assert sorted(keyed) == sorted(names(PlacementPolicy()) - CONSTANTS)
    for line in reference(POLICY_SCHEMA).splitlines()[2:]:
        assert line.count(" | ") == 3, line


NUMBERS = [key.path for key in POLICY_KEYS if "." in key.path]
VALUES = st.one_of(
    st.floats(), st.integers(-10, 10_000), st.sampled_from([0, 0.5, 1, 1e12, "none", True, ""])
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(st.dictionaries(st.sampled_from(NUMBERS), VALUES, max_size=6))
def test_whatever_numbers_are_written_there_is_a_sound_policy_or_a_fault_about_them(
    tmp_path: Path, given_values: dict[str, object]
) -> None:
    text = "\n".join(f"{key} = {toml(value)}" for key, value in given_values.items())
    found = load_policy(write(tmp_path, text))
    if isinstance(found, PolicyRead):
        again = loaded(tmp_path, show(POLICY_SCHEMA, found.written))
        assert again.policy.hash == found.policy.hash
    else:
        tables = {*given_values} | {key.rpartition(".")[0] for key in given_values}
        assert {fault.key for fault in found} <= tables


def test_an_authority_that_counts_needs_a_place_on_this_host(tmp_path: Path) -> None:
    assert "needs a url" in faults(tmp_path, '[authority]\nmode = "advisory"')["authority"].problem
    assert "loopback" in faults(tmp_path, '[authority]\nurl = "http://192.168.1.7:80"')["authority"].problem
    found = loaded(
        tmp_path, '[authority]\nmode = "advisory"\nurl = "unix:/run/a.sock"\ncredential = "key"'
    ).policy
    assert (found.authority.socket, found.authority.credential) == ("/run/a.sock", "key")


def test_an_authority_has_50_ms_to_answer_unless_told_otherwise(tmp_path: Path) -> None:
    where = '[authority]\nmode = "advisory"\nurl = "unix:/run/a.sock"\n'
    assert loaded(tmp_path, where).policy.authority.budget_ms == 50
    assert loaded(tmp_path, where + "budget_ms = 200").policy.authority.budget_ms == 200
    assert "1 to 1000" in str(faults(tmp_path, where + "budget_ms = 0")["authority.budget_ms"])


OLD = Schema(
    POLICY_KEYS,
    [
        RemovedKey(path="choice.dice", since="0.1.0", instead="choices are not rolled"),
        RemovedKey(path="moods.blue", since="0.1.0", instead="there are no moods"),
    ],
)


@pytest.mark.parametrize("value", ["3", '"x"', "[1, 2]", "{ a = 1 }"])
def test_a_removed_key_is_a_warning_by_its_name_whatever_its_value_and_the_rest_is_in_force(
    tmp_path: Path, value: str
) -> None:
    write(tmp_path, f"[choice]\ndice = {value}\ntie_fixed = 0.125\n[moods]\nblue = {value}")
    found = load_policy(tmp_path, OLD)
    assert isinstance(found, PolicyRead), found
    assert list(map(str, found.warnings)) == [
        "policy.toml: choice.dice: removed in 0.1.0: choices are not rolled",
        "policy.toml: moods.blue: removed in 0.1.0: there are no moods",
    ]
    assert found.policy.tie_fixed == 0.125
    assert found.written.keys() == {key.path for key in POLICY_KEYS}


def test_a_removed_key_hides_no_fault_of_another(tmp_path: Path) -> None:
    write(tmp_path, "[choice]\ndice = 1\n[moods]\nblue = 1\nred = 1")
    found = load_policy(tmp_path, OLD)
    assert isinstance(found, tuple), found
    assert [str(fault) for fault in found] == ["policy.toml: moods.red: unknown key"]


def test_only_the_first_unknown_keys_are_guessed_at(tmp_path: Path) -> None:
    found = faults(tmp_path, "".join(f"prese{number} = 1\n" for number in range(500)))
    assert len(found) == 500
    assert {fault.nearest for fault in tuple(found.values())[:16]} == {"preset"}
    assert {fault.nearest for fault in tuple(found.values())[16:]} == {None}
