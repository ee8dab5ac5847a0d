"""Which recipe a config is for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from omegaconf import DictConfig

from torchtune_adaptive.config import components
from torchtune_adaptive.config.checks import (
    read_full_dpo_settings,
    read_full_settings,
    read_lora_dpo_settings,
    read_lora_settings,
)
from torchtune_adaptive.config.keys import LoraSettings, Settings, read_adaptive, value_at
from torchtune_adaptive.config.registry import FULL, FULL_DPO, LORA, LORA_DPO, PPO
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.rl.settings import POLICY_SECTION, PPO_KEYS, read_ppo_settings
from torchtune_adaptive.tune.preference import build_preference_loss


@dataclass(frozen=True, kw_only=True)
class Training:
    """A recipe that trains, as others see it."""

    name: str
    saved_by: str
    """What the manifest of a checkpoint calls the recipe that wrote it."""
    read: Callable[[DictConfig], tuple[Settings, LoraSettings | None]]
    """Reads its settings; refuses what they contradict."""
    of_pairs: bool = False
    keys: Sequence[str] = ()
    """Keys that only this recipe knows."""


TRAININGS = {
    each.name: each
    for each in (
        Training(name=FULL, saved_by="full", read=lambda cfg: (read_full_settings(cfg), None)),
        Training(name=LORA, saved_by="lora", read=read_lora_settings),
        Training(
            name=FULL_DPO, saved_by="full_dpo", read=lambda cfg: (read_full_dpo_settings(cfg), None), of_pairs=True
        ),
        Training(name=LORA_DPO, saved_by="lora_dpo", read=read_lora_dpo_settings, of_pairs=True),
        Training(name=PPO, saved_by="full_ppo", read=lambda cfg: (read_ppo_settings(cfg)[0], None), keys=PPO_KEYS),
    )
}


def training_of(cfg: DictConfig) -> Training:
    """The recipe that this config is for."""
    if trains_with_ppo(cfg):
        return TRAININGS[PPO]
    full, lora = (FULL_DPO, LORA_DPO) if trains_on_pairs(cfg) else (FULL, LORA)
    return TRAININGS[lora if is_lora(cfg) else full]


def is_lora(cfg: DictConfig) -> bool:
    return not trains_with_ppo(cfg) and "lora_attn_modules" in components.require(cfg, "model")


def trains_with_ppo(cfg: DictConfig) -> bool:
    return POLICY_SECTION in cfg


def trains_on_pairs(cfg: DictConfig) -> bool:
    """Whether the recipe is one of preference training, of which only those configs speak that name a reference: else
    the loss tells, which is one of pairs."""
    if trains_with_ppo(cfg):
        return False
    if cfg.get("ref_checkpointer") is not None:
        return True
    try:
        build_preference_loss(cfg)
    except ConfigError:  # of those that cannot be built, torchtune's are known by their place
        return "rlhf" in str(value_at(cfg, "loss._component_"))
    return True


def keeps_reference(cfg: DictConfig) -> bool:
    """Whether there is a model of the reference while the policy is trained."""
    asked_before = read_adaptive(cfg.get("adaptive")).precompute_reference
    return trains_on_pairs(cfg) and not is_lora(cfg) and not asked_before
