"""Hypothesis plays the fault injector: any sequence of mishaps, every rule in every step, agreement in the end."""

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from router_core.sim.mesh.world import World

HOST = st.integers(0, 3)
SPAN = st.sampled_from([50, 700, 3_000, 9_000])


class Cluster(RuleBasedStateMachine):
    """Four hosts at most. ``off`` are those without power, ``cuts`` the ways that are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.off: list[int] = []
        self.cuts: list[tuple[int, int]] = []

    @initialize(seed=st.integers(0, 2**16), nodes=st.integers(2, 4))
    def begin(self, seed: int, nodes: int) -> None:
        self.nodes = nodes
        self.world = World(seed, nodes)
        self.world.start_all()
        self.pass_ms(2_500)

    def pass_ms(self, ms: int) -> None:
        self.world.run_until(self.world.timeline.now + ms)

    def is_up(self, host: int) -> bool:
        return host < self.nodes and self.world.hosts[host].is_running

    @rule(span=SPAN)
    def advance(self, span: int) -> None:
        self.pass_ms(span)

    @rule(host=HOST)
    def kill(self, host: int) -> None:
        if self.is_up(host):
            self.world.kill(host)

    @rule(host=HOST)
    def leave(self, host: int) -> None:
        if self.is_up(host):
            self.world.leave(host)
            self.pass_ms(600)

    @rule(host=HOST, disk=st.sampled_from(["kept", "kept", "lost"]))
    def start(self, host: int, disk: str) -> None:
        if host < self.nodes and not self.is_up(host) and host not in self.off:
            if disk == "lost":
                self.world.hosts[host].disk = {}
                self.world.watch.disk_is_true[host] = False
            self.world.start(host)

    @rule(host=HOST, span=SPAN)
    def stall(self, host: int, span: int) -> None:
        if self.is_up(host):
            self.world.stall(host, span)

    @rule(host=HOST, span=SPAN)
    def suspend(self, host: int, span: int) -> None:
        if self.is_up(host):
            self.world.suspend(host, span)

    @rule(host=HOST)
    def power_off(self, host: int) -> None:
        if self.is_up(host):
            self.world.power_off(host)
            self.off.append(host)

    @precondition(lambda self: self.off)
    @rule()
    def power_on(self) -> None:
        self.world.power_on(self.off.pop())

    @rule(a=HOST, b=HOST, both=st.booleans())
    def cut(self, a: int, b: int, both: bool) -> None:
        if a != b and max(a, b) < self.nodes:
            for way in ((a, b), (b, a))[: 1 + both]:
                self.world.net.cut(*way)
                self.cuts.append(way)

    @precondition(lambda self: self.cuts)
    @rule()
    def heal(self) -> None:
        self.world.net.heal(*self.cuts.pop())

    @rule(a=HOST, b=HOST)
    def reset(self, a: int, b: int) -> None:
        if a != b and self.is_up(a) and self.is_up(b):
            self.world.reset(a, b)

    def teardown(self) -> None:
        while self.off:
            self.power_on()
        while self.cuts:
            self.heal()
        self.pass_ms(10_000)
        for host in range(self.nodes):
            self.world.start(host)
        self.pass_ms(45_000)
        self.world.watch.settled()


Cluster.TestCase.settings = settings(
    max_examples=20,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
)
TestCluster = Cluster.TestCase
