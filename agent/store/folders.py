"""Where pairmesh keeps things, and whether those places are fit to be used.

systemd's ``STATE_DIRECTORY``, ``RUNTIME_DIRECTORY`` and ``CONFIGURATION_DIRECTORY`` where set, else ``pairmesh``
below the XDG folders. Nothing is created here but the state and runtime folders themselves.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct

from agent.store.checked import Newer
from router_core.errors import LocalMisuse

VARIABLES: Final = ("STATE_DIRECTORY", "RUNTIME_DIRECTORY", "CONFIGURATION_DIRECTORY")
SOCKET_PATH_MOST: Final = 107
"""Bytes of a unix socket's path on Linux, its terminating zero aside."""


class RefuseToStart(LocalMisuse):
    """The daemon must not start like this. ``reason`` is a short code, the message says what to do."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def too_new(newer: Newer) -> RefuseToStart:
    """A file that must not be done without was written by a later version of this program."""
    return RefuseToStart(
        "state_newer",
        f"{newer.path} was written by a newer version of pairmesh (its schema is {newer.version}) and is left as it is: "
        "install that version again, or restore the state folder of this one from a backup",
    )


class Folders(Struct, frozen=True):
    """The three folders of one daemon."""

    state: Path
    runtime: Path
    config: Path

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> "Folders":
        """The folders that ``env`` (the process's environment) names. Nothing is touched."""
        env = os.environ if env is None else env
        state = _systemd(env, "STATE_DIRECTORY") or _xdg(env, "XDG_STATE_HOME", ".local/state")
        runtime_home = env.get("XDG_RUNTIME_DIR")
        runtime = _systemd(env, "RUNTIME_DIRECTORY") or (
            Path(runtime_home) / "pairmesh" if runtime_home else state / "run"
        )
        config = _systemd(env, "CONFIGURATION_DIRECTORY") or _xdg(env, "XDG_CONFIG_HOME", ".config")
        return cls(state, runtime, config)

    @property
    def admin_socket(self) -> Path:
        return self.runtime / "admin.sock"

    def prepare(self) -> None:
        """Create the state (0700) and runtime folders where missing and check all three.

        Raises ``RefuseToStart``: ``state_not_private``, ``runtime_not_private``, ``config_writable``,
        ``socket_path_too_long``, ``not_a_folder``, ``folder_not_made``.
        """
        if len(os.fsencode(self.admin_socket)) > SOCKET_PATH_MOST:
            raise RefuseToStart(
                "socket_path_too_long",
                f"{self.admin_socket} is longer than {SOCKET_PATH_MOST} bytes: choose a shorter runtime folder",
            )
        _make(self.state, "STATE_DIRECTORY")
        _require(self.state, "state_not_private", forbidden=0o077)
        _make(self.runtime, "RUNTIME_DIRECTORY")
        _require(self.runtime, "runtime_not_private", forbidden=0o027)
        if self.config.exists():
            _require(self.config, "config_writable", forbidden=0o002, owned=False)


def claim(state: Path) -> int:
    """Keep other daemons out of the state folder for as long as the descriptor that is returned is open: two of one
    identity would harm each other. Raises ``RefuseToStart``: ``state_in_use``. Where a file system knows no locks,
    nothing is kept out."""
    fd = os.open(state, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise RefuseToStart(
            "state_in_use",
            f"another daemon runs with {state}: stop it, or give this one a state folder of its own (STATE_DIRECTORY)",
        ) from None
    except OSError:
        pass
    return fd


def _systemd(env: Mapping[str, str], name: str) -> Path | None:
    """systemd lists several folders with colons; the first is ours."""
    value = env.get(name, "").split(":")[0]
    return Path(value) if value else None


def _xdg(env: Mapping[str, str], name: str, default: str) -> Path:
    value = env.get(name)
    return (Path(value) if value else Path(env.get("HOME") or Path.home()) / default) / "pairmesh"


def _make(folder: Path, variable: str) -> None:
    """Make ``folder`` if it is missing. A disk that is full now may not be at the next start."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        return
    except OSError as fault:
        if fault.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        why = f"{folder} cannot be made ({fault.strerror}): make it for this user, or set {variable}"
        raise RefuseToStart("folder_not_made", why) from None


def _require(folder: Path, reason: str, *, forbidden: int, owned: bool = True) -> None:
    found = folder.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise RefuseToStart("not_a_folder", f"{folder} is not a folder: remove it")
    if owned and found.st_uid != os.geteuid():
        raise RefuseToStart(
            reason,
            f"{folder} belongs to uid {found.st_uid}, not {os.geteuid()}: chown it to the daemon's user",
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & forbidden:
        raise RefuseToStart(
            reason, f"{folder} has mode {mode:04o}: run chmod {mode & ~forbidden:04o} {folder}"
        )
