"""Replace functions of other packages: everywhere at once, or when the script imports a module."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class _AfterImport(MetaPathFinder):
    def __init__(self, name: str, patch: Callable[[ModuleType], None]) -> None:
        self._name, self._patch = name, patch

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._patch(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def after_import(name: str, patch: Callable[[ModuleType], None]) -> None:
    """Call `patch` with a module: now if it is imported already, otherwise when the script imports it."""
    if name in sys.modules:
        patch(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, patch))


def replace_everywhere(replacements: Mapping[Any, Any]) -> None:
    """Replace functions or classes in every module that has imported them."""
    by_id = {id(old): new for old, new in replacements.items()}
    for module in [each for each in sys.modules.values() if each is not None]:
        for name, value in [*vars(module).items()]:
            if id(value) in by_id:
                setattr(module, name, by_id[id(value)])
