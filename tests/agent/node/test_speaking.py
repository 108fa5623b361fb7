"""When something new is said: changes of a moment are one statement, and S only says what changed."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import uvloop
from msgspec.structs import replace

from agent.engines.contract import EndpointHealth, EndpointStatus, LoadSource, ObservedLoad, ResidencyState
from agent.node.state.publication import LINGER_MS, PROFILES_MS, Listeners, Sources, Speaking
from agent.node.state.work import WatchedWork
from router_core import limits
from router_core.record.state import (
    Address,
    EngineState,
    Flag,
    ModelState,
    ProfileFacts,
    Static,
    Volatile,
)
from tests.agent.node.rig import HandClock, a_resident, a_sample, an_endpoint, owned_models
from tests.support.until import until

Claim = tuple[str, str, ProfileFacts]


class Spoken:
    """A speaking node whose sources are in a test's hand, and what it said to its view and to the mesh."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.work = WatchedWork()
        self.endpoints: dict[str, EndpointStatus] = {"llama": an_endpoint()}
        self.addresses: tuple[Address, ...] = ()
        self.claims: Sequence[Claim] = ()
        self.asked = 0
        self.used: dict[tuple[str, str], int] = {}
        self.reserved_mib = 0
        self.own: list[tuple[Static, Volatile]] = []
        self.mesh: list[tuple[Static, Volatile, bool]] = []
        self.reported: list[tuple[str, int, bool]] = []
        self.speaking = Speaking(
            Sources(
                endpoints=lambda: self.endpoints,
                addresses=lambda: self.addresses,
                dispatch=lambda: None,
                claims=self._claimed,
                used=self.used,
                reserved_mib=lambda: self.reserved_mib,
            ),
            Listeners(
                view=lambda static, volatile: self.own.append((static, volatile)),
                mesh=lambda static, volatile, urgent: self.mesh.append((static, volatile, urgent)),
                work=lambda endpoint, in_flight, began: self.reported.append((endpoint, in_flight, began)),
            ),
            self.work,
            self.clock,
            version="1",
            router=True,
        )
        self.work.changed = self.speaking.work_changed

    def _claimed(self) -> Sequence[Claim]:
        self.asked += 1
        return self.claims

    def say(self, wait_ms: int = 0) -> tuple[Static, Volatile, bool]:
        self.clock.now += wait_ms
        self.speaking.speak()
        return self.mesh[-1]

    def look(self, running: int | None, waiting: int | None = 0, **over: Any) -> None:
        """The engine is looked at now."""
        load = ObservedLoad(source=over.pop("source", LoadSource.ENGINE), running=running, waiting=waiting)
        self.endpoints["llama"] = an_endpoint(load=load, observed_ms=self.clock.now, **over)

    def foreign(self) -> int:
        """Requests at the engine that are not ours, as the newest statement has them."""
        told = self.mesh[-1][1].engines[0]
        return (told.running or 0) + (told.queued or 0) - told.ours


@pytest.fixture
def node() -> Spoken:
    return Spoken()


# --- when --------------------------------------------------------------------------------------------------


async def test_changes_of_a_moment_are_one_statement(node: Spoken) -> None:
    for _ in range(20):
        node.speaking.work_changed("llama")
        node.speaking.sampled(a_sample(), False)
        node.speaking.engine_changed(an_endpoint(), False)
    assert not node.mesh
    await until(lambda: node.mesh)
    assert (len(node.mesh), len(node.own)) == (1, 1)


async def test_an_engine_hears_with_each_statement_what_is_in_hand_and_if_any_began(node: Spoken) -> None:
    first, second = (node.work.start("llama", 1.0, node.clock.now) for _ in range(2))
    node.say()
    node.work.finish(first)
    node.say()
    node.work.finish(second)
    node.work.finish(node.work.start("llama", 1.0, node.clock.now))
    node.say()
    node.say()
    assert node.reported == [("llama", 2, True), ("llama", 1, False), ("llama", 0, True)]


async def test_what_others_must_know_at_once_does_not_wait_for_the_moment(node: Spoken) -> None:
    node.speaking.sampled(a_sample(), False)
    node.speaking.engine_changed(an_endpoint(), True)
    assert not node.mesh
    for _ in range(3):
        await asyncio.sleep(0)
    assert len(node.mesh) == 1


def test_on_uvloop_two_urgent_changes_of_a_moment_are_one_statement() -> None:
    async def changes() -> int:
        node = Spoken()
        node.speaking.engine_changed(an_endpoint(), True)
        node.speaking.engine_changed(an_endpoint(), True)
        await until(lambda: node.mesh)
        return len(node.mesh)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(changes()) == 1


