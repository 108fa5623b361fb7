"""Lists against the decisions they promise: what is named can be reached, what can be reached is named."""

from typing import Any

import pytest
from msgspec.structs import replace

from agent.engines.contract import (
    FOREVER_S,
    EndpointHealth,
    EndpointStatus,
    Identity,
    OwnedModel,
    ResidencyState,
)
from agent.node.status.listing import FleetListing
from agent.relay.dialects.ollama import NATIVE
from agent.relay.ports import Held, Offered, Routed
from agent.settings.manifest import EngineKind
from router_core.policy.placement import PlacementPolicy
from router_core.record.membership import Liveness
from router_core.record.state import Dialect, Flag
from tests.agent.node.rig import World, a_resident, an_endpoint, an_owned

DIGEST = bytes(range(32))
MIB = 2**20


def an_ollama(
    *owned: OwnedModel, version: str = "0.13.3", name: str = "ollama", **over: Any
) -> EndpointStatus:
    made = an_endpoint(name, **({"owned": owned, "resident": (), "load": None} | over))
    identity = Identity(
        engine=EngineKind.OLLAMA,
        flavour="native",
        version=version,
        dialects=NATIVE | Dialect.CHAT,
        loads_on_demand=True,
    )
    manifest = replace(made.manifest, engine=EngineKind.OLLAMA)
    return replace(made, manifest=manifest, identity=identity)


def listing(world: World, *own: EndpointStatus) -> FleetListing:
    return FleetListing(world.router.fleet, {status.name: status for status in own}, world.clock)


def offered(world: World, *own: EndpointStatus) -> list[Offered]:
    return sorted(listing(world, *own).offered(), key=lambda each: each.name)


def held(world: World, *own: EndpointStatus) -> list[Held]:
    return list(listing(world, *own).held())


def test_a_list_names_exactly_what_a_request_would_be_routed_to() -> None:
    world = World()
    world.own(
        an_endpoint("llama", owned=(an_owned("tiny"), an_owned("cold")), resident=(a_resident("tiny"),))
    )
    world.peer("b", an_ollama(an_owned("mid:1b", aliases=("fast",)), an_owned("cloudy:cloud", local=False)))
    world.peer("gone", an_ollama(an_owned("lost:1b")), state=Liveness.GONE)
    world.peer("drains", an_ollama(an_owned("left:1b")), flags=Flag.DRAINING)
    world.peer("down", an_ollama(an_owned("dead:1b"), health=EndpointHealth.UNREACHABLE))
    named = {each.name: each.dialects for each in listing(world).offered()}
    assert set(named) == {"tiny", "mid:1b", "fast:latest"}
    everything = {
        "tiny",
        "cold",
        "mid:1b",
        "fast",
        "fast:latest",
        "cloudy:cloud",
        "lost:1b",
        "left:1b",
        "dead:1b",
    }
    for model in everything:
        for dialect in (Dialect.CHAT, Dialect.OLLAMA_CHAT):
            choosing = world.ask(f"{model}{dialect}", model=model, dialect=dialect, stream=False)
            told = choosing.decide(attempt=1, tried=frozenset(), refused=frozenset(), now=world.clock.now)
            listed = any(
                each.name in (model, f"{model}:latest") and each.dialects & dialect
                for each in listing(world).offered()
            )
            assert isinstance(told, Routed) is listed, (model, dialect)
            if isinstance(told, Routed):
                choosing.end(told.attempt)


def test_an_alias_is_listed_while_one_of_its_models_is_on_offer() -> None:
    aliases = (
        ("chat", ("absent", "tiny")),
        ("idle", ("cold",)),
        ("away", ("mid:1b",)),
        ("none", ("absent",)),
    )
    world = World(policy=PlacementPolicy(aliases=aliases))
    world.own(
        an_endpoint("llama", owned=(an_owned("tiny"), an_owned("cold")), resident=(a_resident("tiny"),))
    )
    world.peer("b", an_ollama(an_owned("mid:1b")))
    told = dict(listing(world).aliases())
    assert {alias: bool(dialects & NATIVE) for alias, dialects in told.items()} == {
        "chat": False,
        "away": True,
    }
    for alias, _ in aliases:
        choice = world.ask(model=alias).decide(
            attempt=1, tried=frozenset(), refused=frozenset(), now=world.clock.now
        )
        assert isinstance(choice, Routed) is (alias in told)
    world.peer("b", an_ollama(an_owned("mid:1b")), state=Liveness.GONE)
    assert set(dict(listing(world).aliases())) == {"chat"}


def test_own_facts_that_are_not_told_to_the_mesh_are_listed_for_own_models_alone() -> None:
    model = an_owned(
        "m:1b", digest=DIGEST, size_bytes=3 * MIB + 7, params_b=1.2, quant="Q4_0", family="llama",
        format="gguf", modified_at="2026-01-01T00:00:00Z",
    )  # fmt: skip
    world = World()
    world.own(an_ollama(model))
    world.peer("b", an_ollama(replace(model, name="other:1b")))
    own, other = offered(world, an_ollama(model))
    assert own == Offered(
        name="m:1b",
        dialects=Dialect.CHAT | Dialect.EMBED | NATIVE,
        digest=DIGEST,
        size_bytes=3 * MIB + 7,
        family="llama",
        params_m=1_200,
        quant="Q4_0",
        format="gguf",
        modified_at="2026-01-01T00:00:00Z",
    )
    assert other == replace(own, name="other:1b", size_bytes=3 * MIB, format=None, modified_at=None)


@pytest.mark.parametrize(
    ("state", "listed"),
    [
        (ResidencyState.RESIDENT, True),
        (ResidencyState.LOADING, True),
        (ResidencyState.UNLOADING, False),
        (ResidencyState.SLEEPING, False),
        (ResidencyState.DOWNLOADING, False),
    ],
)
def test_what_is_in_memory_or_on_its_way_in_is_held(state: ResidencyState, listed: bool) -> None:
    world = World()
    world.own(an_ollama(an_owned(), resident=(a_resident(state=state),)))
    assert bool(held(world)) is listed


def test_held_models_are_told_once_per_node_with_their_own_sizes() -> None:
    world = World()
    here = an_ollama(an_owned(), resident=(a_resident(total_bytes=8 * MIB, vram_bytes=2 * MIB, ctx=4_096),))
    there = an_ollama(an_owned(), resident=(a_resident(total_bytes=8 * MIB),))
    world.own(here)
    world.peer("b", there)
    told = sorted(held(world, here), key=lambda each: each.vram_share_pct or -1)
    assert [(each.size_bytes, each.vram_share_pct, each.ctx) for each in told] == [
        (8 * MIB, None, None),
        (8 * MIB, 25, 4_096),
    ]
    assert {each.offered.name for each in told} == {"tiny:latest"}


@pytest.mark.parametrize(("left", "told"), [(60, True), (FOREVER_S, True), (None, False)])
def test_an_expiry_is_told_of_own_models_and_ages_with_the_look_at_it(left: int | None, told: bool) -> None:
    world = World()
    status = an_ollama(
        an_owned(), resident=(a_resident(expires_s=left),), observed_ms=world.clock.now - 5_000
    )
    world.own(status)
    world.peer("b", status)
    found = [each.expires_ms for each in held(world, status)]
    expected = world.clock.wall_ms() + 1_000 * left - 5_000 if told and left is not None else None
    assert sorted(found, key=str) == sorted([None, expected], key=str)


def test_versions_are_those_of_ollama_servers_that_can_be_reached() -> None:
    world = World()
    world.own(an_endpoint())
    world.peer("b", an_ollama(an_owned(), version="0.12.1"))
    world.peer("gone", an_ollama(an_owned(), version="0.1.0"), state=Liveness.GONE)
    assert set(listing(world).versions()) == {"0.12.1"}
