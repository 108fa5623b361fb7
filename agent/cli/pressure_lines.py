"""What presses this host, in a line per signal. Pure."""

from collections.abc import Iterable, Iterator
from typing import Final

from agent.admin.documents import PressedDoc

_GIB: Final = 1024**3


def pressed_lines(pressed: Iterable[PressedDoc]) -> Iterator[str]:
    """``memory is critical: memory.avail is 0.4 GiB, the bound is 0.8 GiB``."""
    for each in pressed:
        where = "" if each.gpu is None else f" of GPU {each.gpu[:8]}"
        bound = "" if each.threshold is None else f", the bound is {_shown(each.threshold, each.unit)}"
        value = "" if each.value is None else f": {each.signal} is {_shown(each.value, each.unit)}{bound}"
        yield f"{each.resource}{where} is {each.level}{value}"


def _shown(value: float, unit: str) -> str:
    if unit == "B":
        return f"{value / _GIB:.1f} GiB"
    return f"{value:.0f}{unit}" if unit == "%" else f"{value:.1f} {unit}"
