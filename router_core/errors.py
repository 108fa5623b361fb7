"""The error tree. Expected refusals are values (reason enums), not exceptions.

``LocalMisuse`` is ours: a bug or a request that cannot be met; it ends the task or refuses to start.
``RemoteFault`` is someone else's: it is counted, answered, and life goes on. Messages are lower case, name the
offending value and the limit, and never carry content of a prompt or an answer.
"""


class PairmeshError(Exception):
    """Root of everything this project raises on purpose."""


class LocalMisuse(PairmeshError):
    """This node did something it must not do (an oversize record, a broken policy, a wrong call)."""


class RemoteFault(PairmeshError):
    """A peer, an engine or a client sent something unacceptable.

    ``reason`` is a short code from a closed set, fit for a metric label.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail
