"""The operator's own pressure thresholds, ``sampling.pressure``: parsed here, judged against the profile's rows.

``SIGNAL = "off"`` or ``SIGNAL.LEVEL = { enter, hold_in_s, exit, hold_out_s }``. A signal's name has a dot, so it
is written as two nested tables or as one quoted key.
"""

import re
from dataclasses import dataclass
from typing import Final

from agent.settings.values import Refuse, nearest, number
from router_core.policy.pressure import (
    LATER_SIGNALS,
    LEVEL_NAMES,
    PROFILES,
    SERVER,
    Bound,
    RuleOverride,
    overridden_rows,
)

SIGNALS: Final = tuple(row.signal for row in SERVER.rows)
LEVELS: Final = LEVEL_NAMES[1:]
NUMBERS: Final = ("enter", "hold_in_s", "exit", "hold_out_s")

_PERCENT = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,3})?) ?%")


@dataclass(frozen=True, slots=True, kw_only=True)
class PressureTuning:
    """The operator's own thresholds: signals switched off, and numbers laid over the profile's rows."""

    off: tuple[str, ...] = ()
    overrides: tuple[RuleOverride, ...] = ()


def pressure(written: object, refuse: Refuse) -> PressureTuning:
    """A table of pressure signals: those switched off, and the numbers that replace the defaults of others."""
    off: list[str] = []
    overrides: list[RuleOverride] = []
    for signal, tuning in _signals(written, refuse).items():
        if tuning == "off" and (signal in SIGNALS or signal in LATER_SIGNALS):
            off.append(signal)
        elif signal in LATER_SIGNALS:
            refuse("not available in this version", at=signal, value=tuning, allowed='"off"')
        elif signal not in SIGNALS:
            refuse(
                "unknown signal",
                at=signal,
                value=None,
                allowed=", ".join(SIGNALS),
                meant=nearest(signal, SIGNALS),
            )
        elif not isinstance(tuning, dict):
            refuse("neither off nor a table of levels", at=signal, value=tuning)
        else:
            for level, numbers in tuning.items():
                override = _override(signal, level, numbers, refuse)
                if override is not None:
                    overrides.append(override)
    return PressureTuning(off=tuple(off), overrides=tuple(overrides))


def _signals(written: object, refuse: Refuse) -> dict[str, object]:
    if not isinstance(written, dict):
        refuse("not a table")
        return {}
    found: dict[str, object] = {}
    for key, inner in written.items():
        if "." in key:
            found[key] = inner
        elif isinstance(inner, dict):
            found.update({f"{key}.{name}": tuning for name, tuning in inner.items()})
        else:
            refuse("not a signal", at=key, value=inner)
    return found


def _override(signal: str, level: str, numbers: object, refuse: Refuse) -> RuleOverride | None:
    at = f"{signal}.{level}"
    if level not in LEVELS:
        refuse("unknown level", at=at, value=None, allowed=", ".join(LEVELS), meant=nearest(level, LEVELS))
        return None
    if not isinstance(numbers, dict):
        refuse("not a table", at=at, value=numbers, allowed=", ".join(NUMBERS))
        return None
    for name in numbers:
        if name not in NUMBERS:
            refuse(
                "unknown key",
                at=f"{at}.{name}",
                value=None,
                allowed=", ".join(NUMBERS),
                meant=nearest(name, NUMBERS),
            )
    return RuleOverride(
        signal=signal,
        level=LEVEL_NAMES.index(level),
        enter=_bound(numbers, "enter", at, refuse),
        hold_in_ms=_hold(numbers, "hold_in_s", at, refuse),
        exit=_bound(numbers, "exit", at, refuse),
        hold_out_ms=_hold(numbers, "hold_out_s", at, refuse),
    )


def _bound(numbers: dict[str, object], name: str, at: str, refuse: Refuse) -> Bound | None:
    """A number in the signal's unit, or ``"N%"`` of the whole."""
    if name not in numbers:
        return None
    written = numbers[name]
    if (
        isinstance(written, str)
        and (percent := _PERCENT.fullmatch(written))
        and at.startswith(("memory.avail.", "vram.free."))
    ):
        return Bound(share=float(percent[1]) / 100)
    threshold = number(written)
    if threshold is None or threshold < 0:
        refuse(
            "not a threshold",
            at=f"{at}.{name}",
            value=written,
            allowed='a number >= 0; memory.avail and vram.free also "N%"',
        )
        return None
    return Bound(floor=threshold)


def _hold(numbers: dict[str, object], name: str, at: str, refuse: Refuse) -> int | None:
    if name not in numbers:
        return None
    seconds = number(numbers[name])
    if seconds is None or not 0 <= seconds <= 600:
        refuse("not a hold", at=f"{at}.{name}", value=numbers[name], allowed="seconds, 0 to 600")
        return None
    return round(seconds * 1000)


def contradictions(tuning: PressureTuning, profile: str) -> list[str]:
    """What is wrong with ``tuning`` laid over the rows of ``profile`` (``auto``: over those of either)."""
    tables = list(PROFILES.values()) if profile == "auto" else [PROFILES[profile]]
    found: dict[str, None] = {}
    for table in tables:
        found.update(dict.fromkeys(overridden_rows(table, tuning.overrides, tuning.off)[1]))
    return list(found)
