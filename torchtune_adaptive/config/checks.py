"""Check settings before anything is built: misspelt keys, and values that exclude each other."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Collection, Iterable, Iterator
from functools import partial

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.config.keys import AdaptiveConfig, LoraSettings, Settings, keys_of, read, read_common, value_at
from torchtune_adaptive.errors import refuse, run_checks

logger = logging.getLogger(__name__)

SECTIONS = (
    "model", "tokenizer", "dataset", "dataset_val", "loss", "optimizer", "lr_scheduler", "checkpointer",
    "ref_checkpointer", "metric_logger", "profiler", "tensor_parallel_plan", "batch_increase_function",
)  # fmt: skip
MISSPELT = 0.8
"""From this similarity on (from 0 to 1), an unknown key counts as a misspelling of a known one."""
ONLY_FOR_FULL_FINETUNING = ("optimizer_in_bwd", "tensor_parallel_dim")


def read_lora_settings(cfg: DictConfig) -> tuple[Settings, LoraSettings]:
    """Read the settings of finetuning or preference training with LoRA, and those in the section `model`."""
    read_settings = partial(read_full_settings, cfg, "LoRA", ONLY_FOR_FULL_FINETUNING)
    settings, adapters = run_checks((read_settings, partial(read, LoraSettings, cfg.get("model"), prefix="model.")))
    return settings, adapters


def read_full_settings(
    cfg: DictConfig, training: str = "full finetuning", not_supported: Iterable[str] = ()
) -> Settings:
    """Read the settings of a recipe. Raise ConfigError for combinations that torchtune rejects."""
    settings = read_common(cfg)
    refuse(not_at_default(settings, not_supported, training), contradictions(settings), token_budget(settings))
    return settings


def contradictions(settings: Settings) -> Iterator[str]:
    """Yield an error for each combination of values that exclude each other."""
    device, dim = settings.device, settings.tensor_parallel_dim
    if settings.fsdp_cpu_offload and device.startswith("cpu"):
        yield f"fsdp_cpu_offload is True, but device is {device!r}: the weights are already on the CPU; set it to False"
    if settings.enable_activation_offloading and not device.startswith("cuda"):
        yield f"enable_activation_offloading is True, but device is {device!r}: it needs cuda; set it to False"
    if settings.optimizer_in_bwd and settings.clip_grad_norm is not None:
        yield (
            f"optimizer_in_bwd is True and clip_grad_norm is {settings.clip_grad_norm}: gradients are freed before "
            "they can be clipped; set one of them to null or False"
        )
    if settings.optimizer_in_bwd and settings.gradient_accumulation_steps > 1:
        yield "optimizer_in_bwd is True, which updates weights in every backward: set gradient_accumulation_steps to 1"
    rows, most = settings.batch_size, settings.adaptive.max_batch_size
    keeps_step = settings.adaptive.accumulation != "fixed"
    if settings.optimizer_in_bwd and settings.use_maximum_batch_size and keeps_step and (most or rows) < rows:
        yield (
            f"optimizer_in_bwd is True, so the batch_size of {rows} rows must fit in one microbatch, but "
            f"adaptive.max_batch_size is {most}: lower batch_size or raise adaptive.max_batch_size"
        )
    if settings.ac_mode == "selective" and settings.ac_option is None and not settings.enable_activation_checkpointing:
        yield "ac_mode is selective, but ac_option is null: set ac_option: N for every Nth layer, or ac_mode: full"
    if dim > 1 and settings.data_parallel_replicate_dim > 1:
        yield f"tensor_parallel_dim is {dim} and cannot be combined with data_parallel_replicate_dim: set one to 1"
    if dim > 1 and value_at(settings.config, "optimizer.fused"):
        yield f"tensor_parallel_dim is {dim} and optimizer.fused is True: set optimizer.fused: False"
    if settings.run_val_every_n_steps is not None and settings.config.get("dataset_val") is None:
        yield (
            f"run_val_every_n_steps is {settings.run_val_every_n_steps}, but dataset_val is missing: add a section "
            "like dataset, or set run_val_every_n_steps: null"
        )


def token_budget(settings: Settings) -> Iterator[str]:
    """Yield an error for each setting that cannot be combined with a token budget."""
    adaptive, budget = settings.adaptive, settings.adaptive.token_budget
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
    """Yield an error for each of these `keys` that is not at its default, the only value that `training` supports."""
    for key in keys:
        value, allowed = getattr(settings, key), getattr(Settings, key)
        if value != allowed:
            yield f"{key} is {value}, which {training} does not support: allowed is {allowed}"


def check_keys(cfg: DictConfig, more: Collection[str] = (), *, log: bool) -> None:
    """Raise ConfigError for keys that look misspelt or misplaced. With `log`, log other unknown keys.

    `more` are the keys that are known in addition to those of all recipes.
    """
    known, adaptive_keys = {*keys_of(Settings), *SECTIONS, *more}, keys_of(AdaptiveConfig)
    referenced = set(re.findall(r"\$\{(\w+)", str(OmegaConf.to_container(cfg, resolve=False))))  # ${output_dir}/logs
    unknown = sorted(str(key) for key in cfg if key not in known | referenced)
    problems = [
        f"{key} has no effect here: did you mean adaptive.{key}? If it is your own key, rename it"
        for key in unknown
        if key in adaptive_keys
    ]
    section = cfg.get("adaptive")
    problems += [
        f"adaptive.{key} has no effect: did you mean {key}? It belongs at the top of the config"
        for key in (section if OmegaConf.is_dict(section) else ())
        if key in known - {*adaptive_keys}
    ]
    for key in (key for key in unknown if key not in adaptive_keys):
        similar = next(iter(difflib.get_close_matches(key, known, n=1, cutoff=MISSPELT)), None)
        # Accept a key that only adds a prefix or a suffix to a known one, for example ppo_batch_size.
        if similar and not key.startswith(f"{similar}_") and not key.endswith(f"_{similar}"):
            problems.append(
                f"{key} is not a known key: did you mean {similar}? If it is your own key, give it a less similar name"
            )
    refuse(problems)
    if unknown and log:
        logger.info("ignored config keys: %s", ", ".join(unknown))
