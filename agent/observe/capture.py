"""What libraries and the interpreter would print by themselves, reduced to where and what class.

Stock loggers and tracebacks quote what they choke on: aiohttp logs body bytes of a malformed chunk, asyncio
the repr of protocols, a traceback the message of its exception. While captured, each becomes one line of our
log with the logger's name, the place in the code and the class of the exception, and no text.
"""

import asyncio
import contextlib
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final, TextIO

from agent.observe.log import Log, Severity

LIBRARIES: Final = ("aiohttp", "asyncio", "zeroconf", "py.warnings")
FRAMES: Final = 8


class Reduced(logging.Handler):
    """Turns records of stock loggers, from ``least`` on, into lines without their text."""

    def __init__(self, log: Log, least: Severity = Severity.WARNING) -> None:
        super().__init__(least)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        exc = record.exc_info[1] if record.exc_info else None
        severity = max(known for known in Severity if known <= max(record.levelno, Severity.DEBUG))
        fields: dict[str, object] = {"logger": record.name, "place": f"{record.module}:{record.lineno}"}
        if exc is not None:
            fields |= {"error": exc, "where": places(exc.__traceback__)}
        self._log.event(severity, "library.reported", fields)


def places(traceback: TracebackType | None) -> list[str]:
    """The innermost frames of ``traceback`` as ``module:line``, outermost first."""
    found: list[str] = []
    while traceback is not None:
        found.append(f"{traceback.tb_frame.f_globals.get('__name__', '?')}:{traceback.tb_lineno}")
        traceback = traceback.tb_next
    return found[-FRAMES:]


def report_crash(log: Log, event: str, exc: BaseException, **fields: object) -> None:
    """One error line about ``exc``: its class and its places."""
    log.error(event, error=exc, where=places(exc.__traceback__), **fields)


def report_loop(log: Log, loop: asyncio.AbstractEventLoop) -> None:
    """Let ``loop`` report its unhandled errors through ``log``."""

    def handler(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        exc, task = context.get("exception"), context.get("task") or context.get("future")
        name = task.get_name() if isinstance(task, asyncio.Task) else None
        if isinstance(exc, BaseException):
            report_crash(log, "loop.unhandled", exc, task=name)
        else:
            log.error("loop.unhandled", task=name)

    loop.set_exception_handler(handler)


@contextlib.contextmanager
def captured(log: Log, least: Severity = Severity.INFO) -> Iterator[None]:
    """Inside, nothing but ``log`` speaks: stock loggers, warnings and uncaught errors are reduced to it.

    What libraries say below WARNING is passed on only if ``least`` is DEBUG.
    """
    level = Severity.DEBUG if least is Severity.DEBUG else Severity.WARNING
    handler = Reduced(log, level)
    loggers = [logging.getLogger(), *(logging.getLogger(name) for name in LIBRARIES)]
    before = [(logger, logger.handlers[:], logger.propagate, logger.level) for logger in loggers]
    hooks = sys.excepthook, sys.unraisablehook, threading.excepthook
    show = warnings.showwarning

    def uncaught(_: type[BaseException], exc: BaseException, __: TracebackType | None) -> None:
        report_crash(log, "crash", exc)

    def unraisable(found: "sys.UnraisableHookArgs") -> None:
        if found.exc_value is not None:
            report_crash(log, "crash.unraisable", found.exc_value)

    def in_thread(found: threading.ExceptHookArgs) -> None:
        if found.exc_value is not None:
            report_crash(log, "crash.thread", found.exc_value, thread=getattr(found.thread, "name", None))

    def warned(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        log.warning(
            "library.warned", category=category.__name__, place=f"{filename.rpartition('/')[2]}:{lineno}"
        )

    for logger in loggers:
        logger.handlers[:] = []
        logger.propagate = logger.name != "root"
        logger.setLevel(level)
    logging.getLogger().addHandler(handler)
    sys.excepthook, sys.unraisablehook, threading.excepthook = uncaught, unraisable, in_thread
    warnings.showwarning = warned
    try:
        yield
    finally:
        warnings.showwarning = show
        sys.excepthook, sys.unraisablehook, threading.excepthook = hooks
        for logger, handlers, propagate, threshold in before:
            logger.handlers[:] = handlers
            logger.propagate = propagate
            logger.setLevel(threshold)
        log.flush()
