"""Metrics in the Prometheus text format, version 0.0.4.

Rules: an unknown value is an absent series, never 0 or NaN, but every family is named from the start, and what is counted
without labels or under ``known`` ones starts at 0; a label keeps ``limits.LABEL_VALUES`` values per
family, cut and made printable, and later ones are summed under ``other``; a collector that fails loses its
families for that scrape, nothing more.
Format: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Final, Generic, Protocol, TypeVar

from msgspec import Struct

from router_core import limits
from router_core.errors import LocalMisuse

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
OTHER: Final = "other"
SECONDS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_KNOWN_KEPT: Final = 1_024
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,127}")

Labels = tuple[str, ...]
Number = int | float
_T = TypeVar("_T")


class Shape(Enum):
    """The kind of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Family(Struct, frozen=True, kw_only=True):
    """One name with its series: ``(suffix, extra label, labels) -> value``; ``extra`` is ``le`` or empty."""

    name: str
    help: str
    shape: Shape
    labels: Labels
    series: Sequence[tuple[str, str, Labels, Number]]


class Collector(Protocol):
    """Reads families of metrics when they are scraped."""

    def collect(self) -> Iterable[Family]:
        """The families as they are now."""


def gauge_family(
    name: str, text: str, labels: Labels, values: Mapping[Labels, Number | None], shape: Shape = Shape.GAUGE
) -> Family:
    """A family read from somewhere at scrape time; None and non-finite values are left out."""
    cap = _Cap(labels)
    merged: dict[Labels, Number] = {}
    for key, value in values.items():
        if value is not None and math.isfinite(value):
            capped = cap.fit(key)
            merged[capped] = merged.get(capped, 0) + value
    series = [("", "", key, value) for key, value in merged.items()]
    return Family(name=name, help=text, shape=shape, labels=labels, series=series)


class Counter:
    """A number that only rises. ``inc("route", "native")``: label values in the order of ``labels``; ``known`` are
    combinations that are shown before anything is counted."""

    def __init__(self, name: str, text: str, labels: Labels = (), known: Iterable[Labels] = ()) -> None:
        self.name, self.text = _checked(name, labels), text
        self._cells: _Cells[list[Number]] = _Cells(labels, lambda: [0], known)

    def inc(self, *labels: str, by: Number = 1) -> None:
        cell = self._cells.known.get(labels) or self._cells.of(labels)
        cell[0] += by

    def value(self, *labels: str) -> Number | None:
        cell = self._cells.shown.get(labels)
        return None if cell is None else cell[0]

    def collect(self) -> Iterable[Family]:
        values = {key: cell[0] for key, cell in self._cells.shown.items()}
        yield gauge_family(self.name, self.text, self._cells.labels, values, Shape.COUNTER)


class Histogram:
    """Counts per upper bound, their sum and number; ``bounds`` rise and end below infinity, ``known`` is as in
    ``Counter``."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Labels = (),
        bounds: Sequence[float] = SECONDS,
        known: Iterable[Labels] = (),
    ) -> None:
        self.name, self.text = _checked(name, labels), text
        if list(bounds) != sorted(set(bounds)):
            raise LocalMisuse(f"bounds of {name} must rise")
        self._bounds = tuple(bounds)
        self._cells: _Cells[tuple[list[int], list[float]]] = _Cells(
            labels, lambda: ([0] * (len(bounds) + 1), [0.0]), known
        )

    def observe(self, value: Number, *labels: str) -> None:
        counts, total = self._cells.known.get(labels) or self._cells.of(labels)
        counts[bisect_left(self._bounds, value)] += 1
        total[0] += value

    def collect(self) -> Iterable[Family]:
        series: list[tuple[str, str, Labels, Number]] = []
        for key, (counts, total) in self._cells.shown.items():
            running = 0
            for bound, count in zip((*map(_number, self._bounds), "+Inf"), counts, strict=True):
                running += count
                series.append(("_bucket", bound, key, running))
            series += [("_sum", "", key, total[0]), ("_count", "", key, running)]
        yield Family(
            name=self.name, help=self.text, shape=Shape.HISTOGRAM, labels=self._cells.labels, series=series
        )


class Registry:
    """All collectors of one daemon. ``failed(exc)`` hears of a collector that raised."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._collectors: list[Collector] = []

    def add(self, *collectors: Collector) -> None:
        self._collectors += collectors

    def render(self) -> str:
        """The exposition text: families by name, the first help and shape of a name count."""
        families: dict[str, list[Family]] = {}
        errors = 0
        for collector in self._collectors:
            try:
                for family in collector.collect():
                    families.setdefault(family.name, []).append(family)
            except Exception as exc:
                errors += 1
                self._failed(exc)
        failed = gauge_family(
            "pairmesh_collectors_failed", "Collectors that failed in this scrape.", (), {(): errors}
        )
        families[failed.name] = [failed]
        return "".join(_text(families[name]) for name in sorted(families))


