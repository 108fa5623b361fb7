"""The one thread that reads the host."""

import threading
from collections.abc import Iterator

import pytest

from agent.sampling.host import HostAnswer, HostThread, Tick
from tests.support.host_samples import host
from tests.support.until import until


class Reads:
    """A read that can be held, and what came back."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.threads: list[threading.Thread] = []
        self.error: Exception | None = None
        self.answers: list[HostAnswer] = []
        self.errors: list[Exception] = []
        self.thread = HostThread(self._read, answered=self.answers.append, failed=self.errors.append)

    def _read(self, tick: Tick) -> HostAnswer:
        self.threads.append(threading.current_thread())
        self.free.wait(30)
        if self.error is not None:
            raise self.error
        return HostAnswer(sample=host(len(self.threads)))


@pytest.fixture
def reads() -> Iterator[Reads]:
    found = Reads()
    yield found
    found.free.set()
    found.thread.stop()


async def test_every_read_is_made_by_the_same_named_thread(reads: Reads) -> None:
    reads.thread.start()
    for count in (1, 2, 3):
        assert reads.thread.ask(Tick())
        await until(lambda n=count: len(reads.answers) == n)  # type: ignore[misc]
    assert {thread.name for thread in reads.threads} == {"pairmesh-host"}
    assert len(set(reads.threads)) == 1
    assert reads.threads[0] is not threading.current_thread()


async def test_one_question_is_outstanding_at_most(reads: Reads) -> None:
    reads.free.clear()
    reads.thread.start()
    assert reads.thread.ask(Tick())
    await until(lambda: reads.threads)
    assert not reads.thread.ask(Tick())
    waited = reads.thread.outstanding
    reads.free.set()
    await until(lambda: reads.answers)
    assert (waited, reads.thread.outstanding) == (True, False)
    assert reads.thread.ask(Tick())


async def test_a_read_that_raises_is_told_and_the_thread_goes_on(reads: Reads) -> None:
    reads.error = ValueError("odd file")
    reads.thread.start()
    reads.thread.ask(Tick())
    await until(lambda: reads.errors)
    assert reads.answers == []
    reads.error = None
    assert reads.thread.ask(Tick())
    await until(lambda: reads.answers)


async def test_the_thread_ends_when_it_is_stopped(reads: Reads) -> None:
    reads.thread.start()
    reads.thread.ask(Tick())
    await until(lambda: reads.answers)
    reads.thread.stop()
    await until(lambda: not reads.threads[0].is_alive())
    assert reads.threads[0].daemon
