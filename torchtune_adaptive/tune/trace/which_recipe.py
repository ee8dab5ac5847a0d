"""Which recipe a config is for, and the settings with which a prediction sets it up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from omegaconf import DictConfig

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.tune.config import components
from torchtune_adaptive.tune.config.adaptive import read_adaptive
from torchtune_adaptive.tune.config.per_recipe import (
    read_full_dpo_settings,
    read_full_settings,
    read_lora_dpo_settings,
    read_lora_settings,
)
from torchtune_adaptive.tune.config.rules import value_at
from torchtune_adaptive.tune.config.settings import LoraSettings, Settings, on_gpu
from torchtune_adaptive.tune.config.signatures import COMPONENT
from torchtune_adaptive.tune.parts.data import is_packed
from torchtune_adaptive.tune.parts.devices import device_named
from torchtune_adaptive.tune.parts.preference_stages import build_preference_loss
from torchtune_adaptive.tune.rl.settings import POLICY_SECTION, PPO_KEYS, read_ppo_settings
from torchtune_adaptive.tune.start.catalogue import FULL, FULL_DPO, LORA, LORA_DPO, PPO

PREDICTED = ("cpu", "cuda")


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


def read_settings(cfg: DictConfig) -> tuple[Settings, LoraSettings | None]:
    """Settings of the recipe that this config is for, if its step can be traced."""
    if "teacher_model" in cfg:
        raise ConfigError(
            "teacher_model: predictions do not cover distillation; without the teacher's memory, too much would seem "
            "to fit"
        )
    if (shared := cfg.get("tensor_parallel_dim", 1)) != 1:  # before a run's own conditions, which lead to this one
        raise ConfigError(f"tensor_parallel_dim is {shared}, which predictions do not cover: set it to 1")
    settings, lora = training_of(cfg).read(cfg)
    if settings.device.partition(":")[0] not in PREDICTED:
        raise ConfigError(
            f"device is {settings.device!r}, which predictions do not cover: set it to {' or '.join(PREDICTED)}"
        )
    device_named(settings)
    if not on_gpu(settings) and is_packed(cfg):
        raise ConfigError("dataset.packed on a CPU is True, which predictions do not cover: set it to False")
    return settings, lora


def as_finetuning(cfg: DictConfig) -> DictConfig:
    """The config, in which PPO's policy is what finetuning calls the model."""
    return read_ppo_settings(cfg)[0].config if trains_with_ppo(cfg) else cfg


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


def compiles_itself(cfg: DictConfig) -> bool:
    """Whether the optimizer is one that compiles its update, whatever `compile` says."""
    return str(components.require(cfg, "optimizer").get(COMPONENT)).startswith("torchao.optim.")
