"""Size of a model's weights on this host, from the file an engine says it would load.

An engine that has not loaded a model tells nothing of its weights, and a first estimate of load time, speed and
memory stands on their size. The file is looked at, never opened; its name stays here.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

_SPLIT = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf")
PARTS_MOST = 1_000


def weight_file(arguments: Sequence[str]) -> Path | None:
    """The absolute path after ``--model`` or ``-m`` of a llama-server's arguments, or None."""
    for name, value in pairwise(arguments):
        if name in ("--model", "-m"):
            path = Path(value)
            return path if path.is_absolute() else None
    return None


def file_bytes(path: Path) -> int | None:
    """Bytes of a weight file, all parts of a split one together; None if it, or a part, cannot be looked at."""
    split = _SPLIT.fullmatch(path.name)
    paths = [path]
    if split is not None and int(split["parts"]) <= PARTS_MOST:
        paths = [
            path.with_name(f"{split['stem']}-{part:05}-of-{split['parts']}.gguf")
            for part in range(1, int(split["parts"]) + 1)
        ]
    try:
        return sum(part.stat().st_size for part in paths) or None
    except OSError:
        return None
