"""A member with a key of its own that does what no honest one would: floods, odd names, replays."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from router_core.mesh.protocol import messages as msg
from router_core.record.state import EngineFacts, EngineLoad, EngineState, ModelFacts, Static, Volatile
from tests.support.cluster import Cluster, wait_for
from tests.support.field import OpenAiEngine, chat, mesh, served_by
from tests.support.overhearing import Overhearing, overhearing

EVIL = "127.0.0.9"


@contextlib.asynccontextmanager
async def with_member(base: Path, engine: OpenAiEngine) -> AsyncIterator[tuple[Cluster, Overhearing]]:
    """alpha with an engine, beta without, and a third member that the test speaks for."""
    async with (
        engine.serving() as url,
        mesh(base, alpha=[url], beta=[]) as cluster,
        overhearing(base, EVIL, cluster.nodes) as evil,
    ):
        evil.body_changed(Volatile(), Static(), urgent=True)

        async def known() -> bool:
            members = [await node.members() for node in cluster.nodes]
            return all(each["overhearing"]["link"]["state"] == "up" for each in members)

        await wait_for(known, 15, "both nodes have a link to the third member")
        yield cluster, evil


@pytest.mark.parametrize("kind", ["ping", "have", "ignored"])
async def test_a_member_that_floods_is_closed_with_words_and_nobody_else_suffers(
    tmp_path: Path, kind: str
) -> None:
    floods = {
        "ping": msg.encode(msg.Ping(nonce=1, boot_ms=1)),
        "have": msg.encode(msg.Have(chunk=0, chunks=1)),
        "ignored": b"\x80ignored",
    }
    async with with_member(tmp_path, OpenAiEngine()) as (cluster, evil):
        alpha, beta = cluster["alpha"], cluster["beta"]
        for link in evil._links:
            for _ in range(1_000):
                link.send(floods[kind])

        async def closed() -> bool:
            state: str = (await alpha.members())["overhearing"]["link"]["state"]
            return state == "down"

        await wait_for(closed, 10, "alpha closed the link")
        reply = await chat(beta)
        assert (reply.status, served_by(reply)) == (200, "alpha")
        said = [line for line in alpha.log.read_text().splitlines() if "mesh.flooding" in line]
        assert len(said) == 1
        assert "overhearing" in said[0]


@pytest.mark.parametrize("name", ["engü", "a\r\nx-evil: 1", "a\x1b[2J"], ids=["letter", "line", "escape"])
async def test_a_name_out_of_a_record_never_reaches_a_client_or_costs_a_request(
    tmp_path: Path, name: str
) -> None:
    engine = EngineFacts(name=name, kind="openai", dialects=1, slots=64)
    static = Static(
        engines=(engine,), models=(ModelFacts(name="m", engine=0), ModelFacts(name="only", engine=0))
    )
    volatile = Volatile(engines=(EngineLoad(state=EngineState.READY, running=0, slots=64),))
    async with with_member(tmp_path, OpenAiEngine()) as (cluster, evil):
        beta = cluster["beta"]
        evil.body_changed(volatile, static, urgent=True)

        async def refused() -> bool:
            return (await beta.members())["overhearing"]["blocked_until"] is not None

        await wait_for(refused, 10, "beta takes nothing of that record")
        replies = await asyncio.gather(*(chat(beta) for _ in range(5)))
        assert [(reply.status, served_by(reply)) for reply in replies] == [(200, "alpha")] * 5
        assert not any("x-evil" in reply.headers for reply in replies)
        assert (await chat(beta, "only")).status in (404, 503), "gone, or not heard of yet"
        _, told, _ = await beta.cli("status")
        assert "\x1b" not in told