async def test_a_fault_while_speaking_is_not_the_fault_of_who_told_of_a_change(node: Spoken) -> None:
    node.endpoints = {"broken": None}  # type: ignore[dict-item]
    node.speaking.engine_changed(an_endpoint(), True)
    with pytest.raises(AttributeError):
        node.speaking.speak()
    node.endpoints = {"llama": an_endpoint()}
    node.speaking.engine_changed(an_endpoint(), True)
    await until(lambda: node.mesh)


def test_the_first_statement_is_urgent_and_one_like_the_last_is_not(node: Spoken) -> None:
    assert node.say()[2]
    assert not node.say(1_000)[2]


def test_a_change_of_state_or_residency_is_urgent(node: Spoken) -> None:
    node.say()
    node.endpoints["llama"] = an_endpoint(health=EndpointHealth.UNREACHABLE)
    assert node.say(10)[2]
    node.endpoints["llama"] = an_endpoint(resident=())
    assert node.say(10)[2]
    assert not node.say(10)[2]


async def test_a_draining_node_says_so_at_once(node: Spoken) -> None:
    node.say()
    node.speaking.drain()
    _, volatile, urgent = node.mesh[-1]
    assert urgent
    assert volatile.flags & Flag.DRAINING


# --- S -----------------------------------------------------------------------------------------------------


def test_s_stays_the_same_object_until_something_it_is_made_of_changed(node: Spoken) -> None:
    first = node.say()[0]
    node.look(running=2)
    node.used["llama", "tiny"] = node.clock.now
    assert node.say(1_000)[0] is first
    node.endpoints["llama"] = an_endpoint(owned=owned_models("tiny", "other"))
    second = node.say(1_000)[0]
    assert [model.name for model in second.models] == ["tiny", "other"]
    node.endpoints["llama"] = an_endpoint(owned=owned_models("tiny", "other"))
    assert node.say(1_000)[0] is second
    node.addresses = (Address(ip=b"\x0a\x00\x00\x01", mesh_port=7_433, ingress_port=7_434),)
    assert node.say(1_000)[0].addrs == node.addresses


async def test_the_host_enters_s_when_it_was_read(node: Spoken) -> None:
    assert node.say()[0].host.cpus == 0
    node.speaking.sampled(a_sample(), False)
    assert node.say()[0].host.cpus == 8


def test_of_too_many_models_the_resident_and_the_lately_used_are_told(node: Spoken) -> None:
    names = [f"a{number:03}" for number in range(limits.MODELS)]
    node.endpoints["llama"] = an_endpoint(
        owned=owned_models(*names, "resident", "used"), resident=(a_resident("resident"),)
    )
    node.used["llama", "used"] = 1
    static, volatile, _ = node.say()
    told = {model.name for model in static.models}
    assert len(told) == limits.MODELS
    assert {"resident", "used"} <= told
    assert static.models_total == limits.MODELS + 2
    (held,) = volatile.residents
    assert static.models[held.model].name == "resident"
    node.used["llama", "used"] = 2
    assert node.say()[0] is static


# --- profiles ----------------------------------------------------------------------------------------------


def claim(gen_dtps: int = 490, n: int = 10, model: str = "tiny") -> Claim:
    return ("llama", model, ProfileFacts(model=0, engine=0, n=n, gen_dtps=gen_dtps))


def test_the_first_profile_is_told_at_once_and_the_next_a_minute_later(node: Spoken) -> None:
    assert node.say()[0].profiles == ()
    node.claims = [claim(490)]
    assert [facts.gen_dtps for facts in node.say(1)[0].profiles] == [490]
    node.claims = [claim(900)]
    before = node.asked
    assert [facts.gen_dtps for facts in node.say(PROFILES_MS - 1)[0].profiles] == [490]
    assert node.asked == before
    assert [facts.gen_dtps for facts in node.say(1)[0].profiles] == [900]


@pytest.mark.parametrize(
    ("later", "told"),
    [
        (claim(535, 15), 490),
        (claim(545, 15), 545),
        (claim(495, 20), 495),
        (claim(440, 15), 440),
        (claim(0, 15), 0),
    ],
)
def test_a_profile_is_told_again_only_if_it_moved_a_tenth_or_its_samples_doubled(
    node: Spoken, later: Claim, told: int
) -> None:
    node.claims = [claim()]
    first = node.say()[0]
    node.claims = [later]
    static = node.say(PROFILES_MS)[0]
    assert [facts.gen_dtps for facts in static.profiles] == [told]
    assert (static is first) is (told == 490)


