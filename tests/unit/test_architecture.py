"""The dependency rules, read from the source: which module may know what, and how long it may be."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "torchtune_adaptive"
RECIPES = sorted((ROOT / "recipes").glob("*.py"))
MODULES = sorted(PACKAGE.rglob("*.py"))
BELOW_HOST = [path for path in MODULES if not {"host", "demo"} & set(path.relative_to(PACKAGE).parts)]

DECIDING = ("limits", "packing", "search", "schedules", "config", "governor", "events", "timeline")

LONGEST_FUNCTION = 40
LONGEST_MODULE = 300
FSDP_INSIDES = "torch.distributed.fsdp."


def module(name: str) -> Path:
    path = PACKAGE / f"{name}.py"
    assert path in MODULES, f"{name} is gone: keep the rules in step with the modules"
    return path


def imported(path: Path) -> set[str]:
    """Every name that a file imports anywhere in it, from its package on: `a.b` and `a.b.c` for `from a.b import c`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = origin_of(node, path)
            names.update([origin, *(f"{origin}.{alias.name}" for alias in node.names)])
    return names


def origin_of(node: ast.ImportFrom, path: Path) -> str:
    if node.level == 0:
        return node.module or ""
    package = path.relative_to(ROOT).parent.parts
    return ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])


def imports(path: Path, name: str) -> bool:
    return any(seen == name or seen.startswith(f"{name}.") for seen in imported(path))


def names_of(paths: list[Path]) -> set[str]:
    return {path.relative_to(ROOT).as_posix() for path in paths}


def dotted_uses(path: Path) -> Iterator[str]:
    """Attribute chains such as `torch.distributed.all_reduce`, which need no import of their own."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def test_the_rules_see_the_whole_project() -> None:
    assert names_of(MODULES) > {
        "torchtune_adaptive/stepping.py",
        "torchtune_adaptive/host/launch.py",
        "torchtune_adaptive/demo/dataset.py",
    }
    assert {path.stem for path in RECIPES} >= {
        "adaptive_full_finetune_distributed",
        "adaptive_lora_finetune_distributed",
    }
    assert {module(name) for name in ("stepping", "limits", "packing", "config")} <= set(BELOW_HOST)
    assert module("host/launch") not in BELOW_HOST


def test_only_host_and_demo_and_recipes_know_torchtune() -> None:
    assert imports(module("host/launch"), "torchtune")
    assert names_of([path for path in BELOW_HOST if imports(path, "torchtune")]) == set()


def test_nothing_below_host_imports_host_or_demo() -> None:
    upwards = [
        path
        for path in BELOW_HOST
        if imports(path, "torchtune_adaptive.host") or imports(path, "torchtune_adaptive.demo")
    ]
    assert names_of(upwards) == set()


def test_below_host_only_three_modules_speak_to_other_ranks() -> None:
    speaking = [path for path in BELOW_HOST if imports(path, "torch.distributed")]
    speakers = ("collectives", "fsdp", "ledger")
    assert names_of(speaking) == {f"torchtune_adaptive/{name}.py" for name in speakers}
    quiet = [path for path in BELOW_HOST if path not in speaking]
    around = [path for path in quiet if any(use.startswith("torch.distributed") for use in dotted_uses(path))]
    assert names_of(around) == set()


@pytest.mark.parametrize("name", [name for name in DECIDING if (PACKAGE / f"{name}.py") in MODULES])
def test_what_decides_needs_no_torch(name: str) -> None:
    seen = imported(module(name))
    assert seen, f"{name} imports nothing at all, so this test would see nothing either"
    assert not imports(module(name), "torch")


def test_only_fsdp_knows_the_insides_of_fsdp2() -> None:
    def reaches_inside(path: Path) -> bool:
        names = [*imported(path), *dotted_uses(path)]
        return any("._" in name for name in names if name.startswith(FSDP_INSIDES))

    assert names_of([path for path in [*MODULES, *RECIPES] if reaches_inside(path)]) == {"torchtune_adaptive/fsdp.py"}


def test_nothing_in_the_package_imports_a_recipe() -> None:
    names = [path.stem for path in RECIPES] + ["recipes"]
    assert names_of([path for path in MODULES if any(imports(path, name) for name in names)]) == set()


@pytest.mark.parametrize("path", [*MODULES, *RECIPES], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_functions_and_modules_stay_short(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    functions = (n for n in ast.walk(ast.parse(source)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))
    too_long = {f.name for f in functions if (f.end_lineno or f.lineno) - f.lineno >= LONGEST_FUNCTION}
    assert too_long == set()
    assert len(source.splitlines()) <= LONGEST_MODULE
