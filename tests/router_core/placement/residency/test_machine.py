"""The residency machine, step by step: what it does with a picture, and what it never does."""

from itertools import pairwise
from random import Random
from typing import Any

import pytest
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
    Trigger,
    Unload,
)
from router_core.placement.residency.machine import ResidencyMachine
from router_core.placement.residency.worth import worth
from router_core.policy.residency import ResidencyPolicy
from router_core.record.state import Level

GIB = 2**30
A: Key = ("llama", "a")
B: Key = ("llama", "b")
C: Key = ("ollama", "c")
POLICY = ResidencyPolicy()
MINUTE = 60_000


def a_model(key: Key, **over: Any) -> Model:
    """A model of 4 GiB that takes 10 s to load and is asked for once a second."""
    fields: dict[str, Any] = {
        "key": key,
        "need_bytes": 4 * GIB,
        "held_bytes": 4 * GIB,
        "load_s": 10.0,
        "load_known": True,
        "rate": 1.0,
    }
    return Model(**(fields | over))


class Host:
    """One machine, its clock, and the memory that its engines take."""

    def __init__(
        self, *models: Model, free: int = 8 * GIB, policy: ResidencyPolicy = POLICY, on: bool = True
    ) -> None:
        self.now = 1_000_000
        self.machine = ResidencyMachine(policy, Random(1))
        self.models = {model.key: model for model in models}
        self.fields: dict[str, Any] = {"reserve_bytes": GIB}
        self.free = free
        self.log: list[Action] = []
        self.serves: set[Key] = set()
        """Models all of whose requests come here."""
        if on:
            self.machine.handle(Allowed(on=True), self.now)

    def set(self, key: Key, **over: Any) -> None:
        self.models[key] = replace(self.models[key], **over)

    def look(self) -> list[Action]:
        for key in self.serves:
            self.set(key, started=round(self.models[key].rate * (self.now - 1_000_000) / 1_000))
        picture = HostLook(models=tuple(self.models.values()), free_bytes=self.free, **self.fields)
        return self._note(self.machine.handle(Looked(picture=picture), self.now))

    def ordered(self, key: Key, ok: bool = True) -> list[Action]:
        return self._note(self.machine.handle(Ordered(key=key, ok=ok), self.now))

    def run(self, for_ms: int) -> list[Action]:
        """Look whenever it is due; everything that was asked for meanwhile."""
        end, said = self.now + for_ms, len(self.log)
        while (due := self.machine.deadline) is not None and due <= end:
            assert due > self.now or due == self.now, "a deadline never lies in the past"
            self.now = max(self.now, due)
            self.look()
        self.now = end
        return self.log[said:]

    def until(self, kind: type[Action], within_ms: int = 10 * MINUTE) -> Any:
        """Run until the machine asks for ``kind``, and stop there."""
        end, said = self.now + within_ms, len(self.log)
        while (due := self.machine.deadline) is not None and due <= end:
            self.now = max(self.now, due)
            self.look()
            for action in self.log[said:]:
                if isinstance(action, kind):
                    return action
        raise AssertionError(f"no {kind.__name__}: {self.log[said:]}")

    def _note(self, actions: list[Action]) -> list[Action]:
        self.log += actions
        return actions

    def states(self) -> dict[Key, ModelStage]:
        return {key: self.machine.state(key) for key in self.models}


def warmed(host: Host) -> None:
    """Two minutes pass in which nothing changes."""
    assert not [action for action in host.run(2 * MINUTE) if not isinstance(action, NotifyResidency)]


def a_full_host(**over: Any) -> Host:
    """``a`` is resident and little asked for, ``b`` is asked for and nowhere warm; there is room for one."""
    resident = a_model(A, held=EngineResidency.RESIDENT, rate=0.1, wait_s=0.0)
    return Host(resident, a_model(B, **over), free=2 * GIB)


def test_off_asks_for_nothing_and_wants_no_look() -> None:
    host = Host(a_model(B), on=False)
    assert host.machine.deadline is None
    for _ in range(100):
        host.now += 15_000
        assert host.look() == []
    assert host.machine.deadline is None


