"""From samples to the parts of V and S records."""

from typing import Any

import pytest
from msgspec.structs import replace

from router_core.policy.pressure import GIB
from router_core.pressure.samples import (
    GpuIdentity,
    GpuSample,
    GpuStanding,
    Reading,
    ReadingStatus,
    ResourceState,
    Sampled,
    aged,
    measured,
    missing,
    unsupported,
)
from router_core.pressure.wire import (
    gpu_facts,
    gpu_loads,
    host_facts,
    host_load,
    load_memory_mib,
    node_level,
    platform_facts,
    resource_levels,
)
from router_core.record.state import (
    Flag,
    GpuFacts,
    GpuLoad,
    GpuState,
    HostFacts,
    HostLoad,
    Level,
    Platform,
    ResourceCode,
    ResourceLevel,
)
from tests.support.host_samples import host


def sampled(memory: Reading[int], cpu: Reading[float], *resources: ResourceState) -> Sampled:
    return Sampled(
        at_ms=1_000, profile="server", host=None, mem_avail_bytes=memory, cpu_busy_pct=cpu, cpu_external_pct=cpu,
        resources=resources, flags=Flag(0),
    )  # fmt: skip


def resource(code: ResourceCode, level: Level | None, score: float | None, taken_ms: int) -> ResourceState:
    return ResourceState(code=code, level=level, score=score, taken_ms=taken_ms)


def test_memory_is_rounded_down_percent_half_up_and_the_older_age_counts() -> None:
    found = host_load(sampled(measured(3 * 1024**2 - 1, 1_000), measured(12.5, 1_420)), 2_000)
    assert found == HostLoad(ram_available_mib=2, cpu_external_pct=13, age_ds=10)


def test_a_value_older_than_ten_seconds_is_nil_and_its_age_runs_on() -> None:
    found = sampled(measured(GIB, 1_000), measured(5.0, 9_000))
    assert host_load(found, 11_000).ram_available_mib == 1_024
    assert host_load(found, 11_001) == HostLoad(ram_available_mib=None, cpu_external_pct=5, age_ds=100)
    assert host_load(found, 10**9).age_ds == 0xFFFF


def test_nothing_measured_is_nil_with_the_greatest_age() -> None:
    assert host_load(sampled(missing(0), missing(0)), 5) == HostLoad(age_ds=0xFFFF)


def test_resources_carry_level_score_and_age_of_the_deciding_signal() -> None:
    found = sampled(
        missing(0),
        missing(0),
        resource(ResourceCode.MEMORY, Level.HIGH, 0.125, 1_000),
        resource(ResourceCode.SWAP, None, None, 0),
    )
    assert resource_levels(found, 1_500) == (ResourceLevel(code=1, level=2, score_c=13, age_ds=5),)
    assert resource_levels(found, 12_000) == (ResourceLevel(code=1, age_ds=110),)
    assert node_level(found, 1_500) is Level.HIGH
    assert node_level(found, 12_000) is None


def test_the_node_level_is_the_maximum_over_known_resources() -> None:
    states = [
        resource(ResourceCode.MEMORY, Level.NONE, 0, 900),
        resource(ResourceCode.SWAP, Level.ELEVATED, 0.2, 900),
    ]
    assert node_level(sampled(missing(0), missing(0), *states), 1_000) is Level.ELEVATED
    assert node_level(sampled(missing(0), missing(0), states[0]), 1_000) is Level.NONE


def test_host_facts_tell_limits_apart_from_the_host() -> None:
    assert host_facts(host(1)) == HostFacts(cpus=8, ram_total_mib=65_536)
    limited = host(1, cpu_quota=1.505, mem_limit_bytes=3 * GIB)
    assert host_facts(limited) == HostFacts(
        cpus=8, ram_total_mib=65_536, cpu_quota_c=151, mem_limit_mib=3_072
    )


@pytest.mark.parametrize(
    ("system", "machine", "codes"),
    [
        ("linux", "x86_64", (1, 1)),
        ("darwin", "arm64", (2, 2)),
        ("linux", "aarch64", (1, 2)),
        ("plan9", "mips", (0, 0)),
    ],
)
def test_a_platform_is_told_in_codes(system: str, machine: str, codes: tuple[int, int]) -> None:
    found = platform_facts(system=system, machine=machine, profile="desktop", router=True)
    assert found == Platform(os=codes[0], arch=codes[1], profile=1, router=1)


def test_a_reading_turns_stale_and_then_unknown() -> None:
    reading = measured(7, 1_000)
    status = [
        aged(reading, 1_000 + age, 1_000, published=True).status for age in (3_000, 3_001, 10_000, 10_001)
    ]
    assert status == [ReadingStatus.OK, ReadingStatus.STALE, ReadingStatus.STALE, ReadingStatus.UNKNOWN]
    slow = [
        aged(reading, 1_000 + age, 5_000, published=False).status for age in (7_500, 7_501, 50_000, 50_001)
    ]
    assert slow == [ReadingStatus.OK, ReadingStatus.STALE, ReadingStatus.STALE, ReadingStatus.UNKNOWN]
    assert aged(reading, 99_999, 1_000, published=True) == Reading(
        taken_ms=1_000, status=ReadingStatus.UNKNOWN
    )


