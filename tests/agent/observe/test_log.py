"""Claims about log lines: one event is one line, bounded, and never quotes an exception."""

import json
import logging
import os
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.observe.capture import captured, report_crash
from agent.observe.log import REMEMBERED, Log, Severity, stream_log
from router_core import limits
from router_core.errors import RemoteFault
from router_core.record.state import Level

CANARY = "CANARY7x1m2k9qp4z8w6r3t5y0abcd"


class Hands:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.ms = 1_000

    def boot_ms(self) -> int:
        return self.ms

    def boot_us(self) -> int:
        return self.ms * 1_000

    def wall_ms(self) -> int:
        return 1_700_000_000_000 + self.ms


@pytest.fixture
def clock() -> Hands:
    return Hands()


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def log(clock: Hands, lines: list[str]) -> Log:
    return Log(lines.append, clock, least=Severity.DEBUG)


def parsed(lines: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines]


def test_an_event_is_one_json_object_with_its_fields(log: Log, lines: list[str]) -> None:
    log.info("mesh.link_up", peer="atlas", rtt_ms=1.5, level=Level.HIGH, id8=b"\x01\xff", roles=("node", 3))
    assert parsed(lines) == [
        {
            "at": "2023-11-14T22:13:21.000Z",
            "level_": "high",
            "level": "info",
            "event": "mesh.link_up",
            "peer": "atlas",
            "rtt_ms": 1.5,
            "id8": "01ff",
            "roles": ["node", 3],
        }
    ]


@pytest.mark.threat("T46")
def test_a_name_that_forges_a_line_stays_inside_its_own(log: Log, lines: list[str]) -> None:
    forged = 'x\n{"level":"error","event":"forged"}\r\x1b[2J\u2028\x7f\x85'
    log.warning("peer.named", name=forged)
    assert len(lines) == 1
    assert lines[0].isascii()
    assert lines[0].isprintable()
    assert json.loads(lines[0])["name"] == forged


@pytest.mark.threat("T46")
@settings(max_examples=100)
@given(text=st.text(max_size=400))
def test_any_text_gives_one_printable_line_in_both_forms(text: str) -> None:
    for human in (False, True):
        lines: list[str] = []
        Log(lines.append, Hands(), human=human).info("said", text=text, texts=[text])
        (line,) = lines
        assert line.isprintable()
        assert len(line) < 24 * limits.LOG_TEXT + 200


def test_text_is_cut_at_its_limit(log: Log, lines: list[str]) -> None:
    log.info("long", text="a" * 1_000)
    assert parsed(lines)[0]["text"] == "a" * (limits.LOG_TEXT - 1) + "…"


def test_an_exception_is_its_class_and_never_its_text(log: Log, lines: list[str]) -> None:
    log.error("failed", error=RemoteFault("bad", CANARY), cause=ValueError(CANARY))
    assert CANARY not in lines[0]
    assert parsed(lines)[0]["error"] == "router_core.errors.RemoteFault"
    assert parsed(lines)[0]["cause"] == "ValueError"


def test_an_unknown_object_is_named_by_its_class(log: Log, lines: list[str]) -> None:
    class Secret:
        def __repr__(self) -> str:
            return CANARY

    log.info("object", it=Secret(), them=[Secret()], table={"k": CANARY})
    assert CANARY not in lines[0]
    assert parsed(lines)[0]["it"] == "<Secret>"
    assert parsed(lines)[0]["table"] == "<dict>"


def test_equal_lines_are_written_ten_times_a_minute_and_then_summed_up(
    log: Log, lines: list[str], clock: Hands
) -> None:
    for _ in range(1_000):
        log.warning("flood", peer="x")
    log.warning("flood", peer="y")
    assert len(lines) == limits.LOG_LINES_PER_MIN + 1
    clock.ms += 60_000
    log.info("later")
    summary = parsed(lines)[-2]
    assert summary["event"] == "flood"
    assert summary["peer"] == "x"
    assert summary["suppressed"] == 1_000 - limits.LOG_LINES_PER_MIN
    log.warning("flood", peer="x")
    assert parsed(lines)[-1]["event"] == "flood"


