"""Choose the values that a script reads from a null device: usual ones, or random ones in a second rehearsal.

If both rehearsals allocate the same memory, no allocation depends on the values.
"""

from __future__ import annotations

import ast
import functools
import linecache
import math
import os
import random
import re
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from types import FrameType, NoneType
from typing import Any

import numpy
import torch

from gpu_rehearsal.adapters import folders_with_adapters
from gpu_rehearsal.hangs.explain import nodes_of
from gpu_rehearsal.values.followed import follow, followed, is_shown
from gpu_rehearsal.values.known import Bounds

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_TORCH, _NUMPY = (os.path.dirname(file) + os.sep for file in (torch.__file__, numpy.__file__))
_MOST = 2**24
"""Wider bounds are not those of a size."""
MOST_ITERATIONS = 4096
"""A guessed condition ends no loop until it was read this many times."""
_NO_PLACE = re.compile(f"{re.escape(_TORCH)}|{re.escape(_PACKAGE)}|<|.*/torchinductor_")
_LBFGS = f"{_TORCH}optim/lbfgs.py"
_NOT_DRAWN = {"_maybe_opt_step", "has_overflow", "add_node_replacement"}
"""Functions that read whether gradients are finite, or a constant to compile."""
_COLLECTIVES = r"torch/distributed/(distributed_c10d|c10d_logger)\.py$"


