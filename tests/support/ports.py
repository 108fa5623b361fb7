"""Ports for programs that must be told one, and for tests that need one where nobody listens.

A port that was free a moment ago may be somebody else's now. Here a socket stays bound to it without listening: the
kernel gives it to nobody else, refuses who connects, and lets a server listen that shares addresses, as servers do.
"""

import socket


class HeldPort(socket.socket):
    """A TCP port of ``ip``, held until it is closed, or forgotten."""

    def __init__(self, ip: str = "127.0.0.1") -> None:
        super().__init__()
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            self.setsockopt(socket.SOL_SOCKET, option, 1)
        self.bind((ip, 0))
        self.port: int = self.getsockname()[1]

    def __del__(self) -> None:
        self.close()
