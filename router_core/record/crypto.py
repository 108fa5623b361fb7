"""What the core asks of Ed25519, as Protocols, and the domains that keep one signature from meaning two things.

Every signature covers ``domain + bytes``: a record can never pass for an endorsement or a removal. Keys and
signatures are raw bytes (32 and 64); who holds the private key is not known here.
"""

from typing import Final, Protocol

RECORD_DOMAIN: Final = b"pairmesh/record/v1\0"
ENDORSE_DOMAIN: Final = b"pairmesh/endorse/v1\0"
REMOVE_DOMAIN: Final = b"pairmesh/remove/v1\0"

SIGNATURE_BYTES: Final = 64


class Signer(Protocol):
    """The own private key."""

    def sign(self, message: bytes) -> bytes:
        """The 64-byte Ed25519 signature of ``message``."""


class Verifier(Protocol):
    """Anybody's public key."""

    def verify(self, key32: bytes, sig: bytes, message: bytes) -> bool:
        """True if ``sig`` is the signature of ``message`` by ``key32``; never raises on bad input."""
