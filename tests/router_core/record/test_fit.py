import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from msgspec.structs import replace

from router_core import limits
from router_core.errors import LocalMisuse
from router_core.record.codec import decode_static, decode_volatile, encode_static, encode_volatile
from router_core.record.fit import S_BODY_MOST, V_BODY_MOST, fit_static, fit_volatile, in_range
from router_core.record.state import (
    EngineFacts,
    EngineLoad,
    Flag,
    GpuFacts,
    GpuLoad,
    HostLoad,
    Label,
    LostLink,
    ModelDemand,
    ModelFacts,
    ProfileFacts,
    ResidentModel,
    SeenRouter,
    Static,
    Volatile,
)
from tests.router_core.record.bodies import wild_statics, wild_volatiles

SHORT = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
BIG = 2**32 - 1


def resident(model: int, **changes: object) -> ResidentModel:
    full = ResidentModel(
        model=model,
        engine=0,
        state=2,
        load_left_ds=9_999,
        mem_mib=BIG,
        vram_share_pct=100,
        ctx=BIG,
        idle_s=1_000,
    )
    return replace(full, **changes)


def full_volatile(residents: int, busy: bool = False) -> Volatile:
    """As large as every list but ``residents`` allows."""
    return Volatile(
        gpus=(GpuLoad(vram_free_mib=BIG, age_ds=999),) * 16,
        engines=(EngineLoad(running=999, queued=999, slots=999, work_ds=BIG, age_ds=999, obtainable_mib=BIG),)
        * 16,
        residents=tuple(resident(i, running=int(busy), idle_s=1_000 + i) for i in range(residents)),
        seen=tuple(SeenRouter(router=bytes([i]) * 8, inst=BIG, seq=BIG, accepted=BIG) for i in range(16)),
        lost=(LostLink(id16=bytes(16), epoch=2**60, seq=2**60),) * 8,
        unlinked=(bytes(8),) * 8,
        demand=(ModelDemand(key8=bytes(8), rpm=BIG, work_c=BIG),) * 8,
    )


@SHORT
@given(body=wild_volatiles)
def test_whatever_an_origin_measured_fits_and_reads(body: Volatile) -> None:
    fitted = fit_volatile(body)
    data = encode_volatile(fitted)
    assert len(data) <= V_BODY_MOST
    decode_volatile(data)
    assert fit_volatile(fitted) == fitted


@SHORT
@given(body=wild_statics)
def test_whatever_an_origin_is_fits_and_reads(body: Static) -> None:
    fitted = fit_static(body)
    data = encode_static(fitted)
    assert len(data) <= S_BODY_MOST
    decode_static(data)
    assert fit_static(fitted) == fitted


def test_numbers_move_to_the_nearest_end_of_their_range() -> None:
    body = in_range(Volatile(level=9, host=HostLoad(ram_available_mib=2**40, cpu_external_pct=-3)))
    assert (body.level, body.host.ram_available_mib, body.host.cpu_external_pct) == (3, BIG, 0)


def test_unknown_stays_unknown() -> None:
    assert in_range(Volatile()).host.ram_available_mib is None


def test_texts_are_printable_ascii_within_their_limit() -> None:
    body = in_range(Static(gpus=(GpuFacts(uuid8=bytes(8), name="Gé\r\n\x1b" + 80 * "x"),)))
    assert body.gpus[0].name == "G????" + 59 * "x"


def test_a_body_in_range_is_the_same_object() -> None:
    body = full_volatile(3)
    assert in_range(body) is body


def test_demand_goes_first_then_unlinked_then_the_oldest_seen() -> None:
    small = full_volatile(0)
    sizes = [len(encode_volatile(full_volatile(n))) for n in range(40)]
    just_over = next(n for n, size in enumerate(sizes) if size > V_BODY_MOST)
    fitted = fit_volatile(full_volatile(just_over))
    assert len(fitted.demand) < 8
    assert fitted.unlinked == small.unlinked
    assert len(fitted.residents) == just_over
    fitted = fit_volatile(full_volatile(just_over + 14))
    assert fitted.demand == ()
    assert fitted.unlinked == ()
    assert fitted.flags & Flag.RELAY_ALL
    assert 0 < len(fitted.seen) < 16
    assert fitted.seen == small.seen[: len(fitted.seen)]
    assert len(fitted.residents) == just_over + 14


