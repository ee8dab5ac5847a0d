"""Build torchtune's models, shard them with FSDP2 and load their weights.

All builders create the model on the meta device, apply compile, tensor parallelism and activation checkpointing, shard
it, and load the checkpoint shard by shard.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torchao.dtypes.nf4tensor import NF4Tensor
from torchtune import modules, training
from torchtune.modules import peft

from torchtune_adaptive.checkpoints.store import State
from torchtune_adaptive.config import components
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.data.unpadded import support_documents
from torchtune_adaptive.engine.consistency import synchronize_replicas
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.formatting import count_of
from torchtune_adaptive.lifecycle.distributed import SHARDING, Devices, Meshes

META = torch.device("meta")
CHECKPOINTER = "checkpointer"
"""The default config section of the weight files."""
Weights = Mapping[str, torch.Tensor]


class Unfilled(dict[str, torch.Tensor]):
    """Replaces weights in a rehearsal, where only memory matters: parameters are allocated but not initialized."""


def build_model(
    settings: Settings,
    devices: Devices,
    checkpoint: State,
    key: str = "model",
    files: str = CHECKPOINTER,
    *,
    with_adapters: bool = False,
) -> nn.Module:
    """Collective: build the model of the config section `key`, and load its weights. All its parameters are trained or,
    with adapters, only these. Without adapters in the checkpoint, new ones are initialized."""
    device, mesh = devices
    dtype = training.get_dtype(settings.dtype, device=device)
    model = build_on_device(META, settings.config, dtype, key)
    adapter_params: dict[str, Any] = {}
    if with_adapters:
        if _is_quantized(model) and not is_sharded(settings, mesh):
            # torchtune loads sharded NF4 weights into a model on the meta device. Without shards, the model quantizes
            # its weights while it is built, which needs a real device.
            model = build_on_device(device, settings.config, dtype, key)
        adapter_params = peft.get_adapter_params(model)
        peft.set_trainable_params(model, adapter_params)
    if settings.compile:
        training.compile_model(model, verbose=False)
    if settings.tensor_parallel_dim > 1:
        plan = components.build("tensor_parallel_plan", settings.config)
        model = parallelize_module(training.prepare_mha_for_tp(model, mesh["tp"]), mesh["tp"], parallelize_plan=plan)
    _checkpoint_activations(model, settings)
    _shard(model, settings, mesh)
    adapters = checkpoint.get(training.ADAPTER_KEY)
    if with_adapters and adapters is not None:
        _check_weights(model, adapters, CHECKPOINTER, needed=adapter_params.keys())
        _load(model, adapters, settings, device, strict=False)
    with training.set_default_dtype(dtype), device:
        for module in model.modules() if with_adapters and adapters is None else ():
            if isinstance(module, (peft.LoRALinear, peft.DoRALinear)):
                module.to_empty(device="cpu" if settings.fsdp_cpu_offload else device)
                module.initialize_parameters()
        _call_where_present(model, "rope_init")  # computes the RoPE tables, which are not in checkpoints
    if with_adapters and adapters is None:
        synchronize_replicas(each for each in model.parameters() if each.requires_grad)
    weights = checkpoint[training.MODEL_KEY]
    _check_weights(model, weights, files, needed=model.state_dict().keys() - adapter_params.keys())
    _load(model, weights, settings, device, strict=not with_adapters)
    if with_adapters:
        _call_where_present(model, "initialize_dora_magnitude")
    training.validate_no_params_on_meta_device(model)
    return model


def build_frozen_model(
    settings: Settings, devices: Devices, weights: Weights, key: str = "model", files: str = "ref_checkpointer"
) -> nn.Module:
    """Collective: build the model of the config section `key` without gradients and dropout, such as a reference."""
    no_checkpoints = replace(settings, enable_activation_checkpointing=False, ac_mode=None)
    model = build_model(no_checkpoints, devices, {training.MODEL_KEY: weights}, key, files)
    disable_dropout(model)
    return model.requires_grad_(False).eval()


def disable_dropout(model: nn.Module) -> None:
    """Disable dropout. torchtune also does this if the log-probabilities of models are compared."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def build_on_device(where: torch.device, cfg: DictConfig, dtype: torch.dtype, key: str = "model") -> nn.Module:
    """Build the model of the config section `key` on a device, with attention that supports unpadded samples."""
    with training.set_default_dtype(dtype), where:
        model: nn.Module = components.build(key, cfg)
    support_documents(model)
    return model


