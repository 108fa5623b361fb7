"""How long a decision takes: survey, choice and reservation, which a request waits for, and telling its record.

Figures are microseconds per decision at 2, 8, 64 and 1,000 rows of one model, half of the rows loaded, one in eight cold,
beside the simplest router there is over the same rows. ``waited`` is what a request waits for: its record is kept, but
told only after its end. ``alike`` is the same with rows that nothing tells apart, ``fresh`` the first decision on a new
snapshot, which judges all rows anew. Rounds of all sizes take turns, and a figure is the median over its rounds, so that a
busy host weighs on all alike. The run fails if p50 or p99 of a whole decision is above its gate.

``--peers`` adds how long others' own selection takes among nodes of the same speeds, loads and warmth: each
``decide.p50_us.nN.over_PEER`` has ours, theirs, and the median of the rounds' ratios ours / theirs. Theirs is the bare call, each in its own process, with all they look up per
request made ready before:

- LiteLLM's ``Router.get_available_deployment`` filters deployments that cool down and draws one by weight (its default).
  No load, no reservation, no reason.
- ollama-herd's ``ScoringEngine.score_request`` ranks all nodes by warmth, memory, queue, past latency and context, and
  returns each node's scores, which is a record of a kind. No reservation.
- SOLLOL's ``IntelligentRouter.select_optimal_node`` scores all hosts and returns a sentence and the next two. No
  reservation without its coordinator.

A round asks everybody at one size in order and then backwards. Who is slow is asked less often, and not at all above
2.5 s a selection. Peers are installed on first use, which takes minutes and 1.1 GB; who cannot be had is named with the
reason. Of few runs p99 is the worst one.
"""

import argparse
import contextlib
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from statistics import median

from msgspec.structs import replace

from router_core.placement.candidates.fleet import Fleet, Live
from router_core.placement.decision.decide import decide
from tests.bench.decide_peers import PINNED, Peer, peer
from tests.bench.environments import Absent
from tests.bench.report import Figure, against, emit
from tests.support.fleets import NOW, POLICY, a_fleet, a_ledger, a_request, a_row

ROUNDS = 15
SIZES = {2: 600, 8: 600, 64: 150, 1_000: 12}
P50_GATES_US = {8: 50.0, 64: 300.0}
P99_OVER_P50 = 3.0
IN_FLIGHT = 8
PEER_ROUNDS = 7
PEER_BATCH_US = 1e6
PEER_SLOWEST_US = 2.5e6
OURS = "pairmesh"

Timed = Callable[[int], list[float]]
"""Microseconds of each of so many runs."""


def the_fleet(count: int) -> Fleet:
    """``count`` unlike rows: speeds over a factor of 20, loads, queues, ages and pressures mixed, one in eight cold."""
    rng = Random(count)
    rows = []
    for number in range(count):
        speed = 10 * 20 ** rng.random()
        work = rng.choice((0.0, rng.uniform(0, 20)))
        cold = number % 8 == 7
        rows.append(
            a_row(
                f"n{number}",
                pp=30 * speed,
                tg=speed,
                in_flight=min(4, round(work / 4)),
                queued=max(0, round(work / 4) - 4),
                taken_ms=NOW - rng.randrange(1000),
                pressure=rng.uniform(0, 0.3),
                resident=not cold,
                memory=0.05 if cold else 0.0,
                switch=0.1 if cold else 0.0,
            )
        )
    return a_fleet(*rows, live=Live(ledger=a_ledger()))


def alike(count: int) -> Fleet:
    """``count`` rows that only their names tell apart."""
    return a_fleet(*(a_row(f"n{number}") for number in range(count)), live=Live(ledger=a_ledger()))


def decisions(fleet: Fleet, *, fresh: bool = False, told: bool = True) -> Timed:
    """Decisions with their reservations, up to eight requests in flight, none between batches; ``fresh``: each on a
    snapshot of its own, ``told``: each with its record."""
    ledger, rng, open_seqs = fleet.live.ledger, Random(1), []
    asked = 0

    def timed(runs: int) -> list[float]:
        nonlocal asked
        took = []
        for _ in range(runs):
            asked += 1
            request = a_request(request_id=f"r{asked}")
            seen = replace(fleet, sifted={}) if fresh else fleet
            start = time.perf_counter_ns()
            decision = decide(request, seen, POLICY, NOW + asked % 500, rng)
            assert decision.chosen is not None
            open_seqs.append(ledger.reserve(decision.chosen, NOW).seq)
            if told:
                _ = decision.record
            took.append((time.perf_counter_ns() - start) / 1000)
            if len(open_seqs) == IN_FLIGHT:
                ledger.end(open_seqs.pop(0))
        while open_seqs:
            ledger.end(open_seqs.pop())
        return took

    return timed


def round_robin(fleet: Fleet) -> Timed:
    """The simplest router there is: filter what is up, count, take the next."""
    rows = [{"name": row.key, "up": row.down is None, "in_flight": 0} for row in fleet.rows]

    def timed(runs: int) -> list[float]:
        took = []
        for turn in range(runs):
            start = time.perf_counter_ns()
            usable = [row for row in rows if row["up"]]
            usable[turn % len(usable)]["in_flight"] = turn
            took.append((time.perf_counter_ns() - start) / 1000)
        return took

    return timed


