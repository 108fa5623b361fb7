"""Runs a command under the system call filter of the unit, as far as libseccomp can say it: what systemd would set.

``python sandbox.py [--kill] UNIT COMMAND...``; with ``--kill`` a denied call ends the process instead. It reads the unit's own ``SystemCallFilter=``, asks systemd-analyze which calls
the sets hold, allows ``mmap`` and ``mprotect`` only without new executable pages, ``socket`` only for the families
of the unit, and denies everything else with the unit's error. Capabilities, limits, umask and no-new-privileges are
as the unit says too.
"""

import ctypes
import errno
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ALLOW = 0x7FFF0000
ERRNO = 0x00050000
KILL_PROCESS = 0x80000000
MASKED_EQ = 7
PROT_WRITE, PROT_EXEC, SHM_EXEC = 2, 4, 0o100000
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 24, 38
CAPABILITIES = 64


class Comparison(ctypes.Structure):
    """``scmp_arg_cmp``."""

    _fields_ = (
        ("arg", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("datum_a", ctypes.c_uint64),
        ("datum_b", ctypes.c_uint64),
    )


def values(unit: str, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", unit, re.MULTILINE)


@cache
def members(name: str) -> frozenset[str]:
    """The calls of a set, sets within it followed."""
    listed = subprocess.run(
        ["systemd-analyze", "--no-pager", "syscall-filter", name], capture_output=True, text=True, check=True
    ).stdout
    words = [line.strip() for line in listed.splitlines()[1:]]
    calls = {word for word in words if word and word[0] not in "@#"}
    return frozenset(calls.union(*(members(word) for word in words if word.startswith("@"))))


def allowed(unit: str) -> set[str]:
    """What the unit's filter lines leave; ``@default`` and running the command itself always are."""
    first, *more = values(unit, "SystemCallFilter")
    calls = {"execve"} | set().union(*(members(name) for name in first.split()), members("@default"))
    for line in more:
        assert line.startswith("~"), line
        calls -= set().union(*(members(name) for name in line[1:].split())) - members("@default")
    return calls


def rules(unit: str) -> Iterator[tuple[str, tuple[Comparison, ...]]]:
    """Each call with what its arguments must be; several rules of one call are alternatives."""
    for call in sorted(allowed(unit) - {"mmap", "mprotect", "pkey_mprotect", "shmat", "socket"}):
        yield call, ()
    for without in (PROT_WRITE, PROT_EXEC):
        yield "mmap", (Comparison(2, MASKED_EQ, without, 0),)
    yield "mprotect", (Comparison(2, MASKED_EQ, PROT_EXEC, 0),)
    yield "pkey_mprotect", (Comparison(2, MASKED_EQ, PROT_EXEC, 0),)
    yield "shmat", (Comparison(2, MASKED_EQ, SHM_EXEC, 0),)
    for family in values(unit, "RestrictAddressFamilies")[0].split():
        yield "socket", (Comparison(0, MASKED_EQ, 0xFFFFFFFF, int(getattr(socket, family))),)


def load_filter(unit: str, kill: bool) -> None:
    lib = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    lib.seccomp_init.restype = ctypes.c_void_p
    lib.seccomp_rule_add_array.argtypes = (
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_int,
        ctypes.c_uint,
        ctypes.c_void_p,
    )
    denied = getattr(errno, values(unit, "SystemCallErrorNumber")[0])
    filtering = ctypes.c_void_p(lib.seccomp_init(KILL_PROCESS if kill else ERRNO | denied))
    if kill and os.geteuid() == 0:
        # SQLite gives its files to the owner of the database if it is root, which the service never is.
        number = lib.seccomp_syscall_resolve_name(b"fchown")
        assert lib.seccomp_rule_add_array(filtering, ERRNO | denied, number, 0, None) == 0
    for call, arguments in rules(unit):
        number = lib.seccomp_syscall_resolve_name(call.encode())
        if number < 0:
            continue
        array = (Comparison * len(arguments))(*arguments)
        failed = lib.seccomp_rule_add_array(filtering, ALLOW, number, len(arguments), ctypes.byref(array))
        assert failed == 0, (call, failed)
    assert lib.seccomp_load(filtering) == 0


def main(path: str, command: list[str], kill: bool) -> None:
    unit = Path(path).read_text()
    open_files = int(values(unit, "LimitNOFILE")[0])
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.umask(int(values(unit, "UMask")[0], 8))
    assert values(unit, "CapabilityBoundingSet") == [""]
    for capability in range(CAPABILITIES):
        ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    load_filter(unit, kill)
    os.execv(command[0], command)


if __name__ == "__main__":
    kill = sys.argv[1] == "--kill"
    main(sys.argv[1 + kill], sys.argv[2 + kill :], kill)
