"""From samples to the parts of V and S records."""

import pytest

from router_core.policy.pressure import GIB
from router_core.pressure.samples import (
    Reading,
    ResourceState,
    Sampled,
    Status,
    aged,
    measured,
    missing,
    unsupported,
)
from router_core.pressure.wire import host_facts, host_load, node_level, platform_facts, resource_levels
from router_core.record.state import Flag, HostFacts, HostLoad, Level, Platform, ResourceCode, ResourceLevel
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
    assert status == [Status.OK, Status.STALE, Status.STALE, Status.UNKNOWN]
    slow = [
        aged(reading, 1_000 + age, 5_000, published=False).status for age in (7_500, 7_501, 50_000, 50_001)
    ]
    assert slow == [Status.OK, Status.STALE, Status.STALE, Status.UNKNOWN]
    assert aged(reading, 99_999, 1_000, published=True) == Reading(taken_ms=1_000, status=Status.UNKNOWN)


def test_what_cannot_be_known_does_not_age() -> None:
    never: Reading[int] = unsupported(1)
    assert aged(never, 10**9, 1_000, published=True) is never
