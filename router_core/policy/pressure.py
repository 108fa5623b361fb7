"""The pressure tables: which signals exist, what sets and leaves each level, and how a value becomes a score.

A signal is one row of data; the machine in ``router_core.pressure`` knows no signal by name. Two tables ship,
``DESKTOP`` (someone works at this host) and ``SERVER``. Start values, to be tuned by ``scripts/bench pressure``.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from typing import Final

from router_core.errors import LocalMisuse

MIB: Final = 1024**2
GIB: Final = 1024**3
HOLD_MAX_MS: Final = 600_000
UNKNOWN_HELD_MS: Final = 30_000
"""How long a level stands while its signal is unknown."""

LEVEL_NAMES: Final = ("none", "elevated", "high", "critical")
"""Levels by their code on the wire."""

GPU_RESOURCES: Final = frozenset({"gpu_time", "vram"})
"""Resources of which every GPU has its own level."""

LATER_SIGNALS: Final = frozenset(
    {
        "activity.game", "activity.encoder", "activity.hint", "thermal.hw", "thermal.sw", "steal.pct",
        "power.battery",
    }
)  # fmt: skip
"""Signals this version does not measure: they may be switched off, but have no row to tune."""


class FilterKind(Enum):
    """How a signal's readings are filtered."""

    EWMA = "ewma"
    WINDOW_MIN = "window_min"
    COUNTER_RATE = "counter_rate"
    RISE = "rise"
    N_OF_M = "n_of_m"


class Danger(Enum):
    """The side on which a value is bad."""

    ABOVE = "above"
    BELOW = "below"


@dataclass(frozen=True, slots=True, kw_only=True)
class Filtering:
    """What a signal's readings pass through. ``scale`` turns the filter's unit into the row's: a counter's
    rate is per second, so 1e-4 makes percent of microseconds."""

    kind: FilterKind
    window_ms: int = 0
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A threshold: ``max(floor, share of the whole) + extra share of the whole``, in the row's unit."""

    floor: float = 0.0
    share: float = 0.0
    extra: float = 0.0

    @property
    def relative(self) -> bool:
        return self.share != 0.0 or self.extra != 0.0

    def at(self, whole: float | None) -> float | None:
        """The threshold where the whole is ``whole``; None if it is needed and unknown."""
        if not self.relative:
            return self.floor
        return None if whole is None else max(self.floor, self.share * whole) + self.extra * whole


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelRule:
    """One level (1..3) of one signal: entered at ``enter`` for ``hold_in_ms``, left at ``exit`` for
    ``hold_out_ms``."""

    level: int
    enter: Bound
    hold_in_ms: int
    exit: Bound
    hold_out_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalRow:
    """One signal. ``resource`` is the name of a resource code; ``score`` holds the values scored 0 and 1, None
    makes the row a flag, scored by its level."""

    signal: str
    resource: str
    unit: str
    filtering: Filtering
    danger: Danger
    rules: tuple[LevelRule, ...]
    score: tuple[Bound, Bound] | None

    @property
    def per_gpu(self) -> bool:
        """Whether each GPU is judged by itself."""
        return self.resource in GPU_RESOURCES


def row_faults(row: SignalRow) -> list[str]:
    """Everything that makes ``row`` contradict itself, in words; empty if it is sound."""
    faults = []
    for rule in row.rules:
        name = LEVEL_NAMES[rule.level]
        for what, hold in (("hold_in_s", rule.hold_in_ms), ("hold_out_s", rule.hold_out_ms)):
            if not 0 <= hold <= HOLD_MAX_MS:
                faults.append(
                    f"{row.signal}.{name}: {what} {hold / 1000:g} is not in 0..{HOLD_MAX_MS // 1000}"
                )
        if not _milder(row.danger, rule.exit, rule.enter):
            faults.append(f"{row.signal}.{name}: exit must be strictly milder than enter")
    if row.score is not None and not _milder(row.danger, *row.score):
        faults.append(f"{row.signal}: the value scored 0 must be strictly milder than the one scored 1")
    for lower, higher in pairwise(row.rules):
        if lower.level >= higher.level or not _milder(row.danger, lower.enter, higher.enter):
            faults.append(
                f"{row.signal}: enter of {LEVEL_NAMES[lower.level]} must be strictly milder than of "
                f"{LEVEL_NAMES[higher.level]}"
            )
    return faults


