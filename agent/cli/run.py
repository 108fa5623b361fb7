"""``pairmesh run``: the daemon, in the foreground."""

import os
import socket
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from pathlib import Path
from typing import Final

from agent.cli.config import report
from agent.cli.floors import installed, unmet
from agent.observe.log import Severity
from agent.settings.load import Settings, load
from agent.settings.policy import PolicyRead, load_policy
from agent.settings.schema import SCHEMA
from agent.store.folders import Folders

TEXT_FLAGS: Final = (
    "name",
    "api.listen",
    "mesh.listen",
    "ingress.listen",
    "admin.listen",
    "sampling.profile",
)
SWITCH_FLAGS: Final = ("router", "engines.autodetect")
LOG_VARIABLE: Final = "PAIRMESH_LOG"
LOG_LEVELS: Final = {known.name.lower(): known for known in Severity}


def declare(parser: ArgumentParser) -> None:
    """Declare the arguments of ``pairmesh run``."""
    parser.description = (
        "Run the daemon until SIGTERM, SIGINT or the end of its terminal; SIGHUP has files read again. Settings come from pairmesh.toml in the config folder; a flag\n"
        "beats the file. Folders come from STATE_DIRECTORY, RUNTIME_DIRECTORY and CONFIGURATION_DIRECTORY,\n"
        "else from the XDG variables or their defaults. PAIRMESH_LOG names the least severity that is logged:\n"
        "debug, info (if it is not set), warning or error."
    )
    for path in TEXT_FLAGS:
        key = SCHEMA.by_path[path]
        parser.add_argument(
            _flag(path), dest=path, metavar="VALUE", help=_said(f"{key.meaning} ({key.takes})")
        )
    for path in SWITCH_FLAGS:
        parser.add_argument(
            _flag(path), dest=path, action=BooleanOptionalAction, help=_said(SCHEMA.by_path[path].meaning)
        )
    parser.add_argument(
        "--keep-identity",
        action="store_true",
        help="accept an identity that was made on another host, once that host no longer uses it",
    )
    parser.add_argument(
        "--new-identity",
        action="store_true",
        help="put the present identity and its members aside and start as a new node",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="append a JSON line per record, decision, attempt and ending: ids and numbers, never content",
    )


def flags_of(args: Namespace) -> dict[str, object]:
    """The settings given on the command line, by dotted key."""
    given = {path: getattr(args, path) for path in (*TEXT_FLAGS, *SWITCH_FLAGS)}
    return {path: value for path, value in given.items() if value is not None}


def run(args: Namespace) -> int:
    """Check settings and versions, then run the daemon until it ends; return its exit status."""
    folders = Folders.from_env()
    faults = unmet(installed())
    level = os.environ.get(LOG_VARIABLE) or "info"
    if level not in LOG_LEVELS:
        faults.append(f"{LOG_VARIABLE} is {level!r}: one of {', '.join(LOG_LEVELS)} is needed")
    policy = load_policy(folders.config)
    if not isinstance(policy, PolicyRead):
        faults += map(str, policy)
    settings = load(folders.config, host_name=socket.gethostname(), flags=flags_of(args))
    if not isinstance(settings, Settings):
        faults += map(str, settings)
        return report(faults)
    if faults:
        return report(faults)
    from agent import daemon

    return daemon.run(
        settings,
        folders,
        keep_identity=args.keep_identity,
        new_identity=args.new_identity,
        trace=args.trace,
        least=LOG_LEVELS[level],
    )


def _flag(path: str) -> str:
    return "--" + path.replace(".", "-")


def _said(text: str) -> str:
    return text.replace("%", "%%")
