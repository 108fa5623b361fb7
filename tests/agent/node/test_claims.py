"""What one node learned of its engine reaches another's estimates, and that one's own experience outweighs it."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from agent.relay.ports import Routed
from router_core.placement.candidates.candidate import Row
from router_core.record.codec import decode_static, encode_static
from router_core.record.state import Static
from tests.agent.node.rig import World, a_report, an_endpoint, id16, stated, taught


def told(gen_per_s: float) -> bytes:
    """The last bytes of an answer of llama.cpp at this pace."""
    return (
        b'data: {"choices":[{"finish_reason":"stop"}],"timings":{"prompt_n":200,"prompt_ms":100.0,'
        b'"cache_n":0,"predicted_n":50,"predicted_per_second":%.1f}}\n\n' % gen_per_s
    )


def served(world: World, row: Row, gen_per_s: float, times: int) -> None:
    """``world`` had ``times`` answers of ``row`` at this pace."""
    for number in range(times):
        choosing = world.ask(f"r{number}")
        routed: Routed = world.route(choosing)
        choosing.end(routed.attempt)
        routed = replace(routed, choice=replace(routed.choice, endpoint=row.key, model=row.model))
        taught(world.learning, a_report(routed, head=told(gen_per_s), tail=told(gen_per_s)))


@pytest.fixture
def owner(tmp_path: Path) -> World:
    """A node that knows its own engine well: 49 tokens a second."""
    (tmp_path / "owner").mkdir()
    world = World(tmp_path / "owner")
    world.own(an_endpoint())
    served(world, world.router.fleet.rows[0], 49.0, 30)
    return world


@pytest.fixture
def router(tmp_path: Path) -> World:
    (tmp_path / "router").mkdir()
    return World(tmp_path / "router")


def spoken(owner: World) -> Static:
    """S of ``owner`` as it arrives at others."""
    static, _ = stated(an_endpoint(), profiles=owner.learning.claims(id16("me")))
    return decode_static(encode_static(static))


def heard(router: World, static: Static) -> Row:
    """The row of the only peer, ``beta``, after its records arrived once more."""
    router.admit("beta")
    router.hear("beta", static, stated(an_endpoint())[1])
    (row,) = router.router.fleet.parts[id16("beta")].rows
    return row


def test_what_a_peer_learned_is_what_is_expected_of_it(owner: World, router: World) -> None:
    untold = heard(router, stated(an_endpoint())[0])
    assert 1 / untold.token_s != pytest.approx(49.0, rel=0.2)
    row = heard(router, spoken(owner))
    assert 1 / row.token_s == pytest.approx(49.0, rel=0.01)
    assert 1 / row.prefill_s_per_token == pytest.approx(2_000.0, rel=0.01)
    assert (row.samples, row.s_gen) == (0, 0.7)


def test_own_observations_win_over_a_peers_claims(owner: World, router: World) -> None:
    static = spoken(owner)
    row = heard(router, static)
    served(router, row, 25.0, 5)
    assert 25.0 < 1 / heard(router, static).token_s < 49.0
    served(router, row, 25.0, 15)
    assert 1 / heard(router, static).token_s == pytest.approx(25.0, rel=0.01)


def test_what_a_peer_claims_is_neither_learned_nor_passed_on(owner: World, router: World) -> None:
    heard(router, spoken(owner))
    assert len(router.router.profiles) == 0
    assert router.learning.claims(id16("me")) == []
