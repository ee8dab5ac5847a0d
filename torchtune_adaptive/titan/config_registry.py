"""All configs of torchtitan's models, for AdaptiveTrainer: `--module torchtune_adaptive.titan --config llama3_8b`.

torchtitan looks up the function of a config by its name in this module.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module

from torchtitan.models import _supported_models

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.titan.trainer import AdaptiveTrainer, adaptive


def __getattr__(name: str) -> Callable[[], AdaptiveTrainer.Config]:
    """Return the function of a config. The name may include a module, as in `my_project.configs.my_config`."""
    if name.startswith("__"):
        raise AttributeError(name)
    *module, function = name.rsplit(".", 1)
    likely_first = sorted(_supported_models, key=lambda model: (not name.startswith(model), model))
    missing, known = list[str](), set[str]()
    for path in module or [f"torchtitan.models.{model}.config_registry" for model in likely_first]:
        try:
            registry = import_module(path)
        except ModuleNotFoundError as error:  # a model may need a package that other models do not need
            missing.append(f"{path} cannot be imported ({error})")
            continue
        if callable(found := getattr(registry, function, None)):
            return lambda: adaptive(found())
        known |= {each for each, value in vars(registry).items() if getattr(value, "__module__", None) == path}
    similar = get_close_matches(function, known, n=3)
    # torchtitan would replace an AttributeError by a list of what this file imports
    raise ConfigError(
        f"--config {name}: there is no {function!r} in {' '.join(module) or 'the models of torchtitan'}"
        f"{'; similar: ' + ', '.join(similar) if similar else ''}{'; ' + '; '.join(missing) if missing else ''}"
    )
