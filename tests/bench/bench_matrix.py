"""Three unlike nodes, real daemons over real engines, this checkout against another one:
``python -m tests.bench.bench_matrix --tree PATH [--rounds N] [--requests N] [--rate RPS] [--json]``.

Each checkout gets three daemons and three llama.cpp routers of its own: the same two models everywhere, memory for one of
them, weights that make the nodes unlike in speed. Rounds alternate, so that both see the same machine; in a round streamed
chats of mixed sizes arrive at random moments at random nodes, the same ones for both. Printed are this checkout's figures
against the other's; without ``--tree`` this checkout's alone.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

import aiohttp

from router_core.policy.placement import PlacementPolicy
from tests.bench.report import Figure, against, emit
from tests.support import llama, tiny_gguf
from tests.support.cluster import Cluster, Node, closing, pair

SIZES_MB: Final = {"alpha": 60, "beta": 20, "gamma": 2}
MODELS: Final = ("one", "two")
WORDS: Final = (5, 20, 200)
TOKENS: Final = (4, 16, 48)
TIMEOUT_S: Final = 120.0
TARGET_S: Final = PlacementPolicy().interactive.ttft_s
"""An answer whose first bytes take longer is a miss, and so is a failed one."""
START: Final = "import sys; sys.path.insert(0, {tree!r}); from agent.cli import main; sys.exit(main())"


@dataclass(slots=True)
class Score:
    """What one checkout did: seconds to the first bytes of answers and to their ends, loads, failures."""

    first_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    cold: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """One request of a round: when it is sent, where, and how large it is."""

    after_s: float
    node: str
    model: str
    words: int
    tokens: int


def chats_of(rng: Random, count: int, rate_rps: float) -> list[Chat]:
    """A round: exponential gaps, two of three requests for the first model."""
    at_s, found = 0.0, []
    for _ in range(count):
        at_s += rng.expovariate(rate_rps)
        found.append(
            Chat(
                after_s=at_s,
                node=rng.choice(tuple(SIZES_MB)),
                model=rng.choices(MODELS, (2, 1))[0],
                words=rng.choice(WORDS),
                tokens=rng.choice(TOKENS),
            )
        )
    return found


@asynccontextmanager
async def cluster(base: Path, tree: Path | None, first_ip: int) -> AsyncIterator[Cluster]:
    """Three paired daemons of the checkout at ``tree`` (None: this one) and their engines."""
    made = Cluster(base=base, nodes=[], engines=[])
    entry = ("-m", "agent", "run") if tree is None else ("-c", START.format(tree=str(tree)), "run")
    async with closing(made):
        for number, (name, size_mb) in enumerate(SIZES_MB.items()):
            folder, ip = base / name / "models", f"127.0.0.{first_ip + number}"
            for seed, model in enumerate(MODELS, 1):
                tiny_gguf.write_model(folder / f"{model}.gguf", size_mb=size_mb, name=model, seed=seed)
            engine = llama.LlamaServer(
                llama.router(folder, models_max=1), base / name / "engine.log", host=ip
            )
            made.engines.append(engine)
            await asyncio.to_thread(engine.start)
            made.nodes.append(Node(name=name, ip=ip, base=base / name, entry=entry))
        for node, engine in zip(made.nodes, made.engines, strict=True):
            others = [f"@{o.name}={o.ip}:{o.ports['mesh']}" for o in made.nodes if o is not node]
            node.write_settings(others)
            node.write_endpoint(engine, extra="max_queue = 64\n")
        await asyncio.gather(*(node.start() for node in made.nodes))
        await pair(made.nodes)
        await made.full_view()
        yield made


async def play(made: Cluster, chats: list[Chat], score: Score | None) -> None:
    """Send ``chats`` and wait for all of them."""
    began = time.monotonic()

    async def one(session: aiohttp.ClientSession, chat: Chat) -> None:
        await asyncio.sleep(max(0.0, began + chat.after_s - time.monotonic()))
        sent, first = time.monotonic(), None
        body = {
            "model": chat.model,
            "max_tokens": chat.tokens,
            "stream": True,
            "messages": [{"role": "user", "content": "hello " * chat.words}],
        }
        node = made[chat.node]
        async with session.post(f"{node.api}/v1/chat/completions", json=body) as reply:
            async for _ in reply.content.iter_any():
                first = first or time.monotonic()
        ended = time.monotonic()
        if score is None:
            return
        if reply.status != 200 or first is None:
            score.failed += 1
            return
        score.first_s.append(first - sent)
        score.whole_s.append(ended - sent)
        told = await node.get(f"/v1/decisions/{reply.headers['x-pairmesh-decision-id']}")
        score.cold += told["action"] == "route_cold"

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
        await asyncio.gather(*(one(session, chat) for chat in chats))


async def measure(tree: Path | None, rounds: int, requests: int, rate_rps: float) -> list[Figure]:
    """All rounds; the first of each checkout is warm-up."""
    scores = {"now": Score(), "before": Score()}
    async with AsyncExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pm-matrix-")))
        made = {"now": await stack.enter_async_context(cluster(base / "now", None, 21))}
        if tree is not None:
            made["before"] = await stack.enter_async_context(cluster(base / "before", tree, 31))
        rng = Random(11)
        for turn in range(rounds + 1):
            chats = chats_of(rng, requests, rate_rps)
            for which in sorted(made, reverse=bool(turn % 2)):
                await play(made[which], chats, scores[which] if turn else None)
    return figures_of(scores["now"], scores["before"] if tree is not None else None)


def figures_of(now: Score, before: Score | None) -> list[Figure]:
    """Quantiles and counts, against those of ``before`` if there is one."""
    found = []
    for name, unit in (
        ("ttft_p50", "s"),
        ("ttft_p95", "s"),
        ("total_p95", "s"),
        ("cold", "loads"),
        ("misses", "requests"),
        ("failed", "requests"),
    ):
        ours = _figure(now, name)
        found.append(
            Figure(f"matrix.{name}", ours, unit)
            if before is None
            else against(f"matrix.{name}", ours, unit, _figure(before, name))
        )
    return found


def _figure(score: Score, name: str) -> float:
    if name in ("cold", "failed"):
        return float(getattr(score, name))
    if name == "misses":
        return float(sum(first > TARGET_S for first in score.first_s) + score.failed)
    ranked = sorted(score.whole_s if name.startswith("total") else score.first_s)
    return ranked[int((0.5 if name.endswith("p50") else 0.95) * (len(ranked) - 1))]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tree", type=Path, help="another checkout, which is measured in turns with this one"
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=60, help="of each round")
    parser.add_argument("--rate", type=float, default=6.0, help="requests per second")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args()
    tree = None if args.tree is None else args.tree.resolve()
    if tree is not None and not (tree / "agent" / "cli" / "__init__.py").is_file():
        print(f"{tree} is no checkout of pairmesh", file=sys.stderr)
        return 2
    emit(asyncio.run(measure(tree, args.rounds, args.requests, args.rate)), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
