"""Names that tests, examples, configs and pages use exist, and recipes with the same training have the same code."""

import ast
import pkgutil
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchtune_adaptive
from tests.unit.source import ROOT, tree_of

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
USERS = sorted(path for folder in ("examples", "benchmarks", "tools") for path in (ROOT / folder).glob("*.py"))
PUBLIC = {
    *(("torchtune_adaptive", name) for name in torchtune_adaptive.__all__),
    ("torchtune_adaptive.hf", "AdaptiveArguments"),
    ("torchtune_adaptive.hf", "AdaptiveMixin"),
    ("torchtune_adaptive.hf", "AdaptiveTrainer"),
    ("torchtune_adaptive.hf", "adaptive"),
    ("torchtune_adaptive.skyrl", "adaptive"),
    ("torchtune_adaptive.titan", "AdaptiveTrainer"),
    ("torchtune_adaptive.titan", "adaptive"),
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


OURS = ("tests", "benchmarks", "tools", "torchtune_adaptive")
WRITTEN = re.compile(r"(?<![\w/.-])torchtune_adaptive(?:\.\w+)+")
MEANT_NOT_TO_BE = {"torchtune_adaptive.data.plan.no_such_module"}
NEED_A_FRAMEWORK = ("torchtune_adaptive.skyrl", "tests.skyrl", "torchtune_adaptive.titan", "tests.titan")
"""tests/skyrl and tests/titan import them, where SkyRL or torchtitan is installed."""


def dotted_paths() -> Iterator[tuple[str, str]]:
    """Yield every dotted path of the package in strings, configs and pages, and every import of our own files, with its
    file."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    for name in (each for each in listed.split("\0") if not each.startswith("rehearsal/")):
        path = ROOT / name
        if path.suffix in {".md", ".toml", ".yaml"} and name != "CHANGELOG.md":
            yield from ((name, found) for found in WRITTEN.findall(path.read_text(encoding="utf-8")))
        for node in ast.walk(tree_of(path)) if path.suffix == ".py" else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from ((name, found) for found in WRITTEN.findall(node.value))
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in OURS:
                yield from ((name, f"{node.module}.{alias.name}") for alias in node.names)


def leads_somewhere(path: str) -> bool:
    try:
        pkgutil.resolve_name(path)
    except (AttributeError, ImportError):
        return False
    except (pytest.skip.Exception, SystemExit):
        return True  # without what it is for, such as the peers of benchmarks
    return True


def test_dotted_paths_and_imports_of_our_files_resolve() -> None:
    """Importing tests does not cover imports inside functions, names that tests patch, and names in configs."""
    written = list(dotted_paths())
    assert ("benchmarks/packing.py", "torchtune_adaptive.loop.training_loop.memory_within") in written
    paths = {path for _, path in written if not path.startswith(NEED_A_FRAMEWORK)}
    assert {path for path in paths if not leads_somewhere(path)} == MEANT_NOT_TO_BE


def methods_of(recipe: str) -> set[str]:
    tree = tree_of(ROOT / "recipes" / f"adaptive_{recipe}_distributed.py")
    (kind,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    return {method.name for method in kind.body if isinstance(method, ast.FunctionDef)}


@pytest.mark.parametrize(("full", "lora"), [("full_finetune", "lora_finetune"), ("full_dpo", "lora_dpo")])
def test_lora_recipes_inherit_their_training_code(full: str, lora: str) -> None:
    own = {"__init__", "setup"}
    assert {"train", "cleanup"} <= methods_of(full) - own
    assert methods_of(lora) <= own
