"""Checked reading of one TOML table: each getter takes a key, checks it and notes what is wrong.

A getter never raises. On a fault it returns the default, so that the caller can go on and find the rest;
whoever sees ``faults`` must throw the result away.
"""

import math
import re
from collections.abc import Collection, Sequence
from typing import Any, Final

FILE_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
"""Of a credential."""
Faults = list[tuple[str, str]]
"""(dotted key, problem), in the order found."""


class Table:
    """One table at ``path``; sub-tables share the list of faults."""

    def __init__(self, tree: dict[str, Any], path: str = "", faults: Faults | None = None) -> None:
        self._tree = tree
        self._path = path
        self._seen: set[str] = set()
        self.faults: Faults = [] if faults is None else faults

    def fault(self, key: str, problem: str) -> None:
        self.faults.append((self._path + key, problem))

    def _take(self, key: str, kind: type | tuple[type, ...], what: str) -> Any:
        self._seen.add(key)
        value = self._tree.get(key)
        if value is None:
            return None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            self.fault(key, f"must be {what}")
            return None
        return value

    def has(self, key: str) -> bool:
        return key in self._tree

    def flag(self, key: str) -> bool | None:
        value: bool | None = self._take(key, bool, "true or false")
        return value

    def text(self, key: str, pattern: str | None = None) -> str | None:
        """A string that matches ``pattern`` as a whole."""
        value: str | None = self._take(key, str, "a string")
        if value is None or pattern is None or re.fullmatch(pattern, value):
            return value
        self.fault(key, f"{_shown(value)} does not match {pattern}")
        return None

    def file_name(self, key: str) -> str | None:
        """The name of a file that holds a secret. One that is none is not told: it may be the secret."""
        value: str | None = self._take(key, str, "a string")
        if value is None or re.fullmatch(FILE_NAME, value):
            return value
        self.fault(key, f"does not match {FILE_NAME}: it names the file that holds the key")
        return None

    def choice(self, key: str, choices: Sequence[str], others: Collection[str] = ()) -> str | None:
        """One of ``choices``, which a fault names, or of ``others``, which it does not."""
        value: str | None = self._take(key, str, "a string")
        if value is None or value in choices or value in others:
            return value
        self.fault(key, f"{_shown(value)} is none of {' '.join(choices)}")
        return None

    def whole(self, key: str, least: int, most: int) -> int | None:
        value: int | None = self._take(key, int, "a whole number")
        if value is None or least <= value <= most:
            return value
        self.fault(key, f"{value} is not in {least}..{most}")
        return None

    def number(self, key: str) -> float | None:
        """A finite number >= 0."""
        value: float | None = self._take(key, (int, float), "a number")
        if value is None or (math.isfinite(value) and value >= 0):
            return None if value is None else float(value)
        self.fault(key, f"{value} is not a number >= 0")
        return None

    def texts(self, key: str, most: int, pattern: str | None = None) -> tuple[str, ...]:
        """At most ``most`` different strings that match ``pattern``."""
        values: list[Any] | None = self._take(key, list, "an array of strings")
        if values is None:
            return ()
        if len(values) > most:
            self.fault(key, f"{len(values)} entries, at most {most} are allowed")
            return ()
        for index, value in enumerate(values):
            place = f"{key}[{index}]"
            if not isinstance(value, str):
                self.fault(place, "must be a string")
            elif pattern is not None and not re.fullmatch(pattern, value):
                self.fault(place, f"{_shown(value)} does not match {pattern}")
            elif value in values[:index]:
                self.fault(place, "is listed twice")
        return tuple(value for value in values if isinstance(value, str))

    def tables(self, key: str, most: int) -> "list[Table]":
        """An array of tables."""
        values: list[Any] | None = self._take(key, list, "an array of tables")
        if values is None:
            return []
        if len(values) > most:
            self.fault(key, f"{len(values)} entries, at most {most} are allowed")
            return []
        found = []
        for index, value in enumerate(values):
            if isinstance(value, dict):
                found.append(Table(value, f"{self._path}{key}[{index}].", self.faults))
            else:
                self.fault(f"{key}[{index}]", "must be a table")
        return found

    def entries(self, key: str, most: int) -> "tuple[Table, tuple[str, ...]]":
        """A table with free keys, and those keys."""
        tree: dict[str, Any] | None = self._take(key, dict, "a table")
        if tree is not None and len(tree) > most:
            self.fault(key, f"{len(tree)} entries, at most {most} are allowed")
            tree = None
        inner = tree or {}
        return Table(inner, f"{self._path}{key}.", self.faults), tuple(inner)

    def refuse_unknown(self) -> None:
        """Note every key that no getter asked for."""
        for key in self._tree:
            if key not in self._seen:
                self.fault(key, "unknown key")


def _shown(value: str) -> str:
    return repr(value if len(value) <= 64 else value[:61] + "...")
