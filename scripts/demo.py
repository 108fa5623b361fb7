"""The demo: three daemons with real engines, 40 requests, one daemon killed while it serves, and its return.

Everything printed was measured in this run; the exit status is 0 only if every promise of the summary held.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.support import llama, tiny_gguf  # noqa: E402
from tests.support.cluster import Cluster, Node, closing, pair, wait_for  # noqa: E402

MODELS_MB = {"small": 2, "medium": 40, "large": 100}
OWNED = {"alpha": ("small", "medium", "large"), "beta": ("small", "medium"), "gamma": ("small",)}
IPS = {"alpha": "127.0.0.2", "beta": "127.0.0.3", "gamma": "127.0.0.4"}
ENTRY = "alpha"
VICTIM = "beta"
REQUESTS = 40
CLIENTS = 4
TOKENS = 40
LONG_TOKENS = 160
GONE_WITHIN_S = 1.0
STORIES = itertools.count(1)
BACK_WITHIN_S = 3.0
SEEN_WITHIN_S = 1.0


@dataclass(kw_only=True)
class Served:
    """One request as its client saw it; ``tps`` is the engine's own word. ``broken``: the answer had begun and did
    not end well."""

    model: str
    node: str = "-"
    decision_id: str = ""
    status: int = 0
    ttft_ms: float | None = None
    tps: float | None = None
    broken: bool = False

    @property
    def lost(self) -> bool:
        """Failed before its first byte."""
        return self.status != 200


@dataclass(kw_only=True)
class Summary:
    """What the run showed: (claim, measured, held)."""

    rows: list[tuple[str, str, bool]] = field(default_factory=list)

    def add(self, claim: str, measured: str, held: bool) -> None:
        self.rows.append((claim, measured, held))

    @property
    def held(self) -> bool:
        return all(held for *_, held in self.rows)


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """A progress line that ends with the seconds it took."""
    began = time.monotonic()
    print(f"  {what} ... ", end="", flush=True)
    yield
    print(f"{time.monotonic() - began:.1f} s", flush=True)


def heading(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}", flush=True)


def make_models(folder: Path) -> dict[str, Path]:
    """The models, made once and kept beside the virtual environment."""
    folder.mkdir(parents=True, exist_ok=True)
    made = {}
    for name, size_mb in MODELS_MB.items():
        path = folder / f"{name}.gguf"
        if not path.exists():
            part = path.with_suffix(".part")
            tiny_gguf.write_model(part, size_mb=size_mb, name=name)
            part.rename(path)
        made[name] = path
    return made


def models_of(node: str, models: dict[str, Path], base: Path) -> Path:
    folder = base / node / "models"
    folder.mkdir(parents=True)
    for name in OWNED[node]:
        (folder / f"{name}.gguf").symlink_to(models[name])
    return folder


async def start_cluster(base: Path, models: dict[str, Path]) -> Cluster:
    cluster = Cluster(base=base, nodes=[], engines=[])
    try:
        with step("starting a llama-server in router mode for each node"):
            for name, ip in IPS.items():
                folder = models_of(name, models, base)
                engine = llama.LlamaServer(llama.router(folder), base / name / "engine.log", host=ip)
                cluster.engines.append(engine)
                await asyncio.to_thread(engine.start)
        cluster.nodes += [Node(name=name, ip=ip, base=base / name) for name, ip in IPS.items()]
        for node, engine in zip(cluster.nodes, cluster.engines, strict=True):
            others = [other for other in cluster.nodes if other is not node]
            node.write_settings([f"@{other.name}={other.ip}:{other.ports['mesh']}" for other in others])
            node.write_endpoint(engine)
        with step("starting three daemons, each with a key, folders and addresses of its own"):
            await asyncio.gather(*(node.start() for node in cluster.nodes))
        with step("pairing them by file: each learns the pinned certificates of the others"):
            await pair(cluster.nodes)
        with step("waiting until each node sees all engines of all nodes"):
            await cluster.full_view()
    except BaseException:
        await cluster.aclose()
        raise
    return cluster


async def ask(session: aiohttp.ClientSession, node: Node, model: str, tokens: int) -> Served:
    """One streaming chat; the first byte is timed from before the request is sent."""
    served = Served(model=model)
    body = {
        "model": model,
        "stream": True,
        "max_tokens": tokens,
        "messages": [
            {"role": "user", "content": f"story {next(STORIES)}: " + "count to the end of the world " * 12}
        ],
    }
    began = time.monotonic()
    first = None
    try:
        async with session.post(f"{node.api}/v1/chat/completions", json=body) as reply:
            served.decision_id = reply.headers.get("x-pairmesh-decision-id", "")
            served.node = reply.headers.get("x-pairmesh-node", "-")
            async for line in reply.content:
                if not line.startswith(b"data: {"):
                    continue
                served.status = reply.status
                event = json.loads(line[6:])
                served.tps = event.get("timings", {}).get("predicted_per_second", served.tps)
                if "error" in event:
                    served.broken = True
                elif any(choice.get("delta", {}).get("content") for choice in event.get("choices", ())):
                    first = first or time.monotonic()
            if served.status == 0 and reply.status != 200:
                served.status = reply.status
    except aiohttp.ClientError:
        served.broken = served.status == 200
    if first is not None:
        served.ttft_ms = (first - began) * 1000
    return served


async def ask_many(
    node: Node, models: list[str], clients: int, tokens: int, done: list[Served] | None = None
) -> list[Served]:
    """Send one request per entry of ``models`` from ``clients`` concurrent clients."""
    queue = list(reversed(models))
    served: list[Served] = [] if done is None else done
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def client() -> None:
            while queue:
                served.append(await ask(session, node, queue.pop(), tokens))

        await asyncio.gather(*(client() for _ in range(clients)))
    return served


def cold_mistakes(records: list[dict[str, Any]]) -> int:
    """Cold choices whose own record predicted a longer completion than the best warm row with a free slot."""
    mistakes = 0
    for record in records:
        chosen = next((row for row in record["candidates"] if row["row"] == record["chosen"]), None)
        if chosen is None or chosen["resident"]:
            continue
        warm = [row["est"]["ect"] for row in record["candidates"] if row["resident"] and row["free"]]
        mistakes += bool(warm) and chosen["est"]["ect"] > min(warm)
    return mistakes


def show_requests(served: list[Served], records: dict[str, dict[str, Any]]) -> int:
    """Print a line per request; return how many found their model warm."""
    print(f"{'model':<8} {'node':<14} {'':<5} {'wait ms':>8} {'TTFT ms':>8} {'tok/s':>7}")
    warm = 0
    for one in served:
        record = records.get(one.decision_id)
        chosen = chosen_row(record) if record else None
        is_warm = bool(chosen and chosen["resident"])
        warm += is_warm
        wait = f"{chosen['est']['wait'] * 1000:.0f}" if chosen else "-"
        ttft = f"{one.ttft_ms:.0f}" if one.ttft_ms is not None else "-"
        tps = f"{one.tps:.0f}" if one.tps is not None else "-"
        print(
            f"{one.model:<8} {one.node:<14} {'warm' if is_warm else 'cold':<5} {wait:>8} {ttft:>8} {tps:>7}"
        )
    return warm


def chosen_row(record: dict[str, Any]) -> dict[str, Any] | None:
    return next((row for row in record["candidates"] if row["row"] == record["chosen"]), None)


async def records_of(node: Node, served: list[Served]) -> dict[str, dict[str, Any]]:
    return {
        one.decision_id: await node.get(f"/v1/decisions/{one.decision_id}")
        for one in served
        if one.decision_id
    }


async def mixed_load(cluster: Cluster, summary: Summary) -> list[Served]:
    entry = cluster[ENTRY]
    names = list(MODELS_MB)
    models = [names[(i * i + i // 5) % len(names)] for i in range(REQUESTS)]
    served = await ask_many(entry, models, CLIENTS, TOKENS)
    records = await records_of(entry, served)
    warm = show_requests(served, records)
    lost = sum(one.lost for one in served)
    mistakes = cold_mistakes(list(records.values()))
    summary.add("requests failed before their first byte", f"{lost} of {REQUESTS}", lost == 0)
    summary.add(
        "cold choices where a warm one with a free slot would have ended sooner", str(mistakes), mistakes == 0
    )
    summary.add("served warm", f"{warm} of {REQUESTS} ({100 * warm // REQUESTS} %)", True)
    return served


async def resident_at(watcher: Node, owner: str, model: str) -> bool:
    residents = (await watcher.members())[owner]["residents"]
    return any(entry["model"] == model and entry["state"] == "resident" for entry in residents)


async def residency_lag_s(cluster: Cluster, owner: str, model: str, verb: str) -> float:
    """Seconds from the engine's own event of a load or unload to the view of another node."""
    engine = cluster.engines[list(IPS).index(owner)]
    watcher = cluster[ENTRY]
    wanted = "loaded" if verb == "load" else "unloaded"
    async with aiohttp.ClientSession() as session:
        listening = asyncio.Event()

        async def event_time() -> float:
            async with session.get(f"{engine.url}/models/sse") as stream:
                listening.set()
                async for line in stream.content:
                    if not line.startswith(b"data: "):
                        continue
                    event = json.loads(line[6:])
                    if event.get("model") == model and event.get("data", {}).get("status") == wanted:
                        return time.monotonic()
            raise RuntimeError(f"{owner}'s engine told of no {verb} of {model}")

        event = asyncio.create_task(event_time())
        await listening.wait()
        async with session.post(f"{engine.url}/models/{verb}", json={"model": model}) as reply:
            reply.raise_for_status()
        at_engine = await asyncio.wait_for(event, 30)

        async def seen() -> bool:
            return await resident_at(watcher, owner, model) is (verb == "load")

        await wait_for(seen, 10, f"{watcher.name} sees the {verb} of {model} on {owner}", every_s=0.005)
        return max(0.0, time.monotonic() - at_engine)


