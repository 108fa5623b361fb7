"""What a container is made of: a minimal Debian tree and the wheels of what pairmesh needs, made once and cached.

The tree comes from the package sources that this host itself uses. It holds systemd, Python, sudo and nothing that a
minimal system lacks, ``kill`` for one.
"""

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("systemd", "systemd-sysv", "python3", "python3-venv", "sudo")
DOWNLOAD_S = 300.0


class NotHere(Exception):
    """No container can be made on this host; the message says why."""


def cache() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pairmesh-boot"
    base.mkdir(parents=True, exist_ok=True)
    return base


def tree() -> Path:
    """The Debian tree, bootstrapped where the cache has none of these packages and sources."""
    release = platform.freedesktop_os_release()
    suite, sources = release.get("VERSION_CODENAME", ""), sources_of(release.get("VERSION_CODENAME", ""))
    if not suite or not sources:
        raise NotHere("this host's apt knows no sources of its own release")
    made = cache() / f"tree-{_digest(suite, sources, PACKAGES)}"
    if not made.is_dir():
        _whole(made, lambda part: _bootstrap(suite, sources, part))
    return made


def sources_of(suite: str, apt: Path = Path("/etc/apt")) -> str:
    """What this host's apt reads about its own release, one style for the whole: deb822 or one line each."""
    found = {".sources": "", ".list": ""}
    files = [apt / "sources.list", *sorted((apt / "sources.list.d").glob("*"))]
    for path in filter(Path.is_file, files):
        text = path.read_text()
        if path.suffix == ".sources":
            stanzas = [part.strip() for part in re.split(r"\n\s*\n", text)]
            fit = [
                each
                for each in stanzas
                if suite in _field(each, "Suites") and "main" in _field(each, "Components")
            ]
            found[".sources"] += "".join(f"{each}\n\n" for each in fit if "no" not in _field(each, "Enabled"))
        elif path.suffix == ".list":
            lines = [line for line in text.splitlines() if re.match(rf"deb\s.*\s{suite}\s.*\bmain\b", line)]
            found[".list"] += "".join(f"{line}\n" for line in lines)
    return found[".sources"] or found[".list"]


def _field(stanza: str, name: str) -> list[str]:
    found = re.search(rf"^{name}:(.*)$", stanza, re.MULTILINE | re.IGNORECASE)
    return found.group(1).split() if found else []


def _bootstrap(suite: str, sources: str, to: Path) -> None:
    if shutil.which("mmdebstrap") is None:
        raise NotHere("mmdebstrap is not installed (Debian: apt-get install mmdebstrap)")
    packages = ",".join(PACKAGES)
    options = (
        "--variant=minbase",
        "--format=directory",
        "--aptopt=Acquire::Retries 3",
        f"--include={packages}",
    )
    done = subprocess.run(
        ["mmdebstrap", *options, suite, str(to), "-"],
        input=sources,
        capture_output=True,
        text=True,
        check=False,
        timeout=DOWNLOAD_S,
    )
    if done.returncode != 0:
        raise NotHere("mmdebstrap failed: " + " / ".join(done.stderr.strip().splitlines()[-3:]))


def wheels(of: Path) -> Path:
    """Wheels of everything that pairmesh needs to be built and to run, for the Python of the tree ``of``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    pins = (ROOT / "constraints.txt").read_text()
    python = next(path.name for path in sorted((of / "usr/lib").glob("python3.[0-9]*")))
    made = cache() / f"wheels-{_digest(wanted, pins, python, platform.machine())}"
    if not made.is_dir():
        _whole(made, lambda part: _download(wanted, python.removeprefix("python"), part))
    return made


def _download(wanted: list[str], python: str, to: Path) -> None:
    what = ("--only-binary=:all:", "--python-version", python, "--constraint", str(ROOT / "constraints.txt"))
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", *what, "--dest", str(to), *wanted],
        capture_output=True,
        text=True,
        check=False,
        timeout=DOWNLOAD_S,
    )
    if done.returncode != 0:
        raise NotHere("no wheels: " + " / ".join(done.stderr.strip().splitlines()[-2:]))


def _whole(path: Path, make: Callable[[Path], None]) -> None:
    """Have ``make`` fill a folder that appears at ``path`` once it is whole."""
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)
    try:
        make(part)
        part.rename(path)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def checkout(to: Path) -> Path:
    """The working tree as it is now, without what git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)
    return to


def commit_before(to: Path) -> Path | None:
    """The commit before what the working tree is: HEAD if anything was changed since, else the one before it. None where
    the clone does not reach that far."""
    changed = subprocess.run(
        ["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    commit = "HEAD" if changed else "HEAD~1"
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode != 0:
        return None
    to.mkdir(parents=True)
    subprocess.run(["tar", "-x", "-C", str(to)], input=packed.stdout, check=True)
    return to
