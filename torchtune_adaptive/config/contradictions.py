"""Settings that contradict each other, or what is trained: refused, all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from torchtune_adaptive.config.rules import value_at
from torchtune_adaptive.config.settings import Settings, on_gpu
from torchtune_adaptive.errors import ConfigError, together

NOT_FOR_PAIRS = ("optimizer_in_bwd", "tensor_parallel_dim")


def refuse(settings: Settings, *checks: Callable[[Settings], object]) -> None:
    """One error for all that the checks refuse."""
    together(partial(check, settings) for check in checks)


def check_defaults(settings: Settings, keys: Iterable[str], training: str) -> None:
    """Refuses values of keys that this kind of training takes at their defaults only."""

    def check(key: str) -> None:
        value, allowed = getattr(settings, key), getattr(Settings, key)
        if value != allowed:
            raise ConfigError(f"{key} is {value}, which {training} does not support: allowed is {allowed}")

    together(partial(check, key) for key in keys)


def check_preference(settings: Settings) -> None:
    """Refuses what preference training cannot do."""
    refuse(
        settings,
        partial(check_defaults, keys=NOT_FOR_PAIRS, training="preference training"),
        _check_no_collate_fn,
        _check_whole_samples,
    )


def _check_whole_samples(settings: Settings) -> None:
    if settings.adaptive.precompute_reference and settings.adaptive.oversize == "truncate":
        raise ConfigError(
            "adaptive.precompute_reference is True and adaptive.oversize is truncate: precomputed log-probabilities "
            "are not valid for truncated samples; set adaptive.oversize to error and lower tokenizer.max_seq_len, "
            "or set adaptive.precompute_reference: False"
        )


def check_no_reference(settings: Settings) -> None:
    """Refuses what only preference training has."""
    if settings.adaptive.precompute_reference:
        raise ConfigError(
            "adaptive.precompute_reference is True, but finetuning has no reference: set it to False, or train with "
            "adaptive_full_dpo_distributed or adaptive_lora_dpo_distributed"
        )


def _check_no_collate_fn(settings: Settings) -> None:
    """Whatever it names: the recipe pads pairs by itself, and torchtune's does not read the key either."""
    if "collate_fn" in settings.config:
        raise ConfigError(
            f"collate_fn is {settings.config.collate_fn}, but preference training has its own collation: remove the key"
        )


def check_token_budget(settings: Settings) -> None:
    """Refuses what contradicts a token budget."""
    adaptive = settings.adaptive
    if adaptive.token_budget is None:
        if adaptive.padding is False:
            raise ConfigError(
                "adaptive.padding is False, but adaptive.token_budget is null, and microbatches limited by rows are "
                "always padded: set adaptive.token_budget to auto or a number, or adaptive.padding to null"
            )
        if adaptive.deal:
            raise ConfigError(
                "adaptive.deal is True, but adaptive.token_budget is null, and samples are dealt by cost only under a "
                "token budget: set adaptive.token_budget to auto or a number, or adaptive.deal to null"
            )
        return
    if adaptive.max_batch_size is not None:
        raise ConfigError(
            f"adaptive.max_batch_size is {adaptive.max_batch_size} and adaptive.token_budget is "
            f"{adaptive.token_budget}: a token budget already limits the rows; set one of them to null"
        )
    for key, reason in (
        ("use_maximum_batch_size", "a microbatch is limited by rows or by tokens"),
        ("optimizer_in_bwd", "the optimizer updates weights after every microbatch, so a step cannot have several"),
    ):
        if getattr(settings, key):
            raise ConfigError(
                f"{key} is True and adaptive.token_budget is {adaptive.token_budget}, but {reason}: "
                f"set {key}: False or adaptive.token_budget: null"
            )


def check_offloading(settings: Settings) -> None:
    if settings.fsdp_cpu_offload and not on_gpu(settings):
        raise ConfigError(
            f"fsdp_cpu_offload is True, but device is {settings.device!r}, so the weights are already on the CPU: "
            "set it to False"
        )
    if not settings.enable_activation_offloading:
        return
    if not settings.device.startswith("cuda"):
        raise ConfigError(
            f"enable_activation_offloading is True, but device is {settings.device!r}: offloading needs cuda; set it "
            "to False"
        )
    if not settings.enable_activation_checkpointing:
        raise ConfigError(
            "enable_activation_offloading is True, but enable_activation_checkpointing is False: set it to True"
        )


def check_clipping(settings: Settings) -> None:
    if settings.optimizer_in_bwd and settings.clip_grad_norm is not None:
        raise ConfigError(
            f"clip_grad_norm is {settings.clip_grad_norm} and optimizer_in_bwd is True: gradients are freed before "
            "they can be clipped; set one of them to null or False"
        )


def check_accumulation(settings: Settings) -> None:
    if settings.optimizer_in_bwd and settings.gradient_accumulation_steps > 1:
        raise ConfigError(
            f"gradient_accumulation_steps is {settings.gradient_accumulation_steps}, but optimizer_in_bwd updates "
            "weights in every backward: set it to 1"
        )


def check_replicas(settings: Settings, *, quantized: bool) -> None:
    if quantized and settings.data_parallel_replicate_dim > 1:
        raise ConfigError(
            f"data_parallel_replicate_dim is {settings.data_parallel_replicate_dim}, but torchtune loads quantized "
            "weights into one replica only: set it to 1, or model.quantize_base: False"
        )


def check_tensor_parallel(settings: Settings) -> None:
    if settings.tensor_parallel_dim == 1:
        return
    if settings.data_parallel_replicate_dim > 1:
        raise ConfigError(
            f"tensor_parallel_dim is {settings.tensor_parallel_dim} and data_parallel_replicate_dim is "
            f"{settings.data_parallel_replicate_dim}, which cannot be combined: set one of them to 1"
        )
    if settings.config.get("tensor_parallel_plan") is None:
        raise ConfigError(
            f"tensor_parallel_dim is {settings.tensor_parallel_dim}, but tensor_parallel_plan is missing: set one, "
            "for example torchtune.models.llama3.base_llama_tp_plan"
        )
    if value_at(settings.config, "optimizer.fused"):
        raise ConfigError(
            f"tensor_parallel_dim is {settings.tensor_parallel_dim} and optimizer.fused is True: "
            "set optimizer.fused: False"
        )
