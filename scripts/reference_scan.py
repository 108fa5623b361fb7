"""What the source says without being run: metrics, log events, refusals, headers, answers of verbs, places in the
state folder. Reads the syntax trees of ``agent`` and ``router_core``; imports neither.

What is told by a computed name is followed to the constants that it can be. A name that cannot be followed is a
``ScanFault``: better no list than one with a hole.
"""

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

SEVERITIES: Final = ("debug", "info", "warning", "error")
OPEN: Final = "..."
"""Stands for fields that the scan cannot name."""

_METRIC: Final = re.compile(r"pairmesh_[a-z_{}]+")
_EVENT: Final = re.compile(r"[a-z_]+(\.[a-z_]+)+")
_WORD: Final = re.compile(r"[a-z]+(_[a-z]+)*")
_CODE: Final = re.compile(r"[a-z]+(_[a-z]+)+")
_HEADER: Final = re.compile(r"\bx-(?:pairmesh|session)-[a-z][a-z-]*[a-z]")
_VARIABLE: Final = re.compile(r"(?:PAIRMESH|XDG|[A-Z]+(?=_DIRECTORY\b))_[A-Z_]+")
_STATE: Final = re.compile(r"\b(state|runtime)\b|^folder$")
_FILE: Final = re.compile(r"[a-z]+(\.[a-z]+)?")
_NO_EVENTS: Final = (".py", ".pem", ".sqlite", ".sock")

Function = ast.FunctionDef | ast.AsyncFunctionDef
_Node = TypeVar("_Node", bound=ast.AST)


class ScanFault(Exception):
    """A place in the source that the scan does not understand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One family as it is declared."""

    name: str
    shape: str
    labels: tuple[str, ...]
    help: str


