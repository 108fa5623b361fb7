"""Public traces and measurements read from a folder of data files; small built-in shapes where the folder is absent."""

import csv
import gzip
import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from random import Random

from router_core.errors import LocalMisuse
from router_core.sim.placement.arrivals import (
    Client,
    Length,
    bursty_clients,
    chat_lengths,
    code_lengths,
    conversation_lengths,
)
from router_core.sim.placement.scenario import Measured
from router_core.sim.placement.trial import Supply

AZURE = {
    "azure_conv": "AzureLLMInferenceTrace_conv_2023.csv",
    "azure_code": "AzureLLMInferenceTrace_code_2023.csv",
}
MOONCAKE = {
    "mooncake_conversation": "mooncake_conversation_trace.jsonl.gz",
    "mooncake_synthetic": "mooncake_synthetic_trace.jsonl.gz",
}
SERVEGEN_CLASSES = ("m-small", "m-mid", "m-large")
_LONGEST = 16_384
_BUILT_IN_SEED = 7


def built_in() -> Supply:
    """Sizes and clients drawn from smooth shapes, under the names of the traces they stand in for."""
    rng = Random(_BUILT_IN_SEED)
    chat, code = chat_lengths(rng), code_lengths(rng)
    talk = conversation_lengths(rng)
    lengths: dict[str, Sequence[Length]] = {"chat": chat, "code": code, "conversation": talk}
    lengths |= {"azure_conv": chat, "azure_code": code} | dict.fromkeys(MOONCAKE, talk)
    return Supply(lengths=lengths, clients=bursty_clients(rng))


def supply(folder: Path) -> Supply:
    """What ``folder`` holds (``traces`` and ``profiles`` below it), and the built-in shapes under their own names. Raises
    LocalMisuse if a file is missing or is not what its name says."""
    try:
        return _read(folder / "traces", folder / "profiles")
    except OSError as error:
        raise LocalMisuse(f"{error.filename or folder}: {error.strerror or error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise LocalMisuse(f"{folder} holds a file that is not what its name says: {error!r}") from error


def _read(traces: Path, profiles: Path) -> Supply:
    lengths = dict(built_in().lengths)
    lengths |= {name: azure(traces / file) for name, file in AZURE.items()}
    lengths |= {name: mooncake(traces / file) for name, file in MOONCAKE.items()}
    return Supply(
        lengths=lengths,
        clients=servegen(
            traces / "servegen_client_rates_day1.csv.gz", traces / "servegen_token_quantiles_day1.csv"
        ),
        measured=Measured(
            speeds=gpu_speeds(profiles / "llama3_llamabench_2024.csv"),
            slowdowns=batch_slowdowns(profiles / "dgx_spark_batched_2025.csv"),
            depth_slopes=depth_slopes(profiles / "dgx_spark_depth_2025.csv"),
        ),
    )


def azure(path: Path) -> list[Length]:
    """Moments and sizes of an Azure LLM inference trace (Patel et al., Splitwise, 2024)."""
    found, start = [], None
    for row in _rows(path):
        at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()  # only differences count
        start = at if start is None else start
        prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        found.append(Length(prompt=max(1, prompt), output=max(1, output), at_s=at - start))
    return found


def mooncake(path: Path) -> list[Length]:
    """Moments, sizes and prefix blocks of a Mooncake trace (Qin et al., 2025)."""
    found = []
    with gzip.open(path, "rt") as lines:
        for line in lines:
            row = json.loads(line)
            found.append(
                Length(
                    prompt=max(1, row["input_length"]),
                    output=max(1, row["output_length"]),
                    at_s=row["timestamp"] / 1000,
                    blocks=tuple(row["hash_ids"]),
                )
            )
    return found


def servegen(rates: Path, quantiles: Path) -> list[Client]:
    """Clients of the general language classes of a ServeGen day (Xiang et al., 2025) that have both tables, at their
    busiest window. Prompts are cut at 16,384 tokens."""
    tokens: dict[tuple[str, str], dict[str, tuple[float, ...]]] = {}
    for row in _rows(quantiles):
        values = tuple(
            min(float(_LONGEST), float(row[name])) for name in ("p5", "p25", "p50", "p75", "p95", "p99")
        )
        tokens.setdefault((row["model_class"], row["client"]), {})[row["field"]] = values
    busiest: dict[tuple[str, str], dict[str, str]] = {}
    for row in _rows(rates):
        key = (row["model_class"], row["client"])
        if float(row["rate_rps"]) > float(busiest.get(key, {"rate_rps": "0"})["rate_rps"]):
            busiest[key] = row
    return [
        Client(
            rate_rps=float(row["rate_rps"]),
            distribution=row["distribution"].lower(),
            shape=float(row["param1"]),
            prompt=tokens[key]["input_tokens"],
            output=tokens[key]["output_tokens"],
        )
        for key, row in sorted(busiest.items())
        if key[0] in SERVEGEN_CLASSES
        and len(tokens.get(key, {})) == 2
        and row["param1"]
        and float(row["param1"]) > 0
    ]


def gpu_speeds(path: Path) -> dict[str, tuple[float, float]]:
    """(prompt, generation) tokens/s of single GPUs on the 8B Q4_K_M model at 1,024 tokens."""
    return {
        row["gpu"].replace("\u2011", "-"): (float(row["pp1024"]), float(row["tg1024"]))
        for row in _rows(path)
        if row["n_gpu"] == "1" and row["model"].endswith("8B") and row["quant"] == "Q4_K_M" and row["pp1024"]
    }


def batch_slowdowns(path: Path, context: int = 4_096, batch: int = 4) -> dict[str, float]:
    """Relative slow-down per further sequence in a batch by model (its name without quantisation), from batched
    llama.cpp runs."""
    per_stream: dict[str, dict[int, float]] = {}
    for row in _rows(path):
        if int(row["context_tokens"]) == context:
            model = row["model"].split()[0]
            per_stream.setdefault(model, {})[int(row["batch"])] = float(row["gen_tps_per_stream"])
    return {
        model: (speeds[1] / speeds[batch] - 1.0) / (batch - 1)
        for model, speeds in per_stream.items()
        if {1, batch} <= speeds.keys()
    }


def depth_slopes(path: Path, depth: int = 4_096) -> dict[str, float]:
    """Relative slow-down of generation per 1,024 tokens of context by model (its name without quantisation), from
    llama.cpp runs at no depth and at ``depth``."""
    speeds: dict[str, dict[int, float]] = {}
    for row in _rows(path):
        speeds.setdefault(row["model"].split()[0], {})[int(row["depth_tokens"])] = float(row["gen_tps_tg32"])
    return {
        model: (told[0] / told[depth] - 1.0) * 1_024 / depth
        for model, told in speeds.items()
        if {0, depth} <= told.keys()
    }


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as lines:
        yield from csv.DictReader(lines)
