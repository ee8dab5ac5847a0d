"""What is refused before anything is built: keys that nothing reads, and settings that contradict each other."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import chain

from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.config.components import COMPONENT
from torchtune_adaptive.config.keys import (
    AdaptiveConfig,
    LoraSettings,
    Settings,
    keys_of,
    on_gpu,
    read,
    read_common,
    value_at,
)
from torchtune_adaptive.errors import ConfigError, raise_together, together
from torchtune_adaptive.text import nearest

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
NOT_FOR_LORA = ("optimizer_in_bwd", "enable_async_checkpointing", "tensor_parallel_dim")
NOT_FOR_PAIRS = ("optimizer_in_bwd", "tensor_parallel_dim")


def read_full_settings(cfg: DictConfig) -> Settings:
    """Settings of a full finetune; refuses the combinations that torchtune refuses."""
    settings = read_common(cfg)
    refuse(
        offloading(settings),
        updates_in_backward(settings),
        tensor_parallel(settings),
        token_budget(settings),
        no_reference(settings),
    )
    return settings


def read_lora_settings(cfg: DictConfig) -> tuple[Settings, LoraSettings]:
    """Settings of a LoRA finetune, some of them from its model's section."""
    return _read_with_adapters(cfg, no_reference)


def read_full_dpo_settings(cfg: DictConfig) -> Settings:
    """Settings of full preference training."""
    settings = read_common(cfg)
    refuse(offloading(settings), token_budget(settings), pairs(settings))
    return settings


def read_lora_dpo_settings(cfg: DictConfig) -> tuple[Settings, LoraSettings]:
    """Settings of preference training of adapters, some of them from the model's section."""
    return _read_with_adapters(cfg, pairs)


def _read_with_adapters(
    cfg: DictConfig, of_its_data: Callable[[Settings], Iterable[str]]
) -> tuple[Settings, LoraSettings]:
    def read_settings() -> Settings:
        settings = read_common(cfg)
        refuse(
            not_at_default(settings, NOT_FOR_LORA, "LoRA finetuning"),
            quantized_replicas(settings, quantized=value_at(cfg, "model.quantize_base") is True),
            offloading(settings),
            token_budget(settings),
            of_its_data(settings),
        )
        return settings

    settings, adapters = together((read_settings, partial(read, LoraSettings, cfg.get("model"), prefix="model.")))
    return settings, adapters


def refuse(*problems: Iterable[str]) -> None:
    """One error for all problems, where there are any."""
    raise_together(map(ConfigError, chain(*problems)))


def not_at_default(settings: Settings, keys: Iterable[str], training: str) -> Iterator[str]:
    """Values of keys that this kind of training takes at their defaults only."""
    for key in keys:
        value, allowed = getattr(settings, key), getattr(Settings, key)
        if value != allowed:
            yield f"{key} is {value}, which {training} does not support: allowed is {allowed}"


def pairs(settings: Settings) -> Iterator[str]:
    """What preference training cannot do."""
    yield from not_at_default(settings, NOT_FOR_PAIRS, "preference training")
    if "collate_fn" in settings.config:  # torchtune's recipe does not read it either
        yield (
            f"collate_fn is {settings.config.collate_fn}, but preference training has its own collation: remove the key"
        )
    if settings.adaptive.precompute_reference and settings.adaptive.oversize == "truncate":
        yield (
            "adaptive.precompute_reference is True and adaptive.oversize is truncate: precomputed log-probabilities "
            "are not valid for truncated samples; set adaptive.oversize to error and lower tokenizer.max_seq_len, "
            "or set adaptive.precompute_reference: False"
        )


def no_reference(settings: Settings) -> Iterator[str]:
    if settings.adaptive.precompute_reference:
        yield (
            "adaptive.precompute_reference is True, but finetuning has no reference: set it to False, or train with "
            "adaptive_full_dpo_distributed or adaptive_lora_dpo_distributed"
        )


def token_budget(settings: Settings) -> Iterator[str]:
    adaptive = settings.adaptive
    budget = adaptive.token_budget
    if budget is None:
        remedy = "set adaptive.token_budget to auto or a number, or"
        if adaptive.padding is False:
            yield (
                "adaptive.padding is False, but adaptive.token_budget is null, and microbatches limited by rows are "
                f"always padded: {remedy} adaptive.padding to null"
            )
        if adaptive.deal:
            yield (
                "adaptive.deal is True, but adaptive.token_budget is null, and samples are dealt by cost only under a "
                f"token budget: {remedy} adaptive.deal to null"
            )
        return
    if adaptive.max_batch_size is not None:
        yield (
            f"adaptive.max_batch_size is {adaptive.max_batch_size} and adaptive.token_budget is {budget}: "
            "a token budget already limits the rows; set one of them to null"
        )
    reasons = {
        "use_maximum_batch_size": "a microbatch is limited by rows or by tokens",
        "optimizer_in_bwd": "the optimizer updates weights after every microbatch, so a step cannot have several",
    }
    for key, reason in reasons.items():
        if getattr(settings, key):
            yield (
                f"{key} is True and adaptive.token_budget is {budget}, but {reason}: "
                f"set {key}: False or adaptive.token_budget: null"
            )


