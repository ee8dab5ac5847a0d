"""Names that tests, examples, configs and pages use exist, and recipes with the same training have the same code."""

import ast
import pkgutil
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import torchtune_adaptive
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


ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
USERS = sorted(path for folder in ("examples", "benchmarks", "tools") for path in (ROOT / folder).glob("*.py"))
PUBLIC = {
    *(("torchtune_adaptive", name) for name in torchtune_adaptive.__all__),
    ("torchtune_adaptive.rehearse", "RehearsalResult"),
    ("torchtune_adaptive.rehearse", "rehearse"),
    ("torchtune_adaptive.hf", "AdaptiveArguments"),
    ("torchtune_adaptive.hf", "AdaptiveMixin"),
    ("torchtune_adaptive.hf", "AdaptiveTrainer"),
    ("torchtune_adaptive.hf", "adaptive"),
    ("torchtune_adaptive.skyrl", "adaptive"),
}


def used(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the library's names that a file imports, with their modules."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchtune_adaptive"):
            yield from ((node.module or "", alias.name) for alias in node.names)
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.startswith("torchtune_adaptive"))


def test_examples_use_only_public_names() -> None:
    names = {each for path in EXAMPLES for each in used(path)}
    assert ("torchtune_adaptive", "StepRunner") in names
    assert names <= PUBLIC


@pytest.mark.parametrize("path", USERS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_users_do_not_access_private_attributes_of_runners(path: Path) -> None:
    assert re.findall(r"runner\._\w+", path.read_text(encoding="utf-8")) == []


def test_package_exports_the_names_on_its_page() -> None:
    page = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    names = ",".join(re.findall(r"from torchtune_adaptive import ([\w, ]+)", page))
    shown = {name.strip() for name in names.split(",")}
    assert {"StepRunner", "RowLimit"} <= shown <= set(torchtune_adaptive.__all__)
    assert all(hasattr(torchtune_adaptive, name) for name in torchtune_adaptive.__all__)


WRITTEN = re.compile(r"(?<![\w/.-])torchtune_adaptive(?:\.\w+)+")
MEANT_NOT_TO_BE = {"torchtune_adaptive.tune.plan.no_such_module"}
NEED_A_FRAMEWORK = {
    "torchtune_adaptive.skyrl",
    "torchtune_adaptive.skyrl.passes",
}
"""tests/skyrl imports them, where SkyRL is installed."""


def dotted_paths() -> Iterator[tuple[str, str]]:
    """Yield every dotted path of the package in strings, configs and pages, with its file."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    for name in listed.split("\0"):
        path = ROOT / name
        if path.suffix in {".md", ".toml", ".yaml"} and name != "CHANGELOG.md":
            yield from ((name, found) for found in WRITTEN.findall(path.read_text(encoding="utf-8")))
        elif path.suffix == ".py":
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield from ((name, found) for found in WRITTEN.findall(node.value))


def leads_somewhere(path: str) -> bool:
    try:
        pkgutil.resolve_name(path)
    except (AttributeError, ImportError):
        return False
    return True


def test_dotted_paths_in_text_resolve() -> None:
    """Imports do not cover names that tests patch or configs contain."""
    written = list(dotted_paths())
    assert ("benchmarks/packing.py", "torchtune_adaptive.tune.training_loop.memory_within") in written
    assert {path for _, path in written if not leads_somewhere(path)} - NEED_A_FRAMEWORK == MEANT_NOT_TO_BE


OWN_METHODS = {"__init__", "setup"}


def methods_of(recipe: str) -> dict[str, str]:
    """Return the code of each method, independent of formatting."""
    tree = tree_of(ROOT / "recipes" / f"adaptive_{recipe}_distributed.py")
    (kind,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    return {method.name: ast.dump(method) for method in kind.body if isinstance(method, ast.FunctionDef)}


@pytest.mark.parametrize(("full", "lora"), [("full_finetune", "lora_finetune"), ("full_dpo", "lora_dpo")])
def test_lora_recipes_inherit_their_training_code(full: str, lora: str) -> None:
    ours, theirs = methods_of(full), methods_of(lora)
    assert {"train", "cleanup"} <= set(ours) - OWN_METHODS
    assert set(theirs) <= OWN_METHODS
