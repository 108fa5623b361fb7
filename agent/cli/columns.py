"""Text for a terminal: aligned columns, and units people read. Pure.

What peers and engines named is shown with its control characters escaped, so that a name cannot repaint the
screen. Unknown is a dash.
"""

from collections.abc import Sequence
from typing import Final

UNKNOWN: Final = "-"
_GAP: Final = "  "
_MINUTE: Final = 60
_HOUR: Final = 3_600
_DAY: Final = 86_400


def columns(rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset()) -> list[str]:
    """``rows`` as lines with equal columns; those in ``right`` are aligned to the right."""
    shown = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return [
        _GAP.join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in shown
    ]


def printable(text: str) -> str:
    """``text`` with everything that is not printable escaped."""
    return "".join(ch if ch.isprintable() else ch.encode("unicode_escape").decode() for ch in text)


def seconds(value: float | None) -> str:
    """A short time: ``0.4 ms``, ``12 ms``, ``0.31 s``, ``8.4 s``, ``95 s``."""
    if value is None:
        return UNKNOWN
    if value < 0.00995:
        return f"{value * 1_000:.1f} ms" if value > 0 else "0 s"
    if value < 0.0995:
        return f"{value * 1_000:.0f} ms"
    if value < 0.995:
        return f"{value:.2f} s"
    return f"{value:.1f} s" if value < 99.95 else f"{value:.0f} s"


def duration(ms: int | None) -> str:
    """A long time in its two largest units: ``42 s``, ``3 min 7 s``, ``2 h 5 min``, ``3 d 1 h``."""
    if ms is None:
        return UNKNOWN
    whole = ms // 1_000
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE} s"
    if whole < _DAY:
        return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE} min"
    return f"{whole // _DAY} d {whole % _DAY // _HOUR} h"


def count(value: int, one: str) -> str:
    """``1 token``, ``1,200 tokens``."""
    return f"{value:,} {one}{'' if value == 1 else 's'}"
