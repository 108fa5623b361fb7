"""Which engine answers at an address, by reading alone. The first probe that matches wins.

Every probe is a GET with the identity header that a PAIR proxy answers with a 409. A loop back to pairmesh
itself, a PAIR proxy and an engine without an adapter are told apart from silence and from strangers.
"""

from msgspec import Struct

from agent.engines import shape
from agent.engines.catalogue import CATALOGUE
from agent.engines.client import SLOW_S, EngineClient, EngineReply
from agent.engines.contract import EngineMisspoke, EngineRefusal, Identity
from agent.engines.ollama import dialects_of as ollama_dialects
from agent.engines.openai import dialects_of
from agent.settings.manifest import API_PATH, EngineKind, Manifest
from router_core import limits
from router_core.record.state import Dialect

OURSELVES = "pairmesh"


class Starting(Struct, frozen=True, kw_only=True):
    """An engine of this kind is there, but still loads its model."""

    engine: EngineKind


Verdict = Identity | Starting | EngineRefusal | None
"""None: something answers, and it is no engine."""


async def identify(client: EngineClient, manifest: Manifest | None = None) -> Verdict:
    """Tell what answers. ``manifest`` is the operator's word, None for a port that is merely tried.

    Raises :class:`EngineUnreachable` if nothing answers and :class:`EngineMisspoke` ``auth`` if the engine
    wants another key.
    """
    if manifest is not None and manifest.url.path != API_PATH:
        return _agreed(await _below_path(client, manifest), manifest)
    health = await _ask(client, "/health", cap=limits.ENGINE_HEALTH_BODY)
    if _is_ours(health):
        return EngineRefusal.SELF_LOOP
    if _is_pair_proxy(health):
        return EngineRefusal.PAIR_NOT_ADOPTED
    found: Verdict
    if health.headers.get("server") == "llama.cpp":
        found = await _llamacpp(client, health)
    else:
        found = (
            await _ollama(client)
            or await _llamacpp_behind_proxy(client)
            or await _plain(client, health, manifest)
        )
    return found if manifest is None else _agreed(found, manifest)


def _agreed(found: Verdict, manifest: Manifest) -> Verdict:
    """``found``, unless the manifest names another engine or one that has no adapter."""
    if not any(engine is manifest.engine for engine, _ in CATALOGUE):
        return EngineRefusal.UNSUPPORTED
    if isinstance(found, (Identity, Starting)) and found.engine is not manifest.engine:
        return EngineRefusal.IDENTITY_CHANGED
    return found


async def _ask(client: EngineClient, path: str, cap: int = limits.ENGINE_BODY) -> EngineReply:
    return await client.get(path, timeout_s=SLOW_S, cap=cap, probe=True)


def _is_ours(reply: EngineReply) -> bool:
    return reply.headers.get("server", "").partition("/")[0].strip().lower() == OURSELVES


def _is_pair_proxy(reply: EngineReply) -> bool:
    if reply.status != 409:
        return False
    try:
        return shape.text(reply.json(), "code") == "proxy-facade"
    except EngineMisspoke:
        return False


async def _ollama(client: EngineClient) -> Identity | None:
    """Both routes must answer: ``/api/tags`` alone proves nothing, older llama.cpp has it too."""
    reply = await _ask(client, "/api/version", cap=limits.ENGINE_HEALTH_BODY)
    version = shape.text(_tree(reply), "version")
    if version is None:
        return None
    loaded = _tree(await _ask(client, "/api/ps"))
    if not isinstance(loaded, dict) or not isinstance(loaded.get("models"), list):
        return None
    entry = CATALOGUE[EngineKind.OLLAMA, "native"]
    return Identity(
        engine=EngineKind.OLLAMA,
        flavour="native",
        version=version[:32],
        dialects=ollama_dialects(version, entry.dialects),
        tried=Dialect.MESSAGES,
        caps=entry.caps,
        loads_on_demand=True,
    )


