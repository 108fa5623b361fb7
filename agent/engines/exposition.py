"""Prometheus text of an engine: the few values an adapter asks for, and speeds from its counters."""

import math
from collections.abc import Collection

from msgspec import Struct

LINES = 20_000
"""Lines of one exposition that are looked at."""


def read_values(text: bytes, wanted: Collection[str]) -> dict[str, float]:
    """The values of the unlabelled series in ``wanted`` that are given and finite. An absent one is absent."""
    found: dict[str, float] = {}
    for line in text.decode("utf-8", "replace").split("\n", LINES)[:LINES]:
        name, _, rest = line.partition(" ")
        if name in wanted and rest:
            try:
                value = float(rest.split()[0])
            except ValueError:
                continue
            if math.isfinite(value):
                found[name] = value
    return found


class Counters(Struct, frozen=True, gc=False, kw_only=True):
    """Running totals of one engine process at ``at_ms``: tokens and the seconds they took."""

    at_ms: int
    prompt_tokens: float
    prompt_s: float
    gen_tokens: float
    gen_s: float

    def fell_below(self, before: "Counters") -> bool:
        """True if any total shrank, which only a restart does."""
        return (
            self.prompt_tokens < before.prompt_tokens
            or self.prompt_s < before.prompt_s
            or self.gen_tokens < before.gen_tokens
            or self.gen_s < before.gen_s
        )


class Moved(Struct, frozen=True, gc=False, kw_only=True):
    """Tokens and seconds between two looks; adds up over several processes."""

    prompt_tokens: float = 0.0
    prompt_s: float = 0.0
    gen_tokens: float = 0.0
    gen_s: float = 0.0

    def __add__(self, other: "Moved") -> "Moved":
        return Moved(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            prompt_s=self.prompt_s + other.prompt_s,
            gen_tokens=self.gen_tokens + other.gen_tokens,
            gen_s=self.gen_s + other.gen_s,
        )

    @property
    def pp_tps(self) -> float | None:
        """Prompt tokens/s, None if no prompt was finished meanwhile."""
        return self.prompt_tokens / self.prompt_s if self.prompt_tokens > 0 and self.prompt_s > 0 else None

    @property
    def tg_tps(self) -> float | None:
        """Generated tokens/s, None if no generation was finished meanwhile."""
        return self.gen_tokens / self.gen_s if self.gen_tokens > 0 and self.gen_s > 0 else None


def moved(before: Counters | None, after: Counters, period_ms: int) -> Moved:
    """What was done between two looks; nothing after a restart or a gap of more than three periods."""
    if before is None or after.fell_below(before) or after.at_ms - before.at_ms > 3 * period_ms:
        return Moved()
    return Moved(
        prompt_tokens=after.prompt_tokens - before.prompt_tokens,
        prompt_s=after.prompt_s - before.prompt_s,
        gen_tokens=after.gen_tokens - before.gen_tokens,
        gen_s=after.gen_s - before.gen_s,
    )
