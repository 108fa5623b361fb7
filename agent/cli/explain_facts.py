"""The flags of ``pairmesh explain`` that describe a request which nobody sends, one for each fact of the admin API."""

from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from typing import Any, Final

from agent.admin.questions import PROMPT_TOKENS, ExplainBody, takes

_TAKES: Final = takes(ExplainBody)
_LISTED: Final = {"requires": "CAPABILITY", "headers": "'NAME: VALUE'"}
_DIGITS_MOST: Final = 18


def declare(parser: ArgumentParser) -> None:
    """Declare the arguments that describe a request for ``pairmesh explain --model``."""
    asked = parser.add_argument_group(
        "a request that nobody sends",
        f"--model, and what else is to be assumed; {PROMPT_TOKENS:,} prompt tokens unless told otherwise",
    )
    for name, takes_ in _TAKES.items():
        flag = f"--{name.replace('_', '-')}"
        if name == "headers":
            asked.add_argument(
                "--header",
                dest=name,
                action="append",
                metavar=_LISTED[name],
                help="a header; may be repeated",
            )
        elif name == "requires":
            what = takes_.removeprefix("a list, each ")
            asked.add_argument(
                flag, dest=name, action="append", metavar=_LISTED[name], help=f"{what}; may be repeated"
            )
        elif name == "stream":
            asked.add_argument(
                flag, dest=name, action=BooleanOptionalAction, help="an answer in pieces or in one"
            )
        else:
            metavar = "N" if takes_.startswith("a whole number") else "NAME"
            asked.add_argument(flag, dest=name, metavar=metavar, help=takes_)


def facts_of(args: Namespace) -> dict[str, Any]:
    """The command's arguments as the body of ``POST /v1/explain``. Raises ``ValueError`` for what is no header."""
    told = {name: value for name in _TAKES if (value := getattr(args, name)) is not None}
    return {
        name: _headers(value) if name == "headers" else _typed(name, value) for name, value in told.items()
    }


def _typed(name: str, value: Any) -> Any:
    """A number where one is written; whether one is wanted is the daemon's to say."""
    if name == "model" or not isinstance(value, str):
        return value
    return int(value) if value.isdecimal() and len(value) <= _DIGITS_MOST else value


def _headers(lines: list[str]) -> dict[str, str]:
    """Lines of one name are one header, as HTTP has it."""
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = (part.strip() for part in line.partition(":"))
        if not colon or not name:
            raise ValueError(f"a header is 'NAME: VALUE', not {line!r}")
        name = name.lower()
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers
