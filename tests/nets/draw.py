"""Random fleets and requests as plain data in words of our own: what records say of nodes, what a router knows besides,
what is asked of it. Everything comes from the seed alone; nothing here knows the product."""

from hashlib import sha256
from random import Random
from typing import Any, Final

NOW: Final = 1_000_000
OWN: Final = "me"
MODELS: Final = (
    ("tiny", "Q4_K_M", 1_100, "llama", 900),
    ("tiny-q8", "Q8_0", 1_100, "llama", 1_500),
    ("other", "Q4_K_M", 3_000, "qwen", 2_100),
    ("big:70b", "Q4_0", 70_000, "llama", 38_000),
    ("embed-small", None, 110, "bert", 300),
)
ASKED: Final = ("tiny", "tiny", "tiny", "tiny", "tiny:latest", "tiny-q8", "other", "big:70b", "embed-small")
RARELY_ASKED: Final = ("absent", "tinny", "either", "small", "bad\x00name", "big")
HINTS: Final = (
    {"prefer": "@n1,@n2"},
    {"prefer": "@n0/e0"},
    {"prefer": "@nobody"},
    {"require": "!node=@n0"},
    {"require": "node=@n1"},
    {"require": "ctx>=16000,bits>=4"},
    {"require": "label=zone:a"},
    {"require": "engine=llamacpp"},
    {"require": "%%"},
    {"locality": "host"},
    {"locality": "any"},
    {"class": "batch", "slo-tpot-ms": "20"},
    {"class": "background"},
    {"class": "background", "slo-ttft-ms": "200"},
    {"locality": "any", "class": "batch"},
    {"locality": "any", "slo-ttft-ms": "150"},
    {"slo-ttft-ms": "300", "deadline-ms": "4000"},
    {"expect-tokens": "900"},
    {"match": "quant"},
    {"match": "family", "class": "batch"},
    {"match": "any"},
    {"match": "nonsense"},
)


def name_bytes(name: str) -> bytes:
    """32 bytes that stand for ``name``."""
    return sha256(name.encode()).digest()


def rarely(rng: Random, value: Any, usual: Any, one_in: int = 20) -> Any:
    """``value`` one time in ``one_in``, else ``usual``."""
    return value if rng.randrange(one_in) == 0 else usual


def a_fleet(rng: Random) -> dict[str, Any]:
    """A router's whole knowledge: nodes with their records, what it learned, and how endpoints have behaved."""
    count = rng.choice((1, 2, 2, 3, 3, 4, 4, 5, 6, 8, rarely(rng, 70, 3, 8)))
    calm = rng.random() < 0.6
    idle = calm and rng.random() < 0.4
    names = [OWN, *[f"n{number}" for number in range(count)]]
    if rng.random() < 0.3:
        names.remove(OWN)
    nodes = [a_node(rng, name, calm, idle) for name in names]
    endpoints = [(node["name"], engine["name"]) for node in nodes for engine in node["static"]["engines"]]
    offers = [
        (node["name"], node["static"]["engines"][model["engine"]]["name"], model["name"])
        for node in nodes
        for model in node["static"]["models"]
    ]
    return {
        "nodes": nodes,
        "outcomes": [an_outcome(rng, rng.choice(offers)) for _ in range(rng.choice((0, 0, 4, 12)))],
        "faults": [
            {"at": at, "ms": NOW - rng.choice((200, 2_000, 6_000, 90_000)), "trial": rng.random() < 0.3}
            for at in endpoints
            if not calm and rng.random() < 0.08
        ],
        "late": [at for at in endpoints if not calm and rng.random() < 0.08],
        "suspects": [at for at in endpoints if not calm and rng.random() < 0.05],
        "full": [at for at in endpoints if not calm and rng.random() < 0.05],
        "spilling": [each for each in ("interactive", "batch", "background") if rng.random() < 0.2],
        "leaving": [offer[1:] for offer in offers if offer[0] == OWN and rng.random() < 0.1],
        "has_room": rng.random() < 0.6,
        "started_ms": rng.choice((None, NOW - 2_000, NOW - 60_000)),
        "silent": rng.choice((0, 0, 0, 1)),
        "unreachable": [node["name"] for node in nodes if not calm and rng.random() < 0.03],
        "foreign": [
            {"endpoint": engine, "seconds": 4 * rng.random(), "model": model}
            for name, engine, model in offers
            if name == OWN and rng.random() < 0.3
        ],
    }


