"""Check settings before anything is built: misspelt keys and contradictory values."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Collection, Iterable, Iterator
from functools import partial

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.config.keys import AdaptiveConfig, LoraSettings, Settings, keys_of, read, read_common, value_at
from torchtune_adaptive.engine.search import NEED_RECOVERY
from torchtune_adaptive.errors import ConfigError, refuse, together

logger = logging.getLogger(__name__)

SECTIONS = (
    "model", "tokenizer", "dataset", "dataset_val", "loss", "optimizer", "lr_scheduler", "checkpointer",
    "ref_checkpointer", "metric_logger", "profiler", "tensor_parallel_plan", "batch_increase_function",
)  # fmt: skip
OF_PPO = "policy_model"
MISSPELT = 0.8
"""Similarity, from 0 to 1, at which a key counts as a typo."""
NOT_FOR_LORA = ("optimizer_in_bwd", "tensor_parallel_dim")
NOT_FOR_PAIRS = ("optimizer_in_bwd", "tensor_parallel_dim")


def read_full_settings(cfg: DictConfig) -> Settings:
    """Read the settings of a full finetune; refuse combinations that torchtune refuses."""
    return _read(cfg, "full finetuning")


def read_lora_settings(cfg: DictConfig) -> tuple[Settings, LoraSettings]:
    """Read the settings of a finetune or preference training with LoRA, including those in the model's section."""
    read_settings = partial(_read, cfg, "LoRA finetuning", *NOT_FOR_LORA)
    settings, adapters = together((read_settings, partial(read, LoraSettings, cfg.get("model"), prefix="model.")))
    return settings, adapters


def read_full_dpo_settings(cfg: DictConfig) -> Settings:
    """Read the settings of a full preference training."""
    return _read(cfg, "preference training", *NOT_FOR_PAIRS)


def _read(cfg: DictConfig, training: str, *not_supported: str) -> Settings:
    settings = read_common(cfg)
    refuse(
        not_at_default(settings, not_supported, training),
        quantized_replicas(settings, quantized=value_at(cfg, "model.quantize_base") is True),
        contradictions(settings),
        token_budget(settings),
    )
    return settings


def contradictions(settings: Settings) -> Iterator[str]:
    """Yield errors for values that exclude each other."""
    device, adaptive, dim = settings.device, settings.adaptive, settings.tensor_parallel_dim
    if settings.fsdp_cpu_offload and device.startswith("cpu"):
        yield f"fsdp_cpu_offload is True, but device is {device!r}: the weights are already on the CPU; set it to False"
    if settings.enable_activation_offloading and not device.startswith("cuda"):
        yield f"enable_activation_offloading is True, but device is {device!r}: it needs cuda; set it to False"
    elif settings.enable_activation_offloading and not settings.enable_activation_checkpointing:
        yield "enable_activation_offloading is True, but enable_activation_checkpointing is False: set it to True"
    if settings.optimizer_in_bwd and settings.clip_grad_norm is not None:
        yield (
            f"optimizer_in_bwd is True and clip_grad_norm is {settings.clip_grad_norm}: gradients are freed before "
            "they can be clipped; set one of them to null or False"
        )
    if settings.optimizer_in_bwd and settings.gradient_accumulation_steps > 1:
        yield "optimizer_in_bwd is True, which updates weights in every backward: set gradient_accumulation_steps to 1"
    if dim > 1 and settings.data_parallel_replicate_dim > 1:
        yield f"tensor_parallel_dim is {dim} and cannot be combined with data_parallel_replicate_dim: set one to 1"
    elif dim > 1 and settings.config.get("tensor_parallel_plan") is None:
        yield (
            f"tensor_parallel_dim is {dim}, but tensor_parallel_plan is missing: set one, for example "
            "torchtune.models.llama3.base_llama_tp_plan"
        )
    if dim > 1 and value_at(settings.config, "optimizer.fused"):
        yield f"tensor_parallel_dim is {dim} and optimizer.fused is True: set optimizer.fused: False"
    repeats = adaptive.recover_from_oom is not False and not settings.optimizer_in_bwd
    if settings.use_maximum_batch_size and adaptive.search in NEED_RECOVERY and not repeats:
        yield (
            f"adaptive.search is {adaptive.search}, which provokes out-of-memory errors, but recovery is off "
            "(adaptive.recover_from_oom: False or optimizer_in_bwd): set adaptive.search: linear"
        )
    if settings.run_val_every_n_steps is not None and settings.config.get("dataset_val") is None:
        yield (
            f"run_val_every_n_steps is {settings.run_val_every_n_steps}, but dataset_val is missing: add a section "
            "like dataset, or set run_val_every_n_steps to null"
        )
    if settings.keep_best_checkpoint and settings.run_val_every_n_steps is None:
        yield "keep_best_checkpoint is True, but run_val_every_n_steps is null: set it, or keep_best_checkpoint: False"


