"""What one client is answered: an answer as it comes, a whole one, a refusal, or the truth in mid-answer.

Keeps what of it a line of the access log tells, and lets the request's body go as soon as the answer is certain.
Refuses to know why: what to say comes as actions of the exchange.
"""

from agent.relay.forwarding.access_lines import line_of_exchange
from agent.relay.forwarding.body import Parcel
from agent.relay.forwarding.context import Voice
from agent.relay.http.frontend import Client
from agent.relay.http.headers import passed_down
from agent.relay.http.parser import Request
from agent.relay.ports import AccessLine, Asked, Routed, Turned
from agent.relay.upstream.attempt import Attempt
from router_core.exchange import events as ev
from router_core.router.failure import Cause

_CLIENT_CLOSED = 499


class Answering:
    """``status`` is 0 and ``first_byte_ms`` (boot ms) None until the answer began; ``code`` names what went wrong,
    ``cause`` why the last attempt came to no answer.
    ``number`` is the count of attempts so far, ``_own`` that of body bytes which no upstream said."""

    __slots__ = (
        "_asked",
        "_client",
        "_own",
        "_parcel",
        "_passes",
        "_released",
        "_request",
        "_voice",
        "cause",
        "code",
        "first_byte_ms",
        "status",
    )

    def __init__(self, voice: Voice, client: Client, request: Request, asked: Asked, parcel: Parcel) -> None:
        self.status = 0
        self.code: str | None = None
        self.cause: Cause | None = None
        self.first_byte_ms: float | None = None
        self._voice = voice
        self._client = client
        self._request = request
        self._asked = asked
        self._parcel = parcel
        self._released = self._passes = False
        self._own = 0

    def begin(self, attempt: Attempt, routed: Routed, number: int, now_ms: float) -> None:
        """Pass on the head and what came with it; what follows goes straight to the client."""
        self.first_byte_ms = now_ms
        self.status = attempt.status
        self._passes = True
        self.release_body(attempt)
        lines = attempt.lines + self._voice.lines(self._asked, routed, number, attempt.status)
        self._client.begin(attempt.status, lines, attempt.length)
        for data in attempt.held:
            if data:
                self._client.push(data)
        attempt.held.clear()

    def pass_whole(self, attempt: Attempt, routed: Routed, number: int) -> None:
        """Pass on an answer that was held back until it was known to be the client's."""
        self.status = attempt.status
        self._passes = True
        self.release_body(attempt)
        body = b"".join(attempt.held)
        lines = passed_down(attempt.headers)
        lines += self._voice.lines(self._asked, routed, number, attempt.status)
        self._client.begin(attempt.status, lines, len(body))
        self._client.push(body)
        self._client.end()

    def refuse(
        self,
        action: ev.Reply,
        attempt: Attempt | None,
        turned: Turned | None,
        routed: Routed | None,
        number: int,
        held_ms: int | None,
    ) -> None:
        """Answer in the client's dialect that there is no answer."""
        self.status, self.code = action.status, action.code
        self.release_body(attempt)
        answer = self._voice.refusal(action, self._asked, turned, routed, number, held_ms, self.cause)
        self._own = len(answer.body)
        self._client.reply(answer)

    def cut(self, code: str, attempt: Attempt) -> None:
        """End an answer that has begun with an error that its stream has a place for, if it has one: beyond a length
        that was told, there is none."""
        self.code = code
        last = b""
        if attempt.stream is not None and attempt.length is None:
            last = self._voice.stream_error(code, mid_event=attempt.tail.mid_event)
        self._own = len(last)
        self._client.cut(last)

    def cancelled(self, code: str) -> None:
        """The client left; unless something else went wrong before."""
        if self.code is None:
            self.status, self.code = _CLIENT_CLOSED, code

    def release_body(self, attempt: Attempt | None) -> None:
        """Nothing will be sent again."""
        if self._released:
            return
        self._released = True
        self._parcel.drop()
        if attempt is not None:
            attempt.body = b""
        self._client.release_body()

    def line(
        self,
        attempt: Attempt | None,
        turned: Turned | None,
        routed: Routed | None,
        number: int,
        now_ms: float,
    ) -> AccessLine:
        """What the access log tells of it."""
        return line_of_exchange(
            self._voice.side,
            self._request,
            self._asked,
            routed,
            turned,
            status=self.status,
            code=self.code,
            bytes_out=self._own + (attempt.size if self._passes and attempt is not None else 0),
            attempts=number,
            now_ms=now_ms,
            first_byte_ms=self.first_byte_ms,
        )
