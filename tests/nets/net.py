"""A net: documents that a part of the product gives for fixed inputs, their marks on file, and the comparison.

A net has lines (a block of decisions, one world, one scenario), each a list of documents. Every document leaves a mark
of a few hex digits, so a difference is found to the document; every so many are kept whole, so it can be read, too.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.nets.canonical import VECTORS, line, mark

MARK: Final = 6
_SHOWN: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Net:
    """``labels`` names the lines, ``run`` gives the documents of one, whatever was run before. Of these every
    ``whole``-th is kept as it is."""

    name: str
    about: str
    labels: Callable[[], list[str]]
    run: Callable[[str], list[Any]]
    whole: int

    @property
    def path(self) -> Path:
        return VECTORS / f"{self.name}.json"


@dataclass(slots=True, kw_only=True)
class Vectors:
    """What is on file of one net: the marks of each line, and whole documents by ``line/place``."""

    marks: dict[str, str] = field(default_factory=dict)
    whole: dict[str, Any] = field(default_factory=dict)

    def add(self, label: str, documents: list[Any], whole: int) -> None:
        """Take in one line."""
        before = sum(self.counts())
        self.marks[label] = "".join([mark(each, MARK) for each in documents])
        for place in range(-before % whole, len(documents), whole):
            self.whole[f"{label}/{place}"] = documents[place]

    def counts(self) -> list[int]:
        """How many documents each line has."""
        return [len(marks) // MARK for marks in self.marks.values()]

    def text(self) -> str:
        """As it stands in the file: one line of text for each line and document."""
        parts = []
        for name, table in (("marks", self.marks), ("whole", self.whole)):
            rows = ",\n".join(f"{json.dumps(key)}: {line(value)}" for key, value in table.items())
            parts.append(f'"{name}": {{\n{rows}\n}}')
        return "{\n" + ",\n".join(parts) + "\n}\n"


def read(net: Net) -> Vectors:
    """What is on file. Raises FileNotFoundError if nothing was recorded."""
    told = json.loads(net.path.read_text())
    return Vectors(marks=told["marks"], whole=told["whole"])


def record(net: Net) -> int:
    """Write the file of a net anew; its size in bytes."""
    vectors = Vectors()
    for label in net.labels():
        vectors.add(label, net.run(label), net.whole)
    return net.path.write_text(vectors.text())


def compare(net: Net, recorded: Vectors, labels: Iterable[str] | None = None) -> list[str]:
    """Every difference between what is on file and what this tree gives, one string each; empty if there is none."""
    told = []
    wanted = list(labels) if labels is not None else net.labels()
    if labels is None:
        told += [f"{net.name} {gone}: is no more" for gone in recorded.marks if gone not in wanted]
    for label in wanted:
        if label not in recorded.marks:
            told.append(f"{net.name} {label}: is new")
            continue
        told += _of_line(net.name, label, net.run(label), recorded)
    return told


def _of_line(net: str, label: str, documents: list[Any], recorded: Vectors) -> Iterator[str]:
    marks = recorded.marks[label]
    known = [marks[at : at + MARK] for at in range(0, len(marks), MARK)]
    if len(known) != len(documents):
        yield f"{net} {label}: {len(documents)} documents, were {len(known)}"
    for place, (document, before) in enumerate(zip(documents, known, strict=False)):
        if mark(document, MARK) == before:
            continue
        at = f"{label}/{place}"
        if at not in recorded.whole:
            yield f"{net} {at}: differs (scripts/nets --show {net}:{at} prints it, here and at another commit)"
            continue
        changes = list(differences(recorded.whole[at], document))
        more = f" and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
        yield f"{net} {at}: " + "; ".join(changes[:_SHOWN]) + more


def differences(old: Any, new: Any, at: str = "") -> Iterator[str]:
    """Where two plain documents differ, as ``path: old -> new``."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted(old.keys() | new.keys()):
            inner = f"{at}.{key}" if at else key
            if key not in new:
                yield f"{inner}: {_short(old[key])} -> gone"
            elif key not in old:
                yield f"{inner}: none -> {_short(new[key])}"
            else:
                yield from differences(old[key], new[key], inner)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for place, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from differences(one, other, f"{at}[{place}]")
    elif line(old) != line(new):
        yield f"{at}: {_short(old)} -> {_short(new)}"


def _short(value: Any) -> str:
    text = line(value)
    return text if len(text) <= 80 else text[:77] + "..."
