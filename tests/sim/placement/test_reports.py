"""What is made of runs: scenarios read strictly, means, gates, pictures, the command line."""

import gzip
import json
import xml.etree.ElementTree as ElementTree
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from router_core.errors import LocalMisuse
from router_core.policy.placement import PlacementPolicy
from router_core.sim.placement.arrivals import Arrival
from router_core.sim.placement.fleet_world import Ask
from router_core.sim.placement.pictures import Bar, bars, pictures
from router_core.sim.placement.report import Gate, Mean, Tally, headline_gates, mean_of, table
from router_core.sim.placement.scenario import Measured, parse_scenario
from router_core.sim.placement.trial import FIGURES as FIGURES_TOLD
from router_core.sim.placement.trial import Result, missed, play, requests_of
from scripts import shared_data, simulate_placement
from scripts.simulate_placement import exit_of

NODE = {"name": "a", "pp": 1000.0, "tg": 50.0, "slots": 2}
FIGURES = dict.fromkeys(
    [
        "ttft_p50",
        "ttft_p95",
        "ttft_p99",
        "total_p50",
        "total_p95",
        "total_p99",
        "slo_misses",
        "loaded_gib",
        "memory",
        "utilisation",
        "away",
        "makespan_s",
        "offered_rps",
        "capacity_rps",
    ],
    1.0,
) | dict.fromkeys(["requests", "failed", "cold_loads", "refusals", "retries", "leaks"], 0)


def a_result(
    scenario: str = "herd", policy: str = "balanced", rho: float = 0.7, seed: int = 1, **over: Any
) -> Result:
    return Result(scenario=scenario, policy=policy, rho=rho, seed=seed, **(FIGURES | over))


def the_suite(**over: Any) -> Tally:
    """A suite in which everything is 1, but for ours."""
    cases = [("herd", 0.7), ("herd", 0.85), ("multi-model", 0.5), ("frozen", 0.0), ("healthy", 0.0)]
    results = [
        a_result(name, policy, rho, cold_loads=1)
        for name, rho in cases
        for policy in ("oracle", "pair-1.0", "least-count", "clairvoyant")
    ]
    own: dict[str, Any] = {"cold_loads": 1} | over
    return Tally([*results, *(a_result(name, rho=rho, **own) for name, rho in cases)])


def test_a_mean_has_the_interval_of_students_t() -> None:
    mean = mean_of([1.0, 2.0, 3.0])
    assert (mean.value, mean.n) == (2.0, 3)
    assert mean.half == pytest.approx(4.30 / 3**0.5)
    assert mean_of([5.0]).half is None
    assert mean_of([46.3] * 3).half == 0.0, "equal values differ by nothing, whatever their sum rounds to"


def test_the_gates_are_ratios_of_means() -> None:
    gates = {
        gate.name: gate for gate in headline_gates(the_suite(ttft_p95=0.4, slo_misses=0.9, cold_loads=0))
    }
    assert gates["placement.ttft_p95.over_oracle"].ratio == pytest.approx(0.4)
    assert gates["placement.ttft_p95.over_pair"].ok
    assert gates["placement.cold_loads.over_pair"].ratio == 0.0
    assert gates["placement.slo_misses.over_best"].ok is False
    assert gates["placement.frozen.over_healthy"].ok
    assert gates["placement.in_flight_leak"].ok
    assert gates["placement.ttft_p95.rho_85.over_pair"].ok is None


