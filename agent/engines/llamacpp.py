"""llama.cpp's ``llama-server`` with one model.

It ignores the ``model`` of a request, so nothing but its own id may ever be sent to it. ``/metrics`` and
``/slots`` could wake a sleeping model: while it sleeps, only ``/props`` and the list are read. Its gauges of
speed are reset by whoever reads them, so speeds come from the counters, which move when a request ends.
"""

from typing import Any, Final

from agent.engines import shape
from agent.engines.client import SLOW_S, EngineClient
from agent.engines.contract import (
    EngineMisspoke,
    EngineUnreachable,
    Identity,
    LoadSource,
    Observation,
    ObservedLoad,
    ObservedModel,
    OwnedModel,
    ResidencyState,
)
from agent.engines.exposition import Counters, Moved, moved, read_values
from agent.engines.names import name_of_path
from agent.engines.quants import quant_of
from agent.engines.weights import WeightFiles, absolute_path
from agent.settings.manifest import Caps, Manifest
from router_core.record.state import Capability

PREFIX: Final = "llamacpp:"
RUNNING: Final = PREFIX + "requests_processing"
WAITING: Final = PREFIX + "requests_deferred"
TOTALS: Final = (
    PREFIX + "prompt_tokens_total",
    PREFIX + "prompt_seconds_total",
    PREFIX + "tokens_predicted_total",
    PREFIX + "tokens_predicted_seconds_total",
)
INSTANCE_HEADER: Final = "process-start-time-unix"


class LlamaProcess:
    """What the metrics of one server process tell, look by look, and whether it is still the same process."""

    def __init__(self) -> None:
        self.instance: str | None = None
        self.restarts = 0
        self.running: int | None = None
        self.waiting: int | None = None
        self._counters: Counters | None = None

    async def look(self, client: EngineClient, query: str, now_ms: int, period_ms: int) -> Moved:
        """Read ``/metrics``; the tokens done since the last look.

        The answer waits for the batch in hand, which may be a long prompt: no answer in time means that
        the load is unknown, not that the engine is gone.
        """
        try:
            reply = (await client.get("/metrics" + query)).require()
        except EngineUnreachable as error:
            if error.reason != "timeout":
                raise
            self.running = self.waiting = None
            return Moved()
        values = read_values(reply.body, {RUNNING, WAITING, *TOTALS})
        self.running, self.waiting = _whole(values.get(RUNNING)), _whole(values.get(WAITING))
        token = reply.headers.get(INSTANCE_HEADER)
        totals = [values[name] for name in TOTALS if name in values]
        before, self._counters = self._counters, None
        if len(totals) == len(TOTALS):
            self._counters = Counters(
                at_ms=now_ms,
                prompt_tokens=totals[0],
                prompt_s=totals[1],
                gen_tokens=totals[2],
                gen_s=totals[3],
            )
        fell = before is not None and self._counters is not None and self._counters.fell_below(before)
        if fell or (self.instance is not None and token != self.instance):
            self.restarts += 1
            before = None
        self.instance = token
        return moved(before, self._counters, period_ms) if self._counters is not None else Moved()

    def idle(self) -> None:
        """Forget the load: the model sleeps or metrics are not told."""
        self.running = self.waiting = None
        self._counters = None


class LlamaSingle:
    """Adapter for one ``llama-server`` with one model."""

    def __init__(self, client: EngineClient, identity: Identity, manifest: Manifest) -> None:
        self._client = client
        self._metrics = identity.metrics
        self._process = LlamaProcess()
        self._files = WeightFiles(on_this_host=not manifest.remote_host)
        self._id: str | None = None

    @property
    def instance(self) -> str | None:
        return self._process.instance

    @property
    def restarts(self) -> int:
        return self._process.restarts

    @property
    def more_models(self) -> int:
        return 0

    async def inventory(self) -> tuple[OwnedModel, ...]:
        listed = (await self._client.get_listing("/v1/models", "data", timeout_s=SLOW_S)).items
        props = await self._client.get_json("/props", timeout_s=SLOW_S)
        owned = tuple(owned_model(item, props) for item in listed[:1] if shape.text(item, "id") is not None)
        if not owned:
            raise EngineMisspoke("shape", "no model in the list")
        self._id = owned[0].native_id
        file = absolute_path(shape.text(props, "model_path"))
        return tuple(await self._files.add_facts(owned, {self._id: file}))

    async def observe(self, now_ms: int, period_ms: int) -> Observation:
        props = await self._client.get_json("/props")
        asleep = shape.truth(props, "is_sleeping") or False
        done = Moved()
        if self._metrics and not asleep:
            done = await self._process.look(self._client, "", now_ms, period_ms)
        else:
            self._process.idle()
        resident: tuple[ObservedModel, ...] = ()
        if self._id is not None:
            resident = (
                ObservedModel(
                    native_id=self._id,
                    state=ResidencyState.SLEEPING if asleep else ResidencyState.RESIDENT,
                    ctx=shape.whole(props, "default_generation_settings", "n_ctx") or None,
                    slots=shape.whole(props, "total_slots"),
                    running=self._process.running,
                    waiting=self._process.waiting,
                    kv_used=await kv_used(self._client, "", props, self._process.running),
                ),
            )
        return Observation(resident=resident, load=engine_load((self._process,), done))


