"""Runs compared: means over seeds with confidence intervals, the gates of the headline suite, tables.

A gate compares two means by their ratio. Intervals are Student's t at 95 % over seeds. Refuses to run anything and to
print.
"""

import math
from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from router_core.sim.placement.trial import Result

_T95 = (
    12.71,
    4.30,
    3.18,
    2.78,
    2.57,
    2.45,
    2.36,
    2.31,
    2.26,
    2.23,
    2.20,
    2.18,
    2.16,
    2.14,
    2.13,
    2.12,
    2.11,
    2.10,
    2.09,
)
_T95_MANY = 1.96
_NOISE = 1e-12
"""What the mean of equal values may be off by, relatively."""
_FEWEST = 2
_LOAD = 0.7
_NAMES, _CELL = 16, 19


class Mean(Struct, frozen=True, gc=False, kw_only=True):
    """Mean over ``n`` seeds and half the width of its 95 % interval, None for a single seed."""

    value: float
    half: float | None
    n: int


class Case(Struct, frozen=True, gc=False, kw_only=True):
    """One scenario at one load under one policy."""

    scenario: str
    rho: float
    policy: str


class Gate(Struct, frozen=True, gc=False, kw_only=True):
    """``value`` over ``baseline`` is ``ratio``, which must not exceed ``gate`` (without a baseline: the value itself);
    ``goal`` is what would be better still. Without a gate nothing is decided. ``half`` is half the 95 % interval of the
    ratio over seeds that both played, of the value where there is no baseline; None if that says nothing."""

    name: str
    value: float
    unit: str
    baseline: float | None
    ratio: float | None
    gate: float | None
    goal: float | None = None
    half: float | None = None

    @property
    def ok(self) -> bool | None:
        """Whether the gate is met; None without one."""
        if self.gate is None:
            return None
        return (self.value if self.ratio is None else self.ratio) <= self.gate


def mean_of(values: Sequence[float]) -> Mean:
    """Mean and its interval."""
    n = len(values)
    mean = sum(values) / n
    if n < 2:
        return Mean(value=mean, half=None, n=n)
    sd = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1))
    t = _T95[n - 2] if n - 2 < len(_T95) else _T95_MANY
    half = t * sd / math.sqrt(n)
    return Mean(value=mean, half=half if half > _NOISE * abs(mean) else 0.0, n=n)


class Tally:
    """All results, by case."""

    def __init__(self, results: Iterable[Result]) -> None:
        self._of: dict[Case, list[Result]] = {}
        for result in results:
            case = Case(scenario=result.scenario, rho=result.rho, policy=result.policy)
            self._of.setdefault(case, []).append(result)

    @property
    def cases(self) -> tuple[Case, ...]:
        return tuple(self._of)

    def results(self, case: Case) -> Sequence[Result]:
        return self._of[case]

    def mean(self, scenario: str, rho: float, policy: str, figure: str) -> Mean:
        """A figure of ``Result`` over the seeds of a case."""
        found = self._of[Case(scenario=scenario, rho=rho, policy=policy)]
        return mean_of([float(getattr(result, figure)) for result in found])

    def paired(self, scenario: str, rho: float, ours: str, theirs: str, figure: str) -> float | None:
        """Half the 95 % interval of ours over theirs, by the seeds that both played; None for fewer than two."""
        of = [
            {
                result.seed: float(getattr(result, figure))
                for result in self._of[Case(scenario=scenario, rho=rho, policy=policy)]
            }
            for policy in (ours, theirs)
        ]
        seeds = sorted(of[0].keys() & of[1].keys())
        base = sum(of[1][seed] for seed in seeds)
        if len(seeds) < _FEWEST or not base:
            return None
        ratio = sum(of[0][seed] for seed in seeds) / base
        gaps = mean_of([of[0][seed] - ratio * of[1][seed] for seed in seeds])
        return None if gaps.half is None else gaps.half * len(seeds) / base

    @property
    def leaks(self) -> int:
        """What was still booked after some run; 0 unless there is a bug."""
        return sum(result.leaks for results in self._of.values() for result in results)


