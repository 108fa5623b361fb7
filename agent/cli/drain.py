"""``pairmesh drain``: an endpoint of this node, or the whole node, takes nothing new."""

import json
from argparse import ArgumentParser, Namespace

import msgspec

from agent.admin.documents import DrainDoc
from agent.cli.columns import count, printable
from agent.cli.daemon_client import DaemonClient
from agent.cli.exits import Exit


def declare(parser: ArgumentParser) -> None:
    """Declare the arguments of ``pairmesh drain``."""
    parser.description = (
        "Have an endpoint of this node, or all of them, take no new requests; the other nodes know at once.\n"
        "What is under way goes on for at most 300 s. This node still places requests on others. --undo takes\n"
        "it back, without ENDPOINT for everything; so does a new start of the daemon."
    )
    parser.add_argument("endpoint", nargs="?", metavar="ENDPOINT", help="without it the whole node")
    parser.add_argument("--undo", action="store_true", help="take requests again")
    parser.add_argument("--json", action="store_true", help="print the daemon's answer as JSON")


def run(args: Namespace) -> int:
    """Run ``pairmesh drain``; return its exit status."""
    answer = DaemonClient.here().do("drain", endpoint=args.endpoint, undo=args.undo)
    if args.json:
        print(json.dumps(answer))
    else:
        print(printable(said(msgspec.convert(answer, DrainDoc))))
    return Exit.OK


def said(drain: DrainDoc) -> str:
    """One line about it."""
    who = drain.endpoint or "this node"
    under_way = count(drain.in_flight, "request")
    match drain.stage:
        case "draining":
            return f"{who} drains: {under_way} under way"
        case "drained":
            return f"{who} is drained"
        case _:
            return f"{who} takes requests"
