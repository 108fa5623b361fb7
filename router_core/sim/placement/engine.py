"""An inference engine at virtual time: slots with continuous batching, a FIFO queue, memory, cold loads, eviction.

Prompts that are computed at the same time share the prompt speed; every sequence in the batch generates at
``tg / (1 + beta * (batch - 1)) / (1 + depth_slope * depth / 1024)``, the shape that batched llama.cpp benchmarks and
those at depth show: total prompt speed stays, total generation speed grows less than the batch, and a longer context
generates slower. While a prompt is computed, the others get one token for each of its chunks. One model loads at a time;
it evicts idle models, longest unused first, and while only busy ones are in its way the queue behind it waits for them
(as Ollama's scheduler does). It knows nothing of routers.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from router_core.sim.timeline import Timeline

GIB = 2**30
BLOCK_TOKENS = 512
_RUNTIME_BYTES = 300 * 2**20
_WEIGHTS_MARGIN = 1.05
_RELOAD_GAIN = 1.6
_RELOAD_MS = 3_600_000
_DONE = 1e-6
_STEP_MS = 10_000
_DEPTH_TOKENS = 1_024


class ModelSpec(Struct, frozen=True, gc=False, kw_only=True):
    """A model on one engine: size in bytes, single-stream speeds in tokens/s."""

    name: str
    size_bytes: int
    pp: float
    tg: float

    @property
    def need_bytes(self) -> int:
        """What it takes in memory."""
        return round(_WEIGHTS_MARGIN * self.size_bytes) + _RUNTIME_BYTES


class EngineSpec(Struct, frozen=True, gc=False, kw_only=True):
    """``memory_bytes`` holds models, ``load_bytes_per_s`` reads a cold one, ``cache_blocks`` prompt blocks are kept.
    ``depth_slope`` is how much longer a token takes per 1,024 tokens of context. ``chunk_tokens`` is how much of a prompt
    is computed in one step with the batch, so that answers get ``pp / chunk_tokens`` tokens/s at most meanwhile; 0: prompts
    slow no answer. Without ``shared_prompt`` every prompt is computed at full speed whatever runs besides: a plain model
    of slots."""

    slots: int
    models: tuple[ModelSpec, ...]
    memory_bytes: int
    beta: float = 0.1
    load_bytes_per_s: float = 1.19 * GIB
    cache_blocks: int = 0
    shared_prompt: bool = True
    depth_slope: float = 0.0
    chunk_tokens: int = 0


class Job(Struct, kw_only=True, eq=False):
    """One request inside an engine. The calls come at the first token and at the end, never after ``cancel``.

    ``prefill_left`` and ``decode_left`` are tokens; times are ms, None until reached. ``computed`` are the prompt
    tokens that no cached block saved, ``depth`` the tokens of context in the middle of the answer.
    """

    model: str
    prompt: int
    output: int
    on_first: Callable[[], None]
    on_end: Callable[[], None]
    blocks: tuple[int, ...] = ()
    started_ms: int | None = None
    first_ms: int | None = None
    cold: bool = False
    computed: int = 0
    prefill_left: float = 0.0
    decode_left: float = 0.0

    @property
    def depth(self) -> float:
        return self.prompt + 0.5 * self.output


class Engine:
    """One engine. ``loads`` and ``loaded_bytes`` count cold loads, ``busy_ms`` the time with a sequence under way,
    ``frozen`` makes it accept and stay silent."""

    def __init__(self, timeline: Timeline, spec: EngineSpec, resident: Iterable[str] = ()) -> None:
        self.spec = spec
        self.models: Mapping[str, ModelSpec] = {model.name: model for model in spec.models}
        self.running: list[Job] = []
        self.queue: list[Job] = []
        self.resident: dict[str, int] = dict.fromkeys(resident, 0)
        self.loading: str | None = None
        self.load_ends_ms = 0
        self.loads = 0
        self.loaded_bytes = 0
        self.busy_ms = 0
        self.frozen = False
        self.changed: Callable[[], None] = lambda: None
        self._timeline = timeline
        self._loaded_at: dict[str, int] = {}
        self._blocks: dict[int, None] = {}
        self._at = 0
        self._wake = 0

    @property
    def used_bytes(self) -> int:
        """Memory of resident models and of the one that loads."""
        names = (*self.resident, self.loading) if self.loading is not None else tuple(self.resident)
        return sum(self.models[name].need_bytes for name in names)

    @property
    def obtainable_bytes(self) -> int:
        """What a load could use: free memory and idle residents."""
        busy = {job.model for job in self.running}
        idle = sum(self.models[name].need_bytes for name in self.resident if name not in busy)
        return max(0, self.spec.memory_bytes - self.used_bytes + idle)

    def submit(self, job: Job) -> None:
        """Take a job at the end of the queue."""
        if self.frozen:
            return
        self._advance()
        self.queue.append(job)
        self._settle()

    def cancel(self, job: Job) -> None:
        """Drop a job, wherever it is; of no effect once it ended."""
        self._advance()
        for place in (self.running, self.queue):
            if job in place:
                place.remove(job)
                self._settle()
                return

    def load_s(self, name: str) -> float:
        """How long loading ``name`` would take now."""
        seconds = self.models[name].size_bytes / self.spec.load_bytes_per_s
        before = self._loaded_at.get(name)
        return seconds / _RELOAD_GAIN if self._is_recent(before) else seconds

    def forecast(self, model: str, prompt: int, output: int) -> "Forecast":
        """What would become of this request if it were the last one ever to come; knows every length (an oracle's
        view)."""
        self._advance()
        return _forecast(self, model, prompt, output)

    def _is_recent(self, loaded_ms: int | None) -> bool:
        return loaded_ms is not None and self._timeline.now - loaded_ms <= _RELOAD_MS

    def _advance(self) -> None:
        now = self._timeline.now
        elapsed_ms, self._at = now - self._at, now
        if not elapsed_ms or not self.running:
            return
        self.busy_ms += elapsed_ms
        _progress(self.running, self.models, self.spec, elapsed_ms / 1000.0)

    def _settle(self) -> None:
        """Note what has ended, start what can start, plan the next look."""
        now = self._timeline.now
        for job in list(self.running):
            if job.first_ms is None and job.prefill_left <= _DONE:
                job.first_ms = now
                self._keep(job.blocks)
                self._timeline.at(now, job.on_first)
            if job.first_ms is not None and job.decode_left <= _DONE:
                self.running.remove(job)
                self.resident[job.model] = now
                self._timeline.at(now, job.on_end)
        self._start()
        self._wake += 1
        mark = self._wake
        soonest_s = _next_end_s(self.running, self.models, self.spec)
        if soonest_s is not None:
            self._timeline.at(now + math.ceil(1000.0 * soonest_s - _DONE), lambda: self._look(mark))
        self.changed()

    def _look(self, mark: int) -> None:
        if mark == self._wake:
            self._advance()
            self._settle()

    def _start(self) -> None:
        now = self._timeline.now
        waiting: list[Job] = []
        for place, job in enumerate(self.queue):
            if len(self.running) >= self.spec.slots:
                waiting += self.queue[place:]
                break
            if job.model in self.resident:
                self.resident[job.model] = now
                job.started_ms = now
                job.computed = max(1, job.prompt - self._hit(job.blocks))
                job.prefill_left, job.decode_left = float(job.computed), max(0.0, job.output - 1.0)
                self.running.append(job)
                continue
            job.cold = True
            if self.loading is None and not self._load(job.model):
                waiting += self.queue[place:]
                break
            waiting.append(job)
        self.queue = waiting

    def _load(self, name: str) -> bool:
        """Begin to load ``name``; False if busy models leave no room."""
        need = self.models[name].need_bytes
        if need > self.obtainable_bytes:
            return False
        busy = {job.model for job in self.running}
        for other in sorted((at, other) for other, at in self.resident.items() if other not in busy):
            if self.used_bytes + need <= self.spec.memory_bytes:
                break
            del self.resident[other[1]]
        load_ms = round(1000.0 * self.load_s(name))
        self.loading, self.load_ends_ms = name, self._timeline.now + load_ms
        self.loads += 1
        self.loaded_bytes += self.models[name].size_bytes
        self._timeline.after(load_ms, self._loaded)
        return True

    def _loaded(self) -> None:
        assert self.loading is not None
        self._advance()
        self.resident[self.loading] = self._loaded_at[self.loading] = self._timeline.now
        self.loading = None
        self._settle()

    def _hit(self, blocks: tuple[int, ...]) -> int:
        held = 0
        for block in blocks:
            if block not in self._blocks:
                break
            held += 1
        return held * BLOCK_TOKENS

    def _keep(self, blocks: tuple[int, ...]) -> None:
        for block in blocks if self.spec.cache_blocks else ():
            self._blocks.pop(block, None)
            self._blocks[block] = None
        while len(self._blocks) > self.spec.cache_blocks:
            del self._blocks[next(iter(self._blocks))]


def _progress(jobs: list[Job], models: Mapping[str, ModelSpec], spec: EngineSpec, seconds: float) -> None:
    speeds = _speeds(jobs, models, spec)
    for job, speed in zip(jobs, speeds, strict=True):
        if job.prefill_left > _DONE:
            job.prefill_left -= seconds * speed
        else:
            job.decode_left -= seconds * speed


def _next_end_s(jobs: list[Job], models: Mapping[str, ModelSpec], spec: EngineSpec) -> float | None:
    """Seconds until some job ends its prompt or its answer, all else staying as it is."""
    if not jobs:
        return None
    speeds = _speeds(jobs, models, spec)
    soonest = min(
        [
            (job.prefill_left if job.prefill_left > _DONE else job.decode_left) / speed
            for job, speed in zip(jobs, speeds, strict=True)
        ]
    )
    return max(0.0, soonest)


def _speeds(jobs: list[Job], models: Mapping[str, ModelSpec], spec: EngineSpec) -> list[float]:
    """Tokens/s of each job, of its prompt as long as that is not computed, else of its answer."""
    prompts = [job for job in jobs if job.prefill_left > _DONE]
    sharing = float(len(prompts)) if spec.shared_prompt else 1.0
    crowd = 1.0 + spec.beta * (len(jobs) - 1)
    stalled = math.inf
    if prompts and spec.chunk_tokens:
        stalled = min([models[job.model].pp for job in prompts]) / spec.chunk_tokens
    found = []
    for job in jobs:
        model = models[job.model]
        if job.prefill_left > _DONE:
            found.append(model.pp / sharing)
        else:
            deep = 1.0 + spec.depth_slope * job.depth / _DEPTH_TOKENS
            found.append(min(model.tg / crowd / deep, stalled))
    return found


class Forecast(Struct, frozen=True, gc=False, kw_only=True):
    """When a request would begin to be computed, have its first token and end, in virtual ms."""

    start_ms: float
    first_ms: float
    end_ms: float


_NEVER = Forecast(start_ms=math.inf, first_ms=math.inf, end_ms=math.inf)


def _forecast(engine: Engine, model: str, prompt: int, output: int) -> Forecast:
    """What becomes of a new request: the queue in order, loads one after another and then in the way."""
    spec, models = engine.spec, engine.models
    jobs = [_copy(job, job.prefill_left, job.decode_left) for job in engine.running]
    mine = Job(
        model=model,
        prompt=prompt,
        output=output,
        on_first=_nothing,
        on_end=_nothing,
        prefill_left=float(prompt),
        decode_left=max(0.0, output - 1.0),
    )
    queue = [_copy(job, float(job.prompt), job.output - 1.0) for job in engine.queue] + [mine]
    warm = set(engine.resident)
    now = float(engine._timeline.now)
    start = first = math.inf
    if engine.frozen:
        return _NEVER
    if engine.loading is not None and any(job.model == engine.loading for job in queue):
        warm.add(engine.loading)
        now = max(now, float(engine.load_ends_ms)) if mine.model == engine.loading else now
    while True:
        while queue and len(jobs) < spec.slots:
            job = queue.pop(0)
            if job.model not in warm:
                now += 1000.0 * engine.load_s(job.model)
                warm.add(job.model)
            if job is mine:
                start = now
            jobs.append(job)
        step_s = _next_end_s(jobs, models, spec) or 0.0
        _progress(jobs, models, spec, step_s + _DONE)
        now += 1000.0 * step_s
        if first == math.inf and mine.prefill_left <= _DONE:
            first = now
        for job in [job for job in jobs if job.prefill_left <= _DONE and job.decode_left <= _DONE]:
            if job is mine:
                return Forecast(start_ms=start, first_ms=first, end_ms=now)
            jobs.remove(job)


def _copy(job: Job, prefill_left: float, decode_left: float) -> Job:
    return Job(
        model=job.model,
        prompt=job.prompt,
        output=job.output,
        on_first=_nothing,
        on_end=_nothing,
        prefill_left=prefill_left,
        decode_left=max(0.0, decode_left),
    )


def _nothing() -> None:
    return None


def capacity_rps(spec: EngineSpec, work: Sequence[tuple[str, int, int]]) -> float:
    """Requests per second that the engine sustains when it never runs out of these (model, prompt, output) requests and
    every model is in memory."""
    timeline = Timeline()
    boundless = replace(spec, memory_bytes=sum(model.need_bytes for model in spec.models))
    engine = Engine(timeline, boundless, resident=[model.name for model in spec.models])
    left = iter(work)
    ended: list[int] = []
    until: list[int] = []

    def feed() -> None:
        one = next(left, None)
        if one is None:
            until.append(timeline.now)
            return
        engine.submit(Job(model=one[0], prompt=one[1], output=one[2], on_first=_nothing, on_end=end))

    def end() -> None:
        ended.append(timeline.now)
        feed()

    for _ in range(2 * spec.slots):
        feed()
    while not until:
        timeline.run_until(timeline.now + _STEP_MS)
    return 1000.0 * sum(at <= until[0] for at in ended) / max(1, until[0])
