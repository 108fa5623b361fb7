"""From what a host measures to who serves: others' load takes a node out with its reason and lets it back in, own
load never does, and what is unknown is never taken for idle."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from router_core.ids import NodeName, id16_of
from router_core.placement.candidates.fleet import Fleet, Live, fold_fleet
from router_core.placement.decision.decide import decide
from router_core.placement.decision.decision import Decision
from router_core.placement.decision.ingress import IngressAsk, admit
from router_core.placement.reasons import Cause, Reason
from router_core.policy.pressure import GIB, SERVER
from router_core.policy.profile import ProfilePolicy
from router_core.pressure import wire
from router_core.pressure.gpus import GpuTracks
from router_core.pressure.machine import PressureMachine, SignalsSampled
from router_core.pressure.samples import (
    CpuTimes,
    EngineCgroup,
    GpuIdentity,
    GpuSample,
    HostSample,
    Sampled,
    aged,
    measured,
    missing,
)
from router_core.pressure.signals import OwnUse, host_inputs
from router_core.pressure.split import CpuSplit, OwnTrace
from router_core.profile.profiles import Profiles
from router_core.record.membership import Member
from router_core.record.state import Dialect, Flag, GpuState, Role, Static, Volatile
from router_core.view.fold import empty, fold
from tests.support.cluster_views import a_change, a_member, a_static, a_volatile
from tests.support.fleets import ME, NOW, POLICY, a_ledger, a_request
from tests.support.host_samples import host

CORES = 8
Changes = Callable[[int], dict[str, Any]]


class PressedHost:
    """A server with one GPU of 24 GiB that is read once a second, and what it would publish."""

    def __init__(self) -> None:
        self.machine = PressureMachine(SERVER)
        self.tracks, self.trace = GpuTracks(), OwnTrace()
        self.split = CpuSplit(self.trace)
        self.now = 0
        self.busy_s = self.engine_s = self.stalled_s = self.disk_s = 0.0
        self.sampled: Sampled | None = None

    def run(
        self,
        seconds: int,
        *,
        others: float = 0.0,
        engine: float = 0.0,
        stalled: float = 0.0,
        disk: float = 0.0,
        avail_gib: float = 40,
        util: int | None = 0,
        free_gib: float = 20,
        ours: bool = False,
        cooling: bool = False,
        state: GpuState = GpuState.OK,
    ) -> "PressedHost":
        """Cores used by others and by the engine, shares of time stalled for CPU and disk, memory, the GPU (None:
        it tells nothing), and whether work of ours runs or a model of ours loads."""
        for _ in range(seconds):
            self.now += 1_000
            if ours:
                self.trace.note(self.now)
            self.busy_s += others + engine
            self.engine_s += engine
            self.stalled_s += stalled
            self.disk_s += disk
            self._tick(
                self._host(avail_gib), self._gpu(util, free_gib, state), OwnUse(working=ours, cooling=cooling)
            )
        return self

    def _host(self, avail_gib: float) -> HostSample:
        now = self.now
        idle_s = CORES * now / 1_000 - self.busy_s
        return host(
            now,
            cpu_times=measured(CpuTimes(busy=(self.busy_s,), idle=idle_s), now),
            engines=(EngineCgroup(unit="llama-server.service", cpu_us=round(1e6 * self.engine_s)),),
            cpu_some_us=measured(round(1e6 * self.stalled_s), now),
            io_some_us=measured(round(1e6 * self.disk_s), now),
            mem_avail_bytes=measured(round(avail_gib * GIB), now),
        )

    def _gpu(self, util: int | None, free_gib: float, state: GpuState) -> GpuSample:
        now = self.now
        return GpuSample(
            identity=GpuIdentity(key="ab" * 8, name="card", vram_total_bytes=24 * GIB, mem_bw_gbs=1_000),
            state=state,
            util_pct=missing(now) if util is None else measured(util, now),
            vram_free_bytes=missing(now) if util is None else measured(round(free_gib * GIB), now),
        )

    def _tick(self, sample: HostSample, gpu: GpuSample, own: OwnUse) -> None:
        now = self.now
        gpus = self.tracks.fold([gpu], self.trace, own, now, 1_000)
        self.split.fold(sample, engines_up=1)
        external, mean = self.split.external_pct, self.split.external_mean_pct
        inputs = host_inputs(sample, now, 1_000, external=external, external_mean=mean, own=own)
        self.machine.handle(SignalsSampled(inputs=inputs, gpus=gpus), now)
        self.sampled = Sampled(
            at_ms=now,
            profile="server",
            host=sample,
            mem_avail_bytes=sample.mem_avail_bytes,
            cpu_busy_pct=self.split.busy_pct,
            cpu_external_pct=aged(external, now, 1_000, published=True),
            resources=self.machine.resources,
            flags=Flag(0),
            gpus=self.tracks.standings(self.machine.gpus, now, 1_000),
        )

    def told(self, *, resident: bool = True) -> tuple[Static, Volatile]:
        """What it says of itself: a calm engine under this pressure."""
        sampled = self.sampled
        assert sampled is not None
        static = a_static(gpus=wire.gpu_facts(sampled))
        calm = a_volatile() if resident else a_volatile(residents=())
        return static, replace(
            calm,
            level=wire.node_level(sampled, self.now),
            host=wire.host_load(sampled, self.now),
            gpus=wire.gpu_loads(static.gpus, sampled, self.now),
            resources=wire.resource_levels(sampled, self.now),
        )


def a_fleet_of(pressed: PressedHost, *, resident: bool = True, alone: bool = False) -> Fleet:
    """The view of a router: the pressed node ``a`` and, unless alone, a calm node ``b``."""
    static, volatile = pressed.told(resident=resident)
    changes = [a_change("a", static=static, volatile=volatile)] + ([] if alone else [a_change("b")])
    members = {a_member(name).id16: a_member(name) for name in ("a", "b")}
    return _folded(fold(empty(ME, NodeName("me")), changes, members, NOW))


def _folded(view: Any) -> Fleet:
    return fold_fleet(None, view, Profiles(ProfilePolicy()), POLICY, Live(ledger=a_ledger()), NOW)


def decision(pressed: PressedHost, **how: bool) -> Decision:
    return decide(a_request(), a_fleet_of(pressed, **how), POLICY, NOW, Random(1))


def left_out(made: Decision) -> list[tuple[Reason, str | None]]:
    return [(row.code, row.detail) for row in made.record.excluded]


def refusal(pressed: PressedHost, **how: Any) -> Cause | None:
    """What the pressed node's own ingress says to a request for its resident model."""
    static, volatile = pressed.told(**how)
    me = Member(id32=ME, der=b"me", roles=int(Role.NODE | Role.ROUTER), admission=1, name=NodeName("me"))
    change = a_change("me", origin=id16_of(ME), static=static, volatile=volatile)
    fleet = _folded(fold(empty(ME, NodeName("me")), [change], {me.id16: me}, NOW))
    ask = IngressAsk(
        endpoint="llamacpp",
        model="tiny",
        dialect=int(Dialect.CHAT),
        resident=True,
        ahead=0.0,
        patient=False,
    )
    return admit(ask, fleet)