@dataclass(slots=True, kw_only=True)
class Event:
    """One code of the log, with all levels and fields that any place gives it."""

    levels: set[str] = field(default_factory=set)
    fields: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One file. ``by_kind`` are its nodes, docstrings aside, ``owner`` is the innermost function around a node, ``given``
    what each name is given, by the function around it and, under None, in the whole module."""

    path: str
    by_kind: Mapping[type[ast.AST], list[Any]]
    owner: Mapping[ast.AST, Function]
    given: Mapping[tuple[Function | None, str], list[ast.expr]]

    def nodes(self, kind: type[_Node]) -> list[_Node]:
        return self.by_kind.get(kind, [])

    @property
    def calls(self) -> list[ast.Call]:
        return self.nodes(ast.Call)

    @property
    def texts(self) -> list[str]:
        return [text for node in self.nodes(ast.Constant) for text in _text(node)]


def modules(root: Path, packages: Iterable[str] = ("agent", "router_core")) -> tuple[Module, ...]:
    """Every module of the product below ``root``; the simulator is no part of it."""
    paths = sorted(path for package in packages for path in (root / package).rglob("*.py"))
    return tuple(
        _module(path, path.relative_to(root)) for path in paths if "sim" not in path.relative_to(root).parts
    )


def _module(path: Path, name: Path) -> Module:
    by_kind: dict[type[ast.AST], list[Any]] = {}
    owner: dict[ast.AST, Function] = {}
    given: dict[tuple[Function | None, str], list[ast.expr]] = {}
    waiting: list[tuple[ast.AST, Function | None]] = [(ast.parse(path.read_text()), None)]
    while waiting:
        node, function = waiting.pop()
        by_kind.setdefault(type(node), []).append(node)
        if function is not None:
            owner[node] = function
        for target, value in _given(node):
            for scope in {None, function}:
                given.setdefault((scope, target), []).append(value)
        inner = node if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
        waiting += ((child, inner) for child in ast.iter_child_nodes(node) if not _is_docstring(child))
    return Module(path=str(name), by_kind=by_kind, owner=owner, given=given)


def _is_docstring(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def texts(node: ast.AST) -> list[str]:
    """Every text below ``node``, bytes read as ASCII."""
    return [text for each in ast.walk(node) if isinstance(each, ast.Constant) for text in _text(each)]


def _text(node: ast.Constant) -> list[str]:
    match node.value:
        case str(text):
            return [text]
        case bytes(raw):
            return [raw.decode("ascii", "replace")]
        case _:
            return []


def name_of(call: ast.Call) -> str:
    """The last part of what is called."""
    match call.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
        case _:
            return ""


def assigned(module: Module, name: str, around: ast.AST) -> list[ast.expr]:
    """What ``name`` is given in the function around a node, else anywhere in the module."""
    here = module.given.get((module.owner.get(around), name))
    return here if here else module.given.get((None, name), [])


def _given(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield from ((each.id, value) for each in ast.walk(target) if isinstance(each, ast.Name))
        case (
            ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            | ast.AugAssign(target=ast.Name(id=name), value=value)
        ):
            yield name, value


def _is_parameter(module: Module, name: str, around: ast.AST) -> bool:
    function = module.owner.get(around)
    return function is not None and name in _parameters(function)


def _parameters(function: Function) -> list[str]:
    return [each.arg for each in (*function.args.posonlyargs, *function.args.args)]


def follow(
    module: Module, node: ast.expr, fits: re.Pattern[str], seen: frozenset[str] = frozenset()
) -> list[str]:
    """The texts that ``node`` can be: its own constants and those of the names in it."""
    found = [text for text in texts(node) if fits.fullmatch(text)]
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and each.id not in seen:
            for value in assigned(module, each.id, node if node in module.owner else each):
                found += follow(module, value, fits, seen | {each.id})
    return found


def template(node: ast.JoinedStr) -> str:
    """An f-string with ``{}`` for what is filled in."""
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)


def constant(module: Module, node: ast.expr | None) -> tuple[str, ...]:
    """A tuple of texts, written here or under a name of the module."""
    if isinstance(node, ast.Name):
        return next((constant(module, value) for value in assigned(module, node.id, node)), ())
    return tuple(texts(node)) if node is not None else ()


def metrics(code: Iterable[Module], expansions: Mapping[str, Mapping[str, str]]) -> list[Metric]:
    """Every family by name. ``expansions`` gives the names that a computed one stands for, each with its help."""
    found: dict[str, Metric] = {}
    for module in code:
        for call in module.calls:
            keywords = {word.arg: word.value for word in call.keywords}
            name = call.args[0] if call.args else keywords.get("name")
            told = template(name) if isinstance(name, ast.JoinedStr) else getattr(name, "value", None)
            if not isinstance(told, str) or not _METRIC.fullmatch(told) or len(call.args) + len(keywords) < 2:
                continue
            labels = constant(module, call.args[2] if len(call.args) > 2 else keywords.get("labels"))
            shape = name_of(call).lower().removesuffix("_family")
            for value in [*call.args, *keywords.values()]:
                if (
                    isinstance(value, ast.Attribute)
                    and isinstance(value.value, ast.Name)
                    and value.value.id == "Shape"
                ):
                    shape = value.attr.lower()
            text = call.args[1] if len(call.args) > 1 else keywords["help"]
            names: Mapping[str, str] = {told: " ".join(texts(text))}
            if isinstance(name, ast.JoinedStr):
                names = expansions.get(told) or _rows(module, call, name, text)
            if not names:
                raise ScanFault(f"{module.path}:{call.lineno}: nobody says what {told} can be")
            for each, said in names.items():
                found[each] = Metric(name=each, shape=shape, labels=labels, help=said)
    return [found[name] for name in sorted(found)]


def _rows(module: Module, call: ast.Call, name: ast.JoinedStr, text: ast.expr) -> dict[str, str]:
    """Names and helps of families that are made in a loop over a table of the module."""
    found: dict[str, str] = {}
    for loop in module.nodes(ast.For):
        match loop:
            case ast.For(target=ast.Tuple(elts=targets), iter=table) if call in ast.walk(loop):
                names = [target.id if isinstance(target, ast.Name) else "" for target in targets]
                tables = assigned(module, table.id, call) if isinstance(table, ast.Name) else [table]
                for row in (row for each in tables if isinstance(each, ast.Tuple) for row in each.elts):
                    if isinstance(row, ast.Tuple):
                        cells = dict(zip(names, row.elts, strict=True))
                        found[_filled(name, cells)] = _filled(text, cells)
    return found


def _filled(node: ast.expr, cells: Mapping[str, ast.expr]) -> str:
    """A text or f-string with the constants of ``cells`` for its names."""
    return "".join(
        str(cell.value)
        if isinstance(cell := cells.get(each.id, each) if isinstance(each, ast.Name) else each, ast.Constant)
        else ""
        for each in ast.walk(node)
        if isinstance(each, ast.Constant | ast.Name)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forwarder:
    """A function that logs what it is given: the place of the event among its arguments, its level and own fields."""

    index: int
    levels: frozenset[str]
    fields: frozenset[str]


def events(
    code: Iterable[Module], expansions: Mapping[str, Iterable[str]], alarms: tuple[str, str]
) -> dict[str, Event]:
    """Every event of the log. ``expansions`` gives what a computed event stands for; ``alarms`` are the name of an enum
    and the head of the events that its members are told as."""
    code = tuple(code)
    found: dict[str, Event] = {}
    forwarders: dict[str, _Forwarder] = {}

    def tell(names: Iterable[str], levels: Iterable[str], fields: Iterable[str]) -> None:
        for name in names:
            event = found.setdefault(name, Event())
            event.levels.update(levels)
            event.fields.update(fields)

    for module in code:
        for call in module.calls:
            if (logged := _logged(module, call)) is None:
                continue
            levels, event, more = logged
            fields = _fields(module, call, more)
            if isinstance(event, ast.JoinedStr):
                told = template(event)
                if told not in expansions:
                    raise ScanFault(f"{module.path}:{call.lineno}: nobody says what {told} can be")
                tell(expansions[told], levels, fields - {OPEN})
            elif isinstance(event, ast.Name) and _is_parameter(module, event.id, call):
                function = module.owner[call]
                index = _parameters(function).index(event.id)
                is_method = _parameters(function)[0] == "self"
                forwarders[function.name] = _Forwarder(
                    index=index - is_method, levels=frozenset(levels), fields=frozenset(fields - {OPEN})
                )
            else:
                names = _events_of(module, event)
                if not names:
                    raise ScanFault(f"{module.path}:{call.lineno}: which event is {ast.unparse(event)}?")
                tell(names, levels, fields)
    for module in code:
        for call in module.calls:
            args, name = call.args, name_of(call)
            if name == "partial" and args and isinstance(args[0], ast.Name):
                name, args = args[0].id, args[1:]
            if (passed := forwarders.get(name)) is None or len(args) <= passed.index:
                continue
            event = args[passed.index]
            direct = _events_of(module, event) if isinstance(event, ast.Constant | ast.IfExp) else []
            tell(direct, passed.levels, passed.fields | _fields(module, call, None))
        for pair in module.nodes(ast.Tuple):
            match pair:
                case ast.Tuple(
                    elts=[
                        ast.Attribute(value=ast.Name(id="Severity"), attr=level),
                        ast.Constant(value=str(text)),
                    ]
                ):
                    tell([text], [level.lower()], ())
        enum, head = alarms
        for call in module.calls:
            match call.args:
                case [ast.Attribute(value=ast.Name(id=kind), attr=member), *_] if kind == enum:
                    tell([f"{head}.{member.lower()}"], (), _fields(module, call, None))
    return found


def _logged(module: Module, call: ast.Call) -> tuple[list[str], ast.expr, ast.expr | None] | None:
    """Levels, event and further fields of a call that logs, None for any other."""
    for place, arg in enumerate(call.args[:-1]):
        match arg:
            case ast.Attribute(value=ast.Name(id="Severity"), attr=level):
                more = call.args[place + 2] if len(call.args) > place + 2 else None
                return [level.lower()], call.args[place + 1], more
    match call.func:
        case ast.Attribute(value=owner, attr="event") if _is_log(owner) and len(call.args) == 3:
            return [], call.args[1], call.args[2]
        case ast.Attribute(value=owner, attr=level) if level in SEVERITIES and _is_log(owner) and call.args:
            return [level], call.args[0], None
        case ast.IfExp() if call.args and (levels := _levels(call.func)):
            return levels, call.args[0], None
        case ast.Name(id=name) if call.args:
            levels = [level for value in assigned(module, name, call) for level in _levels(value)]
            return (levels, call.args[0], None) if levels else None
        case _:
            return None


def _is_log(owner: ast.expr) -> bool:
    return ast.unparse(owner).lower().endswith("log")


def _levels(node: ast.expr) -> list[str]:
    return [
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute) and each.attr in SEVERITIES and _is_log(each.value)
    ]


def _events_of(module: Module, event: ast.expr) -> list[str]:
    if isinstance(event, ast.Constant):
        return (
            [str(event.value)]
            if _WORD.fullmatch(str(event.value)) or _EVENT.fullmatch(str(event.value))
            else []
        )
    if isinstance(event, ast.IfExp):
        return [*_events_of(module, event.body), *_events_of(module, event.orelse)]
    return [text for text in follow(module, event, _EVENT) if not text.endswith(_NO_EVENTS)]


def _fields(module: Module, call: ast.Call, more: ast.expr | None) -> set[str]:
    """The names of the keyword arguments of ``call``, and of the mappings that it spreads."""
    found = {word.arg for word in call.keywords if word.arg is not None}
    for spread in [word.value for word in call.keywords if word.arg is None] + ([more] if more else []):
        found |= _keys(module, spread, call) or {OPEN}
    return {f"{name}_" if name in ("at", "level", "event") else name for name in found}


def _keys(module: Module, node: ast.expr, call: ast.Call, seen: frozenset[str] = frozenset()) -> set[str]:
    """The keys of a mapping that is written in this function, or in another of the module under the same name."""
    found: set[str] = set()
    function = module.owner.get(call)
    spread = None if function is None or function.args.kwarg is None else function.args.kwarg.arg
    for each in ast.walk(node):
        if isinstance(each, ast.Dict):
            found |= {str(key.value) for key in each.keys if isinstance(key, ast.Constant)}
        elif isinstance(each, ast.Name) and each.id not in seen | {spread}:
            values = assigned(module, each.id, call)
            if _is_parameter(module, each.id, call):
                values = values + module.given.get((None, each.id), [])
            for value in values:
                found |= _keys(module, value, call, seen | {each.id})
    return {name for name in found if _WORD.fullmatch(name)}


def raised(code: Iterable[Module], kind: str) -> list[str]:
    """The codes with which errors of the class ``kind`` are made."""
    code = tuple(code)
    found: set[str] = set()
    forwarders: dict[str, int] = {}
    for module in code:
        for call in module.calls:
            if name_of(call) != kind or not call.args:
                continue
            first = call.args[0]
            if isinstance(first, ast.Name) and _is_parameter(module, first.id, call):
                function = module.owner[call]
                forwarders[function.name] = _parameters(function).index(first.id)
            else:
                found.update(follow(module, first, _CODE))
    for module in code:
        for call in module.calls:
            place = forwarders.get(name_of(call))
            if place is not None and len(call.args) > place:
                found.update(follow(module, call.args[place], _CODE))
    return sorted(found)


def headers(code: Iterable[Module]) -> list[str]:
    """Headers of our own that are written out anywhere."""
    return sorted({hit for module in code for text in module.texts for hit in _HEADER.findall(text)})


def variables(code: Iterable[Module]) -> list[str]:
    """Variables of the environment."""
    return sorted({text for module in code for text in module.texts if _VARIABLE.fullmatch(text)})


def traces(code: Iterable[Module]) -> dict[str, set[str]]:
    """The lines of a trace file: kind, and its fields."""
    found: dict[str, set[str]] = {}
    for module in code:
        for call in module.calls:
            match call:
                case ast.Call(func=ast.Attribute(attr="write"), args=[ast.Constant(value=str(kind))]) if (
                    _WORD.fullmatch(kind)
                ):
                    found.setdefault(kind, set()).update(_fields(module, call, None))
    return found


def returned(function: ast.AST) -> Iterator[ast.Dict]:
    """The mappings that ``function`` returns."""
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Dict):
            yield node.value


def spelled(node: ast.Dict) -> list[str]:
    """The keys of a mapping, dotted where one holds another; ``{}`` and ``[]`` stand for free keys and positions."""
    found = []
    for key, value in zip(node.keys, node.values, strict=True):
        if isinstance(key, ast.Constant):
            name = str(key.value)
            found += [name, *(f"{name}{rest}" for rest in _inside(value))]
    return found


def _inside(value: ast.expr) -> list[str]:
    match value:
        case ast.Dict():
            return [f".{rest}" for rest in spelled(value)]
        case ast.DictComp(value=ast.Dict() as inner):
            return [f".{{}}.{rest}" for rest in spelled(inner)]
        case ast.ListComp(elt=ast.Dict() as inner):
            return [f"[].{rest}" for rest in spelled(inner)]
        case _:
            return []


def verbs(code: Iterable[Module], known: Callable[[str], bool]) -> dict[str, list[str]]:
    """Verbs of the admin socket with the keys of their answers as far as these are written out. A verb is an entry of a
    mapping that a function returns, with a function inside it as value, and a name that is ``known``."""
    found: dict[str, list[str]] = {}
    for module in code:
        for outer in [*module.nodes(ast.FunctionDef), *module.nodes(ast.AsyncFunctionDef)]:
            inner = {each.name: each for each in ast.walk(outer) if isinstance(each, ast.AsyncFunctionDef)}
            for table in returned(outer):
                for key, value in zip(table.keys, table.values, strict=True):
                    match key, value:
                        case ast.Constant(value=str(verb)), ast.Name(id=name) if name in inner and known(
                            verb
                        ):
                            answers = [word for each in returned(inner[name]) for word in spelled(each)]
                            found[verb] = answers
    return found


def state_places(code: Iterable[Module]) -> list[str]:
    """Names that are joined to the folder that keeps the state, or to one below it."""
    found: set[str] = set()
    for module in code:
        for node in module.nodes(ast.BinOp):
            match node:
                case ast.BinOp(left=left, op=ast.Div(), right=right) if _STATE.search(ast.unparse(left)):
                    found.update(follow(module, right, _FILE))
    return sorted(found)