def _milder(danger: Danger, mild: Bound, severe: Bound) -> bool:
    """True if ``mild`` is strictly the milder one for every size of the whole.

    Both bounds are piecewise linear in the whole, so the ends (256 MiB, 16 TiB) and the bends decide.
    """
    bends = [bound.floor / bound.share for bound in (mild, severe) if bound.share > 0 and bound.floor > 0]
    for whole in (float(2**28), *bends, float(2**44)):
        a, b = mild.at(whole), severe.at(whole)
        if a is None or b is None or not (a < b if danger is Danger.ABOVE else a > b):
            return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class PressurePolicy:
    """The rows in force. A table that contradicts itself is refused with every fault named."""

    profile: str
    rows: tuple[SignalRow, ...]

    def __post_init__(self) -> None:
        faults = [fault for row in self.rows for fault in row_faults(row)]
        names = [row.signal for row in self.rows]
        faults += [f"{name}: listed twice" for name in sorted({n for n in names if names.count(n) > 1})]
        if faults:
            raise LocalMisuse("broken pressure policy: " + "; ".join(faults))

    def row(self, signal: str) -> SignalRow | None:
        return next((row for row in self.rows if row.signal == signal), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleOverride:
    """An operator's own numbers for one level of one signal; None keeps the profile's number."""

    signal: str
    level: int
    enter: Bound | None = None
    hold_in_ms: int | None = None
    exit: Bound | None = None
    hold_out_ms: int | None = None


def with_overrides(
    table: PressurePolicy, overrides: Iterable[RuleOverride], off: Iterable[str]
) -> PressurePolicy:
    """``table`` without the signals in ``off`` and with ``overrides`` laid over its rows.

    A level the profile's row lacks needs all four numbers. Raises ``LocalMisuse`` naming every fault.
    """
    rows, faults = overridden_rows(table, overrides, off)
    if faults:
        raise LocalMisuse("broken pressure policy: " + "; ".join(faults))
    return replace(table, rows=rows)


def overridden_rows(
    table: PressurePolicy, overrides: Iterable[RuleOverride], off: Iterable[str]
) -> tuple[tuple[SignalRow, ...], list[str]]:
    """The rows of ``with_overrides``, and what is wrong with them."""
    asked = list(overrides)
    silenced = frozenset(off)
    faults: list[str] = []
    rows = []
    for row in table.rows:
        if row.signal in silenced:
            continue
        rules = {rule.level: rule for rule in row.rules}
        for override in asked:
            if override.signal != row.signal:
                continue
            rule = _overridden(rules.get(override.level), override)
            if rule is None:
                faults.append(
                    f"{row.signal}.{LEVEL_NAMES[override.level]}: a level {table.profile} lacks needs all four numbers"
                )
            else:
                rules[override.level] = rule
        row = replace(row, rules=tuple(rules[level] for level in sorted(rules)))
        faults += row_faults(row)
        rows.append(row)
    return tuple(rows), faults


def _overridden(rule: LevelRule | None, override: RuleOverride) -> LevelRule | None:
    enter = override.enter if override.enter is not None else rule.enter if rule else None
    leave = override.exit if override.exit is not None else rule.exit if rule else None
    hold_in = override.hold_in_ms if override.hold_in_ms is not None else rule.hold_in_ms if rule else None
    hold_out = (
        override.hold_out_ms if override.hold_out_ms is not None else rule.hold_out_ms if rule else None
    )
    if enter is None or leave is None or hold_in is None or hold_out is None:
        return None
    return LevelRule(level=override.level, enter=enter, hold_in_ms=hold_in, exit=leave, hold_out_ms=hold_out)


def _rules(*numbers: tuple[int, Bound, float, Bound, float]) -> tuple[LevelRule, ...]:
    return tuple(
        LevelRule(
            level=level,
            enter=enter,
            hold_in_ms=round(hold_in * 1000),
            exit=leave,
            hold_out_ms=round(hold_out * 1000),
        )
        for level, enter, hold_in, leave, hold_out in numbers
    )


def _plain(value: float) -> Bound:
    return Bound(floor=value)


E, H, C = 1, 2, 3
_PSI: Final = Filtering(kind=FilterKind.COUNTER_RATE, window_ms=10_000, scale=1e-4)
_EWMA: Final = Filtering(kind=FilterKind.EWMA)
_LEAST: Final = Filtering(kind=FilterKind.WINDOW_MIN, window_ms=5_000)
_SWAP: Final = Filtering(kind=FilterKind.COUNTER_RATE, window_ms=1_000, scale=1 / MIB)


def _percent(
    signal: str,
    resource: str,
    filtering: Filtering,
    lo: float,
    hi: float,
    *numbers: tuple[int, float, float, float, float],
) -> SignalRow:
    rules = _rules(*((level, _plain(a), i, _plain(b), o) for level, a, i, b, o in numbers))
    return SignalRow(
        signal=signal, resource=resource, unit="%", filtering=filtering, danger=Danger.ABOVE, rules=rules,
        score=(_plain(lo), _plain(hi)),
    )  # fmt: skip


def _psi(
    signal: str, resource: str, lo: float, hi: float, *numbers: tuple[int, float, float, float, float]
) -> SignalRow:
    return _percent(signal, resource, _PSI, lo, hi, *numbers)


def _mean(
    signal: str, resource: str, lo: float, hi: float, *numbers: tuple[int, float, float, float, float]
) -> SignalRow:
    return _percent(signal, resource, _EWMA, lo, hi, *numbers)


def _vram_free(floor: float, share: float) -> SignalRow:
    enter = Bound(floor=floor, share=share)
    return SignalRow(
        signal="vram.free",
        resource="vram",
        unit="B",
        filtering=_LEAST,
        danger=Danger.BELOW,
        rules=_rules((H, enter, 0, Bound(floor=1.5 * floor, share=1.5 * share), 10)),
        score=(Bound(floor=3 * floor, share=3 * share), enter),
    )


def _memory_avail(floor: float, high: float, critical: float) -> SignalRow:
    return SignalRow(
        signal="memory.avail",
        resource="memory",
        unit="B",
        filtering=_LEAST,
        danger=Danger.BELOW,
        rules=_rules(
            (H, Bound(floor=floor, share=high), 0, Bound(floor=floor, share=high, extra=0.02), 30),
            (C, Bound(share=critical), 0, Bound(share=critical, extra=0.02), 30),
        ),
        score=(Bound(floor=2 * floor, share=2 * high), Bound(share=critical)),
    )


_MEMORY_OOM: Final = SignalRow(
    signal="memory.oom",
    resource="memory",
    unit="kills",
    filtering=Filtering(kind=FilterKind.RISE),
    danger=Danger.ABOVE,
    rules=_rules((C, _plain(1), 0, _plain(0), 60)),
    score=None,
)

_SWAP_RATE: Final = SignalRow(
    signal="swap.rate",
    resource="swap",
    unit="MiB/s",
    filtering=_SWAP,
    danger=Danger.ABOVE,
    rules=_rules((E, _plain(4), 5, _plain(0.4), 30), (H, _plain(40), 5, _plain(0.4), 30)),
    score=(_plain(0.4), _plain(40)),
)

DESKTOP: Final = PressurePolicy(
    profile="desktop",
    rows=(
        _memory_avail(2 * GIB, 0.10, 0.05),
        _psi("memory.some", "memory", 1, 15, (E, 5, 0, 2, 30), (H, 10, 0, 2, 30)),
        _psi("memory.full", "memory", 0, 5, (C, 5, 0, 1, 30)),
        _MEMORY_OOM,
        _SWAP_RATE,
        _psi("cpu.some", "cpu", 5, 60, (E, 20, 0, 10, 20), (H, 40, 0, 25, 20)),
        _mean("cpu.ext", "cpu", 50, 100, (H, 85, 5, 65, 20)),
        _psi("io.some", "io", 5, 60, (E, 20, 0, 10, 20), (H, 40, 0, 10, 20)),
        _mean("gpu_time.ext", "gpu_time", 10, 60, (E, 25, 3, 12, 10), (H, 50, 3, 25, 20)),
        _vram_free(1 * GIB, 0.08),
    ),
)

SERVER: Final = PressurePolicy(
    profile="server",
    rows=(
        _memory_avail(1 * GIB, 0.05, 0.025),
        _psi("memory.some", "memory", 3, 30, (E, 10, 0, 5, 60), (H, 20, 0, 5, 60)),
        _psi("memory.full", "memory", 0, 10, (C, 10, 0, 2, 60)),
        _MEMORY_OOM,
        _SWAP_RATE,
        _psi("cpu.some", "cpu", 20, 80, (E, 40, 0, 25, 30), (H, 60, 0, 45, 30)),
        _mean("cpu.ext", "cpu", 70, 100, (H, 95, 5, 80, 30)),
        _psi("io.some", "io", 10, 80, (E, 30, 0, 15, 30), (H, 60, 0, 15, 30)),
        _mean("gpu_time.ext", "gpu_time", 25, 90, (E, 40, 5, 25, 15), (H, 70, 5, 50, 30)),
        _vram_free(512 * MIB, 0.03),
    ),
)

PROFILES: Final = {policy.profile: policy for policy in (DESKTOP, SERVER)}
