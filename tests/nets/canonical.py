"""Any result as plain JSON that compares by value: numbers to nine significant digits, sets in order, enums as their
values, and the names of today as they were when the vectors were recorded (``names.toml``)."""

import dataclasses
import json
import math
import tomllib
from collections.abc import Mapping, Set
from enum import Enum
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

VECTORS: Final = Path(__file__).parents[1] / "vectors" / "nets"
DIGITS: Final = 9
_WHOLE: Final = 2.0**53


def _table(name: str) -> dict[str, str]:
    return dict(tomllib.loads((VECTORS / "names.toml").read_text()).get(name, {}))


FIELDS: Final = _table("fields")
VALUES: Final = _table("values")


def plain(value: Any, *, without: Set[str] = frozenset()) -> Any:
    """``value`` as JSON has it. ``without`` are names of fields to leave out at every depth."""
    if isinstance(value, Enum):
        told = value.value
        return VALUES.get(told, told) if isinstance(told, str) else told
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return number(value)
    if isinstance(value, (bytes, bytearray)):
        return value.hex()
    if isinstance(value, Struct):
        return _fields({name: getattr(value, name) for name in value.__struct_fields__}, without)
    if dataclasses.is_dataclass(value):
        return _fields({each.name: getattr(value, each.name) for each in dataclasses.fields(value)}, without)
    if isinstance(value, Mapping):
        return _fields({str(plain(key)): each for key, each in value.items()}, without)
    if isinstance(value, Set):
        return sorted((plain(each, without=without) for each in value), key=line)
    return [plain(each, without=without) for each in value]


def _fields(told: Mapping[str, Any], without: Set[str]) -> dict[str, Any]:
    return {
        FIELDS.get(name, name): plain(each, without=without)
        for name, each in told.items()
        if name not in without
    }


def number(value: float) -> float | int | str:
    """``value`` to nine significant digits; whole numbers are the same as integers or floats."""
    if not math.isfinite(value):
        return str(value)
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < _WHOLE else rounded


def line(document: Any) -> str:
    """A plain document in its one spelling."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def mark(document: Any, length: int) -> str:
    """The first ``length`` hex digits of the hash of a plain document."""
    return sha256(line(document).encode()).hexdigest()[:length]