def offloading(settings: Settings) -> Iterator[str]:
    device = settings.device
    if settings.fsdp_cpu_offload and not on_gpu(settings):
        yield (
            f"fsdp_cpu_offload is True, but device is {device!r}, so the weights are already on the CPU: "
            "set it to False"
        )
    if not settings.enable_activation_offloading:
        return
    if not device.startswith("cuda"):
        yield (
            f"enable_activation_offloading is True, but device is {device!r}: offloading needs cuda; set it to False"
        )
    elif not settings.enable_activation_checkpointing:
        yield "enable_activation_offloading is True, but enable_activation_checkpointing is False: set it to True"


def updates_in_backward(settings: Settings) -> Iterator[str]:
    if not settings.optimizer_in_bwd:
        return
    if settings.clip_grad_norm is not None:
        yield (
            f"clip_grad_norm is {settings.clip_grad_norm} and optimizer_in_bwd is True: gradients are freed before "
            "they can be clipped; set one of them to null or False"
        )
    if settings.gradient_accumulation_steps > 1:
        yield (
            f"gradient_accumulation_steps is {settings.gradient_accumulation_steps}, but optimizer_in_bwd updates "
            "weights in every backward: set it to 1"
        )


def quantized_replicas(settings: Settings, *, quantized: bool) -> Iterator[str]:
    if quantized and settings.data_parallel_replicate_dim > 1:
        yield (
            f"data_parallel_replicate_dim is {settings.data_parallel_replicate_dim}, but torchtune loads quantized "
            "weights into one replica only: set it to 1, or model.quantize_base: False"
        )


def tensor_parallel(settings: Settings) -> Iterator[str]:
    dim = settings.tensor_parallel_dim
    if dim == 1:
        return
    if settings.data_parallel_replicate_dim > 1:
        yield (
            f"tensor_parallel_dim is {dim} and data_parallel_replicate_dim is "
            f"{settings.data_parallel_replicate_dim}, which cannot be combined: set one of them to 1"
        )
        return
    if settings.config.get("tensor_parallel_plan") is None:
        yield (
            f"tensor_parallel_dim is {dim}, but tensor_parallel_plan is missing: set one, "
            "for example torchtune.models.llama3.base_llama_tp_plan"
        )
    if value_at(settings.config, "optimizer.fused"):
        yield f"tensor_parallel_dim is {dim} and optimizer.fused is True: set optimizer.fused: False"


def check_keys(cfg: DictConfig, more: Collection[str] = (), *, aloud: bool) -> None:
    """Refuses keys that look misspelt or misplaced; names the others that nothing reads in a log line."""
    if OF_PPO in cfg and OF_PPO not in more:
        raise ConfigError(
            f"{OF_PPO} is read only by the PPO recipe: run adaptive_ppo_full_finetune_distributed, or remove it"
        )
    known = {*keys_of(Settings), *SECTIONS, *more}
    referred_to = set(re.findall(r"\$\{(\w+)", str(OmegaConf.to_container(cfg, resolve=False))))  # ${output_dir}/logs
    unread = sorted(str(key) for key in cfg if key not in known | referred_to)
    refuse(_misplaced(cfg, unread), _not_of_adaptive(cfg, known), _misspelt(unread, known))
    if unread and aloud:
        logger.info("ignored config keys: %s", ", ".join(unread))


def _misplaced(cfg: DictConfig, unread: Collection[str]) -> Iterator[str]:
    """Keys of `adaptive:` at the top of the config, or in a section, where nothing reads them.

    In a section with a _component_ they are the component's own, whose constructor refuses what is not.
    """
    for path in (path for key in unread for path in _paths(key, cfg._get_node(key))):
        name = path.rpartition(".")[2]
        if name in keys_of(AdaptiveConfig):
            yield f"{path} has no effect here: did you mean adaptive.{name}? If it is your own key, rename it"


def _paths(path: str, value: object) -> Iterator[str]:
    """This key and those of its section, down to the first component, which checks its own."""
    yield path
    if isinstance(value, DictConfig) and not value._is_none() and COMPONENT not in value:
        for key in value:
            yield from _paths(f"{path}.{key!s}", value._get_node(key))


def _not_of_adaptive(cfg: DictConfig, known: Collection[str]) -> Iterator[str]:
    """Keys of the recipe that stand in `adaptive:`."""
    section = cfg.get("adaptive")
    for key in map(str, section if isinstance(section, DictConfig) else ()):
        if key in known and key not in keys_of(AdaptiveConfig):
            yield f"adaptive.{key} has no effect here: move {key} out of adaptive"


def _misspelt(unread: Collection[str], known: Collection[str]) -> Iterator[str]:
    for key in unread:
        near = nearest(key, known, MISSPELT)
        its_own = near is None or key.startswith(f"{near}_") or key.endswith(f"_{near}")  # ppo_batch_size is no slip
        if not its_own and key not in keys_of(AdaptiveConfig):
            yield f"{key} is not a known key: did you mean {near}? If it is your own key, give it a less similar name"
