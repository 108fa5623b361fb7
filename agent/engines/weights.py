"""What the weight file tells that an engine says it would load: the size of the weights, and their descent.

An engine that has not loaded a model tells nothing of its weights, and a first estimate of load time, speed and
memory stands on their size. Of a file no more than its beginning is read, and its name stays here.
"""

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from msgspec.structs import replace

from agent.engines.contract import OwnedModel
from agent.engines.gguf import Descent, descent_of

_SPLIT = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf")
PARTS_MOST = 1_000


def weight_file(arguments: Sequence[str]) -> Path | None:
    """The absolute path after ``--model`` or ``-m`` of a llama-server's arguments, or None."""
    for name, value in pairwise(arguments):
        if name in ("--model", "-m"):
            return absolute_path(value)
    return None


def absolute_path(text: str | None) -> Path | None:
    """``text`` as a path that means the same to everybody, or None."""
    path = Path(text or "")
    return path if path.is_absolute() else None


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


class WeightFiles:
    """The files of one engine, each looked at once; of an engine elsewhere none is."""

    def __init__(self, *, on_this_host: bool) -> None:
        self._on_this_host = on_this_host
        self._descents: dict[Path, Descent] = {}

    async def add_facts(
        self, models: Iterable[OwnedModel], files: Mapping[str, Path | None]
    ) -> list[OwnedModel]:
        """``models`` with what their files (by native id) tell beyond the engine. Of the descent the file knows best."""
        models = list(models)
        if not self._on_this_host:
            return models
        return await asyncio.to_thread(self._added, models, files)

    def _added(self, models: list[OwnedModel], files: Mapping[str, Path | None]) -> list[OwnedModel]:
        named = {file for file in files.values() if file is not None}
        self._descents = {file: self._descents.get(file) or descent_of(file) for file in named}
        return [
            model if (file := files.get(model.native_id)) is None else self._with_file(model, file)
            for model in models
        ]

    def _with_file(self, model: OwnedModel, file: Path) -> OwnedModel:
        descent = self._descents[file]
        return replace(
            model,
            size_bytes=model.size_bytes if model.size_bytes is not None else file_bytes(file),
            base=descent.base or model.base,
            family=descent.family or model.family,
            quant=descent.quant or model.quant,
        )
