"""Marked text and the search for it: what must not be found is minted here, and every way in which a careless sink
could have spelled it is undone here.

A mark is ``CANARY`` and 24 random base36 characters; a hit is any window of ten characters of it, in any case, plain
or as hex, base64, percent escapes, JSON escapes or UTF-16.
"""

import base64
import re
from collections.abc import Iterable, Iterator
from random import Random
from urllib.parse import unquote_to_bytes

WINDOW = 10
_BASE36 = "0123456789abcdefghijklmnopqrstuvwxyz"
_RUN = re.compile(rb"[0-9a-z]{%d,}" % WINDOW)
_HEX = re.compile(rb"(?:[0-9a-fA-F][ :-]?){%d,}" % (2 * WINDOW))
_BASE64 = re.compile(rb"[A-Za-z0-9+/_-]{14,}")
_ESCAPE = re.compile(rb"\\u00([0-9a-fA-F]{2})|\\x([0-9a-fA-F]{2})")


class Canaries:
    """Marks by what they were planted as. The same seed mints the same marks."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)
        self._windows: dict[bytes, str] = {}
        self.names: dict[str, str] = {}

    def mint(self, plant: str) -> str:
        """The mark planted as ``plant``; always the same one."""
        if plant not in self.names:
            mark = "CANARY" + "".join(self._rng.choices(_BASE36, k=24))
            self.names[plant] = mark
            for start in range(len(mark) - WINDOW + 1):
                self._windows[mark[start : start + WINDOW].lower().encode()] = plant
        return self.names[plant]

    def found_in(self, blob: bytes) -> set[str]:
        """The plants of which ``blob`` holds a window."""
        return {
            plant
            for reading in readings(blob)
            for window in windows(reading)
            if (plant := self._windows.get(window)) is not None
        }

    def search(self, sinks: Iterable[tuple[str, bytes]]) -> dict[str, set[str]]:
        """The sinks with hits, and what was found there."""
        return {name: found for name, blob in sinks if (found := self.found_in(blob))}


def windows(reading: bytes) -> Iterator[bytes]:
    for run in _RUN.finditer(reading.lower()):
        text = run.group()
        yield from (text[start : start + WINDOW] for start in range(len(text) - WINDOW + 1))


def readings(blob: bytes) -> Iterator[bytes]:
    """``blob`` as it stands and with each spelling undone."""
    yield blob
    yield blob[::2]
    yield blob[1::2]
    yield unquote_to_bytes(blob)
    yield _ESCAPE.sub(lambda hit: bytes([int(hit[1] or hit[2], 16)]), blob)
    for run in _HEX.finditer(blob):
        digits = re.sub(rb"[^0-9a-fA-F]", b"", run.group())
        for shift in (0, 1):
            text = digits[shift:]
            yield bytes.fromhex(text[: len(text) // 2 * 2].decode())
    for run in _BASE64.finditer(blob):
        letters = run.group().replace(b"-", b"+").replace(b"_", b"/")
        for shift in range(4):
            text = letters[shift:]
            yield base64.b64decode(text[: len(text) // 4 * 4])
