"""Refused before anything is built: keys that nothing reads, and settings that contradict each other."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.config import keys
from torchtune_adaptive.config.components import COMPONENT
from torchtune_adaptive.config.keys import (
    AdaptiveConfig,
    LoraSettings,
    Settings,
    keys_of,
    on_gpu,
    read_common,
    value_at,
)
from torchtune_adaptive.errors import ConfigError, together
from torchtune_adaptive.text import nearest

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
    read_adapters = partial(keys.read, LoraSettings, cfg.get("model"), prefix="model.")
    refuse(
        settings,
        partial(check_defaults, keys=NOT_FOR_LORA, training="LoRA finetuning"),
        partial(check_replicas, quantized=keys.value_at(cfg, "model.quantize_base") is True),
        check_offloading,
        lambda _: read_adapters(),
        check_token_budget,
        *checks,
    )
    return settings, read_adapters()


logger = logging.getLogger(__name__)

SECTIONS = (
    "model",
    "tokenizer",
    "dataset",
    "loss",
    "optimizer",
    "lr_scheduler",
    "checkpointer",
    "ref_checkpointer",
    "metric_logger",
    "profiler",
    "tensor_parallel_plan",
    "batch_increase_function",
)
OF_PPO = "policy_model"
MISSPELT = 0.8
"""Similarity, from 0 to 1, at which a key counts as a typo."""


def check_keys(cfg: DictConfig, more: Collection[str] = (), *, aloud: bool) -> None:
    """Refuses keys that look like misspelt ones; names the others that nothing reads in a log line."""
    if OF_PPO in cfg and OF_PPO not in more:
        raise ConfigError(
            f"{OF_PPO} is read only by the PPO recipe: run adaptive_ppo_full_finetune_distributed, or remove it"
        )
    known = {*keys_of(Settings), *SECTIONS, *more}
    unread = sorted(str(key) for key in cfg if key not in known | _referred_to(cfg))
    _check_places(cfg, unread)
    _check_adaptive(cfg, known)
    for key in unread:
        if (meant := _meant(key, known)) is not None:
            raise ConfigError(
                f"{key} is not a known key: did you mean {meant}? If it is your own key, give it a less similar name"
            )
    if unread and aloud:
        logger.info("ignored config keys: %s", ", ".join(unread))


def _check_places(cfg: DictConfig, unread: Collection[str]) -> None:
    """Refuses keys of `adaptive:` at the top of the config, or in a section, where nothing reads them.

    In a section with a _component_ they are the component's own, whose constructor refuses what is not.
    """
    ours = set(keys_of(AdaptiveConfig))
    paths = (path for key in unread for path in _paths(key, cfg._get_node(key)))
    if not (found := [path for path in paths if path.rpartition(".")[2] in ours]):
        return
    places = " and ".join(f"adaptive.{path.rpartition('.')[2]}" for path in found)
    one = len(found) == 1
    raise ConfigError(
        f"{' and '.join(found)} {'has' if one else 'have'} no effect here; did you mean {places}? "
        f"{'Rename your own key' if one else 'Rename your own keys'}"
    )


def _check_adaptive(cfg: DictConfig, known: Collection[str]) -> None:
    """Refuses keys of the recipe that stand in `adaptive:`."""
    section = cfg.get("adaptive")
    astray = [str(key) for key in section if key in known] if isinstance(section, DictConfig) else []
    astray = [key for key in astray if key not in keys_of(AdaptiveConfig)]
    if astray:
        names = " and ".join(astray)
        raise ConfigError(
            f"{' and '.join(f'adaptive.{key}' for key in astray)} {'has' if len(astray) == 1 else 'have'} no effect "
            f"here: move {names} out of adaptive"
        )


def _paths(path: str, value: object) -> Iterator[str]:
    """This key and those of its section, down to the first component, which checks its own."""
    yield path
    if isinstance(value, DictConfig) and not value._is_none() and COMPONENT not in value:
        for key in value:
            yield from _paths(f"{path}.{key!s}", value._get_node(key))


def _referred_to(cfg: DictConfig) -> set[str]:
    """Keys that other values are made from, as in `${output_dir}/logs`."""
    return set(re.findall(r"\$\{(\w+)", str(OmegaConf.to_container(cfg, resolve=False))))


def _meant(key: str, known: Collection[str]) -> str | None:
    near = nearest(key, known, MISSPELT)
    if near is None or key.startswith(f"{near}_") or key.endswith(f"_{near}"):  # ppo_batch_size is no slip
        return None
    return near
