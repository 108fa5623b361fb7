"""Questions about models: who is asked next, for how long, and that nothing is booked for them."""

from random import Random

import pytest

from agent.node.routing.questions import ANSWER_MS, Question, Showing, placer_of
from agent.relay.dialects.ollama import NATIVE
from agent.relay.ports import Asked, Choosing, Queued, Routed, Turned
from router_core.ids import Id16
from router_core.placement.request.request import Endpoint
from tests.agent.node.rig import World, an_asked, an_owned, id16, key_of
from tests.agent.node.test_listing import an_ollama


def question(world: World, rtts: dict[Id16, int] | None = None, **over: object) -> Choosing:
    showing = Showing(fleet=lambda: world.router.fleet, rtts=lambda: rtts or {}, rng=Random(1))
    return showing(an_asked(world.clock.now, dialect=NATIVE, is_work=False, **over))


def asked(choosing: Choosing, now: int, *tried: Endpoint) -> Routed | Turned | Queued:
    return choosing.decide(attempt=len(tried) + 1, tried=frozenset(tried), refused=frozenset(), now=now)


def a_world() -> World:
    world = World()
    world.own(an_ollama(an_owned("tiny:latest")))
    world.peer("b", an_ollama(an_owned("tiny:latest")))
    world.peer("c", an_ollama(an_owned("tiny:latest")))
    return world


def test_owners_are_asked_in_turn_and_nothing_is_booked() -> None:
    world = a_world()
    choosing = question(world, {id16("b"): 30, id16("c"): 2}, model="tiny")
    tried: list[Endpoint] = []
    for name in ("me", "c", "b"):
        routed = asked(choosing, world.clock.now, *tried)
        assert isinstance(routed, Routed)
        assert (routed.choice.endpoint, routed.choice.is_self) == (key_of(name, "ollama"), name == "me")
        assert (routed.choice.model, routed.choice.prompt_tokens, routed.choice.decode_s) == (
            "tiny:latest",
            0,
            0.0,
        )
        for end in (choosing.first_token, choosing.end):
            end(routed.attempt)
        tried.append(routed.choice.endpoint)
    turned = asked(choosing, world.clock.now, *tried)
    assert isinstance(turned, Turned)
    assert (turned.status, turned.code, turned.decision_id) == (502, "tried", None)
    assert not world.router.ledger.owed
    assert not world.kept.records


def test_a_question_has_fifteen_seconds_in_all() -> None:
    world = a_world()
    choosing = question(world, model="tiny")
    assert choosing.until_ms == world.clock.now + ANSWER_MS
    routed = asked(choosing, world.clock.now + 10_000)
    assert isinstance(routed, Routed)
    assert routed.left_ms == 5_000
    late = asked(choosing, world.clock.now + ANSWER_MS + 1)
    assert isinstance(late, Routed)
    assert late.left_ms > 0


@pytest.mark.parametrize(
    ("model", "headers", "status", "code"),
    [
        ("tiniest:latest", (), 404, "model_absent"),
        ("../x", (), 400, "model_name_invalid"),
        ("tiny", (("x-pairmesh-require", "nonsense"),), 400, "hint_malformed"),
        ("tiny", (("x-pairmesh-require", "node=@nobody"),), 400, "not_in_subset"),
    ],
)
def test_a_question_that_nobody_can_answer_is_turned_away(
    model: str, headers: tuple[tuple[str, str], ...], status: int, code: str
) -> None:
    world = a_world()
    turned = asked(question(world, model=model, headers=headers), world.clock.now)
    assert isinstance(turned, Turned)
    assert (turned.status, turned.code) == (status, code)
    assert turned.nearest == (("tiny:latest",) if code == "model_absent" else ())


def test_work_and_questions_go_to_their_own_placers() -> None:
    world = a_world()
    showing = Showing(fleet=lambda: world.router.fleet, rtts=dict, rng=Random(1))
    place = placer_of(world.placing, showing)
    work: Asked = an_asked(world.clock.now)
    assert not isinstance(place(work), Question)
    assert isinstance(place(an_asked(world.clock.now, is_work=False)), Question)
