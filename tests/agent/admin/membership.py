"""A real membership on its own state folder, without listeners."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from agent.effects.tasks import Tasks
from agent.identity.admittance import Admittance
from agent.identity.membership import Membership
from agent.identity.own import load_identity
from agent.identity.tls import OwnFiles, TlsContexts
from agent.store.members import PeerFiles, RosterFiles
from router_core.ids import NodeName


def raise_it(_: str, exc: BaseException) -> None:
    raise exc


@contextlib.asynccontextmanager
async def membership(state: Path, name: str) -> AsyncIterator[Membership]:
    """The membership of a node of its own, freshly made below ``state``."""
    state.mkdir(mode=0o700)
    own = load_identity(state, None)
    tasks = Tasks(raise_it)
    made = Membership(
        own,
        NodeName(name),
        roster_files=RosterFiles(state),
        peer_files=PeerFiles(state),
        contexts=TlsContexts(OwnFiles(own.cert_path, own.key_path)),
        admittance=Admittance(),
        tasks=tasks,
        flush_s=0,
    )
    await made.load()
    try:
        yield made
    finally:
        await tasks.aclose()
