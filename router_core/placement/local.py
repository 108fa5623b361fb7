"""Work in hand on this host: what runs in its engines, whoever sent it, and which routers were heard.

Rules: every ticket is ended once, ending twice is harmless; nothing here is touched by health checks. It
knows nothing of rows and scores; engines' own reports arrive as plain numbers.
"""

from msgspec import Struct

from router_core import limits
from router_core.ids import Id8
from router_core.record.state import SeenRouter

_SEEN_MS = 30_000


class _Job(Struct, gc=False):
    endpoint: str
    model: str
    expected_s: float
    start_ms: int


class _Router(Struct, gc=False, kw_only=True):
    inst: int
    seq: int
    accepted: int
    at_ms: int


class LocalWork:
    """Requests in this host's endpoints (by name), from the local API and from peers alike.

    Its sums become ``ours`` and ``work_ds`` of the own record, and the live load that own decisions and the ingress
    see.
    """

    def __init__(self) -> None:
        self._seq = 0
        self._jobs: dict[str, dict[int, _Job]] = {}
        self._where: dict[int, str] = {}
        self._mean_s: dict[str, float] = {}
        self._routers: dict[Id8, _Router] = {}
        self._started: dict[tuple[str, str], int] = {}

    def start(self, endpoint: str, expected_s: float, now: int, model: str = "") -> int:
        """A request enters; ``expected_s`` is its service time alone on the engine. Returns its ticket."""
        self._seq = seq = self._seq + 1
        self._jobs.setdefault(endpoint, {})[seq] = _Job(endpoint, model, expected_s, now)
        started, served = self._started, (endpoint, model)
        started[served] = started.pop(served, 0) + 1
        if len(started) > limits.DEMAND_MODELS:
            del started[next(iter(started))]
        self._where[seq] = endpoint
        mean = self._mean_s.get(endpoint, expected_s)
        self._mean_s[endpoint] = mean + 0.1 * (expected_s - mean)
        return seq

    def finish(self, ticket: int) -> None:
        """A request left, however it ended."""
        endpoint = self._where.pop(ticket, None)
        if endpoint is not None:
            del self._jobs[endpoint][ticket]

    def in_flight(self, endpoint: str) -> int:
        return len(self._jobs.get(endpoint, ()))

    def in_model(self, endpoint: str, model: str) -> int:
        """Requests in flight that are for ``model``."""
        return sum(job.model == model for job in self._jobs.get(endpoint, {}).values())

    def started(self, endpoint: str, model: str) -> int:
        """Requests for ``model`` that have ever entered."""
        return self._started.get((endpoint, model), 0)

    def work_s(self, endpoint: str, slots: int, now: int, foreign: int = 0) -> float:
        """Outstanding service seconds, not divided by ``slots``: what is left of running requests (at least a tenth
        of each), queued ones in full, and ``foreign`` requests that are not ours at the mean of ours."""
        jobs = self._jobs.get(endpoint)
        total = 0.0
        if jobs:
            for place, job in enumerate(jobs.values()):
                expected_s = job.expected_s
                if place < slots:
                    left_s, least_s = expected_s - (now - job.start_ms) / 1000.0, 0.1 * expected_s
                    total += left_s if left_s > least_s else least_s
                else:
                    total += expected_s
        return total + foreign * self._mean_s.get(endpoint, 0.0) if foreign else total

    def accepted(self, router: Id8, inst: int, seq: int, now: int) -> None:
        """The ingress took a numbered request of a peer's router."""
        known = self._routers.pop(router, None)
        if known is None or known.inst != inst:
            known = _Router(inst=inst, seq=seq, accepted=0, at_ms=now)
        known.seq = max(known.seq, seq)
        known.accepted += 1
        known.at_ms = now
        self._routers[router] = known
        if len(self._routers) > limits.ROSTER_MAX:
            del self._routers[next(iter(self._routers))]

    def seen(self, now: int) -> tuple[SeenRouter, ...]:
        """Rows for the own record: routers active within 30 s, newest first, at most 16."""
        newest = [
            SeenRouter(router=router, inst=row.inst, seq=row.seq, accepted=row.accepted)
            for router, row in reversed(self._routers.items())
            if now - row.at_ms <= _SEEN_MS
        ]
        return tuple(newest[: limits.SEEN])
