"""Arrivals: rates, order, shares and bursts of what is drawn."""

from collections.abc import Iterable
from itertools import pairwise
from random import Random
from statistics import fmean, pstdev

import pytest

from router_core.sim.placement.arrivals import (
    QUANTILES,
    Arrival,
    Client,
    Length,
    at_once,
    bursty_clients,
    chat_lengths,
    code_lengths,
    conversation_lengths,
    mixed,
    poisson,
    replay,
    zipf,
)

CHAT = chat_lengths(Random(1))
ONE = {"m": 1.0}


def gaps(arrivals: Iterable[Arrival]) -> list[float]:
    return [later.at_ms - earlier.at_ms for earlier, later in pairwise(arrivals)]


def test_zipf_gives_the_first_the_most() -> None:
    shares = zipf(["a", "b", "c"])
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["a"] == pytest.approx(2 * shares["b"]) == pytest.approx(3 * shares["c"])


def test_a_poisson_stream_has_its_rate_and_no_memory() -> None:
    found = list(poisson(CHAT, 5.0, 4_000, [1.0], ONE, Random(2)))
    between = gaps(found)
    assert fmean(between) == pytest.approx(200.0, rel=0.06)
    assert pstdev(between) / fmean(between) == pytest.approx(1.0, rel=0.08)


def test_routers_and_models_come_in_their_shares() -> None:
    found = list(poisson(CHAT, 5.0, 4_000, [3.0, 1.0], {"a": 0.8, "b": 0.2}, Random(3)))
    assert sum(one.router == 0 for one in found) / len(found) == pytest.approx(0.75, abs=0.03)
    assert sum(one.model == "a" for one in found) / len(found) == pytest.approx(0.8, abs=0.03)


def test_a_replay_keeps_order_and_bursts_at_another_rate() -> None:
    trace = [
        Length(prompt=number + 1, output=1, at_s=at_s) for number, at_s in enumerate((0, 1, 1, 1, 9, 18))
    ]
    found = list(replay(trace, 1.0, 6, [1.0], ONE, Random(1)))
    start = found[0].prompt - 1
    assert [one.prompt for one in found] == [(start + turn) % 6 + 1 for turn in range(6)]
    assert min(gaps(found)) == 0
    assert all(gap >= 0 for gap in gaps(found))
    assert fmean(gaps(list(replay(trace, 1.0, 600, [1.0], ONE, Random(1))))) == pytest.approx(1_000, rel=0.02)


def test_code_comes_in_bursts_and_chat_does_not() -> None:
    def variation(lengths: Iterable[Length]) -> float:
        times = [length.at_s for length in lengths]
        between = [b - a for a, b in pairwise(times)]
        return pstdev(between) / fmean(between)

    assert variation(code_lengths(Random(1))) > 1.5 > variation(CHAT)


@pytest.mark.parametrize("distribution", ["gamma", "weibull"])
def test_clients_of_a_mix_share_the_rate_whatever_their_bursts(distribution: str) -> None:
    flat = (100.0,) * len(QUANTILES)
    clients = [
        Client(rate_rps=rate, distribution=distribution, shape=0.8, prompt=flat, output=flat)
        for rate in (1.0, 2.0, 5.0, 0.1)
    ]
    found = mixed(clients, 10.0, 8_000, [1.0, 1.0], {"a": 0.75, "b": 0.25}, Random(4))
    assert len(found) == pytest.approx(8_000, rel=0.1)
    assert sum(one.model == "a" for one in found) / len(found) == pytest.approx(0.75, abs=0.05)
    assert found == sorted(found, key=lambda one: (one.at_ms, one.router, one.model))


def test_sizes_follow_the_clients_quantiles() -> None:
    steps = (10.0, 20.0, 30.0, 40.0, 50.0, 60.0)
    client = Client(rate_rps=1.0, distribution="gamma", shape=1.0, prompt=steps, output=steps)
    found = mixed([client], 10.0, 4_000, [1.0], ONE, Random(5))
    prompts = sorted(one.prompt for one in found)
    assert (prompts[0], prompts[-1]) == (10, 60)
    assert prompts[len(prompts) // 2] == pytest.approx(30, abs=1)


def test_requests_at_once_follow_single_ones() -> None:
    found = at_once(3, Length(prompt=5, output=7), "m", before=2, every_s=10.0)
    assert [one.at_ms for one in found] == [0, 10_000, 20_000, 20_000, 20_000]


def test_one_seed_gives_one_stream() -> None:
    def streams(seed: int) -> tuple[list[Arrival], list[Arrival]]:
        rng = Random(seed)
        clients = bursty_clients(rng)
        return mixed(clients, 5.0, 200, [1.0, 1.0], ONE, rng), list(
            poisson(CHAT, 5.0, 50, [1.0, 2.0], ONE, rng)
        )

    assert streams(7) == streams(7)
    assert streams(7) != streams(8)


def test_turns_of_a_conversation_begin_with_all_of_the_last_turn() -> None:
    last: dict[int, tuple[int, ...]] = {}
    for length in conversation_lengths(Random(1), 300):
        before = last.get(length.blocks[1], ())
        assert length.blocks[: len(before)] == before
        assert len(length.blocks) >= len(before)
        last[length.blocks[1]] = length.blocks
    assert len(last) > 10
