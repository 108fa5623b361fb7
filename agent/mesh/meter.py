"""Counts what a link's connection delivers, below the WebSocket layer.

Whatever is no message (empty continuation frames, headers of endless fragments) never reaches the link's own byte
limit, so it is counted here: bytes that came in beyond those of the messages that were taken.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from router_core import limits

EXCESS_MOST: Final = limits.MIB
"""One message in the making, what the WebSocket reader queues and two reads of the transport fit well into this."""
_HEADER: Final = 14
"""Bytes of the longest WebSocket frame header."""


class Meter(asyncio.Protocol):
    """Stands before ``inner``, the protocol that reads the connection; ``exceeded`` is called once."""

    def __init__(self, inner: asyncio.Protocol, exceeded: Callable[[], None]) -> None:
        self._inner = inner
        self._exceeded: Callable[[], None] | None = exceeded
        self._excess = 0

    def taken(self, size: int) -> None:
        """A message of ``size`` bytes was read off the connection."""
        self._excess = max(0, self._excess - size - _HEADER)

    def data_received(self, data: bytes) -> None:
        self._excess += len(data)
        if self._excess <= EXCESS_MOST:
            self._inner.data_received(data)
        elif self._exceeded is not None:
            exceeded, self._exceeded = self._exceeded, None
            exceeded()

    def close(self) -> None:
        """The link is over: hold nothing of it any more."""
        self._exceeded = None

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()
