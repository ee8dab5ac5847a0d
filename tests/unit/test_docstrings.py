"""What a reader is told about a name where it is defined, read from the source."""

import ast
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.unit.source import FILES, ROOT, tree_of

RECIPES = sorted((ROOT / "recipes").glob("*.py"))
LEANING = ("Of ", "That ", "Those ", "Which ")
"""First words that lean on the name above them: read alone, such a sentence has no subject."""

Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def field_docstrings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Fields and constants, each with the string that follows it."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for field, after in pairwise(body if isinstance(body, list) else []):
            if isinstance(field, ast.Assign | ast.AnnAssign) and (text := _string(after)) is not None:
                yield ast.unparse(field), text


def _string(node: ast.stmt) -> str | None:
    value = node.value if isinstance(node, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def other_docstrings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, Documented):
            yield node.name, ast.get_docstring(node) or ""


@pytest.mark.parametrize("path", [*FILES, *RECIPES], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_docstring_has_a_subject_of_its_own(path: Path) -> None:
    told = [*field_docstrings(tree_of(path)), *other_docstrings(tree_of(path))]
    assert [(name, text) for name, text in told if text.startswith(LEANING)] == []
