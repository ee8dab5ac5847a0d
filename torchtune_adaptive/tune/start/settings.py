"""The keys that a recipe reads besides its components, checked before anything is built."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.errors import ConfigError, together
from torchtune_adaptive.tune.start import sections
from torchtune_adaptive.tune.start.sections import (
    ABOVE_ZERO,
    BOOL,
    COUNT,
    INTEGER,
    NAMES,
    NULL,
    PATH,
    SECTION,
    TEXT,
    AdaptiveConfig,
    count_up_to,
    one_of,
    option,
    read_adaptive,
    some_of,
)

AUTO = "auto"
NOT_FOR_LORA = ("optimizer_in_bwd", "enable_async_checkpointing", "tensor_parallel_dim")
NOT_FOR_PAIRS = ("optimizer_in_bwd", "tensor_parallel_dim")
FUSED_ON_SHARDS = ("Adam", "AdamW")
"""Optimizers of torch whose fused update takes the shards of FSDP2."""
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
    use_maximum_batch_size: bool = option(BOOL, False, means="search for the most rows that fit, and train with them")
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
        means="`auto`: go on with the newest complete checkpoint of this run, or start. `True`: from the files that "
        "the config names, as in torchtune",
    )
    save_every_n_steps: int | None = option(
        COUNT | NULL, None, means="a checkpoint after every so many steps, besides those of every epoch"
    )
    keep_last_n_checkpoints: int | None = option(
        COUNT | NULL,
        None,
        means="older ones are removed, except a finished run's last and the one resumed from; may stand in "
        "`checkpointer` too",
    )
    overwrite_output_dir: bool = option(BOOL, False, means="a fresh start removes the checkpoints that are there")
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
        means="replicas of the model, each sharded over ranks of its own: as many as nodes, so that only gradients, "
        "once a step, travel between nodes. Parameters travel inside of a replica, whose ranks follow one another",
    )
    data_parallel_shard_dim: int | None = option(
        COUNT | one_of(-1) | NULL, -1, means="ranks that share a replica; -1 or null: as many as are left"
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


def read_full_settings(cfg: DictConfig) -> Settings:
    """Settings of a full finetune; refuses the combinations that torchtune refuses."""
    settings = read_common(cfg)
    checks = (_check_offloading, _check_no_clipping, _check_no_accumulation, _check_tensor_parallel)
    together(partial(check, settings) for check in checks)
    return settings


def read_lora_settings(cfg: DictConfig) -> tuple[Settings, LoraSettings]:
    """Settings of a LoRA finetune, some of them from its model's section."""
    settings = read_common(cfg)
    adapters: list[LoraSettings] = []

    def read_adapters() -> None:
        adapters.append(sections.read(LoraSettings, cfg.get("model"), prefix="model."))

    unsupported = partial(check_defaults, settings, NOT_FOR_LORA, "LoRA finetuning")
    replicas = partial(check_replicas, settings, quantized=OmegaConf.select(cfg, "model.quantize_base") is True)
    checks: list[Callable[[], None]] = [unsupported, replicas, partial(_check_offloading, settings), read_adapters]
    together(checks)
    return settings, adapters[0]


def read_full_dpo_settings(cfg: DictConfig) -> Settings:
    """Settings of full preference training."""
    settings = read_common(cfg)
    together(partial(check, settings) for check in (_check_offloading, _check_preference))
    return settings


def read_lora_dpo_settings(cfg: DictConfig) -> tuple[Settings, LoraSettings]:
    """Settings of preference training of adapters, some of them from the model's section."""
    settings, lora = read_lora_settings(cfg)
    _check_preference(settings)
    return settings, lora


def _check_preference(settings: Settings) -> None:
    unsupported = partial(check_defaults, settings, NOT_FOR_PAIRS, "preference training")
    together([unsupported, partial(_check_no_collate_fn, settings)])


def check_defaults(settings: Settings, keys: Iterable[str], training: str) -> None:
    """Refuses values of keys that this kind of training takes at their defaults only."""

    def check(key: str) -> None:
        value, allowed = getattr(settings, key), getattr(Settings, key)
        if value != allowed:
            raise ConfigError(f"{key} is {value}, which {training} does not support: allowed is {allowed}")

    together(partial(check, key) for key in keys)


