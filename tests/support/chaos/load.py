"""Requests to one node's API from inside its namespace, each with the canary in its prompt, and what became of them.

    python -m tests.support.chaos.load PLAN

``PLAN`` is a ``Plan`` as JSON. One JSON line per request goes to ``Plan.out`` when it has ended. SIGTERM ends a
steady load: what runs is awaited, nothing new is sent. Times are of CLOCK_MONOTONIC.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

import aiohttp

CANARY = "canaryh3v8n1c6j9b2s7k4d0f"
DRAIN_S = 40.0
READY_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """``rps`` requests a second until told to stop, or ``burst`` at once. ``stream_share`` of them stream."""

    out: str
    url: str = "http://127.0.0.1:11433"
    name: str = "load"
    rps: float = 0.0
    burst: int = 0
    stream_share: float = 0.0
    tokens: int = 16
    seed: int = 1
    model: str = "tiny"
    timeout_s: float = 60.0
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class Load:
    """A running load; ``prefix`` enters the namespace of the node it talks to."""

    plan: Plan
    prefix: tuple[str, ...]
    process: asyncio.subprocess.Process | None = field(default=None, repr=False)

    async def start(self) -> None:
        """Start it and wait until it has sent its first requests."""
        log = Path(self.plan.out).with_suffix(".log")
        with log.open("ab") as errors:
            self.process = await asyncio.create_subprocess_exec(
                *self.prefix,
                sys.executable,
                *("-m", "tests.support.chaos.load", json.dumps(asdict(self.plan))),
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
            )
        assert self.process.stdout is not None
        if await asyncio.wait_for(self.process.stdout.readline(), READY_S) != b"sent\n":
            raise RuntimeError(f"the load did not start: {log.read_text()[-2000:]}")

    async def stop(self) -> None:
        """No more requests; wait for those that run. RuntimeError if they do not end."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        await self.ended()

    async def ended(self) -> None:
        """Wait until every request has ended."""
        assert self.process is not None
        try:
            status = await asyncio.wait_for(self.process.wait(), self.plan.timeout_s + DRAIN_S)
        except TimeoutError:
            raise RuntimeError(f"{self.plan.name}: requests did not end") from None
        finally:
            await self.kill()
        if status:
            raise RuntimeError(f"{self.plan.name}: the load ended with {status}")

    async def kill(self) -> None:
        """End the process now; harmless when it is gone already."""
        process, self.process = self.process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def ask(session: aiohttp.ClientSession, plan: Plan, number: int, stream: bool) -> dict[str, object]:
    """One chat. ``outcome``: whole, told (an error in the client's dialect), cut (none), refused, lost (no answer)."""
    request = f"{plan.name}-{number}"
    line: dict[str, object] = {"request": request, "stream": stream, "begun": time.monotonic()}
    line |= {"first_byte": None, "status": None, "code": None, "node": None, "events": 0, "bytes": 0}
    body = {
        "model": plan.model,
        "max_tokens": plan.tokens,
        "stream": stream,
        "user": request,
        "messages": [{"role": "user", "content": f"{CANARY} {request}"}],
    }
    raw = bytearray()
    try:
        async with session.post(f"{plan.url}/v1/chat/completions", json=body, headers=plan.headers) as reply:
            line |= {"status": reply.status, "node": reply.headers.get("x-pairmesh-node")}
            line |= {"decision": reply.headers.get("x-pairmesh-decision-id")}
            try:
                async for piece in reply.content.iter_any():
                    if line["first_byte"] is None:
                        line["first_byte"] = time.monotonic()
                    raw += piece
                cut = False
            except aiohttp.ClientPayloadError:
                cut = True
        line |= judged(int(str(line["status"])), bytes(raw), stream, cut)
    except (aiohttp.ClientError, TimeoutError, OSError) as fault:
        line |= {"outcome": "lost", "code": type(fault).__name__}
    return line | {"ended": time.monotonic(), "bytes": len(raw)}


def judged(status: int, raw: bytes, stream: bool, cut: bool) -> dict[str, object]:
    """What an answer amounts to."""
    events = [line[6:] for line in raw.split(b"\n") if line.startswith(b"data: ")] if stream else []
    count = {"events": sum(b'"choices"' in event for event in events)}
    if status != 200:
        return count | {"outcome": "refused", "code": _code(raw)}
    if stream:
        codes = [code for event in events if (code := _code(event)) is not None]
        if b"[DONE]" in events and not cut:
            return count | {"outcome": "whole"}
        return count | {"outcome": "told" if codes else "cut", "code": codes[-1] if codes else None}
    return count | {"outcome": "cut" if cut or _tree(raw) is None else "whole"}


def _tree(raw: bytes) -> object:
    try:
        return json.loads(raw)
    except ValueError:
        return None


def _code(raw: bytes) -> str | None:
    tree = _tree(raw)
    error = tree.get("error") if isinstance(tree, dict) else None
    return str(error.get("code")) if isinstance(error, dict) else None


async def run(plan: Plan) -> None:
    """Send what the plan says and write a line per request."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    out = os.open(plan.out, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    rng = Random(plan.seed)
    running: set[asyncio.Task[None]] = set()
    timeout = aiohttp.ClientTimeout(total=plan.timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def one(number: int) -> None:
            line = await ask(session, plan, number, stream=rng.random() < plan.stream_share)
            os.write(out, json.dumps(line).encode() + b"\n")

        def send(number: int) -> None:
            task = asyncio.create_task(one(number))
            running.add(task)
            task.add_done_callback(running.discard)

        for number in range(plan.burst):
            send(number)
        sys.stdout.write("sent\n")
        sys.stdout.flush()
        number = plan.burst
        while plan.rps and not stop.is_set():
            send(number)
            number += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), rng.expovariate(plan.rps))
        while running:
            await asyncio.wait(running)


if __name__ == "__main__":
    asyncio.run(run(Plan(**json.loads(sys.argv[1]))))
