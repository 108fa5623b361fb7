"""No pattern of ours takes a time that grows faster than the text it is laid on, whatever a stranger writes."""

import importlib
import pkgutil
import re
from collections.abc import Iterator
from re import _constants as code  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import pytest

import agent
import router_core

LONG = 256
"""A repeat that may go on longer counts as without end."""
ALPHABET = range(256)
_CLASSES = {
    code.CATEGORY_DIGIT: r"\d",
    code.CATEGORY_NOT_DIGIT: r"\D",
    code.CATEGORY_SPACE: r"\s",
    code.CATEGORY_NOT_SPACE: r"\S",
    code.CATEGORY_WORD: r"\w",
    code.CATEGORY_NOT_WORD: r"\W",
}
Sequence = list[tuple[Any, Any]]


def chars(op: Any, value: Any) -> frozenset[int]:
    """The characters that one element may begin with, of the first 256; those beyond behave alike."""
    match op:
        case code.LITERAL:
            return frozenset({value} & set(ALPHABET))
        case code.NOT_LITERAL:
            return frozenset(set(ALPHABET) - {value})
        case code.ANY:
            return frozenset(ALPHABET)
        case code.CATEGORY:
            return frozenset(at for at in ALPHABET if re.match(_CLASSES[value], chr(at)))
        case code.RANGE:
            return frozenset(set(range(value[0], value[1] + 1)) & set(ALPHABET))
        case code.IN:
            negated = value[0][0] is code.NEGATE
            found = frozenset().union(*(chars(*each) for each in value[negated:]))
            return frozenset(ALPHABET) - found if negated else found
    return frozenset().union(*(first(list(branch)) for branch in branches(op, value)))


def branches(op: Any, value: Any) -> list[Sequence]:
    """What lies inside of an element; nothing for one that takes no characters."""
    match op:
        case code.SUBPATTERN:
            return [list(value[3])]
        case code.BRANCH:
            return [list(each) for each in value[1]]
        case code.MAX_REPEAT | code.MIN_REPEAT | code.POSSESSIVE_REPEAT:
            return [list(value[2])]
        case code.ATOMIC_GROUP:
            return [list(value)]
    return []


def is_empty(op: Any, value: Any) -> bool:
    """True if an element may take no character."""
    if op in (code.MAX_REPEAT, code.MIN_REPEAT, code.POSSESSIVE_REPEAT) and value[0] == 0:
        return True
    if op in (code.AT, code.ASSERT, code.ASSERT_NOT):
        return True
    inside = branches(op, value)
    return bool(inside) and any(all(is_empty(*each) for each in branch) for branch in inside)


def first(sequence: Sequence) -> frozenset[int]:
    found: frozenset[int] = frozenset()
    for op, value in sequence:
        found |= chars(op, value) if op not in (code.AT, code.ASSERT, code.ASSERT_NOT) else frozenset()
        if not is_empty(op, value):
            break
    return found


def last_repeat(sequence: Sequence) -> frozenset[int]:
    """The characters of a repeat without end that such a sequence may end in."""
    found: frozenset[int] = frozenset()
    for op, value in reversed(sequence):
        if op in (code.MAX_REPEAT, code.MIN_REPEAT) and value[1] > LONG:
            found |= first(list(value[2]))
        elif op is not code.POSSESSIVE_REPEAT:
            for branch in branches(op, value):
                found |= last_repeat(branch)
        if not is_empty(op, value):
            break
    return found


def faults(sequence: Sequence) -> Iterator[str]:
    """Repeats without end that could share the same characters with one that follows, or with their next round."""
    for at, (op, value) in enumerate(sequence):
        for branch in branches(op, value):
            yield from faults(branch)
        if op not in (code.MAX_REPEAT, code.MIN_REPEAT) or value[1] <= LONG:
            continue
        inside = list(value[2])
        if last_repeat(inside) & first(inside):
            yield "a repeat within a repeat"
        for later, (next_op, next_value) in enumerate(sequence[at + 1 :], at + 1):
            repeats = next_op in (code.MAX_REPEAT, code.MIN_REPEAT, code.POSSESSIVE_REPEAT)
            if repeats and next_value[1] > LONG and first(inside) & first([sequence[later]]):
                yield "a repeat after a repeat"
            if not is_empty(next_op, next_value):
                break


def patterns() -> dict[str, re.Pattern[Any]]:
    """Every compiled pattern that a module of ours holds."""
    found: dict[str, re.Pattern[Any]] = {}
    for package in (agent, router_core):
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if info.name.endswith("__main__"):
                continue
            module = importlib.import_module(info.name)
            found |= {
                f"{info.name}.{name}": value
                for name, value in vars(module).items()
                if isinstance(value, re.Pattern)
            }
    return found


@pytest.mark.threat("T44")
def test_no_pattern_goes_back_over_the_same_text_again_and_again() -> None:
    held = patterns()
    assert len(held) > 20
    bad = {
        name: found for name, each in held.items() if (found := [*faults(list(parser.parse(each.pattern)))])
    }
    assert bad == {}


@pytest.mark.parametrize(
    "text",
    [
        r"(a+)+b",
        r"(a|aa)+b(a*)*",
        r"([0-9]+\.?[0-9]*)s",
        r"(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:ns|s))+",
        r"\s*\s*$",
        r"(x\w*)*y",
    ],
)
def test_patterns_that_do_are_found(text: str) -> None:
    assert [*faults(list(parser.parse(text)))]


@pytest.mark.parametrize(
    "text", [r"(?:[0-9]++(?:\.[0-9]*+)?s)++", r"[a-z]+=\S+", r"(ab+c)+", r'"\s*:\s*"', r"a{1,9}a*"]
)
def test_patterns_that_do_not_are_passed(text: str) -> None:
    assert not [*faults(list(parser.parse(text)))]
