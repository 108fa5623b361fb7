"""How long a decision takes: survey, choice, record and reservation, against weighted round robin over the same rows.

``python -m tests.bench.bench_decide [--json]``. Figures are microseconds per decision at 8, 64 and 1,000 rows of one
model, half of the rows loaded, one in eight cold; own work is reserved and finished as it would be.
"""

import gc
import time
from random import Random

from router_core.placement.decide import decide
from router_core.placement.fleet import Fleet, Live
from tests.bench.report import Figure, against, emit, wants_json
from tests.support.fleets import NOW, POLICY, a_fleet, a_ledger, a_request, a_row

ROUNDS = {8: 4_000, 64: 1_000, 1_000: 60}


def the_fleet(count: int) -> Fleet:
    """``count`` unlike rows: speeds over a factor of 20, loads, ages and pressures mixed, one in eight cold."""
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
                work_s=work,
                work_mean_s=work,
                in_flight=min(4, round(work / 4)),
                taken_ms=NOW - rng.randrange(1000),
                pressure=rng.uniform(0, 0.3),
                resident=not cold,
                memory=0.05 if cold else 0.0,
                switch=0.1 if cold else 0.0,
            )
        )
    return a_fleet(*rows, live=Live(ledger=a_ledger()))


def timed_decisions(fleet: Fleet, rounds: int) -> list[float]:
    """Microseconds of each of ``rounds`` decisions with their reservations, eight requests in flight at any time."""
    requests = [a_request(request_id=f"r{number}") for number in range(rounds)]
    ledger, rng = fleet.live.ledger, Random(1)
    open_seqs: list[int] = []
    took = []
    for number, request in enumerate(requests):
        start = time.perf_counter_ns()
        decision = decide(request, fleet, POLICY, NOW + number % 500, rng)
        assert decision.chosen is not None
        open_seqs.append(ledger.reserve(decision.chosen, NOW).seq)
        took.append((time.perf_counter_ns() - start) / 1000)
        if len(open_seqs) == 8:
            ledger.finish(open_seqs.pop(0))
    for seq in open_seqs:
        ledger.finish(seq)
    return took


def timed_round_robin(fleet: Fleet, rounds: int) -> float:
    """Median microseconds of the simplest router there is: filter what is up, count, take the next."""
    rows = [{"name": row.key, "up": row.down is None, "in_flight": 0} for row in fleet.rows]
    took = []
    for turn in range(rounds):
        start = time.perf_counter_ns()
        usable = [row for row in rows if row["up"]]
        usable[turn % len(usable)]["in_flight"] = turn
        took.append((time.perf_counter_ns() - start) / 1000)
    return quantile(took, 0.5)


def quantile(values: list[float], q: float) -> float:
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(q * len(ranked)))]


def measure() -> list[Figure]:
    figures = []
    for count, rounds in ROUNDS.items():
        fleet = the_fleet(count)
        timed_decisions(fleet, max(20, rounds // 10))
        gc.collect()
        took = timed_decisions(fleet, rounds)
        naive = timed_round_robin(fleet, rounds)
        figures.append(against(f"decide.p50_us.n{count}", quantile(took, 0.5), "us", naive))
        figures.append(Figure(f"decide.p99_us.n{count}", quantile(took, 0.99), "us"))
    return figures


if __name__ == "__main__":
    emit(measure(), wants_json())
