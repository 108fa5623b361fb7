"""``pairmesh config``: what the files of the config folder say, and everything wrong with them."""

import json
import os
import socket
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from agent.cli.columns import printable
from agent.cli.daemon_client import DaemonClient, Refused, Unreachable
from agent.cli.exits import Exit
from agent.cli.whose import folders_here
from agent.settings.fault import Fault, toml
from agent.settings.load import FILE, Settings, check, load
from agent.settings.manifest import ManifestsRead, read_manifests, too_many
from agent.settings.policy import POLICY_FILE, PolicyRead, load_policy
from agent.settings.policy_schema import POLICY_SCHEMA
from agent.settings.reading import Key, Schema, Written
from agent.settings.schema import SCHEMA
from agent.settings.show import is_hidden, show
from agent.settings.unread import ENDPOINTS, unread
from agent.store.folders import Folders, RefuseToStart
from agent.store.secrets import read_secret, secrets_folder
from router_core import limits
from router_core.policy.authority import AuthorityMode

SERVICE_CREDENTIALS: Final = Path("/run/credentials/pairmesh.service")
"""Where systemd keeps the credentials of the unit."""


class PendingChange(Struct, frozen=True, kw_only=True):
    """One setting that waits for a restart: its value in force and its value in the file."""

    in_force: Written
    written: Written


class ConfigShown(Struct, frozen=True, kw_only=True):
    """What the daemon answers to ``config-show``."""

    settings: dict[str, Written]
    policy: dict[str, Written]
    policy_hash: str
    waiting: dict[str, PendingChange] = {}
    faults: tuple[str, ...] = ()


def declare(parser: ArgumentParser) -> None:
    """Declare the arguments of ``pairmesh config``."""
    parser.description = (
        "show: print every setting of pairmesh.toml and every number of policy.toml that is in force at the\n"
        "daemon of this host and where it comes from, as TOML, the policy's hash, which 'pairmesh status' and\n"
        "every decision name, too, and apart what waits for a restart. Without a daemon: what the files say.\n"
        "check: report every fault in both, in endpoints/*.toml and in the credentials that they name, keys\n"
        "without effect and files that nobody reads; exit status 78 if there is a fault."
    )
    parser.add_argument("what", choices=("show", "check"))
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: Namespace) -> int:
    """Run ``pairmesh config``; return its exit status."""
    return _show(args.json) if args.what == "show" else _check(args.json)


def faults_of(folders: Folders) -> list[str]:
    """Every fault of the config folder, one sentence each."""
    policy, endpoints = load_policy(folders.config), read_manifests(folders.config / ENDPOINTS)
    found: list[object] = [*check(folders.config)]
    found += [] if isinstance(policy, PolicyRead) else policy
    found += [f"{ENDPOINTS}/{fault}" for fault in endpoints.faults]
    found += [too_many(manifest) for manifest in endpoints.manifests[limits.ENGINES :]]
    found += _credential_faults(folders.state, policy, endpoints)
    return [str(fault) for fault in found]


def warnings_of(folders: Folders) -> list[str]:
    """Every key of the config folder's files that has no effect any more, one sentence each."""
    settings = load(folders.config, host_name=socket.gethostname())
    policy = load_policy(folders.config)
    found = settings.warnings if isinstance(settings, Settings) else ()
    found += policy.warnings if isinstance(policy, PolicyRead) else ()
    return [str(each) for each in found]


def _credential_faults(
    state: Path, policy: PolicyRead | tuple[Fault, ...], endpoints: ManifestsRead
) -> Iterator[str]:
    """The credentials that are named and cannot be had. Nothing is said where this user may not look."""
    wanted = {f"{ENDPOINTS}: {each.name}: credential": each.credential for each in endpoints.manifests}
    if isinstance(policy, PolicyRead) and policy.policy.authority.mode is not AuthorityMode.OFF:
        wanted[f"{POLICY_FILE}: authority.credential"] = policy.policy.authority.credential
    for where, name in wanted.items():
        if name is None:
            continue
        try:
            read_secret(state, name)
        except RefuseToStart as refused:
            if not any(_may_lie_in(folder, name) for folder in (secrets_folder(state), SERVICE_CREDENTIALS)):
                yield f"{where}: {refused}"


