"""What the relay adds: one chat POST of 1 kB against a static upstream, direct and through, in rotating rounds.

Three processes on loopback: the upstream behind two ports, a whole daemon with one endpoint for each, and this load
generator. Decisions, records, metrics, logging and sampling are on. ``relay.added_p50_us.c1`` is the
difference of the medians at one connection, the median of the rounds; its gate is 400 us. Throughput at 16
connections is printed with its ratio to direct, never gated.
"""

import asyncio
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import uvloop

from tests.bench.report import Figure, against, emit, wants_json
from tests.support.cluster import Node

ADDED_P50_LIMIT_US = 400.0
ROUNDS = 5
WARM_UP_S = 0.3
LATENCY_S = 1.0
THROUGHPUT_S = 1.2

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


async def measure(direct: int, through: int) -> list[Figure]:
    """Rounds in rotating order against both ports."""
    ports = {"direct": direct, "relay": through}
    p50: dict[str, list[float]] = {name: [] for name in ports}
    rps: dict[str, list[float]] = {name: [] for name in ports}
    for port in ports.values():
        await load(port, 16, WARM_UP_S)
    for number in range(ROUNDS):
        order = list(ports) if number % 2 else list(reversed(ports))
        for name in order:
            p50[name].append(median(await load(ports[name], 1, LATENCY_S)) / 1000)
        for name in order:
            since = time.perf_counter()
            count = len(await load(ports[name], 16, THROUGHPUT_S))
            rps[name].append(count / (time.perf_counter() - since))
    added = [through - direct for through, direct in zip(p50["relay"], p50["direct"], strict=True)]
    return [
        Figure("relay.direct_p50_us.c1", median(p50["direct"]), "us"),
        Figure("relay.p50_us.c1", median(p50["relay"]), "us"),
        against("relay.added_p50_us.c1", median(added), "us", ADDED_P50_LIMIT_US),
        Figure("relay.direct_rps.c16", median(rps["direct"]), "req/s"),
        against("relay.rps.c16", median(rps["relay"]), "req/s", median(rps["direct"])),
    ]


async def serve_upstream() -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(StaticUpstream, "127.0.0.1", 0) for _ in range(2)]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.gather(*(server.serve_forever() for server in servers))


@contextlib.contextmanager
def upstreams() -> Iterator[list[int]]:
    """The ports of a running upstream process."""
    command = [sys.executable, "-m", "tests.bench.bench_relay", "--upstream"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield [int(port) for port in process.stdout.readline().split()]
        finally:
            process.kill()


async def run(ports: Sequence[int]) -> list[Figure]:
    """Start a daemon before the upstreams, measure, stop it."""
    with tempfile.TemporaryDirectory() as folder:
        node = Node(name="bench", ip="127.0.0.1", base=Path(folder))
        node.write_settings([])
        for number, port in enumerate(ports):
            manifest = f'engine = "openai"\nurl = "http://127.0.0.1:{port}"\nslots = 16\n'
            (node.config / "endpoints" / f"u{number}.toml").write_text(manifest)
        await node.start()
        try:
            await served(node.ports["api"])
            return await measure(ports[0], node.ports["api"])
        finally:
            await node.kill()


async def served(port: int) -> None:
    """Return when the daemon lists the model."""
    for _ in range(200):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1:%d\r\nconnection: close\r\n\r\n" % port)
        answer = await reader.read()
        writer.close()
        if b'"tiny"' in answer:
            return
        await asyncio.sleep(0.05)
    raise RuntimeError("the daemon does not offer the upstream's model")


def main(argv: Sequence[str]) -> int:
    if argv == ["--upstream"]:
        uvloop.run(serve_upstream())
        return 0
    as_json = wants_json(argv)
    with upstreams() as ports:
        figures = uvloop.run(run(ports))
    emit(figures, as_json)
    added = next(figure for figure in figures if figure.name == "relay.added_p50_us.c1")
    return int(added.value > ADDED_P50_LIMIT_US)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