def token_budget(settings: Settings) -> Iterator[str]:
    """Yield errors for settings that exclude or require a token budget."""
    adaptive, budget = settings.adaptive, settings.adaptive.token_budget
    if budget is None and adaptive.padding is False:
        yield "adaptive.padding is False, but adaptive.token_budget is null: set it to auto, or padding to null"
    if budget is None and adaptive.deal:
        yield "adaptive.deal is True, but adaptive.token_budget is null: set it to auto, or deal to null"
    if budget is not None and adaptive.max_batch_size is not None:
        yield (
            f"adaptive.max_batch_size is {adaptive.max_batch_size} and adaptive.token_budget is {budget}: "
            "a limit is in rows or in tokens; set one of them to null"
        )
    for key in ("use_maximum_batch_size", "optimizer_in_bwd"):
        if budget is not None and getattr(settings, key):
            yield (
                f"{key} is True and adaptive.token_budget is {budget}; they exclude each other: set {key}: False or "
                "adaptive.token_budget: null"
            )


def not_at_default(settings: Settings, keys: Iterable[str], training: str) -> Iterator[str]:
    """Yield errors for keys that this kind of training supports only at their defaults."""
    for key in keys:
        value, allowed = getattr(settings, key), getattr(Settings, key)
        if value != allowed:
            yield f"{key} is {value}, which {training} does not support: allowed is {allowed}"


def quantized_replicas(settings: Settings, *, quantized: bool) -> Iterator[str]:
    """Yield an error for several replicas of quantized weights."""
    if quantized and settings.data_parallel_replicate_dim > 1:
        yield (
            f"data_parallel_replicate_dim is {settings.data_parallel_replicate_dim}, but torchtune supports "
            "quantized weights in one replica only: set it to 1, or model.quantize_base: False"
        )


def check_keys(cfg: DictConfig, more: Collection[str] = (), *, aloud: bool) -> None:
    """Refuse keys that look misspelt or misplaced; log other unknown keys."""
    if OF_PPO in cfg and OF_PPO not in more:
        raise ConfigError(
            f"{OF_PPO} is read only by the PPO recipe: run adaptive_ppo_full_finetune_distributed, or remove it"
        )
    known, ours = {*keys_of(Settings), *SECTIONS, *more}, keys_of(AdaptiveConfig)
    referred_to = set(re.findall(r"\$\{(\w+)", str(OmegaConf.to_container(cfg, resolve=False))))  # ${output_dir}/logs
    unread = sorted(str(key) for key in cfg if key not in known | referred_to)
    problems = [
        f"{key} has no effect here: did you mean adaptive.{key}? If it is your own key, rename it"
        for key in unread
        if key in ours
    ]
    for key in (key for key in unread if key not in ours):
        near = next(iter(difflib.get_close_matches(key, known, n=1, cutoff=MISSPELT)), None)
        if near and not key.startswith(f"{near}_") and not key.endswith(f"_{near}"):  # ppo_batch_size is correct
            problems.append(
                f"{key} is not a known key: did you mean {near}? If it is your own key, give it a less similar name"
            )
    refuse(problems)
    if unread and aloud:
        logger.info("ignored config keys: %s", ", ".join(unread))
