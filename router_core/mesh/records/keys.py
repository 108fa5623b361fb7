"""The Ed25519 key inside a member's certificate, found by the hash that names the member.

An Ed25519 SubjectPublicKeyInfo is one fixed prefix and 32 bytes (RFC 8410), and its SHA-256 is the member's id32:
the only place in the certificate that hashes to it is the key. Nothing else of the certificate is read.
"""

from hashlib import sha256
from typing import Final

from router_core.record.membership import Member

_SPKI_PREFIX: Final = bytes.fromhex("302a300506032b6570032100")
_SPKI_BYTES: Final = len(_SPKI_PREFIX) + 32


def key_of(member: Member) -> bytes | None:
    """The 32 raw bytes of the member's public key; None if the certificate does not hold it."""
    at = member.der.find(_SPKI_PREFIX)
    while at >= 0:
        spki = member.der[at : at + _SPKI_BYTES]
        if sha256(spki).digest() == member.id32:
            return spki[len(_SPKI_PREFIX) :]
        at = member.der.find(_SPKI_PREFIX, at + 1)
    return None