def _may_lie_in(folder: Path, name: str) -> bool:
    """True where this user cannot tell, or another folder than the one that was looked in has it."""
    try:
        os.scandir(folder).close()
    except PermissionError:
        return True
    except OSError:
        return False
    return folder == SERVICE_CREDENTIALS and (folder / name).exists()


def _show(as_json: bool) -> int:
    try:
        told = msgspec.convert(DaemonClient.here().do("config-show"), ConfigShown)
    except (Unreachable, Refused, msgspec.ValidationError) as why:
        return _show_files(as_json, str(why))
    if as_json:
        files = {FILE: told.settings, POLICY_FILE: told.policy}
        more = {
            "policy_hash": told.policy_hash,
            "waiting": told.waiting,
            "faults": told.faults,
            "daemon": True,
        }
        print(json.dumps(msgspec.to_builtins(files | more), indent=2))
        return Exit.OK
    sys.stdout.write(f"# in force\n{_toml(told.settings, told.policy, told.policy_hash)}")
    if told.waiting:
        print(f"\n# {FILE} was changed since the start; these wait for a restart:")
    for key, change in told.waiting.items():
        was, then = (_value(SCHEMA.by_path[key], each) for each in (change.in_force, change.written))
        print(f"# {key} = {then}  # {change.written.source}; in force: {was}")
    if told.faults:
        print(f"\n# {FILE} has faults by now, and a restart would be refused: see pairmesh config check")
    return Exit.OK


def _value(key: Key, found: Written) -> str:
    return "(not shown)" if is_hidden(key, found) else toml(found.value)


def _show_files(as_json: bool, why: str) -> int:
    """What the next start would take on: nobody tells what is in force."""
    config = folders_here().config
    settings, policy = load(config, host_name=socket.gethostname()), load_policy(config)
    if not isinstance(settings, Settings) or not isinstance(policy, PolicyRead):
        loaded = (settings, policy)
        return report(str(fault) for faults in loaded if isinstance(faults, tuple) for fault in faults)
    if as_json:
        files: dict[str, object] = {
            FILE: _plain(SCHEMA, settings.written),
            POLICY_FILE: _plain(POLICY_SCHEMA, policy.written),
        }
        print(json.dumps(files | {"policy_hash": policy.policy.hash, "daemon": False}, indent=2))
    else:
        sys.stdout.write(f"# by the files in {config}, for a daemon that is started now ({why})\n")
        sys.stdout.write(_toml(settings.written, policy.written, policy.policy.hash))
    return Exit.OK


def _toml(settings: Mapping[str, Written], policy: Mapping[str, Written], policy_hash: str) -> str:
    return (
        f"# {FILE}\n{show(SCHEMA, settings)}\n"
        f"# {POLICY_FILE}, hash {policy_hash}\n{show(POLICY_SCHEMA, policy)}"
    )


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
    faults, warnings = faults_of(folders), warnings_of(folders)
    if as_json:
        told = {
            "folder": str(folders.config),
            "faults": faults,
            "warnings": warnings,
            "unread": unread(folders.config),
        }
        print(json.dumps(told, indent=2))
        return Exit.CONFIG if faults else Exit.OK
    notes = [f"warning: {each}" for each in warnings]
    notes += [f"note: {printable(each)}" for each in unread(folders.config)]
    if faults:
        return report([*faults, *notes])
    exists = "" if folders.config.exists() else ": there is no such folder, so everything is as by default"
    print(f"no fault in {folders.config}{exists}")
    for note in notes:
        print(note)
    return Exit.OK


def report(faults: Iterable[str]) -> int:
    """Print faults to stderr; the exit status that goes with them."""
    for fault in faults:
        print(f"pairmesh: {fault}", file=sys.stderr)
    return Exit.CONFIG
