"""Settings for people: those in force as TOML, and the schema as a table."""

from collections.abc import Iterator

from agent.settings.fault import toml
from agent.settings.load import Settings
from agent.settings.schema import KEYS


def show(settings: Settings) -> str:
    """Every setting in force as valid TOML that loads to the same settings, each with its source."""
    return "\n".join(_lines(settings)) + "\n"


def _lines(settings: Settings) -> Iterator[str]:
    section = ""
    for key in KEYS:
        head, dot, name = key.path.rpartition(".")
        if dot and head != section:
            section = head
            yield ""
            yield f"[{section}]"
        written = settings.written[key.path]
        yield f"{name} = {toml(written.value)}  # {written.source}"


def reference() -> str:
    """The schema as a Markdown table: key, what it takes, default, meaning."""
    rows = ["| key | takes | default | meaning |", "|---|---|---|---|"]
    for key in KEYS:
        default = "-" if key.default is None else f"`{toml(key.default)}`"
        meaning = f"{key.meaning}; not available in this version" if key.later else key.meaning
        rows.append(f"| `{key.path}` | {key.takes} | {default} | {meaning} |")
    return "\n".join(rows) + "\n"
