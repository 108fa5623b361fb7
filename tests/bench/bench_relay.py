"""What the relay adds: one chat POST of 1 kB against a static upstream, direct and through, in rotating rounds.

Processes on loopback: the upstream behind two ports, a whole daemon with one endpoint for each, and the load.
Decisions, records, metrics, logging and sampling are on. ``relay.added_p50_us.c1`` is the difference of the medians
at one connection, the median of the rounds; its gate is 250 us. Throughput at 16 connections is printed beside direct,
and what the daemon's process itself used of the CPUs for each of those requests (``relay.cpu_us_per_request``), which
depends least on what else the host does.

``--peers`` adds vllm-router, smg and haproxy before the same two upstreams, which are nginx then, under load by wrk:
for each round the relay's throughput over the peer's and its added p50 over the peer's, their median, least and
most. The gate is a throughput of 1.2 times vllm-router's in the median and in all rounds but one. Who cannot be
started is named with the reason, and its gate did not run.
"""

import argparse
import asyncio
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil
import uvloop

from tests.bench import relay_peers as peers
from tests.bench import relay_streams as streams
from tests.bench.environments import Absent
from tests.bench.report import Figure, against, emit
from tests.support.cluster import Node

ADDED_P50_LIMIT_US = 250.0
STREAM_ADDED_P99_LIMIT_US = 5_000.0
PEER_RPS_GATE = 1.2
GATED_PEER = "vllm-router"
ROUNDS = 5
WARM_UP_S = 0.3
LATENCY_S = 1.0
THROUGHPUT_S = 1.2
STREAM_ROUNDS = 3
RELAY = "pairmesh"

PROMPT = "tell me about the weather " * 32
BODY = b'{"model":"tiny","messages":[{"role":"user","content":"%s"}],"max_tokens":64}' % PROMPT.encode()
ANSWER = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"tiny","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"It will be fine today, with a light wind from the west."},"finish_reason":'
    b'"stop"}],"usage":{"prompt_tokens":160,"completion_tokens":14,"total_tokens":174}}'
)
MODELS = b'{"object":"list","data":[{"id":"tiny","object":"model","created":1,"owned_by":"bench"}]}'


def whole(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


REPLY, LIST = whole(ANSWER), whole(MODELS)


class StaticUpstream(asyncio.Protocol):
    """Answers every POST with the same bytes, every GET with its one model."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._buffer = b""

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._buffer) < end + 4 + length:
                return
            self._buffer = self._buffer[end + 4 + length :]
            self._transport.write(LIST if head.startswith(b"get") else REPLY)  # type: ignore[attr-defined]


class Load(asyncio.Protocol):
    """One keep-alive connection that sends the next request when the last was answered, until ``stop``."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._left: int | None = None
        self._raw = b""
        self._since = 0
        self.stopped = asyncio.get_running_loop().create_future()
        self.stop = False
        self.taken_ns: list[int] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._next()

    def _next(self) -> None:
        self._left, self._raw = None, b""
        self._since = time.perf_counter_ns()
        self._transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        if self._left is None:
            self._raw += data
            end = self._raw.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self._raw[:end].lower()
            assert head.startswith(b"http/1.1 200"), head
            length = int(head[head.index(b"content-length:") + 15 :].split(b"\r\n", 1)[0])
            self._left = length - (len(self._raw) - end - 4)
        else:
            self._left -= len(data)
        if self._left == 0:
            self.taken_ns.append(time.perf_counter_ns() - self._since)
            if self.stop:
                self.stopped.set_result(None)
            else:
                self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.stopped.done():
            self.stopped.set_exception(ConnectionError("the subject closed a connection"))


async def load(port: int, connections: int, seconds: float) -> list[int]:
    """Nanoseconds of each request answered within ``seconds``."""
    loop = asyncio.get_running_loop()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-type: application/json\r\n"
        % port
    )
    request = head + b"content-length: %d\r\naccept: */*\r\nuser-agent: bench\r\n\r\n%s" % (len(BODY), BODY)
    made = [
        await loop.create_connection(lambda: Load(request), "127.0.0.1", port) for _ in range(connections)
    ]
    loads = [protocol for _, protocol in made]
    await asyncio.sleep(seconds)
    for each in loads:
        each.stop = True
    await asyncio.gather(*(each.stopped for each in loads))
    for transport, _ in made:
        transport.close()
    return [taken for each in loads for taken in each.taken_ns]


Drive = Callable[[int, int, float], Awaitable[tuple[float, float]]]
"""Puts ``connections`` on ``port`` for some seconds: (p50 in microseconds, requests a second)."""