def a_node(rng: Random, name: str, calm: bool, idle: bool) -> dict[str, Any]:
    """One node: how alive it is, and its records."""
    odd = 10 if calm else 1
    gpus = rng.choice((0, 1, 1, 1, 2))
    engines = [an_engine(rng, number, gpus, odd) for number in range(rng.choice((1, 1, 1, 2)))]
    models = [
        a_model(rng, number % len(engines), engines[number % len(engines)], odd)
        for number in range(rng.choice((1, 2, 3, 4)))
    ]
    unique = {(model["name"], model["engine"]): model for model in models}
    models = list(unique.values())
    return {
        "name": name,
        "liveness": "fresh"
        if name == OWN
        else rarely(rng, rng.choice(("late", "suspect", "unconfirmed")), "fresh", 8 * odd),
        "confirmed": rng.random() < 0.95,
        "quarantined": rarely(rng, True, False, 60 * odd),
        "roles": rarely(rng, 2, 3, 40),
        "age_ms": rarely(rng, rng.randint(0, 30_000), rng.randint(-50, 1_500), 4 * odd),
        "period_ms": rng.choice((1_000, 2_000, rng.randint(200, 10_000))),
        "rtt_ms": rng.choice((None, 1, 3, 80)),
        "static": {
            "host": {"cpus": 8, "ram_total_mib": rng.choice((16_384, 65_536))},
            "gpus": [
                {
                    "uuid8": bytes([number]) * 8,
                    "name": "gpu",
                    "vram_total_mib": rng.choice((8_192, 24_576)),
                    "memory": rarely(rng, 1, 0, 12),
                    "mem_bw_gbs": rng.choice((None, 270, 1_008)),
                }
                for number in range(gpus)
            ],
            "engines": engines,
            "models": models,
            "profiles": [
                a_claim(rng, place, model) for place, model in enumerate(models) if rng.random() < 0.7
            ],
        },
        "volatile": an_idle(a_state(rng, gpus, engines, models, odd))
        if idle
        else a_state(rng, gpus, engines, models, odd),
    }


def an_idle(state: dict[str, Any]) -> dict[str, Any]:
    """``state`` of a node on which nobody works."""
    calm = {"level": 0, "score_c": 5}
    return state | {
        "gpus": [gpu | calm for gpu in state["gpus"]],
        "resources": [each | calm for each in state["resources"]],
        "engines": [
            each | {"state": 3, "running": 0, "queued": 0, "ours": 0, "work_ds": 0, "kv_c": None, "age_ds": 0}
            for each in state["engines"]
        ],
    }


def an_engine(rng: Random, number: int, gpus: int, odd: int) -> dict[str, Any]:
    kind = rng.choice(("llamacpp", "llamacpp", "ollama", "vllm", "openai"))
    return {
        "name": f"e{number}",
        "kind": kind,
        "dialects": rarely(rng, 0b1000, 0b1_1111_1111, 12 * odd),
        "cap_known": rarely(rng, 0b1111, 0, 3),
        "cap_has": rarely(rng, 0b0001, 0b0111, 6),
        "slots": rarely(rng, None, rng.randint(1, 8), 10),
        "max_queue": rng.choice((0, 4, 16)),
        "gpus": tuple(range(gpus)),
        "load_policy": rng.choice((0, 1, 1, 1)),
        "flags": rarely(rng, 1, rarely(rng, 4, rarely(rng, 2, 0, 10), 12), 7),
        "price_in": rng.choice((0, 1_000)),
        "price_out": rng.choice((0, 4_000)),
        "labels": rng.choice(((), (("zone", "a"),))),
    }


def a_model(rng: Random, engine: int, facts: dict[str, Any], odd: int) -> dict[str, Any]:
    name, quant, params_m, family, size_mib = rng.choice((*MODELS, MODELS[0], MODELS[0], MODELS[0]))
    served = name if facts["kind"] != "ollama" or ":" in name else f"{name}:latest"
    digest = rng.choice((None, name_bytes(f"{name}/{quant}")))
    return {
        "name": served,
        "engine": engine,
        "digest": rarely(rng, name_bytes("another"), digest, 12 * odd),
        "base8": rng.choice((None, name_bytes(name.partition("-")[0])[:8])),
        "family": rng.choice((None, family)),
        "params_m": rng.choice((None, params_m)),
        "quant": rng.choice((None, quant)),
        "size_mib": rng.choice((None, size_mib, size_mib, size_mib)),
        "ctx_max": rng.choice((None, 32_768)),
        "ctx_served": rarely(
            rng, rng.randint(1_000, 3_000), rng.choice((8_192, 8_192, 32_768, None)), 8 * odd
        ),
        "parallel": rng.choice((None, 4)),
        "kv_bytes_per_token": rng.choice((None, 131_072)),
        "offload_pct": rng.choice((None, 100, 100, 40)),
        "cap_known": rarely(rng, 0b0111, 0, 4),
        "cap_has": rarely(rng, 0b0001, 0b0111, 6),
        "aliases": rarely(rng, ("nick",), (), 12),
    }


