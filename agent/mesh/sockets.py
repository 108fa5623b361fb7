"""Options of link sockets: no delay, dead peers found by the kernel, and the address we dial from."""

import contextlib
import socket
from typing import Any, Final

from agent.mesh.addresses import IpAddress

USER_TIMEOUT_MS: Final = 10_000
KEEP_IDLE_S: Final = 5
KEEP_INTERVAL_S: Final = 2
KEEP_COUNT: Final = 3

_OPTIONS: Final = (
    (socket.IPPROTO_TCP, "TCP_NODELAY", 1),
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE", KEEP_IDLE_S),
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL", KEEP_INTERVAL_S),
    (socket.IPPROTO_TCP, "TCP_KEEPCNT", KEEP_COUNT),
    (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", USER_TIMEOUT_MS),
)


def tune(sock: Any) -> None:
    """Set the options of a link on a socket or a loop's view of one; those the platform lacks are left out."""
    for level, name, value in _OPTIONS:
        option = getattr(socket, name, None)
        if option is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(level, option, value)


def dialling_socket(family: int, kind: int, protocol: int, source: IpAddress | None) -> socket.socket:
    """A non-blocking socket to dial with, bound to ``source`` if that is of the same family."""
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        tune(sock)
        if source is not None and source.version == (6 if family == socket.AF_INET6 else 4):
            sock.bind((str(source), 0))
    except OSError:
        sock.close()
        raise
    return sock
