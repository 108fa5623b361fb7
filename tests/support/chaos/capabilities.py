"""What this machine lets a chaos run do, tried for real in a throwaway namespace."""

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.support.chaos import namespaces

REQUIRE = "PAIRMESH_CHAOS_REQUIRE"
"""Names of capabilities, comma separated, whose absence fails the run instead of skipping it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Per capability None, or why it is absent."""

    ns: str | None
    nft: str | None
    tmpfs: str | None

    @property
    def missing(self) -> dict[str, str]:
        """Absent capabilities with the reason."""
        return {name: why for name in ("ns", "nft", "tmpfs") if (why := getattr(self, name)) is not None}


def required() -> frozenset[str]:
    """What the environment demands."""
    return frozenset(filter(None, os.environ.get(REQUIRE, "").split(",")))


def probe() -> Capabilities:
    """Try each."""
    if os.geteuid() != 0:
        return Capabilities(ns="not root", nft="not root", tmpfs="not root")
    absent = [tool for tool in ("ip", "setpriv") if shutil.which(tool) is None]
    if absent:
        why = f"{' and '.join(absent)} not installed"
        return Capabilities(ns=why, nft=why, tmpfs=_tried(_tmpfs))
    try:
        name = namespaces.make_namespace("probe")
    except RuntimeError as fault:
        why = f"no network namespace: {fault}"
        return Capabilities(ns=why, nft=why, tmpfs=_tried(_tmpfs))
    try:
        nft = "nft not installed" if shutil.which("nft") is None else _tried(lambda: _nft(name))
        return Capabilities(ns=_tried(lambda: _veth(name)), nft=nft, tmpfs=_tried(_tmpfs))
    finally:
        namespaces.remove_namespace(name)


def _tried(act: object) -> str | None:
    assert callable(act)
    try:
        act()
    except (RuntimeError, OSError) as fault:
        return str(fault)
    return None


def _nft(name: str) -> None:
    rule = "add table inet probe\nadd chain inet probe inp { type filter hook input priority 0; }\n"
    namespaces.sh("nft", "-f", "-", ns=name, stdin=rule + "add rule inet probe inp ip saddr 10.99.0.1 drop\n")


def _veth(name: str) -> None:
    namespaces.sh("ip", "-n", name, "link", "add", "veth0", "type", "veth", "peer", "name", "veth1")
    namespaces.sh("ip", "-n", name, "link", "add", "br0", "type", "bridge", "mcast_snooping", "0")


def _tmpfs() -> None:
    with tempfile.TemporaryDirectory(prefix="pmc-probe-") as folder:
        namespaces.mount_tmpfs(Path(folder), "probe", size="64k")
        namespaces.unmount(Path(folder))
