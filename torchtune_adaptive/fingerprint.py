"""What the answer of a search depends on: with the same fingerprint it can be taken from `batch_search.json`."""

from collections.abc import Mapping, Sequence
from typing import Any

FACTS = (
    "model",
    "adapter",
    "loss",
    "dtype",
    "sequence_length",
    "world_size",
    "sharding",
    "checkpointing",
    "optimizer",
    "device",
    "torch",
    "budget",
    "search",
)
"""Each of them changes what fits, or (`search`: strategy, rounding, bounds) what is answered."""


def fingerprint(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts, checked to be complete and to be the same again after a detour through JSON.

    More facts than `FACTS` are welcome. Raises ValueError for one that is missing, or that is no plain value: the text
    of an object may be the same where the object is not, or never the same twice.
    """
    if missing := [fact for fact in FACTS if fact not in facts]:
        raise ValueError(f"a fingerprint lacks {', '.join(missing)}; it needs {', '.join(FACTS)}")
    return {name: _plain(facts[name], name) for name in sorted(facts)}


def _plain(value: Any, name: str) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(value[key], f"{name}.{key}") for key in sorted(value)}
    if isinstance(value, Sequence):
        return [_plain(item, f"{name}[{index}]") for index, item in enumerate(value)]
    raise ValueError(f"{name} of a fingerprint is a {type(value).__name__}; give text, numbers, lists or mappings")
