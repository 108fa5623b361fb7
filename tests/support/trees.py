"""Folder trees that stand for procfs, sysfs and cgroup mounts."""

from collections.abc import Mapping
from pathlib import Path

from agent.sampling.files import Roots

PSI = "some avg10=0.00 avg60=0.00 avg300=0.00 total={some}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total={full}\n"
V2_MOUNT = "29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"


def plant(root: Path, files: Mapping[str, str]) -> Path:
    """Write ``files`` (by path below ``root``), making folders as needed."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def roots(
    root: Path,
    *,
    proc: Mapping[str, str] | None = None,
    sys: Mapping[str, str] | None = None,
    cg: Mapping[str, str] | None = None,
    dev: Mapping[str, str] | None = None,
) -> Roots:
    """Mounts below ``root`` with these files."""
    for name, files in (("proc", proc), ("sys", sys), ("cg", cg), ("dev", dev)):
        (root / name).mkdir(parents=True, exist_ok=True)
        plant(root / name, files or {})
    return Roots(proc=root / "proc", sys=root / "sys", cg=root / "cg", dev=root / "dev")
