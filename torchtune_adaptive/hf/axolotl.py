"""A plugin for axolotl, enabled by `plugins: [torchtune_adaptive.hf.axolotl.AdaptivePlugin]` in its config."""

from __future__ import annotations

from typing import Any

from axolotl.core.trainers import AxolotlTrainer
from axolotl.integrations.base import BasePlugin
from axolotl.utils.import_helper import get_cls_from_module_str
from pydantic import BaseModel

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.hf.trainer import adaptive


class AdaptiveInput(BaseModel):
    """Adds the key `adaptive` to axolotl's config, with the fields of AdaptiveArguments."""

    adaptive: dict[str, Any] = {}


class AdaptivePlugin(BasePlugin):
    """Adds recovery and batch-size search to axolotl's trainer, or to the `trainer_cls` of the config."""

    def get_input_args(self) -> str:
        """Return the path of the keys that this plugin adds to the config."""
        return f"{__name__}.AdaptiveInput"

    def get_trainer_cls(self, cfg: Any) -> Any:
        """Return the class of the trainer that axolotl constructs."""
        if cfg.rl or cfg.reward_model or cfg.process_reward_model:  # axolotl passes no model to a plugin's trainer
            raise ConfigError(
                "AdaptivePlugin supports only supervised finetuning, but the config sets rl, reward_model or "
                "process_reward_model: remove them, or the plugin"
            )
        return adaptive(get_cls_from_module_str(cfg.trainer_cls) if cfg.trainer_cls else AxolotlTrainer, **cfg.adaptive)