def _check_no_collate_fn(settings: Settings) -> None:
    """Whatever it names: the recipe pads pairs by itself, and torchtune's does not read the key either."""
    if "collate_fn" in settings.config:
        raise ConfigError(
            f"collate_fn is {settings.config.collate_fn}, and preference training puts pairs together by itself: "
            "leave it out"
        )


def read_common(cfg: DictConfig) -> Settings:
    """What every recipe reads. `keep_last_n_checkpoints` may stand in the checkpointer's section too, where torchtune
    has planned it."""
    settings = replace(sections.read(Settings, cfg), config=cfg)
    _check_fused(cfg)
    section = cfg.get("checkpointer")
    if not OmegaConf.is_dict(section):
        return settings  # told of where the checkpointer is built
    for name in ("checkpoint_dir", "output_dir"):
        sections.check(PATH | NULL, section.get(name), f"checkpointer.{name}")
    key = "keep_last_n_checkpoints"
    there = section.get(key)
    if there is None:
        return settings
    if settings.keep_last_n_checkpoints not in (None, there):
        raise ConfigError(
            f"{key} is {settings.keep_last_n_checkpoints} and checkpointer.{key} is {there}: leave one of them out"
        )
    sections.check(COUNT, there, f"checkpointer.{key}")
    return replace(settings, keep_last_n_checkpoints=there)


def _check_fused(cfg: DictConfig) -> None:
    component, fused = (OmegaConf.select(cfg, f"optimizer.{key}") for key in ("_component_", "fused"))
    path, _, name = str(component).rpartition(".")
    if fused is True and path.split(".")[:2] == ["torch", "optim"] and name not in FUSED_ON_SHARDS:
        raise ConfigError(
            f"optimizer.fused is True and optimizer._component_ is {component}, whose fused update does not take the "
            f"shards of FSDP2: set optimizer.fused: False, or take one of {', '.join(FUSED_ON_SHARDS)}"
        )


def _check_offloading(settings: Settings) -> None:
    if settings.fsdp_cpu_offload and settings.device.startswith("cpu"):
        raise ConfigError(
            f"fsdp_cpu_offload is True and device is {settings.device!r}: weights are there already, set it to False"
        )
    if not settings.enable_activation_offloading:
        return
    if not settings.device.startswith("cuda"):
        raise ConfigError(
            f"enable_activation_offloading is True and device is {settings.device!r}: "
            "activations can be offloaded from cuda only"
        )
    if not settings.enable_activation_checkpointing:
        raise ConfigError(
            "enable_activation_offloading is True, but enable_activation_checkpointing is False: set it to True"
        )


def _check_no_clipping(settings: Settings) -> None:
    if settings.optimizer_in_bwd and settings.clip_grad_norm is not None:
        raise ConfigError(
            f"clip_grad_norm is {settings.clip_grad_norm} and optimizer_in_bwd is True: gradients are gone before "
            "they could be clipped; set one of them to null or False"
        )


def _check_no_accumulation(settings: Settings) -> None:
    if settings.optimizer_in_bwd and settings.gradient_accumulation_steps > 1:
        raise ConfigError(
            f"gradient_accumulation_steps is {settings.gradient_accumulation_steps} and optimizer_in_bwd is True, "
            "which updates in every backward: allowed is 1"
        )


def check_replicas(settings: Settings, *, quantized: bool) -> None:
    if quantized and settings.data_parallel_replicate_dim > 1:
        raise ConfigError(
            f"data_parallel_replicate_dim is {settings.data_parallel_replicate_dim}, but the model's weights are "
            "quantized, which torchtune fills in one replica only: set it to 1, or model.quantize_base: False"
        )


def _check_tensor_parallel(settings: Settings) -> None:
    if settings.tensor_parallel_dim == 1:
        return
    if settings.data_parallel_replicate_dim > 1:
        raise ConfigError(
            f"tensor_parallel_dim is {settings.tensor_parallel_dim} and data_parallel_replicate_dim is "
            f"{settings.data_parallel_replicate_dim}, which do not go together here: set one of them to 1"
        )
    if settings.config.get("tensor_parallel_plan") is None:
        raise ConfigError(
            f"tensor_parallel_dim is {settings.tensor_parallel_dim}, but tensor_parallel_plan is missing: "
            "name one, for example torchtune.models.llama3.base_llama_tp_plan"
        )
    if OmegaConf.select(settings.config, "optimizer.fused"):
        raise ConfigError(
            f"tensor_parallel_dim is {settings.tensor_parallel_dim} and optimizer.fused is True: "
            "set optimizer.fused: False"
        )
