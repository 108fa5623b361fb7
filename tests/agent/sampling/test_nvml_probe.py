"""The program that runs beside the daemon stands alone."""

import ast
import sys

from agent.sampling.nvml import PROBE


def test_it_imports_the_standard_library_and_nothing_of_ours() -> None:
    tree = ast.parse(PROBE.read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names