async def _llamacpp(client: EngineClient, health: EngineReply) -> Verdict:
    """A server that says it is llama.cpp; only its ``/health`` is open to everybody."""
    if health.status == 503:
        return Starting(engine=EngineKind.LLAMACPP)
    reply = await _ask(client, "/props")
    if reply.status in (401, 403):
        reply.require()
    return await _llamacpp_identity(client, _tree(reply))


async def _llamacpp_behind_proxy(client: EngineClient) -> Verdict:
    """llama.cpp whose ``Server`` header somebody took away."""
    props = _tree(await _ask(client, "/props"))
    return await _llamacpp_identity(client, props) if shape.text(props, "build_info") is not None else None


async def _llamacpp_identity(client: EngineClient, props: object) -> Identity:
    routes = shape.text(props, "role") == "router"
    if not routes:
        items = await _listed(client, "/models")
        routes = items is not None and any(shape.text(item, "status", "value") for item in items)
    flavour = "router" if routes else "single"
    entry = CATALOGUE[EngineKind.LLAMACPP, flavour]
    return Identity(
        engine=EngineKind.LLAMACPP,
        flavour=flavour,
        version=(shape.text(props, "build_info") or "")[:32] or None,
        dialects=entry.dialects,
        tried=Dialect.RESPONSES | Dialect.MESSAGES | Dialect.RERANK | Dialect.EMBED,
        caps=entry.caps,
        metrics=shape.truth(props, "endpoint_metrics") or False,
        pushes_state=routes,
        # A request wakes the sleeping model of a single server just as it loads one of a router's.
        loads_on_demand=shape.truth(props, "models_autoload") is not False,
        models_most=(shape.whole(props, "max_instances") or None) if routes else None,
    )


async def _below_path(client: EngineClient, manifest: Manifest) -> Verdict:
    """A server whose API lies below a path: the rest of its host may be anybody's, so nothing else is asked there."""
    try:
        reply = await _ask(client, "/v1/models", cap=limits.ENGINE_LIST_BODY)
        if _is_ours(reply):
            return EngineRefusal.SELF_LOOP
        if not (manifest.models and reply.status in (404, 405)):
            await client.listing_of(reply, "/v1/models", "data")
    except EngineMisspoke as error:
        if error.reason == "auth":
            raise
        return _plain_identity(None) if error.reason == "too_large" else None
    return _plain_identity(None)


async def _plain(client: EngineClient, health: EngineReply, manifest: Manifest | None) -> Verdict:
    lists = await _lists_models(client)
    declared = manifest is not None and manifest.engine is EngineKind.OPENAI and bool(manifest.models)
    if not lists and not (declared and health.status == 200):
        return None
    return _plain_identity(dialects_of(_tree(await _ask(client, "/openapi.json"))))


async def _lists_models(client: EngineClient) -> bool:
    """Whether this is an OpenAI model list, be it one too long to be read. Raises :class:`EngineMisspoke` ``auth``."""
    return await _listed(client, "/v1/models") is not None


async def _listed(client: EngineClient, path: str) -> tuple[dict[str, object], ...] | None:
    """The objects of an OpenAI list, none of one too long to be read; None where there is no list. Raises
    :class:`EngineMisspoke` ``auth``."""
    try:
        return (await client.get_listing(path, "data", timeout_s=SLOW_S, probe=True)).items
    except EngineMisspoke as error:
        if error.reason == "auth":
            raise
        return () if error.reason == "too_large" else None


def _plain_identity(told: Dialect | None) -> Identity:
    entry = CATALOGUE[EngineKind.OPENAI, "plain"]
    return Identity(
        engine=EngineKind.OPENAI,
        flavour="plain",
        dialects=entry.dialects if told is None else told,
        tried=(Dialect.COMPLETION | Dialect.EMBED) & ~(Dialect(0) if told is None else told),
        caps=entry.caps,
    )


def _tree(reply: EngineReply) -> object:
    """The JSON of a 200 answer, None of any other."""
    try:
        return reply.json() if reply.status == 200 else None
    except EngineMisspoke:
        return None
