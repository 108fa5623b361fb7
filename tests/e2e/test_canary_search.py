"""The search for marked text finds it however a careless sink has spelled it."""

import base64
import json
from urllib.parse import quote

import pytest

from tests.support.canary import WINDOW, Canaries

MARK = Canaries(seed=7).mint("it")


@pytest.mark.parametrize("start", [0, 7, len(MARK) - WINDOW])
def test_the_search_finds_ten_characters_however_they_are_spelled(start: int) -> None:
    marks = Canaries(seed=7)
    marks.mint("it")
    part = MARK[start : start + WINDOW]
    spelled = [part.encode(), part.upper().encode(), part.lower().encode(), part.encode().hex().encode()]
    spelled += [b"0" + part.encode().hex().encode(), part.encode().hex(" ").encode()]
    spelled += [base64.b64encode(b"ab"[:shift] + part.encode() + b"xyz") for shift in range(3)]
    spelled += [base64.urlsafe_b64encode(b"?>" + part.encode() + b"??")]
    spelled += [b"".join(b"%%%02X" % byte for byte in part.encode()), quote(part).encode()]
    spelled += [b"".join(b"\\u00%02x" % byte for byte in part.encode())]
    spelled += [b"".join(b"\\x%02x" % byte for byte in part.encode())]
    spelled += [part.encode("utf-16-le"), part.encode("utf-16-be"), b"x" + part.encode("utf-16-le")]
    spelled += [json.dumps({"prompt": part}).encode(), repr(part.encode()).encode()]
    for blob in spelled:
        assert marks.found_in(b"line before, " + blob + b" and after") == {"it"}, blob


def test_the_search_finds_nothing_where_nothing_is() -> None:
    marks = Canaries(seed=7)
    marks.mint("it")
    for blob in (b"", MARK[: WINDOW - 1].encode(), b"CANARY", bytes(range(256)) * 40):
        assert marks.found_in(blob) == set()
