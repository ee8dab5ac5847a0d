"""A plugin for axolotl. Copy this file; your config then has `plugins: [axolotl_plugin.AdaptivePlugin]`."""

from __future__ import annotations

from typing import Any

from axolotl.core.trainers import AxolotlTrainer
from axolotl.integrations.base import BasePlugin, PluginManager
from axolotl.utils.import_helper import get_cls_from_module_str
from pydantic import BaseModel

from torchtune_adaptive.hf import AdaptiveArguments, AdaptiveMixin, adaptive


class AdaptiveInput(BaseModel):
    """Adds the key `adaptive` to axolotl's config, with the fields of AdaptiveArguments."""

    adaptive: dict[str, Any] | None = None


class AdaptivePlugin(BasePlugin):
    """Adds recovery and batch-size search to the trainer of another plugin, to `trainer_cls`, or to axolotl's own."""

    def get_input_args(self) -> str:
        """Return the path of the keys that this plugin adds to the config."""
        return f"{__name__}.AdaptiveInput"

    def register(self, cfg: Any) -> None:
        """Check the config before axolotl loads data and model."""
        AdaptiveArguments(**(cfg.get("adaptive") or {}))
        refused = ", ".join(key for key in ("rl", "reward_model", "process_reward_model") if cfg.get(key))
        if refused:  # axolotl passes no model to a plugin's trainer there
            raise ValueError(f"AdaptivePlugin supports only supervised finetuning: remove {refused} or the plugin")

    def get_trainer_cls(self, cfg: Any) -> Any:
        """Return the class of the trainer that axolotl constructs."""
        others = [
            other.get_trainer_cls(cfg) for other in PluginManager.get_instance().plugins.values() if other != self
        ]
        own = get_cls_from_module_str(cfg.trainer_cls) if cfg.trainer_cls else AxolotlTrainer
        return adaptive(next(filter(None, others), own), **(cfg.adaptive or {}))

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Refuse the trainer of a plugin that precedes this one."""
        if not isinstance(trainer, AdaptiveMixin):
            raise ValueError(f"axolotl took {type(trainer).__name__} from another plugin: list AdaptivePlugin first")
