"""Whose daemon a command line means: the one that its environment names, else this user's own if it runs, else the
host's service.
"""

import contextlib
import errno
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from agent.store.folders import VARIABLES, Folders

SERVICE: Final = Folders(
    state=Path("/var/lib/pairmesh"), runtime=Path("/run/pairmesh"), config=Path("/etc/pairmesh")
)
"""Where the systemd unit has its folders."""
CONNECT_S: Final = 1.0
_ABSENT: Final = (errno.ENOENT, errno.ECONNREFUSED, errno.ENOTDIR, errno.EACCES)


def folders_here(env: Mapping[str, str] | None = None, service: Folders = SERVICE) -> Folders:
    """The folders of the daemon meant. Where no daemon runs: the service's if it is installed and this user has none
    of an own, else the user's own."""
    env = os.environ if env is None else env
    asked = Folders.from_env(env)
    if any(env.get(name) for name in VARIABLES):
        return asked
    for own in _own(asked):
        if _answers(own.admin_socket):
            return own
    if service.runtime.is_dir() or (service.state.is_dir() and not asked.state.is_dir()):
        return service
    return asked


def _own(asked: Folders) -> Iterator[Folders]:
    """Where a daemon of this user may be: a session and a shell without one (cron, su) name different places."""
    yield asked
    for runtime in (Path(f"/run/user/{os.getuid()}/pairmesh"), asked.state / "run"):
        if runtime != asked.runtime:
            yield replace(asked, runtime=runtime)


def _answers(path: Path) -> bool:
    """Whether somebody listens at ``path``; one that is too busy to say so does."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        probe.settimeout(CONNECT_S)
        try:
            probe.connect(str(path))
        except ValueError:
            return False
        except OSError as fault:
            return fault.errno not in _ABSENT and "too long" not in str(fault)
        return True