def test_a_model_that_is_asked_for_and_warm_nowhere_is_loaded_once_all_has_been_calm_for_a_minute() -> None:
    host = Host(a_model(B))
    began = host.now
    load = host.until(Load)
    assert load == Load(key=B, within_ms=40_000)
    assert MINUTE <= host.now - began <= MINUTE + 18_000 + POLICY.turn_ms + 18_000
    assert host.states() == {B: ModelStage.LOADING}
    assert host.machine.reserved_bytes == 4 * GIB
    host.ordered(B)
    host.now += 9_000
    host.set(B, held=EngineResidency.RESIDENT, wait_s=0.0)
    (told,) = host.look()
    assert told == NotifyResidency(code=ResidencyNotice.LOADED, key=B, trigger=Trigger.PRELOAD, seconds=9.0)
    assert (host.states(), host.machine.reserved_bytes) == ({B: ModelStage.RESIDENT}, 0)


def test_a_model_that_somebody_serves_without_waiting_is_not_loaded() -> None:
    host = Host(a_model(B, wait_s=1.0))
    assert host.run(30 * MINUTE) == []


def test_a_model_nobody_asks_for_is_not_loaded() -> None:
    host = Host(a_model(B, rate=0.0))
    assert host.run(30 * MINUTE) == []


def test_what_makes_room_is_drained_then_unloaded_then_gone_before_anything_is_loaded() -> None:
    host = a_full_host()
    assert host.until(Drain) == Drain(key=A)
    assert host.machine.leaving == {A}
    assert host.machine.reserved_bytes == 4 * GIB, "nobody else is to count on what becomes free"
    assert host.states()[A] is ModelStage.DRAINING
    host.set(A, busy=1)
    assert host.run(30_000) == [], "a request of ours is still in it"
    host.set(A, busy=0, used_ms=host.now)
    assert host.until(Unload) == Unload(key=A)
    assert host.states()[A] is ModelStage.UNLOADING
    host.ordered(A)
    assert host.run(3_000) == [], "it is still in memory"
    host.set(A, held=EngineResidency.ABSENT)
    host.free = 6 * GIB
    told, load = host.run(1_000)
    assert (told, load) == (
        NotifyResidency(code=ResidencyNotice.UNLOADED, key=A),
        Load(key=B, within_ms=40_000),
    )
    assert host.machine.leaving == frozenset()
    assert host.states() == {A: ModelStage.PRESENT, B: ModelStage.LOADING}


def test_memory_that_does_not_show_up_as_free_is_waited_for_and_then_not_loaded_into() -> None:
    host = a_full_host()
    host.until(Unload)
    host.ordered(A)
    host.set(A, held=EngineResidency.ABSENT)
    unloaded, given_up = host.run(POLICY.freed_ms + 2_000)
    assert unloaded == NotifyResidency(code=ResidencyNotice.UNLOADED, key=A)
    assert given_up == NotifyResidency(code=ResidencyNotice.GIVEN_UP, key=B, trigger=Trigger.PRELOAD)
    assert host.states()[B] is ModelStage.FAILED


def test_memory_that_shows_up_late_is_loaded_into_once_most_of_it_is_free() -> None:
    host = a_full_host()
    host.until(Unload)
    host.ordered(A)
    host.set(A, held=EngineResidency.ABSENT)
    host.free = 2 * GIB + 3 * GIB + GIB // 8
    assert host.run(3_000) == [], "it would fit, but less than 80 % of what left is free yet"
    host.free += GIB // 8
    unloaded, load = host.run(1_000)
    assert (unloaded, load) == (
        NotifyResidency(code=ResidencyNotice.UNLOADED, key=A),
        Load(key=B, within_ms=40_000),
    )


def test_a_load_that_something_else_began_meanwhile_is_not_joined_by_another() -> None:
    host = a_full_host()
    host.models[C] = a_model(C, rate=0.0)
    host.until(Unload)
    host.ordered(A)
    host.set(A, held=EngineResidency.ABSENT)
    host.set(C, held=EngineResidency.LOADING)
    host.free = 100 * GIB
    told = host.run(2_000)
    assert [action.code for action in told if isinstance(action, NotifyResidency)] == [
        ResidencyNotice.UNLOADED,
        ResidencyNotice.GIVEN_UP,
    ]
    assert not any(isinstance(action, Load) for action in told)


