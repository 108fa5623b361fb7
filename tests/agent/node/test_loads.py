"""Loads that a request caused: what the metric counts, and what it does not take for one."""

from msgspec.structs import replace

from agent.engines.contract import EndpointStatus, LoadSource, ObservedLoad, ResidencyState
from agent.node.state.loads import SeenLoads
from agent.observe.instruments import LoadMetrics
from tests.agent.node.rig import HandClock, a_resident, an_endpoint, an_owned


class Seen:
    """One engine that offers ``tiny`` as it goes through states."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.metrics = LoadMetrics()
        self.status: EndpointStatus = an_endpoint(owned=(an_owned("tiny"),), resident=())
        self.endpoints = {self.status.name: self.status}
        self.ordered: set[tuple[str, str]] = set()
        self.loads = SeenLoads(
            self.metrics,
            endpoints=lambda: self.endpoints,
            ordered=lambda key: key in self.ordered,
            clock=self.clock,
        )

    def is_now(self, *states: ResidencyState | None) -> None:
        for state in states:
            held = () if state is None else (a_resident(state=state),)
            self.told(replace(self.status, resident=held, load=ObservedLoad(source=LoadSource.OWN)))

    def told(self, status: EndpointStatus) -> None:
        self.clock.now += 1_000
        self.loads.engine_changed(status)

    @property
    def counted(self) -> tuple[float | None, float | None]:
        value = self.metrics.loads.value
        return value("request", "ok"), value("request", "failed")

    @property
    def timed(self) -> dict[str, float]:
        (_, seconds) = self.metrics.collect()
        return {suffix: value for suffix, _, _, value in seconds.series if suffix in ("_sum", "_count")}


def test_a_load_that_a_request_caused_is_counted_and_timed() -> None:
    seen = Seen()
    seen.is_now(
        None, ResidencyState.LOADING, ResidencyState.LOADING, ResidencyState.RESIDENT, ResidencyState.RESIDENT
    )
    assert (seen.counted, seen.timed) == ((1, 0), {"_sum": 2.0, "_count": 1})


def test_one_too_short_to_be_seen_is_counted_and_not_timed() -> None:
    seen = Seen()
    seen.is_now(None, ResidencyState.RESIDENT, ResidencyState.SLEEPING, ResidencyState.RESIDENT)
    assert (seen.counted, seen.timed) == ((2, 0), {"_sum": 0.0, "_count": 0})


def test_one_that_failed_is_counted_as_such() -> None:
    seen = Seen()
    seen.is_now(None, ResidencyState.LOADING, ResidencyState.FAILED, ResidencyState.LOADING, None)
    assert (seen.counted, seen.timed["_count"]) == ((0, 2), 0)


def test_what_this_node_ordered_is_counted_by_whoever_ordered_it() -> None:
    seen = Seen()
    seen.ordered.add((seen.status.name, "tiny"))
    seen.is_now(None, ResidencyState.LOADING, ResidencyState.RESIDENT)
    assert seen.counted == (0, 0)


def test_what_was_there_at_the_first_look_is_no_load_nor_what_is_back_with_its_engine() -> None:
    seen = Seen()
    seen.is_now(ResidencyState.RESIDENT)
    seen.told(replace(seen.status, resident=(), load=None))
    seen.is_now(ResidencyState.RESIDENT, ResidencyState.UNLOADING, ResidencyState.RESIDENT)
    assert seen.counted == (0, 0)


def test_an_endpoint_that_is_gone_is_forgotten() -> None:
    seen = Seen()
    seen.is_now(None, ResidencyState.LOADING)
    gone = seen.endpoints.pop(seen.status.name)
    seen.told(gone)
    seen.endpoints[gone.name] = gone
    seen.is_now(ResidencyState.RESIDENT)
    assert seen.counted == (0, 0)
