"""The engines that have an adapter, as one literal table, and the ports where they are looked for."""

from typing import Final, Protocol

from msgspec import Struct

from agent.engines.client import EngineClient
from agent.engines.contract import EngineAdapter, Identity
from agent.engines.llamacpp import LlamaSingle
from agent.engines.llamacpp_router import LlamaRouter
from agent.engines.ollama import Ollama
from agent.engines.openai import OpenAiPlain
from agent.settings.manifest import Caps, EngineKind, Manifest
from router_core.record.state import Capability, Dialect

LOOPBACK_PORTS: Final = (11434, 11435, 1234, 1235, 8080, 8081, 8000, 30000, 1337, 5000, 5001)
"""Where engines listen by default on their own host: Ollama, LM Studio, llama.cpp, vLLM and Dynamo, SGLang, Jan, TabbyAPI
and KoboldCpp. Those without an adapter of their own are OpenAI-compatible servers."""


class AdapterFactory(Protocol):
    """Makes the adapter of one identified engine."""

    def __call__(self, client: EngineClient, identity: Identity, manifest: Manifest) -> EngineAdapter: ...


class CatalogueEntry(Struct, frozen=True, kw_only=True):
    """One flavour of one engine: what it speaks and can, and what reads it."""

    adapter: AdapterFactory
    dialects: Dialect
    caps: Caps = Caps()


_LLAMA_DIALECTS: Final = (
    Dialect.CHAT | Dialect.COMPLETION | Dialect.RESPONSES | Dialect.MESSAGES | Dialect.RERANK
)
_LLAMA_CAPS: Final = (
    Capability.STREAMING | Capability.COUNT_TOKENS | Capability.JSON_SCHEMA | Capability.LOGPROBS
)
_OLLAMA_CAPS: Final = Capability.STREAMING | Capability.JSON_SCHEMA

CATALOGUE: Final[dict[tuple[EngineKind, str], CatalogueEntry]] = {
    (EngineKind.LLAMACPP, "single"): CatalogueEntry(
        adapter=LlamaSingle,
        dialects=_LLAMA_DIALECTS,
        caps=Caps(known=_LLAMA_CAPS, has=_LLAMA_CAPS),
    ),
    (EngineKind.LLAMACPP, "router"): CatalogueEntry(
        adapter=LlamaRouter,
        dialects=_LLAMA_DIALECTS,
        caps=Caps(known=_LLAMA_CAPS, has=_LLAMA_CAPS),
    ),
    (EngineKind.OLLAMA, "native"): CatalogueEntry(
        adapter=Ollama,
        dialects=Dialect.CHAT
        | Dialect.COMPLETION
        | Dialect.EMBED
        | Dialect.OLLAMA_CHAT
        | Dialect.OLLAMA_GENERATE
        | Dialect.OLLAMA_EMBED,
        caps=Caps(known=_OLLAMA_CAPS | Capability.COUNT_TOKENS, has=_OLLAMA_CAPS),
    ),
    (EngineKind.OPENAI, "plain"): CatalogueEntry(
        adapter=OpenAiPlain,
        dialects=Dialect.CHAT | Dialect.COMPLETION,
        caps=Caps(known=Capability.STREAMING, has=Capability.STREAMING),
    ),
}
"""What ``(engine, flavour)`` means. A plain server's own description beats its dialects here, and
newer versions of Ollama speak more."""
