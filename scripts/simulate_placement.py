"""The verb ``placement`` of the simulator: scenarios from files, runs over seeds, tables, JSON lines and pictures."""

import argparse
import json
import math
import os
import sys
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from router_core.errors import LocalMisuse
from router_core.sim.placement.pictures import pictures
from router_core.sim.placement.report import Gate, Tally, headline_gates, table
from router_core.sim.placement.scenario import Scenario, parse_scenario
from router_core.sim.placement.trial import FIGURES, POLICIES, Result, Supply, play
from scripts.shared_data import built_in, supply
from scripts.simulate_arguments import SHARED, add_playing, at_least

ROOT = Path(__file__).parent.parent
SCENARIOS = Path(__file__).parent / "scenarios"
SEEDS = 5
HEADLINE_SEEDS = {
    ("herd", 0.7, "pair-1.0"): 20,
    ("herd", 0.7, ""): 10,
    ("herd", 0.85, ""): 10,
    ("multi-model", 0.5, "pair-1.0"): 20,
    ("multi-model", 0.5, ""): 10,
}
PICTURED = ("ttft_p95", "total_p95", "slo_misses", "cold_loads")

Run = tuple[Scenario, str, float, int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scenarios", nargs="*", help=f"files, or of: {', '.join(shipped())}")
    parser.add_argument("--suite", choices=["headline"], help="herd, multi-model and frozen with their gates")
    parser.add_argument("--policies", help=f"comma-separated, of: {', '.join(POLICIES)}")
    parser.add_argument(
        "--seeds", type=at_least(1), help=f"runs of each case ({SEEDS}; the suite has its own)"
    )
    parser.add_argument(
        "--requests", type=at_least(1), help="requests of each run, as the scenario says if not told"
    )
    parser.add_argument("--svg", type=Path, help="folder for pictures")
    add_playing(parser)


def main(args: argparse.Namespace) -> int:
    """Run what was asked for; 1 if a gate is missed or something leaked, 2 on a wrong request."""
    try:
        folder = None if args.built_in else shared_folder(args.shared)
        runs = headline_runs(args) if args.suite else plain_runs(args)
        pictured = None if args.svg is None else made_folder(args.svg)
        began = time.monotonic()
        tally = Tally(played(runs, folder, args.jobs))
    except LocalMisuse as wrong:
        print(wrong, file=sys.stderr)
        return 2
    if pictured is not None:
        for name, text in pictures(
            tally, [(name, unit) for name, unit in FIGURES if name in PICTURED]
        ).items():
            (pictured / name).write_text(text)
    gates = headline_gates(tally) if args.suite else []
    if args.json:
        for line in json_lines(tally, gates):
            print(json.dumps(line))
    else:
        print_tables(tally, runs)
        print_gates(gates)
        source = "built-in workloads" if folder is None else f"traces in {folder}"
        print(f"{len(runs)} runs in {time.monotonic() - began:.0f} s, {source}")
    return exit_of(tally, gates)


def exit_of(tally: Tally, gates: Iterable[Gate]) -> int:
    """1 if something was still booked after a run or a gate is missed, else 0."""
    return 1 if tally.leaks or any(gate.ok is False for gate in gates) else 0


def made_folder(folder: Path) -> Path:
    """``folder``, which is there afterwards. Raises LocalMisuse if it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LocalMisuse(f"{folder}: {error.strerror}") from error
    return folder


def shared_folder(told: Path | None) -> Path | None:
    """Where traces and profiles lie; None if nowhere. Raises LocalMisuse if a named folder is absent."""
    named = told or (Path(os.environ[SHARED]) if os.environ.get(SHARED) else None)
    folder = named or ROOT / ".." / "shared"
    if (folder / "traces").is_dir():
        return folder
    if named is not None:
        raise LocalMisuse(f"{named} has no folder traces")
    return None


def shipped() -> list[str]:
    """The names of the scenarios that are here."""
    return sorted(path.stem for path in SCENARIOS.glob("*.toml"))


def read_scenario(name: str) -> Scenario:
    """A scenario by the path of its file or its name here. Raises LocalMisuse with what is wrong."""
    scenario = parse_scenario(_table(name, Path(), ()))
    known_policies(scenario.policies)
    return scenario


def _table(name: str, beside: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    """The table of a file, laid over that of its ``base``, which may lie ``beside`` it; tables in it are merged, lists
    replaced. ``above`` are the files that build on it."""
    path = beside / name if name.endswith(".toml") else SCENARIOS / f"{name}.toml"
    if path in above:
        raise LocalMisuse(f"scenario {name} builds on itself")
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise LocalMisuse(f"scenario {name}: no such file, here are {', '.join(shipped())}") from None
    except (OSError, ValueError) as error:
        raise LocalMisuse(f"scenario {name}: {error}") from error
    base = table.pop("base", None)
    if base is None:
        return table
    below = _table(str(base), path.parent, (*above, path))
    return below | {key: _laid_over(below.get(key), value) for key, value in table.items()}


def _laid_over(below: object, value: object) -> object:
    return below | value if isinstance(below, dict) and isinstance(value, dict) else value


def known_policies(names: Sequence[str]) -> Sequence[str]:
    """``names`` without repeats. Raises LocalMisuse if one is no policy."""
    for name in names:
        if name not in POLICIES:
            raise LocalMisuse(f"policy {name!r} is unknown, there are {', '.join(POLICIES)}")
    return tuple(dict.fromkeys(names))


def plain_runs(args: argparse.Namespace) -> list[Run]:
    """Every policy of every scenario that was named, at each of its loads."""
    told = known_policies([name.strip() for name in args.policies.split(",")]) if args.policies else None
    return [
        (scenario, policy, rho, seed)
        for scenario in named(args.scenarios or ("herd",), args.requests).values()
        for rho in dict.fromkeys(scenario.load.rhos)
        for policy in told or known_policies(scenario.policies)
        for seed in range(1, (args.seeds or SEEDS) + 1)
    ]


def named(names: Iterable[str], requests: int | None) -> Mapping[str, Scenario]:
    """The scenarios, each once. Raises LocalMisuse if two of them go by one name: their figures would be mixed."""
    found: dict[str, Scenario] = {}
    for name in names:
        scenario = sized(read_scenario(name), requests)
        if found.setdefault(scenario.name, scenario) != scenario:
            raise LocalMisuse(
                f"scenario {name} is named {scenario.name} as another one is, name it otherwise"
            )
    return found


def headline_runs(args: argparse.Namespace) -> list[Run]:
    """What the gates need. ``pair-1.0`` draws its identities anew for each seed, so it gets more of them. Raises
    LocalMisuse if the suite is told what to play."""
    if args.scenarios or args.policies:
        raise LocalMisuse("a suite says itself which scenarios and policies are played")
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
    """Gates first, then every figure of every case. A ratio to nothing at all is null, as JSON knows no infinity."""
    for gate in gates:
        yield {
            "name": gate.name,
            "value": round(gate.value, 4),
            "unit": gate.unit,
            "baseline": None if gate.baseline is None else round(gate.baseline, 4),
            "ratio": None if gate.ratio is None or math.isinf(gate.ratio) else round(gate.ratio, 4),
            "gate": gate.gate,
            "ok": gate.ok,
            "interval": None if gate.half is None else round(gate.half, 4),
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
        print("\n".join(table(tally, scenario, rho, FIGURES)), end="\n\n")


def print_gates(gates: Iterable[Gate]) -> None:
    for gate in gates:
        verdict = {True: "ok", False: "MISSED", None: ""}[gate.ok]
        doubt = "" if gate.half is None else f" ± {gate.half:.2g}"
        against = doubt if gate.ratio is None else f"/ {gate.baseline:.3g} = {gate.ratio:.3f}{doubt}"
        limit = "" if gate.gate is None else f"(gate {gate.gate}{f', goal {gate.goal}' if gate.goal else ''})"
        print(f"{gate.name:42} {gate.value:.3g} {gate.unit} {against} {limit} {verdict}".rstrip())
