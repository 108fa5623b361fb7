"""How every bench prints: one JSON object a line with ``--json``, else a small table.

A figure has a name, a value and a unit. ``baseline`` is what it is held against (a stated limit, or a peer
measured in the same run) and ``ratio`` is value / baseline unless the bench says otherwise.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TextIO

from msgspec import Struct


class Figure(Struct, frozen=True):
    """One measured number."""

    name: str
    value: float
    unit: str
    baseline: float | None = None
    ratio: float | None = None


def against(name: str, value: float, unit: str, baseline: float) -> Figure:
    """A figure held against ``baseline``, its ratio worked out."""
    return Figure(name, value, unit, baseline, value / baseline if baseline else None)


def emit(figures: Sequence[Figure], as_json: bool, out: TextIO | None = None) -> None:
    """Print ``figures`` to ``out`` (standard output)."""
    out = out or sys.stdout
    if as_json:
        for figure in figures:
            row = {name: _rounded(getattr(figure, name)) for name in Figure.__struct_fields__}
            print(json.dumps(row), file=out)
        return
    width = max((len(figure.name) for figure in figures), default=0)
    for figure in figures:
        held = "" if figure.baseline is None else f"  against {figure.baseline:,g} {figure.unit}"
        times = "" if figure.ratio is None else f"  x {figure.ratio:.3g}"
        print(f"{figure.name:<{width}}  {figure.value:>12,.5g} {figure.unit}{held}{times}", file=out)


def wants_json(argv: Sequence[str] | None = None) -> bool:
    """Parse the one flag every bench has."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    return bool(parser.parse_args(argv).json)


def _rounded(value: object) -> object:
    return float(f"{value:.6g}") if isinstance(value, float) else value
