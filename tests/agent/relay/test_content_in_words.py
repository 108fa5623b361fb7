"""No sentence of the relay, be it a log line or an error, is made of what a client or an engine sent."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

RELAY = Path(__file__).resolve().parents[3] / "agent" / "relay"
CONTENT = frozenset({"body", "chunk", "head", "text", "prompt", "payload"})
SPEAKING = frozenset(
    {"debug", "info", "warning", "error", "exception", "critical", "event", "log", "warn", "print"}
)
SPELLING = frozenset({"str", "repr", "ascii", "format"})
LOGS = frozenset({"log", "_log", "logger", "logging", "warnings"})


def spoken(tree: ast.AST) -> Iterator[ast.expr]:
    """Expressions that become words: in f-strings, in ``%`` and ``format`` of text, spelled out, logged or raised."""
    for node in ast.walk(tree):
        match node:
            case ast.FormattedValue(value=value):
                yield value
            case ast.BinOp(left=ast.Constant(value=str()), op=ast.Mod(), right=right):
                yield right
            case ast.Raise(exc=ast.Call(args=args, keywords=keywords)):
                yield from (*args, *(keyword.value for keyword in keywords))
            case ast.Call(func=func, args=args, keywords=keywords) if speaks(func):
                yield from (*args, *(keyword.value for keyword in keywords))


def speaks(func: ast.expr) -> bool:
    match func:
        case ast.Name(id=name):
            return name in SPELLING or name == "print"
        case ast.Attribute(value=ast.Constant(value=str()), attr="format"):
            return True
        case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=name):
            return owner in LOGS and name in SPEAKING
    return False


def content(expression: ast.AST) -> Iterator[str]:
    """Names of content in ``expression``; how long it is may be told."""
    match expression:
        case ast.Call(func=ast.Name(id="len")):
            return
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in CONTENT:
            yield name
    for part in ast.iter_child_nodes(expression):
        yield from content(part)


def faults(source: str) -> list[str]:
    return [name for expression in spoken(ast.parse(source)) for name in content(expression)]


@pytest.mark.threat("T37")
@pytest.mark.parametrize("path", sorted(RELAY.rglob("*.py")), ids=lambda path: path.stem)
def test_the_relay_says_nothing_of_what_passes_through_it(path: Path) -> None:
    assert faults(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "f'cannot read {body!r}'",
        "'cannot read %s' % chunk",
        "'cannot read {}'.format(self.head)",
        "log.debug('read', text=attempt.text)",
        "self._log.warning(payload.decode())",
        "raise ValueError(prompt)",
        "raise RemoteFault(reason=request.body[:9].hex())",
        "str(head)",
        "print(body)",
    ],
)
def test_the_check_notices(source: str) -> None:
    assert faults(source)


@pytest.mark.parametrize(
    "source",
    [
        "f'{len(body)} bytes'",
        "log.debug('read', size=len(self.head))",
        "send(body)",
        "b'%s' % head",
        "raise Surplus",
    ],
)
def test_the_check_lets_pass(source: str) -> None:
    assert faults(source) == []
