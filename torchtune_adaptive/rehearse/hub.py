"""Models of transformers whose weights are not on this machine are built from their config."""

from __future__ import annotations

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

MODELS = "transformers.modeling_utils"
BUILDS = ("dtype", "torch_dtype", "attn_implementation")
"""Arguments of from_pretrained that matter for a model without weights."""


class ModelsNeedNoWeights(MetaPathFinder):
    """Put first into `sys.meta_path`, it waits for the script to import transformers, which takes seconds."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name != MODELS:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def then_replace(module: ModuleType) -> None:
                execute(module)
                _need_no_weights(module.PreTrainedModel)

            spec.loader.exec_module = then_replace  # type: ignore[method-assign]
        return spec


def _need_no_weights(models: Any) -> None:
    loads = models.from_pretrained.__func__

    def from_pretrained(cls: Any, name: Any, /, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        try:
            return loads(cls, name, *args, config=config, **{**kwargs, "local_files_only": True})
        except OSError:
            if "quantization_config" in kwargs:
                raise
        built = {key: kwargs.pop(key) for key in BUILDS if kwargs.get(key) not in (None, "auto")}
        device = kwargs.pop("device_map", None)
        if config is None or isinstance(config, str | os.PathLike):
            config, _ = cls.config_class.from_pretrained(config or name, return_unused_kwargs=True, **kwargs)
        print(f"rehearse: no weights of {name} on this machine; it is built from its config", file=sys.stderr)
        model = cls._from_config(config, **built).eval()
        return model if device is None else model.to("cuda")

    models.from_pretrained = classmethod(from_pretrained)
