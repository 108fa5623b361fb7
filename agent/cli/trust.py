"""``pairmesh trust``: who may speak to this node."""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from agent.admin.documents import RosterDoc
from agent.cli.columns import columns, printable
from agent.cli.daemon_client import DaemonClient
from agent.cli.exits import Exit
from router_core.record.state import Role

MOST: Final = 64 * 1024


class _Listed(Struct):
    own: str
    name: str
    mesh: str
    members: tuple[RosterDoc, ...]


def declare(parser: ArgumentParser) -> None:
    """Declare the arguments of ``pairmesh trust`` and its subcommands."""
    parser.description = "List, export, add and remove members. Pairing lets a node read what it serves."
    acts = parser.add_subparsers(title="what to do", required=True, metavar="WHAT")
    listed = acts.add_parser("list", help="every member ever added, removed ones included")
    listed.set_defaults(act=_list)
    exported = acts.add_parser(
        "export", help="print this node's member file; it holds nothing secret and proves nothing by itself"
    )
    exported.set_defaults(act=_export)
    added = acts.add_parser(
        "add", help="admit the node whose member file this is; do the same on the other side"
    )
    added.add_argument("file", metavar="FILE", help="the other node's member file; - reads standard input")
    added.add_argument(
        "--id", required=True, metavar="NODE_ID", help="the other node's whole id, learned by another way"
    )
    added.add_argument(
        "--role",
        action="append",
        default=[],
        choices=[str(role.name).lower() for role in Role],
        help="what it may do, may be repeated; without it node, router and introducer",
    )
    added.set_defaults(act=_add)
    removed = acts.add_parser("remove", help="remove a member on this node and cut its connections")
    removed.add_argument("ref", metavar="ID", help="its id, at least 8 characters of it, @NAME or @NAME~XXXX")
    removed.set_defaults(act=_remove)
    for verb in (listed, exported, added, removed):
        verb.add_argument("--json", action="store_true", help="print the daemon's answer as JSON")


def run(args: Namespace) -> int:
    """Run the chosen subcommand of ``pairmesh trust``; return its exit status."""
    code: int = args.act(DaemonClient.here(), args)
    return code


def _list(client: DaemonClient, args: Namespace) -> int:
    answer = client.do("trust-list")
    if args.json:
        return _print(answer)
    listed = msgspec.convert(answer, _Listed)
    print(f"{printable(listed.name)} {listed.own} (this node), mesh {listed.mesh}")
    rows = [
        (m.name, m.id, "removed" if m.removed else "member", ", ".join(m.roles), str(m.admission))
        for m in listed.members
    ]
    if rows:
        print("\n".join(columns([("NAME", "ID", "STATE", "ROLES", "ADMISSION"), *rows])))
    else:
        print("no other members: 'pairmesh trust export' here, 'pairmesh trust add' there, and the reverse")
    return Exit.OK


def _export(client: DaemonClient, args: Namespace) -> int:
    answer = client.do("trust-export")
    if args.json:
        return _print(answer)
    sys.stdout.write(answer["file"])
    print(f"on the other node: pairmesh trust add FILE --id {answer['id']}", file=sys.stderr)
    return Exit.OK


def _add(client: DaemonClient, args: Namespace) -> int:
    content = _content(args.file)
    if content is None:
        print(f"pairmesh: cannot read {args.file} as a member file", file=sys.stderr)
        return Exit.FAILED
    answer = client.do("trust-add", file=content, id=args.id, roles=args.role)
    if args.json:
        return _print(answer)
    done = "added" if answer["code"] == "added" else "was a member already"
    print(f"{answer['id']} {done}")
    if answer["adopted"]:
        print("this node moved to the other's mesh: member files exported here before are out of date")
    return Exit.OK


def _remove(client: DaemonClient, args: Namespace) -> int:
    answer = client.do("trust-remove", ref=args.ref)
    if args.json:
        return _print(answer)
    print(f"{answer['id']} removed here; {answer['connections_cut']} of its connections cut")
    if answer["code"] != "removed":
        print("pairmesh: the disk refused to store this: the daemon keeps trying", file=sys.stderr)
    return Exit.OK


def _content(name: str) -> str | None:
    """The text of a member file, or None if it cannot be one."""
    try:
        if name == "-":
            raw = sys.stdin.buffer.read(MOST + 1)
        else:
            with Path(name).open("rb") as file:
                raw = file.read(MOST + 1)
        return raw.decode() if len(raw) <= MOST else None
    except (OSError, UnicodeDecodeError):
        return None


def _print(answer: dict[str, Any]) -> int:
    print(msgspec.json.encode(answer).decode())
    return Exit.OK