def quantile(values: list[float], q: float) -> float:
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(q * len(ranked)))]


def measure() -> list[Figure]:
    """All figures; those with a gate are held against it."""
    subjects: dict[tuple[str, int], Timed] = {}
    for count in SIZES:
        fleet = the_fleet(count)
        subjects["decide", count] = decisions(fleet)
        subjects["decide.waited", count] = decisions(fleet, told=False)
        subjects["decide.alike", count] = decisions(alike(count), told=False)
        subjects["decide.fresh", count] = decisions(fleet, fresh=True, told=False)
        subjects["decide.round_robin", count] = round_robin(fleet)
    took: dict[tuple[str, int], list[list[float]]] = {subject: [] for subject in subjects}
    for turn in range(ROUNDS + 1):
        for (name, count), timed in subjects.items():
            gc.collect()
            found = timed(SIZES[count])
            if turn:
                took[name, count].append(found)
    return [figure for subject, rounds in took.items() for figure in figures_of(*subject, rounds)]


def figures_of(name: str, count: int, rounds: list[list[float]]) -> list[Figure]:
    """p50 and p99 of one subject, each the median over its rounds."""
    p50, p99 = (median([quantile(took, q) for took in rounds]) for q in (0.5, 0.99))
    if name != "decide":
        return [Figure(f"{name}.p50_us.n{count}", p50, "us")]
    gate = P50_GATES_US.get(count)
    return [
        Figure(f"{name}.p50_us.n{count}", p50, "us")
        if gate is None
        else against(f"{name}.p50_us.n{count}", p50, "us", gate),
        against(f"{name}.p99_us.n{count}", p99, "us", P99_OVER_P50 * p50),
    ]


def broken_gates(figures: list[Figure]) -> list[str]:
    """What is above its limit, in words."""
    return [
        f"{figure.name} is {figure.value:.1f} {figure.unit}, at most {figure.baseline:.1f} is allowed"
        for figure in figures
        if figure.baseline is not None and figure.value > figure.baseline
    ]


Batch = tuple[Timed, int]
"""A subject, and how often it is asked at a time."""

Rounds = list[dict[str, list[float]]]
"""What each subject took, in microseconds, by round."""


def a_round(subjects: Mapping[str, Batch]) -> dict[str, list[float]]:
    """Everybody in order and then backwards, so that a host that slows down weighs on all alike."""
    took: dict[str, list[float]] = {name: [] for name in subjects}
    for name in (*subjects, *reversed(list(subjects))):
        timed, runs = subjects[name]
        gc.collect()
        took[name] += timed(runs)
    return took


def batch_of(other: Peer, count: int) -> Batch:
    """``other`` among ``count`` nodes, asked less often if it is slow; raises ``Absent`` if it is too slow to wait for."""
    timed = partial(other.batch, count)
    quick = min(timed(2))
    if quick > PEER_SLOWEST_US:
        raise Absent(f"a selection takes {quick / 1e6:.1f} s")
    return timed, max(1, min(SIZES[count], int(PEER_BATCH_US / quick)))


def beside_peers() -> list[Figure]:
    """Ours beside every peer that can be had, at all sizes."""
    with contextlib.ExitStack() as stack:
        fleets = {count: the_fleet(count) for count in SIZES}
        sizes: dict[int, dict[str, Batch]] = {
            count: {OURS: (decisions(fleet), SIZES[count])} for count, fleet in fleets.items()
        }
        for name in PINNED:
            home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            count = 0
            try:
                other = stack.enter_context(peer(name, home))
                for count, fleet in fleets.items():
                    other.build(fleet.rows)
                    sizes[count][name] = batch_of(other, count)
            except Absent as why:
                what = f"with {count:,} nodes and more" if count else "at all"
                print(f"{name} is not measured {what}: {why}", file=sys.stderr)
        rounds: dict[int, Rounds] = {count: [] for count in SIZES}
        for turn in range(PEER_ROUNDS + 1):
            for count, subjects in sizes.items():
                found = a_round(subjects)
                if turn:
                    rounds[count].append(found)
    return [figure for count, found in rounds.items() for figure in over_peers(count, found)]


def over_peers(count: int, rounds: Rounds) -> list[Figure]:
    """Ours held against each peer: medians of the rounds, and the median of their ratios."""
    figures = []
    for name in rounds[0]:
        if name == OURS:
            continue
        for label, q in (("p50", 0.5), ("p99", 0.99)):
            ours, theirs = ([quantile(each[who], q) for each in rounds] for who in (OURS, name))
            figures.append(
                Figure(
                    f"decide.{label}_us.n{count}.over_{name.replace('-', '_')}",
                    median(ours),
                    "us",
                    median(theirs),
                    median(mine / other for mine, other in zip(ours, theirs, strict=True)),
                )
            )
    return figures


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--peers", action="store_true", help="measure other routers beside it")
    wanted = parser.parse_args(argv)
    found = measure()
    broken = broken_gates(found)
    emit(found + (beside_peers() if wanted.peers else []), wanted.json)
    for line in broken:
        print(line, file=sys.stderr)
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
