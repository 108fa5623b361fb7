"""``pairmesh config``: what the files of the config folder say, and everything wrong with them."""

import contextlib
import json
import socket
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from agent.cli.columns import printable
from agent.cli.exits import Exit
from agent.cli.whose import folders_here
from agent.settings.load import FILE, Settings, check, load
from agent.settings.manifest import read_manifests, too_many
from agent.settings.policy import POLICY_FILE, PolicyRead, load_policy
from agent.settings.policy_schema import POLICY_SCHEMA
from agent.settings.reading import Schema, Written
from agent.settings.schema import SCHEMA
from agent.settings.show import is_hidden, show
from agent.store.folders import Folders
from router_core import limits

ENDPOINTS: Final = "endpoints"
UNREAD_MOST: Final = 16


def declare(parser: ArgumentParser) -> None:
    parser.description = (
        "show: print every setting of pairmesh.toml and every number of policy.toml in force and where it\n"
        "comes from, as TOML, and the policy's hash, which 'pairmesh status' and every decision name, too.\n"
        "check: report every fault in both and in endpoints/*.toml; exit status 78 if there is one."
    )
    parser.add_argument("what", choices=("show", "check"))
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: Namespace) -> int:
    return _show(args.json) if args.what == "show" else _check(args.json)


def faults_of(folders: Folders) -> list[str]:
    """Every fault of the config folder, one sentence each."""
    policy, endpoints = load_policy(folders.config), read_manifests(folders.config / ENDPOINTS)
    found: list[object] = [*check(folders.config)]
    found += [] if isinstance(policy, PolicyRead) else policy
    found += [f"{ENDPOINTS}/{fault}" for fault in endpoints.faults]
    found += [too_many(manifest) for manifest in endpoints.manifests[limits.ENGINES :]]
    return [str(fault) for fault in found]


def unread(folder: Path) -> list[str]:
    """Files of the config folder that look as if they were to be read, and are not, one sentence each."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        stray = (path.name for path in folder.glob("*.toml") if path.name not in (FILE, POLICY_FILE))
        found += [f"{name} is not read: manifests lie in {ENDPOINTS}/" for name in sorted(stray)]
        odd = (path.name for path in (folder / ENDPOINTS).glob("[!.]*") if ".toml" not in path.name)
        found += [
            f"{ENDPOINTS}/{name} is not read: the name of a manifest ends in .toml" for name in sorted(odd)
        ]
    return [printable(each) for each in found[:UNREAD_MOST]]


def _show(as_json: bool) -> int:
    config = folders_here().config
    settings, policy = load(config, host_name=socket.gethostname()), load_policy(config)
    if not isinstance(settings, Settings) or not isinstance(policy, PolicyRead):
        loaded = (settings, policy)
        return report(str(fault) for faults in loaded if isinstance(faults, tuple) for fault in faults)
    if as_json:
        files = {
            FILE: _plain(SCHEMA, settings.written),
            POLICY_FILE: _plain(POLICY_SCHEMA, policy.written),
        }
        print(json.dumps(files | {"policy_hash": policy.policy.hash}, indent=2))
    else:
        sys.stdout.write(f"# {FILE}\n{show(SCHEMA, settings.written)}")
        sys.stdout.write(
            f"\n# {POLICY_FILE}, hash {policy.policy.hash}\n{show(POLICY_SCHEMA, policy.written)}"
        )
    return Exit.OK


def _plain(schema: Schema, written: Mapping[str, Written]) -> dict[str, object]:
    """null for what is not shown."""
    return {
        path: {
            "value": None if is_hidden(schema.by_path[path], found) else found.value,
            "source": found.source,
        }
        for path, found in written.items()
    }


def _check(as_json: bool) -> int:
    folders = folders_here()
    faults = faults_of(folders)
    if as_json:
        print(json.dumps({"folder": str(folders.config), "faults": faults}, indent=2))
        return Exit.CONFIG if faults else Exit.OK
    if faults:
        return report(faults)
    exists = "" if folders.config.exists() else ": there is no such folder, so everything is as by default"
    print(f"no fault in {folders.config}{exists}")
    for each in unread(folders.config):
        print(f"note: {each}")
    return Exit.OK


def report(faults: Iterable[str]) -> int:
    """Print faults to stderr; the exit status that goes with them."""
    for fault in faults:
        print(f"pairmesh: {fault}", file=sys.stderr)
    return Exit.CONFIG
