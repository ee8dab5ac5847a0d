"""All configs of torchtitan's models, for AdaptiveTrainer: `--module torchtune_adaptive.titan --config llama3_8b`.

torchtitan looks up the function of a config by its name in this module.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module

from torchtitan.models import _supported_models

from torchtune_adaptive.titan.trainer import AdaptiveTrainer, adaptive


def __getattr__(name: str) -> Callable[[], AdaptiveTrainer.Config]:
    """Return the function of a config. The name may include a module, as in `my_project.configs.my_config`."""
    *module, function = name.rsplit(".", 1)
    likely_first = sorted(_supported_models, key=lambda model: (not name.startswith(model), model))
    for path in module or [f"torchtitan.models.{model}.config_registry" for model in likely_first]:
        # a model may need a package that other models do not need
        with suppress(*([] if module else [ModuleNotFoundError])):
            if callable(found := getattr(import_module(path), function, None)):
                return lambda: adaptive(found())
    raise AttributeError(f"{' '.join(module) or 'no model of torchtitan'} has no config {function!r}")
