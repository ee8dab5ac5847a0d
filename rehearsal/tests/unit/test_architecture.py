"""Rules about imports, checked in the source."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import gpu_rehearsal

PACKAGE = Path(gpu_rehearsal.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
GROUND = {"errors", "formatting", "files", "replacing", "adapters", "settings", "gpus", "progress"}
"""Modules that every folder may import."""
ROOMS: dict[str, set[str]] = {
    "device": set(),
    "hangs": set(),
    "report": {"hangs"},
    "recording": {"device", "hangs", "report"},
    "values": {"device", "hangs", "recording", "report"},
    "processes": {"device", "hangs", "recording", "report", "values"},
    # the modules of the command and the Python interface
    ".": {"device", "hangs", "processes", "report", "ci"},
    "ci": {".", "report"},
}
"""Folders that a folder may import, in addition to GROUND and itself."""
WITHOUT_TORCH = {"device", "report", "ci", "."}
"""Folders that the command imports before a process starts: only the fork server imports torch."""


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update([node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)])
    return names


def room_of(path: Path) -> str:
    return path.parent.relative_to(PACKAGE).as_posix()


def rooms_imported(path: Path) -> set[str]:
    inner = {name.split(".")[1] for name in imported(path) if name.startswith("gpu_rehearsal.")}
    folders = {name for name in inner if (PACKAGE / name).is_dir()}
    modules = {name for name in inner - folders if (PACKAGE / f"{name}.py").exists()}
    return folders | ({"."} if modules - GROUND else set())


def test_every_folder_has_a_rule_and_imports_follow_it() -> None:
    assert {room_of(path) for path in FILES} == {*ROOMS}
    wrong = {
        (path.relative_to(PACKAGE).as_posix(), room)
        for path in FILES
        for room in rooms_imported(path) - ROOMS[room_of(path)] - {room_of(path)}
        if path.parent != PACKAGE or path.stem not in GROUND or room != "."
    }
    assert wrong == set()


def test_ground_imports_no_folder() -> None:
    assert {name for name in GROUND if rooms_imported(PACKAGE / f"{name}.py") - {"."}} == set()


def test_folders_below_the_command_have_no_import_cycle() -> None:
    below = {room: allowed - {"."} for room, allowed in ROOMS.items() if room not in (".", "ci")}
    assert len(list(TopologicalSorter(below).static_order())) == len(below)


def test_package_imports_neither_torchtune_nor_the_training_package() -> None:
    """torchtune-adaptive registers adapters as entry points."""
    tops = {(path, name.split(".")[0]) for path in FILES for name in imported(path)}
    assert {path for path, name in tops if name.startswith(("torchtune", "adaptive_"))} == set()


def test_command_does_not_import_torch() -> None:
    files = [path for path in FILES if room_of(path) in WITHOUT_TORCH and path.stem != "adapters"]
    assert {path for path in files if any(name.split(".")[0] == "torch" for name in imported(path))} == set()
