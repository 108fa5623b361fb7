"""The wires between simulated hosts: ordered byte pipes that can be slow, cut one way, or left half open.

A cut pipe holds what was written, as TCP does; after 10 s without progress the writer's end breaks. Closing sends an end mark
behind the data; a host that loses power sends nothing. Nothing here knows what the bytes mean.
"""

from collections.abc import Callable
from random import Random
from typing import Final

from router_core.mesh.protocol.events import LinkId
from router_core.sim.timeline import Timeline

BUSY_BYTES: Final = 64 * 1024
USER_TIMEOUT_MS: Final = 10_000
FRAME_OVERHEAD: Final = 134

Deliver = Callable[[LinkId, bytes | None], None]


class Pipe:
    """One direction of one connection. ``None`` on the wire is the end mark."""

    def __init__(self, net: "Net", source: int, target: int, link: LinkId, deliver: Deliver) -> None:
        self._net = net
        self._ends = (source, target)
        self._link = link
        self._deliver = deliver
        self._held: list[bytes | None] = []
        self._arrives_at = 0
        self._leaves_at = 0
        self._buffered = 0
        self._held_since: int | None = None
        self.broken = False
        self.busy = False
        self.on_busy: Callable[[bool], None] = lambda busy: None
        self.on_timeout: Callable[[], None] = lambda: None

    def write(self, data: bytes | None) -> None:
        if self.broken:
            return
        if self._held or self._net.is_cut(*self._ends):
            if not self._held:
                self._net.held.append(self)
                self._held_since = self._net.timeline.now
                self._net.timeline.after(USER_TIMEOUT_MS, self._check)
            self._held.append(data)
            return
        self._transmit(data)

    def _transmit(self, data: bytes | None) -> None:
        timeline = self._net.timeline
        size = len(data or b"") + FRAME_OVERHEAD
        rate = self._net.bytes_per_s(*self._ends)
        if rate is not None:
            self._leaves_at = max(timeline.now, self._leaves_at) + size * 1_000 // rate
            self._buffered += size
            timeline.at(self._leaves_at, lambda: self._left(size))
            if not self.busy and self._buffered > BUSY_BYTES:
                self.busy = True
                self.on_busy(True)
        else:
            self._leaves_at = max(timeline.now, self._leaves_at)
        self._arrives_at = max(self._arrives_at, self._leaves_at + self._net.latency_ms(*self._ends))
        timeline.at(self._arrives_at, lambda: self._arrive(data))

    def _left(self, size: int) -> None:
        self._buffered -= size
        if self.busy and self._buffered <= BUSY_BYTES:
            self.busy = False
            self.on_busy(False)

    def _arrive(self, data: bytes | None) -> None:
        if not self.broken:
            self._deliver(self._link, data)

    def release(self) -> None:
        """The cut is healed: what was held goes on, unless the end broke meanwhile."""
        held, self._held, self._held_since = self._held, [], None
        for data in held:
            self.write(data)

    def _check(self) -> None:
        since = self._held_since
        if since is not None and self._net.timeline.now - since >= USER_TIMEOUT_MS and not self.broken:
            self.on_timeout()

    def break_off(self) -> None:
        """Nothing more arrives; what is on the way is lost."""
        self.broken = True
        self._held.clear()


class Net:
    """Reachability, latency and rate between hosts, by index."""

    def __init__(self, timeline: Timeline, rng: Random, hosts: int) -> None:
        self.timeline = timeline
        self.held: list[Pipe] = []
        self._cut: dict[tuple[int, int], int] = {}
        self._rates: dict[tuple[int, int], int] = {}
        self._latency = {(a, b): rng.randint(1, 20) for a in range(hosts) for b in range(hosts) if a != b}
        self.disturbed_at: dict[tuple[int, int], int] = {}

    def latency_ms(self, source: int, target: int) -> int:
        return self._latency.get((source, target), 5)

    def bytes_per_s(self, source: int, target: int) -> int | None:
        return self._rates.get((source, target))

    def is_cut(self, source: int, target: int) -> bool:
        return self._cut.get((source, target), 0) > 0

    def cut(self, source: int, target: int) -> None:
        self._cut[source, target] = self._cut.get((source, target), 0) + 1

    def heal(self, source: int, target: int) -> None:
        self._cut[source, target] = max(0, self._cut.get((source, target), 0) - 1)
        self._disturb(source, target)
        held, self.held = self.held, []
        for pipe in held:
            pipe.release()

    def shape(self, source: int, target: int, rate: int | None) -> None:
        """Limit the pipe to ``rate`` bytes per second, or lift the limit."""
        self._disturb(source, target)
        if rate is None:
            self._rates.pop((source, target), None)
        else:
            self._rates[source, target] = rate

    def _disturb(self, source: int, target: int) -> None:
        self.disturbed_at[source, target] = self.timeline.now

    def calm_for_ms(self, a: int, b: int) -> int:
        """How long both directions have been undisturbed; 0 while cut or shaped."""
        spans = []
        for ends in ((a, b), (b, a)):
            if self.is_cut(*ends) or ends in self._rates:
                return 0
            spans.append(self.timeline.now - self.disturbed_at.get(ends, -(10**9)))
        return min(spans)
