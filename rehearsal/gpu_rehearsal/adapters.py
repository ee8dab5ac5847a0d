"""Adapters: a package says what a rehearsal has to replace in it.

A package registers an adapter as an entry point of the group `gpu_rehearsal.adapters`. The name of the entry point is a
module. When the script has imported this module, the adapter is called with a `Rehearsal`:

    [project.entry-points."gpu_rehearsal.adapters"]
    "my_package.training" = "my_package.rehearsing:adapt"

    def adapt(rehearsal):
        from my_package import training
        rehearsal.replace({training.wait_for_peers: lambda: None})
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from gpu_rehearsal.replacing import after_import, replace_everywhere

GROUP = "gpu_rehearsal.adapters"


class Rehearsal:
    """What an adapter can do. The recorder sets the functions before the script runs."""

    folder_without_data: Path | None = None
    """With `--without-data`, an empty folder for the output of a script, whose adapter has to replace its data."""
    record: Callable[[str, Mapping[str, Any]], None]
    """Add facts to the result: `record("search", {"stage": ..., "text": a table, "result": {"rows": ...}})` for the
    result of a batch-size search; `record("setting", {"text": ..., "timed": True})` if data was replaced; and
    `record("message", {"text": ...})` for the error message of the script."""
    trial: Callable[[], AbstractContextManager[None]]
    """A context whose optimizer steps and out-of-memory errors are not those of training."""

    def replace(self, replacements: Mapping[Any, Any]) -> None:
        """Replace functions or classes in every module that has imported them, or will."""
        replace_everywhere(replacements)


REHEARSAL = Rehearsal()
_libraries: set[str] = set()


def install_adapters() -> None:
    """Call each adapter when the script imports its module."""
    for adapter in entry_points(group=GROUP):
        _libraries.add(adapter.name.partition(".")[0])
        after_import(adapter.name, _caller_of(adapter))


def _caller_of(adapter: EntryPoint) -> Callable[[ModuleType], None]:
    """Return a function that calls an adapter. If this fails, it ends the rehearsal, because the script could catch an
    error, and would then run differently than on a GPU."""

    def call(_: ModuleType) -> None:
        try:
            adapter.load()(REHEARSAL)
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            of = f"of {adapter.dist.name}, {adapter.value}," if adapter.dist else adapter.value
            why = f"{type(error).__name__}: {error}"
            remedy = "correct it, or uninstall the package that registers it"
            REHEARSAL.record("message", {"text": f"CannotRehearse: the adapter {of} failed ({why}): {remedy}"})
            os._exit(1)

    return call


def folders_with_adapters() -> tuple[str, ...]:
    """Return the folders of imported packages that have adapters. They count as libraries, even if they are editable:
    values that they read are not replaced by random ones, and their source is not the script's."""
    modules = (sys.modules.get(name) for name in _libraries)
    return tuple(str(Path(module.__file__).parent) + os.sep for module in modules if module and module.__file__)
