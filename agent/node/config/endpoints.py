"""This node's endpoints kept as its manifests say: new ones are watched, changed ones replaced, removed ones drained.

An endpoint that is replaced stays in service until the new one was looked at; requests under way know nothing of it.
An endpoint of a manifest that is not fit any more goes like a removed one. A detected engine makes way for a manifest
of its port.
"""

from collections.abc import Callable, Iterable

from agent.engines.contract import Credential, EndpointStatus
from agent.engines.watch import EngineWatch, KeyedManifest
from agent.node.config.drains import Drains
from agent.observe.log import Log
from agent.settings.manifest import Manifest, too_many
from agent.store.folders import RefuseToStart
from router_core import limits


class OwnEndpoints:
    """``read_credential`` gives the key behind a file name, or raises ``RefuseToStart``."""

    def __init__(
        self, watch: EngineWatch, drains: Drains, *, read_credential: Callable[[str], str], log: Log
    ) -> None:
        self._watch = watch
        self._drains = drains
        self._read_credential = read_credential
        self._log = log

    async def follow(self, manifests: Iterable[Manifest]) -> list[str]:
        """Make the endpoints those of ``manifests``; what is wrong with some of these, in words."""
        wanted = {manifest.name: manifest for manifest in manifests}
        faults: list[str] = []
        for name, status in tuple(self._watch.endpoints().items()):
            if name not in wanted and not (status.detected and _is_free(status, wanted.values())):
                self._leave(name)
        for name, manifest in wanted.items():
            key = key_of(manifest, self._read_credential)
            if isinstance(key, str):
                faults.append(key)
                self._leave(name)
                continue
            old = self._watch.endpoints().get(name)
            if old is None and len(self._watch.endpoints()) >= limits.ENGINES:
                faults.append(too_many(manifest))
                continue
            if old is None or not _is_same(old, manifest, key):
                await self._watch.adopt(manifest, key)
                self._log.info("endpoint.replaced" if old is not None else "endpoint.added", endpoint=name)
            self._drains.stay(name)
        return faults

    def sweep(self) -> bool:
        """Stop watching what has left and is empty; whether that made room."""
        gone = self._drains.sweep()
        for name in gone:
            self._watch.drop(name)
            self._drains.gone(name)
            self._log.info("endpoint.removed", endpoint=name)
        return len(gone) > 0

    def _leave(self, name: str) -> None:
        if name in self._watch.endpoints():
            self._drains.leave(name)


def key_of(manifest: Manifest, read_credential: Callable[[str], str]) -> Credential | str | None:
    """The key that ``manifest`` names, None if it names none; in words, why it cannot be had."""
    if manifest.credential is None:
        return None
    try:
        return Credential(read_credential(manifest.credential))
    except RefuseToStart as refused:
        return f"endpoints: {manifest.name}: credential: {refused}"


def keyed(
    manifests: Iterable[Manifest], read_credential: Callable[[str], str]
) -> tuple[list[KeyedManifest], list[str]]:
    """As many of ``manifests`` as may be watched, with their keys, and in words why the others may not."""
    fit: list[KeyedManifest] = []
    faults: list[str] = []
    for manifest in manifests:
        key = key_of(manifest, read_credential)
        if isinstance(key, str):
            faults.append(key)
        elif len(fit) == limits.ENGINES:
            faults.append(too_many(manifest))
        else:
            fit.append((manifest, key))
    return fit, faults


def _is_free(detected: EndpointStatus, manifests: Iterable[Manifest]) -> bool:
    """True if no manifest of this host claims the port of a detected engine."""
    port = detected.manifest.url.port
    return all(manifest.remote_host or manifest.url.port != port for manifest in manifests)


def _is_same(old: EndpointStatus, manifest: Manifest, key: Credential | None) -> bool:
    known = old.credential.authorization if old.credential is not None else None
    return (
        not old.detected
        and old.manifest == manifest
        and known == (key.authorization if key is not None else None)
    )
