"""Reading of large bodies: by one thread, a few milliseconds at a time, while the loop serves everybody else.

Bodies take turns, so that a hostile one delays the others by one step and not by all of its own. The budget of a body
is CPU time; the reader hears when it is used up and finishes with what it has. Refuses to know what is read.
"""

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from agent.effects.clock import thread_us
from agent.relay.dialects import large
from agent.relay.dialects.facts import BodyFault
from agent.relay.dialects.walk import Text
from agent.relay.forwarding.body import Parcel
from router_core import limits
from router_core.record.state import Dialect

STEP_US: Final = 2_000
"""CPU time after which another body has its turn."""


class Bodies:
    """The one thread. ``cpu_us`` tells the CPU time of the thread that asks."""

    def __init__(self, cpu_us: Callable[[], int] = thread_us) -> None:
        self._cpu_us = cpu_us
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bodies")

    async def read(self, dialect: Dialect, body: Text) -> Parcel | BodyFault:
        """What is to be known of a large ``body``, or why it is ours to refuse."""
        spent = 0
        steps = large.read(dialect, body, lambda: spent >= limits.BODY_CPU * 1_000)
        loop = asyncio.get_running_loop()
        while True:
            read, used = await loop.run_in_executor(self._thread, self._step, steps)
            spent += used
            if read is not None:
                return read if isinstance(read, BodyFault) else Parcel.of(body, read)

    def _step(
        self, steps: Generator[None, None, large.Large | BodyFault]
    ) -> tuple[large.Large | BodyFault | None, int]:
        """In the thread: go on for a while; what was read if that is all, and the CPU time it took."""
        began = self._cpu_us()
        used = 0
        while used < STEP_US:
            try:
                next(steps)
            except StopIteration as ended:
                return ended.value, self._cpu_us() - began
            used = self._cpu_us() - began
        return None, used
