"""Endpoints that stay silent to everybody: whoever waits there for a first byte need not wait out a limit of its own.

One missed limit alone proves nothing, since a slow host may be busy with others. It is taken for silence if, since that
request was sent, nobody here heard a byte from the endpoint, and no record of its node shows that it computes or loads.
Limits of single requests, which contain the time in the queue, thus cost one request their length and not all.
Refuses to know why an endpoint is silent, and who else routes to it.
"""

from typing import Protocol

from router_core.placement.request import Endpoint
from router_core.record.state import ModelState
from router_core.view.cluster import NodeView

_BUSY_PCT = 5


class Waiter(Protocol):
    """A request that was sent to an endpoint."""

    @property
    def last_byte_ms(self) -> float | None:
        """When the latest byte of its answer came, boot ms; None before the first."""

    def give_up(self) -> None:
        """Its endpoint is silent: expect nothing from there any more."""


class Silence:
    """Requests that were sent, by endpoint, in the order of sending."""

    def __init__(self) -> None:
        self._there: dict[Endpoint, dict[Waiter, None]] = {}
        self._heard_ms: dict[Endpoint, float] = {}

    def __len__(self) -> int:
        return sum(map(len, self._there.values()))

    def sent(self, endpoint: Endpoint, waiter: Waiter) -> None:
        """A request was sent to ``endpoint``."""
        self._there.setdefault(endpoint, {})[waiter] = None

    def ended(self, endpoint: Endpoint, waiter: Waiter) -> None:
        """The attempt has ended; of no effect if its request was never sent."""
        there = self._there.get(endpoint)
        if there is None or waiter not in there:
            return
        del there[waiter]
        if not there:
            del self._there[endpoint]
            self._heard_ms.pop(endpoint, None)
        elif (heard_ms := waiter.last_byte_ms) is not None:
            self._heard_ms[endpoint] = max(heard_ms, self._heard_ms.get(endpoint, heard_ms))

    def missed(self, endpoint: Endpoint, since_ms: int, node: NodeView | None) -> None:
        """A request sent at ``since_ms`` got no byte in time. If nobody did, and the newest picture of ``node`` does not
        speak for the endpoint, all who wait there give up, the first one first."""
        there = tuple(self._there.get(endpoint, ()))
        heard_ms = [at for waiter in there if (at := waiter.last_byte_ms) is not None]
        heard_ms.append(self._heard_ms.get(endpoint, -1.0))
        if max(heard_ms) >= since_ms or _is_working(node, endpoint, since_ms):
            return
        for waiter in there:
            if waiter.last_byte_ms is None:
                waiter.give_up()


def _is_working(node: NodeView | None, endpoint: Endpoint, since_ms: int) -> bool:
    """Whether a picture taken after ``since_ms`` shows the endpoint's own work on its GPUs, or a model on its way in."""
    if node is None or node.volatile is None or node.static is None or node.taken_ms <= since_ms:
        return False
    name = endpoint.partition("/")[2]
    place = next((at for at, engine in enumerate(node.static.engines) if engine.name == name), None)
    if place is None:
        return False
    gpus = [node.volatile.gpus[at] for at in node.static.engines[place].gpus if at < len(node.volatile.gpus)]
    return any((gpu.util_pct or 0) - (gpu.external_util_pct or 0) >= _BUSY_PCT for gpu in gpus) or any(
        model.engine == place and model.state == ModelState.LOADING for model in node.volatile.residents
    )