def test_then_models_without_a_request_go_longest_idle_first() -> None:
    body = full_volatile(48)
    busy = tuple(replace(model, waiting=1) for model in body.residents[30:])
    fitted = fit_volatile(replace(body, residents=body.residents[:30] + busy))
    assert fitted.seen == ()
    kept = [model.model for model in fitted.residents]
    assert kept == [*range(len(kept) - 18), *range(30, 48)]


def test_more_unlinked_than_fit_become_relay_all() -> None:
    fitted = fit_volatile(Volatile(unlinked=(bytes(8),) * 9))
    assert fitted.unlinked == ()
    assert fitted.flags == Flag.RELAY_ALL


def test_what_cannot_be_cut_is_our_own_fault() -> None:
    with pytest.raises(LocalMisuse, match=str(V_BODY_MOST)):
        fit_volatile(full_volatile(48, busy=True))
    with pytest.raises(LocalMisuse, match="17 gpus, limit 16"):
        fit_volatile(Volatile(gpus=(GpuLoad(),) * 17))
    with pytest.raises(LocalMisuse, match="17 engines, limit 16"):
        fit_static(Static(engines=(EngineFacts(name="a", kind="b"),) * 17))


def models(count: int, size: int = 100) -> tuple[ModelFacts, ...]:
    return tuple(
        ModelFacts(
            name=f"m{i:02}" + "x" * size,
            engine=0,
            digest=bytes(32),
            family="f" * 48,
            aliases=("a" * 128,) * 8,
        )
        for i in range(count)
    )


def test_aliases_go_before_profiles_and_profiles_before_models() -> None:
    profiles = tuple(ProfileFacts(model=i, engine=0, ctx=BIG, vram_mib=BIG, idle_h=i) for i in range(64))
    fitted = fit_static(Static(models=models(64), profiles=profiles))
    assert all(model.aliases == () for model in fitted.models)
    assert len(fitted.models) == len(fitted.profiles) == 64
    heavy = tuple(
        EngineFacts(name=f"e{i}", kind="k", labels=(Label(key="k" * 32, value="v" * 32),) * 16)
        for i in range(16)
    )
    fitted = fit_static(Static(engines=heavy, models=models(64, 120), profiles=profiles))
    assert 0 < len(fitted.profiles) < 64
    assert [profile.idle_h for profile in fitted.profiles] == list(range(len(fitted.profiles)))
    assert len(fitted.models) == 64


def test_ranked_models_are_kept_and_profiles_follow_their_positions() -> None:
    body = Static(
        models=models(80),
        profiles=(ProfileFacts(model=79, engine=0, n=79), ProfileFacts(model=70, engine=0, n=70)),
    )
    fitted = fit_static(body, ranked=[79, 75])
    names = [model.name[:3] for model in fitted.models]
    assert len(names) == limits.MODELS
    assert names == [*(f"m{i:02}" for i in range(62)), "m75", "m79"]
    assert [(fitted.models[profile.model].name[:3], profile.n) for profile in fitted.profiles] == [
        ("m79", 79)
    ]
    assert fitted.models_total == 80


def test_a_model_no_reader_would_accept_is_not_sent() -> None:
    fitted = fit_static(Static(models=(ModelFacts(name="../x", engine=0), ModelFacts(name="ok", engine=0))))
    assert [model.name for model in fitted.models] == ["ok"]


def test_fitting_keeps_the_largest_static_in_bounds() -> None:
    labels = tuple(Label(key="k" * 32, value="v" * 32) for _ in range(16))
    engines = tuple(
        EngineFacts(name=f"e{i}", kind="k" * 24, version="v" * 32, labels=labels, gpus=tuple(range(16)))
        for i in range(16)
    )
    body = Static(engines=engines, models=models(64), profiles=(ProfileFacts(model=0, engine=0),) * 64)
    assert len(msgspec.msgpack.encode(fit_static(body))) <= S_BODY_MOST
