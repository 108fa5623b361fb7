"""A booted container: its own systemd, processes and network, over a tree that it cannot change."""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.boot.tree import NotHere

BOOT_S = 60.0
LAYERS = (
    "mount --make-rprivate / && mount -t tmpfs over {base} && mkdir {base}/upper {base}/work {base}/root && "
    "mount -t overlay -o lowerdir={tree},upperdir={base}/upper,workdir={base}/work over {base}/root && "
    "echo there && exec sleep infinity"
)
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def look_for_tools() -> None:
    """Raises ``NotHere`` where the right to boot a container is missing, or a tool for it."""
    if os.geteuid() != 0:
        raise NotHere("a container is booted by root alone")
    for tool in ("systemd-nspawn", "nsenter", "unshare", "setpriv"):
        if shutil.which(tool) is None:
            raise NotHere(f"{tool} is not installed (Debian: apt-get install systemd-container util-linux)")


@dataclass(kw_only=True)
class Container:
    """``root`` is a folder of this host that turns into the container's root in a mount namespace of its own. What a
    container writes is kept until ``close``, over any number of boots, and goes with this process at the latest."""

    tree: Path
    base: Path
    binds: Mapping[str, Path] = field(default_factory=dict)
    _leader: int = 0
    _nspawn: "subprocess.Popen[bytes] | None" = None
    _holder: "subprocess.Popen[bytes] | None" = None

    @property
    def machine(self) -> str:
        return f"pairmesh-{self.base.name}-{os.getpid()}"

    def open(self) -> None:
        """Lay the container's own layer over the tree."""
        self.base.mkdir()
        script = LAYERS.format(base=self.base, tree=self.tree)
        self._holder = subprocess.Popen(
            [*_dies_with_us(), "unshare", "--mount", "sh", "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert self._holder.stdout is not None
        if (said := self._holder.stdout.readline()) != b"there\n":
            raise NotHere(f"no overlay of a tmpfs can be mounted here: {said.decode().strip()}")

    def boot(self) -> float:
        """Boot; seconds until systemd has started everything."""
        assert self._holder is not None
        began = time.monotonic()
        binds = [f"--bind-ro={here}:{there}" for there, here in self.binds.items()]
        with (self.base.parent / f"{self.base.name}.console").open("ab") as console:
            self._nspawn = subprocess.Popen(
                [
                    *_dies_with_us(),
                    *("nsenter", "--target", str(self._holder.pid), "--mount", "--"),
                    *(
                        "systemd-nspawn",
                        "--quiet",
                        "--boot",
                        f"--directory={self.base}/root",
                        "--console=pipe",
                    ),
                    *("--register=no", "--keep-unit", "--private-network", "--link-journal=no"),
                    *(f"--machine={self.machine}", *binds),
                ],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
            )
        while time.monotonic() - began < BOOT_S:
            if self._nspawn.poll() is not None:
                break
            self._leader = _first_process(self._nspawn.pid)
            state = (
                self.run("systemctl", "is-system-running", check=False).stdout.strip() if self._leader else ""
            )
            if state in ("running", "degraded"):
                return time.monotonic() - began
            time.sleep(0.05)
        raise NotHere(f"systemd does not boot in a container here: {self.console()[-500:]}")

    def console(self) -> str:
        return (self.base.parent / f"{self.base.name}.console").read_text(errors="replace")

    def run(
        self, *command: str, check: bool = True, stdin: str | None = None, timeout: float = 120.0
    ) -> "subprocess.CompletedProcess[str]":
        """Run ``command`` in the container as root."""
        done = subprocess.run(
            self._inside(*command),
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
            env={"PATH": PATH, "LANG": "C.UTF-8", "HOME": "/root"},
        )
        assert not check or done.returncode == 0, (
            f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done

    def start(self, *command: str) -> "subprocess.Popen[str]":
        """Have ``command`` run in the container beside everything else; its output is read as it comes."""
        return subprocess.Popen(
            self._inside(*command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            env={"PATH": PATH},
        )

    def login(self, user: str, command: str, *, check: bool = True) -> "subprocess.CompletedProcess[str]":
        """Run ``command`` as ``user`` who has just logged in."""
        return self.run("su", "-", user, "-c", command, check=check)

    def write(self, path: str, text: str) -> None:
        self.run("sh", "-c", 'mkdir -p "$(dirname "$1")" && cat >"$1"', "sh", path, stdin=text)

    def _inside(self, *command: str) -> list[str]:
        return [
            "nsenter",
            "--target",
            str(self._leader),
            "--mount",
            "--uts",
            "--ipc",
            "--net",
            "--pid",
            "--",
            *command,
        ]

    def power_off(self) -> None:
        """As the machine's own button does; whatever it ran is gone then."""
        if self._nspawn is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.run("systemctl", "poweroff", check=False, timeout=30)
            self._nspawn.wait(60)
        self._nspawn.kill()
        self._nspawn.wait()
        self._nspawn = None

    def close(self) -> None:
        self.power_off()
        if self._holder is not None:
            self._holder.kill()
            self._holder.communicate()
        with contextlib.suppress(OSError):
            Path(f"/run/systemd/nspawn/propagate/{self.machine}").rmdir()


def _dies_with_us() -> tuple[str, ...]:
    return ("setpriv", "--pdeathsig", "KILL", "--")


def _first_process(parent: int) -> int:
    """The systemd below nspawn's process, 0 if it is not there yet."""
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            if Path(f"/proc/{child}/comm").read_text().strip() == "systemd":
                return int(child)
    return 0


@contextlib.contextmanager
def opened(container: Container) -> Iterator[Container]:
    try:
        container.open()
        container.boot()
        yield container
    finally:
        container.close()
