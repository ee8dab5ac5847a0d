"""The settings of each recipe for finetuning and preference training, with what it refuses: all of it at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from omegaconf import DictConfig

from torchtune_adaptive.config import rules
from torchtune_adaptive.config.contradictions import (
    check_accumulation,
    check_clipping,
    check_defaults,
    check_no_reference,
    check_offloading,
    check_preference,
    check_replicas,
    check_tensor_parallel,
    check_token_budget,
    refuse,
)
from torchtune_adaptive.config.settings import LoraSettings, Settings, read_common

NOT_FOR_LORA = ("optimizer_in_bwd", "enable_async_checkpointing", "tensor_parallel_dim")


def read_full_settings(cfg: DictConfig) -> Settings:
    """Settings of a full finetune; refuses the combinations that torchtune refuses."""
    settings = read_common(cfg)
    refuse(
        settings,
        check_offloading,
        check_clipping,
        check_accumulation,
        check_tensor_parallel,
        check_token_budget,
        check_no_reference,
    )
    return settings


def read_lora_settings(cfg: DictConfig) -> tuple[Settings, LoraSettings]:
    """Settings of a LoRA finetune, some of them from its model's section."""
    return _read_with_adapters(cfg, check_no_reference)


def read_full_dpo_settings(cfg: DictConfig) -> Settings:
    """Settings of full preference training."""
    settings = read_common(cfg)
    refuse(settings, check_offloading, check_token_budget, check_preference)
    return settings


def read_lora_dpo_settings(cfg: DictConfig) -> tuple[Settings, LoraSettings]:
    """Settings of preference training of adapters, some of them from the model's section."""
    return _read_with_adapters(cfg, check_preference)


def _read_with_adapters(cfg: DictConfig, *checks: Callable[[Settings], object]) -> tuple[Settings, LoraSettings]:
    settings = read_common(cfg)
    read_adapters = partial(rules.read, LoraSettings, cfg.get("model"), prefix="model.")
    refuse(
        settings,
        partial(check_defaults, keys=NOT_FOR_LORA, training="LoRA finetuning"),
        partial(check_replicas, quantized=rules.value_at(cfg, "model.quantize_base") is True),
        check_offloading,
        lambda _: read_adapters(),
        check_token_budget,
        *checks,
    )
    return settings, read_adapters()