def owned_model(item: dict[str, Any], props: Any) -> OwnedModel:
    """One entry of a model list. ``props`` may be None where the model is not loaded."""
    native = shape.text(item, "id") or ""
    params = shape.whole(item, "meta", "n_params")
    return OwnedModel(
        native_id=native,
        name=name_of_path(native),
        aliases=tuple(alias for alias in shape.texts(item, "aliases") if alias != native),
        size_bytes=shape.whole(item, "meta", "size") or None,
        params_b=params / 1e9 if params else None,
        ctx_max=shape.whole(item, "meta", "n_ctx_train") or None,
        ctx_served=shape.whole(item, "meta", "n_ctx")
        or shape.whole(props, "default_generation_settings", "n_ctx")
        or None,
        parallel=shape.whole(props, "total_slots") or None,
        quant=quant_of(shape.text(item, "meta", "ftype") or shape.text(props, "model_ftype")),
        format="gguf",
        caps=_caps(item, props),
    )


def engine_load(processes: "tuple[LlamaProcess, ...]", done: Moved) -> ObservedLoad:
    """Load summed over the processes that tell it; ``OWN`` if none does."""
    running = [process.running for process in processes if process.running is not None]
    waiting = [process.waiting for process in processes if process.waiting is not None]
    if not running:
        return ObservedLoad(source=LoadSource.OWN)
    return ObservedLoad(
        source=LoadSource.ENGINE,
        running=sum(running),
        waiting=sum(waiting) if waiting else None,
        pp_tps=done.pp_tps,
        tg_tps=done.tg_tps,
    )


async def kv_used(client: EngineClient, query: str, props: Any, running: int | None) -> float | None:
    """Share of the context that is in use, 0..1. Only asked while a request runs: otherwise it could wake
    a sleeping model."""
    if not running or not shape.truth(props, "endpoint_slots"):
        return None
    try:
        slots = (await client.get("/slots" + query)).require().json()
    except EngineUnreachable as error:
        if error.reason != "timeout":
            raise
        return None
    total = used = 0
    for slot in shape.objects(slots):
        total += shape.whole(slot, "n_ctx") or 0
        if shape.truth(slot, "is_processing"):
            nexts = slot.get("next_token")
            decoded = shape.whole(nexts[0], "n_decoded") if isinstance(nexts, list) and nexts else None
            used += (shape.whole(slot, "n_prompt_tokens") or 0) + (decoded or 0)
    return min(1.0, used / total) if total else None


def _caps(item: dict[str, Any], props: Any) -> Caps:
    known = has = Capability(0)
    inputs = shape.texts(item, "architecture", "input_modalities")
    for cap, modality, listed in (
        (Capability.VISION, "vision", "image"),
        (Capability.AUDIO_IN, "audio", "audio"),
    ):
        told = shape.truth(props, "modalities", modality)
        if told is None and inputs:
            told = listed in inputs
        if told is not None:
            known |= cap
            has |= cap if told else Capability(0)
    if shape.truth(props, "chat_template_caps", "supports_tool_calls"):
        known, has = known | Capability.TOOLS, has | Capability.TOOLS
    return Caps(known=known, has=has)


def _whole(value: float | None) -> int | None:
    return int(value) if value is not None and value >= 0 else None
