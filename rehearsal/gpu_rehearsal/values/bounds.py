"""Bounds of the results of operations, from those of their inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from math import inf
from typing import Any

import torch

from gpu_rehearsal.values.known import Bounds, Known

Given = Mapping[str, Any]
"""The arguments of an operation, by name."""
Found = Sequence[Bounds | None] | None
"""The bounds of each result."""
_LIMITING = {"clamp", "clamp_min", "clamp_max", "minimum", "maximum", "relu", "sigmoid", "tanh", "exp"}
"""Operations that have bounds even if their inputs have none."""
_MONOTONE = _LIMITING | {
    "add", "sub", "rsub", "mul", "div", "floor_divide", "neg", "floor", "ceil", "round", "trunc", "sqrt", "log", "log2",
    "lt", "le", "gt", "ge", "logical_not", "logical_and", "logical_or",
}  # fmt: skip
"""Elementwise operations whose smallest and largest results are at bounds of their inputs."""
_SELECTING = dict.fromkeys(
    ("amax", "amin", "mean", "any", "all", "gather", "index", "index_select", "flip", "roll", "masked_select", "take"),
    ("self",),
) | {
    "cat": ("tensors",), "constant_pad_nd": ("self", "value"), "masked_fill": ("self", "value"), "copy": ("src",),
    "where": ("self", "other"),
}  # fmt: skip
"""Operations whose results are some of the values of these arguments, or between them."""
_FINITE = {"isnan": False, "isinf": False, "isfinite": True}
"""Checks, and their results for finite numbers."""


def bounds_of_results(operation: Any) -> Callable[[Known, Sequence[Any], Given], Found] | None:
    """Return a function that returns the bounds of an operation's results; None if nothing is known about them."""
    schema, overload = operation._schema, operation._overloadname
    name = schema.name.partition("::")[2].rstrip("_")
    rule, arguments = _RULES.get(f"{name}.{overload}", _RULES.get(name)), schema.arguments
    if rule is None or (name != "randperm" and any(each.is_out for each in arguments)):
        return None
    if rule is _at_corners:
        changes_nothing = getattr(torch.ops.aten, name)
        changes_nothing = getattr(changes_nothing, overload if overload in changes_nothing.overloads() else "default")
        rule = partial(rule, changes_nothing, name in _LIMITING)
    names = [each.name for each in arguments]
    defaults = {each.name: each.default_value for each in arguments if each.has_default_value()}

    def bounds(known: Known, args: Sequence[Any], kwargs: Given) -> Found:
        try:
            return rule(known, {**defaults, **dict(zip(names, args, strict=False)), **kwargs})
        except (ArithmeticError, LookupError, NotImplementedError, RuntimeError, TypeError):  # of unusual arguments
            return None

    return bounds


def _at_corners(operation: Any, limits: bool, known: Known, given: Given) -> Found:
    tensors = {key: each for key, each in given.items() if isinstance(each, torch.Tensor)}
    bounds = []
    for each in tensors.values():
        if (found := known.bounds(each)) is None and not limits:
            return None
        bounds.append(found or (-inf, inf))
    types = [torch.bool if each.dtype is torch.bool else torch.float64 for each in tensors.values()]
    results = []
    for corner in product(*bounds):
        values = (torch.tensor(at, dtype=kind, device="cpu") for at, kind in zip(corner, types, strict=True))
        results.append(float(operation(**{**given, **dict(zip(tensors, values, strict=True))})))
    return None if any(map(math.isnan, results)) else [(min(results), max(results))]


def _selected(keys: Sequence[str], known: Known, given: Given) -> Found:
    low, high = inf, -inf
    for each in (given[key] for key in keys):
        for one in each if isinstance(each, list) else [each]:
            found = _of(known, one)
            if found is None:
                return None
            low, high = min(low, found[0]), max(high, found[1])
    return [(low, high)]


