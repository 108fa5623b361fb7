"""The residency machine of one host: which models its engines should hold, one change at a time.

Owns: what is known of each model here, and the plan under way. Rules: off means no actions; at most one load on the
host at any time, and so many an hour; what is in use, fresh or kept is never evicted, and nothing is unless that makes
the room that is needed; a model whose load failed waits longer each time; pressure stops what has not begun. It
knows no engines, meshes and requests: their states come in as data.

    PRESENT -> LOADING -> RESIDENT -> DRAINING -> UNLOADING -> PRESENT
    LOADING -> FAILED -> PRESENT        DRAINING -> RESIDENT
"""

from collections.abc import Iterable, Mapping
from random import Random

from msgspec import Struct

from router_core.placement.residency.choosing import Chooser, LoadChoice, is_moving, is_unused
from router_core.placement.residency.events import (
    Action,
    Allowed,
    Drain,
    EngineResidency,
    Event,
    HostLook,
    Key,
    Load,
    Looked,
    Model,
    ModelStage,
    NotifyResidency,
    Ordered,
    ResidencyNotice,
    Trigger,
    Unload,
)
from router_core.placement.residency.known import GONE, ModelHistory
from router_core.placement.residency.standing import ModelStanding, Standings, ends_ms
from router_core.placement.residency.worth import room_for
from router_core.policy.residency import ResidencyPolicy
from router_core.record.state import Level


class _Plan(Struct, kw_only=True):
    """One load under way: what must leave first, since when, and how much was free before. ``gone_ms`` is since
    when the victims, or in mid-load the target, are not in memory; ``is_seen``: the engine was seen loading."""

    target: Key
    trigger: Trigger
    victims: tuple[Key, ...]
    need_bytes: int
    free_bytes: int
    gone_ms: int | None = None
    until_ms: int | None = None
    is_seen: bool = False


