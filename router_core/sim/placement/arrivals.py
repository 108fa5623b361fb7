"""Requests that come: Poisson streams, replays of traces, mixes of bursty clients over several models.

Everything is drawn from an injected ``Random``. Where a trace has no model names they are drawn by Zipf's law, which
is an assumption. Refuses to read files: rows come in parsed.
"""

import math
from bisect import bisect
from collections.abc import Iterator, Sequence
from random import Random

from msgspec import Struct

QUANTILES = (0.05, 0.25, 0.50, 0.75, 0.95, 0.99)
_LEAST_GAP_S = 1e-4
_CLIENTS_PER_MODEL = 4

TALK_BLOCK = 1
"""Which block tells conversations apart: the one before it holds what all of them start with."""


class Arrival(Struct, frozen=True, gc=False, kw_only=True):
    """One request of a client of router ``router``. ``blocks`` identify its prompt prefix, 512 tokens each."""

    at_ms: int
    router: int
    model: str
    prompt: int
    output: int
    blocks: tuple[int, ...] = ()


class Length(Struct, frozen=True, gc=False, kw_only=True):
    """Sizes of one request of a trace; ``at_s`` when it came there, ``blocks`` as in ``Arrival``."""

    prompt: int
    output: int
    at_s: float = 0.0
    blocks: tuple[int, ...] = ()


class Client(Struct, frozen=True, gc=False, kw_only=True):
    """One client of a mix: gaps of a distribution (``gamma``, ``weibull``) by its shape (the scale follows from the
    rate), token quantiles at ``QUANTILES``."""

    rate_rps: float
    distribution: str
    shape: float
    prompt: tuple[float, ...]
    output: tuple[float, ...]


def zipf(names: Sequence[str], s: float = 1.0) -> dict[str, float]:
    """Shares of ``names`` by rank, the first the most popular."""
    raw = [1.0 / (rank + 1) ** s for rank in range(len(names))]
    return {name: share / sum(raw) for name, share in zip(names, raw, strict=True)}


def poisson(
    lengths: Sequence[Length],
    rate_rps: float,
    count: int,
    routers: Sequence[float],
    models: dict[str, float],
    rng: Random,
) -> Iterator[Arrival]:
    """``count`` requests at random moments, each of the size of some request of ``lengths``. ``routers`` are weights:
    where clients are."""
    at_s = 0.0
    for _ in range(count):
        at_s += rng.expovariate(rate_rps)
        yield _arrival(at_s, rng.choice(lengths), routers, models, rng)


def replay(
    lengths: Sequence[Length],
    rate_rps: float,
    count: int,
    routers: Sequence[float],
    models: dict[str, float],
    rng: Random,
) -> Iterator[Arrival]:
    """The trace itself from a random place on, sped up or slowed down to a mean of ``rate_rps``; its order and its
    bursts stay. A trace that is too short starts over."""
    span_s = max(length.at_s for length in lengths) - lengths[0].at_s
    gap_s = span_s / max(1, len(lengths) - 1)
    factor = gap_s * rate_rps
    place = rng.randrange(len(lengths))
    start_s = lengths[place].at_s
    for number in range(count):
        turn, index = divmod(place + number, len(lengths))
        length = lengths[index]
        at_s = (length.at_s - start_s + turn * (span_s + gap_s)) / factor
        yield _arrival(at_s, length, routers, models, rng)


def mixed(
    clients: Sequence[Client],
    rate_rps: float,
    count: int,
    routers: Sequence[float],
    models: dict[str, float],
    rng: Random,
) -> list[Arrival]:
    """A mix of bursty clients: each model gets as many of ``clients`` as it needs for its share of ``rate_rps``.

    Rates of clients are kept in proportion within a model; gaps and sizes follow the client's own distributions.
    """
    found: list[Arrival] = []
    horizon_s = count / rate_rps
    for model, share in models.items():
        chosen = rng.sample(clients, k=min(_CLIENTS_PER_MODEL, len(clients)))
        total_rps = sum(client.rate_rps for client in chosen)
        for client in chosen:
            mean_gap_s = total_rps / (client.rate_rps * rate_rps * share)
            home = rng.choices(range(len(routers)), weights=routers)[0]
            at_s = rng.random() * mean_gap_s
            while at_s < horizon_s:
                prompt, output = _inverse(client.prompt, rng.random()), _inverse(client.output, rng.random())
                found.append(
                    Arrival(
                        at_ms=round(1000.0 * at_s),
                        router=home,
                        model=model,
                        prompt=max(1, round(prompt)),
                        output=max(1, round(output)),
                    )
                )
                at_s += max(_LEAST_GAP_S, _gap(client, rng) * mean_gap_s)
    found.sort(key=lambda arrival: (arrival.at_ms, arrival.router, arrival.model))
    return found


