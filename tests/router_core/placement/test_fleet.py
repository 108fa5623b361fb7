"""From what nodes say of themselves to rows ready to be scored."""

import math
from dataclasses import replace as with_policy
from typing import Any

import pytest
from msgspec.structs import replace

from router_core.ids import id16_of
from router_core.placement.candidates.admission import Gate
from router_core.placement.candidates.candidate import Row, logistic
from router_core.placement.candidates.fleet import Fleet, Live, fold_fleet, herd_multiplier
from router_core.placement.reasons import Action
from router_core.policy.profile import ProfilePolicy
from router_core.profile.outcome import Outcome, ProfileKey, Result
from router_core.profile.profiles import Profiles
from router_core.record.membership import Liveness, ViewChange
from router_core.record.state import (
    Dispatch,
    EngineFlag,
    EngineLoad,
    EngineState,
    Flag,
    GpuLoad,
    GpuState,
    Level,
    LoadPolicy,
    ModelFacts,
    ModelState,
    ProfileFacts,
    ResidentModel,
    ResourceCode,
    Role,
    SeenRouter,
)
from router_core.view.cluster import ClusterView
from router_core.view.fold import fold
from tests.support.cluster_views import CALM, a_change, a_member, a_static, a_view, a_volatile
from tests.support.fleets import (
    ME,
    NOW,
    POLICY,
    a_choice,
    a_ledger,
    a_request,
    choice_of,
    chosen_node,
    decided,
    parsed_hints,
)

MIB, GIB = 2**20, 2**30


def folded(
    view: ClusterView,
    profiles: Profiles | None = None,
    previous: Fleet | None = None,
    live: Live | None = None,
) -> Fleet:
    return fold_fleet(
        previous, view, profiles or Profiles(ProfilePolicy()), POLICY, live or Live(ledger=a_ledger()), NOW
    )


def the_row(*changes: ViewChange, **over: Any) -> Row:
    """The one row of node ``a``."""
    (row,) = folded(a_view(*(changes or (a_change("a", **over),)))).rows
    return row


