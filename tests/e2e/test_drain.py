"""A daemon that is told to stop ends what it began, takes nothing new, and says goodbye to the others."""

import asyncio
import json
import signal

import aiohttp
import pytest

from tests.support.cluster import Cluster, wait_for

pytestmark = pytest.mark.asyncio(loop_scope="module")

BODY = {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "hello"}]}


async def test_a_stream_that_runs_is_finished_and_the_others_know_at_once(cluster: Cluster) -> None:
    alpha, beta = cluster["alpha"], cluster["beta"]
    url = f"{beta.api}/v1/chat/completions"
    hints = {"x-pairmesh-require": "node=@beta"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json=BODY | {"max_tokens": 900}, headers=hints) as reply,
    ):
        assert reply.status == 200
        lines = [await reply.content.readline()]
        assert beta.process is not None
        beta.process.send_signal(signal.SIGTERM)

        async def draining() -> bool:
            return not (await alpha.members())["beta"]["routable"]

        await wait_for(draining, 10, "alpha knows that beta takes nothing new", every_s=0.002)
        lines += [line async for line in reply.content]
    assert b"data: [DONE]\n" in lines
    assert await asyncio.wait_for(beta.process.wait(), 15) == 0
    told = [json.loads(line) for line in beta.log.read_text().splitlines()]
    (stopping,) = [line for line in told if line["event"] == "stopping"]
    assert (stopping["asked"], stopping["requests"]) == (True, 1)
    assert (told[-1]["event"], told[-1]["clean"]) == ("stopped", True)

    async def left() -> bool:
        return (await alpha.members())["beta"]["liveness"] in ("left", "gone")

    await wait_for(left, 10, "beta's goodbye is known at alpha")
    await beta.start()

    async def back() -> bool:
        return bool((await alpha.members())["beta"]["routable"])

    await wait_for(back, 10, "beta is back")
