"""A run in the foreground of a terminal, and what becomes of it: sddm/sddm#987 and remy/nodemon#1667 are the two ways to
read SIGHUP wrongly, zimbatm/socketmaster#4 is a program that outlived its terminal.
"""

import asyncio
import contextlib
import os
import pty
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.cluster import Node, wait_for

ROOT = Path(__file__).resolve().parents[2]
LOGIN = "import os, sys; os.login_tty(os.open(sys.argv[1], os.O_RDWR)); os.execvp(sys.argv[2], sys.argv[2:])"


@dataclass(kw_only=True)
class Terminal:
    """A window: what runs in it has it as its controlling terminal, and as its input, output and errors."""

    shown: bytearray = field(default_factory=bytearray)

    async def __aenter__(self) -> "Terminal":
        self._window, self._line = pty.openpty()
        os.set_blocking(self._window, False)
        asyncio.get_running_loop().add_reader(self._window, self._read)
        return self

    async def __aexit__(self, *raised: object) -> None:
        self.close()

    @property
    def login(self) -> tuple[str, ...]:
        """What to put before a command."""
        return (sys.executable, "-c", LOGIN, os.ttyname(self._line))

    def types(self, line: str) -> None:
        os.write(self._window, f"{line}\n".encode())

    def close(self) -> None:
        if self._window < 0:
            return
        asyncio.get_running_loop().remove_reader(self._window)
        os.close(self._window)
        os.close(self._line)
        self._window = -1

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            self.shown += os.read(self._window, 65_536)


@asynccontextmanager
async def node_in(terminal: Terminal, base: Path, *shell: str) -> AsyncIterator[Node]:
    """A daemon that runs in ``terminal``, started by ``shell`` if there is one."""
    with tempfile.TemporaryDirectory(prefix="pm-") as short:
        node = Node(name="alone", ip="127.0.0.2", base=Path(short), prefix=(*terminal.login, *shell))
        node.write_settings([])
        await node.start()
        try:
            yield node
        finally:
            with contextlib.suppress(OSError, RuntimeError):
                await node.kill()
            for pid in await asyncio.to_thread(processes_of, short):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def processes_of(folder: str) -> list[int]:
    """Whoever has the folder in its command line or environment."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if folder.encode() in (proc / "cmdline").read_bytes() + (proc / "environ").read_bytes():
                found.append(int(proc.name))
    return found


async def listens(node: Node) -> bool:
    try:
        _, writer = await asyncio.open_connection(node.ip, node.ports["api"])
    except OSError:
        return False
    writer.close()
    return True


async def is_over(node: Node) -> None:
    async def over() -> bool:
        return not await listens(node) and not (node.runtime / "admin.sock").exists()

    await wait_for(over, 10, "the daemon has stopped and left its ports")


async def reloaded(terminal: Terminal, node: Node, times: int) -> None:
    async def told() -> bool:
        return terminal.shown.count(b" config.reloaded ") >= times

    await wait_for(told, 10, "the log tells of the reload")
    assert await listens(node)


async def test_a_run_whose_terminal_is_closed_stops_in_order(tmp_path: Path) -> None:
    async with Terminal() as terminal, node_in(terminal, tmp_path) as node:
        terminal.close()
        await is_over(node)
        assert node.process is not None
        assert await asyncio.wait_for(node.process.wait(), 10) == 0


async def test_a_run_below_a_shell_whose_terminal_is_closed_stops(tmp_path: Path) -> None:
    shell = ("sh", "-c", '"$@"; exit $?', "sh")
    async with Terminal() as terminal, node_in(terminal, tmp_path, *shell) as node:
        terminal.close()
        await is_over(node)


async def test_a_shell_that_hangs_its_jobs_up_before_it_ends_stops_the_run(tmp_path: Path) -> None:
    """As zsh does, and bash with huponexit: the terminal is still there when the signal comes."""
    shell = ("sh", "-mc", '"$@" & read line; kill -HUP $!; sleep 0.3', "sh")
    async with Terminal() as terminal, node_in(terminal, tmp_path, *shell) as node:
        terminal.types("exit")
        await is_over(node)


async def test_a_hangup_by_hand_reloads_while_the_terminal_is_there(tmp_path: Path) -> None:
    async with Terminal() as terminal, node_in(terminal, tmp_path) as node:
        assert node.process is not None
        for times in (1, 2):
            node.process.send_signal(signal.SIGHUP)
            await reloaded(terminal, node, times)
        await asyncio.sleep(1.2)
        assert node.process.returncode is None
        assert await node.term() == 0


async def test_a_run_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    said = tmp_path / "nohup.out"
    under = ("sh", "-c", f'exec nohup "$@" >>{said}', "sh")
    async with Terminal() as terminal, node_in(terminal, tmp_path, *under) as node:
        terminal.close()
        with pytest.raises(RuntimeError, match="not within"):
            await wait_for(lambda: stopped(node), 1.5, "it stops")
        assert await node.term() == 0


async def stopped(node: Node) -> bool:
    return not await listens(node)


async def demo(base: Path, until: str, *flags: str, within_s: float) -> int:
    """Run the demo until it says ``until``, then tell it to end; its exit status."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "scripts/demo.py",
        *flags,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(base), "PYTHONUNBUFFERED": "1"},
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(within_s):
            said = b""
            while until.encode() not in said:
                more = await process.stdout.read(4_096)
                assert more, said.decode()
                said += more
        process.terminate()
        _, status = await asyncio.wait_for(asyncio.gather(process.stdout.read(), process.wait()), 30)
        return int(status)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


async def test_a_demo_that_is_told_to_end_takes_all_with_it() -> None:
    with tempfile.TemporaryDirectory(prefix="pm-") as short:
        assert await demo(Path(short), "pairing them by file", within_s=60) == 143
        assert processes_of(f"{short}/") == []
        assert list(Path(short).iterdir()) == []


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_a_demo_that_was_kept_takes_all_with_it_when_it_is_told_to_end() -> None:
    with tempfile.TemporaryDirectory(prefix="pm-") as short:
        assert await demo(Path(short), "gamma: OpenAI", "--keep", within_s=240) == 0
        assert processes_of(f"{short}/") == []
        assert list(Path(short).iterdir()) == []