def test_what_cannot_be_known_does_not_age() -> None:
    never: Reading[int] = unsupported(1)
    assert aged(never, 10**9, 1_000, published=True) is never


def standing(key: str = "ab" * 8, **changes: Any) -> GpuStanding:
    """A GPU read at 1 s, with 20 of 24 GiB free."""
    fields: dict[str, Any] = {
        "identity": GpuIdentity(key=key, name="card", vram_total_bytes=24 * GIB, mem_bw_gbs=1_008, cc10=89),
        "state": GpuState.OK,
        "util_pct": measured(40, 1_000),
        "vram_free_bytes": measured(20 * GIB, 1_000),
    }
    rated: dict[str, Any] = {
        "external_pct": measured(12.5, 1_000),
        "source": 4,
        "level": Level.NONE,
        "score": 0.125,
    }
    sample = GpuSample(**{name: changes.pop(name, value) for name, value in fields.items()})
    return GpuStanding(sample=sample, **(rated | changes))


def host_of(*gpus: GpuStanding, **changes: Any) -> Sampled:
    return replace(sampled(measured(8 * GIB, 1_000), measured(5.0, 1_000)), gpus=gpus, **changes)


def test_a_gpu_is_told_with_values_age_level_and_evidence() -> None:
    found = host_of(standing())
    (facts,) = gpu_facts(found)
    assert facts == GpuFacts(
        uuid8=b"\xab" * 8, name="card", vram_total_mib=24_576, vendor=1, cc10=89, mem_bw_gbs=1_008
    )
    assert gpu_loads((facts,), found, 1_500) == (
        GpuLoad(
            util_pct=40,
            external_util_pct=13,
            vram_free_mib=20_480,
            score_c=13,
            level=0,
            age_ds=5,
            state=0,
            source=4,
        ),
    )


@pytest.mark.parametrize(
    "state",
    [GpuState.UNKNOWN, GpuState.UNRESPONSIVE, GpuState.DENIED, GpuState.RELEASED, GpuState.QUARANTINED],
)
def test_a_gpu_that_does_not_answer_sends_its_state_and_no_values(state: GpuState) -> None:
    found = host_of(standing(state=state))
    assert gpu_loads(gpu_facts(found), found, 1_500) == (GpuLoad(age_ds=5, state=state),)


def test_a_lost_gpu_is_critical_and_has_no_memory() -> None:
    found = host_of(standing(state=GpuState.LOST))
    assert gpu_loads(gpu_facts(found), found, 1_500) == (
        GpuLoad(score_c=100, level=3, age_ds=5, state=GpuState.LOST),
    )


def test_gpus_are_told_in_the_order_of_the_facts_and_an_unknown_one_is_unknown() -> None:
    one, two = standing("11" * 8), standing("22" * 8, util_pct=measured(7, 1_000))
    facts = gpu_facts(host_of(one, two))
    loads = gpu_loads(facts, host_of(two), 1_000)
    assert [(load.state, load.util_pct) for load in loads] == [(GpuState.UNKNOWN, None), (GpuState.OK, 7)]
    assert [load.state for load in gpu_loads(facts, None, 1_000)] == [GpuState.UNKNOWN] * 2


def test_more_gpus_than_the_layout_holds_are_said_by_a_flag() -> None:
    facts = gpu_facts(host_of(*(standing(f"{n:016x}") for n in range(18)), reboot_pending=True))
    assert len(facts) == 16
    assert [entry.flags for entry in facts[-2:]] == [8, 72]


def test_flags_tell_display_and_persistence() -> None:
    identity = GpuIdentity(key="ab" * 8, name="x" * 99, display=True, persistence=False, unified=True)
    (facts,) = gpu_facts(host_of(standing(identity=identity)))
    assert (facts.flags, facts.memory, len(facts.name), facts.vram_total_mib) == (5, 1, 64, None)


def test_a_cold_load_goes_to_the_memory_of_the_usable_gpus() -> None:
    two = host_of(standing("11" * 8), standing("22" * 8))
    assert load_memory_mib(two, 1_000) == 40 * 1_024
    lost = host_of(standing("11" * 8), standing("22" * 8, state=GpuState.LOST))
    assert load_memory_mib(lost, 1_000) == 20 * 1_024
    assert load_memory_mib(host_of(standing(state=GpuState.UNKNOWN)), 1_000) is None
    assert load_memory_mib(host_of(standing(), standing("22" * 8, vram_free_bytes=missing(0))), 1_000) is None
    assert load_memory_mib(two, 12_000) is None


def test_a_cold_load_goes_to_the_hosts_memory_where_there_is_no_gpu_or_it_is_shared() -> None:
    assert load_memory_mib(host_of(), 1_000) == 8 * 1_024
    assert load_memory_mib(host_of(gpu_expected=True), 1_000) is None
    assert load_memory_mib(host_of(), 12_000) is None
    assert load_memory_mib(None, 1_000) is None
    shared = GpuIdentity(key="ab" * 8, name="GB10", unified=True)
    assert (
        load_memory_mib(host_of(standing(identity=shared, vram_free_bytes=measured(8 * GIB, 1_000))), 1_000)
        == 8_192
    )