def _is_quantized(model: nn.Module) -> bool:
    return any(isinstance(parameter, NF4Tensor) for parameter in model.parameters())


def _checkpoint_activations(model: nn.Module, settings: Settings) -> None:
    """Checkpoint activations of all layers or of some; as in torchtune, of none if both keys are set."""
    if settings.enable_activation_checkpointing and settings.ac_mode is None:
        policy = {modules.TransformerSelfAttentionLayer}
        training.set_activation_checkpointing(model, auto_wrap_policy=policy)
    elif settings.ac_mode is not None and not settings.enable_activation_checkpointing:
        training.apply_selective_activation_checkpointing(model, settings.ac_mode, settings.ac_option)


def is_sharded(settings: Settings, mesh: Meshes) -> bool:
    """Return True if the model uses FSDP: with several ranks, or for CPU offloading."""
    return mesh["dp"].size() > 1 or settings.fsdp_cpu_offload


def _shard(model: nn.Module, settings: Settings, mesh: Meshes) -> None:
    if not is_sharded(settings, mesh):
        return
    layers = list(settings.custom_sharded_layers or ())
    training.shard_model(
        model=model,
        shard_conditions=[partial(training.get_shard_conditions, names_to_match=layers)],
        cpu_offload=settings.fsdp_cpu_offload,
        reshard_after_forward=settings.fsdp_reshard_after_forward,
        dp_mesh=mesh[SHARDING],
    )


def _call_where_present(model: nn.Module, method: str) -> None:
    for module in model.modules():
        if hasattr(module, method):
            getattr(module, method)()


def _load(model: nn.Module, weights: Weights, settings: Settings, device: torch.device, *, strict: bool) -> None:
    """Collective: load unsharded weights, which every rank has read from the same files."""
    if isinstance(weights, Unfilled):
        _allocate(model, settings, device)
        return
    if _is_quantized(model):
        model.load_state_dict(weights, strict=strict)
    else:
        training.load_from_full_model_state_dict(
            model, weights, device, strict=strict, cpu_offload=settings.fsdp_cpu_offload
        )


def _allocate(model: nn.Module, settings: Settings, device: torch.device) -> None:
    """Allocate the parameters without initializing them; torchtune's function makes quantized shards from zeros."""
    quantized = {
        name: torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
        for name, parameter in model.state_dict().items()
        if parameter.is_meta and isinstance(getattr(parameter, "_local_tensor", None), NF4Tensor)
    }
    if quantized:
        training.load_from_full_model_state_dict(
            model, quantized, device, strict=False, cpu_offload=settings.fsdp_cpu_offload
        )
    for module in model.modules():
        if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
            target = "cpu" if settings.fsdp_cpu_offload else device
            nn.Module.to_empty(module, device=target, recurse=False)  # torchtune's override skips base weights


def _check_weights(model: nn.Module, weights: Weights, files: str, *, needed: Collection[str]) -> None:
    """Raise a ConfigError if names or shapes of the weights do not match, before any collective."""
    if isinstance(weights, Unfilled):
        return
    expected = model.state_dict()
    if unknown := sorted(weights.keys() - expected.keys()):
        why = f"{count_of(len(unknown), 'unexpected key')}, first: {unknown[0]}"
    elif missing := sorted({*needed} - weights.keys()):
        why = f"{count_of(len(missing), 'missing key')}, first: {missing[0]}"
    elif other := [name for name, weight in weights.items() if weight.shape != expected[name].shape]:
        shapes = [tuple(each[other[0]].shape) for each in (weights, expected)]
        why = f"size mismatch for {other[0]}: {shapes[0]} in the file, {shapes[1]} in the model"
    else:
        return
    raise ConfigError(f"{files}: the weights do not match the model ({why}); use the files that belong to it")


def phase_boundaries(model: nn.Module, loss_fn: nn.Module | None) -> dict[str, nn.Module]:
    """Return, by name, the modules whose output ends a part of the forward pass; empty if the model is unknown."""
    decoder: Any = getattr(model, "decoder", model)
    if not hasattr(decoder, "norm"):
        return {}
    parts = {"encoder": getattr(model, "encoder", None), "layers": decoder.norm, "head": loss_fn}
    return {name: part for name, part in parts.items() if part is not None}
