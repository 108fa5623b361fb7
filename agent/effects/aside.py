"""What is told of a file of a newer version, which is set aside as it is."""

from collections.abc import Callable
from pathlib import Path

Aside = Callable[[Path, int, Path], None]
"""Hears the file's path, its version, and where it lies now."""


def quietly(_path: Path, _version: int, _aside: Path) -> None:
    """An ``Aside`` that reports nothing."""