def test_keeping_a_model_is_worth_the_seconds_of_loading_it_saves_per_second_and_gib() -> None:
    assert worth(a_model(A), 1.0) == 1.0 * 10.0 / 4
    assert worth(a_model(A), 0.5) == worth(a_model(A, rate=0.5), 1.0) == 1.25
    assert worth(a_model(A, load_s=20.0), 1.0) == worth(a_model(A, held_bytes=2 * GIB), 1.0) == 5.0


@pytest.mark.parametrize("less", [{"load_s": 2.0}, {"held_bytes": 6 * GIB}, {"rate": 0.01}])
def test_the_resident_that_is_worth_least_makes_room(less: dict[str, Any]) -> None:
    for first, second in (({}, less), (less, {})):
        host = a_full_host()
        host.set(A, **first)
        other = ("llama", "d")
        host.models[other] = a_model(
            other, held=EngineResidency.RESIDENT, wait_s=0.0, **({"rate": 0.1} | second)
        )
        assert host.until(Drain) == Drain(key=A if first else other)


@pytest.mark.parametrize(("rates", "first"), [((1.0, 5.0), C), ((5.0, 1.0), B)])
def test_of_two_whose_turn_has_come_the_worthier_is_loaded(rates: tuple[float, float], first: Key) -> None:
    host = Host(a_model(B, rate=rates[0]), a_model(C, rate=rates[1]), free=6 * GIB)
    while len(stands(host)) < 2:
        assert host.run(500) == []
    host.now += 4 * POLICY.turn_ms
    (load,) = host.look()
    assert load == Load(key=first, within_ms=40_000)


def test_no_more_is_evicted_than_it_takes() -> None:
    host = a_full_host()
    small = ("llama", "small")
    host.models[small] = a_model(small, held=EngineResidency.RESIDENT, held_bytes=GIB, rate=0.001, wait_s=0.0)
    assert host.until(Drain) == Drain(key=A), (
        "what is least worth would not do, and with the other is not needed"
    )
    assert host.machine.leaving == {A}


def test_for_a_model_that_may_not_be_loaded_nothing_makes_room() -> None:
    assert a_full_host(may_load=False).run(20 * MINUTE) == []


def test_nothing_is_evicted_for_less_than_half_as_much_again() -> None:
    def loads(rate: float) -> bool:
        host = Host(
            a_model(A, held=EngineResidency.RESIDENT, wait_s=0.0), a_model(B, rate=rate), free=2 * GIB
        )
        host.serves.add(A)
        return any(isinstance(action, Drain) for action in host.run(10 * MINUTE))

    assert not loads(1.4)
    assert loads(1.6)


def test_a_resident_is_worth_only_its_share_of_the_requests() -> None:
    host = Host(
        a_model(A, held=EngineResidency.RESIDENT, rate=10.0, wait_s=0.0, able=2),
        a_model(B, rate=1.0),
        free=2 * GIB,
    )
    assert not any(isinstance(action, Drain) for action in host.run(30_000))
    assert host.until(Drain, 30 * MINUTE) == Drain(key=A), "another node answers all the requests for it"


def test_a_resident_that_is_used_here_keeps_its_worth() -> None:
    host = Host(
        a_model(A, held=EngineResidency.RESIDENT, rate=10.0, wait_s=0.0, able=2),
        a_model(B, rate=1.0),
        free=2 * GIB,
    )
    host.serves.add(A)
    assert host.run(60 * MINUTE) == []


def test_models_kept_in_use_or_just_loaded_are_never_evicted() -> None:
    for over in ({"keep": True}, {"busy": 1}, {"is_watched": False}):
        host = a_full_host()
        host.set(A, **over)
        assert host.run(20 * MINUTE) == [], over
    host = a_full_host()
    host.set(A, held=EngineResidency.ABSENT)
    host.set(B, rate=0.0)
    warmed(host)
    host.set(A, held=EngineResidency.RESIDENT)
    host.set(B, rate=1.0)
    host.look()
    arrived = host.now
    host.until(Drain)
    assert host.now - arrived >= POLICY.resident_least_ms


def test_a_model_that_others_used_within_five_seconds_is_not_evicted() -> None:
    host = a_full_host()
    for _ in range(200):
        host.set(A, used_ms=host.now)
        assert not any(isinstance(action, Drain) for action in host.run(4_000))


