"""The example authority, run as anybody would run it, is understood and does what it says."""

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from router_core.placement.decision.authority import parse_answer
from router_core.placement.request.request import Advice
from tests.agent.authority.scripted import answers, listening
from tests.agent.authority.test_asking import asking, routed, three_nodes
from tests.agent.node.rig import an_endpoint, key_of

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "authority-example"


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
    assert (route.choice.endpoint, note.outcome.value, note.reason) == (
        key_of("gamma"),
        "used",
        "named nodes first",
    )
    assert other.choice.endpoint == key_of("me")
    assert without.choice.endpoint == key_of("beta")


def shown(part: str) -> bytes:
    """A JSON block of the page about it."""
    text = (ROOT / "docs/howto/authority.md").read_text()
    block = re.search(rf"<!-- {part}: begin -->\n```json\n(.*?)```\n<!-- {part}: end -->", text, re.DOTALL)
    assert block is not None
    return block[1].encode()


def members(tree: object) -> object:
    """The names in a JSON document, its values left out; of a list its first item."""
    if isinstance(tree, dict):
        return {name: members(value) for name, value in tree.items()}
    return members(tree[0]) if isinstance(tree, list) and tree else None


async def test_the_page_shows_a_question_and_an_answer_as_they_are() -> None:
    world = three_nodes()
    async with listening(answers(order=[])) as authority, asking(world, authority.url):
        await routed(world)
    (question,) = authority.questions
    assert members(json.loads(shown("question"))) == members(question)
    answer = parse_answer(shown("answer"))
    assert isinstance(answer, Advice)
    assert (answer.weights, answer.ttl_ms, answer.reason) == ((3.0, 1.0), 1_000, "cheap ones first")


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
