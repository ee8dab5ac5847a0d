"""Guess the numbers and conditions that a kernel would have computed, and report where a script depends on them."""

from __future__ import annotations

import ast
import functools
import linecache
import math
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType, NoneType
from typing import Any, ClassVar

import numpy
import torch

from torchtune_adaptive.rehearse.hangs import nodes_of
from torchtune_adaptive.rehearse.result import BRANCH, INTEGER, LIBRARY, NUMBER

_HERE, TORCH, _NUMPY = (os.path.dirname(file) + os.sep for file in (__file__, torch.__file__, numpy.__file__))
MANY, MOST_ITERATIONS = 64, 4096
"""A guessed condition ends no loop until it was read `MOST_ITERATIONS` times; after `MANY` times it is reported."""
LARGE_NUMBER = 1e9
"""A number that is read in an inverted condition, instead of 0."""
HARMLESS_READERS = {
    "fused_linear_cross_entropy_forward", "load_balancing_loss_func", "nested_numpify", "__format__",
    "add_node_replacement", "has_overflow",
}  # fmt: skip
"""Functions that read values, but not as sizes: for divisors, losses, metrics, texts, and constants of Inductor."""
FOLLOWED, LOST = 1, 2
"""A number that reports its own use, until `float`, numpy or `math` make it a plain one; and a plain one."""
_LOSE = {"float", "np", "numpy", "statistics", *dir(math)} - {"ceil", "floor", "trunc", "e"}
_SIZE = {"int", "ceil", "floor", "trunc", "range", "arange", "empty", "zeros", "ones", "full", "rand", "randn", "topk"}
"""Functions that take a size or return an integer."""
_CHECK = {"isfinite", "isinf", "isnan", "is_tensor", "isinstance", "len", "str", "shape", "ndim", "size", "dtype"}
"""Functions and attributes that do not depend on finite numbers, or are texts."""


class Guesses:
    """Reports guesses, and decides conditions on unknown values so that loops go on and functions do not return."""

    def __init__(self) -> None:
        self.on_guess: Callable[[str, FrameType], int | None] = lambda what, frame: None
        """Called with a kind of guess and the frame that reads it. It may return the integer to read, or for a
        condition, a number to invert it."""
        self._iterations = Counter[tuple[str, int]]()

    def integer(self, what: str = INTEGER) -> int | None:
        """Report a guess, except in functions that do not read sizes. Return the integer that the user knows."""
        reader = caller()
        return None if reader.f_code.co_name in HARMLESS_READERS else self.on_guess(what, reader)

    def condition(self, guess: bool) -> bool:
        """Return the result of a condition on an unknown value, and report it.

        It is `guess`, unless the condition does nothing but end a loop, an iteration or a function: then it is the
        result with which these go on, which needs the most memory, so it is reported only after many iterations.
        """
        reader = caller()
        place = reader.f_code.co_filename, reader.f_lineno
        if place[0].startswith(TORCH) or reader.f_code.co_name in HARMLESS_READERS:
            return guess
        if any(line.lstrip().startswith("assert") for line in map(_line, (reader, reader.f_back))):
            return True
        if (continues := _result_that_continues(*place)) is not None:
            self._iterations[place] += 1
            if self._iterations[place] == MANY and self.on_guess(BRANCH, reader):
                self._iterations[place] = MOST_ITERATIONS + 1  # inverted: the loop ends
            return continues if self._iterations[place] <= MOST_ITERATIONS else not continues
        return not guess if self.on_guess(BRANCH, reader) else guess

    def number(self) -> float:
        """Return an unknown number that a script converts to a plain float: 0, or a large one if this is inverted."""
        reader = caller()
        file = reader.f_code.co_filename
        if file.startswith(TORCH) or not _condition_at(file, reader.f_lineno):
            return self.leaves(LOST)
        return LARGE_NUMBER if self.on_guess(BRANCH, reader) else 0.0

    def leaves(self, level: int) -> float:
        """Return a number that no object can follow, and report it if a size or a condition of the script uses it."""
        reader = caller()
        unused = LIBRARY.search(reader.f_code.co_filename) or not _decides(reader.f_code, reader.f_lasti, level)
        return 0.0 if unused else float(self.on_guess(NUMBER, reader) or 0)


class GuessedFloat(float):
    """A number that a kernel would have computed. Its comparisons and its conversions to integers are reported."""

    guesses: ClassVar[Guesses]

    def __reduce__(self) -> Any:
        return float, (float(self),)

    def __bool__(self) -> bool:
        return self.guesses.condition(float.__bool__(self))

    def __round__(self, digits: int | None = None) -> Any:  # type: ignore[override]
        return _integer(self, float.__round__) if digits is None else GuessedFloat(float.__round__(self, digits))

    __hash__ = float.__hash__


def _integer(number: GuessedFloat, convert: Callable[[float], int]) -> int:
    return number.guesses.integer() or convert(number)


def _calculating(name: str) -> Callable[..., Any]:
    calculate = getattr(float, name)

    def guess(*numbers: Any) -> Any:
        result = calculate(*numbers)
        if isinstance(result, tuple):
            return tuple(map(GuessedFloat, result))
        return GuessedFloat(result) if type(result) is float else result

    return guess


