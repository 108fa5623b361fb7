"""The census counts what it says it counts."""

import ast
from pathlib import Path

from scripts.census import (
    ROOT,
    Module,
    built_by_position,
    large,
    rarely_met,
    shared_names,
    undocumented,
)

SOURCE = '''
class Told(Struct):
    """Said."""
    a: int
class Bare: pass
class _Hidden: pass
def bare(): pass
class Speaks(Protocol):
    def speak(self): ...
    def stop(self): ...
class Dog:
    """Barks."""
    def speak(self): ...
    def stop(self): ...
class Talker(Speaks):
    """Speaks."""
class Silent(Protocol):
    """Says nothing."""
    def hush(self): ...
Told(1, 2, 3, 4)
Told(1, 2, 3, 4, 5)
Dog(1, 2, 3, 4, 5)
'''


def a_module(source: str, name: str = "m.py") -> Module:
    return Module(path=Path(ROOT / name), lines=source.count("\n"), tree=ast.parse(source))


def test_only_public_names_without_docstring_count() -> None:
    assert [each.rpartition(" ")[2] for each in undocumented([a_module(SOURCE)])] == [
        "Bare",
        "bare",
        "Speaks",
    ]


def test_a_name_of_two_classes_is_told_with_both_places() -> None:
    assert shared_names([a_module(SOURCE), a_module("class Dog: pass", "n.py")]) == ["Dog: m.py, n.py"]


def test_structs_built_by_position_are_found_but_in_a_marked_hot_loop() -> None:
    assert [each.partition(" ")[2] for each in built_by_position([a_module(SOURCE)])] == ["Told (5)"]
    assert built_by_position([a_module('"""Rows. A hot loop."""' + SOURCE)]) == []


def test_a_class_that_assigns_more_than_twenty_attributes_is_large() -> None:
    def a_class(size: int) -> Module:
        lines = "\n".join(f"        self.a{number} = 1" for number in range(size))
        return a_module(f"class Big:\n    def __init__(self):\n{lines}\n")

    assert large([a_class(21)]) == ["m.py:1 Big (21)"]
    assert large([a_class(20)]) == []


def test_a_protocol_is_met_by_names_of_members_or_by_deriving_from_it() -> None:
    assert [each.partition(" ")[2] for each in rarely_met([a_module(SOURCE)])] == ["Silent (0)"]
