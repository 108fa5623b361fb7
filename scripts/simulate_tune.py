"""The verb ``tune`` of the simulator: what halving and doubling each number of the placement policy does, and what
held-out traces say of the better ones.

A line tells the cost of one try as a ratio to the shipped policy's, with its 95 % interval, and the ratios of single
figures; those that chance does not explain are marked with a star. Figures of all seeds are compared pair by pair.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from router_core.errors import LocalMisuse
from router_core.policy.placement import PlacementPolicy
from router_core.sim.placement import tuning
from router_core.sim.placement.scenario import Scenario
from router_core.sim.placement.trial import Result, play
from router_core.sim.placement.tuning import KNOBS, SHIPPED, Effect, Part, Try
from scripts.simulate_arguments import above_0, add_playing, at_least
from scripts.simulate_placement import named, shared_folder, supply_of

SCENARIOS = ("herd", "multi-model", "skew")
SEEDS = 4
REQUESTS = 1_500
HELD_OUT_FROM = 1_000
"""Seeds of the held-out part start here: nothing of it was seen."""

Run = tuple[Scenario, float, int, Part, Mapping[str, float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "scenarios", nargs="*", default=SCENARIOS, help=f"of each case ({', '.join(SCENARIOS)})"
    )
    parser.add_argument("--knobs", help="comma-separated dotted names, all if not told")
    parser.add_argument(
        "--seeds", type=at_least(1, HELD_OUT_FROM - 1), default=SEEDS, help=f"runs of each case ({SEEDS})"
    )
    parser.add_argument(
        "--requests", type=at_least(1), default=REQUESTS, help=f"requests of each run ({REQUESTS})"
    )
    parser.add_argument(
        "--load", type=above_0, help="share of the capacity that is asked for (the scenario's first)"
    )
    parser.add_argument(
        "--part",
        choices=[part.value for part in Part],
        default=Part.TRAINING.value,
        help="half of the traces, and seeds, to play",
    )
    add_playing(parser)


def main(args: argparse.Namespace) -> int:
    """Print the table; 2 on a wrong request."""
    try:
        folder = None if args.built_in else shared_folder(args.shared)
        scenarios = list(named(args.scenarios, args.requests).values())
        tries = [SHIPPED, *wanted(args.knobs)]
        began = time.monotonic()
        part = Part(args.part)
        found = tuning.effects(played(scenarios, tries, {}, part, args, folder))
        taken = tuning.better(found) if part is Part.TRAINING else {}
        judged = judge(scenarios, taken, args, folder) if taken else []
    except LocalMisuse as wrong:
        print(wrong, file=sys.stderr)
        return 2
    show(found, taken, judged, part, args.json)
    if not args.json:
        print(f"{args.seeds} seeds of {args.requests} requests, {time.monotonic() - began:.0f} s")
    return 0


def judge(
    scenarios: Sequence[Scenario], taken: Mapping[str, float], args: argparse.Namespace, folder: Path | None
) -> list[Effect]:
    """What all of ``taken`` together does where nothing was chosen on."""
    whole = Try(path="all of these")
    return tuning.effects(played(scenarios, [SHIPPED, whole], {whole: taken}, Part.HELD_OUT, args, folder))


def wanted(names: str | None) -> list[Try]:
    """The tries of the knobs that were named. Raises LocalMisuse on an unknown one."""
    paths = [name.strip() for name in names.split(",")] if names else KNOBS
    for path in paths:
        if path not in KNOBS:
            raise LocalMisuse(f"knob {path!r} is unknown, there are {', '.join(KNOBS)}")
    return [tried for path in paths for tried in tuning.halved_and_doubled(PlacementPolicy(), path)]


def played(
    scenarios: Sequence[Scenario],
    tries: Sequence[Try],
    combined: Mapping[Try, Mapping[str, float]],
    part: Part,
    args: argparse.Namespace,
    folder: Path | None,
) -> dict[Try, list[Result]]:
    """Every try on every scenario, by try; at the load that is told, else at the scenario's first."""
    work: list[tuple[Try, Run]] = []
    for tried in tries:
        values = combined.get(tried) or ({} if tried.path is None else {tried.path: tried.value})
        work += [
            (tried, (scenario, args.load or scenario.load.rhos[0], seed, part, values))
            for scenario in scenarios
            for seed in seeds_of(part, args.seeds)
        ]
    runs = [(run, folder) for _, run in work]
    if args.jobs <= 1:
        results = [_play(item) for item in runs]
    else:
        with ProcessPoolExecutor(max_workers=args.jobs) as pool:
            results = list(pool.map(_play, runs))
    by_try: dict[Try, list[Result]] = {}
    for (tried, _), result in zip(work, results, strict=True):
        by_try.setdefault(tried, []).append(result)
    return by_try


def seeds_of(part: Part, count: int) -> range:
    """The seeds of one part, none of which the other has."""
    first = HELD_OUT_FROM if part is Part.HELD_OUT else 1
    return range(first, first + count)


def _play(item: tuple[Run, Path | None]) -> Result:
    (scenario, rho, seed, part, values), folder = item
    policy = tuning.changed(PlacementPolicy(), values)
    return play(scenario, "balanced", rho, seed, tuning.part_of(supply_of(folder), part), policy)


def show(
    found: Iterable[Effect],
    taken: Mapping[str, float],
    judged: Iterable[Effect],
    part: Part,
    as_json: bool,
) -> None:
    """The table, on the training part what it would take over, and how that fares on what is held out."""
    policy = PlacementPolicy()
    for effect in found:
        path = effect.tried.path
        assert path is not None
        shipped = tuning.value_of(policy, path)
        line(f"{path} {shipped:g} -> {effect.tried.value:g}", effect, as_json, part)
    if not as_json and part is Part.TRAINING:
        told = ", ".join(f"{path} = {value:g}" for path, value in taken.items())
        print(f"surely better on the training part: {told or 'nothing'}")
    for effect in judged:
        line("all of these", effect, as_json, Part.HELD_OUT)


def line(name: str, effect: Effect, as_json: bool, part: Part) -> None:
    ratio = math.exp(effect.change.value)
    half = None if effect.change.half is None else ratio * effect.change.half
    verdict = {-1: "better", 0: "", 1: "worse"}[tuning.surely(effect.change)]
    if as_json:
        told = {"name": name, "scenario": effect.scenario, "part": part.value, "value": round(ratio, 4)}
        figures = {figure: round(math.exp(change.value), 4) for figure, change in effect.figures.items()}
        print(
            json.dumps(
                told | {"unit": "cost / shipped", "interval": half, "verdict": verdict, "figures": figures}
            )
        )
        return
    head = f"{name:28} {effect.scenario:12} {part.value:9}"
    if effect.same:
        print(f"{head} same")
        return
    interval = "" if half is None else f" ± {half:.3f}"
    print(f"{head} {ratio:.3f}{interval:8} {verdict:7} {_figures(effect)}")


def _figures(effect: Effect) -> str:
    return "  ".join(
        f"{figure} {math.exp(change.value):.2f}{'*' if tuning.surely(change) else ' '}"
        for figure, change in effect.figures.items()
    ).rstrip()
