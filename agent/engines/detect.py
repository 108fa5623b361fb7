"""Looking for engines on this host's loopback ports. Addresses learned from others are never tried."""

import asyncio
import contextlib
from collections.abc import Collection, Iterable

from msgspec import Struct

from agent.effects.clock import Clock
from agent.engines.client import EngineClient
from agent.engines.contract import EngineMisspoke, EngineUnreachable, Identity
from agent.engines.identify import Starting, Verdict, identify
from agent.settings.manifest import EngineKind, EngineUrl, Manifest

LOOPBACK = "127.0.0.1"
CONNECT_S = 1.0
STRANGER_MS = 5_000
STRANGER_MOST_MS = 60_000


class Found(Struct, frozen=True, kw_only=True):
    """An engine that answers on a loopback port."""

    port: int
    identity: Identity


class Detection:
    """Tries ports again and again, each at its own pace: one where nobody listens at every call, one where something
    else answers ever more rarely, since it writes each try into its log."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._strangers: dict[int, tuple[int, int]] = {}

    async def detect(self, ports: Iterable[int]) -> tuple[Found, ...]:
        """The engines at those of ``ports`` that are due, all tried at once."""
        now = self._clock.boot_ms()
        due = [port for port in ports if self._strangers.get(port, (0, 0))[0] <= now]
        tried = await asyncio.gather(*(self._try(port) for port in due))
        return tuple(found for found in tried if found is not None)

    async def _try(self, port: int) -> Found | None:
        if not await _listens(port):
            self._strangers.pop(port, None)
            return None
        client = EngineClient(_manifest("probe", EngineKind.OPENAI, port))
        verdict: Verdict = None
        try:
            verdict = await identify(client)
        except (EngineUnreachable, EngineMisspoke):
            pass
        finally:
            await client.aclose()
        if isinstance(verdict, Identity):
            self._strangers.pop(port, None)
            return Found(port=port, identity=verdict)
        if not isinstance(verdict, Starting):
            _, wait_ms = self._strangers.get(port, (0, STRANGER_MS // 2))
            wait_ms = min(STRANGER_MOST_MS, 2 * wait_ms)
            self._strangers[port] = self._clock.boot_ms() + wait_ms, wait_ms
        return None


async def _listens(port: int) -> bool:
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(LOOPBACK, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


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
