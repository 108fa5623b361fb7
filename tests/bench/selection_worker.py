"""One peer's own selection of a node, timed by the peer's interpreter: ``python -I selection_worker.py PEER``.

A line in, a line out: ``build [[name, tokens_per_s, in_flight, resident], ...]`` makes those nodes the peer's own and
answers ``ready``; ``batch NODES RUNS`` answers with the nanoseconds of each of so many selections among the fleet of
that size. What fails answers ``failed REASON``. Imports nothing but the standard library and the peer.
"""

import asyncio
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODEL = "tiny"
GIB_OF_MODEL = 4.0
PROMPT_TOKENS = 1200
MESSAGES = [{"role": "user", "content": "word" * PROMPT_TOKENS}]

Node = tuple[str, float, int, bool]
"""Name, output tokens a second, requests in flight, whether the model is loaded."""

Select = Callable[[], Any]
Name = Callable[[Any], str]
"""The name of the node that a selection chose."""

Build = Callable[[list[Node]], tuple[Select, Name]]


def litellm(nodes: list[Node]) -> tuple[Select, Name]:
    """``Router.get_available_deployment`` by its default strategy, a weighted shuffle, weighted by speed."""
    from litellm import Router

    deployments = [
        {
            "model_name": MODEL,
            "litellm_params": {
                "model": f"openai/{MODEL}",
                "api_base": f"http://127.0.0.1:{10_000 + number}/v1",
                "api_key": "none",
                "weight": tokens_per_s,
            },
            "model_info": {"id": name},
        }
        for number, (name, tokens_per_s, _, _) in enumerate(nodes)
    ]
    router = Router(model_list=deployments)
    select = router.get_available_deployment
    return lambda: select(model=MODEL, messages=MESSAGES), lambda chosen: str(chosen["model_info"]["id"])


def ollama_herd(nodes: list[Node]) -> tuple[Select, Name]:
    """``ScoringEngine.score_request``, which ranks every node by nine signals."""
    from fleet_manager.models import node as models
    from fleet_manager.models.config import ServerSettings
    from fleet_manager.server.latency_store import LatencyStore
    from fleet_manager.server.registry import NodeRegistry
    from fleet_manager.server.scorer import ScoringEngine
    from fleet_manager.server.session_affinity import SessionAffinityTracker

    settings = ServerSettings(data_dir=tempfile.mkdtemp(dir=Path.home()))
    registry, latencies = NodeRegistry(settings), LatencyStore(settings.data_dir)

    async def heard() -> None:
        await latencies.initialize()
        for name, tokens_per_s, in_flight, resident in nodes:
            loaded = models.LoadedModel(
                name=MODEL, size_gb=GIB_OF_MODEL, requests_active=in_flight, context_length=8192
            )
            await registry.update_from_heartbeat(
                models.HeartbeatPayload(
                    node_id=name,
                    cpu=models.CpuMetrics(cores_physical=8, utilization_pct=10 * in_flight),
                    memory=models.MemoryMetrics(total_gb=64, used_gb=20, available_gb=44),
                    memory_bandwidth_gbps=tokens_per_s * GIB_OF_MODEL,
                    ollama=models.OllamaMetrics(
                        models_loaded=[loaded] if resident else [],
                        models_available=[MODEL],
                        models_available_sizes={MODEL: GIB_OF_MODEL},
                    ),
                )
            )
            await latencies.record(name, MODEL, 1000 * 100 / tokens_per_s)
        await latencies.close()

    asyncio.run(heard())
    engine = ScoringEngine(settings, registry, latencies, sessions=SessionAffinityTracker())
    depths = {f"{name}:{MODEL}": in_flight for name, _, in_flight, _ in nodes if in_flight}
    return (
        lambda: engine.score_request(MODEL, depths, PROMPT_TOKENS),
        lambda ranked: str(ranked[0].node_id),
    )


def sollol(nodes: list[Node]) -> tuple[Select, Name]:
    """``IntelligentRouter.select_optimal_node`` of a request that was analysed before."""
    from sollol.intelligence import IntelligentRouter

    router = IntelligentRouter()
    hosts = [
        {
            "host": name,
            "available": True,
            "latency_ms": 1000 * 100 / tokens_per_s,
            "success_rate": 1.0,
            "total_requests": 100,
            "failed_requests": 0,
            "active_requests": in_flight,
            "cpu_load": min(1.0, 0.1 + 0.2 * in_flight),
            "gpu_free_mem": 8192,
            "priority": 999,
            "loaded_models": [MODEL] if resident else [],
        }
        for name, tokens_per_s, in_flight, resident in nodes
    ]
    context = router.analyze_request({"model": MODEL, "messages": MESSAGES})
    return lambda: router.select_optimal_node(context, hosts), lambda chosen: str(chosen[0])


PEERS: dict[str, Build] = {"litellm": litellm, "ollama-herd": ollama_herd, "sollol": sollol}


def timed(select: Select, runs: int) -> list[int]:
    """Nanoseconds of each of ``runs`` selections."""
    gc.collect()
    took = []
    for _ in range(runs):
        start = time.perf_counter_ns()
        select()
        took.append(time.perf_counter_ns() - start)
    return took


def serve(build: Build) -> None:
    """Answer lines until there are no more. Whatever a peer prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    fleets: dict[int, Select] = {}

    def answer(line: str) -> str:
        what, _, rest = line.partition(" ")
        if what == "build":
            nodes = [
                (str(name), float(speed), int(busy), bool(warm))
                for name, speed, busy, warm in json.loads(rest)
            ]
            select, name_of = build(nodes)
            chosen = name_of(select())
            if chosen not in {node[0] for node in nodes}:
                raise ValueError(f"it chose {chosen!r}, which is none of the nodes")
            fleets[len(nodes)] = select
            return "ready"
        count, runs = map(int, rest.split())
        return " ".join(map(str, timed(fleets[count], runs)))

    for line in sys.stdin:
        try:
            told = answer(line)
        except Exception as fault:
            told = "failed " + " ".join(f"{type(fault).__name__}: {fault}".split())
        print(told, file=answers, flush=True)


if __name__ == "__main__":
    serve(PEERS[sys.argv[1]])
