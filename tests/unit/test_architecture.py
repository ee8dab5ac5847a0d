"""Rules about imports between folders, checked in the source."""

import ast
from collections.abc import Iterator
from dataclasses import fields
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.unit.source import (
    FILES,
    MODULES,
    NAME,
    RECIPES,
    ROOT,
    arrows,
    arrows_from,
    docstrings_of,
    dotted_uses,
    imported,
    imports,
    modules_in,
    reached_from,
    room_of,
    tree_of,
)
from torchtune_adaptive.config.keys import AdaptiveConfig, Settings

GROUND = {"arguments", "atomic_files", "contexts", "dependencies", "errors", "formatting"}
"""Top-level modules that everything may import, and that import only one another."""
DOORS = {"__init__", "rehearsing"}
"""Top-level modules for users and for gpu-rehearsal; within the project only tests and tools import them."""

ROOMS: dict[str, set[str]] = {
    "engine": set(),
    "report": {"engine"},
    "config": {"engine.limits", "engine.search"},
    "lifecycle": {"config", "engine.ranks", "engine.memory", "engine.oom"},
    "checkpoints": {
        "config",
        "lifecycle",
        "engine.memory",
        "engine.tensors",
        "engine.oom",
        "engine.ranks",
        "engine.snapshot",
    },
    "data": {"config", "lifecycle", "engine"},
    "models": {"config", "lifecycle", "checkpoints", "engine", "data"},
    "objectives": {"models", "data", "config", "lifecycle", "checkpoints", "engine"},
    "loop": {"objectives", "models", "data", "config", "lifecycle", "checkpoints", "engine", "report"},
    "rl": {"loop", "objectives", "models", "data", "config", "lifecycle", "checkpoints", "engine", "report"},
    # a training script on the engine, for any training
    "cli": {"config", "lifecycle", "checkpoints", "loop", "rl", "report"},
    "demo": set(),
    "hf": {"engine", "report"},
    "skyrl": {"engine", "report"},
    "titan": {"engine", "report"},
}
"""Folders or modules that a folder may import, in addition to GROUND and itself."""

WITHOUT_TORCH = {
    "engine.limits",
    "engine.plans",
    "engine.limit_policy",
    "engine.search",
    "engine.length_profile",
    "config.keys",
    "config.registry",
    "atomic_files",
    "cli.main",
    "checkpoints.store",
    "lifecycle.run_state",
    "lifecycle.signals",
}
WITH_TORCHTUNE = {
    "config",
    "lifecycle",
    "checkpoints",
    "data",
    "models",
    "objectives",
    "loop",
    "rl",
    "demo",
    "cli",
    "rehearsing",
}
ABOUT_A_RUN = {"arguments", "hf.trainer", "skyrl.workers", "skyrl.passes", "titan.trainer"}
"""Arguments of trainers with the names of keys."""
ARGUMENTS_TOO = {"batch_size", "gradient_accumulation_steps"}
"""Config keys that are also names of library arguments."""


def may_import(name: str, target: str) -> bool:
    if target in GROUND:
        return True
    if room_of(name) == ".":
        return name in DOORS
    return room_of(target) == room_of(name) or bool({target, room_of(target)} & ROOMS[room_of(name)])


def library() -> set[str]:
    """Return all modules that plain PyTorch can use."""
    return {name for name in MODULES if name.split(".")[0] not in WITH_TORCHTUNE}


def test_every_folder_has_a_rule_and_every_rule_a_folder() -> None:
    assert {room_of(name) for name in MODULES} == {*ROOMS, "."}
    assert {name for name in MODULES if room_of(name) == "."} == GROUND | DOORS
    assert all(modules_in(allowed) for allowed in ROOMS.values() if allowed)


def test_imports_follow_the_rules() -> None:
    assert len(list(arrows())) > 150
    assert {arrow for arrow in arrows() if not may_import(*arrow)} == set()


def test_folders_have_no_import_cycle() -> None:
    rooms = {room: {room_of(name) for name in modules_in(allowed)} for room, allowed in ROOMS.items()}
    assert len(list(TopologicalSorter(rooms).static_order())) == len(ROOMS)


