"""``pairmesh config``: the settings in force, and everything wrong with them."""

import json
import socket
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable

from agent.cli.exits import Exit
from agent.settings.load import Settings, check, load
from agent.settings.manifest import read_manifests
from agent.settings.show import show
from agent.store.folders import Folders

POLICY = "policy.toml"


def declare(parser: ArgumentParser) -> None:
    parser.description = (
        "show: print every setting of pairmesh.toml in force and where it comes from, as TOML.\n"
        "check: report every fault in pairmesh.toml and in endpoints/*.toml; exit status 78 if there is one."
    )
    parser.add_argument("what", choices=("show", "check"))
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: Namespace) -> int:
    return _show(args.json) if args.what == "show" else _check(args.json)


def faults_of(folders: Folders) -> list[str]:
    """Every fault of the config folder, one sentence each."""
    found: list[object] = [*check(folders.config)]
    found += read_manifests(folders.config / "endpoints").faults
    if (folders.config / POLICY).exists():
        found.append(f"{POLICY}: is not read by this version")
    return [str(fault) for fault in found]


def _show(as_json: bool) -> int:
    loaded = load(Folders.from_env().config, host_name=socket.gethostname())
    if not isinstance(loaded, Settings):
        return report(map(str, loaded))
    if as_json:
        shown = {key: {"value": w.value, "source": w.source} for key, w in loaded.written.items()}
        print(json.dumps(shown, indent=2))
    else:
        sys.stdout.write(show(loaded))
    return Exit.OK


def _check(as_json: bool) -> int:
    folders = Folders.from_env()
    faults = faults_of(folders)
    if as_json:
        print(json.dumps({"folder": str(folders.config), "faults": faults}, indent=2))
        return Exit.CONFIG if faults else Exit.OK
    if faults:
        return report(faults)
    print(f"no fault in {folders.config}")
    return Exit.OK


def report(faults: Iterable[str]) -> int:
    """Print faults to stderr; the exit status that goes with them."""
    for fault in faults:
        print(f"pairmesh: {fault}", file=sys.stderr)
    return Exit.CONFIG
