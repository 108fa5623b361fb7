"""Failure classes from recorded answers and from the shapes the engines document."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.engines.classify import PREFIX, RULES, classify
from agent.settings.manifest import EngineKind
from router_core.router.failure import FailureClass as F
from tests.support.fakes.replay import Sample


@pytest.mark.parametrize(
    ("engine", "name", "expected"),
    [
        ("llamacpp", "llama-single-err-context", F.TOO_LONG),
        ("llamacpp", "llama-router-err-context", F.TOO_LONG),
        ("llamacpp", "llama-router-err-unknown-model", F.ABSENT),
        ("llamacpp", "llama-router-err-load-unknown", F.ROUTE),
        ("openai", "llama-cpp-python-0.3.36-err-context", F.TOO_LONG),
        ("openai", "transformers-5.19.0-serve-err-unknown-model", F.OTHER),
        ("vllm", "vllm-0.32.0-cpu-err-context", F.TOO_LONG),
        ("vllm", "vllm-0.32.0-cpu-err-unknown-model", F.ABSENT),
        ("openai", "vllm-0.32.0-cpu-err-unknown-model", F.ABSENT),
        ("openai", "dynamo-1.6.1-mocker-err-unknown-model", F.ABSENT),
        ("openai", "dynamo-1.6.1-mocker-err-context", F.OTHER),
    ],
)
def test_recorded_failures(sample: Callable[[str], Sample], engine: str, name: str, expected: F) -> None:
    told = sample(name)
    assert classify(engine, told.status, told.body) is expected


@pytest.mark.parametrize(
    ("engine", "status", "body", "expected"),
    [
        ("llamacpp", 503, b'{"error":{"message":"Loading model","type":"unavailable_error"}}', F.LOADING),
        ("llamacpp", 400, b'{"error":{"message":"model is not loaded"}}', F.ABSENT),
        ("llamacpp", 500, b'{"error":{"message":"model name=x failed to load"}}', F.LOAD_FAILED),
        ("llamacpp", 501, b'{"error":{"message":"This server does not support embeddings"}}', F.ROUTE),
        ("llamacpp", 401, b'{"error":{"message":"Invalid API Key"}}', F.AUTH),
        ("llamacpp", 400, b'{"error":{"message":"tool file not found"}}', F.OTHER),
        ("llamacpp", 500, b"", F.OTHER),
        ("ollama", 503, b'{"error":"server busy, maximum pending requests exceeded"}', F.BUSY),
        ("ollama", 404, b'{"error":"model \\"x\\" not found, try pulling it first"}', F.ABSENT),
        ("ollama", 404, b"404 page not found", F.ROUTE),
        ("ollama", 405, b"", F.ROUTE),
        ("ollama", 500, b'{"error":"llama runner process has terminated"}', F.LOAD_FAILED),
        ("lmstudio", 404, b'{"error":"Unexpected endpoint or method."}', F.ROUTE),
        ("lmstudio", 404, b'{"error":{"code":"model_not_found"}}', F.ABSENT),
        ("lmstudio", 400, b'{"error":"No models loaded."}', F.ABSENT),
        ("lmstudio", 400, b'{"error":"tokens to keep exceed context length"}', F.TOO_LONG),
        (
            "openai",
            400,
            b'{"object":"error","message":"This model\'s maximum context length is 4096"}',
            F.TOO_LONG,
        ),
        ("openai", 500, b'{"message":"This model\'s maximum context length is 4096","code":500}', F.TOO_LONG),
        ("openai", 500, b'{"message":"out of luck"}', F.OTHER),
        ("lmstudio", 500, b'{"error":"Failed to load model"}', F.LOAD_FAILED),
        ("vllm", 503, b"", F.BUSY),
        ("vllm", 404, b'{"detail":"Not Found"}', F.ROUTE),
        ("vllm", 404, b'{"object":"error","message":"gone","code":404}', F.ABSENT),
        ("openai", 404, b'{"object":"error","message":"gone","code":404}', F.ABSENT),
        ("vllm", 405, b"", F.ROUTE),
        ("vllm", 500, b'{"error":{"message":"EngineDeadError"}}', F.DEAD),
        ("sglang", 503, b"", F.BUSY),
        ("openai", 429, b"", F.BUSY),
        ("openai", 503, b"", F.BUSY),
        ("openai", 529, b"", F.BUSY),
        ("openai", 503, b"model is loading", F.LOADING),
        ("openai", 404, b'{"error":{"message":"no such model"}}', F.ABSENT),
        ("openai", 404, b"not found", F.ABSENT),
        ("openai", 404, b"", F.ABSENT),
        ("openai", 405, b"", F.ROUTE),
        ("openai", 403, b"", F.AUTH),
        ("openai", 400, b'{"error":{"code":"invalid"}}', F.OTHER),
        ("an engine of tomorrow", 429, b"", F.BUSY),
    ],
)
def test_documented_failures(engine: str, status: int, body: bytes, expected: F) -> None:
    assert classify(engine, status, body) is expected


@pytest.mark.parametrize("engine", [*EngineKind, "unheard-of"])
def test_no_status_line_is_dead_for_every_engine(engine: str) -> None:
    assert classify(engine, None, b"") is F.DEAD


def test_every_engine_has_rules() -> None:
    assert set(RULES) == set(EngineKind)


def test_what_follows_the_prefix_is_not_looked_at() -> None:
    assert classify("llamacpp", 400, b" " * PREFIX + b"exceed_context_size") is F.OTHER


@settings(max_examples=100)
@given(st.sampled_from([*EngineKind, "x"]), st.integers(100, 999), st.binary(max_size=600))
def test_any_answer_has_a_class_and_letter_case_does_not_matter(
    engine: str, status: int, body: bytes
) -> None:
    verdict = classify(engine, status, body)
    assert verdict is classify(engine, status, body.upper()) is classify(engine, status, body.lower())