def test_a_ratio_has_the_interval_of_what_its_seeds_have_in_common() -> None:
    """Two policies that rise and fall together differ surely, however far both spread."""
    ours = [a_result(policy="balanced", seed=seed, ttft_p95=1.0 * seed) for seed in (1, 2, 3, 4)]
    theirs = [a_result(policy="oracle", seed=seed, ttft_p95=2.0 * seed) for seed in (1, 2, 3, 4, 5)]
    assert Tally([*ours, *theirs]).paired("herd", 0.7, "balanced", "oracle", "ttft_p95") == pytest.approx(0.0)
    mixed = [replace(one, ttft_p95=one.ttft_p95 + 0.5 * (one.seed % 2)) for one in ours]
    half = Tally([*mixed, *theirs]).paired("herd", 0.7, "balanced", "oracle", "ttft_p95")
    assert half is not None
    assert half > 0.05
    assert Tally([ours[0], *theirs]).paired("herd", 0.7, "balanced", "oracle", "ttft_p95") is None


def test_the_goalposts_stand_where_they_were_set() -> None:
    held = {gate.name: (gate.gate, gate.goal) for gate in headline_gates(the_suite())}
    assert {name: limits for name, limits in held.items() if limits != (None, None)} == {
        "placement.ttft_p50.over_pair": (1.15, 1.0),
        "placement.ttft_p95.over_oracle": (0.80, None),
        "placement.ttft_p95.over_clairvoyant": (1.65, 1.3),
        "placement.ttft_p95.over_pair": (0.50, 0.35),
        "placement.total_p95.over_oracle": (1.22, 1.1),
        "placement.slo_misses": (0.05, None),
        "placement.ttft_p95.rho_85.over_oracle": (0.80, None),
        "placement.ttft_p50.rho_85": (0.65, None),
        "placement.total_p95.rho_85.over_oracle": (1.12, 1.0),
        "placement.slo_misses.rho_85": (0.14, None),
        "placement.cold_loads.over_pair": (0.50, None),
        "placement.cold_loads.ttft_p95.over_pair": (1.0, None),
        "placement.slo_misses.over_best": (0.70, 0.60),
        "placement.frozen.over_healthy": (2.1, None),
        "placement.in_flight_leak": (0.0, None),
    }


def test_a_missed_gate_and_a_leak_are_told_by_the_exit_status() -> None:
    assert exit_of(the_suite(), []) == 0
    good = the_suite(ttft_p50=0.5, ttft_p95=0.4, slo_misses=0.04, cold_loads=0)
    bad = the_suite(ttft_p50=0.5, ttft_p95=0.6, slo_misses=0.04, cold_loads=0)
    assert exit_of(good, headline_gates(good)) == 0
    assert exit_of(bad, headline_gates(bad)) == 1
    assert exit_of(the_suite(leaks=1), []) == 1


def test_a_ratio_to_nothing_is_a_missed_gate_and_valid_json() -> None:
    tally = the_suite(cold_loads=5)
    nothing = Tally(
        [replace(one, cold_loads=0) if one.policy == "pair-1.0" else one for one in all_of(tally)]
    )
    gates = headline_gates(nothing)
    lines = {line["name"]: line for line in simulate_placement.json_lines(nothing, gates)}
    told = json.loads(json.dumps(lines["placement.cold_loads.over_pair"], allow_nan=False))
    assert (told["value"], told["baseline"], told["ratio"], told["ok"]) == (5.0, 0.0, None, False)


def all_of(tally: Tally) -> list[Result]:
    return [result for case in tally.cases for result in tally.results(case)]


def test_a_leak_fails_the_suite() -> None:
    assert the_suite(leaks=1).leaks == 5
    assert {gate.name: gate.ok for gate in headline_gates(the_suite(leaks=1))}[
        "placement.in_flight_leak"
    ] is False


def test_a_gate_at_its_limit_is_met() -> None:
    assert Gate(name="g", value=1.0, unit="s", baseline=2.0, ratio=0.5, gate=0.5).ok
    assert Gate(name="g", value=1.0, unit="s", baseline=2.0, ratio=0.51, gate=0.5).ok is False


def test_counts_are_told_as_whole_numbers_and_never_as_powers_of_ten() -> None:
    runs = [a_result(seed=seed, refusals=count) for seed, count in ((1, 1_030), (2, 1_250))]
    (*_, line) = table(Tally(runs), "herd", 0.7, [("refusals", "refusals")])
    assert line.split() == ["refusals", "1140", "±", "1398"]


