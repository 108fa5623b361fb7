"""The least versions this software is safe with, and what is installed.

Older ones have known holes (aiohttp before 3.14.1 pools connections by address alone) or parse in pure
Python, where lenient readings of HTTP and of msgpack were found. ``run`` refuses to start below a floor.
"""

import re
import ssl
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from msgspec import Struct

PYTHON: Final[tuple[int, ...]] = (3, 11)
OPENSSL: Final[tuple[int, ...]] = (3, 0)
PACKAGES: Final[dict[str, tuple[int, ...]]] = {
    "aiohttp": (3, 14, 1),
    "msgpack": (1, 2, 1),
    "zeroconf": (0, 150),
    "msgspec": (0, 20),
    "cryptography": (46,),
    "httptools": (0, 9),
    "uvloop": (0, 22),
    "psutil": (7,),
}


class Installed(Struct, frozen=True, kw_only=True):
    """What this interpreter runs with; a package that is missing is absent from ``packages``."""

    python: tuple[int, ...]
    openssl: tuple[int, ...]
    packages: dict[str, tuple[int, ...]]
    http_parser_in_c: bool
    msgpack_in_c: bool


def installed() -> Installed:
    """Look at this interpreter. Imports what it judges."""
    import msgpack
    from aiohttp import http_parser

    found = {name: _found(name) for name in PACKAGES}
    return Installed(
        python=tuple(sys.version_info[:2]),
        openssl=tuple(ssl.OPENSSL_VERSION_INFO[:2]),
        packages={name: numbers for name, numbers in found.items() if numbers is not None},
        http_parser_in_c=http_parser.HttpRequestParser is not http_parser.HttpRequestParserPy,
        msgpack_in_c=msgpack.Unpacker.__module__ == "msgpack._cmsgpack",
    )


def unmet(have: Installed) -> list[str]:
    """Every floor that ``have`` is below, one sentence each."""
    present = {"Python": have.python, "OpenSSL": have.openssl, **have.packages}
    found = []
    for name, least in {"Python": PYTHON, "OpenSSL": OPENSSL, **PACKAGES}.items():
        numbers = present.get(name, ())
        if numbers < least:
            found.append(f"{name} {_dotted(numbers) or 'is missing'}: {_dotted(least)} or newer is needed")
    if not have.http_parser_in_c:
        found.append("aiohttp runs its pure-Python parser: install it with its C extension")
    if not have.msgpack_in_c:
        found.append("msgpack runs in pure Python: install it with its C extension")
    return found


def _found(name: str) -> tuple[int, ...] | None:
    try:
        return numbers_of(version(name))
    except PackageNotFoundError:
        return None


def numbers_of(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``3.14.1rc2`` is (3, 14, 1)."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
