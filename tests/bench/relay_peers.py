"""Other proxies beside which the relay is measured, the static upstream before which all stand, and the load.

Routers from PyPI have virtual environments of their own; nginx, haproxy and wrk are used if the host has them. Whoever
cannot be had is ``Absent``, with the reason. Every process is ended by the one that started it.
"""

import contextlib
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.bench.environments import Absent, environment, plain
from tests.support.ports import HeldPort

READY_S = 30.0
CHAT = "/v1/chat/completions"
_UNITS = {"us": 1.0, "ms": 1_000.0, "s": 1_000_000.0}


def program(name: str) -> str:
    """Where ``name`` is; raises ``Absent``."""
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if found is None:
        raise Absent(f"{name} is not installed")
    return found


def from_index(package: str, version: str) -> str:
    """The program of a pinned package, installed on first use; raises ``Absent``."""
    return str(environment(package, version) / "bin" / package)


def vllm_router(upstreams: Sequence[str], port: int, folder: Path) -> list[str]:
    return [
        *(from_index("vllm-router", "0.1.17"), "--host", "127.0.0.1", "--port", str(port)),
        *("--worker-urls", *upstreams, "--policy", "power_of_two", "--prometheus-port", _port()),
    ]


def smg(upstreams: Sequence[str], port: int, folder: Path) -> list[str]:
    return [
        *(from_index("smg", "1.13.0"), "launch", "--host", "127.0.0.1", "--port", str(port)),
        *("--worker-urls", *upstreams, "--policy", "least_load"),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", _port(), "--disable-tokenizer-autoload"),
    ]


def haproxy(upstreams: Sequence[str], port: int, folder: Path) -> list[str]:
    servers = "\n".join(
        f"  server u{number} {url.removeprefix('http://')}" for number, url in enumerate(upstreams)
    )
    config = folder / "haproxy.cfg"
    config.write_text(
        "global\n  nbthread 1\n"
        "defaults\n  mode http\n  option http-keep-alive\n"
        "  timeout connect 600s\n  timeout client 600s\n  timeout server 600s\n"
        f"frontend f\n  bind 127.0.0.1:{port}\n  default_backend b\n"
        f"backend b\n  balance leastconn\n{servers}\n"
    )
    return [program("haproxy"), "-f", str(config)]


Command = Callable[[Sequence[str], int, Path], list[str]]
"""The command of a peer, of its upstreams' URLs, its port, and a folder to write settings to."""

PEERS: dict[str, Command] = {
    "vllm-router": vllm_router,
    "smg": smg,
    "haproxy": haproxy,
}


@contextlib.contextmanager
def peer(name: str, of: Command, ports: Sequence[int], folder: Path, probe: bytes) -> Iterator[int]:
    """The port of a running peer before the upstreams at ``ports``; raises ``Absent``."""
    held = HeldPort()
    command = of([f"http://127.0.0.1:{upstream}" for upstream in ports], held.port, folder)
    with _running(command, folder / f"{name}.log") as process:
        _await(process, f"http://127.0.0.1:{held.port}{CHAT}", probe, name)
        yield held.port


@contextlib.contextmanager
def nginx(answer: bytes, models: bytes, folder: Path) -> Iterator[list[int]]:
    """Two ports of one nginx that answers every POST and every GET with fixed JSON; raises ``Absent``."""
    held = [HeldPort() for _ in range(2)]
    ports = [each.port for each in held]
    listens = " ".join(f"listen 127.0.0.1:{port};" for port in ports)
    temporary = " ".join(
        f"{what}_temp_path {folder}/{what};" for what in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = folder / "nginx.conf"
    config.write_text(
        f"worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log stderr crit;\nevents {{}}\n"
        f"http {{ access_log off; keepalive_requests 1000000; default_type application/json; {temporary}\n"
        f"server {{ {listens} location / {{\n"
        f"if ($request_method = POST) {{ return 200 '{answer.decode()}'; }}\nreturn 200 '{models.decode()}';\n"
        "}}}\n"
    )
    with _running([program("nginx"), "-c", str(config)], folder / "nginx.log") as process:
        _await(process, f"http://127.0.0.1:{ports[1]}/v1/models", None, "nginx")
        yield ports


def wrk(port: int, body: bytes, connections: int, seconds: float, folder: Path) -> tuple[float, float]:
    """(p50 in microseconds, requests a second) of ``connections`` over ``seconds``; every answer must be 2xx."""
    script = folder / "chat.lua"
    script.write_text(
        'wrk.method = "POST"\nwrk.headers["Content-Type"] = "application/json"\n'
        f"wrk.body = [==[{body.decode()}]==]\n"
    )
    command = [program("wrk"), "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--latency"]
    url = f"http://127.0.0.1:{port}{CHAT}"
    told = subprocess.run(
        [*command, "-s", str(script), url], check=True, capture_output=True, text=True
    ).stdout
    half = re.search(r"50%\s+([\d.]+)(us|ms|s)", told)
    rate = re.search(r"Requests/sec:\s+([\d.]+)", told)
    if half is None or rate is None or "Non-2xx" in told or "Socket errors" in told:
        raise RuntimeError(f"wrk against port {port}: {told}")
    return float(half[1]) * _UNITS[half[2]], float(rate[1])


def _port() -> str:
    """A port that was free a moment ago, for what nobody asks there."""
    return str(HeldPort().port)


@contextlib.contextmanager
def _running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out, env=plain()) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def _await(process: subprocess.Popen[bytes], url: str, body: bytes | None, name: str) -> None:
    """Return when ``url`` answers 200."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    until = time.monotonic() + READY_S
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError), opener.open(request, timeout=2):
            return
        time.sleep(0.1)
    raise Absent(f"{name} does not serve: {'it ended' if process.poll() is not None else 'too slow'}")
