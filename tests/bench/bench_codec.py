"""What a record weighs and costs: ``python -m tests.bench.bench_codec [--json]``.

Sizes are of a whole RECS item, R = item frame + header + V body + signature, for (GPUs, resident models); times are
medians of batches on the machine at hand. ``baseline`` is the limit the mesh is designed for, except for JSON,
which is measured in the same run.
"""

import json
import statistics
import time
from collections.abc import Callable
from typing import Final

import msgspec

from agent.identity.keys import Ed25519Verifier, NodeKey
from router_core.errors import RemoteFault
from router_core.ids import id16_of, id32_of_key
from router_core.record import state
from router_core.record.codec import decode_volatile, encode, encode_static, encode_volatile
from router_core.record.envelope import Header, Sealed, read_header, seal, sref_of
from router_core.record.fit import fit_static, fit_volatile
from router_core.record.stamp import Stamp, StampVerdict, judge
from router_core.record.state import Kind
from tests.bench.report import Figure, against, emit, wants_json
from tests.support.sealing import unseal

SHAPES: Final = {(0, 0): 230, (1, 1): 310, (2, 3): 380, (8, 12): 680}
"""(GPUs, resident models) -> most bytes of a RECS item."""
S_MOST: Final = 1_500
BATCHES: Final = 60
MESH8: Final = bytes(8)


def volatile(gpus: int, residents: int) -> state.Volatile:
    """A busy node as it would describe itself."""
    resources = ((0, 1, 34), (1, 0, 12), (2, 0, 0), (3, 0, 4)) + (((4, 1, 41), (5, 0, 22)) if gpus else ())
    return fit_volatile(
        state.Volatile(
            flags=0,
            level=1,
            host=state.HostLoad(ram_available_mib=41_322, cpu_external_pct=12, age_ds=3),
            gpus=(
                state.GpuLoad(
                    util_pct=71,
                    external_util_pct=4,
                    vram_free_mib=11_904,
                    score_c=35,
                    level=1,
                    age_ds=2,
                    state=0,
                    source=3,
                ),
            )
            * gpus,
            resources=tuple(
                state.ResourceLevel(code=code, level=level, score_c=score, age_ds=3)
                for code, level, score in resources
            ),
            engines=(
                state.EngineLoad(
                    state=3,
                    running=2,
                    queued=1,
                    slots=4,
                    ours=2,
                    work_ds=318,
                    kv_c=44,
                    age_ds=4,
                    obtainable_mib=14_000,
                ),
            )
            * (1 if residents else 0),
            residents=tuple(
                state.ResidentModel(
                    model=index,
                    engine=0,
                    state=2,
                    running=1,
                    waiting=0,
                    idle_s=12,
                    mem_mib=8_192,
                    vram_share_pct=100,
                    ctx=16_384,
                )
                for index in range(residents)
            ),
            seen=(state.SeenRouter(router=b"router-8", inst=0x1234_5678, seq=1_204, accepted=1_199),),
            disp=state.Dispatch(total=8_021, rps_c=140, work_c=930),
        )
    )


def static() -> state.Static:
    """2 GPUs, 1 engine, 3 models, 6 profiles."""
    return fit_static(
        state.Static(
            addrs=(state.Address(ip=bytes([192, 168, 1, 20]), mesh_port=7_433, ingress_port=7_434),) * 2,
            software=state.Software(version="0.1.0"),
            platform=state.Platform(os=1, arch=1, profile=1, router=1),
            host=state.HostFacts(cpus=32, ram_total_mib=64_211),
            gpus=(
                state.GpuFacts(
                    uuid8=b"uuid-of8",
                    name="NVIDIA GeForce RTX 4090",
                    vram_total_mib=24_564,
                    vendor=1,
                    cc10=89,
                    mem_bw_gbs=1_008,
                ),
            )
            * 2,
            engines=(
                state.EngineFacts(
                    name="ollama",
                    kind="ollama",
                    version="0.12.3",
                    dialects=127,
                    cap_known=1_023,
                    cap_has=39,
                    slots=4,
                    max_queue=16,
                    gpus=(0, 1),
                    load_policy=1,
                ),
            ),
            models=tuple(
                state.ModelFacts(
                    name=f"qwen3-coder-{index}:30b-a3b-q4_K_M",
                    engine=0,
                    digest=bytes(32),
                    base8=b"base-of8",
                    family="qwen3moe",
                    params_m=30_532,
                    active_m=3_300,
                    quant="Q4_K_M",
                    size_mib=17_800,
                    ctx_max=262_144,
                    ctx_served=16_384,
                    parallel=4,
                    kv_bytes_per_token=98_304,
                    offload_pct=100,
                    cap_known=1_023,
                    cap_has=3,
                )
                for index in range(3)
            ),
            models_total=3,
            profiles=tuple(
                state.ProfileFacts(
                    model=index % 3,
                    engine=0,
                    ctx=16_384,
                    parallel=4,
                    offload_pct=100,
                    n=212,
                    prompt_dtps=21_044,
                    gen_dtps=1_112,
                    beta_m=870,
                    prompt_sd_c=22,
                    gen_sd_c=9,
                    load_p75_ds=64,
                    vram_mib=18_100,
                    ram_mib=900,
                    success_c=99,
                    idle_h=index,
                )
                for index in range(6)
            ),
        )
    )