@dataclass(slots=True, kw_only=True)
class Rounds:
    """What each subject showed in each round."""

    p50_us: dict[str, list[float]]
    rps: dict[str, list[float]]
    cpu_us: list[float] = field(default_factory=list)
    """CPU time of the relay's daemon per request at 16 connections."""
    stream_added_us: list[tuple[float, float]] = field(default_factory=list)
    """How much later events of many streams come than directly: p50 and p99. Empty if that was not measured."""
    stream_cpu_us: list[float] = field(default_factory=list)
    """CPU time of the relay's daemon per streamed event."""

    def added_us(self, name: str) -> list[float]:
        return [mine - direct for mine, direct in zip(self.p50_us[name], self.p50_us["direct"], strict=True)]


async def own_load(port: int, connections: int, seconds: float) -> tuple[float, float]:
    since = time.perf_counter()
    taken = await load(port, connections, seconds)
    return median(taken) / 1000, len(taken) / (time.perf_counter() - since)


async def measure(
    ports: Mapping[str, int], drive: Drive, used_s: Callable[[], float], latency_s: float, throughput_s: float
) -> Rounds:
    """Rounds over all subjects, each round in another order. ``used_s`` tells the CPU time of the daemon so far."""
    rounds = Rounds(p50_us={name: [] for name in ports}, rps={name: [] for name in ports})
    for port in ports.values():
        await drive(port, 16, WARM_UP_S)
    names = list(ports)
    for number in range(ROUNDS):
        at = number % len(names)
        order = names[at:] + names[:at]
        for name in order:
            rounds.p50_us[name].append((await drive(ports[name], 1, latency_s))[0])
        for name in order:
            before_s, since = used_s(), time.perf_counter()
            rps = (await drive(ports[name], 16, throughput_s))[1]
            rounds.rps[name].append(rps)
            if name == RELAY:
                requests = rps * (time.perf_counter() - since)
                rounds.cpu_us.append(1e6 * (used_s() - before_s) / requests)
    return rounds


def told(rounds: Rounds) -> list[Figure]:
    figures = [
        Figure("relay.direct_p50_us.c1", median(rounds.p50_us["direct"]), "us"),
        Figure("relay.p50_us.c1", median(rounds.p50_us[RELAY]), "us"),
        against("relay.added_p50_us.c1", median(rounds.added_us(RELAY)), "us", ADDED_P50_LIMIT_US),
        Figure("relay.direct_rps.c16", median(rounds.rps["direct"]), "req/s"),
        against("relay.rps.c16", median(rounds.rps[RELAY]), "req/s", median(rounds.rps["direct"])),
        Figure("relay.cpu_us_per_request", median(rounds.cpu_us), "us"),
    ]
    if rounds.stream_added_us:
        p50, p99 = (median(values) for values in zip(*rounds.stream_added_us, strict=True))
        figures += [
            Figure(f"relay.stream_added_p50_us.n{streams.STREAMS}", p50, "us"),
            against(f"relay.stream_added_p99_us.n{streams.STREAMS}", p99, "us", STREAM_ADDED_P99_LIMIT_US),
            Figure("relay.cpu_us_per_event", median(rounds.stream_cpu_us), "us"),
        ]
    return figures + [figure for name in peers.PEERS if name in rounds.rps for figure in beside(name, rounds)]


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(over, under, strict=True)]


def beside(name: str, rounds: Rounds) -> list[Figure]:
    """The relay beside one peer: values are ratios relay / peer, the last column against the gate if there is one."""
    rps = ratios(rounds.rps[RELAY], rounds.rps[name])
    added = ratios(rounds.added_us(RELAY), rounds.added_us(name))
    gate = PEER_RPS_GATE if name == GATED_PEER else None
    figures = [
        Figure(f"relay.p50_us.c1.{name}", median(rounds.p50_us[name]), "us"),
        Figure(f"relay.rps.c16.{name}", median(rounds.rps[name]), "req/s"),
    ]
    for what, values, limit in (
        (f"rps_ratio.c16.{name}", rps, gate),
        (f"added_p50_ratio.c1.{name}", added, None),
    ):
        middle = median(values)
        figures.append(Figure(f"relay.{what}", middle, "x", limit, None if limit is None else middle / limit))
        figures += [
            Figure(f"relay.{what}.{end}", pick(values), "x") for end, pick in (("min", min), ("max", max))
        ]
        figures += [Figure(f"relay.{what}.round{n}", value, "x") for n, value in enumerate(values, 1)]
    return figures


def broken_gates(rounds: Rounds) -> list[str]:
    """What a gate says no to; a peer that was not measured breaks none."""
    broken = []
    added = median(rounds.added_us(RELAY))
    if added > ADDED_P50_LIMIT_US:
        broken.append(f"added p50 at one connection {added:.0f} us, limit {ADDED_P50_LIMIT_US:.0f}")
    late = median([p99 for _, p99 in rounds.stream_added_us] or [0.0])
    if late > STREAM_ADDED_P99_LIMIT_US:
        broken.append(f"added p99 of streamed events {late:.0f} us, limit {STREAM_ADDED_P99_LIMIT_US:.0f}")
    if GATED_PEER in rounds.rps:
        rps = ratios(rounds.rps[RELAY], rounds.rps[GATED_PEER])
        held = sum(ratio >= PEER_RPS_GATE for ratio in rps)
        if median(rps) < PEER_RPS_GATE or held < len(rps) - 1:
            broken.append(f"throughput {median(rps):.2f} times {GATED_PEER}'s, gate {PEER_RPS_GATE}")
    return broken


async def serve_upstream() -> None:
    loop = asyncio.get_running_loop()
    kinds = (StaticUpstream, StaticUpstream, streams.PacedUpstream)
    servers = [await loop.create_server(kind, "127.0.0.1", 0) for kind in kinds]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.gather(*(server.serve_forever() for server in servers))


@contextlib.contextmanager
def upstreams() -> Iterator[list[int]]:
    """The ports of a running upstream process: two that answer at once, one that streams."""
    command = [sys.executable, "-m", "tests.bench.bench_relay", "--upstream"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield [int(port) for port in process.stdout.readline().split()]
        finally:
            process.kill()


@contextlib.asynccontextmanager
async def daemon(ports: Sequence[int], folder: Path) -> AsyncIterator[tuple[int, Callable[[], float]]]:
    """The API port of a daemon before the upstreams at ``ports``, and how many seconds of the CPUs it used so far."""
    node = Node(name="bench", ip="127.0.0.1", base=folder)
    node.write_settings([])
    for number, port in enumerate(ports):
        slots = 16 if number < 2 else streams.STREAMS
        manifest = f'engine = "openai"\nurl = "http://127.0.0.1:{port}"\nslots = {slots}\n'
        (node.config / "endpoints" / f"u{number}.toml").write_text(manifest)
    await node.start()
    try:
        await served(node.ports["api"], models=1 if len(ports) == 2 else 2)
        assert node.process is not None
        process = psutil.Process(node.process.pid)

        def used_s() -> float:
            times = process.cpu_times()
            return float(times.user + times.system)

        yield node.ports["api"], used_s
    finally:
        await node.kill()


async def alone(folder: Path) -> Rounds:
    with upstreams() as ports:
        async with daemon(ports, folder) as (port, used_s):
            subjects = {"direct": ports[0], RELAY: port}
            rounds = await measure(subjects, own_load, used_s, LATENCY_S, THROUGHPUT_S)
            await measure_streams(rounds, ports[2], port, used_s)
            return rounds


async def measure_streams(rounds: Rounds, direct: int, through: int, used_s: Callable[[], float]) -> None:
    """Streams direct and through in turns, into ``rounds``."""
    for _ in range(STREAM_ROUNDS):
        theirs = await streams.ages_us(direct)
        before_s = used_s()
        ours = await streams.ages_us(through)
        events = streams.STREAMS * streams.EVENTS_S * streams.LASTING_S
        rounds.stream_cpu_us.append(1e6 * (used_s() - before_s) / events)
        rounds.stream_added_us.append((ours[0] - theirs[0], ours[1] - theirs[1]))


async def beside_peers(folder: Path, seconds: float) -> Rounds:
    """As ``alone``, with every peer that can be had."""

    async def drive(port: int, connections: int, some_s: float) -> tuple[float, float]:
        return await asyncio.to_thread(peers.wrk, port, BODY, connections, some_s, folder)

    peers.program("wrk")
    with contextlib.ExitStack() as stack:
        ports = stack.enter_context(peers.nginx(ANSWER, MODELS, folder))
        subjects = {"direct": ports[0]}
        for name, of in peers.PEERS.items():
            try:
                subjects[name] = stack.enter_context(peers.peer(name, of, ports, folder, BODY))
            except Absent as why:
                print(f"{name} is not measured, its gate did not run: {why}", file=sys.stderr)
        async with daemon(ports, folder / "node") as (port, used_s):
            subjects[RELAY] = port
            return await measure(subjects, drive, used_s, seconds, seconds)


async def served(port: int, models: int) -> None:
    """Return when the daemon lists so many models."""
    for _ in range(200):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1:%d\r\nconnection: close\r\n\r\n" % port)
        answer = await reader.read()
        writer.close()
        if answer.count(b'"owned_by"') == models:
            return
        await asyncio.sleep(0.05)
    raise RuntimeError("the daemon does not offer the upstreams' models")


def main(argv: Sequence[str]) -> int:
    if argv == ["--upstream"]:
        uvloop.run(serve_upstream())
        return 0
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--peers", action="store_true", help="measure other routers beside it")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement beside peers (3)")
    wanted = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            rounds = uvloop.run(beside_peers(folder, wanted.seconds) if wanted.peers else alone(folder))
        except Absent as why:
            print(f"not measured: {why}", file=sys.stderr)
            return 1
    emit(told(rounds), wanted.json)
    broken = broken_gates(rounds)
    for gate in broken:
        print(gate, file=sys.stderr)
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
