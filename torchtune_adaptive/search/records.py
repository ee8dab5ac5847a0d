"""Reading back what was written as JSON: a value of the wrong kind is an error here, and not somewhere in training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torchtune_adaptive.memory.peak import Peak

_NUMBER = (int, float)
_LIST = (list, tuple)
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "strategy": str,
    "round_to": str,
    "budget_bytes": int,
    "limit_bytes": int,
    "probes": _LIST,
    "points": _LIST,
    "lines": dict,
    "surfaces": dict,
    "fits_rows": _NUMBER,
    "rows": int,
    "length": int,
    "constant_tokens": int,
    "held_out": bool,
    "held_out_error": _NUMBER,
    "reason": str,
    "peak": dict,
    "phase_bytes": dict,
    "fits": bool,
    "retries": int,
    "seconds": _NUMBER,
    "fixed_bytes": _NUMBER,
    "bytes_per_row": _NUMBER,
    "bytes_per_token": _NUMBER,
    "bytes_per_pair": _NUMBER,
}
"""By the name of the field: names carry units, so a name means one type everywhere."""


def checked(cls: type, data: Any) -> dict[str, Any]:
    """`data` as the keyword arguments of `cls`: every field there, none besides, each of its type."""
    names = {field.name for field in fields(cls)}
    if not isinstance(data, dict) or set(data) != names:
        got = sorted(data) if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"{cls.__name__} has the keys {sorted(names)}, got {got}")
    for name, value in data.items():
        if not isinstance(value, _TYPES[name]) or (isinstance(value, bool) and _TYPES[name] is not bool):
            raise ValueError(f"{cls.__name__}.{name} cannot be {value!r}")
    if cls is Peak and not all(type(count) is int for count in data["phase_bytes"].values()):
        raise ValueError(f"Peak.phase_bytes holds whole bytes, got {data['phase_bytes']}")
    return dict(data)