def test_a_profile_of_a_model_that_is_gone_is_not_told(node: Spoken) -> None:
    node.claims = [claim()]
    assert len(node.say()[0].profiles) == 1
    node.endpoints["llama"] = an_endpoint(owned=owned_models("other"), resident=())
    assert node.say(1)[0].profiles == ()


# --- whose work --------------------------------------------------------------------------------------------


async def test_requests_beyond_ours_are_somebody_elses(node: Spoken) -> None:
    node.work.start("llama", 10.0, node.clock.now)
    node.look(running=3)
    told = node.say()[1].engines[0]
    assert (told.ours, told.running, told.queued, told.work_ds) == (1, 3, 0, 300)


async def test_an_own_request_that_has_just_ended_is_nobody_elses(node: Spoken) -> None:
    node.say()
    ticket = node.work.start("llama", 1.0, node.clock.now)
    node.clock.now += 500
    node.say()
    node.work.finish(ticket)
    node.say(10)
    node.look(running=1)
    node.say(40)
    assert node.foreign() == 0


async def test_a_cancelled_request_that_the_engine_still_works_on_is_nobody_elses(node: Spoken) -> None:
    ticket = node.work.start("llama", 1.0, node.clock.now)
    node.clock.now += 1_000
    node.look(running=1)
    node.say()
    node.work.finish(ticket)
    node.clock.now += 1_500
    node.look(running=1)
    node.say()
    assert node.foreign() == 0
    node.clock.now += LINGER_MS
    node.look(running=1)
    node.say()
    assert node.foreign() == 1


async def test_foreign_work_is_judged_once_per_look(node: Spoken) -> None:
    tickets = [node.work.start("llama", 1.0, node.clock.now) for _ in range(2)]
    node.look(running=3)
    node.say(50)
    assert node.foreign() == 1
    node.clock.now += LINGER_MS
    for ticket in tickets:
        node.work.finish(ticket)
    node.say(50)
    assert node.foreign() == 1


async def test_an_engine_that_counts_nothing_has_no_foreign_work(node: Spoken) -> None:
    node.look(running=5, source=LoadSource.OWN)
    node.say()
    assert node.foreign() == 0
    node.look(running=None, waiting=None)
    node.say(10)
    assert node.foreign() == 0


async def test_an_engine_that_vanished_leaves_no_position_behind(node: Spoken) -> None:
    node.endpoints["other"] = an_endpoint("other")
    assert len(node.say()[1].engines) == 2
    del node.endpoints["llama"]
    static, volatile, urgent = node.say()
    assert [engine.name for engine in static.engines] == ["other"]
    assert [load.state for load in volatile.engines] == [EngineState.READY]
    assert urgent


# --- models in time ----------------------------------------------------------------------------------------


def test_a_model_never_asked_for_is_idle_since_it_was_first_seen(node: Spoken) -> None:
    assert node.say()[1].residents[0].idle_s == 0
    assert node.say(30_000)[1].residents[0].idle_s == 30
    node.used["llama", "tiny"] = node.clock.now
    assert node.say(5_000)[1].residents[0].idle_s == 5


def test_what_is_left_of_a_load_is_what_earlier_loads_took(node: Spoken) -> None:
    facts = ProfileFacts(model=0, engine=0, n=3, load_p75_ds=100)
    node.claims = [("llama", "tiny", facts)]
    node.endpoints["llama"] = an_endpoint(resident=(a_resident(state=ResidencyState.LOADING),))
    assert node.say()[1].residents[0].load_left_ds == 100
    (loading,) = node.say(4_000)[1].residents
    assert (loading.state, loading.load_left_ds) == (ModelState.LOADING, 60)
    assert node.say(20_000)[1].residents[0].load_left_ds == 0
    node.claims = [("llama", "tiny", replace(facts, load_p75_ds=None))]
    assert node.say(PROFILES_MS)[1].residents[0].load_left_ds is None


async def test_a_load_under_way_takes_its_memory_off_what_others_may_count_on() -> None:
    node = Spoken()
    node.speaking.sampled(a_sample(node.clock.now), False)
    before = node.say()[1].engines[0].obtainable_mib
    node.reserved_mib = 1_000
    after = node.say()[1].engines[0].obtainable_mib
    assert before is not None
    assert after is not None
    assert 900 <= before - after <= 1_000


async def test_a_model_that_moves_is_spoken_of_at_once(node: Spoken) -> None:
    node.say()
    node.speaking.models_moved()
    await until(lambda: len(node.mesh) == 2)
