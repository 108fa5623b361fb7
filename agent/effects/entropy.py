"""Randomness for the shell and seeds for the core."""

import os
from random import Random


def random_bytes(count: int) -> bytes:
    """``count`` bytes from the operating system."""
    return os.urandom(count)


def random_u32() -> int:
    """A random 32-bit number, never 0."""
    return int.from_bytes(os.urandom(4), "big") or 1


def new_rng() -> Random:
    """A generator seeded by the operating system, to be injected into machines."""
    return Random(os.urandom(16))
