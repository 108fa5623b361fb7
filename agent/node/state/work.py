"""Work in hand, watched: whoever speaks for this node hears when a request enters or leaves an own engine."""

from collections.abc import Callable

from router_core.placement.local import LocalWork


class WatchedWork(LocalWork):
    """``LocalWork`` that tells ``changed`` the endpoint of each request that comes and goes."""

    def __init__(self) -> None:
        super().__init__()
        self.changed: Callable[[str], None] = lambda endpoint: None

    def start(self, endpoint: str, expected_s: float, now: int, model: str = "") -> int:
        ticket = super().start(endpoint, expected_s, now, model)
        self.changed(endpoint)
        return ticket

    def finish(self, ticket: int) -> None:
        endpoint = self._where.get(ticket)
        super().finish(ticket)
        if endpoint is not None:
            self.changed(endpoint)
