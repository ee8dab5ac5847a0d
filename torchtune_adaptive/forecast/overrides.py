"""What may be changed in a config so that a step needs less memory or time: keys, as the command line takes them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torchtune.config._utils import _get_component_from_path

from torchtune_adaptive.config.components import COMPONENT
from torchtune_adaptive.config.keys import Settings, on_gpu
from torchtune_adaptive.errors import AdaptiveError
from torchtune_adaptive.forecast.which_recipe import is_lora, keeps_reference, training_of

Overrides = tuple[str, ...]

CHUNKED = "torchtune.modules.loss.CEWithChunkedOutputLoss"

IN_8_BITS = {"torch.optim.AdamW": "torchao.optim.AdamW8bit", "torch.optim.Adam": "torchao.optim.Adam8bit"}
TAKEN_IN_8_BITS = {COMPONENT, "lr", "betas", "eps", "weight_decay", "amsgrad"}
SMALL_LORA_RANK = 8
EVERY_SECOND_LAYER: Overrides = ("enable_activation_checkpointing=False", "ac_mode=selective", "ac_option=2")


def changed(cfg: DictConfig, overrides: Overrides) -> DictConfig:
    """The config as torchtune's parser would make it of these."""
    copy = cfg.copy()
    for removed in (each[1:] for each in overrides if each.startswith("~")):
        section, _, key = removed.rpartition(".")
        holder = OmegaConf.select(copy, section) if section else copy
        holder.pop(key, None)
    merged = OmegaConf.merge(copy, OmegaConf.from_dotlist([each for each in overrides if not each.startswith("~")]))
    assert isinstance(merged, DictConfig)
    return merged


def merged(*several: Overrides) -> Overrides:
    """All of them; of a key that is set twice, the last."""
    by_key = {each.partition("=")[0]: each for overrides in several for each in overrides}
    return tuple(by_key.values())


def checkpointing(cfg: DictConfig) -> list[Overrides]:
    """Every way to checkpoint activations, from the fastest on."""
    without: Overrides = ("enable_activation_checkpointing=False", *_without_selecting(cfg))
    everywhere: Overrides = ("enable_activation_checkpointing=True", *_without_selecting(cfg))
    return [_only_new(cfg, each) for each in (without, EVERY_SECOND_LAYER, everywhere)]


def savers(cfg: DictConfig, world_size: int) -> list[Overrides]:
    """Single changes after which a step needs less memory, those first that cost the least."""
    settings, _ = training_of(cfg).read(cfg)
    every_second, everywhere = checkpointing(cfg)[1:]
    found: list[Overrides] = [_chunked_loss(cfg), compiled(settings)]
    if not settings.enable_activation_checkpointing:
        found += [() if settings.ac_mode == "selective" else every_second, everywhere]
    if world_size > 1 and not settings.fsdp_reshard_after_forward:
        found.append(("fsdp_reshard_after_forward=True",))
    found += [_without_reference(settings), _smaller_rank(cfg)]
    if on_gpu(settings):
        found += [in_8_bits(cfg), offloaded_activations(settings), _quantized(cfg), _on_host(settings)]
    return [each for each in found if each]


def save_resident(overrides: Overrides) -> bool:
    """Whether these take less for weights, gradients and optimizer state, and not only for activations."""
    keys = {each.partition("=")[0] for each in overrides}
    resident = {"optimizer._component_", "model.quantize_base", "fsdp_cpu_offload", "adaptive.precompute_reference"}
    return bool(keys & resident)


def starts(cfg: DictConfig) -> bool:
    """Whether the recipe takes these settings together."""
    try:
        settings, _ = training_of(cfg).read(cfg)
    except AdaptiveError:
        return False
    # 8-bit states on the host would be updated by kernels that Inductor writes for CPUs
    return not (settings.fsdp_cpu_offload and compiles_itself(cfg))


