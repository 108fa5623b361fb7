"""Manifests, clients and watches for tests of engines, at test speed."""

import contextlib
from collections.abc import AsyncIterator
from random import Random

from agent.effects.clock import SystemClock
from agent.engines.client import EngineClient
from agent.engines.contract import Credential, EndpointStatus
from agent.engines.monitor import Cadence
from agent.engines.watch import EngineWatch
from agent.settings.manifest import DeclaredModel, EngineKind, EngineUrl, Manifest

QUICK = Cadence(
    busy_ms=50, fast_ms=50, quiet_ms=50, slow_ms=400, identify_ms=2_000, withdrawn_ms=200, retry_ms=(50,)
)


def manifest(
    port: int,
    engine: EngineKind = EngineKind.LLAMACPP,
    *,
    name: str = "here",
    host: str = "127.0.0.1",
    models: tuple[DeclaredModel, ...] = (),
    slots: int | None = None,
    remote_host: bool = False,
    credential: str | None = None,
) -> Manifest:
    return Manifest(
        name=name,
        url=EngineUrl(scheme="http", host=host, port=port),
        engine=engine,
        models=models,
        slots=slots,
        remote_host=remote_host,
        credential=credential,
    )


@contextlib.asynccontextmanager
async def client_of(described: Manifest) -> AsyncIterator[EngineClient]:
    client = EngineClient(described)
    try:
        yield client
    finally:
        await client.aclose()


class Watched:
    """A running watch and everything it told."""

    def __init__(self, *manifests: Manifest, cadence: Cadence = QUICK, ports: tuple[int, ...] = ()) -> None:
        self.told: list[tuple[EndpointStatus, bool]] = []
        self.crashes: list[tuple[str, BaseException]] = []
        self.watch = EngineWatch(
            [
                (each, Credential(f"key of {each.credential}") if each.credential else None)
                for each in manifests
            ],
            clock=SystemClock(),
            rng=Random(1),
            changed=lambda status, urgent: self.told.append((status, urgent)),
            failed=lambda name, error: self.crashes.append((name, error)),
            ports=ports,
            cadence=cadence,
        )

    def status(self, name: str = "here") -> EndpointStatus:
        return self.watch.endpoints()[name]

    async def __aenter__(self) -> "Watched":
        self.watch.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.watch.aclose()
        assert self.crashes == []