class _Cap:
    """The labels of one family, and which values each has used up."""

    def __init__(self, labels: Labels) -> None:
        self.labels = labels
        self._shown: list[dict[str, str]] = [{} for _ in labels]

    def fit(self, values: Labels) -> Labels:
        if len(values) != len(self.labels):
            raise LocalMisuse(f"{len(values)} label values given, {len(self.labels)} wanted: {self.labels}")
        return tuple(self._one(shown, value) for shown, value in zip(self._shown, values, strict=True))

    def _one(self, shown: dict[str, str], value: str) -> str:
        fit = shown.get(value)
        if fit is None:
            if len(shown) >= limits.LABEL_VALUES:
                return OTHER
            fit = "".join(ch if ch.isprintable() else "?" for ch in value[: limits.LOG_TEXT])
            shown[value] = fit
        return fit


class _Cells(Generic[_T]):
    """What is counted under each combination of labels: ``shown`` by labels as exposed, ``known`` by labels as given,
    as many as are worth remembering."""

    def __init__(self, labels: Labels, new: Callable[[], _T], known: Iterable[Labels]) -> None:
        self.labels = labels
        self.shown: dict[Labels, _T] = {}
        self.known: dict[Labels, _T] = {}
        self._cap = _Cap(labels)
        self._new = new
        for values in known if labels else [()]:
            self.of(values)

    def of(self, values: Labels) -> _T:
        fitted = self._cap.fit(values)
        cell = self.shown.get(fitted)
        if cell is None:
            cell = self.shown[fitted] = self._new()
        if len(self.known) < _KNOWN_KEPT:
            self.known[values] = cell
        return cell


def _checked(name: str, labels: Labels) -> str:
    for word in (name, *labels):
        if not _NAME.fullmatch(word):
            raise LocalMisuse(f"not a metric or label name: {word!r}")
    return name


def _text(families: Sequence[Family]) -> str:
    first = families[0]
    lines = [
        f"{first.name}{suffix}{_labels(family.labels, values, extra)} {_number(value)}\n"
        for family in families
        for suffix, extra, values, value in family.series
    ]
    head = f"# HELP {first.name} {_escaped(first.help)}\n# TYPE {first.name} {first.shape.value}\n"
    return head + "".join(lines)


def _labels(names: Labels, values: Labels, le: str) -> str:
    pairs = [f'{name}="{_escaped(value, quote=True)}"' for name, value in zip(names, values, strict=True)]
    if le:
        pairs.append(f'le="{le}"')
    return "{" + ",".join(pairs) + "}" if pairs else ""


def _escaped(text: str, *, quote: bool = False) -> str:
    out = text.replace("\\", "\\\\").replace("\n", "\\n")
    return out.replace('"', '\\"') if quote else out


def _number(value: Number) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 2**53 else repr(float(value))