def headline_gates(tally: Tally) -> list[Gate]:
    """The gates of the suite ``headline``, with what is printed beside them."""

    ours = "balanced"

    def value(scenario: str, rho: float, policy: str, figure: str) -> float:
        return tally.mean(scenario, rho, policy, figure).value

    def herd(
        figure: str, other: str, limit: float | None, goal: float | None = None, *, rho: float = 0.7
    ) -> Gate:
        """Ours over ``other`` in the herd."""
        at = "" if rho == _LOAD else f".rho_{round(100 * rho)}"
        name = f"placement.{figure}{at}.over_{other.removesuffix('-1.0')}"
        mine, theirs = value("herd", rho, ours, figure), value("herd", rho, other, figure)
        gate = _gate(name, "s", mine, theirs, limit, goal)
        return replace(gate, half=tally.paired("herd", rho, ours, other, figure))

    def bare(figure: str, unit: str, limit: float, *, rho: float = 0.7) -> Gate:
        """Ours alone in the herd."""
        at = "" if rho == _LOAD else f".rho_{round(100 * rho)}"
        mean = tally.mean("herd", rho, ours, figure)
        gate = _gate(f"placement.{figure}{at}", unit, mean.value, None, limit)
        return replace(gate, half=mean.half)

    def mix(policy: str, figure: str) -> float:
        return value("multi-model", 0.5, policy, figure)

    best = min(mix("pair-1.0", "slo_misses"), mix("least-count", "slo_misses"))
    healthy = value("healthy", 0.0, ours, "makespan_s")
    return [
        herd("ttft_p50", "pair-1.0", 1.15, 1.0),
        herd("ttft_p95", "oracle", 0.80),
        herd("ttft_p95", "clairvoyant", 1.65, 1.3),
        herd("ttft_p95", "pair-1.0", 0.50, 0.35),
        herd("total_p95", "oracle", 1.22, 1.1),
        bare("slo_misses", "share", 0.05),
        herd("ttft_p95", "oracle", 0.80, rho=0.85),
        herd("ttft_p95", "clairvoyant", None, rho=0.85),
        herd("ttft_p95", "pair-1.0", None, rho=0.85),
        herd("ttft_p50", "pair-1.0", None, rho=0.85),
        bare("ttft_p50", "s", 0.65, rho=0.85),
        herd("total_p95", "oracle", 1.12, 1.0, rho=0.85),
        bare("slo_misses", "share", 0.14, rho=0.85),
        _gate(
            "placement.cold_loads.over_pair",
            "loads",
            mix(ours, "cold_loads"),
            mix("pair-1.0", "cold_loads"),
            0.50,
        ),
        _gate(
            "placement.cold_loads.ttft_p95.over_pair",
            "s",
            mix(ours, "ttft_p95"),
            mix("pair-1.0", "ttft_p95"),
            1.0,
        ),
        _gate("placement.slo_misses.over_best", "share", mix(ours, "slo_misses"), best, 0.70, 0.60),
        _gate("placement.frozen.over_healthy", "s", value("frozen", 0.0, ours, "makespan_s"), healthy, 2.1),
        _gate(
            "placement.frozen.pair.over_healthy",
            "s",
            value("frozen", 0.0, "pair-1.0", "makespan_s"),
            value("healthy", 0.0, "pair-1.0", "makespan_s"),
            None,
        ),
        _gate("placement.in_flight_leak", "requests", float(tally.leaks), None, 0.0),
    ]


def _gate(
    name: str, unit: str, value: float, baseline: float | None, gate: float | None, goal: float | None = None
) -> Gate:
    ratio = None if baseline is None else value / baseline if baseline else math.inf if value else 1.0
    return Gate(name=name, value=value, unit=unit, baseline=baseline, ratio=ratio, gate=gate, goal=goal)


def table(tally: Tally, scenario: str, rho: float, figures: Sequence[tuple[str, str]]) -> list[str]:
    """Lines of a table: figures of (name, unit) against the policies of one scenario and load, means with half
    intervals, below the number of seeds they are of."""
    cases = [case for case in tally.cases if (case.scenario, case.rho) == (scenario, rho)]
    policies = [case.policy for case in cases]
    lines = [
        f"{'':{_NAMES}}" + "".join(f"{policy:>{_CELL}}" for policy in policies),
        f"{'seeds':{_NAMES}}" + "".join(f"{len(tally.results(case)):>{_CELL}}" for case in cases),
    ]
    for name, unit in figures:
        cells = [_cell(tally.mean(scenario, rho, policy, name)) for policy in policies]
        label = f"{name} {unit}" if unit == "s" and not name.endswith("_s") else name
        lines.append(f"{label:{_NAMES}}" + "".join(f"{cell:>{_CELL}}" for cell in cells))
    return lines


def _cell(mean: Mean) -> str:
    """Three digits of a mean and two of its interval; what has more before the point is a whole number."""
    return (
        _digits(mean.value, 3) if mean.half is None else f"{_digits(mean.value, 3)} ± {_digits(mean.half, 2)}"
    )


def _digits(value: float, count: int) -> str:
    return f"{value:.0f}" if abs(value) >= 10**count else f"{value:.{count}g}"