def at_once(count: int, length: Length, model: str, before: int = 0, every_s: float = 0.0) -> list[Arrival]:
    """``count`` equal requests at one moment at the first router, after ``before`` single ones, ``every_s`` apart."""
    moments = [round(1000.0 * every_s * min(number, before)) for number in range(before + count)]
    return [
        Arrival(at_ms=at_ms, router=0, model=model, prompt=length.prompt, output=length.output)
        for at_ms in moments
    ]


def chat_lengths(rng: Random, count: int = 4_000) -> list[Length]:
    """Built-in sizes in the shape of public chat traces: long-tailed prompts of about 1,150 tokens, answers of 210."""
    found, at_s = [], 0.0
    for _ in range(count):
        at_s += rng.expovariate(5.5)
        found.append(
            Length(
                prompt=min(8_000, round(rng.lognormvariate(math.log(770), 0.9)) + 1),
                output=min(1_000, round(rng.lognormvariate(math.log(150), 0.8)) + 1),
                at_s=at_s,
            )
        )
    return found


def code_lengths(rng: Random, count: int = 4_000) -> list[Length]:
    """Built-in sizes and moments in the shape of public code completion traces: long prompts, short answers, bursts."""
    found: list[Length] = []
    at_s = 0.0
    while len(found) < count:
        at_s += rng.expovariate(0.25)
        for _ in range(rng.randint(1, 20)):
            at_s += rng.expovariate(20.0)
            prompt = min(7_500, round(rng.lognormvariate(math.log(1_400), 0.85)) + 1)
            found.append(
                Length(
                    prompt=prompt,
                    output=min(300, round(rng.lognormvariate(math.log(14), 0.9)) + 1),
                    at_s=at_s,
                )
            )
    return found[:count]


def conversation_lengths(rng: Random, count: int = 3_000) -> list[Length]:
    """Built-in conversations: each turn's prompt is all of the last turn and some more, 512 tokens a block; block 0 is
    what all of them share, block 1 tells which conversation it is."""
    talks: list[list[int]] = []
    found, at_s, fresh = [], 0.0, 1
    for _ in range(count):
        at_s += rng.expovariate(3.0)
        if len(talks) < 12 or rng.random() < 0.2:
            talks.append([0])
            talks = talks[-40:]
        blocks = rng.choice(talks)
        for _ in range(rng.randint(1, 6)):
            blocks.append(fresh)
            fresh += 1
        output = min(1_200, round(rng.lognormvariate(math.log(300), 0.5)) + 1)
        found.append(Length(prompt=512 * len(blocks), output=output, at_s=at_s, blocks=tuple(blocks)))
    return found


def bursty_clients(rng: Random, count: int = 24) -> list[Client]:
    """Built-in clients in the shape of public serving mixes: gaps of a gamma distribution, most of them bursty."""
    found = []
    for _ in range(count):
        rate, cv = rng.lognormvariate(-1.5, 1.0), rng.choice((1.0, 1.2, 2.0, 4.0))
        shape = 1.0 / cv**2
        prompt, output = rng.lognormvariate(math.log(500), 0.7), rng.lognormvariate(math.log(90), 0.7)
        found.append(
            Client(
                rate_rps=rate,
                distribution="gamma",
                shape=shape,
                prompt=tuple(prompt * x for x in (0.2, 0.5, 1.0, 1.6, 3.0, 5.0)),
                output=tuple(output * x for x in (0.2, 0.5, 1.0, 1.6, 3.0, 5.0)),
            )
        )
    return found


def _arrival(
    at_s: float, length: Length, routers: Sequence[float], models: dict[str, float], rng: Random
) -> Arrival:
    """A conversation stays with its client's router and its model."""
    chance = Random(length.blocks[TALK_BLOCK]) if len(length.blocks) > TALK_BLOCK else rng
    return Arrival(
        at_ms=round(1000.0 * at_s),
        router=chance.choices(range(len(routers)), weights=routers)[0],
        model=chance.choices(list(models), weights=list(models.values()))[0],
        prompt=length.prompt,
        output=length.output,
        blocks=length.blocks,
    )


def _gap(client: Client, rng: Random) -> float:
    """A gap with mean 1."""
    if client.distribution == "weibull":
        return rng.weibullvariate(1.0 / math.gamma(1.0 + 1.0 / client.shape), client.shape)
    return rng.gammavariate(client.shape, 1.0 / client.shape)


def _inverse(values: tuple[float, ...], u: float) -> float:
    """Inverse of a distribution known at ``QUANTILES``, straight between them and flat outside."""
    place = bisect(QUANTILES, u)
    if place == 0:
        return values[0]
    if place == len(QUANTILES):
        return values[-1]
    low, high = QUANTILES[place - 1], QUANTILES[place]
    return values[place - 1] + (values[place] - values[place - 1]) * (u - low) / (high - low)
