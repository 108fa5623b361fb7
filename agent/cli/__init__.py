"""``pairmesh``: one module per verb, loaded only when its verb is asked for."""

import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Final, Protocol, cast

from agent import __version__
from agent.cli.exits import Exit

VERBS: Final[Mapping[str, str]] = {
    "run": "run the daemon in the foreground",
    "status": "show this node and the others as it sees them",
    "explain": "say why a request went where it went",
    "doctor": "check folders, settings, ports, engines and members",
    "config": "show or check the settings",
    "drain": "have an endpoint, or this node, take no new requests",
    "trust": "list, export, add and remove members",
}


class Verb(Protocol):
    """What the module of a verb offers."""

    def declare(self, parser: ArgumentParser) -> None:
        """Describe the verb and its arguments."""

    def run(self, args: Namespace) -> int:
        """Do it; an ``Exit``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the exit status. Wrong usage and ``--help`` raise ``SystemExit``."""
    _hold_standard_streams()
    words = sys.argv[1:] if argv is None else list(argv)
    args = parser(words[0] if words else "").parse_args(words)
    try:
        code = _guarded(_module(args.verb), args)
        sys.stdout.flush()
    except BrokenPipeError:
        _say_no_more()
        return Exit.FAILED
    return code


def parser(asked: str | None = None) -> ArgumentParser:
    """The whole command line; with ``asked``, the arguments of that verb alone, so that no other is loaded."""
    made = ArgumentParser(
        prog="pairmesh",
        description="A leaderless mesh of LLM hosts behind one local address.",
        epilog="exit status: 0 done, 1 failed, 2 wrong usage, 69 no daemon answers, 78 invalid settings or folders",
    )
    made.add_argument("--version", action="version", version=f"pairmesh {__version__}")
    verbs = made.add_subparsers(dest="verb", required=True, metavar="VERB", title="verbs")
    for name, what in VERBS.items():
        verb = verbs.add_parser(name, help=what, formatter_class=RawDescriptionHelpFormatter)
        if asked in (None, name):
            _module(name).declare(verb)
    return made


def _module(verb: str) -> Verb:
    return cast(Verb, import_module(f"agent.cli.{verb}"))


def _guarded(verb: Verb, args: Namespace) -> int:
    from agent.cli.daemon_client import Refused, Unreachable

    try:
        return verb.run(args)
    except Unreachable as exc:
        return _fail(str(exc), Exit.UNREACHABLE)
    except Refused as exc:
        return _fail(f"refused: {exc}", Exit.FAILED)


def _hold_standard_streams() -> None:
    """Give those that whoever started this has closed to nobody: their numbers would go to the next files that are opened,
    which whoever prints would write into, and which libuv aborts the process for."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def _say_no_more() -> None:
    """Whoever read what is printed has left: what is left of it goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _fail(message: str, code: Exit) -> int:
    print(f"pairmesh: {message}", file=sys.stderr)
    return code