class ResidencyMachine:
    """``handle`` one event at a time; ``leaving`` and ``reserved_bytes`` are what others must respect meanwhile."""

    def __init__(self, policy: ResidencyPolicy, rng: Random) -> None:
        self._policy = policy
        self._rng = rng
        self._chooser = Chooser(policy, rng)
        self._on = False
        self._known: dict[Key, ModelHistory] = {}
        self._plan: _Plan | None = None
        self._orders: set[Key] = set()
        self._tick_at: int | None = None
        self._looked_ms: int | None = None
        self._due: int | None = None

    @property
    def deadline(self) -> int | None:
        """When the next ``Looked`` is due; None while it is off and nothing is under way."""
        return self._due

    @property
    def leaving(self) -> frozenset[Key]:
        """Models that take nothing new: they are drained or unloaded by us."""
        concerned = (*self._orders, *(self._plan.victims if self._plan is not None else ()))
        return frozenset(
            key for key in concerned if self.state(key) in (ModelStage.DRAINING, ModelStage.UNLOADING)
        )

    @property
    def loading(self) -> Key | None:
        """The model whose load it ordered last, until that load has ended."""
        return self._plan.target if self._plan is not None and self._plan.until_ms is not None else None

    @property
    def reserved_bytes(self) -> int:
        """Memory that the load under way will take."""
        return self._plan.need_bytes if self._plan is not None else 0

    def state(self, key: Key) -> ModelStage:
        """Where a model stands; one never heard of is not in memory."""
        known = self._known.get(key)
        return known.state if known is not None else ModelStage.PRESENT

    def standings(self, now: int) -> Standings:
        """Every model but those that are simply not in memory, for people."""
        plan = self._plan
        target, until_ms, victims = (plan.target, plan.until_ms, plan.victims) if plan else (None, None, ())
        models = []
        for key, known in self._known.items():
            ends = until_ms if key == target else ends_ms(known, self._policy)
            if known.state is ModelStage.PRESENT and ends is None and key != target:
                continue
            models.append(
                ModelStanding(
                    key=key,
                    state=known.state,
                    for_ms=now - known.since_ms,
                    left_ms=None if ends is None else max(0, ends - now),
                    room_for=target if key in victims else None,
                )
            )
        return Standings(
            models=tuple(models), loads_left=self._chooser.loads_left(now), movable=len(self._known)
        )

    def handle(self, event: Event, now: int) -> list[Action]:
        match event:
            case Allowed():
                self._allow(event.on, now)
                return []
            case Ordered():
                return self._ordered(event, now)
            case Looked():
                return self._looked(event.picture, now)

    # --- events ----------------------------------------------------------------------------------------------

    def _allow(self, on: bool, now: int) -> None:
        if on != self._on:
            self._on = on
            self._chooser.forget_calm()
            self._due = now if on or self._plan is not None else None

    def _ordered(self, event: Ordered, now: int) -> list[Action]:
        self._orders.discard(event.key)
        known = self._known.get(event.key)
        self._due = now
        if event.ok or known is None:
            return []
        if known.state is ModelStage.UNLOADING:
            known.resume(now)
            return [NotifyResidency(code=ResidencyNotice.UNLOAD_FAILED, key=event.key), *self._give_up(now)]
        if known.state is ModelStage.LOADING:
            return self._load_ended(ResidencyNotice.LOAD_FAILED, now)
        return []

    def _looked(self, picture: HostLook, now: int) -> list[Action]:
        models = {model.key: model for model in picture.models}
        passed_ms = now - self._looked_ms if self._looked_ms is not None else 0
        self._looked_ms = now
        if not self._on and self._plan is None and not self._orders:
            self._due = None
            return []
        self._chooser.note_level(picture.level, now)
        for key, model in models.items():
            self._follow(key, model, passed_ms, now)
        for key in [key for key, known in self._known.items() if key not in models]:
            self._miss(key, now)
        actions: list[Action] = []
        if self._plan is None and self._on and not self._orders:
            choice = self._chooser.choose(picture, models, self._known, now)
            if choice is not None:
                actions += self._begin(choice, picture, models, now)
        if self._plan is not None:
            actions += self._advance(self._plan, picture, models, now)
        self._schedule(now)
        return actions

    # --- following what the engines tell -----------------------------------------------------------------------

    def _follow(self, key: Key, model: Model, passed_ms: int, now: int) -> None:
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = ModelHistory(since_ms=now, started=model.started)
        known.count(model, self._policy.share_ms, passed_ms)
        before, known.held = known.held, model.held
        if not self._is_ours(key):
            known.follow(before, self._policy, now)

    def _miss(self, key: Key, now: int) -> None:
        """The engine is away or offers the model no more; failures are remembered until they may be repeated."""
        known = self._known[key]
        known.held = EngineResidency.ABSENT
        if not self._is_ours(key) and now >= known.retry_ms:
            del self._known[key]

    def _is_ours(self, key: Key) -> bool:
        """True while the state of a model is this machine's to say."""
        if key in self._orders:
            return True
        plan = self._plan
        if plan is None:
            return False
        return key in plan.victims or (key == plan.target and plan.until_ms is not None)

    # --- carrying it out ---------------------------------------------------------------------------------------

    def _begin(
        self, choice: LoadChoice, picture: HostLook, models: Mapping[Key, Model], now: int
    ) -> list[Action]:
        need, free = models[choice.target].need_bytes, picture.free_bytes
        assert need is not None
        assert free is not None
        self._plan = _Plan(
            target=choice.target,
            trigger=choice.trigger,
            victims=choice.victims,
            need_bytes=need,
            free_bytes=free,
        )
        for key in choice.victims:
            self._known[key].enter(ModelStage.DRAINING, now)
        return [Drain(key=key) for key in choice.victims]

    def _advance(self, plan: _Plan, picture: HostLook, models: Mapping[Key, Model], now: int) -> list[Action]:
        if plan.until_ms is not None:
            return self._await_load(plan, models, now)
        if not self._is_still_wanted(plan, picture, models):
            return self._give_up(now)
        actions: list[Action] = []
        for key in plan.victims:
            known, model = self._known[key], models.get(key)
            if known.state is ModelStage.DRAINING:
                if model is None or model.held in GONE:
                    known.enter(ModelStage.UNLOADING, now)
                elif (
                    is_unused(model, self._policy.unused_ms, now)
                    and now - known.since_ms >= self._policy.watch_ms
                ):
                    known.enter(ModelStage.UNLOADING, now)
                    self._orders.add(key)
                    actions.append(Unload(key=key))
                elif now - known.since_ms >= self._policy.drain_ms:
                    return [
                        *actions,
                        NotifyResidency(code=ResidencyNotice.DRAIN_OVERDUE, key=key),
                        *self._give_up(now),
                    ]
            elif known.held not in GONE and now - known.since_ms >= self._policy.unload_ms:
                return [
                    *actions,
                    NotifyResidency(code=ResidencyNotice.UNLOAD_FAILED, key=key),
                    *self._give_up(now),
                ]
        if self._is_freed(plan, picture, models, now):
            return actions + self._load(plan, picture, models, now)
        return actions

    def _is_still_wanted(self, plan: _Plan, picture: HostLook, models: Mapping[Key, Model]) -> bool:
        target = models.get(plan.target)
        return (
            self._on
            and target is not None
            and target.held in GONE
            and target.may_load
            and not target.is_loading
            and picture.level is not None
            and picture.level < Level.HIGH
        )

    def _is_freed(self, plan: _Plan, picture: HostLook, models: Mapping[Key, Model], now: int) -> bool:
        """True once all that had to leave is gone, and its memory is visibly free or had time to become so."""
        if not plan.victims:
            return True
        if any(
            self.state(key) is not ModelStage.UNLOADING
            or self._known[key].held not in GONE
            or key in self._orders
            for key in plan.victims
        ):
            return False
        if plan.gone_ms is None:
            plan.gone_ms = now
        given = sum(models[key].held_bytes for key in plan.victims if key in models)
        freed = picture.free_bytes is not None and (
            picture.free_bytes - plan.free_bytes >= self._policy.freed_share * given > 0
        )
        return freed or now - plan.gone_ms >= self._policy.freed_ms

    def _load(self, plan: _Plan, picture: HostLook, models: Mapping[Key, Model], now: int) -> list[Action]:
        """Everything has left: load, if by now it really fits."""
        target = models[plan.target]
        told: list[Action] = [NotifyResidency(code=ResidencyNotice.UNLOADED, key=key) for key in plan.victims]
        self._release(plan.victims, now)
        plan.victims = ()
        if is_moving(models) or room_for(target, picture, (), lambda _: 0.0) is None:
            return [*told, *self._give_up(now)]
        policy = self._policy
        within_ms = policy.load_unknown_ms
        if target.load_known:
            within_ms = max(policy.load_least_ms, round(1000.0 * policy.load_factor * target.load_s))
        plan.until_ms, plan.gone_ms = now + within_ms, None
        self._known[plan.target].enter(ModelStage.LOADING, now)
        self._orders.add(plan.target)
        self._chooser.note_load(now)
        return [*told, Load(key=plan.target, within_ms=within_ms)]

    def _await_load(self, plan: _Plan, models: Mapping[Key, Model], now: int) -> list[Action]:
        """Once the engine took the order, it must be seen at it, or done, within a while; an earlier failure that it
        still tells of is none."""
        model = models.get(plan.target)
        held = model.held if model is not None else EngineResidency.ABSENT
        if plan.target not in self._orders:
            if held is EngineResidency.RESIDENT:
                return self._load_ended(ResidencyNotice.LOADED, now)
            if held not in GONE:
                plan.is_seen, plan.gone_ms = True, None
            elif plan.gone_ms is None:
                plan.gone_ms = now
            overlooked = plan.gone_ms is not None and now - plan.gone_ms >= self._policy.load_least_ms
            if overlooked or (held is EngineResidency.FAILED and plan.is_seen):
                return self._load_ended(ResidencyNotice.LOAD_FAILED, now)
        elif held not in GONE:
            plan.is_seen = True
        assert plan.until_ms is not None
        return self._load_ended(ResidencyNotice.LOAD_OVERDUE, now) if now >= plan.until_ms else []

    def _load_ended(self, code: ResidencyNotice, now: int) -> list[Action]:
        plan, self._plan = self._plan, None
        if plan is None:
            return []
        known = self._known[plan.target]
        seconds = (now - known.since_ms) / 1000.0
        if code is ResidencyNotice.LOADED:
            known.load_came(now)
        else:
            known.fail(self._policy, now)
        return [NotifyResidency(code=code, key=plan.target, trigger=plan.trigger, seconds=seconds)]

    def _give_up(self, now: int) -> list[Action]:
        """Drop the plan before its load: what drains stays, and the target is not tried again at once."""
        plan, self._plan = self._plan, None
        if plan is None:
            return []
        self._release(plan.victims, now)
        known = self._known.get(plan.target)
        if known is not None and known.state is ModelStage.PRESENT:
            known.fail(self._policy, now)
        return [NotifyResidency(code=ResidencyNotice.GIVEN_UP, key=plan.target, trigger=plan.trigger)]

    def _release(self, victims: Iterable[Key], now: int) -> None:
        """Let what was to leave be what its engine says it is, unless an order to it is unanswered."""
        for key in victims:
            known = self._known.get(key)
            if known is not None and key not in self._orders:
                known.resume(now)

    # --- time --------------------------------------------------------------------------------------------------

    def _schedule(self, now: int) -> None:
        policy = self._policy
        if self._tick_at is None or self._tick_at <= now:
            jitter = policy.tick_jitter * (2.0 * self._rng.random() - 1.0)
            self._tick_at = now + round(policy.tick_ms * (1.0 + jitter))
        due = [self._tick_at]
        if self._plan is not None or self._orders:
            due.append(now + policy.watch_ms)
        else:
            for known in self._known.values():
                if known.turn_ms is not None:
                    due.append(known.turn_ms)
                elif known.waits_since_ms is not None:
                    due.append(known.waits_since_ms + policy.replica_hold_ms)
        self._due = min(at for at in due if at > now)