def test_the_summary_survives_the_end_of_the_process(log: Log, lines: list[str]) -> None:
    for _ in range(13):
        log.info("again")
    log.flush()
    assert parsed(lines)[-1]["suppressed"] == 3


def test_memory_of_equal_lines_is_bounded(clock: Hands, lines: list[str]) -> None:
    log = Log(lines.append, clock)
    for number in range(5_000):
        log.info("distinct", text=str(number))
    assert len(lines) == 5_000
    assert len(log._seen) <= REMEMBERED


@pytest.mark.parametrize("origin", ["origin", "peer", "node"])
def test_what_another_node_can_make_this_one_say_is_bounded_whatever_it_varies(
    log: Log, lines: list[str], clock: Hands, origin: str
) -> None:
    """The field trial's A2: records with rising numbers wrote 501 lines in 10 s."""
    for number in range(501):
        log.warning("mesh.equivocation", **{origin: "atlas", "seq": number, "text": str(number)})
    log.warning("mesh.equivocation", **{origin: "bess", "seq": 1})
    assert len(lines) == limits.LOG_LINES_PER_MIN + 1
    clock.ms += 60_000
    log.sum_up()
    summary = parsed(lines)[-1]
    assert (summary["event"], summary[origin]) == ("mesh.equivocation", "atlas")
    assert summary["suppressed"] == 501 - limits.LOG_LINES_PER_MIN
    assert "seq" not in summary


def test_lines_that_differ_in_numbers_alone_are_repetitions(log: Log, lines: list[str]) -> None:
    for number in range(100):
        log.info("again", number=number, share=number / 3)
    assert len(lines) == limits.LOG_LINES_PER_MIN


def test_lines_that_say_different_things_are_all_written(log: Log, lines: list[str]) -> None:
    for number in range(100):
        log.error("config.refused", fault=f"fault {number}")
        log.debug("profile.learned", endpoint="a", number=number)
    assert len(lines) == 200


def test_lines_below_the_threshold_are_not_written(clock: Hands, lines: list[str]) -> None:
    log = Log(lines.append, clock, least=Severity.WARNING)
    log.info("quiet")
    log.warning("loud")
    assert [line["event"] for line in parsed(lines)] == ["loud"]


def test_a_terminal_gets_the_form_for_people(clock: Hands) -> None:
    ours, theirs = os.openpty()
    with open(theirs, "w") as stream:
        log, writer = stream_log(stream, clock)
        log.info("mesh.link_up", peer="atlas", text="two words", gone=None)
        assert writer.close(5.0)
        said = os.read(ours, 4_096).decode()
    os.close(ours)
    assert said.endswith('info    mesh.link_up peer=atlas text="two words" gone=-\r\n')


def test_without_a_stream_nothing_is_said_and_nothing_lost(clock: Hands) -> None:
    log, writer = stream_log(None, clock)
    log.info("unheard")
    assert writer.close(5.0)
    assert log.lost == 0


def test_lines_that_nobody_got_are_told_by_why(clock: Hands) -> None:
    log = Log(lambda _: None, clock, dropped=lambda: {"full": 3, "unwritable": 4})
    (family,) = log.collect()
    assert family.name == "pairmesh_log_lines_dropped_total"
    assert {labels: value for _, _, labels, value in family.series} == {("full",): 3, ("unwritable",): 4}
    assert log.lost == 7


def test_a_line_stays_json_whatever_the_number(log: Log, lines: list[str]) -> None:
    log.info("numbers", nan=float("nan"), inf=float("-inf"), big=10**5_000, fine=0.5)
    log.info("later")
    assert "NaN" not in "".join(lines)
    assert parsed(lines)[-1]["event"] == "later"