def header(key: NodeKey, kind: Kind, body: bytes) -> Header:
    """A header whose numbers have the lengths they have after days of running."""
    volatile_kind = kind is Kind.V
    return Header(
        kind=kind,
        mesh8=MESH8,
        id16=id16_of(id32_of_key(key.key32)),
        epoch=41,
        inst=0x1234_5678,
        seq=86_400,
        mono_ms=260_000_000,
        due_ms=2_000 if volatile_kind else 0,
        sref=sref_of(3, b"") if volatile_kind else None,
        body=body,
    )


def item_bytes(sealed: Sealed) -> int:
    """Bytes of ``[age_ms, signed, sig]`` in a RECS message."""
    return len(encode([250, sealed.signed, sealed.sig]))


def median_us(call: Callable[[], object], batch: int) -> tuple[float, float, float]:
    """(median, least, most) microseconds a call, over ``BATCHES`` batches."""
    call()
    times = []
    for _ in range(BATCHES):
        start = time.perf_counter_ns()
        for _ in range(batch):
            call()
        times.append((time.perf_counter_ns() - start) / batch / 1_000)
    return statistics.median(times), min(times), max(times)


def measure() -> list[Figure]:
    key, verifier = NodeKey.from_seed(bytes(32)), Ed25519Verifier()
    figures = []
    for (gpus, residents), most in SHAPES.items():
        sealed = seal(header(key, Kind.V, encode_volatile(volatile(gpus, residents))), key)
        figures.append(against(f"codec.v_bytes.g{gpus}m{residents}", item_bytes(sealed), "B", most))
    signed_s = seal(header(key, Kind.S, encode_static(static())), key)
    figures.append(against("codec.s_bytes.g2m3p6", item_bytes(signed_s), "B", S_MOST))

    body = volatile(2, 3)
    data = encode_volatile(body)
    head = header(key, Kind.V, data)
    sealed = seal(head, key)
    held = Stamp(head.epoch, head.seq)

    def drop_duplicate() -> None:
        found = read_header(sealed.signed, MESH8)
        verdict = judge(
            Stamp(found.epoch, found.seq),
            found.inst,
            own=False,
            held=held,
            held_inst=head.inst,
            same_bytes=True,
        )
        if verdict is not StampVerdict.DUPLICATE:
            raise RemoteFault("not_a_duplicate")

    encode_us, _, _ = median_us(lambda: encode_volatile(body), 500)
    decode_us, _, _ = median_us(lambda: decode_volatile(data), 300)
    drop_us, _, _ = median_us(drop_duplicate, 300)
    seal_us, seal_least, seal_most = median_us(lambda: seal(head, key), 30)
    unseal_us, unseal_least, unseal_most = median_us(lambda: unseal(sealed, MESH8, key.key32, verifier), 30)
    plain = msgspec.to_builtins(body, builtin_types=(bytes,))
    text = json.dumps(plain, default=bytes.hex)
    json_encode_us, _, _ = median_us(lambda: json.dumps(plain, default=bytes.hex), 200)
    json_decode_us, _, _ = median_us(lambda: json.loads(text), 200)
    figures += [
        against("codec.encode_v.p50_us", encode_us, "us", 20),
        against("codec.decode_v.p50_us", decode_us, "us", 40),
        against("codec.drop_duplicate.p50_us", drop_us, "us", 25),
        against("codec.seal_v.p50_us", seal_us, "us", 100),
        Figure("codec.seal_v.min_us", seal_least, "us"),
        Figure("codec.seal_v.max_us", seal_most, "us"),
        against("codec.unseal_v.p50_us", unseal_us, "us", 250),
        Figure("codec.unseal_v.min_us", unseal_least, "us"),
        Figure("codec.unseal_v.max_us", unseal_most, "us"),
        against("codec.encode_v.over_json", encode_us, "us", json_encode_us),
        against("codec.decode_v.over_json", decode_us, "us", json_decode_us),
        against("codec.v_body_bytes.over_json", len(data), "B", len(text)),
    ]
    return figures


if __name__ == "__main__":
    emit(measure(), wants_json())