class Guesses:
    """The values that a script reads, and the places where it reads them."""

    def __init__(self) -> None:
        self.kept: Collection[str] | None = None
        """Values are random, except at these places (`file:line`); None: all are the usual ones. They depend only on
        the text of the line and on how often it was reached."""
        self.fixed: Mapping[str, float] = {}
        """The values that the user states, by place. Further rehearsals use them only if one expression reads them."""
        self.largest: Collection[str] = ()
        """Places where values are not the usual ones, but the largest; 1 if they have no bounds."""
        self.not_finite = False
        """True: most floats are NaN, and checks for NaN and infinity find them."""
        self.decides_apart = False
        """True: conditions that end an iteration or a function are random, too, as on no other rank."""
        self.on_read: Callable[[str, bool], object] = lambda place, is_check: None
        """Called with each place that reads an unknown value, and whether it checks for NaN or infinity."""
        self.on_decision: Callable[[str], object] = lambda place: None
        """Called with the place of each unknown value that may decide something, and not only be shown."""
        self.follows = False
        """True: numbers from `item()` are followed until the script compares or converts them."""
        self.on_routing: Callable[[str], object] = lambda place: None
        """Called with each place that counts the tokens of experts."""
        self._times = Counter[str]()
        self._readers = defaultdict[str, set[tuple[object, int]]](set)
        """By place: the instructions that read values."""
        self._is_item, self._item = False, ""
        """True while `item()` reads a number; its place, if it is unknown."""
        self._drawn: tuple[random.Random, int] | None = None
        """The source of the last number, if it was random, and how often its place was read."""

    def number(self, bounds: Bounds | None = None) -> float:
        """Return an unknown float."""
        reader = caller()
        if reader.f_code.co_name == "_get_value":  # on the device after a state was loaded; optimizers divide by it
            return 1.0
        if reader.f_code.co_filename == _LBFGS:  # which ends a step if the loss stays the same
            self._times[_LBFGS] += 1
            return -float(self._times[_LBFGS])
        place, chance = self._read()
        if place in self.fixed and not chance:
            return self.fixed[place]
        if chance:
            self._drawn = chance, self._times[place]
            found = _random_float(*self._drawn)
            return _within(bounds, *self._drawn, found) if bounds else found
        return math.nan if self._is_nan(place) else self._usual(place, bounds, 0.0)

    def follow(self, read: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        """Wrap a function that reads a number. If this is random, so are the results of comparing it. Otherwise, note
        whether it decides something."""

        def item(tensor: torch.Tensor) -> Any:
            self._drawn, self._item, self._is_item = None, "", True
            try:
                found = read(tensor)
            finally:
                self._is_item = False
            found = followed(found, self._item) if self._item else found
            return _random_number(found, partial(_compare, self.decides_apart, *self._drawn)) if self._drawn else found

        follow(self._decides)
        return item

    def _decides(self, place: str, result: object = None) -> None:
        """Note that a followed number decides something, unless this result only avoids an error or is only shown."""
        if is_shown(reader := caller()):
            return
        _, continues, only_raises = _condition_of(reader)
        if not (only_raises and result is continues):
            self.on_decision(place)

    def duration(self, usual: float) -> float:
        """Return an unknown time between two events, except to an autotuner. Of two, the second is shorter."""
        if re.search("/triton/|/torch/|torchinductor_", caller().f_code.co_filename):
            return usual

        def draw(chance: random.Random, times: int) -> float:
            value = usual * chance.uniform(0.5, 1) * (0.1, 10)[times % 2]
            return _random_number(value, partial(_compare, self.decides_apart, chance, times))  # type: ignore[no-any-return]

        return self._choose(usual, draw)

    def integer(self, bounds: Bounds | None = None) -> int:
        """Return an unknown integer."""

        def draw(chance: random.Random, times: int) -> int:
            self._drawn = chance, times
            found = _random_integer(chance, times)
            return int(_within(bounds, chance, times, found)) if bounds else found

        return int(self._choose(_nearest(bounds, 0), draw, _largest(bounds)))

    def condition(self, usual: bool) -> bool:
        """Return the result of a condition on an unknown value.

        A condition that only ends a loop, an iteration or a function usually gets the result with which these go on,
        because this needs the most memory. A condition that only raises an error never raises it, unless the script
        catches it.
        """
        reader = caller()
        _, continues, only_raises = _condition_of(reader)
        if reader.f_code.co_filename == _LBFGS:  # needs the most memory if it goes on and keeps each direction
            return continues is not False
        if only_raises:
            return usual if continues is None else continues
        if continues is not None and not self.decides_apart and not reader.f_code.co_filename.startswith(_TORCH):
            usual = continues if self._times[place_of(reader)] < MOST_ITERATIONS else not continues
        return bool(self._choose(usual, _random_condition, usual or continues is None))

    def check(self, finite: bool) -> bool:
        """Return the result of a check for NaN or infinity, given that for finite numbers."""
        place = self._read(is_check=True)[0]
        if not self.not_finite or place in self.fixed:
            return bool(self.fixed.get(place, finite))
        only_raises = _condition_of(caller())[2]
        return finite != (self._is_nan(place) and not only_raises)

    def _is_nan(self, place: str) -> bool:
        """Return True if this read is NaN. Every third is not, so that a script that skips such steps takes others."""
        return self.not_finite and place != "" and self._times[place] % 3 != 2

    def values(self, tensor: torch.Tensor, usual: bool, bounds: Bounds | None = None) -> None:
        """Fill a tensor on the host with unknown values."""
        place, chance = self._read()
        if place in self.fixed and not chance:
            tensor.fill_(self.fixed[place])
        elif chance is None:
            is_nan = self._is_nan(place) and tensor.is_floating_point()
            tensor.fill_(math.nan if is_nan else self._usual(place, bounds, usual))
        elif tensor.dtype is torch.bool:
            tensor.copy_(torch.rand(tensor.shape, generator=_generator(chance)) < 0.5)
        elif not tensor.is_complex():
            times, whole = self._times[place], not tensor.is_floating_point()
            usual_high = _random_integer(chance, times) if whole else _random_float(chance, times)
            low, high = bounds if bounds and max(map(abs, bounds)) < _MOST else (0, usual_high)
            shares = torch.rand(tensor.shape, generator=_generator(chance))
            tensor.copy_(low + ((high - low + whole) * shares).clamp(max=high - low))

    def received(self, values: torch.Tensor) -> None:
        """Change integers that a line of the script, not of a library, receives from other ranks."""
        frame = caller()
        while frame.f_back and re.search(_COLLECTIVES, frame.f_code.co_filename):
            if "object" in frame.f_code.co_name:  # the integers are sizes of pickled objects
                return
            frame = frame.f_back
        place, chance = ("", None) if "-packages/" in frame.f_code.co_filename else self._read()
        if chance is not None:
            share = torch.rand(values.shape, generator=_generator(chance)) if self._times[place] > 1 else torch.ones(())
            values.copy_(share > 0.5 if values.dtype is torch.bool else values // 2 + share * (1.5 * values.abs() + 2))

    def distinct(self, most: float) -> float | None:
        """Return how many values are distinct: what the user states for this place, or the most; None for the usual."""
        place = place_of(caller())
        return self.fixed.get(place, most if place in self.largest else None)

    def selected(self, size: int) -> int:
        """Return how many elements a mask of this size selects, if it is too large to choose which."""
        return int(self._choose(size, lambda chance, _: chance.randrange(size)))

    def offset(self, size: int) -> int:
        """Return by how much to rotate indices below `size` that a kernel would have selected."""
        return int(self._choose(0, lambda chance, _: chance.randrange(size)))

    def routing(self) -> None:
        """Report the place that counts the tokens of experts, unless it computes a loss."""
        if caller().f_code.co_name != "load_balancing_loss_func":
            self.on_routing(place_of(caller()))

    def _usual(self, place: str, bounds: Bounds | None, value: float) -> float:
        return _largest(bounds) if place in self.largest else _nearest(bounds, value)

    def _choose(self, usual: float, draw: Callable[[random.Random, int], float], largest: float | None = None) -> float:
        """Report a read, and return the value that the user states, a random one, the largest or the usual one."""
        place, chance = self._read()
        if place in self.fixed and not chance:
            return self.fixed[place]
        if chance is not None:
            return draw(chance, self._times[place])
        return usual if largest is None or place not in self.largest else largest

    def _read(self, *, is_check: bool = False) -> tuple[str, random.Random | None]:
        """Report the place of a read. Return it with a source of random values; None if it gets the usual one."""
        reader = caller()
        place = place_of(reader)
        file, functions = reader.f_code.co_filename, {reader.f_code.co_name}
        functions |= {reader.f_back.f_code.co_name} if reader.f_back else set()  # around a generator expression
        in_library = place.startswith(folders_with_adapters())
        if functions & _NOT_DRAWN or file == torch._tensor_str.__file__ or in_library:
            return "", None
        self.on_read(place, is_check)
        self._times[place] += 1
        readers = self._readers[place]
        readers.add((reader.f_code, reader.f_lasti))
        is_stated = place in self.fixed and len(readers) == 1
        if self._is_item and self.follows and not is_stated:
            self._item = place
        elif not is_check and not is_stated and not is_shown(reader):
            self.on_decision(place)
        if self.kept is None or place in self.kept or is_stated:
            return place, None
        file, _, line = place.rpartition(":")  # with another number, the line reads the same values
        return place, random.Random(f"{linecache.getline(file, int(line))} {self._times[place]}")


def _random_float(chance: random.Random, times: int) -> float:
    """Return 2.5, then a larger number, then in turns a probability and a number that may be negative."""
    if times <= 2:
        return (2.5, 10 ** chance.uniform(0.5, 1.2))[times - 1]
    size: float = 10 ** chance.uniform(0, 2)
    return chance.random() if times % 2 else size if times % 4 else -size


def _random_condition(chance: random.Random, times: int) -> bool:
    """Return mostly True four times, then mostly False, because conditions of successive steps often have the same
    result. Then do the same 32 times each, because shares of many results may decide."""
    is_late = (times - 9) // 32 % 2 if times > 8 else times > 4
    return times == 1 or chance.random() < (0.1 if is_late else 0.9)


def _compare(apart: bool, chance: random.Random, times: int, usual: bool) -> bool:
    """Return the result of comparing a random number: a random one, except that functions and iterations go on unless
    this rank decides apart."""
    at, continues, only_raises = _condition_of(caller())
    if only_raises or (not apart and isinstance(at, ast.If) and continues is not None):
        return usual if continues is None else continues
    return _random_condition(chance, times)


def _nearest(bounds: Bounds | None, value: float) -> float:
    return max(bounds[0], min(bounds[1], value)) if bounds else value


def _largest(bounds: Bounds | None) -> float:
    return bounds[1] if bounds and max(map(abs, bounds)) < _MOST else _nearest(bounds, 1)


def _within(bounds: Bounds, chance: random.Random, times: int, other: float) -> float:
    """Return in turns the largest number within bounds and a random one; instead of one without limit, another."""
    low, high = bounds
    if high - low > _MOST:
        return _nearest(bounds, other)
    return high if times % 2 else low + chance.random() * (high - low)


def _random_integer(chance: random.Random, times: int) -> int:
    """Return an integer that is often small, because it may be an index."""
    if times == 1:
        return 1
    return chance.randint(0, min(times, 8)) if chance.random() < 0.7 else int(10 ** chance.uniform(1, 4))


def _generator(chance: random.Random) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(chance.getrandbits(32))


class _Random:
    """A random number: results of comparisons are random, too, so that any threshold is passed. So are those of numbers
    that are computed from it."""

    compare: Callable[[bool], bool] = bool
    """Returns the result of a comparison, given the real one."""

    def __reduce__(self) -> tuple[Any, ...]:
        kind: Any = float if isinstance(self, float) else int
        return kind, (kind(self),)


_RANDOM: dict[type, Any] = {kind: type(f"Random_{kind.__name__}", (_Random, kind), {}) for kind in (int, float)}


def _random_number(number: Any, compare: Callable[[bool], bool]) -> Any:
    """Return a number whose comparisons have the results of `compare`."""
    found = _RANDOM[int if isinstance(number, int) else float](number)
    found.compare = compare
    return found


def _randomly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of a random number."""

    def call(number: Any, *args: Any) -> Any:
        result = function(number, *args)
        if result is True or result is False:
            return number.compare(result)
        return _random_number(result, number.compare) if type(result) in (int, float) else result

    return call


for _name in "lt", "le", "gt", "ge", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "neg", "abs":
    for _kind, _random in _RANDOM.items():
        setattr(_random, f"__{_name}__", _randomly(getattr(_kind, f"__{_name}__")))


def caller() -> FrameType:
    """Return the innermost frame outside this package and numpy. If a thread lacks it, return the main thread's."""
    frame: FrameType | None = sys._getframe(1)
    while frame and frame.f_code.co_filename.startswith((_PACKAGE, _NUMPY)):
        frame = frame.f_back
    return frame or sys._current_frames()[threading.main_thread().ident or 0]


def place_of(reader: FrameType) -> str:
    """Return file and line of the innermost frame outside torch."""
    frame: FrameType | None = reader
    while frame and re.match(_NO_PLACE, frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or reader
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _condition_of(reader: FrameType) -> tuple[ast.If | ast.While | ast.Assert | None, bool | None, bool]:
    """Return the condition that a frame evaluates, the result with which the script goes on, and True if another
    result only raises an error that the script does not catch."""
    frames = reader, reader.f_back or reader
    at, around = (_condition_at(each.f_code.co_filename, each.f_lineno) for each in frames)
    if at is None and isinstance(around, ast.Assert):
        return at, True, not _is_caught("AssertionError", reader)
    raises = at if isinstance(at, ast.Assert) else at.body[0] if isinstance(at, ast.If) else None
    if not isinstance(raises, ast.Assert | ast.Raise):
        return at, _result_that_continues(at), False
    error = getattr(raises, "exc", None)
    name = ast.unparse(error).partition("(")[0] if error else "AssertionError"
    return at, _result_that_continues(at), not _is_caught(name, reader)


def _is_caught(error: str, frame: FrameType | None) -> bool:
    """Return True if this function, or one that has called it, catches this error."""
    while frame and not _catches(frame.f_code.co_filename, frame.f_lineno, error):
        frame = frame.f_back
    return frame is not None


@functools.lru_cache(1024)
def _catches(file: str, line: int, error: str) -> bool:
    """Return True if a line is in a `try` with a handler of this error that does not raise another."""
    handlers = (
        handler
        for each in nodes_of(file)
        if isinstance(each, ast.Try) and each.handlers and each.lineno <= line < each.handlers[0].lineno
        for handler in each.handlers
    )
    return any(
        handler.type
        and error in ast.unparse(handler.type)
        and not any(isinstance(each, ast.Raise) for each in ast.walk(handler))
        for handler in handlers
    )


@functools.lru_cache(1024)
def _condition_at(file: str, line: int) -> ast.If | ast.While | ast.Assert | None:
    conditions = (node for node in nodes_of(file) if isinstance(node, ast.If | ast.While | ast.Assert))
    return next((each for each in conditions if each.test.lineno <= line <= (each.test.end_lineno or 0)), None)


def _result_that_continues(at: ast.If | ast.While | ast.Assert | None) -> bool | None:
    """Return the result with which a loop or a function goes on; None if the condition does more than to end one."""
    only = at.body[-1] if isinstance(at, ast.If) and not at.orelse else None
    only = only if isinstance(only, ast.Break) or (isinstance(at, ast.If) and len(at.body) == 1) else None
    value = only.value if isinstance(only, ast.Return) else None
    is_plain = isinstance(value, NoneType | ast.Name | ast.Constant)
    ends = isinstance(only, ast.Break | ast.Continue | ast.Return | ast.Raise) and is_plain
    if at is None or not (ends or isinstance(at, ast.While | ast.Assert)):
        return None
    nots = (each for each in ast.walk(at.test) if isinstance(each, ast.UnaryOp) and isinstance(each.op, ast.Not))
    return isinstance(at, ast.While | ast.Assert) != any(nots)
