"""The node's Ed25519 key: minted once, read under strict conditions, never replaced silently.

Also the two Protocols that the core knows of Ed25519, made of OpenSSL.
"""

import os
import stat
from functools import lru_cache
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from agent.store.atomic import read_plain, read_with_status, write_atomic
from agent.store.folders import RefuseToStart

KEY_FILE_MOST: Final = 4_096


class NodeKey:
    """A private key, and the signer the core is given."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self.private = private
        self.key32 = private.public_key().public_bytes_raw()

    @classmethod
    def from_seed(cls, seed: bytes) -> "NodeKey":
        """The key of 32 given bytes."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    def sign(self, message: bytes) -> bytes:
        return self.private.sign(message)


class Ed25519Verifier:
    """Verifies for anybody; keeps the parsed form of the keys it met last."""

    def verify(self, key32: bytes, sig: bytes, message: bytes) -> bool:
        try:
            _public(key32).verify(sig, message)
        except (InvalidSignature, ValueError):
            return False
        return True


@lru_cache(maxsize=1_024)
def _public(key32: bytes) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(key32)


def mint_key(path: Path) -> NodeKey:
    """A new key, stored at ``path`` with mode 0600."""
    private = Ed25519PrivateKey.generate()
    pem = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_atomic(path, pem)
    return NodeKey(private)


def read_key(path: Path) -> NodeKey | None:
    """The key at ``path``, None if there is no such file.

    Raises ``RefuseToStart``: ``key_not_private`` (others may read it, or own it), ``key_unreadable`` (a link, no
    regular file, no unencrypted PKCS#8 Ed25519 key).
    """
    try:
        pem, found = read_with_status(path, KEY_FILE_MOST)
    except FileNotFoundError:
        return None
    except OSError:
        raise RefuseToStart(
            "key_unreadable", f"{path} must be a regular file, not a link: restore it from a backup"
        ) from None
    if found.st_uid != os.geteuid():
        raise RefuseToStart(
            "key_not_private",
            f"{path} belongs to uid {found.st_uid}: chown it to uid {os.geteuid()}, if nobody has copied it",
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise RefuseToStart(
            "key_not_private", f"{path} has mode {mode:04o}: run chmod 600 {path}, if nobody has copied it"
        )
    return _parse(pem, path)


def read_credential(path: Path) -> tuple[NodeKey, Path]:
    """The key in a credential that the service supervisor unsealed, and a path OpenSSL can read it at.

    The supervisor guards the file with owners and modes of its own, so only its content is judged. The path names
    an anonymous file that lives as long as this process. Raises ``RefuseToStart``: ``key_unreadable``.
    """
    try:
        pem = read_plain(path, KEY_FILE_MOST)
    except OSError:
        raise RefuseToStart("key_unreadable", f"{path} cannot be read: check the unit's credential") from None
    key = _parse(pem, path)
    fd = os.memfd_create("pairmesh-key", os.MFD_CLOEXEC)
    os.write(fd, pem)
    return key, Path(f"/proc/self/fd/{fd}")


def _parse(pem: bytes, path: Path) -> NodeKey:
    try:
        private = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError):
        private = None
    if not isinstance(private, Ed25519PrivateKey):
        raise RefuseToStart(
            "key_unreadable",
            f"{path} holds no Ed25519 key: restore it from a backup, or run with --new-identity and pair again",
        )
    return NodeKey(private)
