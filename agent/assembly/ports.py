"""The ports that others reach this node by: taken before anything is built, given back last."""

import socket
from collections.abc import Sequence

from agent.identity.member_file import addresses_of
from agent.mesh.interfaces import IpAddress
from agent.node.config.ports import bind_all, shown
from agent.settings.load import Settings
from agent.store.folders import Folders
from router_core.record.state import Address


class Ports:
    """The listening sockets of the daemon, bound before anything else starts."""

    def __init__(self, settings: Settings, folders: Folders) -> None:
        self._settings = settings
        self._folders = folders
        self._bound: dict[str, tuple[socket.socket, ...]] = {}

    def bind(self) -> None:
        """Take them; raises ``RefuseToStart``."""
        settings = self._settings
        wanted = {"mesh.listen": settings.mesh.listen, "ingress.listen": settings.ingress}
        if settings.router:
            wanted["api.listen"] = settings.api.listen
        for key, listen in wanted.items():
            self._bound[key] = bind_all(key, listen)

    def close(self) -> None:
        """Give them back."""
        for socks in self._bound.values():
            for sock in socks:
                sock.close()

    @property
    def link(self) -> tuple[socket.socket, ...]:
        """Where peers' links come in."""
        return self._bound["mesh.listen"]

    @property
    def ingress(self) -> tuple[socket.socket, ...]:
        """Where peers' requests come in."""
        return self._bound["ingress.listen"]

    @property
    def api(self) -> tuple[socket.socket, ...]:
        """Where clients come in; empty on a node that is no router."""
        return self._bound.get("api.listen", ())

    @property
    def link_port(self) -> int:
        return int(self.link[0].getsockname()[1])

    def told(self, own: Sequence[IpAddress]) -> tuple[Address, ...]:
        """Where this node can be dialled, whose addresses are ``own``."""
        return addresses_of(list(map(str, own)), self.link_port, int(self.ingress[0].getsockname()[1]))

    def shown(self) -> dict[str, str]:
        """Where this node listens, by name."""
        by_key = {key.partition(".")[0]: shown(socks[0]) for key, socks in self._bound.items()}
        return by_key | {"admin": str(self._settings.admin), "socket": str(self._folders.admin_socket)}
