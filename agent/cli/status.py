"""``pairmesh status``: this node, and the others as it sees them."""

import sys
from argparse import ArgumentParser, Namespace

from agent.admin.documents import StatusDoc
from agent.cli.daemon_client import DaemonClient
from agent.cli.exits import Exit
from agent.cli.nodes import status_text


def declare(parser: ArgumentParser) -> None:
    """Declare the arguments of ``pairmesh status``."""
    parser.description = (
        "Show the daemon of this host and every member it knows: state and its age, pressure level, engines,\n"
        "models in memory, requests in flight, learned speed of the fastest warm model, own link. A dash is\n"
        "unknown."
    )
    parser.add_argument("--json", action="store_true", help="print the document the daemon answers")


def run(args: Namespace) -> int:
    """Run ``pairmesh status``; return its exit status."""
    client = DaemonClient.here()
    if args.json:
        print(client.read("/v1/status").decode())
    else:
        sys.stdout.write(status_text(client.get("/v1/status", StatusDoc)))
    return Exit.OK