OTHERS = [
    ({"util": 98}, "gpu_time"),
    ({"others": 6.0, "stalled": 0.8}, "cpu"),
    ({"disk": 0.9}, "io"),
    ({"avail_gib": 1.0}, "memory"),
]


@pytest.mark.parametrize(("load", "resource"), OTHERS, ids=[resource for _, resource in OTHERS])
def test_others_load_takes_a_node_out_with_its_reason_and_it_returns_when_that_clears(
    load: dict[str, Any], resource: str
) -> None:
    pressed = PressedHost().run(15)
    assert left_out(decision(pressed)) == []
    assert refusal(pressed) is None
    pressed.run(20, **load)
    made = decision(pressed)
    assert left_out(made) == [(Reason.PRESSURE, resource)]
    assert made.chosen is not None
    assert made.chosen.node_name == "b"
    assert refusal(pressed) is Cause.PRESSURE
    pressed.run(90)
    assert left_out(decision(pressed)) == []
    assert refusal(pressed) is None


def test_where_only_a_pressed_node_is_left_it_serves_and_the_record_says_so() -> None:
    made = decision(PressedHost().run(15).run(20, util=98), alone=True)
    assert made.chosen is not None
    assert made.record.degraded


def test_a_node_in_danger_serves_nothing_even_if_it_is_the_only_one() -> None:
    made = decision(PressedHost().run(15).run(20, avail_gib=1.0), alone=True)
    assert (made.chosen, left_out(made)) == (None, [(Reason.PRESSURE, "memory")])


@pytest.mark.parametrize(
    "load",
    [
        {"util": 100, "ours": True},
        {"engine": 8.0, "stalled": 0.9, "ours": True},
        {
            "util": 100,
            "engine": 8.0,
            "stalled": 0.9,
            "disk": 0.9,
            "free_gib": 0.2,
            "ours": True,
            "cooling": True,
        },
    ],
)
def test_own_load_alone_never_takes_a_node_out(load: dict[str, Any]) -> None:
    pressed = PressedHost().run(15)
    for _ in range(20):
        pressed.run(10, **load)
        assert left_out(decision(pressed)) == []
        assert refusal(pressed) is None
    pressed.run(3, free_gib=load.get("free_gib", 20), ours=True, cooling=True)
    pressed.run(60, free_gib=load.get("free_gib", 20))
    assert left_out(decision(pressed)) == []


def test_a_cold_load_goes_past_a_gpu_whose_memory_others_took() -> None:
    pressed = PressedHost().run(15).run(10, free_gib=0.4)
    assert left_out(decision(pressed)) == [], "what is resident is served"
    assert left_out(decision(pressed, resident=False)) == [(Reason.PRESSURE, "vram")]
    pressed.run(30)
    assert left_out(decision(pressed, resident=False)) == []


def test_a_gpu_that_tells_nothing_is_not_taken_for_idle() -> None:
    calm, silent = PressedHost().run(15), PressedHost().run(15).run(60, util=None, state=GpuState.UNKNOWN)
    assert left_out(decision(silent)) == [], "what is resident is served"
    cold = decision(silent, resident=False)
    assert left_out(cold) == []
    others = [each.out for each in cold.record.candidates if each.row != cold.record.chosen]
    assert others == ["backup"], "a load there is the last resort"
    scores = [
        next(row.pressure for row in a_fleet_of(each).rows if row.node_name == "a") for each in (calm, silent)
    ]
    assert scores[0] < POLICY.unknown_factor <= scores[1]


def test_a_pressed_gpu_that_falls_silent_stays_out_until_its_level_is_too_old() -> None:
    pressed = PressedHost().run(15).run(20, util=98)
    pressed.run(8, util=None, state=GpuState.UNRESPONSIVE)
    assert left_out(decision(pressed)) == [(Reason.PRESSURE, "gpu_time")]


def test_a_lost_gpu_shuts_the_endpoint_that_has_no_other() -> None:
    pressed = PressedHost().run(15).run(2, util=None, state=GpuState.LOST)
    assert left_out(decision(pressed)) == [(Reason.PRESSURE, "gpu")]
    assert refusal(pressed) is Cause.PRESSURE
