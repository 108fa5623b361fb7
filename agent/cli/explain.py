"""``pairmesh explain``: why a request went where it went, and where one would go."""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from msgspec import Struct

from agent.cli import explain_facts
from agent.cli.config import report
from agent.cli.daemon_client import DaemonClient, Refused
from agent.cli.exits import Exit
from agent.cli.explanation import explain, explain_again, explain_dry
from agent.settings.policy import PolicyRead, parse_policy
from router_core.placement.record import DecisionRecord


class _Recent(Struct):
    decisions: tuple[DecisionRecord, ...]


class _Replayed(Struct):
    same: bool
    was: str | None
    record: DecisionRecord


def declare(parser: ArgumentParser) -> None:
    """Declare the arguments of ``pairmesh explain``."""
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
        help="choose again from what the decision stood on, by the policy in force; where more than 16 rows could "
        "have served, one decision in 16 is kept with all that takes",
    )
    parser.add_argument(
        "--policy",
        type=Path,
        metavar="FILE",
        help="choose again by the policy in FILE, written as policy.toml is",
    )
    parser.add_argument("--json", action="store_true", help="print the document itself")
    explain_facts.declare(parser)


def run(args: Namespace) -> int:
    """Run ``pairmesh explain``; return its exit status."""
    try:
        facts = explain_facts.facts_of(args)
    except ValueError as fault:
        return _wrong(str(fault))
    if facts:
        return _suppose(args, facts)
    question: dict[str, str] = {}
    if args.policy is not None:
        text = _policy_text(args.policy)
        if isinstance(text, int):
            return text
        question["policy"] = text
    client = DaemonClient.here()
    stored = _find(client, args.id)
    if stored is None:
        return _failed(
            "no decision yet"
            if args.id is None
            else "no such decision here: it may be another node's, or too old"
        )
    if not args.replay and args.policy is None:
        return _print(args, stored, explain(stored))
    again = client.ask("/v1/replay", question | {"id": stored.id}, _Replayed)
    return _print(args, again, explain_again(stored, again.record))


def _suppose(args: Namespace, facts: dict[str, Any]) -> int:
    if "model" not in facts:
        return _wrong("what a request is like is of use with --model only")
    if args.id is not None or args.replay or args.policy is not None:
        return _wrong("a decision that was made stands on its own request: --model is of no use with it")
    supposed = DaemonClient.here().ask("/v1/explain", facts, DecisionRecord)
    return _print(args, supposed, explain_dry(supposed))


def _policy_text(path: Path) -> str | int:
    """The text of a policy file, or the exit status if it is not fit to be asked about."""
    try:
        text = path.read_bytes()
    except OSError as fault:
        return _failed(f"cannot read {path}: {fault.strerror}")
    read = parse_policy(text, path.name)
    return text.decode() if isinstance(read, PolicyRead) else report(map(str, read))


def _print(args: Namespace, document: Struct, text: str) -> int:
    sys.stdout.write(f"{msgspec.json.encode(document).decode()}\n" if args.json else text)
    return Exit.OK


def _wrong(usage: str) -> int:
    print(f"pairmesh explain: {usage}", file=sys.stderr)
    return Exit.USAGE


def _failed(said: str) -> int:
    print(f"pairmesh: {said}", file=sys.stderr)
    return Exit.FAILED


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