def test_a_table_holds_every_figure_of_every_policy() -> None:
    head, seeds, *lines = table(the_suite(away=0.25), "herd", 0.7, FIGURES_TOLD)
    assert seeds.split() == ["seeds", "1", "1", "1", "1", "1"]
    assert head.split() == ["oracle", "pair-1.0", "least-count", "clairvoyant", "balanced"]
    told = {line.split()[0]: line.split()[-4:] for line in lines}
    assert told.keys() == {name for name, _ in FIGURES_TOLD}
    assert told["away"] == ["1", "1", "1", "0.25"]
    for wanted in ("ttft_p50", "total_p99", "slo_misses", "cold_loads", "memory"):
        assert wanted in told


def test_bars_are_as_long_as_their_means() -> None:
    rows = [
        Bar(label=name, mean=Mean(value=value, half=None, n=1)) for name, value in (("a", 1.0), ("b", 4.0))
    ]
    drawn = ElementTree.fromstring(bars("t", "s", rows))
    first, second = (float(rect.attrib["width"]) for rect in drawn.iterfind("{*}rect[@x]"))
    assert second == pytest.approx(4 * first, rel=0.01)


def test_pictures_are_well_formed_and_escape_names() -> None:
    text = bars("a < b", "s", [Bar(label="x & y", mean=Mean(value=2.0, half=0.5, n=3))])
    assert ElementTree.fromstring(text).tag.endswith("svg")
    drawn = pictures(the_suite(), [("ttft_p95", "s")])
    assert "herd-70-ttft_p95.svg" in drawn
    for picture in drawn.values():
        ElementTree.fromstring(picture)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"spead": 1}, "spead"),
        ({"node": [NODE | {"slots": "two"}]}, "slots"),
        ({"node": []}, r"\$\.node"),
        ({"node": [NODE, NODE]}, "2 of the node 'a'"),
        ({"node": [NODE | {"slots": 0}]}, r"\$\.node\[0\]\.slots"),
        ({"node": [NODE | {"pp": 0}]}, r"\$\.node\[0\]\.pp"),
        ({"node": [NODE | {"tg": float("nan")}]}, r"\$\.node\[0\]\.tg"),
        ({"node": [NODE | {"memory_gib": float("inf")}]}, r"\$\.node\[0\]\.memory_gib"),
        ({"node": [NODE | {"name": "a/../b"}]}, r"\$\.node\[0\]\.name"),
        ({"model": []}, r"\$\.model"),
        ({"model": [{"name": "m"}, {"name": "m"}]}, "2 of the model 'm'"),
        ({"model": [{"name": "m", "size_gib": -1}]}, r"\$\.model\[0\]\.size_gib"),
        ({"beta": -3}, r"\$\.beta"),
        ({"warmup": 1}, r"\$\.warmup"),
        ({"policies": []}, r"\$\.policies"),
        ({"frozen": ["b"]}, "'b'"),
        ({"wire": {"period_ms": 0}}, r"\$\.wire\.period_ms"),
        ({"wire": {"perod_ms": 5}}, "perod_ms"),
        ({"load": {"arrivals": "sometimes"}}, "sometimes"),
        ({"load": {"arrivals": "at_once"}}, "at once without prompt"),
        ({"load": {"rhos": []}}, r"\$\.load\.rhos"),
        ({"load": {"rhos": [0.0]}}, "a load of 0"),
        ({"load": {"rhos": [-1]}}, r"\$\.load\.rhos"),
        ({"load": {"requests": 0}}, r"\$\.load\.requests"),
        ({"load": {"routers": [1, 1]}}, "a weight for each of 1 nodes"),
        ({"load": {"routers": [0]}}, "not all 0"),
    ],
)
def test_a_scenario_that_could_not_be_played_is_refused_with_its_place(
    fault: dict[str, Any], said: str
) -> None:
    with pytest.raises(LocalMisuse, match=said):
        parse_scenario({"name": "x", "node": [NODE]} | fault)


