"""Who is at the other end of ``admin.sock``: the kernel's word, not the caller's.

Allowed are root, the daemon's own user, and members of the group ``pairmesh`` by primary or supplementary
group.
"""

import grp
import os
import socket
import struct
from collections.abc import Callable
from typing import Final

from msgspec import Struct

GROUP: Final = "pairmesh"
_SO_PEERGROUPS: Final = getattr(socket, "SO_PEERGROUPS", 59)
_UCRED: Final = struct.Struct("3i")
_GID: Final = struct.Struct("I")
_GROUPS_READ: Final = 256
"""Python reads no option of more than 1,024 bytes; of somebody in more groups only the primary one counts."""


class Peer(Struct, frozen=True, kw_only=True):
    """A connected process at the time it connected."""

    pid: int
    uid: int
    gids: frozenset[int]


ReadPeer = Callable[[socket.socket], Peer | None]


def peer_of(sock: socket.socket) -> Peer | None:
    """The peer of a unix socket, or None if the kernel does not tell."""
    try:
        pid, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    except OSError:
        return None
    return Peer(pid=pid, uid=uid, gids=frozenset({gid, *_supplementary(sock)}))


def _supplementary(sock: socket.socket) -> list[int]:
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_READ * _GID.size)
    except OSError:
        return []
    return [gid for (gid,) in _GID.iter_unpack(raw)]


class SocketAdmission(Struct, frozen=True, kw_only=True):
    """Who may use the socket. ``group`` is None where the host has no such group."""

    uid: int
    group: int | None

    @classmethod
    def here(cls) -> "SocketAdmission":
        """The rule for this process on this host."""
        try:
            group = grp.getgrnam(GROUP).gr_gid
        except KeyError:
            group = None
        return cls(uid=os.geteuid(), group=group)

    def admits(self, peer: Peer | None) -> bool:
        if peer is None:
            return False
        return peer.uid in (0, self.uid) or (self.group is not None and self.group in peer.gids)
