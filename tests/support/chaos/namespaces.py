"""The one door to the kernel: network namespaces, firewall tables inside them, and tmpfs mounts of this run.

Everything made here carries the run's prefix ``pmc-<pid>-``, so that what a killed run left behind can be told
from what a living one uses. Nothing outside the run's own namespaces is ever touched.
"""

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

PREFIX = "pmc-"
_OWNED = re.compile(r"pmc-(\d+)-[a-z0-9-]+")
_TOOLS = frozenset({"ip", "nft", "mount", "umount"})
SH_S = 10.0


def prefix() -> str:
    """What the names of this run begin with."""
    return f"{PREFIX}{os.getpid()}-"


def sh(*argv: str, ns: str | None = None, stdin: str | None = None, check: bool = True) -> str:
    """Run one kernel tool, inside ``ns`` if given; its output. Raises RuntimeError with what it printed."""
    if argv[0] not in _TOOLS:
        raise ValueError(f"{argv[0]} is not one of {', '.join(sorted(_TOOLS))}")
    if argv[0] == "nft" and ns is None:
        raise ValueError("nft runs inside a namespace of this run only")
    command = ("ip", "netns", "exec", ns, *argv) if ns is not None else argv
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=SH_S, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def entering(ns: str) -> tuple[str, ...]:
    """Words before a command line that run it inside ``ns`` under the same pid, and end it with its parent."""
    return ("setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", ns)


def namespaces() -> list[str]:
    """All namespaces that any chaos run made."""
    names = [line.split()[0] for line in sh("ip", "netns", "list", check=False).splitlines() if line.strip()]
    return [name for name in names if _OWNED.fullmatch(name)]


def mounts() -> list[tuple[str, str]]:
    """(source, folder) of all mounts that any chaos run made."""
    pairs = [line.split()[:2] for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [(source, folder) for source, folder in pairs if _OWNED.fullmatch(source)]


def make_namespace(name: str) -> str:
    """A new namespace with its loopback up; its full name."""
    full = prefix() + name
    sh("ip", "netns", "add", full)
    sh("ip", "-n", full, "link", "set", "lo", "up")
    return full


def remove_namespace(full: str) -> None:
    """Remove one namespace of this run with all interfaces and tables in it."""
    sh("ip", "netns", "del", full, check=False)


def mount_tmpfs(folder: Path, name: str, *, size: str = "16m", inodes: int = 256) -> None:
    """Give ``folder`` a small file system of its own."""
    options = f"size={size},nr_inodes={inodes},mode=700"
    sh("mount", "-t", "tmpfs", "-o", options, prefix() + name, str(folder))


def unmount(folder: Path) -> None:
    """Take the file system of ``folder`` away."""
    sh("umount", "-l", str(folder), check=False)


def owner_of(name: str) -> int:
    """The pid in a name of ours."""
    found = _OWNED.fullmatch(name)
    if found is None:
        raise ValueError(f"{name} is not a name of a chaos run")
    return int(found[1])


def reap() -> list[str]:
    """Remove what runs left whose process is gone; their names. Those of living runs are left alone."""
    stale: Sequence[str] = [name for name in namespaces() if not alive(owner_of(name))]
    for name in stale:
        for pid in sh("ip", "netns", "pids", name, check=False).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        remove_namespace(name)
    for source, folder in mounts():
        if not alive(owner_of(source)):
            unmount(Path(folder))
    return list(stale)


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def children() -> dict[int, str]:
    """Processes whose parent is this one, zombies aside: pid and command."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            name, _, rest = stat.read_text().partition(" (")[2].rpartition(") ")
            state, parent = rest.split()[:2]
            if int(parent) == os.getpid() and state != "Z":
                found[int(stat.parent.name)] = name
    return found
