"""How the page about the mesh protocol writes the type of a field, from the type in the code."""

from typing import Any

from msgspec import Struct, inspect

_RANGES = {
    (0, 0xFF): "u8",
    (0, 0xFFFF): "u16",
    (0, 0xFFFF_FFFF): "u32",
    (0, 2**63 - 1): "u63",
    (0, 100): "0..100",
    (0, 3): "0..3",
    (1024, 65_535): "port",
}


def fields_of(kind: type[Struct]) -> list[tuple[str, str]]:
    """Name and type of each field, in wire order."""
    described = inspect.type_info(kind)
    assert isinstance(described, inspect.StructType)
    assert described.array_like
    return [(field.name, written(field.type)) for field in described.fields]


def written(described: Any) -> str:
    match described:
        case inspect.IntType(ge=int(low), le=int(high)):
            return _RANGES[low, high]
        case inspect.BytesType(min_length=least, max_length=most):
            if most is None:
                return "bin"
            return f"bin {most}" if least == most else f"bin ≤ {most}"
        case inspect.StrType(max_length=most):
            return "str" if most is None else f"str ≤ {most}"
        case inspect.StructType(cls=cls):
            return cls.__name__
        case inspect.VarTupleType(item_type=item, max_length=most):
            return f"[{written(item)}] ≤ {most}"
        case inspect.UnionType(types=types):
            (known,) = [one for one in types if not isinstance(one, inspect.NoneType)]
            return f"{written(known)}?"
    raise AssertionError(described)
