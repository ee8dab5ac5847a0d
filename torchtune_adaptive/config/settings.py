"""The keys that a recipe reads besides its components, checked before anything is built."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.config import rules
from torchtune_adaptive.config.adaptive import AdaptiveConfig, read_adaptive
from torchtune_adaptive.config.rules import (
    ABOVE_ZERO,
    BOOL,
    COUNT,
    INTEGER,
    NAMES,
    NULL,
    PATH,
    SECTION,
    TEXT,
    count_up_to,
    one_of,
    option,
    some_of,
    value_at,
)
from torchtune_adaptive.errors import ConfigError, together

AUTO = "auto"
FUSED_ON_SHARDS = ("Adam", "AdamW")
"""Optimizers of torch whose fused update takes the shards of FSDP2."""
IN_SECTIONS = {
    "tokenizer.max_seq_len": COUNT | NULL,
    "metric_logger.log_dir": PATH | NULL,
    "checkpointer.checkpoint_dir": PATH | NULL,
    "checkpointer.output_dir": PATH | NULL,
}
"""Keys of components, of which these would speak late, or of something else."""
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "output_proj")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Keys that the recipes know, with torchtune's names and defaults."""

    config: DictConfig = field(default_factory=lambda: OmegaConf.create({}), repr=False, compare=False)
    """Where they were read: the sections of the components are in there."""

    device: str = option(TEXT)
    dtype: str = option(one_of("bf16", "fp32"))
    output_dir: str = option(PATH)
    seed: int | None = option(INTEGER | NULL, None)
    cudnn_deterministic_mode: str | int | None = option(one_of("default", "warn", "error", 0, 1, 2) | NULL, None)

    batch_size: int = option(COUNT)
    use_maximum_batch_size: bool = option(BOOL, False, means="find the most rows that fit, and train with them")
    gradient_accumulation_steps: int = option(COUNT)
    epochs: int = option(count_up_to(100_000))
    max_steps_per_epoch: int | None = option(COUNT | NULL, None)
    shuffle: bool = option(BOOL)
    collate_fn: str = option(TEXT, "torchtune.data.padded_collate_sft")
    clip_grad_norm: float | str | None = option(ABOVE_ZERO | one_of("inf") | NULL, None)
    compile: bool = option(BOOL, False)

    resume_from_checkpoint: bool | str = option(
        BOOL | one_of(AUTO),
        False,
        means=(
            "`auto`: resume from the newest complete checkpoint of this run, or start. `True`: from the files "
            "that the config names, as in torchtune"
        ),
    )
    save_every_n_steps: int | None = option(
        COUNT | NULL, None, means="save a checkpoint every so many steps, in addition to the end of each epoch"
    )
    keep_last_n_checkpoints: int | None = option(
        COUNT | NULL,
        None,
        means=(
            "remove older checkpoints, except a finished run's last and the one resumed from; may also be set "
            "in `checkpointer`"
        ),
    )
    overwrite_output_dir: bool = option(BOOL, False, means="a fresh start removes existing checkpoints")
    enable_async_checkpointing: bool = option(BOOL, False)
    save_adapter_weights_only: bool = option(BOOL, False)

    enable_activation_checkpointing: bool = option(BOOL, False)
    enable_activation_offloading: bool = option(BOOL, False)
    ac_mode: str | None = option(one_of("full", "selective") | NULL, None)
    ac_option: int | None = option(COUNT | NULL, None)
    optimizer_in_bwd: bool = option(BOOL, False)

    custom_sharded_layers: tuple[str, ...] | None = option(NAMES | NULL, None)
    fsdp_cpu_offload: bool = option(BOOL, False)
    fsdp_reshard_after_forward: bool = option(BOOL, True)
    tensor_parallel_dim: int = option(COUNT, 1)
    data_parallel_replicate_dim: int = option(
        COUNT,
        1,
        means=(
            "replicas of the model, each sharded over its own consecutive ranks. Set it to the number of nodes,"
            " so that only gradients travel between nodes, once per step"
        ),
    )
    data_parallel_shard_dim: int | None = option(
        COUNT | one_of(-1) | NULL, -1, means="ranks that share a replica; -1 or null: all that are left"
    )

    log_every_n_steps: int = option(COUNT, 1)
    log_peak_memory_stats: bool = option(BOOL, False)

    adaptive: AdaptiveConfig = option(SECTION, AdaptiveConfig(), convert=lambda section, _: read_adaptive(section))

    @property
    def samples_per_step(self) -> int:
        """Samples that one rank contributes to one optimizer update."""
        return self.batch_size * self.gradient_accumulation_steps


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """The keys of a LoRA model's section that the recipe itself needs, to check and save its adapters."""

    lora_attn_modules: tuple[str, ...] = option(some_of(*PROJECTIONS))
    apply_lora_to_mlp: bool = option(BOOL)
    apply_lora_to_output: bool = option(BOOL, False)
    lora_rank: int = option(COUNT)
    lora_alpha: float = option(ABOVE_ZERO)


def on_gpu(where: Settings | DictConfig) -> bool:
    """Whether training runs on an accelerator, of whatever make: on anything but a CPU."""
    return not str(where.device).startswith("cpu")


def read_common(cfg: DictConfig) -> Settings:
    """What every recipe reads. `keep_last_n_checkpoints` may stand in the checkpointer's section too, where torchtune
    has planned it."""
    settings = replace(rules.read(Settings, cfg), config=cfg)
    _check_fused(cfg)
    together(partial(rules.check, rule, value_at(cfg, key), key) for key, rule in IN_SECTIONS.items())
    key = "keep_last_n_checkpoints"
    there = value_at(cfg, f"checkpointer.{key}")
    if there is None:
        return settings
    if settings.keep_last_n_checkpoints not in (None, there):
        raise ConfigError(
            f"{key} is {settings.keep_last_n_checkpoints} and checkpointer.{key} is {there}: remove one of them"
        )
    rules.check(COUNT, there, f"checkpointer.{key}")
    return replace(settings, keep_last_n_checkpoints=there)


def _check_fused(cfg: DictConfig) -> None:
    component, fused = (value_at(cfg, f"optimizer.{key}") for key in ("_component_", "fused"))
    path, _, name = str(component).rpartition(".")
    if fused is True and path.split(".")[:2] == ["torch", "optim"] and name not in FUSED_ON_SHARDS:
        raise ConfigError(
            f"optimizer.fused is True, but the fused update of {component} does not support FSDP2 shards: "
            f"set optimizer.fused: False, or use {' or '.join(FUSED_ON_SHARDS)}"
        )
