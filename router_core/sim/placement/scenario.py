"""A placement scenario as a file says it: hosts, models, load, wire, faults. Parsed strictly: an unknown key is refused,
and so is what could not be played.

Refuses to read files; a file's table comes in parsed.
"""

from collections import Counter
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from router_core.errors import LocalMisuse
from router_core.sim.placement.arrivals import zipf
from router_core.sim.placement.engine import GIB, EngineSpec, ModelSpec
from router_core.sim.placement.fleet_node import NodeSpec
from router_core.sim.placement.fleet_world import WireSpec

REFERENCE_GIB = 4.58
"""Size of the 8B Q4_K_M model that the speeds of hosts are told for."""

Name = Annotated[str, Meta(pattern=r"\A[a-z0-9][a-z0-9._:-]{0,47}\Z")]
Above0 = Annotated[float, Meta(gt=0.0, le=1e6)]
NotBelow0 = Annotated[float, Meta(ge=0.0, le=1e6)]
Count = Annotated[int, Meta(ge=0, le=1_000_000)]
Many = Annotated[int, Meta(ge=1, le=1_000_000)]
Rho = Annotated[float, Meta(ge=0.0, le=10.0)]


class ModelLine(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``size_gib`` in memory; speeds fall in proportion to ``active_gib``, the part that one token reads."""

    name: Name
    size_gib: Above0 = REFERENCE_GIB
    active_gib: Above0 | None = None


class NodeLine(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A host: speeds in tokens/s on the reference model, ``gpu`` names a row of published measurements that replaces
    them where these are at hand."""

    name: Name
    pp: Above0
    tg: Above0
    slots: Annotated[int, Meta(ge=1, le=1_024)]
    gpu: str | None = None
    memory_gib: Above0 = 24.0
    load_gib_s: Above0 = 1.19
    max_queue: Count | None = None


class LoadLine(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``rhos``: shares of the fleet's capacity with every model warm; ``lengths`` a trace or a built-in. ``routers`` are
    weights of where clients are (all equal if empty).

    ``at_once`` requests of ``prompt`` and ``output`` tokens come in one moment instead, at the first host, after
    ``before`` equal ones that came one by one every ``every_s``.
    """

    arrivals: Literal["poisson", "replay", "mixed", "at_once"] = "poisson"
    lengths: str = "azure_conv"
    rhos: Annotated[tuple[Rho, ...], Meta(min_length=1)] = (0.7,)
    requests: Many = 3_000
    routers: tuple[NotBelow0, ...] = ()
    prompt: Count = 0
    output: Count = 0
    before: Count = 0
    every_s: NotBelow0 = 0.0


class Scenario(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything but the policy and the seed. ``beta`` slows a batch down and ``depth_slope`` a long context, unless
    ``batching`` names a model whose measured slow-downs are at hand; ``cache_blocks``, ``shared_prompt`` and
    ``chunk_tokens`` are those of every engine. ``warmup`` is the
    share of requests that is played but not measured, ``frozen`` names hosts whose engine accepts requests and stays
    silent from the first measured one on, ``liars`` those that claim to be ``boast`` times as fast as they are. Speeds are
    measured wrong by ``misread``, too high on the first host, too low on the next, and so on. ``untold``: no engine
    tells how many tokens a prompt or an answer had, so that nobody learns how long they are."""

    name: Name
    note: str = ""
    policies: Annotated[tuple[str, ...], Meta(min_length=1)] = ("balanced", "pair-1.0", "oracle")
    beta: Annotated[float, Meta(ge=0.0, le=10.0)] = 0.1
    batching: str | None = None
    cache_blocks: Count = 0
    shared_prompt: bool = True
    depth_slope: Annotated[float, Meta(ge=0.0, le=10.0)] = 0.0
    chunk_tokens: Count = 0
    warmup: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.1
    zipf_s: Annotated[float, Meta(ge=0.0, le=10.0)] = 1.0
    wire: WireSpec = WireSpec()
    load: LoadLine = LoadLine()
    model: Annotated[tuple[ModelLine, ...], Meta(min_length=1)] = (ModelLine(name="chat"),)
    node: Annotated[tuple[NodeLine, ...], Meta(min_length=1)]
    frozen: tuple[str, ...] = ()
    liars: tuple[str, ...] = ()
    boast: Above0 = 10.0
    misread: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.0
    untold: bool = False

    @property
    def shares(self) -> dict[str, float]:
        """How often each model is asked for: Zipf by the order of the file, an assumption."""
        return zipf([model.name for model in self.model], self.zipf_s)

    def specs(self, measured: "Measured") -> list[NodeSpec]:
        """The hosts; each starts with other models in memory."""
        return [self._spec(index, line, measured) for index, line in enumerate(self.node)]

    def _spec(self, index: int, line: NodeLine, measured: "Measured") -> NodeSpec:
        pp, tg = measured.speeds.get(line.gpu or "", (line.pp, line.tg))
        models = tuple(
            ModelSpec(
                name=model.name,
                size_bytes=round(model.size_gib * GIB),
                pp=pp * REFERENCE_GIB / (model.active_gib or model.size_gib),
                tg=tg * REFERENCE_GIB / (model.active_gib or model.size_gib),
            )
            for model in self.model
        )
        memory_bytes = round(line.memory_gib * GIB)
        fitting = tuple(model for model in models if model.need_bytes <= memory_bytes)
        if not fitting:
            raise LocalMisuse(f"no model of {self.name} fits on {line.name} ({line.memory_gib} GiB)")
        warm, left = [], memory_bytes
        for turn in range(len(fitting)):
            model = fitting[(index + turn) % len(fitting)]
            if model.need_bytes <= left:
                warm.append(model.name)
                left -= model.need_bytes
        return NodeSpec(
            name=line.name,
            engine=EngineSpec(
                slots=line.slots,
                models=fitting,
                memory_bytes=memory_bytes,
                beta=measured.slowdowns.get(self.batching or "", self.beta),
                load_bytes_per_s=line.load_gib_s * GIB,
                cache_blocks=self.cache_blocks,
                shared_prompt=self.shared_prompt,
                depth_slope=measured.depth_slopes.get(self.batching or "", self.depth_slope),
                chunk_tokens=self.chunk_tokens,
            ),
            max_queue=line.max_queue if line.max_queue is not None else 2 * line.slots,
            warm=tuple(warm),
            boast=self.boast if line.name in self.liars else 1.0,
            misread=1.0 + (self.misread if index % 2 == 0 else -self.misread),
            untold=self.untold,
        )


class Measured(Struct, frozen=True, kw_only=True):
    """Published measurements: (prompt, generation) tokens/s by GPU, slow-down per further sequence and per 1,024 tokens
    of context by model."""

    speeds: dict[str, tuple[float, float]] = {}
    slowdowns: dict[str, float] = {}
    depth_slopes: dict[str, float] = {}


def parse_scenario(table: dict[str, Any]) -> Scenario:
    """A scenario from the table of its file. Raises LocalMisuse with the place and the reason of the first fault."""
    try:
        scenario = msgspec.convert(table, Scenario)
    except msgspec.ValidationError as error:
        raise LocalMisuse(f"scenario: {error}") from error
    fault = _fault(scenario)
    if fault is not None:
        raise LocalMisuse(f"scenario {scenario.name} {fault}")
    return scenario


def _fault(scenario: Scenario) -> str | None:
    """What does not go together."""
    load, names = scenario.load, [line.name for line in scenario.node]
    for what, said in (("node", names), ("model", [model.name for model in scenario.model])):
        name, times = Counter(said).most_common(1)[0]
        if times > 1:
            return f"has {times} of the {what} {name!r}"
    for what, told in (("freezes", scenario.frozen), ("lets lie", scenario.liars)):
        for name in told:
            if name not in names:
                return f"{what} {name!r}, which is no node of it"
    if load.routers and (len(load.routers) != len(names) or not any(load.routers)):
        return (
            f"has load.routers {list(load.routers)}, takes a weight for each of {len(names)} nodes, not all 0"
        )
    if load.arrivals == "at_once":
        return None if load.prompt and load.output else "lets requests come at once without prompt or output"
    return None if all(load.rhos) else "has a load of 0, which never asks anything"
