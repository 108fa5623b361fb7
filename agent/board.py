"""The one mutable cell of the shell: the current cluster view.

``publish`` swaps one reference; readers take ``current`` once and work on that snapshot. ``changed`` wakes
every waiter at the next publish. The board computes nothing and knows nobody.
"""

import asyncio

from router_core.view.cluster import ClusterView


class Board:
    """Holds the current cluster view and wakes those that wait for the next one."""

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        self._changed = asyncio.Event()

    @property
    def current(self) -> ClusterView:
        return self._view

    def publish(self, view: ClusterView) -> None:
        """Make ``view`` the current one and wake whoever waits in ``changed``."""
        self._view = view
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    async def changed(self) -> ClusterView:
        """Wait for the next publish; return the then current view."""
        await self._changed.wait()
        return self._view
