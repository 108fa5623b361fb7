"""What decisions are called: 26 random characters, which tell nothing and are never given twice.

Rules: those given one after another begin alike, so that whoever keeps them in order finds what was decided together in
one place and writes few pages for many decisions. An id contains no time.
"""

from random import Random

_CHARACTERS = 26
_BASE32 = b"abcdefghijklmnopqrstuvwxyz234567" * 8
_ALIKE = 4
_RUN = 256


def new_id(rng: Random) -> str:
    """130 random bits as 26 characters of base32: five bits of each of 26 bytes."""
    return rng.getrandbits(8 * _CHARACTERS).to_bytes(_CHARACTERS, "little").translate(_BASE32).decode()


class DecisionIds:
    """Gives ids, in runs that share their first characters; the 110 bits after these are each id's own."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._begins = ""
        self._left = 0

    def new(self) -> str:
        """The next id."""
        fresh = new_id(self._rng)
        if not self._left:
            self._begins, self._left = fresh[:_ALIKE], _RUN
        self._left -= 1
        return self._begins + fresh[_ALIKE:]