def test_modules_have_no_import_cycle() -> None:
    try:
        order = list(TopologicalSorter({name: arrows_from(name) for name in MODULES}).static_order())
    except CycleError as circle:
        pytest.fail(" -> ".join(circle.args[1]))
    assert set(order) == set(MODULES)


def texts_of(path: Path) -> Iterator[str]:
    """Yield the strings of a file, without docstrings."""
    message = {id(docstring) for docstring in docstrings_of(path)}
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in message:
            yield node.value


def test_library_messages_do_not_name_config_keys() -> None:
    """The library raises facts and remedies; config/keys.py translates them to keys."""
    settings = {field.name for field in fields(Settings) if "_" in field.name}  # no short words such as `loss`
    sections = {f"adaptive.{field.name}" for field in fields(AdaptiveConfig)} | {"tokenizer.", "recover_from_oom"}
    keys = settings | sections | {"use_maximum_batch_size", "batch_increase_function"}
    assert {"adaptive.search", "enable_activation_checkpointing", "optimizer_in_bwd"} < keys
    assert any("adaptive.memory_limit" in text for text in texts_of(MODULES["config.keys"]))
    speaking = {
        name: found
        for name in library() - modules_in(ABOUT_A_RUN)
        if (found := {key for text in texts_of(MODULES[name]) for key in keys - ARGUMENTS_TOO if key in text})
    }
    assert speaking == {}


def test_only_hf_imports_transformers() -> None:
    assert {room_of(name) for name in MODULES if imports(MODULES[name], "transformers")} == {"hf"}


def test_below_tune_only_these_modules_communicate() -> None:
    """One of them imports torch's FSDP2. `titan.trainer` imports an error of its checkpoints."""

    def speaks(path: Path) -> bool:
        return any(name.startswith("torch.distributed") for name in [*imported(path), *dotted_uses(path)])

    speaking = {name for name in library() if speaks(MODULES[name])}
    modules = {"ranks", "consistency", "ledger", "fsdp_ledger", "ghost_ledger", "buckets", "fsdp", "ghost"}
    assert speaking == {f"engine.{name}" for name in modules} | {"titan.trainer"}


@pytest.mark.parametrize("name", sorted(modules_in(WITHOUT_TORCH)))
def test_decision_modules_do_not_import_torch(name: str) -> None:
    """Neither do the modules they import."""
    assert {module for module in reached_from(name) if imports(MODULES[module], "torch")} == set()


def test_packages_of_training_and_of_rehearsals_do_not_import_each_other() -> None:
    """gpu-rehearsal finds the adapters of this package by entry points."""
    assert {path for path in [*FILES, *RECIPES] if imports(path, "gpu_rehearsal")} == set()
    rehearsals = sorted((ROOT / "rehearsal" / "gpu_rehearsal").rglob("*.py"))
    assert len(rehearsals) > 30
    ours = (NAME, "torchtune", *(path.stem for path in RECIPES))
    assert {path for path in rehearsals for name in ours if imports(path, name)} == set()


def test_only_the_adapters_know_about_rehearsals() -> None:
    adapters = {each.name: each.load() for each in entry_points(group="gpu_rehearsal.adapters")}
    assert {each.__module__ for each in adapters.values()} == {f"{NAME}.rehearsing"}
    assert {name.removeprefix(f"{NAME}.") for name in adapters} <= {*MODULES, NAME}
    assert {name for name in MODULES if "rehearsing" in arrows_from(name)} == set()


def test_only_one_module_uses_private_names_of_fsdp2() -> None:
    def reaches_inside(path: Path) -> bool:
        names = [*imported(path), *dotted_uses(path)]
        return any("._" in name for name in names if name.startswith("torch.distributed.fsdp."))

    assert {path for path in [*FILES, *RECIPES] if reaches_inside(path)} == {MODULES["engine.fsdp"]}


def test_package_does_not_import_recipes() -> None:
    names = [path.stem for path in RECIPES] + ["recipes"]
    assert {path for path in FILES if any(imports(path, name) for name in names)} == set()
