"""Counts what the tree is made of, from its source alone.

The product is agent and router_core without router_core/sim, tests are tests and the simulator is counted apart. A
class takes part in a Protocol if it has all its members; a class that derives from a Protocol counts as well.
"""

import argparse
import ast
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
PRODUCT: Final = ("agent", "router_core")
SIMULATOR: Final = ROOT / "router_core" / "sim"
HOT_LOOP: Final = "hot loop"
"""Words in the docstring of a module that builds its structs by position."""
POSITIONS: Final = 4
ATTRIBUTES: Final = 20
_FEWEST: Final = 2

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One source file, parsed."""

    path: Path
    lines: int
    tree: ast.Module

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def is_simulator(self) -> bool:
        return self.path.is_relative_to(SIMULATOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number with what it counts, where that has names."""

    name: str
    value: int | float
    found: tuple[str, ...] = ()


def modules(folder: str) -> list[Module]:
    """The Python files below ``folder`` that git knows."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--", f"{folder}/*.py", f"{folder}/**/*.py"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout
    paths = [ROOT / name for name in listing.decode().split("\0") if name]
    return [read(path) for path in paths if path.is_file()]


def read(path: Path) -> Module:
    text = path.read_text()
    return Module(path=path, lines=text.count("\n"), tree=ast.parse(text))


def classes(module: Module) -> Iterator[ast.ClassDef]:
    """Those at module level."""
    return (node for node in module.tree.body if isinstance(node, ast.ClassDef))


def methods(node: ast.ClassDef) -> Iterator[Function]:
    return (each for each in node.body if isinstance(each, Function))


def bases(node: ast.ClassDef) -> set[str]:
    """The last words of the names of a class's bases; those of asyncio, whose Protocol is none of typing's, are left out."""
    found = set()
    for base in node.bases:
        named = base.value if isinstance(base, ast.Subscript) else base
        if not ast.unparse(named).startswith("asyncio."):
            found.add(named.attr if isinstance(named, ast.Attribute) else getattr(named, "id", ""))
    return found


# --- figures ---------------------------------------------------------------------------------------------------


def undocumented(of: Iterable[Module]) -> list[str]:
    """Public classes and functions at module level without a docstring."""
    return [
        f"{module.name}:{node.lineno} {node.name}"
        for module in of
        for node in module.tree.body
        if isinstance(node, ast.ClassDef | Function)
        and not node.name.startswith("_")
        and ast.get_docstring(node) is None
    ]


def shared_names(of: Iterable[Module]) -> list[str]:
    """Public class names that stand for more than one class."""
    places: dict[str, list[str]] = {}
    for module in of:
        for node in classes(module):
            if not node.name.startswith("_"):
                places.setdefault(node.name, []).append(module.name)
    return [f"{name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1]


def structs(of: Iterable[Module]) -> set[str]:
    """Names of the classes that derive from ``Struct``, or from one that does."""
    above = {node.name: bases(node) for module in of for node in classes(module)}
    found = {"Struct"}
    while more := {name for name, parents in above.items() if parents & found} - found:
        found |= more
    return found - {"Struct"}


def built_by_position(of: list[Module]) -> list[str]:
    """Calls of structs with more than four arguments by position, outside modules that say they are a hot loop."""
    known = structs(of)
    found = []
    for module in of:
        if HOT_LOOP in (ast.get_docstring(module.tree) or "").lower():
            continue
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and len(node.args) > POSITIONS:
                called = (
                    node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                )
                if called in known:
                    found.append(f"{module.name}:{node.lineno} {called} ({len(node.args)})")
    return found


def assigned(node: ast.ClassDef) -> set[str]:
    """Attributes of ``self`` that methods of a class assign."""
    found = set()
    for method in methods(node):
        if not method.args.args:
            continue
        me = method.args.args[0].arg
        found |= {
            each.attr
            for each in ast.walk(method)
            if isinstance(each, ast.Attribute)
            and isinstance(each.ctx, ast.Store)
            and isinstance(each.value, ast.Name)
            and each.value.id == me
        }
    return found


def large(of: Iterable[Module]) -> list[str]:
    """Classes that assign more than twenty attributes of ``self``."""
    sizes = [
        (len(assigned(node)), f"{module.name}:{node.lineno} {node.name}")
        for module in of
        for node in classes(module)
    ]
    return [f"{where} ({size})" for size, where in sorted(sizes, reverse=True) if size > ATTRIBUTES]


def protocols(of: Iterable[Module]) -> dict[str, set[str]]:
    """The members of each Protocol that has any, by where it is."""
    return {
        f"{module.name}:{node.lineno} {node.name}": members(node)
        for module in of
        for node in classes(module)
        if "Protocol" in bases(node)
    }


def members(node: ast.ClassDef) -> set[str]:
    """Methods, properties and attributes that a class declares or assigns; of private ones only ``__call__``."""
    told = {each.name for each in methods(node)} | assigned(node)
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            told.add(each.target.id)
        elif isinstance(each, ast.Assign):
            told |= {target.id for target in each.targets if isinstance(target, ast.Name)}
    return {name for name in told if not name.startswith("_") or name == "__call__"}


def rarely_met(of: list[Module]) -> list[str]:
    """Protocols that fewer than two classes of the product satisfy, as far as names of members tell. Whatever is called
    as a function is met by functions, and left out."""
    implementers: list[tuple[set[str], set[str]]] = []
    inherited = {node.name: members(node) for module in of for node in classes(module)}
    for module in of:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and "Protocol" not in bases(node):
                above = set().union(*(inherited.get(base, set()) for base in bases(node)))
                implementers.append((members(node) | above, bases(node)))
    found = []
    for where, wanted in protocols(of).items():
        if "__call__" in wanted:
            continue
        name = where.rpartition(" ")[2]
        count = sum(name in parents or (bool(wanted) and wanted <= has) for has, parents in implementers)
        if count < _FEWEST:
            found.append(f"{where} ({count})")
    return found


def policy_keys() -> list[str]:
    """Every number and switch of the policies, nested ones by their path."""
    from router_core.policy.placement import PlacementPolicy

    def of(policy: Any, path: str) -> Iterator[str]:
        for each in fields_of(policy):
            if not each.init:
                continue
            value, at = getattr(policy, each.name), f"{path}{each.name}"
            if hasattr(value, "__dataclass_fields__"):
                yield from of(value, f"{at}.")
            else:
                yield at

    return list(of(PlacementPolicy(), ""))


def settable_policy_keys() -> list[str]:
    """Keys that ``policy.toml`` takes."""
    from agent.settings.policy_schema import POLICY_SCHEMA

    return [key.path for key in POLICY_SCHEMA.keys]


def figures() -> list[Figure]:
    everything = [module for folder in PRODUCT for module in modules(folder)]
    product = [module for module in everything if not module.is_simulator]
    simulator = [module for module in everything if module.is_simulator]
    tests, scripts = modules("tests"), modules("scripts")
    filled = sorted((module for module in product if module.lines), key=lambda module: module.lines)
    all_protocols = protocols(product)
    lists = {
        "public names without docstring": undocumented(product),
        "public class names used more than once": shared_names(product),
        f"structs built with more than {POSITIONS} arguments by position": built_by_position(product),
        f"classes that assign more than {ATTRIBUTES} attributes": large(product),
        "Protocols": list(all_protocols),
        "Protocols met by fewer than two classes": rarely_met(product),
        "numbers of the placement policy": policy_keys(),
        "keys of policy.toml": settable_policy_keys(),
    }
    return [
        Figure(name="modules of the product", value=len(product)),
        Figure(name="lines of the product", value=sum(module.lines for module in product)),
        Figure(name="lines of the simulator", value=sum(module.lines for module in simulator)),
        Figure(name="modules of tests", value=len(tests)),
        Figure(name="lines of tests", value=sum(module.lines for module in tests)),
        Figure(name="lines of scripts", value=sum(module.lines for module in scripts)),
        Figure(name="median lines of a module", value=statistics.median(module.lines for module in filled)),
        Figure(
            name="lines of the largest module",
            value=filled[-1].lines,
            found=tuple(f"{module.name} ({module.lines})" for module in filled[:-11:-1]),
        ),
        *[Figure(name=name, value=len(found), found=tuple(found)) for name, found in lists.items()],
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/census", description=__doc__)
    parser.add_argument("--names", action="store_true", help="and what each figure counts, by name")
    parser.add_argument("--json", action="store_true", help="one object a line: name, value")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    for figure in figures():
        if args.json:
            print(json.dumps({"name": figure.name, "value": figure.value}))
            continue
        print(f"{figure.value:>8}  {figure.name}")
        if args.names:
            for each in figure.found:
                print(f"{'':10}{each}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
