"""What attempts teach, and what they must not; and that it outlives a disk that refuses."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from agent.node.routing.learning import Learning, store_at
from agent.node.state.statement import EndpointWork
from agent.relay.ports import Routed
from agent.store.profiles import ProfileStore
from router_core.policy.profile import ProfilePolicy
from router_core.profile.learn import Profile
from router_core.profile.profiles import Profiles
from router_core.router.failure import Cause, FailureClass
from router_core.router.outcome import Outcome, Result
from tests.agent.node.rig import (
    STREAMED,
    World,
    a_report,
    a_resident,
    an_endpoint,
    an_outcome,
    answered,
    failed,
    id16,
    marks,
    owned_models,
    taught,
)

USAGE = b'{"usage":{"prompt_tokens":100,"completion_tokens":50},"choices":[{"finish_reason":"stop"}]}'


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path)
    world.own(an_endpoint())
    return world


def routed_to(world: World, *, est: dict[str, float] | None = None, **over: Any) -> Routed:
    """A request served by what the fleet offers, its reservation ended as the relay ends it before it reports. ``est`` and
    ``over`` change what was expected of the choice, and the choice."""
    choosing = world.ask()
    routed = world.route(choosing)
    choosing.end(routed.attempt)
    return expecting(routed, est, **over)


def expecting(routed: Routed, est: dict[str, float] | None = None, **over: Any) -> Routed:
    """``routed`` with other predictions, in seconds, and another choice."""
    choice = replace(routed.choice, est=replace(routed.choice.est, **(est or {})))
    return replace(routed, choice=replace(choice, **over))


def profile(world: World) -> Profile:
    ((_, found),) = world.router.profiles.items()
    return found


def test_a_finished_answer_teaches_what_the_engine_told(world: World) -> None:
    timings = taught(world.learning, a_report(routed_to(world)))
    assert timings is not None
    assert timings.gen_tokens == 50
    learned = profile(world)
    assert learned.first.value == pytest.approx(0.05)
    assert learned.prompt.n == 0, "a prompt of 100 tokens"
    assert learned.gen.value == pytest.approx(49.0)
    assert learned.successes == 1.0
    assert learned.loads_s == ()


def test_a_whole_answer_with_usage_alone_teaches_speed(world: World) -> None:
    told = b'{"choices":[{"finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":40}}'
    whole = marks(1_000_000, head_ms=1_002_000.0, first_byte_ms=1_002_000.0, last_byte_ms=1_002_000.0)
    whole = replace(whole, first_content_ms=None, content_events=None)
    routed = routed_to(world, est={"wait": 0.0, "net": 0.0})
    taught(world.learning, a_report(routed, head=told, tail=told, marks=whole))
    assert (profile(world).gen.n, profile(world).gen.value) == pytest.approx((1, 20.0))


@pytest.mark.parametrize(
    ("outcome", "success", "fault"),
    [
        (lambda routed: an_outcome(routed, Result.CANCELLED), 0.0, 0.0),
        (lambda routed: an_outcome(routed, Result.REFUSED, status=429, refusal="pressure"), 0.0, 0.0),
        (lambda routed: answered(routed, 400, FailureClass.OTHER), 0.0, 0.0),
        (lambda routed: answered(routed, 503, FailureClass.BUSY), 0.0, 0.0),
        (lambda routed: answered(routed, 500, FailureClass.OTHER, fault=True), 0.0, 1.0),
        (lambda routed: failed(routed, Cause.RESET), 0.0, 1.0),
        (lambda routed: an_outcome(routed, Result.BROKEN, cause=Cause.RESET, fault=True), 0.0, 1.0),
    ],
)
def test_what_did_not_end_well_teaches_no_speed(
    world: World, outcome: Any, success: float, fault: float
) -> None:
    routed = routed_to(world)
    assert taught(world.learning, a_report(routed, outcome(routed))) is None
    learned = profile(world)
    assert (learned.prompt.n, learned.gen.n, learned.loads_s) == (0, 0, ())
    assert (learned.successes, learned.faults) == (success, fault)


def test_who_else_is_in_the_batch_counts_whoever_sent_it_up_to_the_slots(world: World) -> None:
    def crowd(*foreign: int) -> list[float]:
        found = []
        for others in foreign:
            world.own(an_endpoint(), work={"llama": EndpointWork(foreign=others)})
            lesson = world.learning.lesson_of(a_report(routed_to(world)))
            assert lesson is not None
            found.append(lesson.concurrency)
        return found

    assert crowd(0, 2, 9) == [1.0, 3.0, 4.0]


def test_an_error_inside_a_stream_is_neither_speed_nor_success(world: World) -> None:
    told = b'data: {"error":{"code":500},"choices":[{}],"usage":{"prompt_tokens":100,"completion_tokens":50}}\n\n'
    taught(world.learning, a_report(routed_to(world), head=told, tail=told))
    learned = profile(world)
    assert (learned.gen.n, learned.successes, learned.faults) == (0, 0.0, 0.0)


def test_a_cold_stream_teaches_the_load_and_no_time_of_its_own(world: World) -> None:
    cold = routed_to(world, est={"wait": 0.0, "net": 0.001}, resident=False)
    late = marks(1_000_000, first_content_ms=1_004_051.0, last_byte_ms=1_005_000.0)
    taught(world.learning, a_report(cold, marks=late))
    learned = profile(world)
    assert list(learned.loads_s) == pytest.approx([4.0])
    assert learned.first.value == pytest.approx(0.05)


def test_a_cold_answer_in_one_piece_is_judged_by_what_the_engine_told_not_by_the_longest_guess(
    world: World,
) -> None:
    cold = routed_to(world, est={"wait": 0.0, "net": 0.0, "ect": 30.0}, resident=False)
    whole = marks(
        1_000_000,
        first_byte_ms=1_005_050.0,
        first_content_ms=None,
        content_events=None,
        last_byte_ms=1_005_050.0,
    )
    taught(world.learning, a_report(cold, marks=whole))
    assert list(profile(world).loads_s) == pytest.approx([4.0])


def test_how_long_answers_of_a_class_are_is_learned_of_requests_placed_here_alone(world: World) -> None:
    """A router tells a target the class that a request rose to, not its own."""
    routed = routed_to(world)
    taught(world.learning, a_report(routed, side="ingress"))
    assert world.router.profiles.output_tokens("tiny", "interactive") is None
    taught(world.learning, a_report(routed))
    assert world.router.profiles.output_tokens("tiny", "interactive") == 50


def test_a_load_for_a_request_of_a_peer_teaches_its_owner(world: World) -> None:
    routed = routed_to(world, est={"ttft": 600.0, "ect": 600.0, "load": 0.0, "wait": 0.0}, resident=False)
    late = marks(1_000_000, first_content_ms=1_004_050.0, last_byte_ms=1_005_000.0)
    taught(world.learning, a_report(expecting(routed, {"net": 0.0}), side="ingress", marks=late))
    assert list(profile(world).loads_s) == pytest.approx([4.0])


def test_the_load_is_not_taken_for_a_slow_prompt_where_only_our_own_marks_tell(world: World) -> None:
    cold = routed_to(world, resident=False)
    told = b"data: " + USAGE + b"\n\n"
    early = marks(1_000_000, head_ms=1_000_010.0, first_content_ms=1_009_000.0, last_byte_ms=1_010_000.0)
    taught(world.learning, a_report(cold, marks=early, head=told, tail=told))
    learned = profile(world)
    assert learned.prompt.n == 0
    assert 8.0 < learned.loads_s[0] < 9.0


def test_a_warm_answer_teaches_no_load(world: World) -> None:
    late = marks(1_000_000, first_content_ms=1_004_000.0, last_byte_ms=1_005_000.0)
    taught(world.learning, a_report(routed_to(world), marks=late))
    assert profile(world).loads_s == ()


@pytest.mark.parametrize(("resident", "loads"), [(True, ()), (False, (4.0,))])
def test_a_load_time_that_is_told_counts_only_if_the_model_was_not_in_memory(
    world: World, resident: bool, loads: tuple[float, ...]
) -> None:
    told = b'{"response":"","done":true,"total_duration":9000000000,"load_duration":4000000000}'
    routed = routed_to(world, resident=resident)
    taught(world.learning, a_report(routed, head=told, tail=told))
    assert profile(world).loads_s == pytest.approx(loads)


def test_speeds_are_of_as_many_requests_as_the_engine_worked_on(world: World) -> None:
    others = [world.ask(f"r{number}") for number in range(2)]
    for other in others:
        world.route(other)
    taught(world.learning, a_report(routed_to(world)))
    alone_at = 1.0 + world.router.profiles.policy.beta * 2.0
    assert profile(world).gen.value == pytest.approx(49.0 * alone_at)


def test_requests_that_queue_do_not_slow_the_one_that_runs(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.own(an_endpoint(slots=1))
    for number in range(2):
        world.route(world.ask(f"r{number}"))
    taught(world.learning, a_report(routed_to(world)))
    assert profile(world).gen.value == pytest.approx(49.0)


def test_experience_with_peers_is_kept_and_not_published(world: World) -> None:
    world.peer("beta", an_endpoint())
    row = world.router.fleet.parts[id16("beta")].rows[0]
    routed = routed_to(world, endpoint=row.key, model=row.model)
    taught(world.learning, a_report(routed))
    assert len(world.router.profiles) == 1
    assert world.learning.claims(id16("me")) == []
    assert world.learning.used == {}


def test_the_key_under_which_an_owner_publishes_is_that_under_which_it_learned(world: World) -> None:
    taught(world.learning, a_report(routed_to(world)))
    ((endpoint, model, facts),) = world.learning.claims(id16("me"))
    assert (endpoint, model, facts.n, facts.gen_dtps) == ("llama", "tiny", 1, 490)


def test_the_last_use_of_a_model_is_forgotten_with_the_model(world: World) -> None:
    world.clock.now += 5
    taught(world.learning, a_report(routed_to(world)))
    assert world.learning.used == {("llama", "tiny"): 1_000_005}
    world.own(an_endpoint(owned=owned_models("other"), resident=(a_resident("other"),)))
    world.learning.claims(id16("me"))
    assert world.learning.used == {}


def test_an_attempt_that_never_reached_its_engine_is_no_use_of_the_model(world: World) -> None:
    routed = routed_to(world)
    taught(world.learning, a_report(routed, failed(routed, Cause.CONNECT_REFUSED), marks=None))
    assert world.learning.used == {}


def test_an_endpoint_that_vanished_teaches_nothing(world: World) -> None:
    routed = routed_to(world)
    world.own(an_endpoint("elsewhere"))
    assert taught(world.learning, a_report(routed)) is None
    assert len(world.router.profiles) == 0


def restored(tmp_path: Path, profiles: Profiles) -> None:
    world = World(profiles=profiles)
    Learning(world.router, ProfileStore(tmp_path), world.clock, world.log).restore()


async def test_a_disk_that_refuses_is_told_and_tried_again(world: World, tmp_path: Path) -> None:
    world.learning.restore()
    other = sqlite3.connect(tmp_path / "profiles.sqlite", isolation_level=None)
    other.execute("begin exclusive")
    taught(world.learning, a_report(routed_to(world)))
    await world.learning.save()
    (line,) = (json.loads(line) for line in world.lines if "profile.not_stored" in line)
    assert (line["file"], line["cause"]) == ("profiles.sqlite", "SQLITE_BUSY")
    refused = world.learning.fault
    other.execute("rollback")
    other.close()
    await world.learning.save()
    assert (refused is None, world.learning.fault) == (False, None)
    profiles = Profiles(ProfilePolicy())
    restored(tmp_path, profiles)
    assert len(profiles) == 1


async def test_a_file_that_cannot_be_read_is_told_and_learning_starts_anew(
    world: World, tmp_path: Path
) -> None:
    (tmp_path / "profiles.sqlite").symlink_to(tmp_path / "unmounted" / "profiles.sqlite")
    world.learning.restore()
    assert any("profile.not_loaded" in line for line in world.lines)
    assert len(world.router.profiles) == 0


async def test_a_node_whose_disk_refuses_from_the_start_learns_for_as_long_as_it_lives(
    world: World, tmp_path: Path
) -> None:
    (tmp_path / "no").mkdir()
    (tmp_path / "no" / "profiles.sqlite").symlink_to(tmp_path / "unmounted" / "profiles.sqlite")
    store = store_at(tmp_path / "no", world.log)
    learning = Learning(world.router, store, world.clock, world.log)
    learning.restore()
    taught(learning, a_report(routed_to(world)))
    await learning.save()
    assert len(world.router.profiles) == 1
    refused = learning.fault
    (tmp_path / "no" / "profiles.sqlite").unlink()
    await learning.save()
    assert (refused is None, learning.fault) == (False, None)
    assert len(ProfileStore(tmp_path / "no").load()) == 1


def test_a_damaged_file_is_set_aside_and_told(world: World, tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "profiles.sqlite").write_bytes(b"no database " * 512)
    assert store_at(tmp_path / "bad", world.log).load() == {}
    assert any("profile.set_aside" in line for line in world.lines)


async def test_what_is_no_profile_is_skipped_and_leaves_the_disk(world: World, tmp_path: Path) -> None:
    world.store.save({"junk": b"\xc1"})
    world.learning.restore()
    taught(world.learning, a_report(routed_to(world)))
    await world.learning.save()
    profiles = Profiles(ProfilePolicy())
    restored(tmp_path, profiles)
    assert len(profiles) == 1
    assert len(world.store.load()) == 1


async def test_the_disk_forgets_what_memory_forgot(tmp_path: Path) -> None:
    profiles = Profiles(ProfilePolicy(profiles_kept=2))
    world = World(profiles=profiles)
    names = [f"m{number}" for number in range(6)]
    world.own(an_endpoint(owned=owned_models(*names), resident=tuple(a_resident(name) for name in names)))
    store = ProfileStore(tmp_path)
    learning = Learning(world.router, store, world.clock, world.log)
    for name in names:
        choosing = world.ask(model=name)
        taught(learning, a_report(world.route(choosing)))
        await learning.save()
    assert len(store.load()) == 2


def test_counted_events_stand_in_for_an_engine_that_tells_nothing(world: World) -> None:
    told = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
    timings = taught(world.learning, a_report(routed_to(world), head=told, tail=told))
    assert timings is not None
    assert timings.gen_tokens == STREAMED


def test_outcomes_are_complete_for_every_end(world: World) -> None:
    routed = routed_to(world)
    for result in Result:
        outcome: Outcome = an_outcome(routed, result)
        taught(world.learning, a_report(routed, outcome, marks=None, head=b"", tail=b""))
    learned = profile(world)
    assert (learned.successes, learned.faults) == (1.0, 0.0)
