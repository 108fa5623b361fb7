"""Numbers that the how-to pages tell are those of the code."""

import re
from pathlib import Path

from router_core.policy.placement import ClassTargets, PlacementPolicy

HOWTO = Path(__file__).parents[2] / "docs" / "howto"
WORDS = {1.0: "all", 0.9: "nine tenths", 0.7: "seven tenths"}


def test_the_page_about_hints_tells_the_shipped_targets_of_each_class() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| (.*) \| (.*) \| (.*) \|$", (HOWTO / "hints.md").read_text(), re.MULTILINE
    )
    told = {name: columns for name, *columns in rows if name in ("interactive", "batch", "background")}
    policy = PlacementPolicy()
    assert told == {name: row_of(getattr(policy, name)) for name in ("interactive", "batch", "background")}


def row_of(targets: ClassTargets) -> list[str]:
    return [span(targets.ttft_s), span(targets.hold_ms / 1000), WORDS[targets.share]]


def span(seconds: float) -> str:
    return f"{seconds / 60:g} minutes" if seconds >= 120 else f"{seconds:g} s"
