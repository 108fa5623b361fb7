"""Pictures of compared runs as SVG text: bars with intervals, one row of bars for each policy.

Plain shapes and text, no scripts, no fonts of our own. Refuses to write files.
"""

from collections.abc import Sequence
from xml.sax.saxutils import escape

from msgspec import Struct

from router_core.sim.placement.report import Mean, Tally

_WIDTH, _ROW, _LEFT, _RIGHT, _TOP = 720, 26, 150, 110, 56
_COLOURS = ("#1f6f8b", "#8a8a8a")
_OURS = "balanced"


class Bar(Struct, frozen=True, kw_only=True):
    label: str
    mean: Mean


def bars(title: str, unit: str, rows: Sequence[Bar]) -> str:
    """Horizontal bars from 0, with 95 % intervals as whiskers."""
    most = max((row.mean.value + (row.mean.half or 0.0) for row in rows), default=1.0) or 1.0
    scale = (_WIDTH - _LEFT - _RIGHT) / most
    height = _TOP + _ROW * len(rows) + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="16" y="24" font-size="15" font-weight="bold">{escape(title)}</text>',
        f'<text x="16" y="42" fill="#555555">{escape(unit)}, mean over seeds, 95 % interval</text>',
    ]
    for index, row in enumerate(rows):
        parts += _bar(row, _TOP + _ROW * index, scale)
    return "\n".join([*parts, "</svg>", ""])


def pictures(tally: Tally, figures: Sequence[tuple[str, str]]) -> dict[str, str]:
    """One picture for each scenario, load and figure of (name, unit), by file name."""
    found = {}
    for scenario, rho in dict.fromkeys((case.scenario, case.rho) for case in tally.cases):
        policies = [case.policy for case in tally.cases if (case.scenario, case.rho) == (scenario, rho)]
        for figure, unit in figures:
            rows = [Bar(label=name, mean=tally.mean(scenario, rho, name, figure)) for name in policies]
            title = f"{scenario}, load {rho:g}: {figure}"
            found[f"{scenario}-{round(100 * rho):02d}-{figure}.svg"] = bars(title, unit, rows)
    return found


def _bar(row: Bar, y: int, scale: float) -> list[str]:
    colour = _COLOURS[0] if row.label == _OURS else _COLOURS[1]
    length, middle = row.mean.value * scale, y + _ROW / 2
    drawn = [
        f'<text x="{_LEFT - 8}" y="{middle + 4:.1f}" text-anchor="end">{escape(row.label)}</text>',
        f'<rect x="{_LEFT}" y="{y + 4}" width="{length:.1f}" height="{_ROW - 8}" fill="{colour}"/>',
    ]
    end = length
    if row.mean.half is not None:
        low, high = max(0.0, length - row.mean.half * scale), length + row.mean.half * scale
        end = high
        drawn.append(
            f'<path d="M{_LEFT + low:.1f} {middle:.1f} H{_LEFT + high:.1f}" stroke="#000000" stroke-width="1.5"/>'
        )
    drawn.append(f'<text x="{_LEFT + end + 6:.1f}" y="{middle + 4:.1f}">{row.mean.value:.3g}</text>')
    return drawn
