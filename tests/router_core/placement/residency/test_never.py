"""What the residency machine never does, whatever engines, requests and levels do: random lives of one host, and
two hosts that want the same."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from router_core.placement.residency.events import (
    Action,
    Allowed,
    Drain,
    EngineResidency,
    HostLook,
    Key,
    Load,
    Looked,
    Model,
    ModelStage,
    NotifyResidency,
    Ordered,
    ResidencyNotice,
    Unload,
)
from router_core.placement.residency.machine import ResidencyMachine
from router_core.policy.residency import ResidencyPolicy
from router_core.record.state import Level

GIB = 2**30
HOUR = 3_600_000
POLICY = ResidencyPolicy()
SIZES = (GIB, 2 * GIB, 4 * GIB, 40 * GIB)


class Life:
    """One host whose engines obey, refuse or fail by chance. Every rule is checked at every action."""

    def __init__(self, seed: int, *, memory: int = 8 * GIB, reserve: int = GIB) -> None:
        self.dice = Random(seed)
        self.now = 0
        self.machine = ResidencyMachine(POLICY, Random(seed))
        self.machine.handle(Allowed(on=True), 0)
        self.memory, self.reserve = memory, reserve
        self.models: dict[Key, Model] = {}
        self.resident_since: dict[Key, int] = {}
        self.pending: dict[Key, tuple[int, bool, bool]] = {}
        self.loads: list[int] = []
        self.failing: set[Key] = set()
        self.failed_at: dict[Key, list[int]] = {}
        self.level: Level | None = Level.NONE
        for n in range(6):
            key = ("llama" if n % 2 else "ollama", f"m{n}")
            size = self.dice.choice(SIZES)
            self.models[key] = Model(
                key=key,
                need_bytes=size,
                held_bytes=size,
                load_s=self.dice.choice((0.5, 5.0, 60.0)),
                load_known=self.dice.random() < 0.8,
                keep=n == 0,
            )
            if self.dice.random() < 0.3:
                self.failing.add(key)

    @property
    def free(self) -> int:
        held = (EngineResidency.LOADING, EngineResidency.RESIDENT, EngineResidency.LEAVING)
        return self.memory - sum(model.held_bytes for model in self.models.values() if model.held in held)

    def set(self, key: Key, **over: object) -> None:
        self.models[key] = replace(self.models[key], **over)

    def look(self) -> None:
        picture = HostLook(
            models=tuple(self.models.values()),
            free_bytes=self.free,
            reserve_bytes=self.reserve,
            level=self.level,
            is_idle=not any(model.busy for model in self.models.values()),
        )
        for action in self.machine.handle(Looked(picture=picture), self.now):
            self.obey(action)

    def obey(self, action: Action) -> None:
        match action:
            case Drain():
                self.check_eviction(action.key)
            case Unload():
                self.check_unused(action.key)
                assert action.key in self.machine.leaving
                self.set(action.key, held=EngineResidency.LEAVING)
                ok = self.dice.random() < 0.9
                self.pending[action.key] = (self.now + self.dice.randrange(10_000), ok, False)
            case Load():
                self.check_load(action)
                self.loads.append(self.now)
                self.set(action.key, held=EngineResidency.LOADING)
                ok = action.key not in self.failing
                took = round(1_000 * self.models[action.key].load_s * self.dice.uniform(0.5, 6.0))
                self.pending[action.key] = (self.now + took, ok, True)
            case NotifyResidency(code=ResidencyNotice.LOAD_FAILED | ResidencyNotice.LOAD_OVERDUE):
                self.failed_at.setdefault(action.key, []).append(self.now)

    def check_eviction(self, key: Key) -> None:
        model = self.models[key]
        assert not model.keep
        assert model.held is EngineResidency.RESIDENT
        assert self.now - self.resident_since.get(key, 0) >= POLICY.resident_least_ms
        self.check_unused(key)
        yields = sum(self.models[gone].held_bytes for gone in self.machine.leaving)
        assert self.free + yields >= self.machine.reserved_bytes + self.reserve

    def check_unused(self, key: Key) -> None:
        model = self.models[key]
        assert model.busy == 0
        assert model.used_ms is None or self.now - model.used_ms >= POLICY.unused_ms

    def check_load(self, action: Load) -> None:
        model = self.models[action.key]
        assert not any(
            each.held in (EngineResidency.LOADING, EngineResidency.LEAVING) for each in self.models.values()
        )
        assert not self.pending
        assert model.need_bytes is not None
        assert self.free >= model.need_bytes + self.reserve
        assert self.level is not None
        assert self.level < Level.HIGH
        assert len([at for at in self.loads if self.now - at < HOUR]) < POLICY.loads_per_hour
        tries = self.failed_at.get(action.key, [])
        if tries:
            assert self.now - tries[-1] >= min(POLICY.retry_most_ms, POLICY.retry_ms << (len(tries) - 1))

    def answer(self) -> None:
        """Engines finish what they were told."""
        for key, (at, ok, loads) in list(self.pending.items()):
            if at > self.now:
                continue
            del self.pending[key]
            if loads:
                self.set(key, held=EngineResidency.RESIDENT if ok else EngineResidency.ABSENT)
                self.resident_since[key] = self.now
                if ok:
                    self.failed_at.pop(key, None)
            else:
                self.set(key, held=EngineResidency.ABSENT if ok else EngineResidency.RESIDENT)
                self.resident_since[key] = self.now
            for action in self.machine.handle(Ordered(key=key, ok=ok), self.now):
                self.obey(action)

    def happen(self) -> None:
        """Something in the world outside."""
        key = self.dice.choice(list(self.models))
        model = self.models[key]
        match self.dice.randrange(6):
            case 0:
                self.set(key, rate=self.dice.choice((0.0, 0.1, 1.0, 10.0)))
            case 1:
                self.set(key, wait_s=self.dice.choice((None, 0.0, 100.0)))
            case 2 if model.held is EngineResidency.RESIDENT:
                if key in self.machine.leaving:
                    return
                self.set(key, busy=1, used_ms=self.now, started=model.started + 1)
            case 3 if model.busy:
                self.set(key, busy=0, used_ms=self.now)
            case 4:
                self.level = self.dice.choice((Level.NONE,) * 6 + (Level.ELEVATED, Level.HIGH, None))
            case 5:
                self.set(key, ahead=self.dice.randrange(4), is_loading=self.dice.random() < 0.1)

    def step(self) -> None:
        self.now += self.dice.choice((200, 1_000, 5_000, 20_000))
        self.answer()
        if self.dice.random() < 0.3:
            self.happen()
        due = self.machine.deadline
        assert due is not None
        if due <= self.now or self.dice.random() < 0.1:
            self.look()
            assert self.machine.deadline is not None
            assert self.machine.deadline > self.now


@settings(max_examples=60, deadline=None)
@given(st.integers(min_value=0, max_value=2**32))
def test_no_life_of_a_host_breaks_a_rule(seed: int) -> None:
    life = Life(seed)
    for _ in range(400):
        life.step()
    assert life.machine.leaving <= set(life.models)
    assert life.machine.reserved_bytes <= life.memory


def test_lives_are_not_idle() -> None:
    """The rules above would hold for a machine that does nothing."""
    lives = [Life(seed) for seed in range(20)]
    for life in lives:
        for _ in range(400):
            life.step()
    assert sum(len(life.loads) for life in lives) >= 20


@settings(max_examples=30, deadline=None)
@given(st.integers(min_value=0, max_value=2**32))
def test_switched_off_nothing_is_ever_asked_for(seed: int) -> None:
    life = Life(seed)
    life.machine = ResidencyMachine(POLICY, Random(seed))
    for _ in range(200):
        life.now += 5_000
        life.happen()
        picture = HostLook(models=tuple(life.models.values()), free_bytes=life.free)
        assert life.machine.handle(Looked(picture=picture), life.now) == []
    assert life.machine.deadline is None


class Pair:
    """Two hosts that own the same models; each hears of the other's residency ``late_ms`` later."""

    def __init__(self, seed: int, *, late_ms: int = 100, room: int = 1) -> None:
        self.now = 0
        self.late_ms = late_ms
        self.machines = {name: ResidencyMachine(POLICY, Random(f"{name}{seed}")) for name in ("x", "y")}
        self.held: dict[str, dict[Key, EngineResidency]] = {name: {} for name in self.machines}
        self.said: list[tuple[int, str, dict[Key, EngineResidency]]] = []
        self.ends: list[tuple[int, str, Key, EngineResidency]] = []
        self.rates: dict[Key, float] = {}
        self.wait_s: dict[Key, float] = {}
        self.served: dict[tuple[str, Key], float] = {}
        self.elsewhere: set[Key] = set()
        """What a third node holds, and cannot keep up with."""
        self.room = room
        self.log: list[tuple[int, str, Action]] = []
        for machine in self.machines.values():
            machine.handle(Allowed(on=True), 0)

    def heard(self, name: str) -> dict[Key, EngineResidency]:
        """What the other host is known to hold."""
        known = [held for at, who, held in self.said if who != name and at + self.late_ms <= self.now]
        return known[-1] if known else {}

    def move(self, name: str, key: Key, held: EngineResidency) -> None:
        self.held[name][key] = held
        self.said.append((self.now, name, dict(self.held[name])))

    def run(self, for_ms: int) -> list[tuple[int, str, Action]]:
        end, begun = self.now + for_ms, len(self.log)
        while self.now < end:
            self.now += 50
            self.serve(50)
            for at, name, key, held in list(self.ends):
                if at <= self.now:
                    self.ends.remove((at, name, key, held))
                    self.move(name, key, held)
                    self.machines[name].handle(Ordered(key=key, ok=True), self.now)
            for name, machine in self.machines.items():
                if machine.deadline is not None and machine.deadline <= self.now:
                    self.look(name, machine)
        return self.log[begun:]

    def serve(self, for_ms: int) -> None:
        """Requests go in equal parts to those who hold their model."""
        for key, rate in self.rates.items():
            holders = [name for name in self.machines if self.held[name].get(key) is EngineResidency.RESIDENT]
            for name in holders:
                self.served[name, key] = self.served.get((name, key), 0.0) + rate * for_ms / 1_000 / len(
                    holders
                )

    def look(self, name: str, machine: ResidencyMachine) -> None:
        own, other = self.held[name], self.heard(name)
        models = []
        for key, rate in self.rates.items():
            here = EngineResidency.RESIDENT in (own.get(key), other.get(key))
            wait = 0.0 if here else self.wait_s.get(key) if key in self.elsewhere else None
            models.append(
                Model(
                    key=key,
                    held=own.get(key, EngineResidency.ABSENT),
                    need_bytes=GIB,
                    held_bytes=GIB,
                    load_s=5.0,
                    load_known=True,
                    rate=rate,
                    started=int(self.served.get((name, key), 0.0)),
                    able=2,
                    ahead=int(name == "y"),
                    wait_s=wait,
                    is_loading=EngineResidency.LOADING in (own.get(key), other.get(key)),
                )
            )
        taken = sum(held is not EngineResidency.ABSENT for held in own.values())
        picture = HostLook(models=tuple(models), free_bytes=(self.room - taken) * GIB)
        for action in machine.handle(Looked(picture=picture), self.now):
            self.log.append((self.now, name, action))
            match action:
                case Load():
                    self.move(name, action.key, EngineResidency.LOADING)
                    self.ends.append((self.now + 5_000, name, action.key, EngineResidency.RESIDENT))
                case Unload():
                    self.move(name, action.key, EngineResidency.LEAVING)
                    self.ends.append((self.now + 500, name, action.key, EngineResidency.ABSENT))


