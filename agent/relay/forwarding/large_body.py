"""A request between the end of its large body and its dispatch: the body is being read, off the loop.

Counts as in hand from the start. Whatever comes of the reading, the request is answered, or its connection dropped.
"""

import asyncio
from collections.abc import Callable

from agent.relay.dialects.facts import BodyFault
from agent.relay.forwarding.body import Parcel
from agent.relay.forwarding.context import Wiring
from agent.relay.http.frontend import Answer, Client, Work
from agent.relay.upstream.attempt import Attempt
from router_core.placement.request.request import Endpoint
from router_core.record.state import Dialect


class Reading:
    """``start`` answers what was read, or begins the work that will; ``answered`` hears of an answer; ``refusal`` is what
    a client is told if the node stops meanwhile."""

    due: int | None = None
    is_held = False

    def __init__(
        self,
        wiring: Wiring,
        client: Client,
        *,
        start: Callable[[Parcel | BodyFault], Answer | Work],
        answered: Callable[[Answer], None],
        stopping: Callable[[], Answer],
    ) -> None:
        self._w = wiring
        self._client = client
        self._start = start
        self._answered = answered
        self._stopping = stopping
        self._task: asyncio.Task[None] | None = None
        self._work: Work | None = None

    def begin(self, dialect: Dialect, body: bytes | bytearray) -> "Reading":
        """Have the body read; returns itself."""
        self._w.in_hand.add(self)
        self._task = self._w.tasks.spawn(self._read(dialect, body), "read-body")
        return self

    async def _read(self, dialect: Dialect, body: bytes | bytearray) -> None:
        try:
            read = await self._w.bodies.read(dialect, body)
            self._task = None
            served = self._start(read)
        except Exception as exc:
            self._w.observer.failed("read-body", exc)
            self._client.abort()
            return
        finally:
            self._w.in_hand.discard(self)
        if isinstance(served, Answer):
            self._reply(served)
        else:
            self._work = served

    def _reply(self, answer: Answer) -> None:
        self._answered(answer)
        self._client.reply(answer)

    def _stop(self) -> bool:
        """False if the body has been read already."""
        task, self._task = self._task, None
        if task is None:
            return False
        task.cancel()
        self._w.in_hand.discard(self)
        return True

    # --- what the client does --------------------------------------------------------------------------------

    def client_gone(self) -> None:
        if not self._stop() and self._work is not None:
            self._work.client_gone()

    def client_stalled(self) -> None:
        if not self._stop() and self._work is not None:
            self._work.client_stalled()

    def pause(self) -> None:
        if self._work is not None:
            self._work.pause()

    def resume(self) -> None:
        if self._work is not None:
            self._work.resume()

    # --- what the node does ----------------------------------------------------------------------------------

    def time_passed(self) -> None:
        """It asks for no time."""

    def review(self) -> None:
        """It depends on no peer yet."""

    def cut_off(self, at: Endpoint) -> None:
        """It is nowhere yet."""

    def sent_to(self, at: Endpoint) -> tuple[Attempt, ...]:
        """Nothing was sent yet."""
        return ()

    def silent_at(self, now: int) -> Endpoint | None:
        return None

    def shut_down(self) -> None:
        if self._stop():
            self._reply(self._stopping())