def test_a_broken_sink_costs_the_line_and_nothing_else(clock: Hands) -> None:
    def broken(_: str) -> None:
        raise BrokenPipeError

    log = Log(broken, clock)
    log.info("unheard")
    assert log.lost == 1


# --- what others would print -----------------------------------------------------------------------------


def test_stock_loggers_are_reduced_to_place_and_class(log: Log, lines: list[str]) -> None:
    with captured(log):
        try:
            raise ValueError(CANARY)
        except ValueError:
            logging.getLogger("aiohttp.server").exception("Error handling %s", CANARY)
        logging.getLogger("asyncio").error(CANARY)
        logging.getLogger("zeroconf").warning("packet %r", CANARY)
        logging.getLogger("somebody.else").error(CANARY)
        logging.getLogger("asyncio").info(CANARY)
    text = "\n".join(lines)
    assert CANARY not in text
    reported = parsed(lines)
    assert [line["logger"] for line in reported] == ["aiohttp.server", "asyncio", "zeroconf", "somebody.else"]
    assert reported[0]["error"] == "ValueError"
    assert reported[0]["where"][-1].startswith(f"{__name__}:")


def test_at_debug_libraries_are_heard_below_warnings_and_still_reduced(clock: Hands) -> None:
    lines: list[str] = []
    log = Log(lines.append, clock, least=Severity.DEBUG)
    with captured(log, Severity.DEBUG):
        logging.getLogger("asyncio").debug("poll %s", CANARY)
        logging.getLogger("aiohttp.client").info(CANARY)
    assert CANARY not in "\n".join(lines)
    assert [(line["level"], line["logger"]) for line in parsed(lines)] == [
        ("debug", "asyncio"),
        ("info", "aiohttp.client"),
    ]


def test_loggers_are_given_back_as_they_were(log: Log) -> None:
    before = [
        (logging.getLogger(n).handlers[:], logging.getLogger(n).propagate) for n in ("aiohttp", "asyncio")
    ]
    hooks = sys.excepthook, threading.excepthook
    with captured(log):
        assert sys.excepthook is not hooks[0]
    after = [
        (logging.getLogger(n).handlers[:], logging.getLogger(n).propagate) for n in ("aiohttp", "asyncio")
    ]
    assert after == before
    assert (sys.excepthook, threading.excepthook) == hooks


def test_warnings_and_dying_threads_say_no_text(log: Log, lines: list[str]) -> None:
    def die() -> None:
        raise RuntimeError(CANARY)

    with captured(log):
        warnings.showwarning(ResourceWarning(CANARY), ResourceWarning, "/x/y.py", 7)
        thread = threading.Thread(target=die, name="doomed")
        thread.start()
        thread.join()
        sys.excepthook(ValueError, ValueError(CANARY), None)
    assert CANARY not in "\n".join(lines)
    assert [line["event"] for line in parsed(lines)] == ["library.warned", "crash.thread", "crash"]


async def test_errors_of_the_loop_say_no_text(log: Log, lines: list[str]) -> None:
    import asyncio

    from agent.observe.capture import report_loop

    loop = asyncio.get_running_loop()
    report_loop(log, loop)
    loop.call_exception_handler({"message": CANARY, "exception": OSError(CANARY)})
    loop.call_exception_handler({"message": CANARY})
    assert CANARY not in "\n".join(lines)
    assert parsed(lines)[0]["error"] == "OSError"


def test_a_crash_names_its_places(log: Log, lines: list[str], tmp_path: Path) -> None:
    try:
        (tmp_path / CANARY).read_text()
    except OSError as exc:
        report_crash(log, "crash", exc, task="reader")
    assert CANARY not in lines[0]
    assert parsed(lines)[0]["error"] == "FileNotFoundError"
    assert parsed(lines)[0]["task"] == "reader"
