"""The serving node's last word: on what it knows now, and on no more than can be true."""

from typing import Any

import pytest

from agent.engines.contract import EndpointHealth, LoadSource, ObservedLoad
from agent.node.routing.ingress_gate import TOKENS_MOST, Gate
from agent.node.state.statement import EndpointWork
from agent.relay.ports import RouteHeader
from router_core.record.envelope import Sealed
from router_core.record.state import Dialect, Flag
from tests.agent.node.rig import World, a_member, an_endpoint, an_owned, id16


def a_route(**over: Any) -> RouteHeader:
    fields: dict[str, Any] = {
        "decision_id": "a" * 26,
        "attempt": 1,
        "endpoint": "llama",
        "inst": 1,
        "seq": 1,
        "prompt_tokens": 100,
        "output_tokens": 100,
        "request_class": "interactive",
        "wait_ms": 2_000,
        "left_ms": 60_000,
        "resident": True,
    }
    return RouteHeader(**(fields | over))


def a_gate(world: World, fresh: Sealed | None = None) -> Gate:
    members = {b"beta": a_member("beta")}
    return Gate(by_der=lambda: members, fleet=lambda: world.router.fleet, fresh=lambda: fresh)


def cause(world: World, model: str = "tiny", dialect: Dialect = Dialect.CHAT, **over: Any) -> str | None:
    return a_gate(world).admit(a_route(**over), model, dialect)


@pytest.fixture
def world() -> World:
    world = World()
    world.own(an_endpoint(slots=1, max_queue=1))
    world.peer("beta", an_endpoint())
    return world


def test_who_calls_is_who_holds_the_certificate(world: World) -> None:
    gate = a_gate(world)
    member = gate.member(b"beta")
    assert member is not None
    assert member.id16 == id16("beta")
    assert gate.member(b"stranger") is None


def test_a_request_that_fits_comes_in(world: World) -> None:
    assert cause(world) is None


def test_what_is_not_here_is_absent(world: World) -> None:
    assert cause(world, "other") == "model_absent"
    assert cause(world, endpoint="beta") == "model_absent"
    assert cause(world, dialect=Dialect.OLLAMA_CHAT) == "model_absent"
    world.own(an_endpoint(health=EndpointHealth.UNREACHABLE))
    assert cause(world) == "model_absent"
    world.own(an_endpoint(resident=()))
    assert cause(world) == "model_absent"


def test_a_full_engine_refuses_by_what_is_there_at_this_moment(world: World) -> None:
    tickets = [world.work.start("llama", 1.0, world.clock.now) for _ in range(2)]
    assert cause(world, wait_ms=60_000) == "queue_full"
    world.work.finish(tickets[0])
    assert cause(world, wait_ms=60_000) is None
    assert cause(world, wait_ms=500) is None, "an older router's limit in time says nothing here"
    assert cause(world, ahead=0.0) == "queue_full"
    assert cause(world, ahead=1.0) is None


def test_what_others_run_on_the_engine_fills_it_too(world: World) -> None:
    busy = ObservedLoad(source=LoadSource.ENGINE, running=1, waiting=1)
    world.own(an_endpoint(slots=1, max_queue=1, load=busy), work={})
    assert cause(world) is None
    world.own(an_endpoint(slots=1, max_queue=1), work={"llama": EndpointWork(foreign=2)})
    assert cause(world) == "queue_full"


def test_a_draining_node_takes_nothing(world: World) -> None:
    world.own(an_endpoint(), flags=Flag.DRAINING)
    assert cause(world) == "draining"


def test_a_request_is_booked_at_what_it_takes_here(world: World) -> None:
    gate = a_gate(world)
    row = next(row for row in world.router.fleet.rows if row.is_self)
    alone = 1_000.0 * (100 * row.prefill_s_per_token + 100 * row.token_s)
    assert gate.service_ms(a_route(), "tiny") == pytest.approx(alone)
    assert gate.service_ms(a_route(), "other") == 0.0


@pytest.mark.parametrize(("ctx", "most"), [(4_096, 4_096), (None, TOKENS_MOST)])
def test_no_more_tokens_are_believed_than_fit_the_context(world: World, ctx: int | None, most: int) -> None:
    world.own(an_endpoint(owned=(an_owned(ctx_max=ctx),)))
    gate = a_gate(world)
    huge = a_route(prompt_tokens=9_999_999, output_tokens=9_999_999)
    real = a_route(prompt_tokens=most, output_tokens=most)
    assert gate.service_ms(huge, "tiny") == gate.service_ms(real, "tiny") > 0


def test_the_newest_record_is_sent_along_if_there_is_one(world: World) -> None:
    assert a_gate(world).fresh_state() is None
    assert a_gate(world, Sealed(b"signed", b"sig")).fresh_state() == (b"signed", b"sig")
