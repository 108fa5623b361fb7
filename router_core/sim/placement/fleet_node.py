"""One simulated host: an engine, the work in it as its daemon books it, and what it says of itself.

Statements have the shape of real records, so that everything downstream is the code that ships. Calm but for what
requests do to it: no pressure besides. Refuses to know who hears it.
"""

from hashlib import sha256
from math import log

from msgspec import Struct
from msgspec.structs import replace

from router_core.ids import Id32, NodeName
from router_core.placement.local import LocalWork
from router_core.profile.estimate import claim_of
from router_core.profile.learn import Profile
from router_core.profile.outcome import ProfileKey
from router_core.profile.profiles import Profiles
from router_core.profile.series import Series
from router_core.record.membership import Member
from router_core.record.state import (
    Dialect,
    Dispatch,
    EngineFacts,
    EngineLoad,
    EngineState,
    GpuFacts,
    GpuLoad,
    GpuState,
    HostFacts,
    HostLoad,
    Level,
    LoadPolicy,
    ModelFacts,
    ModelState,
    ProfileFacts,
    ResidentModel,
    ResourceCode,
    ResourceLevel,
    Role,
    Static,
    Volatile,
)
from router_core.sim.placement.engine import Engine, EngineSpec

ENDPOINT = "engine"
CTX = 131_072
_MIB = 2**20
_CALM = tuple(
    ResourceLevel(code=code, level=Level.NONE, score_c=0)
    for code in (ResourceCode.CPU, ResourceCode.MEMORY, ResourceCode.GPU_TIME, ResourceCode.VRAM)
)
_KNOWN_N = 20


class NodeSpec(Struct, frozen=True, gc=False, kw_only=True):
    """A host of a scenario. ``warm`` are the models in memory at the start, ``max_queue`` what it lets wait; it claims to
    be ``boast`` times as fast as it is, and all who measure it take it for ``misread`` times as fast. ``untold``: its engine
    tells no numbers of tokens."""

    name: str
    engine: EngineSpec
    max_queue: int
    warm: tuple[str, ...] = ()
    boast: float = 1.0
    misread: float = 1.0
    untold: bool = False


