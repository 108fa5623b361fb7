"""``pairmesh explain``: why a request went where it went."""

import sys
from argparse import ArgumentParser, Namespace
from urllib.parse import quote

import msgspec
from msgspec import Struct

from agent.cli.daemon_client import DaemonClient, Refused
from agent.cli.exits import Exit
from agent.cli.explanation import explain
from router_core.placement.record import DecisionRecord


class _Recent(Struct):
    decisions: tuple[DecisionRecord, ...]


def declare(parser: ArgumentParser) -> None:
    parser.description = (
        "Say in words why one request went where it went: what was chosen and expected, what was nearly\n"
        "chosen, who was left out and why, and how it went. Decisions are kept for seven days on the node\n"
        "that made them."
    )
    parser.add_argument(
        "id",
        nargs="?",
        metavar="ID",
        help="the x-pairmesh-decision-id of a reply; without it the newest decision",
    )
    parser.add_argument("--json", action="store_true", help="print the record itself")


def run(args: Namespace) -> int:
    record = _find(DaemonClient.here(), args.id)
    if record is None:
        said = (
            "no decision yet"
            if args.id is None
            else "no such decision here: it may be another node's, or too old"
        )
        print(f"pairmesh: {said}", file=sys.stderr)
        return Exit.FAILED
    if args.json:
        print(msgspec.json.encode(record).decode())
    else:
        sys.stdout.write(explain(record))
    return Exit.OK


def _find(client: DaemonClient, decision_id: str | None) -> DecisionRecord | None:
    if decision_id is None:
        recent = client.get("/v1/decisions?limit=1", _Recent).decisions
        return recent[0] if recent else None
    try:
        return client.get(f"/v1/decisions/{quote(decision_id, safe='')}", DecisionRecord)
    except Refused as refusal:
        if refusal.status in (400, 404):
            return None
        raise