def a_claim(rng: Random, place: int, model: dict[str, Any]) -> dict[str, Any]:
    speed = round(50 * 40 ** rng.random())
    return {
        "model": place,
        "engine": model["engine"],
        "ctx": model["ctx_served"] or 0,
        "parallel": model["parallel"] or 0,
        "offload_pct": model["offload_pct"],
        "n": rng.choice((1, 5, 20)),
        "prompt_dtps": rng.choice((None, 20 * speed, 20 * speed)),
        "gen_dtps": rng.choice((None, speed, speed)),
        "beta_m": rng.choice((None, rng.randint(0, 400))),
        "prompt_sd_c": rng.choice((None, rng.randint(10, 70))),
        "gen_sd_c": rng.choice((None, rng.randint(10, 70))),
        "load_p75_ds": rng.choice((None, rng.randint(5, 300))),
        "vram_mib": rng.choice((None, 4_000)),
        "success_c": rng.choice((100, 95, rng.randint(50, 100))),
        "idle_h": rng.choice((0, 0, 30)),
    }


def a_state(
    rng: Random, gpus: int, engines: list[dict[str, Any]], models: list[dict[str, Any]], odd: int
) -> dict[str, Any]:
    residents = []
    for place, model in enumerate(models):
        state = rng.choice((None, None, 2, 2, 2, 2, rarely(rng, rng.choice((1, 3, 4, 5)), 2, 4 * odd)))
        if state is None:
            continue
        residents.append(
            {
                "model": place,
                "engine": model["engine"],
                "state": state,
                "running": rng.choice((0, 0, 1)),
                "load_left_ds": rng.choice((None, 30)) if state == 1 else None,
                "idle_s": rng.choice((0, 5, 4_000)),
                "mem_mib": rng.choice((None, 3_000)),
                "vram_share_pct": rng.choice((None, 100)),
                "ctx": rng.choice((None, 8_192, 4_096)),
            }
        )
    codes = [0, 1, *((4, 5) if gpus else ()), *rng.choice(((), (3, 6)))]
    return {
        "flags": rarely(rng, 1, rarely(rng, 32, rarely(rng, 8, rarely(rng, 16, 0, 20), 20), 20), 20 * odd),
        "level": 0,
        "host": {
            "ram_available_mib": rng.choice((2_000, 12_000, 60_000)),
            "cpu_external_pct": rng.choice((None, 3)),
        },
        "gpus": [
            {
                "util_pct": rng.choice((None, 0, 60)),
                "external_util_pct": rng.choice((None, 0, 10)),
                "vram_free_mib": rng.choice((None, 500, 6_000, 22_000)),
                "score_c": rng.choice((None, rng.randint(0, 30))),
                "level": rarely(rng, rng.randint(1, 3), 0, 15 * odd),
                "state": rarely(rng, rng.randint(1, 9), 0, 15 * odd),
            }
            for _ in range(gpus)
        ],
        "resources": [
            {
                "code": code,
                "level": rarely(rng, rng.choice((1, 2, 2, 3, None)), 0, 10 * odd),
                "score_c": rarely(rng, rng.choice((None, rng.randint(0, 100))), rng.randint(0, 30), 5),
            }
            for code in codes
            if rng.random() < 0.95
        ],
        "engines": [
            {
                "state": rarely(rng, rng.choice((0, 1, 2, 4, 5)), 3, 10 * odd),
                "running": rarely(rng, None, rng.randint(0, 6), 12),
                "queued": rarely(rng, rng.randint(0, 14), rng.choice((0, 0, 0, None)), 5 * odd),
                "slots": engine["slots"],
                "ours": rng.randint(0, 4),
                "work_ds": rng.randint(0, 400),
                "kv_c": rng.choice((None, rng.randint(0, 100))),
                "age_ds": rng.choice((0, 3, rarely(rng, 50, 1, 4))),
                "obtainable_mib": rng.choice((None, 1_000, 6_000, 20_000)),
            }
            for engine in engines
        ],
        "residents": residents,
        "disp": rng.choice(
            (None, {"total": 50, "rps_c": rng.randint(0, 300), "work_c": rng.randint(0, 900)})
        ),
    }


