"""What a web page can make a browser send to the local API, and names that only look like ours: the engine hears nothing."""

import pytest

from agent.relay.frontends.local import Doors
from tests.agent.relay.client import BODY, Heard, ask
from tests.agent.relay.rig import running
from tests.support.recorder import Recorder

ALLOWED = b"Origin: http://app.example\r\n"
JSON = b"Content-Type: application/json\r\n"
TEXT = b"Content-Type: text/plain\r\n"
OWN = b"Host: 127.0.0.1:PORT\r\n"


def doors(port: int) -> Doors:
    return Doors.of(("127.0.0.1", port), origins=("http://app.example",))


async def asked(
    headers: bytes, *, path: bytes = b"/v1/chat/completions", method: bytes = b"POST"
) -> tuple[Heard, int]:
    """The reply to a chat with exactly these headers, and how many requests the engine got."""
    async with Recorder() as up, running(up.port, doors_of=doors) as relay:
        raw = b"%s %s HTTP/1.1\r\n%sContent-Length: %d\r\n\r\n" % (method, path, headers, len(BODY)) + BODY
        heard = await ask(relay.port, raw.replace(b"PORT", b"%d" % relay.port))
        relay.assert_idle()
        return heard, len(up.requests)


async def test_what_the_attacks_below_are_changes_of_is_served() -> None:
    heard, reached = await asked(OWN + ALLOWED + JSON)
    assert (heard.status, reached) == (200, 1)
    assert heard.headers["access-control-allow-origin"] == "http://app.example"


@pytest.mark.threat("T35")
@pytest.mark.parametrize(
    "host",
    [
        b"127.0.0.1",
        b"localhost",
        b"127.0.0.1.nip.io:PORT",
        b"127-0-0-1.nip.io:PORT",
        b"localhost.evil.example:PORT",
        b"evil.example:PORT",
        b"localhost..:PORT",
        b"localhost:PORT.",
        b"localhost:PORT.evil.example",
        b"localhost:0PORT",
        b"localhost:PORT:PORT",
        b"localhost:",
        b"127.1:PORT",
        b"0.0.0.0:PORT",
        b"2130706433:PORT",
        b"0x7f000001:PORT",
        b"[::1]:PORT",
        b"[::ffff:127.0.0.1]:PORT",
        b"evil@127.0.0.1:PORT",
        b"127.0.0.1:PORT, evil.example",
        b"127.0.0.1:PORT/evil",
        b"http://127.0.0.1:PORT",
    ],
)
async def test_a_name_that_only_resolves_to_us_is_not_ours(host: bytes) -> None:
    heard, reached = await asked(b"Host: %s\r\n" % host + ALLOWED + JSON)
    assert (heard.status, reached) == (403, 0)
    assert b"host_refused" in heard.body
    assert host.replace(b"PORT", b"") not in heard.body


@pytest.mark.threat("T36")
@pytest.mark.parametrize("kind", [JSON, TEXT])
@pytest.mark.parametrize(
    "sent",
    [
        b"Origin: http://evil.example\r\n",
        b"Origin: null\r\n",
        b"Origin: \r\n",
        b"Origin: http://127.0.0.1:PORT\r\n",
        b"Origin: https://app.example\r\n",
        b"Origin: http://app.example:81\r\n",
        b"Origin: http://app.example.evil.example\r\n",
        b"Origin: http://APP.example\r\n",
        b"Origin: http://app.example http://evil.example\r\n",
        ALLOWED + b"Origin: http://evil.example\r\n",
        b"Sec-Fetch-Site: cross-site\r\n",
        b"Sec-Fetch-Site: same-site\r\n",
    ],
)
@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/api/chat"])
async def test_a_foreign_page_can_make_no_request(path: bytes, sent: bytes, kind: bytes) -> None:
    heard, reached = await asked(OWN + sent + kind, path=path)
    assert (heard.status, reached) == (403, 0)
    assert not [name for name in heard.headers if name.startswith("access-control")]


@pytest.mark.threat("T36")
@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/api/chat"])
async def test_a_foreign_page_gets_no_preflight(path: bytes) -> None:
    sent = b"Origin: http://evil.example\r\nAccess-Control-Request-Method: POST\r\n"
    sent += (
        b"Access-Control-Request-Headers: content-type\r\nAccess-Control-Request-Private-Network: true\r\n"
    )
    heard, reached = await asked(OWN + sent, path=path, method=b"OPTIONS")
    assert (heard.status, reached) == (403, 0)
    assert not [name for name in heard.headers if name.startswith("access-control")]


@pytest.mark.threat("T36")
@pytest.mark.parametrize(
    "mark", [b"Referer: http://x/", b"Cookie: a=b", b"Sec-Fetch-Mode: no-cors", ALLOWED[:-2]]
)
@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/api/chat"])
async def test_a_browser_has_to_name_json(path: bytes, mark: bytes) -> None:
    heard, reached = await asked(OWN + mark + b"\r\n" + TEXT, path=path)
    assert (heard.status, reached) == (415, 0)