def _size(given: Given) -> int:
    """Return the size of the dimension that an operation reduces."""
    tensor, dim = given["self"], given.get("dim")
    dims = dim if isinstance(dim, list) else [] if dim is None else [dim]
    return math.prod(tensor.shape[each] for each in dims) if dims and tensor.ndim else tensor.numel()


def _sum(known: Known, given: Given, *, at_least: int | None = None) -> Found:
    if (found := known.bounds(given["self"])) is None:
        return None
    most = _size(given)
    least = most if at_least is None else at_least
    return [(min(least * found[0], most * found[0]), max(least * found[1], most * found[1]))]


def _of(known: Known, value: Any) -> Bounds | None:
    return known.bounds(value) if isinstance(value, torch.Tensor) else (value or 0,) * 2


def _bitwise(known: Known, given: Given, *, at_most: Callable[..., float]) -> Found:
    """Return the bounds of a conjunction, given `min`, or of a disjunction, given `max`, which is exact for masks."""
    one, other = _of(known, given["self"]), _of(known, given["other"])
    if one is None or other is None or min(one + other) < 0:
        return None
    if given["self"].dtype is torch.bool:
        return [(at_most(one[0], other[0]), at_most(one[1], other[1]))]
    return [(0, min(one[1], other[1]) if at_most is min else one[1] + other[1])]


def _equal(known: Known, given: Given, *, equal: bool) -> Found:
    one, other = _of(known, given["self"]), _of(known, given["other"])
    if one is None or other is None:
        return None
    if one[0] == one[1] == other[0] == other[1]:
        return [(equal, equal)]
    return [(not equal, not equal)] if one[0] > other[1] or other[0] > one[1] else None


def _not(known: Known, given: Given) -> Found:
    low, high = known.bounds(given["self"]) or (0, 1)
    return [(1 - high, 1 - low)] if given["self"].dtype is torch.bool else None


def _remainder(known: Known, given: Given) -> Found:
    by = _of(known, given["other"])
    return [(0, by[1] - (not given["self"].is_floating_point()))] if by and by[0] > 0 else None


def _sorted(known: Known, given: Given) -> Found:
    return [known.bounds(given["self"]), (0, max(0, _size(given) - 1))]


_RULES: dict[str, Callable[..., Found]] = {
    **dict.fromkeys(_MONOTONE, _at_corners),
    **{name: partial(_selected, keys) for name, keys in _SELECTING.items()},
    **dict.fromkeys(("sort", "topk", "max", "min", "kthvalue", "median"), _sorted),
    **dict.fromkeys(("argmax", "argmin"), lambda _, given: [(0, max(0, _size(given) - 1))]),
    **{name: lambda known, _, at=at: [(known.check(at),) * 2] for name, at in _FINITE.items()},
    **dict.fromkeys(("_softmax", "bernoulli"), lambda *_: [(0, 1)]),
    **dict.fromkeys(("bincount", "count_nonzero"), lambda _, given: [(0, given["self"].numel())]),
    "bitwise_and": partial(_bitwise, at_most=min),
    "bitwise_or": partial(_bitwise, at_most=max),
    "bitwise_not": _not,
    "eq": partial(_equal, equal=True),
    "ne": partial(_equal, equal=False),
    "zero": lambda *_: [(0, 0)],
    "sum": _sum,
    "cumsum": partial(_sum, at_least=1),
    "remainder": _remainder,
    "uniform": lambda _, given: [(given["from"], given["to"])],
    "random": lambda *_: None,
    "random.from": lambda _, given: [(given["from"], given["to"] - 1)],
    "random.to": lambda _, given: [(0, given["to"] - 1)],
    "randperm": lambda _, given: [(0, given["n"] - 1)],
    "multinomial": lambda _, given: [(0, given["self"].shape[-1] - 1)],
    "bucketize": lambda _, given: [(0, given["boundaries"].numel())],
    "searchsorted": lambda _, given: [(0, given["sorted_sequence"].shape[-1])],
}