def test_nothing_is_evicted_where_that_would_not_make_enough_room() -> None:
    host = a_full_host(need_bytes=12 * GIB)
    assert host.run(20 * MINUTE) == []
    host = a_full_host(need_bytes=None)
    assert host.run(20 * MINUTE) == []
    host = a_full_host()
    host.free = None  # type: ignore[assignment]
    assert host.run(20 * MINUTE) == []


def test_an_engine_that_holds_one_model_must_lose_it_first_however_much_is_free() -> None:
    host = Host(a_model(A, held=EngineResidency.RESIDENT, rate=0.1, wait_s=0.0), a_model(B), free=100 * GIB)
    host.fields["places"] = {"llama": 1}
    assert host.until(Drain) == Drain(key=A)
    other = Host(a_model(C, held=EngineResidency.RESIDENT, rate=0.1, wait_s=0.0), a_model(B), free=100 * GIB)
    other.fields["places"] = {"llama": 1}
    assert other.until(Load) == Load(key=B, within_ms=40_000)


def test_a_drain_that_does_not_end_is_given_up_and_the_model_stays() -> None:
    host = a_full_host()
    host.until(Drain)
    host.set(A, busy=1)
    told = host.run(POLICY.drain_ms + 2_000)
    assert [action.code for action in told if isinstance(action, NotifyResidency)] == [
        ResidencyNotice.DRAIN_OVERDUE,
        ResidencyNotice.GIVEN_UP,
    ]
    assert host.states() == {A: ModelStage.RESIDENT, B: ModelStage.FAILED}
    assert host.machine.leaving == frozenset()


def test_an_engine_that_refuses_to_unload_keeps_its_model_and_ends_the_plan() -> None:
    host = a_full_host()
    host.until(Unload)
    assert host.machine.leaving == {A}
    told = host.ordered(A, ok=False)
    assert [action.code for action in told if isinstance(action, NotifyResidency)] == [
        ResidencyNotice.UNLOAD_FAILED,
        ResidencyNotice.GIVEN_UP,
    ]
    assert host.states() == {A: ModelStage.RESIDENT, B: ModelStage.FAILED}


@pytest.mark.lesson("mudler/LocalAI#9583: a load repeated every 30 s")
def test_a_load_that_fails_again_and_again_is_tried_ever_less() -> None:
    """mudler/LocalAI#9583: a model that cannot be loaded was loaded every 30 s."""
    host = Host(a_model(B))
    tries = []
    for _ in range(6):
        host.until(Load, 4 * 60 * MINUTE)
        tries.append(host.now)
        host.now += 1_000
        (told,) = host.ordered(B, ok=False)
        assert isinstance(told, NotifyResidency)
        assert told.code is ResidencyNotice.LOAD_FAILED
        assert host.states() == {B: ModelStage.FAILED}
    waits = [later - earlier for earlier, later in pairwise(tries)]
    assert all(wait >= (MINUTE << n) for n, wait in enumerate(waits))


def test_a_model_that_never_loads_is_tried_once_an_hour_in_the_end() -> None:
    host = Host(a_model(B))
    for _ in range(9):
        host.until(Load, 4 * 60 * MINUTE)
        host.ordered(B, ok=False)
    assert stands(host) == {B: (ModelStage.FAILED, 60 * MINUTE, None)}


def test_a_load_that_came_makes_earlier_failures_forgotten() -> None:
    host = Host(a_model(B))
    for _ in range(3):
        host.until(Load, 4 * 60 * MINUTE)
        host.ordered(B, ok=False)
    host.set(B, held=EngineResidency.RESIDENT, wait_s=0.0)
    host.look()
    assert host.states() == {B: ModelStage.RESIDENT}
    host.set(B, held=EngineResidency.ABSENT, wait_s=None)
    host.until(Load, 4 * 60 * MINUTE)
    host.ordered(B, ok=False)
    assert stands(host) == {B: (ModelStage.FAILED, POLICY.retry_ms, None)}


def test_a_failure_that_the_engine_itself_tells_counts_as_one() -> None:
    host = Host(a_model(B))
    host.until(Load)
    host.ordered(B)
    host.set(B, held=EngineResidency.LOADING)
    host.look()
    host.set(B, held=EngineResidency.FAILED)
    (told,) = host.run(1_000)
    assert isinstance(told, NotifyResidency)
    assert told.code is ResidencyNotice.LOAD_FAILED
    assert host.run(MINUTE - 2_000) == []
    assert host.until(Load).key == B
    host.ordered(B)
    assert host.run(2_000) == [], "a failure of long ago is no verdict"
    (told,) = host.run(5_000)
    assert isinstance(told, NotifyResidency)
    assert told.code is ResidencyNotice.LOAD_FAILED


