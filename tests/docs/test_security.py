"""The page about security names every threat that a test is marked with, and tests that really are."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.identity.routes import ROUTES, Port, allowed
from agent.settings.values import MESH_PORT
from router_core.record.state import Role
from tests.docs.tables import page, plain, table

PAGE = page("security.md")
TESTS = Path(__file__).parents[1]
ROWS = {row[0]: re.findall(r"`(test_\w+)`", row[3]) for row in table(PAGE, "## Threats")}
ABSENT = {"T4", "T5", "T6", "T7", "T8", "T15"}
"""Threats to what this version does not have."""
PORTS = {MESH_PORT: Port.LINK, 7434: Port.INGRESS}


def marked() -> dict[str, set[str]]:
    """The names of the tests marked with each threat."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in TESTS.rglob("test_*.py"):
        text = path.read_text()
        if "threat(" not in text:
            continue
        module = ast.parse(text)
        everywhere = {
            threat
            for node in module.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
            for threat in threats_in(node.value)
        }
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                own = {threat for decorator in node.decorator_list for threat in threats_in(decorator)}
                for threat in own | everywhere:
                    found[threat].add(node.name)
    return found


def threats_in(expression: ast.expr) -> Iterator[str]:
    for node in ast.walk(expression):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "threat":
            yield from (
                arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
            )


MARKED = marked()


def test_every_threat_is_in_the_table_or_belongs_to_what_is_not_built() -> None:
    assert ROWS.keys() | ABSENT == {f"T{number}" for number in range(1, 49)}
    assert ROWS.keys().isdisjoint(ABSENT), "built now: take it out of ABSENT"


def test_every_marked_threat_is_in_the_table() -> None:
    assert ROWS.keys() >= MARKED.keys()


@pytest.mark.parametrize("threat", ROWS)
def test_the_tests_of_a_threat_exist_and_carry_its_mark(threat: str) -> None:
    assert ROWS[threat], "a threat without a test"
    assert set(ROWS[threat]) <= MARKED[threat]


def test_the_page_lists_every_route_with_its_roles() -> None:
    told = {
        (PORTS[int(row[0])], row[1], plain(row[2])): roles(row[3])
        for row in table(PAGE, "## Roles and routes")
    }
    assert told.keys() == set(ROUTES)
    for route, enough in told.items():
        for role in Role:
            assert (allowed(*route, role).value == 0) is bool(role & enough), route


def roles(cell: str) -> Role:
    return Role(sum(Role[name.strip().upper()] for name in cell.split(",")))
