"""Names that tests, benchmarks and tools import exist: a moved module fails here first."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.unit.source import ROOT, tree_of

PLACES = ("tests", "benchmarks", "tools", "torchtune_adaptive")
FILES = sorted(path for place in PLACES for path in (ROOT / place).rglob("*.py"))


def file_of(module: str) -> Path | None:
    at = ROOT / module.replace(".", "/")
    return next((path for path in (at.with_suffix(".py"), at / "__init__.py") if path.exists()), None)


@cache
def names_in(path: Path) -> frozenset[str]:
    """Return every name bound anywhere in a module."""
    bound: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {alias.asname or alias.name for alias in node.names}
    return frozenset(bound)


def missing_in(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").partition(".")[0] not in PLACES:
            continue
        module = node.module or ""
        found = file_of(module)
        for alias in node.names:
            known = found is not None and alias.name in names_in(found)
            if not known and file_of(f"{module}.{alias.name}") is None:
                yield f"{module}.{alias.name}"


@pytest.mark.parametrize("place", PLACES)
def test_imported_names_exist(place: str) -> None:
    files = [path for path in FILES if path.is_relative_to(ROOT / place)]
    assert len(files) > 3
    missing = {str(path.relative_to(ROOT)): found for path in files if (found := [*missing_in(path)])}
    assert missing == {}