def compiled(settings: Settings) -> Overrides:
    """Compilation, on a GPU. A CPU needs a compiler for it, and Dynamo compiles nothing beneath a meter of memory."""
    return ("compile=True",) if on_gpu(settings) and not settings.compile else ()


def in_8_bits(cfg: DictConfig) -> Overrides:
    """Adam with state in 8 bits, which compiles itself. That of LoRA is small."""
    name = cfg.optimizer.get(COMPONENT)
    if name not in IN_8_BITS or is_lora(cfg) or cfg.get("fsdp_cpu_offload"):
        return ()
    removed = (f"~optimizer.{key}" for key in cfg.optimizer if key not in TAKEN_IN_8_BITS)
    return (f"optimizer._component_={IN_8_BITS[name]}", *removed)


def offloaded_activations(settings: Settings) -> Overrides:
    if settings.enable_activation_offloading:
        return ()
    return merged(checkpointing(settings.config)[2], ("enable_activation_offloading=True",))


def _without_selecting(cfg: DictConfig) -> Overrides:
    return ("ac_mode=null",) if cfg.get("ac_mode") is not None else ()


def _only_new(cfg: DictConfig, overrides: Overrides) -> Overrides:
    """Without what the config says already."""
    return tuple(each for each in overrides if changed(cfg, (each,)) != cfg)


def _chunked_loss(cfg: DictConfig) -> Overrides:
    """A chunked loss in place of a cross-entropy loss without arguments."""
    plain = cfg.loss.get(COMPONENT) == "torch.nn.CrossEntropyLoss" and set(cfg.loss) <= {
        COMPONENT,
        "ignore_index",
    }
    return (f"loss._component_={CHUNKED}",) if plain else ()


def _without_reference(settings: Settings) -> Overrides:
    """What it says is found before training, and its model freed."""
    cuts = settings.adaptive.oversize == "truncate"  # which it does not go with
    return ("adaptive.precompute_reference=True",) if keeps_reference(settings) and not cuts else ()


def _smaller_rank(cfg: DictConfig) -> Overrides:
    """A smaller LoRA rank, with adapters that weigh as much in the sum."""
    if not is_lora(cfg) or cfg.model.lora_rank <= SMALL_LORA_RANK:
        return ()
    alpha = cfg.model.lora_alpha * SMALL_LORA_RANK / cfg.model.lora_rank
    return (f"model.lora_rank={SMALL_LORA_RANK}", f"model.lora_alpha={alpha:g}")


def _quantized(cfg: DictConfig) -> Overrides:
    """The frozen weights of LoRA in NF4."""
    if not is_lora(cfg) or cfg.model.get("quantize_base"):
        return ()
    builder: Any = _get_component_from_path(cfg.model._component_)
    already = isinstance(builder, partial) and builder.keywords.get("quantize_base")
    takes = "quantize_base" in inspect.signature(builder).parameters
    return ("model.quantize_base=True",) if takes and not already else ()


def _on_host(settings: Settings) -> Overrides:
    return () if settings.fsdp_cpu_offload or compiles_itself(settings.config) else ("fsdp_cpu_offload=True",)


def combinations(single: Sequence[Overrides]) -> list[Overrides]:
    """Combinations of changes of which none is enough, more and more. Every second layer is in none: all layers are."""
    several = [each for each in single if "ac_mode=selective" not in each]
    resident = [each for each in several if save_resident(each)]
    slow = [each for each in several if "enable_activation_offloading=True" in each]
    quick = merged(*(each for each in several if each not in resident and each not in slow))
    everything = merged(quick, *slow)
    found = [quick, *(merged(quick, each) for each in resident), *(merged(everything, each) for each in resident)]
    return list(dict.fromkeys(each for each in found if each and each not in single))


def compiles_itself(cfg: DictConfig) -> bool:
    """Whether the optimizer is one that compiles its update, whatever `compile` says."""
    return str(cfg.optimizer.get(COMPONENT)).startswith("torchao.optim.")
