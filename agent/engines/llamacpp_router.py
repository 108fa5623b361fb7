"""llama.cpp's ``llama-server`` in router mode: many models, each in a child process, loaded on demand.

Every question about one model carries ``autoload=false``, or asking would load it. Loads and unloads are
pushed on ``/models/sse``; while that stream is open, the list is read on the slow tier only.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import pairwise
from typing import Any, Final
from urllib.parse import quote

import msgspec
from msgspec.structs import replace

from agent.engines import shape
from agent.engines.client import FAST_S, SLOW_S, EngineClient
from agent.engines.contract import (
    EngineMisspoke,
    EngineUnreachable,
    Identity,
    Observation,
    ObservedModel,
    OwnedModel,
    ResidencyState,
)
from agent.engines.exposition import Moved
from agent.engines.llamacpp import LlamaProcess, engine_load, kv_used, owned_model
from agent.engines.weights import WeightFiles, weight_file
from agent.settings.manifest import Caps, Manifest
from router_core import limits
from router_core.record.state import Capability

STATES: Final[dict[str, ResidencyState]] = {
    "loading": ResidencyState.LOADING,
    "loaded": ResidencyState.RESIDENT,
    "sleeping": ResidencyState.SLEEPING,
    "downloading": ResidencyState.DOWNLOADING,
}
RESIDENT_MOST: Final = 64


class Child:
    """One model's process as long as the model is in memory; ``props`` are read once."""

    def __init__(self, native_id: str, state: ResidencyState) -> None:
        self.native_id = native_id
        self.state = state
        self.progress: float | None = None
        self.process = LlamaProcess()
        self.props: Any = None
        self.kv: float | None = None

    @property
    def query(self) -> str:
        return f"?model={quote(self.native_id, safe='')}&autoload=false"

    def report(self) -> ObservedModel:
        return ObservedModel(
            native_id=self.native_id,
            state=self.state,
            ctx=shape.whole(self.props, "default_generation_settings", "n_ctx") or None,
            slots=shape.whole(self.props, "total_slots"),
            running=self.process.running,
            waiting=self.process.waiting,
            kv_used=self.kv,
            progress=self.progress if self.state is ResidencyState.LOADING else None,
        )


