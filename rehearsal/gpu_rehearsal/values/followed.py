"""Follow a number that the script has read, to know whether it decides anything or is only averaged, printed or logged.

A followed number is not a float, because C functions would read the value of one unseen: those of torch, numpy and
`math` either ask it for its value, or fail. Then the script is rehearsed without it.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable
from functools import lru_cache
from itertools import islice
from types import FrameType
from typing import Any

import numpy

from gpu_rehearsal.hangs.explain import nodes_of
from gpu_rehearsal.recording.calls import LIBRARIES

_LOGGERS = re.compile(r"/(logging|tensorboard|wandb|mlflow|tqdm|rich)/")
_OUTPUT = re.compile(
    r"print|.*log(ger|ging)?\.(debug|info|warning|error|critical)|.*\.set_(postfix|description)(_str)?|wandb\.log"
    r"|\w*writer\.add_scalar"
)
_HARMLESS = re.compile(
    r"print|float|int|round|str|len|sum|format|.*\.(item|tolist|mean|sum|detach|cpu|numpy|float|max|min|norm|format|join"
    r"|exp|time|perf_counter)"
)
"""Functions that output a number, and those whose results may be parts of the output."""


class _Number:
    """An unknown number, or one that is computed from it."""

    __slots__ = ("place", "value")
    on_decision: Callable[[str, object], object]
    """Called with the place of a number, and what the script gets instead of a number that could be followed. A process
    that is not rehearsed lacks it, so that its use of a number is an error."""

    def __init__(self, value: Any, place: str) -> None:
        self.value, self.place = value, place

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.value)

    def __reduce__(self) -> Any:
        return type(self), (self.value, self.place)

    def __getattr__(self, name: str) -> Any:
        return self._decides(getattr(self.value, name))

    def __repr__(self) -> str:
        return repr(self.value)

    def __format__(self, how: str) -> str:
        return format(self.value, how)

    def __round__(self, digits: int | None = None) -> Any:
        result = round(self.value, digits)
        return self._decides(result) if digits is None else type(self)(result, self.place)

    def _decides(self, result: Any) -> Any:
        _Number.on_decision(self.place, result)
        return result


def _plain(value: Any) -> Any:
    """Return the value of a followed number, and a number of Python for one of numpy."""
    return value.value if type(value) in KINDS else value.item() if isinstance(value, numpy.generic) else value


def _computing(name: str) -> Callable[..., Any]:
    """Return a method for an operation whose result is followed, if the other operand is a number of Python."""
    compute = getattr(operator, name.removeprefix("r"))

    def method(number: _Number, *others: Any) -> Any:
        values = [*map(_plain, (number, *others))]
        result = compute(*(values[::-1] if name.startswith("r") else values))
        kind = _KINDS.get(type(result))
        known = all(isinstance(each, int | float) for each in values)
        return kind(result, number.place) if kind and known else number._decides(result)

    return method


def _deciding(name: str) -> Callable[..., Any]:
    """Return a method that gives the script the value, or a result for which it needs the value."""

    def method(number: _Number, *others: Any) -> Any:
        return number._decides(getattr(number.value, f"__{name}__")(*map(_plain, others)))

    return method


for _name in "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "neg", "pos", "abs":
    setattr(_Number, f"__{_name}__", _computing(_name))
for _name in (
    "lt", "le", "gt", "ge", "eq", "ne", "hash", "bool", "int", "float", "floor", "ceil", "trunc", "mod", "rmod",
    "floordiv", "rfloordiv", "divmod", "rdivmod", "rpow",
):  # fmt: skip
    setattr(_Number, f"__{_name}__", _deciding(_name))
_KINDS: dict[type, Any] = {
    float: type("FollowedFloat", (_Number,), {"__slots__": ()}),
    int: type("FollowedInt", (_Number,), {"__slots__": (), "__index__": _deciding("index")}),
}
"""Followed numbers, by the type of their value."""
for _kind in _KINDS.values():
    _kind.__module__, globals()[_kind.__name__] = __name__, _kind  # to be pickled
KINDS = _KINDS.values()


def follow(on_decision: Callable[[str, object], object]) -> None:
    """Report the use of followed numbers from here on. Let json write them, because the script may read them again."""
    _Number.on_decision = staticmethod(on_decision)
    encode: Any = json.JSONEncoder.default

    def default(encoder: Any, value: Any) -> Any:
        return value._decides(value.value) if type(value) in KINDS else encode(encoder, value)

    json.JSONEncoder.default = default  # type: ignore[method-assign,assignment]


def followed(value: Any, place: str) -> Any:
    """Return a number that reports when the script uses its value; other values are reported at once."""
    if kind := _KINDS.get(type(value)):
        return kind(value, place)
    _Number.on_decision(place, value)
    return value


def is_shown(frame: FrameType) -> bool:
    """Return True if the number that a frame reads or converts is only shown, or only checked for NaN or infinity.

    Another rehearsal tries NaN, if the script contains such a check.
    """
    file = frame.f_code.co_filename
    if file.startswith(LIBRARIES) and _LOGGERS.search(file):
        return True
    position = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), ())
    return None not in position and _shows(file, *position)


@lru_cache(1024)
def _shows(file: str, line: int, end_line: int, column: int, end_column: int) -> bool:
    """Return True if the expression at this position formats a number, checks it, or is a part of an output."""
    position = line, end_line, column, end_column
    nodes = nodes_of(file)
    return any(
        (each.lineno, each.col_offset) <= (line, column) <= _end(each) and _is_output(each.value)
        for each in nodes
        if isinstance(each, ast.Expr)
    ) or any(
        (isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mod))  # of a text: a number has `__rmod__`
        or (isinstance(each, ast.Call) and re.fullmatch(r"(math\.)?is(nan|inf|finite)", ast.unparse(each.func)))
        for each in nodes
        if isinstance(each, ast.expr)
        and position == (each.lineno, each.end_lineno, each.col_offset, each.end_col_offset)
    )


def _end(node: ast.Expr) -> tuple[int, int]:
    return node.end_lineno or 0, node.end_col_offset or 0


def _is_output(value: ast.expr) -> bool:
    inner = [each for each in ast.walk(value) if isinstance(each, ast.Call) and each is not value]
    plain = not any(isinstance(each, ast.NamedExpr | ast.Lambda) for each in ast.walk(value))
    return (
        plain
        and isinstance(value, ast.Call)
        and _OUTPUT.fullmatch(ast.unparse(value.func)) is not None
        and all(_HARMLESS.fullmatch(ast.unparse(each.func)) for each in inner)
    )
