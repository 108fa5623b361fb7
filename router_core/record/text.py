"""Text out of records: printable ASCII, as it meets headers, logs and terminals as it is."""

import re
from typing import Final

_MODEL_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")


def is_plain(text: str) -> bool:
    """True if all of ``text`` is printable ASCII."""
    return text.isascii() and text.isprintable()


def plain(text: str) -> str:
    """``text`` with ``?`` for each character that is not printable ASCII."""
    if is_plain(text):
        return text
    return "".join(char if is_plain(char) else "?" for char in text)


def is_model_name(name: str) -> bool:
    """True for ``[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}`` without ``..`` and ``//``."""
    return _MODEL_NAME.fullmatch(name) is not None and ".." not in name and "//" not in name
