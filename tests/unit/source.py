"""Facts read from the package's source: its modules, their imports and their names."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "torchtune_adaptive"
NAME = PACKAGE.name
FILES = sorted(PACKAGE.rglob("*.py"))
RECIPES = sorted((ROOT / "recipes").glob("*.py"))


def name_of(path: Path) -> str:
    """Return the dotted name, for example `limits.padded_plan`; an `__init__` has the name of its folder."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {name_of(path): path for path in FILES}


def room_of(name: str) -> str:
    return MODULES[name].parent.relative_to(PACKAGE).as_posix()


def modules_in(rooms_or_modules: set[str]) -> set[str]:
    """Return these modules, and all modules of these folders; fail if one no longer exists."""
    known = {*MODULES, *map(room_of, MODULES)}
    assert rooms_or_modules <= known, f"gone: {rooms_or_modules - known}; keep the rules in step with the modules"
    return {name for name in MODULES if {name, room_of(name)} & rooms_or_modules}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def docstrings_of(path: Path) -> list[ast.Constant]:
    """Return strings that are statements: docstrings, also those of fields and constants."""
    alone = (node.value for node in ast.walk(tree_of(path)) if isinstance(node, ast.Expr))
    return [value for value in alone if isinstance(value, ast.Constant) and isinstance(value.value, str)]


def imported(path: Path) -> set[str]:
    """Return every name that a file imports: `a.b` and `a.b.c` for `from a.b import c`."""
    names: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written from the package on"
            names.update([node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)])
    return names


def imports(path: Path, name: str) -> bool:
    return any(seen == name or seen.startswith(f"{name}.") for seen in imported(path))


@cache
def arrows_from(name: str) -> frozenset[str]:
    """Return the package's modules that this module imports; a folder counts only if a name of its `__init__` is
    used.
    """
    targets: set[str] = set()
    for node in ast.walk(tree_of(MODULES[name])):
        if isinstance(node, ast.Import):
            targets.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            targets.update(full if full.removeprefix(f"{NAME}.") in MODULES else node.module or "" for full in inner)
    ours = {"__init__" if target == NAME else target.removeprefix(f"{NAME}.") for target in targets}
    return frozenset(ours & set(MODULES))


def arrows() -> Iterator[tuple[str, str]]:
    return ((name, target) for name in MODULES for target in arrows_from(name))


def reached_from(name: str) -> set[str]:
    """Return a module and everything it imports, directly or indirectly."""
    reached, ahead = {name}, {name}
    while ahead:
        ahead = {target for module in ahead for target in arrows_from(module)} - reached
        reached |= ahead
    return reached


def dotted_uses(path: Path) -> Iterator[str]:
    """Yield attribute chains such as `torch.distributed.all_reduce`, which need no separate import."""
    return (ast.unparse(node) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute))
