"""``pairmesh``: one module per verb, loaded only when its verb is asked for."""

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
    "trust": "list, export, add and remove members",
}


class Verb(Protocol):
    """What the module of a verb offers."""

    def declare(self, parser: ArgumentParser) -> None:
        """Describe the verb and its arguments."""

    def run(self, args: Namespace) -> int:
        """Do it; an ``Exit``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    parser = _top()
    if not words or words[0].startswith("-") or words[0] not in VERBS:
        parser.parse_args(words)
        return Exit.USAGE
    verb = cast(Verb, import_module(f"agent.cli.{words[0]}"))
    own = ArgumentParser(prog=f"pairmesh {words[0]}", formatter_class=RawDescriptionHelpFormatter)
    verb.declare(own)
    return _guarded(verb, own.parse_args(words[1:]))


def _guarded(verb: Verb, args: Namespace) -> int:
    from agent.cli.daemon_client import Refused, Unreachable

    try:
        return verb.run(args)
    except Unreachable as exc:
        return _fail(str(exc), Exit.UNREACHABLE)
    except Refused as exc:
        return _fail(f"refused: {exc}", Exit.FAILED)


def _fail(message: str, code: Exit) -> int:
    print(f"pairmesh: {message}", file=sys.stderr)
    return code


def _top() -> ArgumentParser:
    listed = "\n".join(f"  {name:10}{what}" for name, what in VERBS.items())
    parser = ArgumentParser(
        prog="pairmesh",
        usage="pairmesh VERB ...",
        description="A leaderless mesh of LLM hosts behind one local address.",
        epilog=f"verbs ('pairmesh VERB --help' tells more):\n{listed}\n\n"
        "exit status: 0 done, 1 failed, 2 wrong usage, 69 no daemon answers, 78 unfit settings or folders",
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pairmesh {__version__}")
    parser.add_argument("verb", choices=VERBS, metavar="VERB", help="what to do")
    return parser