def test_a_load_that_takes_four_times_as_long_as_usual_has_failed() -> None:
    host = Host(a_model(B))
    host.until(Load)
    host.ordered(B)
    host.set(B, held=EngineResidency.LOADING)
    told = host.run(41_000)
    assert [action.code for action in told if isinstance(action, NotifyResidency)] == [
        ResidencyNotice.LOAD_OVERDUE
    ]
    unknown = Host(a_model(B, load_known=False))
    assert unknown.until(Load).within_ms == POLICY.load_unknown_ms


def test_at_most_six_loads_are_begun_in_an_hour() -> None:
    models = [a_model(("llama", f"m{n}"), need_bytes=GIB) for n in range(12)]
    host = Host(*models, free=100 * GIB)
    begun = []
    while host.now < 1_000_000 + 100 * MINUTE:
        host.run(1_000)
        for key, model in host.models.items():
            if host.machine.state(key) is ModelStage.LOADING and model.held is EngineResidency.ABSENT:
                begun.append(host.now)
                host.set(key, held=EngineResidency.RESIDENT, wait_s=0.0)
                host.ordered(key)
    assert len([at for at in begun if at - begun[0] < 60 * MINUTE - 1_000]) == 6
    assert len(begun) > 6


def test_nothing_begins_while_anything_is_being_loaded_here() -> None:
    host = Host(a_model(A, held=EngineResidency.LOADING), a_model(B))
    assert host.run(20 * MINUTE) == []


def test_pressure_stops_what_has_not_begun_and_the_calm_counts_anew() -> None:
    host = a_full_host()
    host.until(Drain)
    host.fields["level"] = Level.HIGH
    assert [action.code for action in host.look() if isinstance(action, NotifyResidency)] == [
        ResidencyNotice.GIVEN_UP
    ]
    assert host.states()[A] is ModelStage.RESIDENT
    host.fields["level"] = Level.ELEVATED
    assert host.run(20 * MINUTE) == []
    host.fields["level"] = Level.NONE
    calm = host.now
    host.until(Drain)
    assert host.now - calm >= POLICY.calm_ms


def test_a_level_nobody_knows_is_not_calm() -> None:
    host = Host(a_model(B))
    host.fields["level"] = None
    assert host.run(20 * MINUTE) == []


def test_a_model_under_load_elsewhere_is_left_to_them() -> None:
    host = Host(a_model(B, is_loading=True))
    assert host.run(20 * MINUTE) == []


def test_those_who_load_sooner_go_first() -> None:
    def began(ahead: int) -> int:
        host = Host(a_model(B, ahead=ahead))
        host.until(Load)
        return host.now - 1_000_000

    assert began(0) < began(1) < began(2)
    assert began(100) <= began(0) + POLICY.turn_ms * (POLICY.turns_most + 1) + POLICY.tick_ms


def test_a_second_replica_comes_where_waiting_costs_more_than_loading() -> None:
    host = Host(a_model(B, wait_s=11.9))
    assert host.run(20 * MINUTE) == [], "it waits no longer than a load and two seconds"
    host.set(B, wait_s=12.1)
    host.look()
    began = host.now
    host.until(Load)
    assert POLICY.replica_hold_ms <= host.now - began <= POLICY.replica_hold_ms + POLICY.turn_ms + 1_000
    host.ordered(B)
    host.set(B, held=EngineResidency.RESIDENT)
    (told,) = host.run(1_000)
    assert isinstance(told, NotifyResidency)
    assert told.trigger is Trigger.REPLICA


def test_a_wait_that_passes_within_ten_seconds_makes_no_replica() -> None:
    host = Host(a_model(B, wait_s=60.0))
    for _ in range(50):
        host.set(B, wait_s=60.0)
        host.look()
        host.now += 9_000
        host.set(B, wait_s=0.0)
        host.look()
        assert host.run(20_000) == []


def test_a_busy_node_makes_no_replica() -> None:
    host = Host(a_model(B, wait_s=60.0))
    host.fields["is_idle"] = False
    assert host.run(20 * MINUTE) == []


