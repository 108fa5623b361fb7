"""Which load to begin, and when: the worthiest that should be made, in its turn, at a pace.

Several nodes may see the same need, so a load waits for a turn of its own: longer where others come first, and never
exactly as long. It knows nothing of how a load is carried out.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from random import Random

from msgspec import Struct

from router_core.placement.residency.events import EngineResidency, HostLook, Key, Model, ModelStage, Trigger
from router_core.placement.residency.known import ModelHistory
from router_core.placement.residency.worth import room_for, share, worth
from router_core.policy.residency import ResidencyPolicy
from router_core.record.state import Level

_HOUR_MS = 3_600_000


def is_moving(models: Mapping[Key, Model]) -> bool:
    """True while an engine loads or unloads, whoever ordered it."""
    return any(model.held in (EngineResidency.LOADING, EngineResidency.LEAVING) for model in models.values())


def is_unused(model: Model, unused_ms: int, now: int) -> bool:
    """True if nobody uses the model, and nobody did for a while; an engine that is not watched may be in use."""
    return (
        model.is_watched and model.busy == 0 and (model.used_ms is None or now - model.used_ms >= unused_ms)
    )


class LoadChoice(Struct, frozen=True, gc=False, kw_only=True):
    """One load to make, and what has to leave for it."""

    target: Key
    trigger: Trigger
    victims: tuple[Key, ...]


class Chooser:
    """Keeps the pace: the loads of the last hour, and since when the host is calm."""

    def __init__(self, policy: ResidencyPolicy, rng: Random) -> None:
        self._policy = policy
        self._rng = rng
        self._loads: deque[int] = deque()
        self._calm_since: int | None = None

    def forget_calm(self) -> None:
        """Nobody looked for a while."""
        self._calm_since = None

    def note_level(self, level: int | None, now: int) -> None:
        """The host's pressure at this look; an unknown one is no calm."""
        if level != Level.NONE:
            self._calm_since = None
        elif self._calm_since is None:
            self._calm_since = now

    def note_load(self, now: int) -> None:
        """A load was ordered."""
        self._loads.append(now)

    def choose(
        self, picture: HostLook, models: Mapping[Key, Model], known: Mapping[Key, ModelHistory], now: int
    ) -> LoadChoice | None:
        """The worthiest load whose turn has come, if any. Sets the turns of those whose turn comes."""
        policy = self._policy
        settled = self.loads_left(now) > 0 and not is_moving(models)
        evictable = [model for key, model in models.items() if self._is_evictable(model, known[key], now)]
        worths = {key: self._worth(model, known[key]) for key, model in models.items()}
        best: LoadChoice | None = None
        for key, model in models.items():
            its = known[key]
            trigger = self._trigger(model, its, picture, now)
            room = self._room(model, picture, evictable, worths) if settled and trigger is not None else None
            if trigger is None or room is None:
                its.turn_ms = None
                continue
            if its.turn_ms is None:
                ahead = min(model.ahead, policy.turns_most)
                its.turn_ms = now + round(policy.turn_ms * (ahead + self._rng.random()))
            if its.turn_ms <= now and (best is None or worths[key] > worths[best.target]):
                victims = tuple(model.key for model in room)
                best = LoadChoice(target=key, trigger=trigger, victims=victims)
        return best

    def loads_left(self, now: int) -> int:
        """How many loads may still begin within the pace."""
        while self._loads and now - self._loads[0] >= _HOUR_MS:
            self._loads.popleft()
        return max(0, self._policy.loads_per_hour - len(self._loads))

    def _trigger(self, model: Model, known: ModelHistory, picture: HostLook, now: int) -> Trigger | None:
        """Why ``model`` should be loaded here now, if it should."""
        policy = self._policy
        slow = model.wait_s is not None and model.wait_s > model.load_s + policy.replica_margin_s
        if not slow:
            known.waits_since_ms = None
        elif known.waits_since_ms is None:
            known.waits_since_ms = now
        if (
            known.state is not ModelStage.PRESENT
            or now < known.retry_ms
            or model.is_loading
            or not model.may_load
            or model.rate <= 0.0
            or self._calm_since is None
        ):
            return None
        if model.wait_s is None:
            return Trigger.PRELOAD if now - self._calm_since >= policy.calm_ms else None
        held_on = known.waits_since_ms is not None and now - known.waits_since_ms >= policy.replica_hold_ms
        return Trigger.REPLICA if held_on and picture.is_idle else None

    def _room(
        self, target: Model, picture: HostLook, evictable: Sequence[Model], worths: Mapping[Key, float]
    ) -> tuple[Model, ...] | None:
        """What to evict for ``target``; None if it does not fit, or is not worth what would go."""
        room = room_for(target, picture, evictable, worths.__getitem__)
        if not room:
            return room
        lost = sum(worths[model.key] for model in room)
        return room if worths[target.key] > self._policy.hysteresis * lost else None

    def _is_evictable(self, model: Model, known: ModelHistory, now: int) -> bool:
        policy = self._policy
        return (
            known.state is ModelStage.RESIDENT
            and not model.keep
            and now - known.since_ms >= policy.resident_least_ms
            and is_unused(model, policy.unused_ms, now)
        )

    def _worth(self, model: Model, known: ModelHistory) -> float:
        """A resident is worth what it was used; a model that is not here could get an equal part."""
        if known.state is ModelStage.PRESENT:
            return worth(model, 1.0 / max(1, model.able))
        return worth(model, share(known.served, known.asked, model.able, self._policy.share_weight))
