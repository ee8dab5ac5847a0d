"""Results of searches as JSON, and back: a value of the wrong kind is an error here, and not somewhere in training."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

Result = TypeVar("Result")

OF_A_KNEE = ("knee", "bytes_per_late_token")
"""Fields of a surface that are left out where it has no knee."""


def to_json(result: Any, without: Collection[str] = ()) -> dict[str, Any]:
    """The fields of a result, and of what is in it, by their names; those in `without` are left out at every depth."""
    return asdict(result, dict_factory=lambda pairs: {name: value for name, value in pairs if name not in without})


def from_json(kind: type[Result], data: object, without: Collection[str] = ()) -> Result:
    """The inverse of `to_json`; raises ValueError for anything that `to_json` would not have written."""
    value: Result = _read(kind, data, kind.__name__, without)
    return value


def _read(kind: Any, data: object, name: str, without: Collection[str]) -> Any:
    if is_dataclass(kind):
        return _read_fields(kind, data, without)
    origin, parts = get_origin(kind), get_args(kind)
    if origin is tuple and isinstance(data, (list, tuple)):
        return tuple(_read(parts[0], item, name, without) for item in data)
    if origin is Mapping and isinstance(data, dict):
        return {key: _read(parts[1], value, f"{name}[{key!r}]", without) for key, value in data.items()}
    if type(data) is kind or (kind is float and type(data) is int):
        return data
    raise ValueError(f"{name} cannot be {data!r}")


def _read_fields(kind: Any, data: object, without: Collection[str]) -> Any:
    """Every field there, and none besides."""
    names = {field.name for field in fields(kind)} - set(without)
    if not isinstance(data, dict) or set(data) != names:
        got = sorted(data) if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"{kind.__name__} has the keys {sorted(names)}, got {got}")
    hints = get_type_hints(kind)
    return kind(**{name: _read(hints[name], value, f"{kind.__name__}.{name}", without) for name, value in data.items()})
