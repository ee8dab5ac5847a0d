"""Which recipe a config is for."""

from __future__ import annotations

from omegaconf import DictConfig

from torchtune_adaptive.config import components
from torchtune_adaptive.config.keys import value_at
from torchtune_adaptive.config.registry import FULL, FULL_DPO, GRPO, GRPO_LORA, LORA, LORA_DPO, PPO, Recipe
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.rl.settings import POLICY_SECTION
from torchtune_adaptive.tune.preference import build_preference_loss


def training_of(cfg: DictConfig) -> Recipe:
    """The recipe that this config is for."""
    if POLICY_SECTION in cfg:
        return PPO
    full, lora = (FULL, LORA)
    if trains_on_rollouts(cfg):
        full, lora = (GRPO, GRPO_LORA)
    elif trains_on_pairs(cfg):
        full, lora = (FULL_DPO, LORA_DPO)
    return lora if is_lora(cfg) else full


def is_lora(cfg: DictConfig) -> bool:
    return POLICY_SECTION not in cfg and "lora_attn_modules" in components.require(cfg, "model")


def trains_on_rollouts(cfg: DictConfig) -> bool:
    return POLICY_SECTION in cfg or "grpo_samples" in cfg


def trains_on_pairs(cfg: DictConfig) -> bool:
    """Whether the recipe is one of preference training, of which only those configs speak that name a reference: else
    the loss tells, which is one of pairs."""
    if trains_on_rollouts(cfg):
        return False
    if cfg.get("ref_checkpointer") is not None:
        return True
    try:
        build_preference_loss(cfg)
    except ConfigError:  # of those that cannot be built, torchtune's are known by their place
        return "rlhf" in str(value_at(cfg, "loss._component_"))
    return True