def test_published_measurements_replace_what_a_file_says_where_they_are_at_hand() -> None:
    scenario = parse_scenario(
        {"name": "x", "batching": "Qwen", "beta": 0.2, "node": [NODE | {"gpu": "4090"}]}
    )
    (bare,) = scenario.specs(Measured())
    (told,) = scenario.specs(Measured(speeds={"4090": (7_000.0, 128.0)}, slowdowns={"Qwen": 0.07}))
    assert (bare.engine.models[0].pp, bare.engine.models[0].tg, bare.engine.beta) == (1_000.0, 50.0, 0.2)
    assert (told.engine.models[0].pp, told.engine.models[0].tg, told.engine.beta) == (7_000.0, 128.0, 0.07)


def test_a_host_on_which_nothing_fits_is_refused() -> None:
    scenario = parse_scenario({"name": "x", "node": [NODE | {"memory_gib": 1.0}]})
    with pytest.raises(LocalMisuse, match="no model of x fits on a"):
        scenario.specs(shared_data.built_in().measured)


def test_unknown_policies_and_lengths_are_refused() -> None:
    scenario = parse_scenario({"name": "x", "node": [NODE], "load": {"lengths": "nowhere"}})
    with pytest.raises(LocalMisuse, match="policy 'best' is unknown"):
        play(scenario, "best", 0.5, 1, shared_data.built_in())
    with pytest.raises(LocalMisuse, match="lengths 'nowhere' are unknown"):
        play(scenario, "balanced", 0.5, 1, shared_data.built_in())


def test_a_host_of_more_slots_than_there_are_sizes_is_as_busy_as_was_asked() -> None:
    def gap_ms(slots: int) -> float:
        scenario = parse_scenario({"name": "x", "node": [NODE | {"slots": slots}], "load": {"requests": 500}})
        supply = shared_data.built_in()
        found = requests_of(scenario, scenario.specs(supply.measured), 0.5, 1, supply)
        return found[-1].at_ms / len(found)

    assert gap_ms(400) == pytest.approx(gap_ms(200), rel=0.3)


def test_a_mix_of_fewer_requests_than_there_are_slots_is_played_or_refused() -> None:
    mixed = {"name": "x", "node": [NODE | {"slots": 64}], "load": {"arrivals": "mixed", "requests": 20}}
    assert play(parse_scenario(mixed), "oracle", 0.5, 1, shared_data.built_in()).requests > 0
    mixed["load"] = {"arrivals": "mixed", "requests": 1}
    with pytest.raises(LocalMisuse, match="no request at all"):
        play(parse_scenario(mixed), "oracle", 0.5, 1, shared_data.built_in())


@pytest.mark.parametrize(
    ("first_ms", "end_ms", "status", "late"),
    [
        (1_900, 5_000, 200, False),
        (2_100, 5_000, 200, True),
        (500, 12_000, 200, True),
        (None, 9_000, 504, True),
    ],
)
def test_an_answer_misses_its_target_late_slow_or_never(
    first_ms: int | None, end_ms: int, status: int, late: bool
) -> None:
    arrival = Arrival(at_ms=0, router=0, model="m", prompt=1, output=101)
    ask = Ask(number=0, arrival=arrival, text_bytes=1, first_ms=first_ms, end_ms=end_ms, status=status)
    assert missed(ask, PlacementPolicy()) is late


