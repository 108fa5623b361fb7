"""Settings for people: those in force as TOML, and a schema as a table."""

from collections.abc import Iterator, Mapping

from agent.settings.fault import toml
from agent.settings.reading import Key, Schema, Written


def show(schema: Schema, written: Mapping[str, Written]) -> str:
    """Every setting in force as valid TOML that loads to the same settings, each with its source; of one that may be
    a secret only that it is set."""
    return "\n".join(_lines(schema, written)) + "\n"


def _lines(schema: Schema, written: Mapping[str, Written]) -> Iterator[str]:
    section = ""
    for key in schema.keys:
        head, dot, name = key.path.rpartition(".")
        if dot and head != section:
            section = head
            yield ""
            yield f"[{section}]"
        value = written[key.path]
        if is_hidden(key, value):
            yield f"# {name} is set  # {value.source}"
        else:
            yield f"{name} = {toml(value.value)}  # {value.source}"


def is_hidden(key: Key, found: Written) -> bool:
    """True if the value is not to be shown to anybody."""
    return key.secret and found.value != key.default


def reference(schema: Schema) -> str:
    """A schema as a Markdown table: key, what it takes, default, meaning."""
    rows = ["| key | takes | default | meaning |", "|---|---|---|---|"]
    for key in schema.keys:
        default = "-" if key.default is None else f"`{toml(key.default)}`"
        rows.append(f"| `{key.path}` | {key.takes} | {default} | {key.meaning} |")
    return "\n".join(rows) + "\n"