def cold(**model: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": "tiny", "engine": 0, "size_mib": 4096}
    return {"volatile": a_volatile(residents=()), "static": a_static(models=(ModelFacts(**(facts | model)),))}


def test_a_row_says_who_where_and_what() -> None:
    row = the_row()
    assert (row.node_name, row.endpoint, row.model, row.label) == ("a", "llamacpp", "tiny", "@a/llamacpp")
    assert row.key == f"{row.node_id}/llamacpp"
    assert (row.resident, row.slots, row.ceiling, row.ctx) == (True, 4, 12, 8192)
    assert row.gate is Gate.OPEN
    assert (row.memory, row.switch, row.load_s) == (0.0, 0.0, 0.0)
    assert row.pressure == 0.05


@pytest.mark.parametrize(
    ("over", "field", "value"),
    [
        ({"volatile": a_volatile(engines=(EngineLoad(state=EngineState.DOWN),))}, "down", "engine"),
        ({"volatile": a_volatile(engines=(EngineLoad(state=EngineState.STARTING),))}, "down", "engine"),
        ({"volatile": a_volatile(engines=(EngineLoad(state=EngineState.DRAINING),))}, "draining", True),
        ({"volatile": a_volatile(engines=(EngineLoad(state=EngineState.FAILING),))}, "backup", "failing"),
        ({"volatile": a_volatile(flags=int(Flag.DRAINING))}, "draining", True),
        ({"volatile": a_volatile(flags=int(Flag.LONELY))}, "down", "node"),
        ({"volatile": a_volatile(flags=int(Flag.CONFLICT))}, "down", "node"),
        ({"quarantined": True}, "down", "node"),
        ({"state": Liveness.UNCONFIRMED}, "down", "unconfirmed"),
        ({"state": Liveness.LATE}, "down", None),
    ],
)
def test_what_a_node_says_decides_whether_it_is_up(
    over: dict[str, Any], field: str, value: str | bool | None
) -> None:
    assert getattr(the_row(**over), field) == value


def test_a_cold_model_where_nobody_knows_of_memory_is_a_last_resort_and_a_warm_one_is_none() -> None:
    blind = tuple(row for row in CALM if row.code != ResourceCode.VRAM)
    over = cold()
    over["volatile"] = a_volatile(residents=(), resources=blind)
    row = the_row(**over)
    assert (row.backup, row.loads, row.gate) == ("unknown", True, Gate.OPEN)
    assert the_row(volatile=a_volatile(resources=blind)).backup is None
    assert decided(a_request(), folded(a_view(a_change("a", **over)))).action is Action.ROUTE_COLD


def test_a_node_without_the_role_is_untrusted() -> None:
    view = a_view(a_change("a"), members=(a_member("a", int(Role.ROUTER)),))
    assert folded(view).rows[0].untrusted
    assert decided(a_request(), folded(view)).record.excluded_counts == {"untrusted": 1}


def test_a_suspect_node_backs_up_only_while_no_peer_is_fresh() -> None:
    suspect = a_change("a", state=Liveness.SUSPECT)
    alone = the_row(suspect)
    assert (alone.down, alone.backup) == (None, "suspect")
    both = folded(a_view(suspect, a_change("b", static=a_static(models=()))))
    assert both.rows[0].down == "suspect"


def test_unlike_lists_read_as_unknown() -> None:
    row = the_row(volatile=a_volatile(engines=()))
    assert (row.resident, row.in_flight, row.down, row.room_bytes) == (False, 0, None, None)


@pytest.mark.parametrize(
    ("state", "resident", "loading"),
    [
        (ModelState.RESIDENT, True, False),
        (ModelState.LOADING, False, True),
        (ModelState.SLEEPING, False, False),
        (ModelState.UNLOADING, False, False),
        (99, False, False),
    ],
)
def test_only_resident_is_warm_and_a_load_under_way_counts_down(
    state: int | ModelState, resident: bool, loading: bool
) -> None:
    residents = (ResidentModel(model=0, engine=0, state=state, load_left_ds=25),)
    row = the_row(volatile=a_volatile(residents=residents))
    assert (row.resident, row.loading) == (resident, loading)
    if loading:
        assert row.load_s == 2.5


def test_a_model_not_in_memory_needs_an_engine_that_loads() -> None:
    assert the_row(**cold()).loadable
    static = a_static()
    for policy in (LoadPolicy.FIXED, LoadPolicy.TOLD_BY_US):
        engine = replace(static.engines[0], load_policy=policy)
        row = the_row(static=replace(static, engines=(engine,)), volatile=a_volatile(residents=()))
        assert not row.loadable


def test_need_and_room_give_the_memory_factor() -> None:
    row = the_row(**cold(kv_bytes_per_token=1000, ctx_served=8192, parallel=4))
    need = 1.05 * 4096 * MIB + 1000 * 8192 * 4 + 300 * MIB
    assert row.need_bytes == round(need)
    assert row.room_bytes == 18_000 * MIB
    scale = 0.05 * 24_576 * MIB
    assert row.memory == pytest.approx(1 / (1 + math.exp(-(need - 18_000 * MIB) / scale)))
    assert the_row(**cold(size_mib=None)).memory == 0.33


def test_nine_of_eleven_gib_on_a_24_gib_card_costs_what_the_worked_example_says() -> None:
    assert logistic((9 - 11) / 1.2) == pytest.approx(0.159, abs=0.001)
    assert (logistic(-1e9), logistic(1e9)) == (0.0, 1.0)


def test_offload_adds_ram_and_a_remote_host_has_no_limit() -> None:
    static = a_static()
    offload = replace(static.engines[0], flags=int(EngineFlag.ALLOW_OFFLOAD))
    row = the_row(static=replace(static, engines=(offload,)), volatile=a_volatile(residents=()))
    assert row.room_bytes == (18_000 + 16_384) * MIB
    remote = replace(static.engines[0], flags=int(EngineFlag.REMOTE_HOST))
    row = the_row(static=replace(static, engines=(remote,)), volatile=a_volatile(residents=()))
    assert (row.room_bytes, row.memory, row.pressure, row.need_bytes) == (None, 0.0, 0.0, 0)


def test_a_load_that_evicts_costs_more_than_one_that_finds_room() -> None:
    models = (
        ModelFacts(name="tiny", engine=0, size_mib=4096),
        ModelFacts(name="other", engine=0, size_mib=20_000),
    )
    other = ResidentModel(model=1, engine=0, state=ModelState.RESIDENT, mem_mib=20_000, idle_s=10)

    def switch(free: int, idle: int) -> float:
        volatile = a_volatile(
            residents=(replace(other, idle_s=idle),),
            gpus=(GpuLoad(vram_free_mib=free, level=Level.NONE, score_c=0, state=GpuState.OK),),
        )
        fleet = folded(a_view(a_change("a", static=a_static(models=models), volatile=volatile)))
        return next(row.switch for row in fleet.rows if row.model == "tiny")

    assert switch(18_000, 10) == 0.0
    assert switch(1_000, 10) > switch(1_000, 36_000) > 0.0


def test_what_an_eviction_costs_is_what_the_evicted_model_takes_to_load_again() -> None:
    """A small model that loads in 2 s would push out one that took a minute, or one that took a second."""
    models = (
        ModelFacts(name="tiny", engine=0, size_mib=4096),
        ModelFacts(name="other", engine=0, size_mib=20_000),
    )
    volatile = a_volatile(
        residents=(ResidentModel(model=1, engine=0, state=ModelState.RESIDENT, mem_mib=20_000, idle_s=10),),
        gpus=(GpuLoad(vram_free_mib=1_000, level=Level.NONE, score_c=0, state=GpuState.OK),),
    )
    view = a_view(a_change("a", static=a_static(models=models), volatile=volatile))
    keys = {row.model: row.profile_key for row in folded(view).rows}

    def switch(**loads_s: float) -> float:
        profiles = Profiles(ProfilePolicy())
        for model, seconds in loads_s.items():
            profiles.learn(Outcome(key=keys[model], at_ms=NOW, result=Result.OK, load_ms=1000 * seconds))
        return next(row.switch for row in folded(view, profiles=profiles).rows if row.model == "tiny")

    assert switch(tiny=2.0, other=60.0) == pytest.approx(1 - math.exp(-60 / POLICY.debt_scale_s), abs=1e-3)
    assert switch(tiny=2.0, other=1.0) == pytest.approx(1 - math.exp(-1 / POLICY.debt_scale_s), abs=1e-3)
    assert switch(other=60.0) == switch(tiny=30.0, other=60.0)


def test_the_longest_idle_is_evicted_first_and_no_more_than_must_be() -> None:
    models = (
        ModelFacts(name="tiny", engine=0, size_mib=4096),
        *(ModelFacts(name=f"other{number}", engine=0, size_mib=9_000) for number in (1, 2)),
    )

    def switch(*idle: int) -> float:
        residents = tuple(
            ResidentModel(model=number, engine=0, state=ModelState.RESIDENT, mem_mib=9_000, idle_s=idle_s)
            for number, idle_s in enumerate(idle, start=1)
        )
        gpus = (GpuLoad(vram_free_mib=1_000, level=Level.NONE, score_c=0, state=GpuState.OK),)
        volatile = a_volatile(residents=residents, gpus=gpus)
        fleet = folded(a_view(a_change("a", static=a_static(models=models), volatile=volatile)))
        return next(row.switch for row in fleet.rows if row.model == "tiny")

    assert switch(10, 36_000) == switch(36_000, 10) == switch(36_000)
    assert switch(36_000) < switch(10)


def test_the_context_is_the_one_in_memory_else_the_one_served_else_the_most() -> None:
    model = ModelFacts(name="tiny", engine=0, ctx_served=16_384, ctx_max=131_072)
    static = a_static(models=(model,))
    warm = the_row(static=static)
    assert (warm.ctx, warm.ctx_most, warm.resident_ctx) == (8192, 131_072, 8192)
    asleep = a_volatile(residents=())
    assert the_row(static=static, volatile=asleep).ctx == 16_384
    assert the_row(static=a_static(models=(replace(model, ctx_served=None),)), volatile=asleep).ctx == 131_072
    bare = replace(model, ctx_served=None, ctx_max=None)
    assert the_row(static=a_static(models=(bare,)), volatile=asleep).ctx is None


def test_capabilities_known_at_both_levels_must_agree() -> None:
    static = a_static()
    engine = replace(static.engines[0], cap_known=0b0111, cap_has=0b0011)
    model = ModelFacts(name="tiny", engine=0, cap_known=0b1110, cap_has=0b1010)
    row = the_row(static=replace(static, engines=(engine,), models=(model,)))
    assert row.cap_yes == 0b1011
    assert row.cap_no == 0b0100


def test_only_nodes_about_which_something_changed_are_folded_again() -> None:
    view = a_view(a_change("a"), a_change("b"))
    profiles = Profiles(ProfilePolicy())
    live = Live(ledger=a_ledger())
    first = folded(view, profiles, live=live)
    members = {member.id16: member for member in (a_member("a"), a_member("b"))}
    moved = fold(view, [a_change("b", seq=2, static=view.nodes[a_member("b").id16].static)], members, NOW)
    second = folded(moved, profiles, first, live)
    assert second.rows[0] is first.rows[0]
    assert second.rows[1] is not first.rows[1]
    profiles.learn(an_outcome(first.rows[0].profile_key, pp=1000.0, tg=60.0))
    third = folded(moved, profiles, second, live)
    assert third.rows[0] != second.rows[0]
    tuned = fold_fleet(third, moved, profiles, with_policy(POLICY, name="other"), live, NOW)
    assert tuned.rows[0] is not third.rows[0]


def test_a_step_by_step_fleet_equals_one_built_anew() -> None:
    profiles, live = Profiles(ProfilePolicy()), Live(ledger=a_ledger())
    members = {member.id16: member for member in map(a_member, "abc")}
    view, fleet = a_view(a_change("a"), a_change("b"), a_change("c")), None
    for step in range(12):
        name = "abc"[step % 3]
        state = Liveness.SUSPECT if step % 4 == 3 else Liveness.FRESH
        view = fold(view, [a_change(name, seq=step + 2, state=state)], members, NOW)
        fleet = folded(view, profiles, fleet, live)
        profiles.learn(an_outcome(fleet.rows[step % 3].profile_key, pp=700.0 + step, tg=40.0))
    fleet = folded(view, profiles, fleet, live)
    assert fleet.rows == folded(view, profiles, None, live).rows


def test_the_order_in_which_nodes_were_heard_changes_no_row() -> None:
    changes = [a_change(name) for name in "cab"]
    profiles, live = Profiles(ProfilePolicy()), Live(ledger=a_ledger())
    one = folded(a_view(*changes), profiles, live=live)
    two = folded(a_view(*reversed(changes)), profiles, live=live)
    assert one.rows == two.rows


def test_folding_covers_own_work_that_the_new_record_shows() -> None:
    live = Live(ledger=a_ledger())
    fleet = folded(a_view(a_change("a")), live=live)
    live.ledger.reserve(a_choice(fleet.rows[0]), NOW)
    folded(a_view(a_change("a", seq=2, mono_ms=NOW - 100)), live=live)
    assert live.ledger.owed
    seen = SeenRouter(router=ME[:8], inst=live.ledger.inst, seq=1, accepted=1)
    folded(a_view(a_change("a", seq=3, volatile=a_volatile(seen=(seen,)))), live=live)
    assert not live.ledger.owed


def disp(work: int) -> Dispatch:
    return Dispatch(total=1, rps_c=1, work_c=work)


def test_the_herd_multiplier_weighs_all_routers_by_their_work() -> None:
    me = id16_of(ME)

    def m_r(own: int | None, *others: int) -> float:
        changes = [a_change("x", origin=me, volatile=a_volatile(disp=None if own is None else disp(own)))]
        changes += [a_change(f"n{i}", volatile=a_volatile(disp=disp(work))) for i, work in enumerate(others)]
        members = tuple(a_member(f"n{i}") for i in range(len(others)))
        return herd_multiplier(a_view(*changes, members=members), POLICY)

    assert m_r(100) == m_r(100, 0) == 1.0
    assert m_r(100, 300) == 4.0
    assert m_r(100, *[300] * 7) == 8.0
    assert m_r(100, *[300] * 9) == 16.0
    assert m_r(0, 300) == m_r(None, 300) == 8.0


def test_routers_that_are_not_fresh_do_not_count() -> None:
    me = id16_of(ME)
    own = a_change("x", origin=me, volatile=a_volatile(disp=disp(100)))
    late = a_change("a", state=Liveness.LATE, volatile=a_volatile(disp=disp(900)))
    assert herd_multiplier(a_view(own, late, members=(a_member("a"),)), POLICY) == 1.0


def learned(fleet: Fleet, name: str, *, pp: float, tg: float, n: int) -> Profiles:
    """Profiles after ``n`` equal samples of the row of node ``name``."""
    profiles = Profiles(ProfilePolicy())
    key = next(row.profile_key for row in fleet.rows if row.node_name == name)
    for _ in range(n):
        profiles.learn(an_outcome(key, pp=pp, tg=tg))
    return profiles


def an_outcome(key: ProfileKey, *, pp: float, tg: float) -> Outcome:
    """A good answer at these speeds."""
    return Outcome(
        key=key,
        at_ms=NOW,
        result=Result.OK,
        prompt_tokens=1000,
        prompt_ms=1e6 / pp,
        gen_tokens=101,
        gen_ms=1e5 / tg,
    )


def test_an_untried_node_is_not_taken_for_faster_than_a_measured_equal() -> None:
    view = a_view(a_change("a"), a_change("b"))
    untried = folded(view)
    prior_s = untried.rows[0].token_s
    profiles = learned(untried, "a", pp=300.0, tg=10.0, n=30)
    fleet = folded(view, profiles)
    a, b = fleet.rows
    assert prior_s < 1 / 50
    assert 1 / b.token_s == pytest.approx(10.0, rel=0.35)
    assert 1 / a.token_s == pytest.approx(10.0, rel=0.35)


def test_an_untried_row_is_judged_by_the_same_quantisation_on_the_same_gpu_before_any_other() -> None:
    (gpu,) = a_static().gpus
    (model,) = a_static().models

    def host(name: str, gpu_name: str, quant: str) -> ViewChange:
        gpus = (replace(gpu, name=gpu_name),)
        return a_change(name, static=a_static(gpus=gpus, models=(replace(model, quant=quant),)))

    view = a_view(
        host("a", "card", "Q4_K_M"),
        host("b", "other", "Q4_K_M"),
        host("c", "card", "Q8_0"),
        host("d", "card", "Q4_K_M"),
        host("e", "third", "Q4_K_M"),
    )
    untried = folded(view)
    prior = 1 / untried.rows[0].token_s
    profiles = Profiles(ProfilePolicy())
    for row in untried.rows:
        times = {"a": 0.5, "b": 0.2, "c": 0.1}.get(str(row.node_name))
        if times is None:
            continue
        for _ in range(20):
            profiles.learn(an_outcome(row.profile_key, pp=1_000.0, tg=times * prior))
    speeds = {str(row.node_name): 1 / row.token_s for row in folded(view, profiles).rows}
    assert speeds["d"] == pytest.approx(0.5 * prior, rel=0.03)
    assert speeds["e"] == pytest.approx(0.2 * prior, rel=0.03)


def test_a_model_that_was_never_loaded_is_expected_to_load_as_the_others_did_at_its_endpoint() -> None:
    models = tuple(ModelFacts(name=name, engine=0, size_mib=4096) for name in ("tiny", "other"))
    asleep = a_volatile(residents=())
    view = a_view(
        *(a_change(name, static=a_static(models=models), volatile=asleep) for name in ("a", "b", "c"))
    )
    untried = folded(view)
    prior_s = untried.rows[0].load_s
    profiles = Profiles(ProfilePolicy())
    seconds = {"a": (prior_s, 9 * prior_s, 10 * prior_s, 11 * prior_s), "b": (0.5 * prior_s,)}
    for row in untried.rows:
        for load_s in seconds.get(str(row.node_name), ()) if row.model == "tiny" else ():
            profiles.learn(Outcome(key=row.profile_key, at_ms=NOW, result=Result.OK, load_ms=1000.0 * load_s))
    loads = {(str(row.node_name), row.model): row.load_s for row in folded(view, profiles).rows}
    assert loads["a", "other"] == pytest.approx(10 * prior_s, rel=0.03)
    assert loads["b", "other"] == pytest.approx(0.5 * prior_s, rel=0.03)
    assert 0.5 * prior_s < loads["c", "other"] < 10 * prior_s, "of a node that never loaded: as elsewhere"


def test_how_long_a_small_model_took_to_load_says_nothing_of_a_large_one() -> None:
    """Most of that time went to the engine's start."""
    models = (
        ModelFacts(name="small", engine=0, size_mib=300),
        ModelFacts(name="large", engine=0, size_mib=40_000),
    )
    view = a_view(a_change("a", static=a_static(models=models), volatile=a_volatile(residents=())))
    profiles = Profiles(ProfilePolicy())
    small, large = folded(view).rows
    profiles.learn(Outcome(key=small.profile_key, at_ms=NOW, result=Result.OK, load_ms=8_000.0))
    told_s = {row.model: row.load_s for row in folded(view, profiles).rows}
    assert told_s["small"] == 8.0 > 30 * small.load_s
    assert told_s["large"] < 6 * large.load_s


@pytest.mark.threat("T12")
def test_a_liar_is_ranked_by_observation_after_twenty_requests() -> None:
    claim = ProfileFacts(model=0, engine=0, n=500, prompt_dtps=150_000, gen_dtps=5_000)
    honest = ProfileFacts(model=0, engine=0, n=500, prompt_dtps=30_000, gen_dtps=1_000)
    view = a_view(
        a_change("a", static=a_static(profiles=(claim,))), a_change("b", static=a_static(profiles=(honest,)))
    )
    believed = folded(view)
    assert chosen_node(decided(a_request(), believed)) == "a"
    fleet = folded(view, learned(believed, "a", pp=1_500.0, tg=50.0, n=20))
    assert 1 / fleet.rows[0].token_s == pytest.approx(50.0, rel=0.01)
    assert chosen_node(decided(a_request(), fleet)) == "b"


@pytest.mark.threat("T12")
def test_so_is_one_that_lies_about_its_gpu_instead() -> None:
    (gpu,) = a_static().gpus
    assert gpu.mem_bw_gbs is not None
    boaster = a_static(gpus=(replace(gpu, mem_bw_gbs=10 * gpu.mem_bw_gbs),))
    view = a_view(a_change("a", static=boaster), a_change("b"))
    believed = folded(view)
    assert chosen_node(decided(a_request(), believed)) == "a"
    profiles = learned(believed, "a", pp=1_500.0, tg=50.0, n=20)
    key = next(row.profile_key for row in believed.rows if row.node_name == "b")
    for _ in range(20):
        profiles.learn(an_outcome(key, pp=3_000.0, tg=100.0))
    fleet = folded(view, profiles)
    assert [1 / row.token_s for row in fleet.rows] == [pytest.approx(50.0), pytest.approx(100.0)]
    assert chosen_node(decided(a_request(), fleet)) == "b"


def test_a_path_like_or_broken_name_is_not_offered() -> None:
    models = (
        ModelFacts(name="a//b", engine=0),
        ModelFacts(name="tiny", engine=7),
        ModelFacts(name="ok", engine=0),
    )
    assert [row.model for row in folded(a_view(a_change("a", static=a_static(models=models)))).rows] == ["ok"]


def test_aliases_of_a_manifest_reach_the_row_under_its_own_name() -> None:
    models = (ModelFacts(name="tiny", engine=0, aliases=("chat",)),)
    fleet = folded(a_view(a_change("a", static=a_static(models=models))))
    decision = decided(a_request(model="chat"), fleet)
    assert choice_of(decision).model == "tiny"


def test_an_engine_that_a_node_says_is_outside_the_mesh_is_no_row_of_the_mesh() -> None:
    flags = int(EngineFlag.CLOUD | EngineFlag.REMOTE_HOST)
    outside = replace(a_static().engines[0], flags=flags, price_in=5_000, price_out=20_000)
    fleet = folded(a_view(a_change("a", static=a_static(engines=(outside,)))))
    (row,) = fleet.rows
    assert (row.cloud, row.price_in, row.price_out) == (True, 0.5, 2.0)
    assert decided(a_request(), fleet).record.excluded_counts == {"locality": 1}


@pytest.mark.lesson("exo-explore/exo#2180: a CPU before a GPU")
def test_a_ram_host_is_ranked_below_a_gpu_host_by_priors_alone() -> None:
    ram = a_static(gpus=(), engines=(replace(a_static().engines[0], gpus=()),))
    slow = a_change("a", static=ram, volatile=a_volatile(gpus=()))
    fleet = folded(a_view(slow, a_change("b")))
    for number in range(20):
        assert chosen_node(decided(a_request(request_id=f"r{number}"), fleet)) == "b"


def test_a_node_that_is_far_away_costs_its_round_trip_and_none_costs_less_than_the_policy_says() -> None:
    fleet = folded(a_view(a_change("a", rtt_ms=0), a_change("b", rtt_ms=80), a_change("c")))
    nets = {}
    for name in ("a", "b", "c"):
        chosen = decided(a_request(hints=parsed_hints(require=f"node=@{name}")), fleet).chosen
        assert chosen is not None
        nets[name] = chosen.est.net
    assert nets == {"a": 0.001, "b": pytest.approx(0.08), "c": 0.001}


def test_a_remote_request_pays_for_its_body_on_the_wire() -> None:
    fleet = folded(a_view(a_change("a")))
    light = choice_of(decided(a_request(body_bytes=0), fleet)).est
    heavy = choice_of(decided(a_request(body_bytes=20_000_000), fleet)).est
    assert light.net == pytest.approx(POLICY.rtt_s)
    assert heavy.net == pytest.approx(POLICY.rtt_s + 0.2)
    assert choice_of(decided(a_request(), fleet, with_policy(POLICY, rtt_s=0.5))).est.net == 0.5