def test_traces_are_read_as_they_were_published(tmp_path: Path) -> None:
    traces, profiles = tmp_path / "traces", tmp_path / "profiles"
    traces.mkdir()
    profiles.mkdir()
    for name in shared_data.AZURE.values():
        (traces / name).write_text(
            "TIMESTAMP,ContextTokens,GeneratedTokens\n"
            "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,0,109\n"
        )
    for name in shared_data.MOONCAKE.values():
        with gzip.open(traces / name, "wt") as out:
            out.write('{"timestamp": 2500, "input_length": 700, "output_length": 5, "hash_ids": [0, 9]}\n')
    with gzip.open(traces / "servegen_client_rates_day1.csv.gz", "wt") as out:
        out.write(
            "model_class,client,window_start_s,rate_rps,interarrival_cv,distribution,param1,param2\n"
            "m-small,1,0,0.5,1.0,Gamma,2.0,1\nm-small,1,600,0.9,1.0,Weibull,0.7,1\nm-small,2,0,9,1.0,Gamma,1,1\n"
        )
    (traces / "servegen_token_quantiles_day1.csv").write_text(
        "model_class,client,field,p5,p25,p50,p75,p95,p99\n"
        "m-small,1,input_tokens,1,2,3,4,5,99999\nm-small,1,output_tokens,6,7,8,9,10,11\n"
    )
    (profiles / "llama3_llamabench_2024.csv").write_text(
        "gpu,mem_gb,n_gpu,model,quant,model_gib,tg1024,pp1024\n"
        "3070,8,1,LLaMA-3 8B,Q4_K_M,4.58,70.94,2283.62\n3070,8,2,LLaMA-3 8B,Q4_K_M,4.58,1,1\n"
    )
    (profiles / "dgx_spark_batched_2025.csv").write_text(
        "model,context_tokens,batch,gen_tps_per_stream\nQwen Q8_0,4096,1,20\nQwen Q8_0,4096,4,10\nQwen Q8_0,512,4,1\n"
    )
    (profiles / "dgx_spark_depth_2025.csv").write_text(
        "model,depth_tokens,gen_tps_tg32\nQwen Q8_0,0,22\nQwen Q8_0,4096,20\nQwen Q8_0,8192,1\nother Q4,0,9\n"
    )
    found = shared_data.supply(tmp_path)
    conv = found.lengths["azure_conv"]
    assert [(one.prompt, one.output) for one in conv] == [(374, 44), (1, 109)]
    assert conv[1].at_s == pytest.approx(4.314579)
    assert found.lengths["mooncake_synthetic"][0].blocks == (0, 9)
    client = found.clients[0]
    assert len(found.clients) == 1
    assert (client.rate_rps, client.distribution, client.shape) == (0.9, "weibull", 0.7)
    assert client.prompt[-1] == 16_384
    assert found.measured.speeds == {"3070": (2283.62, 70.94)}
    assert found.measured.slowdowns == {"Qwen": pytest.approx(1 / 3)}
    assert found.measured.depth_slopes == {"Qwen": pytest.approx(0.1 / 4)}


def run(*told: str) -> int:
    parser = ArgumentParser()
    simulate_placement.add_arguments(parser)
    return simulate_placement.main(parser.parse_args([*told, "--jobs=1"]))


def test_the_command_prints_one_object_a_line_and_writes_pictures(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run("frozen", "--built-in", "--seeds=1", "--json", "--policies=pair-1.0", f"--svg={tmp_path}") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"name", "value", "unit", "baseline", "ratio", "gate", "ok"} <= lines[0].keys()
    assert "frozen.0.pair-1.0.makespan_s" in {line["name"] for line in lines}
    assert (tmp_path / "frozen-00-ttft_p95.svg").exists()


def test_the_command_prints_tables_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("frozen", "--built-in", "--seeds=1", "--policies=pair-1.0") == 0
    assert "ttft_p95" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (["nowhere"], "no such file, here are code, frozen, herd"),
        (["herd", "--shared=/nonexistent"], "/nonexistent has no folder traces"),
        (["frozen", "--policies=best"], "policy 'best' is unknown"),
        (["frozen", "--svg=/dev/null"], "/dev/null"),
        (["frozen", "--suite=headline"], "a suite says itself"),
        (["--policies=p2c", "--suite=headline"], "a suite says itself"),
    ],
)
def test_a_wrong_request_is_told_before_anything_is_played(
    told: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*told) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert not out