A: Key = ("llama", "a")
B: Key = ("llama", "b")


def loads(log: list[tuple[int, str, Action]]) -> list[tuple[str, str]]:
    return [(name, action.key[1]) for _, name, action in log if isinstance(action, Load)]


def test_two_nodes_that_want_the_same_model_load_it_once() -> None:
    twice = 0
    for seed in range(100):
        pair = Pair(seed)
        pair.rates = {A: 1.0}
        begun = len(loads(pair.run(100_000)))
        assert begun >= 1
        twice += begun > 1
    assert twice <= 3, "only looks that are closer to each other than the news may both load"


def test_two_nodes_that_see_requests_wait_elsewhere_load_one_replica() -> None:
    twice = 0
    for seed in range(100):
        pair = Pair(seed)
        pair.rates = {A: 1.0}
        pair.elsewhere, pair.wait_s = {A}, {A: 60.0}
        log = loads(pair.run(60_000))
        assert log
        twice += len({name for name, _ in log}) > 1
    assert twice <= 3


def test_room_for_one_on_each_of_two_nodes_is_shared_without_ping_pong() -> None:
    for seed in range(5):
        pair = Pair(seed)
        pair.rates = {A: 1.0, B: 1.2}
        first = loads(pair.run(10 * 60_000))
        assert {model for _, model in first} == {"a", "b"}, seed
        assert len(first) <= 3
        assert pair.run(HOUR) == [], "what is in place stays, however often it is looked at"


def test_rates_that_swing_move_nothing_until_they_differ_by_half() -> None:
    pair = Pair(1)
    pair.held["y"] = {A: EngineResidency.ABSENT}
    del pair.machines["y"]
    pair.rates = {A: 1.0, B: 1.0}
    pair.run(5 * 60_000)
    for turn in range(20):
        pair.rates = {A: 1.0, B: 1.3} if turn % 2 else {A: 1.3, B: 1.0}
        assert not loads(pair.run(3 * 60_000))


def test_a_model_is_in_no_state_that_its_engine_contradicts_for_long() -> None:
    life = Life(5)
    for _ in range(2_000):
        life.step()
    life.level = None
    for _ in range(80):
        life.now += 20_000
        life.answer()
        life.look()
    for key, model in life.models.items():
        resident = model.held is EngineResidency.RESIDENT
        assert (life.machine.state(key) is ModelStage.RESIDENT) is resident