async def show_residency(cluster: Cluster, summary: Summary) -> None:
    if await resident_at(cluster[ENTRY], VICTIM, "medium"):
        verbs = ("unload", "load")
    else:
        verbs = ("load", "unload")
    lags = []
    for verb in verbs:
        lag = await residency_lag_s(cluster, VICTIM, "medium", verb)
        lags.append(lag)
        print(
            f"  {verb} of medium on {VICTIM}: in {ENTRY}'s view {lag * 1000:.0f} ms after the engine's own event"
        )
    summary.add(
        "a load or unload is in another node's view within 1 s of the engine's event",
        f"{max(lags) * 1000:.0f} ms",
        max(lags) <= SEEN_WITHIN_S,
    )


async def routable(watcher: Node, name: str) -> bool:
    member = (await watcher.members())[name]
    return bool(member["routable"]) and any(
        engine["state"] == "ready" and engine["models"] for engine in member["engines"]
    )


async def kill_and_return(cluster: Cluster, summary: Summary) -> None:
    entry, victim = cluster[ENTRY], cluster[VICTIM]
    done: list[Served] = []
    load = asyncio.create_task(ask_many(entry, ["medium", "small"] * 5, 10, LONG_TOKENS, done))

    async def serving() -> bool:
        return load.done() or bool((await entry.members())[VICTIM]["in_flight"])

    await wait_for(serving, 10, f"{VICTIM} serves one of the requests", every_s=0.005)
    in_flight = not load.done()
    killed = time.monotonic()
    await victim.kill()

    async def gone() -> bool:
        return not await routable(entry, VICTIM)

    await wait_for(gone, 10, f"{VICTIM} left the candidates of {ENTRY}", every_s=0.005)
    gone_s = time.monotonic() - killed
    print(f"  kill -9 of {VICTIM} while it served: out of the candidates after {gone_s * 1000:.0f} ms")
    served = await load
    lost = sum(one.lost for one in served)
    cut = sum(one.broken for one in served)
    print(
        f"  10 requests in flight: {10 - lost - cut} whole, {cut} cut after their first byte and told so, {lost} lost"
    )

    after = await ask_many(entry, ["medium", "small"] * 5, CLIENTS, TOKENS)
    lost += sum(one.lost for one in after)
    nodes = sorted({one.node for one in after})
    print(f"  10 more requests: {sum(not one.lost for one in after)} served, by {', '.join(nodes)}")
    summary.add("the daemon was killed while it served", "yes" if in_flight else "no", in_flight)
    summary.add("requests lost before their first byte around the kill", f"{lost} of 20", lost == 0)
    summary.add(
        "killed agent out of the candidates within 1 s", f"{gone_s * 1000:.0f} ms", gone_s <= GONE_WITHIN_S
    )

    began = time.monotonic()
    await victim.start()

    async def back() -> bool:
        return await routable(entry, VICTIM)

    await wait_for(back, 15, f"{VICTIM} is a candidate of {ENTRY} again", every_s=0.01)
    back_s = time.monotonic() - began
    print(f"  {VICTIM} started again: a candidate after {back_s:.1f} s")
    summary.add("restarted agent back within 3 s", f"{back_s:.1f} s", back_s <= BACK_WITHIN_S)


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """SIGTERM and a closed terminal end the run as Ctrl-C does: what was started is stopped, what was made removed."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    caught = [
        sign for sign in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(sign) is not signal.SIG_IGN
    ]

    def end() -> None:
        for sign in caught:
            loop.add_signal_handler(sign, lambda: None)
        task.cancel()

    for sign in caught:
        loop.add_signal_handler(sign, end)
    try:
        yield
    finally:
        for sign in caught:
            loop.remove_signal_handler(sign)


async def run(keep: bool) -> int:
    with ended_in_order():
        return await show(keep)


async def show(keep: bool) -> int:
    began = time.monotonic()
    summary = Summary()
    base = Path(tempfile.mkdtemp(prefix="pairmesh-demo-"))
    try:
        heading("Bringing up three nodes")
        with step("making three tiny models with random weights (they say word salad)"):
            models = make_models(ROOT / ".venv" / "models")
        async with closing(await start_cluster(base, models)) as cluster:
            heading("The nodes, as alpha sees them")
            print((await cluster[ENTRY].cli("status"))[1])
            heading(f"{REQUESTS} streaming chats over three models, {CLIENTS} at a time, all sent to {ENTRY}")
            served = await mixed_load(cluster, summary)
            heading("Why one of them went where it did")
            away = [one for one in served if not one.node.startswith(f"@{ENTRY}")] or served
            print((await cluster[ENTRY].cli("explain", away[-1].decision_id))[1])
            heading("A model is loaded and unloaded behind pairmesh's back")
            await show_residency(cluster, summary)
            heading("One daemon is killed while it serves")
            await kill_and_return(cluster, summary)
            heading("Summary, measured in this run")
            for claim, measured, held in summary.rows:
                print(f"  {'ok  ' if held else 'FAIL'} {claim}: {measured}")
            print(f"  {time.monotonic() - began:.0f} s in all")
            if keep:
                await keep_running(cluster)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return 0 if summary.held else 1


async def keep_running(cluster: Cluster) -> None:
    heading("Left running; Ctrl-C, or SIGTERM to this process, stops everything")
    for node in cluster.nodes:
        variables = " ".join(
            f"{key}={value}" for key, value in node.env.items() if key.endswith("_DIRECTORY")
        )
        print(
            f"  {node.name}: OpenAI API {node.api}/v1, metrics {node.admin}/metrics\n    env {variables} pairmesh status"
        )
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.Event().wait()


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave it running and print the addresses")
    keep = parser.parse_args().keep
    os.environ.setdefault("LANG", "C.UTF-8")
    try:
        llama.find_binary()
        return asyncio.run(run(keep))
    except (llama.LlamaUnavailable, llama.LlamaFailed, RuntimeError) as fault:
        print(f"\nthe demo cannot go on: {fault}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except asyncio.CancelledError:
        return 143


if __name__ == "__main__":
    sys.exit(main())
