"""Decide from a script's source whether an integer that it reads from the card can become a size.

Reads by `.item()`, `int(...)` and `float(...)` are followed through arithmetic, names, attributes, constant keys and
returns. A number that is only divided, printed, logged or passed to a Triton kernel is no size.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator
from operator import attrgetter
from types import FrameType

_SHOW = {
    "print", "float", "str", "repr", "log", "debug", "info", "warning", "write", "set_postfix", "set_description",
    "add_scalar", "add_scalars", "log_metrics", "isnan", "isfinite",
}  # fmt: skip
_PASS_ON = {"int", "max", "min", "abs", "round", "sum"}
_COUNT = {"fused_linear_cross_entropy_forward"}
"""Functions of libraries (liger) that count labels, and pass the count on to be divided by."""
_Variable = tuple[str, str]
"""A kind of variable (name, attribute, key) and its name."""


class _Source:
    def __init__(self, text: str) -> None:
        self.nodes = list(ast.walk(ast.parse(text)))
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}

    def call_at(self, position: tuple[int | None, ...]) -> ast.Call | None:
        calls = (each for each in self.nodes if isinstance(each, ast.Call))
        at = attrgetter("lineno", "end_lineno", "col_offset", "end_col_offset")
        return next((each for each in calls if at(each) == position), None)

    def reads(self, place: _Variable, near: ast.AST) -> Iterator[ast.expr]:
        """Yield where a variable is read: a name in its function, an attribute or a key in the whole file."""
        scope: ast.AST | None = near
        while scope is not None and not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            scope = self.parents.get(scope)
        for node in self.nodes if scope is None or place[0] != "Name" else ast.walk(scope):
            if isinstance(getattr(node, "ctx", None), ast.Load) and _place(node) == place:
                yield node  # type: ignore[misc]


def may_become_size(frame: FrameType) -> bool:
    """Return whether the number that this frame reads can become a size; True if its source does not tell."""
    return frame.f_code.co_name not in _COUNT and _may_become_size(frame, ("item", "int", "float"))


def _may_become_size(frame: FrameType | None, by: tuple[str, ...] = ()) -> bool:
    source = _source(frame.f_code.co_filename) if frame else None
    if frame is None or source is None:
        return True
    node = source.call_at(list(frame.f_code.co_positions())[frame.f_lasti // 2])
    return node is None or bool(by and _name(node.func) not in by) or _reaches_size(node, source, frame, set())


@functools.lru_cache
def _source(file: str) -> _Source | None:
    try:
        return _Source("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _place(node: ast.AST) -> _Variable | None:
    if isinstance(node, ast.Name | ast.Attribute):
        return type(node).__name__, _name(node)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        return "key", node.slice.value
    return None


def _reaches_size(node: ast.AST, source: _Source, frame: FrameType, seen: set[_Variable]) -> bool:
    above = source.parents.get(node)
    match above:
        case ast.BinOp(op=ast.Div()) | ast.AugAssign(op=ast.Div()) | ast.FormattedValue() | ast.Expr():
            return False
        case ast.Call(func=ast.Subscript()):  # kernel[grid](...)
            return False
        case ast.Call() if above.func is not node and _name(above.func) in _SHOW:
            return False
        case ast.Call() if above.func is not node and _name(above.func) not in _PASS_ON:
            return True
        case ast.Assign() | ast.AugAssign() | ast.AnnAssign():
            for target in above.targets if isinstance(above, ast.Assign) else [above.target]:
                if (place := _place(target)) is None:
                    return True
                if place not in seen:
                    seen.add(place)
                    if any(_reaches_size(each, source, frame, seen) for each in source.reads(place, target)):
                        return True
            return False
        case ast.Return():
            return _may_become_size(frame.f_back)
        case ast.Attribute() if isinstance(source.parents.get(above), ast.Call):  # a method of what was read
            return _reaches_size(above, source, frame, seen)
        case ast.BinOp() | ast.UnaryOp() | ast.keyword() | ast.Dict() | ast.Call():
            return _reaches_size(above, source, frame, seen)
    return True
