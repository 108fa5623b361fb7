"""The secrets that settings name: one file each, in the supervisor's credentials folder or below the state folder."""

import os
from pathlib import Path
from typing import Final

from agent.settings.reading import regular
from agent.store.folders import RefuseToStart

SECRET_MOST: Final = 8_192
"""Bytes of one secret."""


def read_secret(state: Path, name: str) -> str:
    """The secret called ``name``, without the whitespace around it.

    Raises ``RefuseToStart``: ``credential_unreadable``, also if it is empty, too long or no printable ASCII. Its message
    does not tell ``name``: that may be the secret, put where the name belongs.
    """
    folder = secrets_folder(state)
    try:
        raw = regular(folder / name, SECRET_MOST + 1)
        secret = raw.decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        raise _unreadable(folder, "cannot be read") from None
    if not secret or len(raw) > SECRET_MOST:
        raise _unreadable(folder, "is empty" if not secret else f"is longer than {SECRET_MOST} bytes")
    if not secret.isprintable():
        raise _unreadable(folder, "holds characters that no header can carry")
    return secret


def secrets_folder(state: Path) -> Path:
    """Where they lie."""
    folder = os.environ.get("CREDENTIALS_DIRECTORY")
    return Path(folder) if folder else state / "credentials"


def _unreadable(folder: Path, why: str) -> RefuseToStart:
    return RefuseToStart("credential_unreadable", f"the file that it names in {folder} {why}")