class SimNode:
    """The host. ``local`` books its work."""

    def __init__(self, spec: NodeSpec, engine: Engine, salt: str) -> None:
        self.spec = spec
        self.engine = engine
        self.local = LocalWork()
        id32 = Id32(sha256(f"{salt}/{spec.name}".encode()).digest())
        self.member = Member(
            id32=id32,
            der=spec.name.encode(),
            roles=int(Role.NODE | Role.ROUTER),
            admission=1,
            name=NodeName(spec.name),
        )
        self.key = f"{self.member.node_id}/{ENDPOINT}"
        self.seq = 0

    def static(self, profiles: Profiles, now: int) -> Static:
        """S, with what the host's own router learned of its engine."""
        spec = self.spec.engine
        fastest = max(spec.models, key=lambda model: model.tg * model.size_bytes)
        bandwidth = round(fastest.tg * fastest.size_bytes / 0.6 / 1e9)
        return Static(
            host=HostFacts(cpus=8, ram_total_mib=65_536),
            gpus=(
                GpuFacts(
                    uuid8=self.member.id32[:8],
                    name="simulated",
                    vram_total_mib=spec.memory_bytes // _MIB,
                    mem_bw_gbs=min(0xFFFF, max(1, bandwidth)),
                ),
            ),
            engines=(
                EngineFacts(
                    name=ENDPOINT,
                    kind="llamacpp",
                    dialects=int(Dialect.CHAT),
                    slots=spec.slots,
                    max_queue=self.spec.max_queue,
                    gpus=(0,),
                    load_policy=LoadPolicy.ON_DEMAND,
                ),
            ),
            models=tuple(
                ModelFacts(
                    name=model.name,
                    engine=0,
                    size_mib=model.size_bytes // _MIB,
                    ctx_served=CTX,
                    ctx_max=CTX,
                    parallel=spec.slots,
                )
                for model in spec.models
            ),
            models_total=len(spec.models),
            profiles=tuple(self._claims(profiles, now)),
        )

    def volatile(self, disp: Dispatch, now: int) -> Volatile:
        """V as of now; ``disp`` is what the host's router sends out."""
        engine, spec = self.engine, self.spec.engine
        busy = self.local.in_flight(ENDPOINT)
        return Volatile(
            level=Level.NONE,
            host=HostLoad(ram_available_mib=32_768, cpu_external_pct=0),
            gpus=(
                GpuLoad(
                    util_pct=100 if engine.running else 0,
                    vram_free_mib=max(0, spec.memory_bytes - engine.used_bytes) // _MIB,
                    score_c=0,
                    level=Level.NONE,
                    state=GpuState.OK,
                ),
            ),
            resources=_CALM,
            engines=(
                EngineLoad(
                    state=EngineState.READY,
                    running=min(busy, spec.slots),
                    queued=max(0, busy - spec.slots),
                    slots=spec.slots,
                    ours=busy,
                    work_ds=round(10.0 * self.local.work_s(ENDPOINT, spec.slots, now)),
                    obtainable_mib=engine.obtainable_bytes // _MIB,
                ),
            ),
            residents=self._residents(now),
            seen=self.local.seen(now),
            disp=disp,
        )

    def profile_key(self, model: str) -> ProfileKey:
        """Under which key routers learn about ``model`` here."""
        slots = self.spec.engine.slots
        return ProfileKey(node=self.member.id16, endpoint=ENDPOINT, model=model, ctx=CTX, parallel=slots)

    def known_profiles(self) -> list[tuple[ProfileKey, Profile]]:
        """What the host's router knows of its own engine from earlier lives: speeds and load times, 20 samples."""
        return [
            (
                self.profile_key(model.name),
                Profile(
                    prompt=Series(n=_KNOWN_N, mean=log(self.spec.misread * model.pp), var=0.01),
                    gen=Series(n=_KNOWN_N, mean=log(self.spec.misread * model.tg), var=0.01),
                    beta=self.spec.engine.beta,
                    beta_n=_KNOWN_N,
                    loads_s=(model.size_bytes / self.spec.engine.load_bytes_per_s,),
                ),
            )
            for model in self.spec.engine.models
        ]

    def _claims(self, profiles: Profiles, now: int) -> list[ProfileFacts]:
        slots, found = self.spec.engine.slots, []
        for position, model in enumerate(self.spec.engine.models):
            profile = profiles.find(self.profile_key(model.name))
            if profile is not None:
                found.append(_boasted(claim_of(profile, position, 0, CTX, slots, now), self.spec.boast))
        return found

    def _residents(self, now: int) -> tuple[ResidentModel, ...]:
        engine = self.engine
        running = [job.model for job in engine.running]
        waiting = [job.model for job in engine.queue]
        found = []
        for position, model in enumerate(self.spec.engine.models):
            name = model.name
            if name == engine.loading:
                left_ds = max(0, engine.load_ends_ms - now) // 100
                state, idle_s = ModelState.LOADING, 0
            elif name in engine.resident:
                left_ds, state = None, ModelState.RESIDENT
                idle_s = 0 if name in running else min(0xFFFF, (now - engine.resident[name]) // 1000)
            else:
                continue
            found.append(
                ResidentModel(
                    model=position,
                    engine=0,
                    state=state,
                    running=running.count(name),
                    waiting=waiting.count(name),
                    load_left_ds=left_ds,
                    idle_s=idle_s,
                    mem_mib=model.need_bytes // _MIB,
                    ctx=CTX,
                )
            )
        return tuple(found)


def _boasted(claim: ProfileFacts, times: float) -> ProfileFacts:
    """``claim`` with all speeds ``times`` as high."""
    if times == 1.0:
        return claim
    prompt, gen, load = claim.prompt_dtps, claim.gen_dtps, claim.load_p75_ds
    return replace(
        claim,
        prompt_dtps=round(times * prompt) if prompt is not None else None,
        gen_dtps=round(times * gen) if gen is not None else None,
        load_p75_ds=round(load / times) if load is not None else None,
    )
