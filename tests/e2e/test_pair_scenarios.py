"""What NVIDIA/Personal-AI-Router#7 asks of routing hints and of placement, on three unlike nodes: real daemons, real
engines with the same models and memory for one of them each.

``pytest -m scenario`` runs the tests that show its scenarios, ``pytest --markers`` tells what the mark means.

``pair-1.0`` is the simulator's, fed with what one origin knows: its own jobs. Its choice goes through the same relay,
as a required node. What is compared is what PAIR cannot see: which model is loaded where, and who is fast.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from router_core.sim.placement.baselines.pair import JobEvent, Proxy, Scheduler
from tests.support import llama, tiny_gguf
from tests.support.cluster import Cluster, Node, closing, pair, wait_for
from tests.support.ports import HeldPort

pytestmark = pytest.mark.asyncio(loop_scope="module")

IPS = {"alpha": "127.0.0.6", "beta": "127.0.0.7", "gamma": "127.0.0.8"}
SIZES_MB = {"alpha": 60, "beta": 20, "gamma": 2}
"""Unlike speeds from unlike weights: the same names, more to compute."""
MODELS = ("one", "two")
OWNED_ONCE = ("gamma", "rare")
ROUNDS = 3
CHATS = 40
CLIENTS = 2
TOKENS = 12


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    try:
        llama.find_binary()
    except llama.LlamaUnavailable as why:
        pytest.skip(str(why))
    base = tmp_path_factory.mktemp("matrix")
    made = Cluster(base=base, nodes=[], engines=[])
    async with closing(made):
        for name, ip in IPS.items():
            folder = base / name / "models"
            for seed, model in enumerate(MODELS, 1):
                tiny_gguf.write_model(folder / f"{model}.gguf", size_mb=SIZES_MB[name], name=model, seed=seed)
            if name == OWNED_ONCE[0]:
                tiny_gguf.write_model(folder / f"{OWNED_ONCE[1]}.gguf", name=OWNED_ONCE[1], seed=3)
            engine = llama.LlamaServer(
                llama.router(folder, models_max=1), base / name / "engine.log", host=ip
            )
            made.engines.append(engine)
            await asyncio.to_thread(engine.start)
            made.nodes.append(Node(name=name, ip=ip, base=base / name))
        for node, engine in zip(made.nodes, made.engines, strict=True):
            others = [f"@{o.name}={o.ip}:{o.ports['mesh']}" for o in made.nodes if o is not node]
            node.write_settings(others)
            node.write_endpoint(engine, extra="max_queue = 64\n")
        await asyncio.gather(*(node.start() for node in made.nodes))
        await pair(made.nodes)
        await made.full_view()
        yield made


@dataclass(slots=True)
class Score:
    """What one policy did."""

    cold: int = 0
    failed: int = 0
    took_s: list[float] = field(default_factory=list)

    @property
    def p95_s(self) -> float:
        ranked = sorted(self.took_s)
        return ranked[int(0.95 * (len(ranked) - 1))]


class PairOrigin:
    """``pair-1.0`` as one origin runs it, told of every job at once; nobody reports a GPU."""

    def __init__(self, uuids: dict[str, str]) -> None:
        self._uuids = uuids
        self._names = {uuid: name for name, uuid in uuids.items()}
        self._scheduler, self._proxy = Scheduler(uuids.values()), Proxy()
        self._jobs = 0
        self._rank()

    def choose(self) -> tuple[str, Callable[[bool], None]]:
        """The node for a request that all nodes own the model of, and what to call when it has ended."""
        chosen = self._proxy.choose(self._uuids.values())
        self._jobs += 1
        job, uuid = self._jobs, chosen.order[0]
        self._tell(job, "queued", uuid, 1)

        def ended(well: bool) -> None:
            self._proxy.release(chosen)
            self._tell(job, "completed" if well else "errored", uuid, 2)

        return self._names[uuid], ended

    def _tell(self, job: int, state: str, uuid: str, seq: int) -> None:
        self._scheduler.told(JobEvent(key=("origin", job), state=state, node=uuid, seq=seq), 0)
        self._rank()

    def _rank(self) -> None:
        snapshot = self._scheduler.rank(0)
        if snapshot is not None:
            self._proxy.apply(snapshot)


async def chat(
    session: aiohttp.ClientSession, cluster: Cluster, model: str = "one", tokens: int = TOKENS, **hints: str
) -> tuple[int, dict[str, str], dict[str, Any]]:
    """One chat through alpha: its status, its reply's headers, and the decision's record."""
    body = {"model": model, "max_tokens": tokens, "messages": [{"role": "user", "content": "hello " * 20}]}
    headers = {name.replace("_", "-"): value for name, value in hints.items()}
    async with session.post(
        f"{cluster['alpha'].api}/v1/chat/completions", json=body, headers=headers
    ) as reply:
        await reply.read()
    told = {name.lower(): value for name, value in reply.headers.items()}
    return reply.status, told, await cluster["alpha"].get(f"/v1/decisions/{told['x-pairmesh-decision-id']}")


async def play(cluster: Cluster, models: list[str], score: Score, origin: PairOrigin | None) -> None:
    """Send one chat per entry of ``models`` from a few clients; ``origin`` None: pairmesh chooses."""
    left = list(reversed(models))

    async def client(session: aiohttp.ClientSession) -> None:
        while left:
            model = left.pop()
            node, ended = origin.choose() if origin is not None else (None, None)
            hints: dict[str, Any] = {} if node is None else {"x_pairmesh_require": f"node=@{node}"}
            began = time.monotonic()
            status, _, record = await chat(session, cluster, model, **hints)
            score.took_s.append(time.monotonic() - began)
            score.failed += status != 200
            score.cold += record["action"] == "route_cold"
            if ended is not None:
                ended(status == 200)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        await asyncio.gather(*(client(session) for _ in range(CLIENTS)))


@pytest.mark.scenario("on three unlike nodes less is loaded than by PAIR")
@pytest.mark.timeout(180)
async def test_on_unlike_nodes_fewer_loads_are_caused_than_by_pair(cluster: Cluster) -> None:
    """Prints what was measured, for ``-rP``; times decide nothing here."""
    rng = Random(7)
    origin = PairOrigin({name: f"{rng.getrandbits(64):016x}" for name in IPS})
    scores = {"pairmesh": Score(), "pair-1.0": Score()}
    await play(cluster, [*MODELS] * len(IPS), Score(), origin)
    for turn in range(ROUNDS):
        models = [rng.choice(MODELS) for _ in range(CHATS)]
        for policy in sorted(scores, reverse=bool(turn % 2)):
            await play(cluster, models, scores[policy], origin if policy == "pair-1.0" else None)
    ours, theirs = scores["pairmesh"], scores["pair-1.0"]
    for policy, score in scores.items():
        said = f"{score.cold} cold loads of {len(score.took_s)} chats, p95 {score.p95_s:.2f} s"
        sys.stdout.write(f"{policy}: {said}\n")
    assert ours.failed == 0
    assert theirs.cold > 0, "the run asks for both models on nodes that hold one"
    assert ours.cold <= 0.5 * theirs.cold


@pytest_asyncio.fixture(loop_scope="module")
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as opened:
        yield opened


async def warm_on(cluster: Cluster, session: aiohttp.ClientSession, *nodes: str) -> None:
    """Have model ``one`` resident on exactly ``nodes``, known to alpha."""
    for node, engine in zip(cluster.nodes, cluster.engines, strict=True):
        if node.name in nodes:
            for _ in range(2):
                status, *_ = await chat(session, cluster, x_pairmesh_require=f"node=@{node.name}")
                assert status == 200
        else:
            async with session.post(f"{engine.url}/models/unload", json={"model": "one"}) as reply:
                await reply.read()

    async def known() -> bool:
        members = await cluster["alpha"].members()
        return all(
            (name in nodes)
            is any(row["model"] == "one" and row["state"] == "resident" for row in members[name]["residents"])
            for name in IPS
        )

    await wait_for(known, 15, f"alpha knows the model resident on {nodes} alone")


@pytest.mark.scenario("profiles, costs and warm models move the ranking")
async def test_the_rank_follows_measured_speed_and_then_what_is_loaded(
    cluster: Cluster, session: aiohttp.ClientSession
) -> None:
    await warm_on(cluster, session, *IPS)
    _, told, record = await chat(session, cluster, tokens=64, x_request_id="ranked-by-speed")
    rows = {record["names"][row["row"]]: row for row in record["candidates"]}
    assert rows["@alpha/llama"]["est"]["tpot"] > 2 * rows["@gamma/llama"]["est"]["tpot"], "profiles differ"
    assert told["x-pairmesh-node"] != "@alpha/llama"
    factors = {record["names"][other["row"]]: other["top_factor"] for other in record["alternatives"]}
    assert factors["@alpha/llama"] == "speed"

    await warm_on(cluster, session, "alpha")
    _, told, record = await chat(session, cluster, tokens=2)
    assert told["x-pairmesh-node"] == "@alpha/llama", "slow and warm is sooner than fast and cold"
    rows = {record["names"][row["row"]]: row for row in record["candidates"]}
    assert rows["@gamma/llama"]["est"]["load"] > 0


@pytest.mark.scenario("the fall-back is the same every time when it, or the authority, is away")
async def test_without_its_authority_the_choice_is_the_native_one_every_time(
    cluster: Cluster, session: aiohttp.ClientSession
) -> None:
    await warm_on(cluster, session, *IPS)
    alpha, policy = cluster["alpha"], cluster["alpha"].config / "policy.toml"
    _, native, record = await chat(session, cluster, x_request_id="one-and-the-same")
    assert record["authority"]["outcome"] == "off"
    closed = HeldPort(alpha.ip)
    policy.write_text(f'[authority]\nmode = "authoritative"\nurl = "http://{alpha.ip}:{closed.port}/place"\n')

    async def asked() -> bool:
        _, _, record = await chat(session, cluster)
        return bool(record["authority"]["mode"] == "authoritative")

    await wait_for(asked, 15, "alpha asks an authority")
    outcomes = []
    for _ in range(6):
        status, told, record = await chat(session, cluster, x_request_id="one-and-the-same")
        assert (status, told["x-pairmesh-node"]) == (200, native["x-pairmesh-node"])
        assert told["x-pairmesh-reason"] == native["x-pairmesh-reason"]
        outcomes.append(record["authority"]["outcome"])
    assert set(outcomes) <= {"error", "breaker_open"}
    assert outcomes[-1] == "breaker_open", "after five failures in a row nobody asks"
    policy.unlink()


@pytest.mark.scenario("the fall-back is the same every time when it, or the authority, is away")
@pytest.mark.scenario("a preferred node serves only if it is reachable, trusted and owns the model")
async def test_a_preferred_node_serves_only_if_it_owns_the_model_is_reachable_and_trusted(
    cluster: Cluster, session: aiohttp.ClientSession
) -> None:
    owner, model = OWNED_ONCE
    _, told, _ = await chat(session, cluster, model, x_pairmesh_prefer="@alpha")
    assert told["x-pairmesh-node"] == f"@{owner}/llama"
    assert told["x-pairmesh-hints"] == "prefer=excluded(model_absent)"

    await warm_on(cluster, session, *IPS)
    _, told, record = await chat(session, cluster, x_pairmesh_prefer="@alpha")
    assert (told["x-pairmesh-node"], record["reason"]) == ("@alpha/llama", "hint")

    await cluster["beta"].kill()

    async def lost() -> bool:
        return not (await cluster["alpha"].members())["beta"]["routable"]

    await wait_for(lost, 15, "alpha noticed")
    told_twice = []
    for _ in range(2):
        status, told, _ = await chat(
            session, cluster, x_pairmesh_prefer="@beta", x_request_id="the-same-request"
        )
        assert (status, told["x-pairmesh-hints"]) == (200, "prefer=excluded(unreachable)")
        told_twice.append(told["x-pairmesh-node"])
    assert told_twice[0] == told_twice[1], "the fall-back is no matter of chance"
    _, told, _ = await chat(session, cluster, x_request_id="the-same-request")
    assert told["x-pairmesh-node"] == told_twice[0], "and it is the native choice"

    status, out, err = await cluster["alpha"].cli("trust", "remove", "@beta")
    assert status == 0, (out, err)
    status, told, _ = await chat(session, cluster, x_pairmesh_prefer="@beta")
    assert (status, told["x-pairmesh-hints"]) == (200, "prefer=ignored_unknown")