@pytest.mark.parametrize("told", ["--seeds=0", "--requests=0", "--requests=-5", "--jobs=0", "--seeds=many"])
def test_a_count_of_nothing_is_a_wrong_request(told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        run("frozen", told)
    assert left.value.code == 2
    assert told.partition("=")[2] in capsys.readouterr().err


def test_one_request_is_enough_to_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("herd", "--built-in", "--seeds=1", "--requests=1", "--policies=balanced, oracle") == 0
    out = capsys.readouterr().out
    assert "built-in workloads" in out
    assert "oracle" in out


def test_a_scenario_that_is_named_twice_is_played_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("frozen", "frozen", "--built-in", "--seeds=1", "--policies=pair-1.0,pair-1.0") == 0
    assert "1 runs" in capsys.readouterr().out


NODE_TOML = '[[node]]\nname = "a"\npp = 1000\ntg = 50\nslots = 2\n'


def test_a_scenario_file_of_ones_own_builds_on_what_lies_beside_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "house.toml").write_text(f'name = "house"\npolicies = ["balanced"]\n{NODE_TOML}')
    (tmp_path / "busy.toml").write_text('base = "house.toml"\nname = "busy"\n[load]\nrhos = [0.9]\n')
    assert run(str(tmp_path / "busy.toml"), "--built-in", "--seeds=1", "--requests=20") == 0
    assert capsys.readouterr().out.startswith("busy, load 0.9")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"name =", "Invalid value"),
        (b"\xff\xfe", "decode"),
        (b'name = "x"\nbase = "mine.toml"\n', "builds on itself"),
        (b'name = "x"\nbase = "herd"\n[node]\nname = "a"\n', r"$.node"),
        (b'name = "x"\npolicies = ["best"]\n' + NODE_TOML.encode(), "policy 'best' is unknown"),
        (b'name = "herd"\n' + NODE_TOML.encode(), "is named herd as another one is"),
    ],
)
def test_a_scenario_file_that_is_wrong_is_told(
    text: bytes, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_bytes(text)
    assert run("herd", str(mine), "--built-in", "--seeds=1", "--requests=1") == 2
    assert said in capsys.readouterr().err


def test_a_folder_of_traces_that_lacks_some_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "traces").mkdir()
    assert run("herd", f"--shared={tmp_path}", "--seeds=1", "--requests=1") == 2
    assert "AzureLLMInferenceTrace_conv_2023.csv: No such file" in capsys.readouterr().err


def test_a_scenario_may_build_on_another() -> None:
    skew, herd = simulate_placement.read_scenario("skew"), simulate_placement.read_scenario("herd-slots")
    assert skew.node == herd.node
    assert skew.load == replace(herd.load, rhos=(0.7,), routers=skew.load.routers)


def test_the_headline_covers_every_gate() -> None:
    parser = ArgumentParser()
    simulate_placement.add_arguments(parser)
    runs = simulate_placement.headline_runs(parser.parse_args(["--suite=headline"]))
    assert {(scenario.name, rho) for scenario, _, rho, _ in runs} == {
        ("herd", 0.7),
        ("herd", 0.85),
        ("multi-model", 0.5),
        ("frozen", 0.0),
        ("healthy", 0.0),
    }
    by_name = {scenario.name: scenario for scenario, *_ in runs}
    assert (by_name["frozen"].frozen, by_name["healthy"].frozen) == (("b",), ())
    assert by_name["frozen"].load == by_name["healthy"].load
    assert by_name["frozen"].load.requests == 24
    assert (
        sum(
            scenario.name == "herd" and rho == 0.7 and policy == "pair-1.0"
            for scenario, policy, rho, _ in runs
        )
        >= 20
    )