def an_outcome(rng: Random, offer: tuple[str, str, str]) -> dict[str, Any]:
    """What one earlier request taught about an endpoint and model."""
    tokens = rng.randint(5, 700)
    speed = 5 * 30 ** rng.random()
    return {
        "offer": offer,
        "ago_ms": rng.randint(0, 600_000),
        "result": rarely(rng, rng.choice(("fault", "cancelled", "other")), "ok", 8),
        "request_class": rng.choice(("interactive", "batch", None)),
        "concurrency": rng.choice((1.0, 1.0, 2.0, 5.0)),
        "text_bytes": rng.randint(0, 9_000),
        "prompt_tokens": rng.choice((None, rng.randint(10, 3_000))),
        "cached_tokens": rng.choice((None, 0, 900)),
        "prompt_ms": rng.choice((None, rng.uniform(10, 3_000))),
        "gen_tokens": tokens,
        "gen_ms": rng.choice((None, 1_000.0 * tokens / speed)),
        "ttft_ms": rng.choice((None, rng.uniform(20, 4_000))),
        "wait_ms": rng.choice((0.0, 40.0)),
        "net_ms": 1.0,
        "load_ms": rarely(rng, rng.uniform(500, 20_000), None, 6),
        "total_ms": rng.choice((None, 1_100.0 * tokens / speed)),
    }


def _asked(rng: Random, endpoints: list[tuple[str, str, str]]) -> str:
    if rng.random() < 0.04:
        return rng.choice(RARELY_ASKED)
    if endpoints and rng.random() < 0.8:
        return rng.choice(endpoints)[2]
    return rng.choice(ASKED)


def a_request(rng: Random, number: int, endpoints: list[tuple[str, str, str]]) -> dict[str, Any]:
    """One request. Endpoints are (node, endpoint, model)."""
    again, held = rng.random() < 0.2, rng.random() < 0.1
    some = [offer[:2] for offer in endpoints if rng.random() < 0.15]
    hints = dict(rng.choice(HINTS)) if rng.random() < 0.35 else {}
    if endpoints and rng.random() < 0.1:
        hints |= {"prefer": "@{}/{}".format(*rng.choice(endpoints))}
    asked = _asked(rng, endpoints)
    alike = [offer for offer in endpoints if offer[2] == asked] or endpoints
    if rng.random() < 0.1:
        hints |= rng.choice(HINTS)
    embeds = rng.random() < 0.03
    return {
        "id": f"r{number}-{rng.randrange(10**6)}",
        "model": asked,
        "embeds": embeds,
        "stream": rng.random() < 0.5,
        "text_bytes": rng.choice((40, 400, 4_320, rng.randint(0, 30_000))),
        "body_bytes": rng.randint(0, 10**6),
        "prompt_tokens": rarely(rng, 700, None, 12),
        "sure_tokens": rng.choice((0, 0, 0, 2_000)),
        "token_numbers": rarely(rng, 300, 0, 15),
        "item_bytes": rarely(rng, 900, None, 15) if embeds else None,
        "images": rarely(rng, 2, 0, 15),
        "audio_parts": rarely(rng, 1, 0, 25),
        "output_cap": rng.choice((None, None, 10, 600, 0)),
        "choices": rarely(rng, 3, 1, 15),
        "num_ctx": rng.choice((None, None, None, None, 4_096)),
        "requires": rarely(rng, rng.choice((1, 2, 4)), 0, 8),
        "waited_ms": rarely(rng, 9_000, rng.choice((0, 0, rng.randint(0, 3_000))), 25),
        "caller": rng.choice(("local", "key:k")),
        "hints": hints,
        "pin": None
        if not endpoints or rng.random() < 0.7
        else {
            "offer": rng.choice(alike),
            "tokens": rng.randint(1, 3_000),
            "ago_ms": rng.randint(0, 700_000),
        },
        "attempt": rng.choice((2, 3, 5)) if again else 1,
        "tried": some if again else [],
        "refused": some[:1] if again and rng.random() < 0.5 else [],
        "declined": some[1:] if again and rng.random() < 0.3 else [],
        "spare": again and rng.random() < 0.2,
        "held_ms": rng.randint(1, 90_000) if held else None,
        "advice": None
        if not endpoints or rng.random() < 0.93
        else {
            "mode": rng.choice(("advisory", "authoritative")),
            "outcome": rarely(rng, "timeout", "used", 4),
            "order": [rng.choice(alike)[:2] for _ in range(2)],
            "ms": 12,
        },
    }
