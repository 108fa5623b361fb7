"""The tables within the maintainers' pages that are made from the code: ``scripts/docs`` writes and checks them."""

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Final

from router_core.policy.exchange import ExchangePolicy
from router_core.policy.placement import PlacementPolicy
from router_core.policy.profile import ProfilePolicy

ROOT: Final = Path(__file__).resolve().parent.parent
PLACEMENT: Final = ROOT / "docs" / "placement.md"
_KEY: Final = re.compile(r"`([a-z_]+)`|^    .*$", re.MULTILINE)
_WORD: Final = re.compile(r"[a-z_]{4,}")
_BLOCK: Final = re.compile(r"(?<=<!-- numbers: begin -->\n).*(?=<!-- numbers: end -->)", re.DOTALL)


def stale() -> list[str]:
    """The pages whose tables are not as the code has them."""
    return [] if PLACEMENT.read_text() == _placement() else [str(PLACEMENT.relative_to(ROOT))]


def write() -> None:
    """Put the tables into the pages."""
    PLACEMENT.write_text(_placement())


def _placement() -> str:
    text = PLACEMENT.read_text()
    told = _BLOCK.sub("", text)
    words = {word for hit in _KEY.finditer(told) for word in _WORD.findall(hit.group())}
    rows = [f"| `{name}` | {value} |\n" for name, value in sorted(_numbers().items()) if name in words]
    weights = PlacementPolicy().weights
    rows += [
        f"| `weights.{each.name}` | {getattr(weights, each.name):g} |\n"
        for each in fields(weights)
        if each.init
    ]
    return _BLOCK.sub(lambda _: "| number | value |\n|---|---|\n" + "".join(rows), text)


def _numbers() -> Mapping[str, str]:
    """Every plain number of the policies by its name."""
    return {
        each.name: f"{value:,}" if isinstance(value, int) else f"{value:g}"
        for policy in (ExchangePolicy(), ProfilePolicy(), PlacementPolicy())
        for each in fields(policy)
        if isinstance(value := getattr(policy, each.name), int | float) and not isinstance(value, bool)
    }
