"""Where sessions were last served by this router: a small table of pins, never shared.

Rules: at most 4,096 pins, the least recently used goes first; a pin older than 600 s is none; keys are keyed hashes,
so the table holds nothing a client sent. It decides nothing: affinity is one bonus among the factors.
"""

from hashlib import blake2b

from router_core.placement.request.request import Pin

KEPT = 4_096
LIFE_MS = 600_000


def session_key(session: str, secret: bytes) -> bytes:
    """Eight bytes for ``session`` under this process's ``secret`` (at most 64 bytes)."""
    return blake2b(session.encode("ascii", "replace"), digest_size=8, key=secret).digest()


class Sessions:
    """Pins by session key."""

    def __init__(self, kept: int = KEPT, life_ms: int = LIFE_MS) -> None:
        self._kept = kept
        self._life_ms = life_ms
        self._pins: dict[bytes, Pin] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def find(self, key: bytes, now: int) -> Pin | None:
        """The pin of a session, None if there is none or it is too old."""
        pin = self._pins.get(key)
        if pin is not None and now - pin.at_ms > self._life_ms:
            del self._pins[key]
            return None
        return pin

    def pin(self, key: bytes, pin: Pin) -> None:
        """Remember where the session's turn was committed."""
        self._pins.pop(key, None)
        self._pins[key] = pin
        if len(self._pins) > self._kept:
            del self._pins[next(iter(self._pins))]
