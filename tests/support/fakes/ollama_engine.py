"""What is behind the fake Ollama's routes: models that load on demand, make room for each other, and speak in words.

The least recently used idle model makes room, ``keep_alive`` is honoured, another ``num_ctx`` loads anew.
"""

import asyncio
import contextlib
import hashlib
import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

FOREVER_S = 2**63 / 1e9
KEEP_S = 300.0
WORDS = 8
_PARTS = re.compile(r"(\d+(?:\.\d+)?)(ns|us|ms|s|m|h)")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeModel:
    """One model of the fake. ``cloud`` is the host that would really serve it; ``num_ctx`` a line of its parameters."""

    name: str
    size: int = 2_019_393_189
    params: int = 3_212_749_888
    shown_params: str = "3.2B"
    quant: str = "Q4_K_M"
    family: str = "llama"
    ctx: int = 131_072
    num_ctx: int | None = None
    capabilities: tuple[str, ...] | None = ("completion", "tools")
    cloud: str | None = None
    salt: str = ""

    @property
    def digest(self) -> str:
        return hashlib.sha256((self.name + self.salt).encode()).hexdigest()

    @property
    def details(self) -> dict[str, Any]:
        return {
            "parent_model": "",
            "format": "gguf",
            "family": self.family,
            "families": [self.family],
            "parameter_size": self.shown_params,
            "quantization_level": self.quant,
        }


@dataclass(slots=True, kw_only=True)
class Runner:
    """One model in memory. ``expires_at`` is wall time; ``loaded`` is set once it can serve."""

    model: FakeModel
    ctx: int
    keep_s: float
    expires_at: float
    loaded: asyncio.Event = field(default_factory=asyncio.Event)
    places: asyncio.Semaphore
    in_use: int = 0
    used: int = 0


@dataclass(slots=True, kw_only=True)
class OllamaEngine:
    """The models of one server, those in memory, and its pace.

    ``load_s``, ``prefill_s`` and ``token_s`` are what work takes; change any of it while it runs.
    ``break_after`` tells an error in mid-stream after so many words, ``cut_after`` drops the connection there.
    ``gate``, if there is one, holds every load until it is set. ``vram`` is the share of a model on a GPU; 0
    is left out of replies, as the real server does.
    """

    models: list[FakeModel]
    version: str = "0.13.3"
    default_ctx: int = 4_096
    vram: float = 0.0
    load_s: float = 0.0
    prefill_s: float = 0.0
    token_s: float = 0.0
    parallel: int = 1
    loaded_most: int = 3
    queue_most: int = 512
    broken: frozenset[str] = frozenset()
    break_after: int | None = None
    cut_after: int | None = None
    gate: asyncio.Event | None = None
    wall: Callable[[], float] = time.time
    bodies: list[dict[str, Any]] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    runners: dict[str, Runner] = field(default_factory=dict)
    _waiting: int = 0
    _turn: int = 0

    def unload_all(self) -> None:
        """Forget what is in memory, as a restart would."""
        self.runners.clear()

    def find(self, name: str) -> FakeModel | None:
        """The model that goes by ``name``, tag optional, letter case ignored."""
        wanted = name if ":" in name.rpartition("/")[2] else f"{name}:latest"
        return next((model for model in self.models if model.name.lower() == wanted.lower()), None)

    def named(self, told: dict[str, Any]) -> FakeModel:
        """The model that a request asks for; raises ``Refused``."""
        name = told.get("model") or told.get("name")
        if not name:
            raise Refused(400, "model is required")
        model = self.find(name)
        if model is None:
            raise Refused(404, f"model '{name}' not found")
        return model

    def expire(self) -> None:
        """Forget the models that nobody used for as long as they were to be kept."""
        now = self.wall()
        for name, runner in list(self.runners.items()):
            if runner.expires_at <= now and not runner.in_use and runner.loaded.is_set():
                del self.runners[name]

    @contextlib.asynccontextmanager
    async def loaded(self, model: FakeModel, told: dict[str, Any]) -> AsyncIterator[tuple[Runner, int]]:
        """The runner of ``model``, loaded if need be, and the nanoseconds that took."""
        began = time.perf_counter_ns()
        if self._waiting >= self.queue_most:
            raise Refused(503, "server busy, please try again.  maximum pending requests exceeded")
        self._waiting += 1
        try:
            runner = await self._runner(model, told)
        finally:
            self._waiting -= 1
        took = time.perf_counter_ns() - began
        runner.in_use += 1
        try:
            yield runner, took
        finally:
            runner.in_use -= 1
            runner.expires_at = self.wall() + runner.keep_s

    async def _runner(self, model: FakeModel, told: dict[str, Any]) -> Runner:
        self.expire()
        options = told.get("options") or {}
        ctx = options.get("num_ctx") or model.num_ctx or self.default_ctx
        keep_s = keep_alive_s(told.get("keep_alive"))
        runner = self.runners.get(model.name)
        if runner is not None and runner.ctx != ctx and "num_ctx" in options:
            del self.runners[model.name]
            runner = None
        self._turn += 1
        if runner is None:
            while len(self.runners) >= self.loaded_most:
                idle = [r for r in self.runners.values() if not r.in_use]
                if not idle:
                    await asyncio.sleep(0.01)
                    continue
                del self.runners[min(idle, key=lambda r: r.used).model.name]
            runner = self.runners[model.name] = Runner(
                model=model,
                ctx=ctx,
                keep_s=KEEP_S if keep_s is None else keep_s,
                expires_at=self.wall() + KEEP_S,
                places=asyncio.Semaphore(self.parallel),
            )
            runner.used = self._turn
            self.loads.append(model.name)
            await asyncio.sleep(self.load_s)
            if self.gate is not None:
                await self.gate.wait()
            if model.name in self.broken:
                self.runners.pop(model.name, None)
                runner.loaded.set()
                raise Refused(500, "llama runner process has terminated: exit status 2")
            runner.loaded.set()
        runner.used = self._turn
        await runner.loaded.wait()
        if keep_s is not None:
            runner.keep_s = keep_s
        return runner

    async def words(self, runner: Runner, options: dict[str, Any]) -> AsyncIterator[str]:
        """Words as they come: the prompt first, which nothing interrupts."""
        async with runner.places:
            await asyncio.sleep(self.prefill_s)
            for number in range(self.cap({"options": options}) or WORDS):
                await asyncio.sleep(self.token_s)
                yield f"w{number} "

    @staticmethod
    def cap(told: dict[str, Any]) -> int | None:
        """The most words that a request asks for; None for no limit."""
        cap = (told.get("options") or {}).get("num_predict")
        return cap if cap is not None and cap > 0 else None


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


def keep_alive_s(told: Any) -> float | None:
    """Seconds of a ``keep_alive``: a number, or a Go duration; below 0 is for ever, None if not told."""
    if told is None:
        return None
    if isinstance(told, str):
        sign = -1 if told.startswith("-") else 1
        parts = _PARTS.findall(told)
        if not parts and told.strip("+-") != "0":
            raise Refused(400, "time: invalid duration")
        told = sign * sum(float(number) * _SECONDS[unit] for number, unit in parts)
    return FOREVER_S if told < 0 else float(told)
