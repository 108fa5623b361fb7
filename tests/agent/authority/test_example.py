"""The example authority, run as anybody would run it, is understood and does what it says."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.agent.authority.test_asking import asking, routed, three_nodes
from tests.agent.node.rig import an_endpoint, key_of

SCRIPT = Path(__file__).parents[3] / "scripts" / "authority-example"


@asynccontextmanager
async def example(*options: str) -> AsyncIterator[str]:
    """The URL of a running example."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(SCRIPT), "--port", "0", *options, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), 30)
        yield line.decode().split()[-1]
    finally:
        process.kill()
        await process.wait()


async def test_interactive_requests_go_to_the_named_nodes_first_and_others_where_they_are_done_soonest() -> (
    None
):
    world = three_nodes()
    world.peer("gamma", an_endpoint(slots=1))
    named = ["--first", key_of("gamma").partition("/")[0], "--first", key_of("beta")]
    async with example(*named) as url, asking(world, url):
        route, note = await routed(world)
        other, _ = await routed(world, "r2", headers=(("x-pairmesh-class", "batch"),))
        without, _ = await routed(world, "r3", headers=(("x-pairmesh-require", "!node=@gamma"),))
    assert (route.at, note.outcome.value, note.reason) == (key_of("gamma"), "used", "named nodes first")
    assert other.at == key_of("me")
    assert without.at == key_of("beta")


async def test_a_question_it_does_not_understand_is_refused_and_the_next_one_answered() -> None:
    world = three_nodes()
    async with example() as url:
        host, port = url.removeprefix("http://").removesuffix("/place").split(":")
        for body in (b"no json", b"[]", b"{}", b'{"class":1,"candidates":3}'):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /place HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            assert (await reader.readline()).split()[1] == b"400"
            writer.close()
        async with asking(world, url):
            _, note = await routed(world)
    assert note.outcome.value == "used"
