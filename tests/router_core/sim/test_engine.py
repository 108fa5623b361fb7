"""The simulated engine: batching, queue, memory, loads, eviction, forecasts."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_core.sim.placement.engine import GIB, Engine, EngineSpec, Job, ModelSpec, capacity_rps
from router_core.sim.timeline import Timeline


class Bench:
    """An engine with what its jobs reported: first tokens and ends in ms, by job."""

    def __init__(self, *, warm: tuple[str, ...] = ("m",), **over: Any) -> None:
        fields: dict[str, Any] = {
            "slots": 2,
            "models": (ModelSpec(name="m", size_bytes=4 * GIB, pp=1_000.0, tg=50.0),),
            "memory_bytes": 24 * GIB,
            "beta": 0.0,
        }
        self.timeline = Timeline()
        self.engine = Engine(self.timeline, EngineSpec(**(fields | over)), warm)
        self.firsts: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self.jobs: list[Job] = []

    def submit(
        self, prompt: int = 1_000, output: int = 51, model: str = "m", blocks: tuple[int, ...] = ()
    ) -> int:
        number = len(self.jobs)
        job = Job(
            model=model,
            prompt=prompt,
            output=output,
            blocks=blocks,
            on_first=lambda: self.firsts.__setitem__(number, self.timeline.now),
            on_end=lambda: self.ends.__setitem__(number, self.timeline.now),
        )
        self.jobs.append(job)
        self.engine.submit(job)
        return number

    def submit_at(self, at_ms: int, prompt: int, output: int, model: str) -> None:
        def come() -> None:
            self.submit(prompt, output, model)

        self.timeline.at(at_ms, come)

    def run(self, until_ms: int = 600_000) -> "Bench":
        self.timeline.run_until(until_ms)
        return self


def two_models(memory_gib: int) -> dict[str, Any]:
    models = (
        ModelSpec(name="m", size_bytes=4 * GIB, pp=1_000.0, tg=50.0),
        ModelSpec(name="n", size_bytes=4 * GIB, pp=1_000.0, tg=50.0),
    )
    return {"models": models, "memory_bytes": memory_gib * GIB, "load_bytes_per_s": 1.0 * GIB}


def test_a_longer_context_generates_slower() -> None:
    bench = Bench(depth_slope=0.5)
    bench.submit(prompt=1_000, output=48)
    bench.run()
    assert bench.firsts[0] == 1_000
    assert bench.ends[0] == 1_000 + 47 * 20 * 1.5


def test_answers_get_one_token_for_each_chunk_of_a_prompt_that_is_computed_beside_them() -> None:
    bench = Bench(chunk_tokens=100)
    bench.submit(prompt=1, output=101)
    bench.run(until_ms=1_001)
    bench.submit(prompt=1_000, output=2)
    bench.run()
    alone_ms, stalled_ms = 1_000, 1_000
    assert bench.ends[0] == 1 + alone_ms + stalled_ms + (100 - 50 - 10) * 20


def test_a_prompt_alone_is_as_fast_whatever_its_chunks() -> None:
    bench = Bench(chunk_tokens=100)
    bench.submit()
    bench.run()
    assert (bench.firsts[0], bench.ends[0]) == (1_000, 2_000)


def test_a_request_alone_takes_its_prompt_and_its_answer() -> None:
    bench = Bench()
    bench.submit()
    bench.run()
    assert (bench.firsts[0], bench.ends[0]) == (1_000, 2_000)


def test_prompts_share_the_prompt_speed_and_answers_slow_each_other_by_beta() -> None:
    bench = Bench(beta=0.5)
    bench.submit()
    bench.submit()
    bench.run()
    assert bench.firsts == {0: 2_000, 1: 2_000}
    assert bench.ends == {0: 3_500, 1: 3_500}


def test_plain_slots_do_not_slow_each_other() -> None:
    bench = Bench(shared_prompt=False)
    bench.submit()
    bench.submit()
    bench.run()
    assert bench.ends == {0: 2_000, 1: 2_000}


def test_beyond_its_slots_requests_wait_in_order() -> None:
    bench = Bench(slots=1)
    for _ in range(3):
        bench.submit()
    assert len(bench.engine.queue) == 2
    bench.run()
    assert bench.ends == {0: 2_000, 1: 4_000, 2: 6_000}


def test_a_cold_model_is_loaded_first_and_sooner_the_next_time() -> None:
    bench = Bench(warm=(), **two_models(memory_gib=6))
    bench.submit(model="m")
    bench.run(60_000)
    bench.submit(model="n")
    bench.run(120_000)
    bench.submit(model="m")
    bench.run(180_000)
    assert bench.firsts == {0: 5_000, 1: 65_000, 2: 120_000 + 2_500 + 1_000}
    assert bench.engine.loads == 3
    assert bench.engine.loaded_bytes == 12 * GIB
    assert list(bench.engine.resident) == ["m"]


def test_the_longest_unused_model_goes_first() -> None:
    models = tuple(ModelSpec(name=name, size_bytes=4 * GIB, pp=1e3, tg=50.0) for name in "mno")
    bench = Bench(warm=("m", "n"), models=models, memory_bytes=10 * GIB, load_bytes_per_s=1.0 * GIB)
    bench.submit(model="m")
    bench.run(10_000)
    bench.submit(model="n")
    bench.run(20_000)
    bench.submit(model="m")
    bench.run(30_000)
    bench.submit(model="o")
    bench.run(60_000)
    assert set(bench.engine.resident) == {"m", "o"}


def test_a_busy_model_is_never_evicted_and_the_queue_waits_for_it() -> None:
    bench = Bench(**two_models(memory_gib=6))
    bench.submit(model="m", output=501)
    bench.submit(model="n")
    bench.submit(model="m")
    bench.run(5_000)
    assert bench.engine.loads == 0
    bench.run()
    assert bench.ends[0] == 11_000
    assert bench.firsts[1] == 11_000 + 4_000 + 1_000
    assert bench.ends[2] > bench.ends[1]


def test_while_one_model_loads_requests_for_warm_ones_go_on() -> None:
    bench = Bench(slots=3, **two_models(memory_gib=20))
    bench.submit(model="n")
    bench.submit(model="m")
    bench.run()
    assert bench.firsts == {1: 1_000, 0: 5_000}


def test_a_cancelled_request_reports_nothing_and_frees_its_slot() -> None:
    bench = Bench(slots=1)
    bench.submit(output=5_001)
    bench.submit()
    bench.run(1_500)
    bench.engine.cancel(bench.jobs[0])
    bench.engine.cancel(bench.jobs[0])
    bench.run()
    assert bench.ends == {1: 3_500}


def test_a_frozen_engine_accepts_and_stays_silent() -> None:
    bench = Bench()
    bench.engine.frozen = True
    bench.submit()
    bench.run()
    assert not bench.firsts


def test_known_prompt_blocks_are_not_computed_again() -> None:
    bench = Bench(cache_blocks=8)
    bench.submit(prompt=1_024, blocks=(1, 2))
    bench.run(10_000)
    bench.submit(prompt=1_536, blocks=(1, 2, 3))
    bench.run()
    assert bench.jobs[1].computed == 512


def test_blocks_that_were_not_used_for_long_are_forgotten() -> None:
    bench = Bench(cache_blocks=2)
    for blocks in ((1, 2), (3, 4)):
        bench.submit(prompt=1_024, blocks=blocks)
        bench.run(bench.timeline.now + 10_000)
    bench.submit(prompt=1_024, blocks=(1, 2))
    bench.run()
    assert bench.jobs[2].computed == 1_024


def test_capacity_is_what_full_slots_sustain() -> None:
    spec = Bench(slots=4, beta=0.0).engine.spec
    assert capacity_rps(spec, [("m", 1, 100)] * 200) == pytest.approx(4 * 50 / 100, rel=0.05)


works = st.lists(
    st.tuples(st.sampled_from("mn"), st.integers(1, 4_000), st.integers(1, 400), st.integers(0, 20_000)),
    min_size=1,
    max_size=20,
)


@settings(max_examples=60, deadline=None)
@given(work=works, slots=st.integers(1, 4), memory=st.sampled_from((6, 20)), beta=st.floats(0.0, 1.0))
def test_whatever_comes_ends_once_and_nothing_is_left(
    work: list[tuple[str, int, int, int]], slots: int, memory: int, beta: float
) -> None:
    bench = Bench(slots=slots, beta=beta, **two_models(memory_gib=memory))
    for model, prompt, output, at_ms in work:
        bench.submit_at(at_ms, prompt, output, model)
    bench.run(50_000_000)
    assert bench.firsts.keys() == bench.ends.keys() == set(range(len(work)))
    assert all(bench.firsts[number] <= bench.ends[number] for number in bench.ends)
    assert not bench.engine.running
    assert not bench.engine.queue
    assert bench.engine.used_bytes <= memory * GIB


@settings(max_examples=40, deadline=None)
@given(work=st.lists(st.tuples(st.integers(1, 4_000), st.integers(1, 400)), min_size=1, max_size=12))
def test_a_forecast_is_when_the_last_request_really_ends(work: list[tuple[int, int]]) -> None:
    bench = Bench(beta=0.2)
    for prompt, output in work[:-1]:
        bench.submit(prompt, output)
    bench.run(700)
    prompt, output = work[-1]
    foreseen = bench.engine.forecast("m", prompt, output).end_ms
    number = bench.submit(prompt, output)
    bench.run(50_000_000)
    assert bench.ends[number] == pytest.approx(foreseen, abs=2 * len(work) + 2)
