"""The command line of the simulator: meshes under random faults, and placement policies compared on traces,
and the numbers of ours tuned on them."""

import argparse
import json
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from router_core.sim.mesh.report import Figures, SeedReport, measure, run_seed
from scripts import simulate_placement, simulate_tune
from scripts.simulate_arguments import at_least

SEEDS = 100
LONG_SEEDS = 2_000
CALM_NODES = (3, 10, 30)
UNITS = {
    "bytes_per_s": "B/s",
    "formula_bytes_per_s": "B/s",
    "records_per_s_c": "0.01/s",
    "age_p50_ms": "ms",
    "age_p99_ms": "ms",
    "age_max_ms": "ms",
    "crash_suspect_ms": "ms",
}
LIMITS = {"age_p99_ms": 1_600, "crash_suspect_ms": 2_000}


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/simulate", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    add_mesh_arguments(verbs.add_parser("mesh", help="seeds under random faults, and figures of calm meshes"))
    simulate_placement.add_arguments(verbs.add_parser("placement", help="placement policies compared"))
    simulate_tune.add_arguments(verbs.add_parser("tune", help="what each number of the policy is worth"))
    args = parser.parse_args()
    mains = {"mesh": simulate_mesh, "placement": simulate_placement.main, "tune": simulate_tune.main}
    return mains[args.verb](args)


def add_mesh_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=at_least(0), help="one history")
    parser.add_argument("--seeds", type=at_least(1), default=SEEDS, help=f"how many histories ({SEEDS})")
    parser.add_argument("--nodes", type=at_least(2), help="hosts in each (3..8, by seed)")
    parser.add_argument("--long", action="store_true", help=f"{LONG_SEEDS} histories")
    parser.add_argument("--json", action="store_true", help="one object a line")


def simulate_mesh(args: argparse.Namespace) -> int:
    if args.seed is not None:
        return 1 if show_seed(run_seed(args.seed, nodes=args.nodes), args.json) else 0
    broken = 0
    for seed in range(LONG_SEEDS if args.long else args.seeds):
        report = run_seed(seed, nodes=args.nodes)
        if report.violation is not None:
            broken += show_seed(report, args.json)
    show("broken_seeds", broken, "", 0, args.json)
    for nodes in (args.nodes,) if args.nodes else CALM_NODES:
        began = time.process_time()
        show_figures(measure(nodes), time.process_time() - began, args.json)
    return 1 if broken else 0


def show_seed(report: SeedReport, as_json: bool) -> int:
    """Print one history; 1 if it broke a rule."""
    if as_json:
        print(json.dumps({name: getattr(report, name) for name in report.__struct_fields__}))
    else:
        print(
            f"seed {report.seed}: {report.nodes} hosts, {', '.join(report.faults)}; trace {report.trace[:16]}"
        )
        if report.violation is not None:
            again = f"scripts/simulate mesh --seed {report.seed} --nodes {report.nodes}"
            print(f"  broken: {report.violation}\n  repeat: {again}")
    return int(report.violation is not None)


def show_figures(figures: Figures, cpu_s: float, as_json: bool) -> None:
    for name, unit in UNITS.items():
        limit = figures.formula_bytes_per_s * 3 // 2 if name == "bytes_per_s" else LIMITS.get(name)
        show(f"mesh_{figures.nodes}_{name}", getattr(figures, name), unit, limit, as_json)
    show(f"mesh_{figures.nodes}_simulation_cpu", round(cpu_s, 2), "s", None, as_json)


def show(name: str, value: float, unit: str, baseline: int | None, as_json: bool) -> None:
    if as_json:
        ratio = round(value / baseline, 3) if baseline else None
        print(json.dumps({"name": name, "value": value, "unit": unit, "baseline": baseline, "ratio": ratio}))
    else:
        print(f"{name:40} {value} {unit}" + (f" (limit {baseline})" if baseline is not None else ""))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # whoever read the output has left, as `head` does
    sys.exit(main())
