"""Signatures for simulations: a keyed hash instead of Ed25519, and the ledger of everything ever signed.

Whoever knows a public key could forge here; the simulated nodes do not, and the ledger would tell.
"""

from hashlib import blake2b, sha256
from typing import Final

from router_core.ids import Id32, NodeName
from router_core.record.crypto import RECORD_DOMAIN
from router_core.record.membership import Member
from router_core.record.state import Role
from router_core.sim.timeline import Timeline

_SPKI_PREFIX: Final = bytes.fromhex("302a300506032b6570032100")


class Ledger:
    """Every record ever sealed, by its signed bytes: by whom, and when."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._signed: dict[bytes, tuple[bytes, int]] = {}

    def add(self, key32: bytes, message: bytes) -> None:
        self._signed.setdefault(message, (key32, self._timeline.now))

    def is_genuine(self, key32: bytes, signed: bytes) -> bool:
        return self._signed.get(RECORD_DOMAIN + signed, (b"", 0))[0] == key32

    def sealed_at(self, signed: bytes) -> int:
        """True time of sealing; ``KeyError`` for what was never sealed."""
        return self._signed[RECORD_DOMAIN + signed][1]


class FakeCrypto:
    """One node's crypto."""

    def __init__(self, key32: bytes, ledger: Ledger) -> None:
        self._key32 = key32
        self._ledger = ledger

    def sign(self, message: bytes) -> bytes:
        self._ledger.add(self._key32, message)
        return blake2b(message, key=self._key32, digest_size=64).digest()

    def verify(self, key32: bytes, sig: bytes, message: bytes) -> bool:
        return blake2b(message, key=key32, digest_size=64).digest() == sig


def simulated_member(index: int, roles: int = Role.NODE | Role.ROUTER) -> tuple[Member, bytes]:
    """A member with a certificate reduced to its key, and that key."""
    key32 = sha256(f"key {index}".encode()).digest()
    der = _SPKI_PREFIX + key32
    name = NodeName(f"node-{index}")
    return Member(id32=Id32(sha256(der).digest()), der=der, roles=roles, admission=1, name=name), key32
