"""Many answers streamed at once: how much later each event arrives through the relay than directly.

The upstream stamps every event of a stream with the time it was due, ``EVENTS_S`` a second for each of ``STREAMS`` streams,
whose turns are spread evenly so that direct and relayed runs keep the same schedule; the load takes the age of each as it
arrives. Both read one clock, that of the host. Ages of the first second are left out, until all streams run.
"""

import asyncio
import json
import re
import time
from statistics import quantiles
from typing import cast

STREAMS = 200
EVENTS_S = 50
LASTING_S = 4
MODEL = "paced"

_GAP_NS = 1_000_000_000 // EVENTS_S
_WARM_UP_EVENTS = EVENTS_S
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_EVENT = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"paced","choices":'
    b'[{"index":0,"delta":{"content":"word"},"finish_reason":null}],"due_ns":%d}\n\n'
)
_DUE = re.compile(rb'"due_ns":(\d+)}')
_END = b"data: [DONE]\n\n"
_LAST_CHUNK = b"0\r\n\r\n"
_MODELS = b'{"object":"list","data":[{"id":"paced","object":"model","created":1,"owned_by":"bench"}]}'


def _chunk(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(body), body)


class PacedUpstream(asyncio.Protocol):
    """Answers a POST with a stream whose turn its ``seed`` names, every GET with its one model."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._buffer = b""

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, parted, body = self._buffer.partition(b"\r\n\r\n")
        if not parted:
            return
        if head.startswith(b"GET"):
            self._buffer = b""
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
                % (len(_MODELS), _MODELS)
            )
            return
        length = re.search(rb"(?i)content-length: *(\d+)", head)
        if length is None or len(body) < int(length[1]):
            return
        self._buffer = b""
        self._transport.write(_HEAD)
        turn_ns = _GAP_NS * int(json.loads(body)["seed"]) // STREAMS
        begin_ns = (time.monotonic_ns() // _GAP_NS + 1) * _GAP_NS + turn_ns
        self._at(begin_ns, EVENTS_S * LASTING_S)

    def _at(self, due_ns: int, left: int) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later((due_ns - time.monotonic_ns()) / 1e9, self._tell, due_ns, left)

    def _tell(self, due_ns: int, left: int) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(_chunk(_EVENT % due_ns))
        if left > 1:
            self._at(due_ns + _GAP_NS, left - 1)
        else:
            self._transport.write(_chunk(_END) + _LAST_CHUNK)


class StreamLoad(asyncio.Protocol):
    """One streamed request; ``ended`` gives the ages of its events in nanoseconds."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._ages: list[int] = []
        self._tail = b""
        self.ended: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        if self._tail:
            data = self._tail + data
        end = 0
        for found in _DUE.finditer(data):
            self._ages.append(now - int(found[1]))
            end = found.end()
        self._tail = data[end:]
        if not self.ended.done() and self._tail.endswith(_LAST_CHUNK):
            self.ended.set_result(self._ages)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(ConnectionError("a stream broke off"))


async def ages_us(port: int) -> tuple[float, float]:
    """(p50, p99) of the ages of all events of ``STREAMS`` streams at once, in microseconds."""
    loop = asyncio.get_running_loop()
    made = []
    for number in range(STREAMS):
        body = b'{"model":"%s","stream":true,"seed":%d,"messages":[{"role":"user","content":"go on"}]}' % (
            MODEL.encode(),
            number,
        )
        request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (port, len(body), body)
        )
        made.append(await loop.create_connection(lambda: StreamLoad(request), "127.0.0.1", port))  # noqa: B023
    told = await asyncio.gather(*(load.ended for _, load in made))
    for transport, _ in made:
        transport.close()
    steady = [age / 1000 for ages in told for age in ages[_WARM_UP_EVENTS:-1]]
    assert all(len(ages) == EVENTS_S * LASTING_S for ages in told)
    cuts = quantiles(steady, n=100)
    return cuts[49], cuts[98]