def _comparing(name: str) -> Callable[[GuessedFloat, object], Any]:
    compare = getattr(float, name)

    def guess(number: GuessedFloat, other: object) -> Any:
        result = compare(number, other)
        place = sys._getframe(1)
        selects = any(f"{each}(" in _line(place) for each in ("min", "max", "sorted"))
        chosen = selects and _condition_at(place.f_code.co_filename, place.f_lineno) is None
        return result if result is NotImplemented or chosen else number.guesses.condition(result)

    return guess


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "divmod"):
    for _each in f"__{_name}__", f"__r{_name}__":
        setattr(GuessedFloat, _each, _calculating(_each))
for _each in "__neg__", "__pos__", "__abs__":
    setattr(GuessedFloat, _each, _calculating(_each))
for _each in "__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__":
    setattr(GuessedFloat, _each, _comparing(_each))
for _each in "__int__", "__trunc__", "__ceil__", "__floor__":
    setattr(GuessedFloat, _each, functools.partialmethod(_integer, getattr(float, _each)))


def caller() -> FrameType:
    """Return the innermost frame outside this folder and numpy. If a thread lacks it, return the main thread's."""
    frame: FrameType | None = sys._getframe(1)
    while frame and frame.f_code.co_filename.startswith((_HERE, _NUMPY)):
        frame = frame.f_back
    return frame or sys._current_frames()[threading.main_thread().ident or 0]


def _line(frame: FrameType | None) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno) if frame else ""


@functools.lru_cache
def _nodes(file: str) -> list[Any]:
    """Return the nodes of a file, without assertions. Those in a function have its name as an attribute `inside`."""
    for function in (each for each in nodes_of(file) if isinstance(each, ast.FunctionDef)):
        for node in ast.walk(function):
            vars(node)["inside"] = function.name
    return [each for each in nodes_of(file) if not isinstance(each, ast.Assert)]


@functools.lru_cache(1024)
def _condition_at(file: str, line: int) -> ast.If | ast.While | ast.IfExp | None:
    conditions = (node for node in _nodes(file) if isinstance(node, ast.If | ast.While | ast.IfExp))
    return next((each for each in conditions if each.test.lineno <= line <= (each.test.end_lineno or 0)), None)


@functools.lru_cache(1024)
def _decides(code: CodeType, instruction: int, level: int) -> bool:
    """Return True if a size or a condition in the file depends on the number that an instruction returns."""
    place, nodes = [*code.co_positions()][instruction // 2], _nodes(code.co_filename)
    levels = Counter[str]()

    def level_of(node: Any) -> int:
        if isinstance(node, ast.expr) and (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset) == place:
            return level
        words = {*(name := _text_of(node)).split(".")}
        if not isinstance(node, ast.AST) or isinstance(node, ast.JoinedStr) or words & _CHECK:
            return 0
        found = max([levels[name], *map(level_of, ast.iter_child_nodes(node))])
        return LOST if found and isinstance(node, ast.Call) and words & _LOSE else found

    for node in nodes * 3:  # a variable may depend on one that is assigned further below
        called = {*_text_of(node).split(".")} if isinstance(node, ast.Call) else set()
        decide = [getattr(node, "test", None), getattr(node, "slice", None), *getattr(node, "ifs", ())]
        if called & _SIZE or (called == {"round"} and len(node.args) == 1):  # not to some digits
            decide += node.args
        if LOST in map(level_of, decide):
            return True
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        values = [getattr(node, "value", None), getattr(node, "iter", None)]
        if "append" in called:
            targets, values = [node.func.value], node.args
        numbered = _text_of(getattr(node, "iter", None)) == "enumerate"  # the first target is a counter
        names = {_text_of(part) for target in targets for part in getattr(target, "elts", [target])[numbered:]} - {""}
        for name in {getattr(node, "inside", "")} if isinstance(node, ast.Return) else names:
            levels[name] = max([levels[name], *map(level_of, values)])
    return False


def _text_of(node: Any) -> str:
    """Return the name of a variable with that of its function, or the text of an attribute or a called function."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Name):
        return f"{getattr(node, 'inside', '')} {node.id}"
    node = getattr(node, "func", node)
    return ast.unparse(node).removeprefix("self.") if isinstance(node, ast.Name | ast.Attribute) else ""


def _result_that_continues(file: str, line: int) -> bool | None:
    """Return the result with which a loop or a function goes on; None if the condition on this line does not only end
    one, or has another branch."""
    at = _condition_at(file, line)
    only = at.body[0] if isinstance(at, ast.If) and len(at.body) == 1 and not at.orelse else None
    value = only.value if isinstance(only, ast.Return) else None
    is_plain = isinstance(value, NoneType | ast.Name | ast.Constant)
    ends = isinstance(only, ast.Break | ast.Continue | ast.Return) and is_plain
    if at is None or not (ends or isinstance(at, ast.While)):
        return None
    nots = (each for each in ast.walk(at.test) if isinstance(each, ast.UnaryOp) and isinstance(each.op, ast.Not))
    return isinstance(at, ast.While) != any(nots)
