"""The daemon works under the unit's system call filter, without capabilities and within its limits.

Without a systemd that boots, the sandbox is built from the unit's own lines by libseccomp, which systemd uses too.
"""

import ctypes.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from tests.support.cluster import Cluster, Node, closing, pair, wait_for
from tests.support.fake_nvml import FakeDriver
from tests.support.scripted_engine import ScriptedEngine, Wire, whole

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "systemd" / "pairmesh.service"
LAUNCHER = (sys.executable, str(ROOT / "tests" / "systemd" / "sandbox.py"), str(UNIT))
STRICT = (*LAUNCHER[:2], "--kill", LAUNCHER[2])
"""A call that the unit denies ends the process, so that none is made and shrugged off."""
TASKS_MAX, MEMORY_HIGH_KIB = 64, 300 * 1024

pytestmark = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None or ctypes.util.find_library("seccomp") is None,
    reason="systemd-analyze or libseccomp is missing",
)

FORBIDDEN = {
    "new executable memory": "mmap.mmap(-1, 4096, prot=mmap.PROT_WRITE | mmap.PROT_EXEC)",
    "a packet socket": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "a better priority": "os.setpriority(os.PRIO_PROCESS, 0, -5)",
    "another owner": "os.chown('/tmp', 1, 1)",
    "another root": "os.chroot('/tmp')",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_the_sandbox_denies(what: str) -> None:
    program = f"import mmap, os, socket\n{FORBIDDEN[what]}"
    done = subprocess.run(
        [*LAUNCHER, sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert "PermissionError" in done.stderr


BINDS = """
import asyncio, os, pathlib
from agent.admin.peercred import SocketAdmission
from agent.admin.server import AdminServer

class NoRoutes: pass

async def main():
    server = AdminServer(NoRoutes(), admission=SocketAdmission(uid=os.geteuid(), group=GROUP))
    await server.listen_socket(pathlib.Path("admin.sock"))
    print(oct(pathlib.Path("admin.sock").stat().st_mode & 0o777), pathlib.Path("admin.sock").stat().st_gid)
    await server.aclose()

asyncio.run(main())
"""


@pytest.mark.parametrize("of_folder", [False, True])
def test_the_socket_is_the_groups_without_a_call_that_the_unit_denies(
    tmp_path: Path, of_folder: bool
) -> None:
    """The group is the process's own, or that of a setgid folder."""
    group = os.getegid()
    if of_folder:
        group = 65_534
        try:
            os.chown(tmp_path, -1, group)
        except PermissionError:
            pytest.skip("needs root")
        tmp_path.chmod(0o2750)
    done = subprocess.run(
        [*STRICT, sys.executable, "-c", BINDS.replace("GROUP", str(group))],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert (done.stdout.split(), done.returncode) == (["0o660", str(group)], 0), done.stderr


def facts(process: int) -> dict[str, str]:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


async def test_two_sandboxed_nodes_pair_serve_each_other_and_stop(tmp_path: Path) -> None:
    async def answer(wire: Wire, body: bytes) -> None:
        wire.write(whole(200, b'{"choices":[]}'))

    nodes = [
        Node(name=name, ip=ip, base=tmp_path / name, prefix=STRICT)
        for name, ip in (("alpha", "127.0.0.2"), ("beta", "127.0.0.3"))
    ]
    alpha, beta = nodes
    async with ScriptedEngine({"there": answer}).serving(beta.ip) as url:
        for node, other in ((alpha, beta), (beta, alpha)):
            node.write_settings([f"@{other.name}={other.ip}:{other.ports['mesh']}"])
        (beta.config / "endpoints" / "engine.toml").write_text(f'engine = "openai"\nurl = "{url}"\n')
        async with closing(Cluster(base=tmp_path, nodes=nodes, engines=[])):
            for node in nodes:
                await node.start()
            await pair(nodes)
            await wait_for(lambda: sees(alpha, "beta"), 15, "alpha routes to beta")
            async with aiohttp.ClientSession() as session:
                body = {"model": "there", "messages": [{"role": "user", "content": "hello"}]}
                async with session.post(f"{alpha.api}/v1/chat/completions", json=body) as reply:
                    assert reply.status == 200, await reply.text()
                    assert reply.headers["x-pairmesh-node"].startswith("@beta/")
            for node in nodes:
                assert node.process is not None
                found = facts(node.process.pid)
                assert (found["Seccomp"], found["NoNewPrivs"], int(found["CapEff"], 16)) == ("2", "1", 0)
                assert int(found["Threads"]) < TASKS_MAX
                assert int(found["VmHWM"].split()[0]) < MEMORY_HIGH_KIB
                metrics = await metrics_of(node)
                assert re.search(r"^pairmesh_", metrics, re.MULTILINE)
                node.process.send_signal(signal.SIGHUP)
                assert await node.term() == 0
                assert bad_lines(node.log) == []


async def test_the_drivers_process_reads_its_gpu_in_the_sandbox(tmp_path: Path) -> None:
    driver = FakeDriver(tmp_path / "driver")
    node = Node(name="alone", ip="127.0.0.2", base=tmp_path / "n", prefix=STRICT, more_env=driver.environ)
    node.write_settings([])
    toml = node.config / "pairmesh.toml"
    toml.write_text(toml.read_text().replace('nvml = "off"', 'nvml = "auto"'))
    async with closing(Cluster(base=tmp_path, nodes=[node], engines=[])):
        await node.start()
        await wait_for(lambda: reads(driver), 20, "the GPU is read")
        assert await node.term() == 0
    assert bad_lines(node.log) == []


async def reads(driver: FakeDriver) -> bool:
    return driver.calls().get("nvmlDeviceGetUtilizationRates", 0) > 1


async def sees(node: Node, other: str) -> bool:
    member = (await node.members()).get(other)
    return bool(member and member["routable"] and any(engine["models"] for engine in member["engines"]))


async def metrics_of(node: Node) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"{node.admin}/metrics") as reply:
        assert reply.status == 200
        return await reply.text()


def bad_lines(log: Path) -> list[str]:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line for line in lines if line["level"] in ("warning", "error")]
