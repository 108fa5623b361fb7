"""What a failed answer of an engine means, from its status and the first bytes of its body.

Pure, and the same for the own engine and for a peer's: the kind of engine is all it needs to know. What to do
about a failure is the relay's business.
"""

import re
from typing import Final, NamedTuple

from agent.settings.manifest import EngineKind
from router_core.router.failure import FailureClass

PREFIX = 512
"""Bytes of the body that are looked at."""


class AnswerRule(NamedTuple):
    """``statuses`` and, if given, a pattern that must occur in the lower-cased prefix."""

    verdict: FailureClass
    statuses: tuple[int, ...]
    pattern: re.Pattern[bytes] | None = None
    absent: bool = False

    def applies(self, status: int, prefix: bytes) -> bool:
        if status not in self.statuses:
            return False
        return self.pattern is None or (self.pattern.search(prefix) is not None) is not self.absent


def _saying(verdict: FailureClass, pattern: bytes, *statuses: int) -> AnswerRule:
    return AnswerRule(verdict, statuses, re.compile(pattern, re.DOTALL))


def _silent_on(verdict: FailureClass, pattern: bytes, *statuses: int) -> AnswerRule:
    return AnswerRule(verdict, statuses, re.compile(pattern, re.DOTALL), absent=True)


def _any(verdict: FailureClass, *statuses: int) -> AnswerRule:
    return AnswerRule(verdict, statuses)


_F = FailureClass
_TOO_LONG: Final = _saying(
    _F.TOO_LONG, rb"context_length_exceeded|maximum context length", 400, 413, 422, 500
)
"""Some servers tell a prompt that is too long as an error of their own: it is the caller's all the same."""
_VLLM: Final = (
    _any(_F.BUSY, 503),
    _saying(_F.ABSENT, rb"notfounderror|model.*not (exist|found)|\"object\"\s*:\s*\"error\"", 404),
    _TOO_LONG,
    _any(_F.AUTH, 401),
    _any(_F.ROUTE, 404, 405),
    _saying(_F.DEAD, rb"enginedead", 500),
)

RULES: Final[dict[EngineKind, tuple[AnswerRule, ...]]] = {
    EngineKind.LLAMACPP: (
        _saying(_F.LOADING, rb"unavailable_error", 503),
        _saying(_F.TOO_LONG, rb"exceed_context_size", 400),
        _saying(_F.ABSENT, rb"model.*not (found|loaded)", 400),
        _saying(_F.LOAD_FAILED, rb"failed to load", 500),
        _any(_F.AUTH, 401),
        _saying(_F.ROUTE, rb"file not found", 404),
        _any(_F.ROUTE, 501),
    ),
    EngineKind.OLLAMA: (
        _saying(_F.BUSY, rb"pending requests", 503),
        _silent_on(_F.ROUTE, rb"\"error\"", 404),
        _saying(_F.ABSENT, rb"not found", 404),
        _any(_F.LOAD_FAILED, 500),
        _any(_F.AUTH, 401),
        _any(_F.ROUTE, 405),
    ),
    EngineKind.LMSTUDIO: (
        _saying(_F.ROUTE, rb"unexpected endpoint", 404),
        _any(_F.ABSENT, 404),
        _saying(_F.ABSENT, rb"no models loaded", 400),
        _saying(_F.TOO_LONG, rb"context", 400),
        _saying(_F.LOAD_FAILED, rb"load", 500),
        _any(_F.AUTH, 401),
    ),
    EngineKind.VLLM: _VLLM,
    EngineKind.SGLANG: _VLLM,
    EngineKind.OPENAI: (
        _saying(_F.LOADING, rb"loading", 503),
        _any(_F.BUSY, 429, 503, 529),
        _any(_F.ABSENT, 404),
        _TOO_LONG,
        _any(_F.AUTH, 401, 403),
        _any(_F.ROUTE, 405),
    ),
}
"""Per engine, first match wins; whatever matches nothing is ``OTHER``. Which of ``ABSENT`` and ``ROUTE`` it is is a hint:
the engine's list decides what is withdrawn."""


def classify(engine: str, status: int | None, prefix: bytes) -> FailureClass:
    """The class of a failure. ``status`` None: no status line came (refused, reset, malformed).

    An engine of a kind that is not known here is judged as a generic OpenAI server.
    """
    if status is None:
        return FailureClass.DEAD
    known = EngineKind(engine) if engine in set(EngineKind) else EngineKind.OPENAI
    seen = prefix[:PREFIX].lower()
    for rule in RULES[known]:
        if rule.applies(status, seen):
            return rule.verdict
    return FailureClass.OTHER
