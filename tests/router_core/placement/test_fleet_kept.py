"""What a fleet takes over from the one before it: a fold from the last snapshot is a fold from nothing."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from router_core.ids import NodeName, id8_of, id16_of
from router_core.placement.candidates.admission import Gate
from router_core.placement.candidates.fleet import Fleet, Live, fold_fleet
from router_core.placement.ledger import Ledger
from router_core.placement.local import LocalWork
from router_core.policy.placement import PlacementPolicy
from router_core.policy.profile import ProfilePolicy
from router_core.profile.outcome import Outcome, Result
from router_core.profile.profiles import Profiles
from router_core.record.membership import Liveness, Member, ViewChange
from router_core.record.state import (
    EngineFacts,
    EngineLoad,
    ModelFacts,
    ResidentModel,
    ResourceLevel,
    Role,
    Static,
    Volatile,
)
from router_core.view.fold import empty, fold
from tests.support.fleets import ME, id32

POLICY = PlacementPolicy()
NAMES = ("a", "b", "c")


def statics(variant: int) -> Static:
    """One engine, or two of one name of which only one is on another machine."""
    engines = tuple(
        EngineFacts(name="llama", kind="llamacpp", dialects=1, slots=2, flags=4 * place)
        for place in range(1 + variant % 2)
    )
    return Static(
        engines=engines,
        models=tuple(
            ModelFacts(name=f"m{index}", engine=index % len(engines), size_mib=100, aliases=(f"x{variant}",))
            for index in range(2 + variant % 3)
        ),
    )


STATICS = tuple(statics(variant) for variant in range(4))

VOLATILES = st.builds(
    Volatile,
    engines=st.lists(
        st.builds(EngineLoad, state=st.just(3), running=st.integers(0, 3), work_ds=st.integers(0, 99)),
        min_size=1,
        max_size=2,
    ).map(tuple),
    residents=st.lists(
        st.builds(ResidentModel, model=st.integers(0, 3), engine=st.integers(0, 1), state=st.just(2)),
        max_size=2,
    ).map(tuple),
    resources=st.lists(
        st.builds(
            ResourceLevel, code=st.integers(0, 3), level=st.integers(0, 3), score_c=st.integers(0, 100)
        ),
        max_size=2,
    ).map(tuple),
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(NAMES),
        st.none() | st.integers(0, 3),
        st.none() | VOLATILES,
        st.sampled_from([Liveness.FRESH, Liveness.SUSPECT, Liveness.GONE]),
        st.sampled_from(["", "renamed"]),
        st.booleans(),
    ),
    max_size=12,
)


def told(fleet: Fleet) -> object:
    """All that a choice reads but what fades by the clock alone."""
    rows = tuple(replace(row, success=0.0) for row in fleet.rows)
    return rows, fleet.index, fleet.m_r, fleet.scales


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_a_fleet_folded_from_the_last_one_is_the_fleet_folded_from_nothing(
    steps: list[tuple[Any, ...]],
) -> None:
    profiles = Profiles(ProfilePolicy())
    live = Live(ledger=Ledger(id8_of(id16_of(ME)), 1, LocalWork()))
    view = empty(ME, NodeName("me"))
    kept: Fleet | None = None
    members: dict[str, str] = dict.fromkeys(NAMES, "")
    now = 1_000_000
    for name, variant, volatile, state, renamed, learns in steps:
        now += 1_000
        members[name] = renamed
        roster = {
            id16_of(id32(each)): Member(
                id32=id32(each), der=each.encode(), roles=Role.NODE, admission=1, name=NodeName(each + suffix)
            )
            for each, suffix in members.items()
        }
        change = ViewChange(
            origin=id16_of(id32(name)),
            state=state,
            confirmed=True,
            epoch=1,
            inst=1,
            seq=now,
            mono_ms=now,
            base_ms=0,
            due_ms=2_000,
            volatile=volatile,
            static=STATICS[variant] if variant is not None else None,
        )
        view = fold(view, [change], roster, now)
        if learns and kept is not None and kept.rows:
            key = kept.rows[0].profile_key
            profiles.learn(
                Outcome(key=key, at_ms=now, result=Result.OK, gen_tokens=100, gen_ms=2_000.0, load_ms=900.0)
            )
        kept = fold_fleet(kept, view, profiles, POLICY, live, now)
        assert told(kept) == told(fold_fleet(None, view, profiles, POLICY, live, now))
        for row in kept.rows:
            assert row in kept.offered(row.names[0], row.names[0], None)
            found = kept.row(row.key, row.model)
            assert found is not None
            assert (found.key, found.model) == (row.key, row.model)


def test_endpoints_of_one_name_keep_their_own_pressure() -> None:
    roster = {
        id16_of(id32("a")): Member(id32=id32("a"), der=b"a", roles=Role.NODE, admission=1, name=NodeName("a"))
    }
    change = ViewChange(
        origin=id16_of(id32("a")),
        state=Liveness.FRESH,
        confirmed=True,
        epoch=1,
        inst=1,
        seq=1,
        mono_ms=1_000_000,
        base_ms=0,
        due_ms=2_000,
        volatile=Volatile(
            engines=(EngineLoad(state=3), EngineLoad(state=3)), resources=(ResourceLevel(code=0, level=3),)
        ),
        static=STATICS[1],
    )
    view = fold(empty(ME, NodeName("me")), [change], roster, 1_000_000)
    live = Live(ledger=Ledger(id8_of(id16_of(ME)), 1, LocalWork()))
    fleet = fold_fleet(None, view, Profiles(ProfilePolicy()), POLICY, live, 1_000_000)
    assert [row.gate for row in fleet.rows] == [Gate.SHUT, Gate.OPEN, Gate.SHUT]
