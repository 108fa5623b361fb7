"""Hypothesis strategies for bodies, derived from the types themselves."""

from typing import Any

from hypothesis import strategies as st
from msgspec import inspect

from router_core.record.state import Static, Volatile
from router_core.record.text import is_model_name

_NAME_CHARS = "abcXYZ019._:/@+-"
_PLAIN = st.characters(min_codepoint=0x20, max_codepoint=0x7E)


def _names(most: int) -> st.SearchStrategy[str]:
    return st.text(_NAME_CHARS, min_size=1, max_size=min(most, 40)).filter(is_model_name)


def of(described: inspect.Type, field: str = "", wild: bool = False) -> st.SearchStrategy[Any]:
    """Values of a type. ``wild`` ones ignore ranges and lengths, as a careless origin would."""
    match described:
        case inspect.IntType(ge=low, le=high):
            return st.integers(-5, 2**70) if wild else st.integers(low, high)
        case inspect.StrType(pattern=str() as pattern):
            return st.from_regex(pattern, fullmatch=True, alphabet=st.characters(codec="ascii"))
        case inspect.StrType(max_length=int(most)):
            if field in ("name", "aliases") and most == 128:
                return st.text(max_size=200) if wild else _names(most)
            return st.text(max_size=3 * most) if wild else st.text(_PLAIN, max_size=most)
        case inspect.BytesType(min_length=low, max_length=high):
            if field == "ip":
                return st.sampled_from([bytes(4), bytes(16)])
            return st.binary(min_size=low or 0, max_size=high)
        case inspect.NoneType():
            return st.none()
        case inspect.UnionType(types=types):
            return st.one_of([of(one, field, wild) for one in reversed(types)])
        case inspect.VarTupleType(item_type=item, max_length=int(most)):
            positional = field in ("gpus", "engines")
            return st.lists(
                of(item, field, wild), max_size=most + 3 if wild and not positional else min(most, 3)
            ).map(tuple)
        case inspect.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{one.name: of(one.type, one.name, wild) for one in fields})
    raise AssertionError(described)


volatiles = of(inspect.type_info(Volatile))
statics = of(inspect.type_info(Static))
wild_volatiles = of(inspect.type_info(Volatile), wild=True)
wild_statics = of(inspect.type_info(Static), wild=True)
