"""Arguments that verbs of the simulator share."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

SHARED: Final = "PAIRMESH_SHARED"


def at_least(least: int, most: int | None = None) -> Callable[[str], int]:
    """Reads a whole number; argparse tells of one that is none, less, or more than ``most``."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        if most is not None and int(text) > most:
            raise argparse.ArgumentTypeError(f"{text} is more than {most}")
        return int(text)

    number.__name__ = "whole number"
    return number


def above_0(text: str) -> float:
    """Reads a number; argparse tells of one that is none or not above 0."""
    number = float(text)
    if not 0.0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def add_playing(parser: argparse.ArgumentParser) -> None:
    """How scenarios are played and told, whatever for."""
    parser.add_argument("--jobs", type=at_least(1), default=os.cpu_count() or 1, help="processes")
    parser.add_argument(
        "--shared", type=Path, help=f"folder of traces and profiles (${SHARED}, else ../shared)"
    )
    parser.add_argument("--built-in", action="store_true", help="use built-in workloads only")
    parser.add_argument("--json", action="store_true", help="one object a line")
