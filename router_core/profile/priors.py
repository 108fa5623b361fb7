"""What to expect of an engine nobody has tried: speeds from memory bandwidth, load times from disk speed.

Token generation streams the active weights once per token, so its ceiling is bandwidth / active bytes (the roofline
argument of Pope et al., "Efficiently Scaling Transformer Inference", 2022); a share of it is what engines reach.
"""

import statistics
from collections.abc import Iterable

from msgspec import Struct

from router_core.policy.profile import ProfilePolicy
from router_core.profile.bits import nominal_bits
from router_core.record.state import EngineFacts, EngineFlag, ModelFacts, Static

_MIB = 2**20
_ELSEWHERE = int(EngineFlag.CLOUD | EngineFlag.REMOTE_HOST)


class Prior(Struct, frozen=True, gc=False, kw_only=True):
    """Expected speeds (tokens/s) and load time (s) of one row before anything was learned."""

    prompt: float
    gen: float
    load_s: float


def prior_of(static: Static, engine: EngineFacts, model: ModelFacts, policy: ProfilePolicy) -> Prior:
    """The prior for ``model`` on ``engine``: bandwidth over active bytes, and size over disk speed."""
    size = weight_bytes(model)
    total = size if size is not None else policy.unknown_model_bytes
    share = 1.0
    if model.active_m and model.params_m:
        share = min(1.0, model.active_m / model.params_m)
    gen = policy.bandwidth_share * _bandwidth(static, engine, policy) / max(1.0, total * share)
    gen = min(gen, policy.gen_most)
    return Prior(
        prompt=min(policy.prompt_over_gen * gen, policy.prompt_most),
        gen=gen,
        load_s=max(policy.load_least_s, total / policy.load_bytes_per_s),
    )


def weight_bytes(model: ModelFacts) -> float | None:
    """Size of the weights: as reported, else from parameters and quantisation, else None."""
    if model.size_mib is not None:
        return float(model.size_mib * _MIB)
    bits = nominal_bits(model.quant)
    if model.params_m is None or bits is None:
        return None
    return model.params_m * 1e6 * bits / 8.0


def calibration(ratios: Iterable[float], policy: ProfilePolicy, *, alike: bool = False) -> float | None:
    """Median of measured / prior, clamped; None without any measurement. Rows ``alike``, of one model, tell more of each
    other than of anything else: an engine that tells no size of its models may be many times as fast as expected."""
    known = list(ratios)
    if not known:
        return None
    most = policy.calibration_alike_most if alike else policy.calibration_most
    return min(most, max(policy.calibration_least, statistics.median(known)))


def _bandwidth(static: Static, engine: EngineFacts, policy: ProfilePolicy) -> float:
    """Bytes/s of the slowest GPU used; one that is told without any bandwidth, or is on another host, is as good as
    unknown."""
    if engine.flags & _ELSEWHERE:
        return policy.gpu_bytes_per_s
    used = [static.gpus[i] for i in engine.gpus if i < len(static.gpus)]
    if not used:
        return policy.cpu_bytes_per_s
    return min(gpu.mem_bw_gbs * 1e9 if gpu.mem_bw_gbs else policy.gpu_bytes_per_s for gpu in used)
