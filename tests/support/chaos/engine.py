"""A fake OpenAI-compatible engine in a process of its own, and the handle that starts it and tells it to misbehave.

    python -m tests.support.chaos.engine IP PORT FOLDER MODEL SLOTS

It reads its behaviour from ``FOLDER/behaviour.json`` at every request, and writes one JSON line to
``FOLDER/executions.jsonl`` when a request begins and one when it ends. Times are of CLOCK_MONOTONIC.
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

from aiohttp import web

READY_S = 10.0
STOP_S = 5.0
CRASHED = 137


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """``kind``: ok, exit_before_first, exit_after (``k`` tokens), silent, garbage_chunk, echo_prompt_in_error."""

    kind: str = "ok"
    tok_s: float = 200.0
    k: int = 7


OK = Behaviour()


@dataclass(kw_only=True)
class Engine:
    """One engine process. ``prefix`` enters its namespace."""

    folder: Path
    prefix: tuple[str, ...] = ()
    ip: str = "127.0.0.1"
    port: int = 8000
    model: str = "tiny"
    slots: int = 8
    process: asyncio.subprocess.Process | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.behave(OK)

    @property
    def url(self) -> str:
        return f"http://{self.ip}:{self.port}"

    @property
    def executions(self) -> Path:
        return self.folder / "executions.jsonl"

    def behave(self, behaviour: Behaviour) -> None:
        """From the next request on."""
        draft = self.folder / "behaviour.draft"
        draft.write_text(json.dumps(asdict(behaviour)))
        draft.rename(self.folder / "behaviour.json")

    async def start(self) -> None:
        """Start it and wait until it listens."""
        with (self.folder / "engine.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.prefix,
                sys.executable,
                *("-m", "tests.support.chaos.engine", self.ip, str(self.port)),
                *(str(self.folder), self.model, str(self.slots)),
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
            )
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), READY_S)
        if line != b"ready\n":
            raise RuntimeError(
                f"the engine did not start: {(self.folder / 'engine.log').read_text()[-2000:]}"
            )

    async def crashed(self) -> int:
        """Wait for it to end by itself; the exit status."""
        assert self.process is not None
        return await asyncio.wait_for(self.process.wait(), STOP_S)

    def freeze(self, frozen: bool) -> None:
        """SIGSTOP or SIGCONT."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.SIGSTOP if frozen else signal.SIGCONT)

    async def stop(self) -> None:
        """End it; harmless when it is gone already."""
        process, self.process = self.process, None
        if process is not None:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await process.wait()


class _Served:
    """The process's side."""

    def __init__(self, folder: Path, model: str, slots: int) -> None:
        self._folder = folder
        self._model = model
        self._free = asyncio.Semaphore(slots)
        self._log = os.open(folder / "executions.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._count = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self._model, "object": "model"}]})

    def _note(self, what: str, execution: str, request: str, **facts: object) -> None:
        line = {"e": what, "at": time.monotonic(), "execution": execution, "request": request, **facts}
        os.write(self._log, json.dumps(line).encode() + b"\n")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self._count += 1
        execution = f"{os.getpid()}-{self._count}"
        asked, tokens = str(body.get("user")), int(body.get("max_tokens", 16))
        behaviour = Behaviour(**json.loads((self._folder / "behaviour.json").read_text()))
        self._note("begun", execution, asked, stream=bool(body.get("stream")))
        whole = False
        try:
            if behaviour.kind == "silent":
                await asyncio.Event().wait()
            if behaviour.kind == "exit_before_first":
                os._exit(CRASHED)
            if behaviour.kind == "echo_prompt_in_error":
                error = {"message": body["messages"][0]["content"], "type": "server_error"}
                return web.json_response({"error": error}, status=500)
            async with self._free:
                if body.get("stream"):
                    reply = await self._stream(request, behaviour, tokens)
                else:
                    reply = await self._whole(behaviour, tokens)
            whole = True
            return reply
        finally:
            self._note("ended", execution, asked, whole=whole)

    async def _whole(self, behaviour: Behaviour, tokens: int) -> web.Response:
        done = min(tokens, behaviour.k) if behaviour.kind == "exit_after" else tokens
        await asyncio.sleep(done / behaviour.tok_s)
        if done < tokens:
            os._exit(CRASHED)
        usage = {"prompt_tokens": 8, "completion_tokens": tokens, "total_tokens": 8 + tokens}
        message = {"role": "assistant", "content": " word" * tokens}
        choice = {"index": 0, "message": message, "finish_reason": "length"}
        shown = {"id": "chat-1", "object": "chat.completion", "model": self._model, "choices": [choice]}
        return web.json_response(shown | {"usage": usage})

    async def _stream(self, request: web.Request, behaviour: Behaviour, tokens: int) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        for number in range(tokens):
            if behaviour.kind == "exit_after" and number == behaviour.k:
                os._exit(CRASHED)
            if behaviour.kind == "garbage_chunk" and number == 1:
                await reply.write(b"data: {not json \xff\x00\n\n")
            await reply.write(
                b"data: " + json.dumps(self._chunk({"content": " word"}, None)).encode() + b"\n\n"
            )
            await asyncio.sleep(1 / behaviour.tok_s)
        await reply.write(b"data: " + json.dumps(self._chunk({}, "length")).encode() + b"\n\n")
        await reply.write(b"data: [DONE]\n\n")
        await reply.write_eof()
        return reply

    def _chunk(self, delta: dict[str, str], finish: str | None) -> dict[str, object]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return {"id": "chat-1", "object": "chat.completion.chunk", "model": self._model, "choices": [choice]}


async def _serve(ip: str, port: int, folder: Path, model: str, slots: int) -> None:
    runner = web.AppRunner(_Served(folder, model, slots).app(), access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, ip, port, reuse_address=True).start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], int(sys.argv[5])))
