"""Checks of the repository itself: commands in pages exist and parse, links lead somewhere, generated text is fresh, pins are plain,
forbidden names are absent, and every recorded defect keeps its test."""

import itertools
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIN = re.compile(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!_-]+")
FORBIDDEN = {
    "a package registry's host": re.compile(
        r"\b(?:files\.)?py" + r"(?:pi\.org|thonhosted)|npm" + r"js\.(?:com|org)|deb\." + r"debian\.org"
    ),
    "a path of one machine": re.compile(r"(?<![\w.])/(?:ho" + r"me|Us" + r"ers|wo" + r"rk|ro" + r"ot)/\w"),
}
REDIRECTIONS = frozenset({">", ">>", "<", "|", "&&"})
ASSIGNMENT = re.compile(r"[A-Z_]+=")
COMMAND_BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)


def tracked_files() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    return [ROOT / name for name in listing.decode().split("\0") if name]


def faults_of_text() -> list[str]:
    faults = []
    for path in tracked_files():
        try:
            text = path.read_text()
        except (UnicodeDecodeError, FileNotFoundError):
            continue
        for what, pattern in FORBIDDEN.items():
            faults += [
                f"{path.relative_to(ROOT)}:{text[: hit.start()].count(chr(10)) + 1}: {what}: {hit.group()}"
                for hit in pattern.finditer(text)
            ]
    return faults


def faults_of_pins() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [f"constraints.txt: not name==version: {line}" for line in lines if not PIN.fullmatch(line)]


def pages() -> list[Path]:
    return [path for path in tracked_files() if path.suffix == ".md" and path.is_file()]


def commands_of(page: str) -> list[list[str]]:
    """Every line of the ``sh`` blocks of ``page`` that starts one of our own commands, as its words."""
    lines = [
        line for block in COMMAND_BLOCK.findall(page) for line in block.replace("\\\n", " ").splitlines()
    ]
    commands = []
    for line in lines:
        words = itertools.takewhile(lambda word: word not in REDIRECTIONS, shlex.split(line, comments=True))
        commands.append(
            list(itertools.dropwhile(lambda word: word == "sudo" or ASSIGNMENT.match(word), words))
        )
    return [
        words for words in commands if words and (words[0] == "pairmesh" or words[0].startswith("scripts/"))
    ]


def faults_of_commands() -> list[str]:
    from agent.cli import parser

    faults = []
    first = [words[0] for words in commands_of((ROOT / "README.md").read_text())[:2]]
    if first != ["scripts/demo", "scripts/test"]:
        faults.append("README.md: its first two commands must be scripts/demo and scripts/test")
    for page in pages():
        name = page.relative_to(ROOT)
        for words in commands_of(page.read_text()):
            if words[0].startswith("scripts/"):
                if not (ROOT / words[0]).is_file():
                    faults.append(f"{name}: no such script: {words[0]}")
                continue
            try:
                parser().parse_args(words[1:])
            except SystemExit as end:
                if end.code:
                    faults.append(f"{name}: pairmesh does not accept: {shlex.join(words)}")
    return faults


def faults_of_links() -> list[str]:
    from scripts.links import faults

    return faults(ROOT, pages())


def faults_of_reference() -> list[str]:
    from scripts import page_tables, reference_pages

    return [f"{path} is stale: run scripts/docs" for path in [*reference_pages.stale(), *page_tables.stale()]]


def defects() -> list[dict[str, str]]:
    return list(tomllib.loads((ROOT / "tests/replay.toml").read_text()).get("defect", []))


def faults_of_replay() -> list[str]:
    faults = []
    for entry in defects():
        file, _, name = entry["test"].partition("::")
        path = ROOT / file
        if not path.is_file() or (
            name and f"def {name.rpartition('::')[2].partition('[')[0]}(" not in path.read_text()
        ):
            faults.append(f"tests/replay.toml: {entry['id']}: no such test: {entry['test']}")
    return faults


def main() -> int:
    sys.path.insert(0, str(ROOT))
    if "--write" in sys.argv[1:]:
        from scripts import page_tables, reference_pages

        reference_pages.write()
        page_tables.write()
    faults = [
        *faults_of_text(),
        *faults_of_pins(),
        *faults_of_commands(),
        *faults_of_links(),
        *faults_of_reference(),
        *faults_of_replay(),
    ]
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
