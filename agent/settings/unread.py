"""Files of the config folder that look as if they were to be read, and are not: their names may be misspelt."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from agent.settings.load import FILE
from agent.settings.policy import POLICY_FILE
from agent.settings.values import nearest

ENDPOINTS: Final = "endpoints"
MOST: Final = 16
_FILES: Final = (FILE, POLICY_FILE)
_SUFFIX: Final = ".toml"
_BY_STEM: Final = {name.removesuffix(_SUFFIX): name for name in _FILES}
_PUT_ASIDE: Final = (
    "~", ".bak", ".off", ".old", ".orig", ".save", ".swp", ".disabled", ".example", ".sample", ".dpkg-dist", ".dpkg-new",
    ".dpkg-old", ".ucf-dist", ".rpmnew", ".rpmorig", ".rpmsave",
)  # fmt: skip
"""How editors, package managers and people call what is not meant any more."""


def unread(folder: Path) -> list[str]:
    """One sentence for each such file or folder, ``MOST`` at most."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        found += _stray(folder)
    with contextlib.suppress(OSError):
        found += [
            f"{ENDPOINTS}/{name} is not read: the name of a manifest ends in {_SUFFIX}"
            for name in _names(folder / ENDPOINTS)
            if not name.endswith(_SUFFIX)
        ]
    return found[:MOST]


def _stray(folder: Path) -> Iterator[str]:
    for name in _names(folder):
        if name in _FILES or name == ENDPOINTS:
            continue
        if (folder / name).is_dir():
            meant = nearest(name.lower(), (ENDPOINTS,))
            if meant is not None:
                yield f"{name}/ is not read: did you mean {meant}/?"
            elif any((folder / name).glob(f"*{_SUFFIX}")):
                yield f"{name}/ is not read: manifests lie in {ENDPOINTS}/"
            continue
        meant = nearest(name.lower().partition(".")[0], tuple(_BY_STEM))
        if meant is not None:
            yield f"{name} is not read: did you mean {_BY_STEM[meant]}?"
        elif name.endswith(_SUFFIX):
            yield f"{name} is not read: manifests lie in {ENDPOINTS}/"
        else:
            yield f"{name} is not read: this folder holds {', '.join(_FILES)} and {ENDPOINTS}/"


def _names(folder: Path) -> list[str]:
    """Names in ``folder``, those that were put aside or are hidden left out."""
    with os.scandir(folder) as found:
        names = sorted(entry.name for entry in found)
    return [name for name in names if not name.startswith(".") and not name.endswith(_PUT_ASIDE)]
