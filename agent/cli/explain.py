"""``pairmesh explain``: why a request went where it went, and where one would go."""

import sys
from argparse import ArgumentParser, Namespace
from urllib.parse import quote

import msgspec
from msgspec import Struct

from agent.cli import explain_facts
from agent.cli.daemon_client import DaemonClient, Refused
from agent.cli.exits import Exit
from agent.cli.explanation import explain, explain_again, explain_dry
from router_core.placement.record import DecisionRecord


class _Recent(Struct):
    decisions: tuple[DecisionRecord, ...]


class _Replayed(Struct):
    same: bool
    was: str | None
    record: DecisionRecord


def declare(parser: ArgumentParser) -> None:
    parser.description = (
        "Say in words why one request went where it went: what was chosen and expected, how all that could\n"
        "serve were weighed, who was left out and why, and how it went. Decisions are kept for seven days on\n"
        "the node that made them. With --model, say where a request would go now; nothing is sent anywhere."
    )
    parser.add_argument(
        "id",
        nargs="?",
        metavar="ID",
        help="the x-pairmesh-decision-id of a reply; without it the newest decision",
    )
    parser.add_argument(
        "--replay",
        action="store_true",
        help="choose again from what the decision stood on, by the policy in force",
    )
    parser.add_argument("--json", action="store_true", help="print the document itself")
    explain_facts.declare(parser)


def run(args: Namespace) -> int:
    try:
        facts = explain_facts.facts_of(args)
    except ValueError as fault:
        return _wrong(str(fault))
    if facts and "model" not in facts:
        return _wrong("what a request is like is of use with --model only")
    if facts and (args.id is not None or args.replay):
        return _wrong(
            "a decision that was made stands on its own request: no ID and no --replay with --model"
        )
    client = DaemonClient.here()
    if facts:
        supposed = client.ask("/v1/explain", facts, DecisionRecord)
        return _print(args, supposed, explain_dry(supposed))
    stored = _find(client, args.id)
    if stored is None:
        said = (
            "no decision yet"
            if args.id is None
            else "no such decision here: it may be another node's, or too old"
        )
        print(f"pairmesh: {said}", file=sys.stderr)
        return Exit.FAILED
    if not args.replay:
        return _print(args, stored, explain(stored))
    again = client.ask("/v1/replay", {"id": stored.id}, _Replayed)
    return _print(args, again, explain_again(stored, again.record))


def _print(args: Namespace, document: Struct, text: str) -> int:
    sys.stdout.write(f"{msgspec.json.encode(document).decode()}\n" if args.json else text)
    return Exit.OK


def _wrong(usage: str) -> int:
    print(f"pairmesh explain: {usage}", file=sys.stderr)
    return Exit.USAGE


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
