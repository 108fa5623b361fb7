"""What is wrong with a settings file: one value per fault, so that all can be told at once."""

from dataclasses import dataclass

SHOWN = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing wrong. ``file`` is the file's name or ``flags``; ``key`` the dotted key, empty for the file
    itself; ``value`` the offending value as it would be written, ``allowed`` what would be accepted, ``nearest``
    the known key an unknown one resembles."""

    file: str
    key: str
    problem: str
    value: str | None = None
    allowed: str | None = None
    nearest: str | None = None

    def __str__(self) -> str:
        text = f"{self.file}: {self.key}: {self.problem}" if self.key else f"{self.file}: {self.problem}"
        if self.value is not None:
            text += f": {self.value}"
        if self.allowed is not None:
            text += f"; allowed: {self.allowed}"
        if self.nearest is not None:
            text += f"; did you mean {self.nearest}?"
        return text


def shown(value: object) -> str:
    """``value`` in TOML's spelling where that is short, cut to a readable length."""
    text = toml(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def toml(value: object) -> str:
    """``value`` as a TOML value. Takes what a TOML reader returns: text, numbers, booleans, lists, tables."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return '"' + "".join(_escaped(char) for char in value) + '"'
        case list() | tuple():
            return "[" + ", ".join(toml(item) for item in value) + "]"
        case dict():
            return "{" + ", ".join(f"{toml(str(key))} = {toml(item)}" for key, item in value.items()) + "}"
        case _:
            return str(value)


def _escaped(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    return char if char.isprintable() else f"\\U{ord(char):08x}"
