"""Looking for engines on this host's loopback ports. Addresses learned from others are never tried."""

from collections.abc import Collection, Iterable

from msgspec import Struct

from agent.engines.client import EngineClient
from agent.engines.contract import EngineMisspoke, EngineUnreachable, Identity
from agent.engines.identify import identify
from agent.settings.manifest import EngineKind, EngineUrl, Manifest

LOOPBACK = "127.0.0.1"


class Found(Struct, frozen=True, kw_only=True):
    """An engine that answers on a loopback port."""

    port: int
    identity: Identity


async def detect(ports: Iterable[int]) -> tuple[Found, ...]:
    """Try ``ports`` one after the other; whatever is no usable engine is passed over in silence."""
    found = []
    for port in ports:
        client = EngineClient(_manifest("probe", EngineKind.OPENAI, port))
        try:
            verdict = await identify(client)
        except (EngineUnreachable, EngineMisspoke):
            continue
        finally:
            await client.aclose()
        if isinstance(verdict, Identity):
            found.append(Found(port=port, identity=verdict))
    return tuple(found)


def default_manifest(found: Found, taken: Collection[str]) -> Manifest:
    """The manifest of a detected engine, named after its kind (``-2``, ``-3`` for more)."""
    kind = found.identity.engine
    name, count = kind.value, 1
    while name in taken:
        count += 1
        name = f"{kind.value}-{count}"
    return _manifest(name, kind, found.port)


def _manifest(name: str, engine: EngineKind, port: int) -> Manifest:
    return Manifest(name=name, engine=engine, url=EngineUrl(scheme="http", host=LOOPBACK, port=port))