class LlamaRouter:
    """Adapter for a ``llama-server`` in router mode."""

    def __init__(self, client: EngineClient, identity: Identity, manifest: Manifest) -> None:
        self._client = client
        self._children: dict[str, Child] = {}
        self._known: dict[str, OwnedModel] = {}
        self._subscribed = False
        self._events = 0
        self._more = 0
        self._files = WeightFiles(on_this_host=not manifest.remote_host)

    @property
    def instance(self) -> str | None:
        return None

    @property
    def restarts(self) -> int:
        return 0

    @property
    def more_models(self) -> int:
        return self._more

    async def inventory(self) -> tuple[OwnedModel, ...]:
        items = await self._list(SLOW_S)
        told = [_filled(model := self._owned(item), self._known.get(model.native_id)) for item in items]
        files = {
            shape.text(item, "id") or "": weight_file(shape.texts(item, "status", "args")) for item in items
        }
        owned = tuple(await self._files.add_facts(told, files))
        self._known = {model.native_id: model for model in owned}
        return owned

    async def observe(self, now_ms: int, period_ms: int) -> Observation:
        if self._subscribed:
            (await self._client.get("/health", cap=limits.ENGINE_HEALTH_BODY)).require()
        else:
            await self._list(FAST_S)
        done = Moved()
        for child in list(self._children.values()):
            if child.state is ResidencyState.RESIDENT:
                done += await self._look(child, now_ms, period_ms)
        return self._observation(done)

    async def changes(self) -> AsyncGenerator[Observation, None]:
        """Every change of residency as it happens, after a fresh list once the stream is open."""
        try:
            async with aclosing(self._client.events("/models/sse")) as events:
                async for event in events:
                    if not event:
                        await self._list(SLOW_S)
                        self._subscribed = True
                    elif not self._apply(event):
                        continue
                    yield self._observation(Moved())
        finally:
            self._subscribed = False

    async def _list(self, timeout_s: float) -> list[dict[str, Any]]:
        """Read the list and fold the states in it, unless an event overtook the answer."""
        events = self._events
        listed = await self._client.get_listing("/models", "data", timeout_s=timeout_s)
        self._more = listed.more
        present = {native: item for item in listed.items if (native := shape.text(item, "id")) is not None}
        if events == self._events:
            for native, item in present.items():
                failed = shape.truth(item, "status", "failed") or False
                value = shape.text(item, "status", "value") or ""
                self._set(native, ResidencyState.FAILED if failed else STATES.get(value))
            for native in set(self._children) - set(present):
                del self._children[native]
        return list(present.values())

    def _apply(self, event: bytes) -> bool:
        """Fold one pushed event; True if it changed anything."""
        try:
            told = msgspec.json.decode(event)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
        native, value = shape.text(told, "model"), shape.text(told, "data", "status")
        if native is None or value is None:
            return False
        self._events += 1
        failed = value == "unloaded" and bool(shape.whole(told, "data", "exit_code"))
        before = self._children.get(native)
        was = (before.state, before.progress) if before is not None else None
        self._set(native, ResidencyState.FAILED if failed else STATES.get(value))
        child = self._children.get(native)
        if child is not None:
            child.progress = shape.number(told, "data", "progress", "value")
        return was != ((child.state, child.progress) if child is not None else None)

    def _set(self, native: str, state: ResidencyState | None) -> None:
        """Note a model's state; a load, even a second one, begins with a fresh child."""
        child = self._children.get(native)
        if state is None:
            self._children.pop(native, None)
        elif child is None or (state is ResidencyState.LOADING and child.state is not state):
            if len(self._children) < RESIDENT_MOST:
                self._children[native] = Child(native, state)
        else:
            child.state = state
            if state is not ResidencyState.RESIDENT:
                child.process.idle()
                child.kv = None

    async def _look(self, child: Child, now_ms: int, period_ms: int) -> Moved:
        """Metrics of one loaded model. It may go before it is asked, or be busy: then its load is unknown, and
        the router, which answered just now, is none the worse."""
        try:
            if child.props is None:
                child.props = await self._client.get_json("/props" + child.query)
            if not shape.truth(child.props, "endpoint_metrics"):
                return Moved()
            done = await child.process.look(self._client, child.query, now_ms, period_ms)
            child.kv = await kv_used(self._client, child.query, child.props, child.process.running)
        except (EngineMisspoke, EngineUnreachable) as error:
            if error.reason in ("auth", "connect", "guard"):
                raise
            child.process.idle()
            return Moved()
        return done

    def _observation(self, done: Moved) -> Observation:
        children = tuple(self._children.values())
        warm = tuple(child.process for child in children if child.state is ResidencyState.RESIDENT)
        return Observation(resident=tuple(child.report() for child in children), load=engine_load(warm, done))

    def _owned(self, item: dict[str, Any]) -> OwnedModel:
        child = self._children.get(shape.text(item, "id") or "")
        model = owned_model(item, child.props if child is not None else None)
        arguments = shape.texts(item, "status", "args")
        ctx, parallel = _argument(arguments, "--ctx-size", "-c"), _argument(arguments, "--parallel", "-np")
        shared = "--kv-unified" in arguments or "-kvu" in arguments
        per_request = ctx if shared else ctx // parallel if ctx and parallel else None
        embeds = "--embedding" in arguments or "--embeddings" in arguments
        known = Capability.EMBEDDINGS if arguments else Capability(0)
        embedding = Caps(known=known, has=known if embeds else Capability(0))
        return replace(
            model,
            ctx_served=model.ctx_served or per_request or None,
            parallel=model.parallel or parallel or None,
            caps=model.caps.overruled_by(embedding),
        )


def _filled(model: OwnedModel, before: OwnedModel | None) -> OwnedModel:
    """``model`` with what an earlier load of it told: the list of unloaded models is silent on the weights."""
    if before is None:
        return model
    return replace(
        model,
        size_bytes=model.size_bytes or before.size_bytes,
        params_b=model.params_b or before.params_b,
        ctx_max=model.ctx_max or before.ctx_max,
        ctx_served=model.ctx_served or before.ctx_served,
        quant=model.quant or before.quant,
        caps=before.caps.overruled_by(model.caps),
    )


def _argument(arguments: tuple[str, ...], *names: str) -> int | None:
    """The positive number after one of ``names``; llama-server takes 0 and -1 for "automatic"."""
    for name, value in pairwise(arguments):
        if name in names and value.isascii() and value.isdigit() and int(value) > 0:
            return int(value)
    return None
