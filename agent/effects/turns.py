"""Whether an accept loop still goes round.

A loop that waits for a connection cannot say so while it waits; the kernel can: somebody who waits in the queue of
the listening socket while the loop takes no turn is proof that it is stuck. An idle loop is never suspected, and no
connection of our own is needed to find out. It knows nothing of what the socket serves.
"""

import select
import socket


class Turns:
    """Of one listening socket. The loop calls ``turn`` each time round, and ``hold`` before it waits for anything but
    a connection; whoever watches it calls ``is_stuck`` now and then."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._held = False
        self._waiting_since: int | None = None

    def turn(self) -> None:
        self._held = False
        self._waiting_since = None

    def hold(self) -> None:
        """The loop stays away on purpose until its next turn, as at a cap."""
        self._held = True
        self._waiting_since = None

    def is_stuck(self, now: int, after_ms: int) -> bool:
        """True if connections were seen to wait for ``after_ms`` without a turn, or if the socket is closed."""
        if self._sock.fileno() < 0:
            return True
        if self._held or not self._somebody_waits():
            self._waiting_since = None
            return False
        if self._waiting_since is None:
            self._waiting_since = now
        return now - self._waiting_since >= after_ms

    def _somebody_waits(self) -> bool:
        queue = select.poll()
        queue.register(self._sock, select.POLLIN)
        return bool(queue.poll(0))
