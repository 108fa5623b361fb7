"""Which endpoints are late or full, so that others had better go elsewhere: it ranks them, and ends or refuses nothing.

An endpoint with one overdue attempt costs more, with several it only backs up others, until a byte comes from there or
nothing was overdue for a while. One that says it is full costs more until it said it would not be. Refuses to know why.
"""

from collections.abc import Mapping
from typing import Protocol

from router_core.placement.request.request import Endpoint
from router_core.policy.exchange import ExchangePolicy

COST = 0.3
"""What an overdue attempt, or having been told "full", adds to a score."""
_KEPT_MOST = 4_096


class Sent(Protocol):
    """An attempt whose request was sent."""

    @property
    def last_byte_ms(self) -> float | None:
        """When the latest byte of its answer came, boot ms; None before the first."""


class Lateness:
    """What this router saw of endpoints. ``costs`` and ``suspects`` are what choosing reads; ``sweep`` keeps them up to
    date, about once a second while anything is in them. Times are boot ms."""

    def __init__(self, policy: ExchangePolicy) -> None:
        self._policy = policy
        self._there: dict[Endpoint, dict[Sent, None]] = {}
        self._overdue: dict[Endpoint, dict[Sent, None]] = {}
        self._until: dict[Endpoint, float] = {}
        self._since: dict[Endpoint, float] = {}
        self._full_until: dict[Endpoint, float] = {}
        self._costs: dict[Endpoint, float] = {}
        self._stalled: frozenset[Endpoint] = frozenset()
        self._suspects: set[Endpoint] = set()

    def __len__(self) -> int:
        """Attempts under way."""
        return sum(map(len, self._there.values()))

    @property
    def costs(self) -> Mapping[Endpoint, float]:
        """What is added to the score of an endpoint's rows."""
        return self._costs

    @property
    def suspects(self) -> set[Endpoint]:
        """Endpoints with several overdue attempts and no byte since, and those that stopped in mid-answer."""
        return self._suspects

    @property
    def is_calm(self) -> bool:
        """Nothing that time could change."""
        return not self._costs and not self._suspects

    def under_way(self, endpoint: Endpoint) -> int:
        """Attempts of ours at ``endpoint`` now."""
        return len(self._there.get(endpoint, ()))

    def sent(self, endpoint: Endpoint, attempt: Sent) -> None:
        """A request was sent to ``endpoint``."""
        there = self._there.get(endpoint)
        if there is None:
            there = self._there[endpoint] = {}
        there[attempt] = None

    def overdue(self, endpoint: Endpoint, attempt: Sent, now: float) -> None:
        """An attempt got no byte in the time that was to be expected, or was moved for silence."""
        late = self._overdue.setdefault(endpoint, {})
        late[attempt] = None
        self._since.setdefault(endpoint, now)
        self._until[endpoint] = now + self._policy.overdue_kept_ms
        if len(late) >= self._policy.overdue_suspects:
            self._suspects.add(endpoint)
        self._price(endpoint)
        if len(self._overdue) > _KEPT_MOST:
            self._forget(next(iter(self._overdue)))

    def full(self, endpoint: Endpoint, now: float, for_ms: float | None = None) -> None:
        """The endpoint said that it has no room, for ``for_ms`` if it told."""
        most = self._policy.overdue_kept_ms
        self._full_until[endpoint] = now + min(most, self._policy.busy_ms if for_ms is None else for_ms)
        self._price(endpoint)

    def heard(self, endpoint: Endpoint) -> None:
        """A first byte came from there."""
        if endpoint in self._overdue:
            self._forget(endpoint)

    def ended(self, endpoint: Endpoint, attempt: Sent, now: float) -> None:
        """The attempt has ended; of no effect if its request was never sent."""
        there = self._there.get(endpoint)
        if there is None or attempt not in there:
            return
        del there[attempt]
        if not there:
            del self._there[endpoint]
        if endpoint in self._overdue and attempt in self._overdue[endpoint]:
            self._until[endpoint] = max(self._until[endpoint], now + self._policy.overdue_kept_ms)

    def sweep(self, now: float, stalled: frozenset[Endpoint] = frozenset()) -> None:
        """Forget what is over: a byte that came in mid-answer, or time, tells. ``stalled`` keep a client waiting in
        mid-answer for too long now."""
        gone, self._stalled = self._stalled - stalled, stalled
        self._suspects -= {
            each for each in gone if len(self._overdue.get(each, ())) < self._policy.overdue_suspects
        }
        self._suspects |= stalled
        for endpoint in list(self._overdue):
            there = self._there.get(endpoint, {})
            since = self._since[endpoint]
            heard = any((at := each.last_byte_ms) is not None and at > since for each in there)
            waits = any(each in there for each in self._overdue[endpoint])
            if heard or (not waits and self._until[endpoint] <= now):
                self._forget(endpoint)
        for endpoint in [each for each, until in self._full_until.items() if until <= now]:
            del self._full_until[endpoint]
            self._price(endpoint)

    def _forget(self, endpoint: Endpoint) -> None:
        del self._overdue[endpoint], self._until[endpoint], self._since[endpoint]
        if endpoint not in self._stalled:
            self._suspects.discard(endpoint)
        self._price(endpoint)

    def _price(self, endpoint: Endpoint) -> None:
        late = endpoint in self._overdue or endpoint in self._full_until
        if late:
            self._costs[endpoint] = COST
        else:
            self._costs.pop(endpoint, None)