def test_switched_off_in_mid_drain_all_stays_as_it_is() -> None:
    host = a_full_host()
    host.until(Drain)
    host.machine.handle(Allowed(on=False), host.now)
    (told,) = host.run(1_000)
    assert isinstance(told, NotifyResidency)
    assert told.code is ResidencyNotice.GIVEN_UP
    assert host.states()[A] is ModelStage.RESIDENT
    assert host.machine.leaving == frozenset()
    assert host.run(20 * MINUTE) == []


def test_an_engine_that_goes_away_in_mid_load_is_a_failure_and_no_crash() -> None:
    host = Host(a_model(B))
    host.until(Load)
    gone = host.models.pop(B)
    assert host.run(5_000) == []
    host.ordered(B, ok=False)
    assert host.machine.state(B) is ModelStage.FAILED
    host.models[B] = gone
    assert host.run(30_000) == []
    assert host.until(Load).key == B


def test_an_engine_that_took_the_order_and_shows_nothing_of_it_has_failed() -> None:
    for seen in (False, True):
        host = Host(a_model(B, load_known=False))
        host.until(Load)
        host.ordered(B)
        if seen:
            host.set(B, held=EngineResidency.LOADING)
            assert host.run(60_000) == []
        lost = host.now
        host.models.pop(B)
        assert host.until(NotifyResidency).code is ResidencyNotice.LOAD_FAILED
        assert POLICY.load_least_ms <= host.now - lost <= POLICY.load_least_ms + 2 * POLICY.watch_ms
        assert host.machine.reserved_bytes == 0


def test_a_load_by_a_request_is_followed_and_ends_the_plan_for_the_same_model() -> None:
    host = a_full_host()
    host.until(Drain)
    host.set(B, held=EngineResidency.LOADING)
    host.run(1_000)
    assert host.states() == {A: ModelStage.RESIDENT, B: ModelStage.LOADING}
    host.set(B, held=EngineResidency.RESIDENT)
    host.look()
    assert host.states() == {A: ModelStage.RESIDENT, B: ModelStage.RESIDENT}


# --- what people are told -------------------------------------------------------------------------------------


def stands(host: Host) -> dict[Key, tuple[ModelStage, int | None, Key | None]]:
    return {
        each.key: (each.state, each.left_ms, each.room_for)
        for each in host.machine.standings(host.now).models
    }


def test_a_swap_is_told_step_by_step() -> None:
    host = a_full_host()
    assert host.machine.standings(host.now).loads_left == POLICY.loads_per_hour
    host.look()
    assert stands(host) == {A: (ModelStage.RESIDENT, POLICY.resident_least_ms, None)}
    host.run(45_000)
    assert stands(host) == {A: (ModelStage.RESIDENT, 15_000, None)}
    host.until(Drain)
    assert stands(host) == {A: (ModelStage.DRAINING, POLICY.drain_ms, B), B: (ModelStage.PRESENT, None, None)}
    host.until(Unload)
    host.ordered(A)
    assert stands(host) == {A: (ModelStage.UNLOADING, None, B), B: (ModelStage.PRESENT, None, None)}
    host.set(A, held=EngineResidency.ABSENT)
    host.free = 6 * GIB
    host.until(Load)
    assert stands(host) == {B: (ModelStage.LOADING, 40_000, None)}
    assert host.machine.standings(host.now).loads_left == POLICY.loads_per_hour - 1
    host.ordered(B, ok=False)
    assert stands(host) == {B: (ModelStage.FAILED, POLICY.retry_ms, None)}


def test_a_model_whose_turn_to_be_loaded_will_come_is_told() -> None:
    host = Host(a_model(B, ahead=3))
    while not stands(host):
        assert host.run(1_000) == []
    ((key, (state, left_ms, _)),) = stands(host).items()
    assert (key, state) == (B, ModelStage.PRESENT)
    assert left_ms is not None
    assert 0 < left_ms <= 4 * POLICY.turn_ms


def test_what_is_simply_not_in_memory_is_not_told() -> None:
    host = Host(a_model(A, rate=0.0), a_model(B, rate=0.0))
    host.run(5 * MINUTE)
    assert stands(host) == {}
    assert host.machine.standings(host.now).movable == 2
