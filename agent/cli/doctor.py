"""``pairmesh doctor``: looks at everything that commonly is not as it should be. Changes nothing."""

import os
import socket
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from agent.admin.documents import CardDoc, NvmlDoc, StatusDoc
from agent.cli import findings, gpu_findings
from agent.cli.columns import columns, printable
from agent.cli.config import faults_of, warnings_of
from agent.cli.daemon_client import DaemonClient, Refused, Unreachable
from agent.cli.exits import Exit
from agent.cli.findings import Finding, FolderFacts, Health
from agent.cli.floors import installed, unmet
from agent.cli.whose import SERVICE, folders_here
from agent.sampling.driver import look_for_driver
from agent.sampling.files import Roots
from agent.settings.load import Settings, load
from agent.settings.unread import unread
from agent.store.folders import SOCKET_PATH_MOST, Folders

CONNECT_S: Final = 1.0


def declare(parser: ArgumentParser) -> None:
    """Declare the arguments of ``pairmesh doctor``."""
    parser.description = (
        "Look at folders, settings, versions, clock, the daemon, its ports, GPUs, engines and members, and say\n"
        "what to do about what is not as it should be. Changes nothing. Exit status 1 if something is bad."
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: Namespace) -> int:
    """Run ``pairmesh doctor``; return its exit status."""
    found = list(examine(folders_here()))
    if args.json:
        print(msgspec.json.encode(found).decode())
    else:
        print("\n".join(columns([(finding.health.value, finding.about, finding.said) for finding in found])))
    return Exit.FAILED if any(finding.health is Health.BAD for finding in found) else Exit.OK


def examine(folders: Folders, service_runtime: Path = SERVICE.runtime) -> Iterator[Finding]:
    """Every finding about the daemon that ``folders`` names, whether it runs or not."""
    yield from findings.floors(unmet(installed()))
    yield from findings.folders(folder_facts(folders), _daemon_uid(folders))
    if len(os.fsencode(folders.admin_socket)) > SOCKET_PATH_MOST:
        yield findings.bad("folders", f"{folders.admin_socket} is longer than {SOCKET_PATH_MOST} bytes")
    yield from findings.settings(
        faults_of(folders),
        str(folders.config),
        [*warnings_of(folders), *(printable(each) for each in unread(folders.config))],
    )
    status: StatusDoc | None = None
    try:
        status = DaemonClient(folders.admin_socket).get("/v1/status", StatusDoc)
    except (Unreachable, Refused, msgspec.DecodeError) as exc:
        yield findings.bad("daemon", str(exc))
        yield from findings.elsewhere(str(folders.runtime), str(service_runtime), service_runtime.exists())
    yield from findings.clock(time.time_ns() // 1_000_000, None if status is None else status.at_ms)
    where = _configured(folders) if status is None else _reached_by_tcp(status.own.addresses)
    yield from findings.ports(
        {f"{name} {at}": _accepts(at) for name, at in where.items()}, status is not None
    )
    if status is None:
        yield from gpu_findings.gpu(_gpu_files(), asked=False)
        yield Finding(health=Health.SKIPPED, about="engines", said="only a running daemon knows")
        yield Finding(health=Health.SKIPPED, about="members", said="only a running daemon knows")
    else:
        yield from gpu_findings.host(status.own.host)
        yield from gpu_findings.gpu(status.own.host.nvml)
        yield from findings.own_node(status)
        yield from findings.members(status)


def _gpu_files() -> NvmlDoc:
    """What files alone tell of NVIDIA's driver and cards."""
    seen = look_for_driver(Roots(), os.environ.get("LD_LIBRARY_PATH", ""), None)
    cards = (CardDoc(bus_id=card.bus_id, driver=card.driver, in_vm=card.in_vm) for card in seen.cards)
    return NvmlDoc(present=seen.present, kernel=seen.loaded, wsl=seen.wsl, cards=tuple(cards))


def folder_facts(folders: Folders) -> Iterator[FolderFacts]:
    """Modes and owners of the folders and of the key."""
    yield _facts("folders", folders.state, 0o077)
    yield _facts("folders", folders.runtime, 0o027)
    yield _facts("folders", folders.config, 0o002, owned=False)
    yield _facts("identity", folders.state / "identity" / "key.pem", 0o077)


def _facts(about: str, path: Path, forbidden: int, *, owned: bool = True) -> FolderFacts:
    try:
        found = path.stat(follow_symlinks=False)
    except OSError as fault:
        return FolderFacts(
            about=about,
            path=str(path),
            mode=None,
            uid=None,
            forbidden=forbidden,
            owned=owned,
            hidden=isinstance(fault, PermissionError),
        )
    return FolderFacts(
        about=about, path=str(path), mode=found.st_mode, uid=found.st_uid, forbidden=forbidden, owned=owned
    )


def _daemon_uid(folders: Folders) -> int:
    """Whoever owns the state folder runs the daemon; this user if there is none yet."""
    try:
        return folders.state.stat().st_uid
    except OSError:
        return os.geteuid()


def _configured(folders: Folders) -> Mapping[str, str]:
    settings = load(folders.config, host_name=socket.gethostname())
    if not isinstance(settings, Settings):
        return {}
    return {
        "api": str(settings.api.listen),
        "mesh": str(settings.mesh.listen),
        "ingress": str(settings.ingress),
        "admin": str(settings.admin),
    }


def _reached_by_tcp(addresses: Mapping[str, str]) -> Mapping[str, str]:
    """All but the unix socket, which has answered by now."""
    return {name: at for name, at in addresses.items() if not at.startswith("/")}


def _accepts(where: str) -> bool:
    """Whether something accepts TCP at ``HOST:PORT``; an unspecified host is tried on loopback."""
    host, _, port = where.rpartition(":")
    host = host.strip("[]")
    target = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        with socket.create_connection((target, int(port)), timeout=CONNECT_S):
            return True
    except (OSError, ValueError):
        return False
