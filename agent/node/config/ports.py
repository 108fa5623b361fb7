"""Binding the daemon's ports, with refusals that say what to do."""

import errno
import os
import socket

from agent.identity.listener import bind
from agent.settings.values import Listen
from agent.store.folders import RefuseToStart

_WHY = {
    errno.EADDRINUSE: (
        "port_in_use",
        "another program, or a pairmesh that runs already, listens there: stop it, or set another {key}",
    ),
    errno.EADDRNOTAVAIL: ("address_not_here", "this host has no such address: correct {key}"),
    errno.EACCES: ("port_forbidden", "this user may not listen there: set {key} to a port above 1023"),
}
_NO_SUCH_FAMILY = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL})


def bind_all(key: str, listen: Listen) -> tuple[socket.socket, ...]:
    """Listening sockets for one setting: one, or one per address family the host has, on one port.

    Raises ``RefuseToStart``: ``port_in_use``, ``address_not_here``, ``port_forbidden``, ``cannot_listen``.
    """
    bound: list[socket.socket] = []
    port = listen.port
    try:
        for host in listen.hosts:
            try:
                bound.append(bind(host, port))
            except OSError as fault:
                if bound and fault.errno in _NO_SUCH_FAMILY:
                    continue
                raise
            port = bound[0].getsockname()[1]
    except OSError as fault:
        for sock in bound:
            sock.close()
        raise refusal(key, listen, fault) from None
    return tuple(bound)


def refusal(key: str, listen: Listen, fault: OSError) -> RefuseToStart:
    """What to say when ``listen``, the value of ``key``, cannot be bound."""
    reason, advice = _WHY.get(fault.errno or 0, ("cannot_listen", "correct {key}"))
    said = os.strerror(fault.errno) if fault.errno else type(fault).__name__
    return RefuseToStart(reason, f"cannot listen on {listen} ({said}): {advice.format(key=key)}")


def shown(sock: socket.socket) -> str:
    """``HOST:PORT`` of a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
