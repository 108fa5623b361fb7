"""The verb ``placement`` of the simulator: scenarios from files, runs over seeds, tables, JSON lines and pictures."""

import argparse
import json
import os
import sys
import time
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from router_core.errors import LocalMisuse
from router_core.sim.placement_pictures import pictures
from router_core.sim.placement_report import Gate, Tally, headline_gates, table
from router_core.sim.scenario import Scenario, parse_scenario
from router_core.sim.trial import FIGURES, POLICIES, Result, Supply, play
from scripts.shared_data import built_in, supply

ROOT = Path(__file__).parent.parent
SCENARIOS = Path(__file__).parent / "scenarios"
SHARED = "PAIRMESH_SHARED"
SEEDS = 5
HEADLINE_SEEDS = {
    ("herd", 0.7, "pair-1.0"): 20,
    ("herd", 0.7, ""): 10,
    ("multi-model", 0.5, "pair-1.0"): 20,
    ("multi-model", 0.5, ""): 10,
}
SHOWN = ("ttft_p50", "ttft_p95", "ttft_p99", "total_p95", "slo_misses", "cold_loads", "utilisation")
PICTURED = ("ttft_p95", "total_p95", "slo_misses", "cold_loads")

Run = tuple[Scenario, str, float, int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = sorted(path.stem for path in SCENARIOS.glob("*.toml"))
    parser.add_argument("scenarios", nargs="*", help=f"files, or of: {', '.join(names)}")
    parser.add_argument("--suite", choices=["headline"], help="herd, multi-model and frozen with their gates")
    parser.add_argument("--policies", help=f"comma-separated, of: {', '.join(POLICIES)}")
    parser.add_argument("--seeds", type=int, help=f"runs of each case ({SEEDS}; the suite has its own)")
    parser.add_argument("--requests", type=int, help="requests of each run, as the scenario says if not told")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument(
        "--shared", type=Path, help=f"folder of traces and profiles (${SHARED}, else ../shared)"
    )
    parser.add_argument("--built-in", action="store_true", help="use built-in workloads only")
    parser.add_argument("--svg", type=Path, help="folder for pictures")
    parser.add_argument("--json", action="store_true", help="one object a line")


def main(args: argparse.Namespace) -> int:
    """Run what was asked for; 1 if a gate is missed or something leaked, 2 on a wrong request."""
    try:
        folder = None if args.built_in else shared_folder(args.shared)
        runs = headline_runs(args) if args.suite else plain_runs(args)
        began = time.monotonic()
        tally = Tally(played(runs, folder, args.jobs))
    except LocalMisuse as wrong:
        print(wrong, file=sys.stderr)
        return 2
    if args.svg is not None:
        args.svg.mkdir(parents=True, exist_ok=True)
        for name, text in pictures(
            tally, [(name, unit) for name, unit in FIGURES if name in PICTURED]
        ).items():
            (args.svg / name).write_text(text)
    gates = headline_gates(tally) if args.suite else []
    if args.json:
        for line in json_lines(tally, gates):
            print(json.dumps(line))
    else:
        print_tables(tally, runs)
        print_gates(gates)
        print(f"{len(runs)} runs in {time.monotonic() - began:.0f} s")
    return 1 if tally.leaks or any(gate.ok is False for gate in gates) else 0


def shared_folder(told: Path | None) -> Path | None:
    """Where traces and profiles lie; None if nowhere. Raises LocalMisuse if a named folder is absent."""
    named = told or (Path(os.environ[SHARED]) if os.environ.get(SHARED) else None)
    folder = named or ROOT / ".." / "shared"
    if (folder / "traces").is_dir():
        return folder
    if named is not None:
        raise LocalMisuse(f"{named} has no folder traces")
    return None


def read_scenario(name: str) -> Scenario:
    """A scenario by the path of its file or its name here. Raises LocalMisuse with what is wrong."""
    return parse_scenario(_table(name))


def _table(name: str) -> dict[str, Any]:
    """The table of a file, laid over that of its ``base``; tables in it are merged, lists replaced."""
    path = Path(name) if name.endswith(".toml") else SCENARIOS / f"{name}.toml"
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise LocalMisuse(f"scenario {name}: {error}") from error
    base = table.pop("base", None)
    if base is None:
        return table
    below = _table(str(base))
    return below | {
        key: below.get(key, {}) | value if isinstance(value, dict) else value for key, value in table.items()
    }


def plain_runs(args: argparse.Namespace) -> list[Run]:
    """Every policy of every scenario that was named, at each of its loads."""
    runs = []
    for name in args.scenarios or ("herd",):
        scenario = sized(read_scenario(name), args.requests)
        policies = args.policies.split(",") if args.policies else scenario.policies
        runs += [
            (scenario, policy, rho, seed)
            for rho in scenario.load.rhos
            for policy in policies
            for seed in range(1, (args.seeds or SEEDS) + 1)
        ]
    return runs


def headline_runs(args: argparse.Namespace) -> list[Run]:
    """What the gates need. ``pair-1.0`` draws its identities anew for each seed, so it gets more of them."""
    frozen = read_scenario("frozen")
    scenarios = [read_scenario("herd"), read_scenario("multi-model"), frozen]
    scenarios.append(replace(frozen, name="healthy", frozen=()))
    return [
        (sized(scenario, args.requests if scenario.load.arrivals != "at_once" else None), policy, rho, seed)
        for scenario in scenarios
        for rho in scenario.load.rhos
        for policy in scenario.policies
        for seed in range(1, (args.seeds or _headline_seeds(scenario.name, rho, policy)) + 1)
    ]


def _headline_seeds(scenario: str, rho: float, policy: str) -> int:
    return HEADLINE_SEEDS.get((scenario, rho, policy), HEADLINE_SEEDS.get((scenario, rho, ""), SEEDS))


def sized(scenario: Scenario, requests: int | None) -> Scenario:
    """``scenario`` with another number of requests, if told."""
    return scenario if requests is None else replace(scenario, load=replace(scenario.load, requests=requests))


def played(runs: Sequence[Run], folder: Path | None, jobs: int) -> list[Result]:
    """The results, in the order of ``runs`` whatever the number of processes."""
    work = [(run, folder) for run in runs]
    if jobs <= 1:
        return [_play(item) for item in work]
    with ProcessPoolExecutor(max_workers=jobs) as pool:
        return list(pool.map(_play, work))


def _play(item: tuple[Run, Path | None]) -> Result:
    (scenario, policy, rho, seed), folder = item
    return play(scenario, policy, rho, seed, supply_of(folder))


@cache
def supply_of(folder: Path | None) -> Supply:
    """Traces and measurements of ``folder``, the built-in ones for None."""
    return built_in() if folder is None else supply(folder)


def json_lines(tally: Tally, gates: Iterable[Gate]) -> Iterable[dict[str, object]]:
    """Gates first, then every figure of every case."""
    for gate in gates:
        yield {
            "name": gate.name,
            "value": round(gate.value, 4),
            "unit": gate.unit,
            "baseline": None if gate.baseline is None else round(gate.baseline, 4),
            "ratio": None if gate.ratio is None else round(gate.ratio, 4),
            "gate": gate.gate,
            "ok": gate.ok,
        }
    for case in tally.cases:
        for figure, unit in FIGURES:
            mean = tally.mean(case.scenario, case.rho, case.policy, figure)
            yield {
                "name": f"{case.scenario}.{round(100 * case.rho)}.{case.policy}.{figure}",
                "value": round(mean.value, 4),
                "unit": unit,
                "baseline": None,
                "ratio": None,
                "gate": None,
                "ok": None,
                "interval": None if mean.half is None else round(mean.half, 4),
                "seeds": [result.seed for result in tally.results(case)],
            }


def print_tables(tally: Tally, runs: Sequence[Run]) -> None:
    notes = {scenario.name: scenario.note for scenario, _, _, _ in runs}
    for scenario, rho in dict.fromkeys((case.scenario, case.rho) for case in tally.cases):
        print(f"{scenario}, load {rho:g}: {notes[scenario]}")
        print("\n".join(table(tally, scenario, rho, SHOWN)), end="\n\n")


def print_gates(gates: Iterable[Gate]) -> None:
    for gate in gates:
        verdict = {True: "ok", False: "MISSED", None: ""}[gate.ok]
        against = "" if gate.ratio is None else f"/ {gate.baseline:.3g} = {gate.ratio:.3f}"
        limit = "" if gate.gate is None else f"(gate {gate.gate}{f', goal {gate.goal}' if gate.goal else ''})"
        print(f"{gate.name:42} {gate.value:.3g} {gate.unit} {against} {limit} {verdict}".rstrip())
