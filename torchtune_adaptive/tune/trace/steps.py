"""A recipe's own model, optimizer and step, run on tensors without data: what is allocated, and when.

The process group is a fake one of any size, of which this process is rank 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import cast

import torch
from omegaconf import DictConfig
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torchtune import training

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.prediction.compilation import without_kernels
from torchtune_adaptive.prediction.shims import HOST, META, UPLOAD, DeviceStandIn, cuda_kernels
from torchtune_adaptive.tune.config import components
from torchtune_adaptive.tune.config.settings import LoraSettings, Settings, on_gpu
from torchtune_adaptive.tune.parts.loss import build_loss
from torchtune_adaptive.tune.parts.microbatch import build_forward_backward
from torchtune_adaptive.tune.parts.model import (
    build_frozen_model,
    build_full_model,
    build_lora_model,
    drop_nothing,
    phase_boundaries,
)
from torchtune_adaptive.tune.parts.optimization.optimizer import build_optimization
from torchtune_adaptive.tune.parts.preference_stages import (
    KEPT,
    PAIRS,
    POLICY,
    REFERENCE,
    Scorer,
    build_preference_loss,
    passes_of,
)
from torchtune_adaptive.tune.parts.process_group import SHARDING, Meshes, Place, mesh_shape, replicated_mesh
from torchtune_adaptive.tune.parts.samples import PAIR, TEXT, Kind, Sample
from torchtune_adaptive.tune.trace.fakes import Built, FakeDevice, FakeStep, Rows, resharding
from torchtune_adaptive.tune.trace.inputs import made_up_checkpoint, traced_batching
from torchtune_adaptive.tune.trace.rollouts import ppo_steps
from torchtune_adaptive.tune.trace.shims import (
    apart_from_host,
    fake_tables,
    joined_as_on_a_gpu,
    nothing,
    offloading_activations,
    quantizing_at_once,
    rank_0_of,
    working_on_fakes,
)
from torchtune_adaptive.tune.trace.which_recipe import (
    compiles_itself,
    keeps_reference,
    read_settings,
    trains_on_pairs,
    trains_with_ppo,
)


@contextmanager
def fake_steps(cfg: DictConfig, world_size: int) -> Iterator[dict[str, FakeStep]]:
    """The stages of a step of the recipe that this config is for, by name: the one that trains first; a step of one
    stage has no name."""
    settings, lora = read_settings(cfg)
    cfg = settings.config  # where PPO's policy is what the others call the model
    with META, quantizing_at_once():
        _check_model(components.build("model", cfg))
    with rank_0_of(world_size), working_on_fakes(), ExitStack() as stack:
        if on_gpu(settings):
            stack.enter_context(cuda_kernels())
            stack.enter_context(joined_as_on_a_gpu())
        if settings.compile or compiles_itself(cfg):
            stack.enter_context(without_kernels(_device_of(settings), as_on_gpu=on_gpu(settings)))
        if settings.enable_activation_offloading:
            stack.enter_context(offloading_activations())
        if settings.fsdp_cpu_offload:
            stack.enter_context(apart_from_host(UPLOAD))
        steps = _build(settings, lora, Place(_device_of(settings), _mesh_of(settings, world_size)))
        for step in steps.values():
            step.run_first()
        if compiles_itself(cfg):
            next(iter(steps.values())).compile_update()
        yield steps


def _mesh_of(settings: Settings, world_size: int) -> Meshes:
    shape = mesh_shape(settings, world_size)
    if shape.replicas > 1:
        return replicated_mesh(HOST, shape.replicas, shape.shards)
    # without a dimension for tensor parallelism, which would be a group of one for each rank
    whole = init_device_mesh(HOST.type, (world_size,), mesh_dim_names=("dp",))
    return {"dp": whole, SHARDING: whole}


def _check_model(model: nn.Module) -> None:
    """Refuses models that cannot be traced; on the meta device, before anything takes time."""
    if any(hasattr(model, part) for part in ("encoder", "encoders")):
        raise ConfigError(
            "model has an encoder for images, whose memory differs from sample to sample: predictions do not cover "
            "it; measure on the device"
        )


def _device_of(settings: Settings) -> torch.device:
    """What stands for the device: another than the host where some tensors are offloaded to that."""
    return UPLOAD if settings.fsdp_cpu_offload else HOST


def _build(settings: Settings, lora: LoraSettings | None, place: Place) -> dict[str, FakeStep]:
    """The steps of a recipe, built in its order."""
    stand_in = DeviceStandIn(host_is_device=not on_gpu(settings), offloads=settings.fsdp_cpu_offload)
    device = FakeDevice(FakeTensorMode(allow_non_fake_inputs=True), stand_in, place.device)
    pairs = trains_on_pairs(settings.config)
    if trains_with_ppo(settings.config):
        return ppo_steps(settings, place, device)
    with device.in_use():
        if lora is None:
            model = build_full_model(settings, place, made_up_checkpoint(settings))
        else:
            model = build_lora_model(settings, lora, place, made_up_checkpoint(settings))
        reference = model
        if pairs and lora is None:
            drop_nothing(model)
            weights = made_up_checkpoint(settings)[training.MODEL_KEY]
            reference = build_frozen_model(settings, place, weights)
        optimization = build_optimization(settings, model, {}, HOST)
    if settings.compile:
        for each in {model, reference}:
            fake_tables(each.parameters(), device.fakes)
    built = Built(settings, model, optimization, device)
    return _preferring(built, reference) if pairs else {"": _finetuning(built)}


def _finetuning(built: Built) -> FakeStep:
    model, settings, optimization = built.model, built.settings, built.optimization
    with built.device.in_use():
        loss_fn = build_loss(settings, model)
    text = replace(TEXT, ignored_label=cast(int, loss_fn.ignore_index))
    batching = traced_batching(settings, model, text)
    return FakeStep(
        settings=settings,
        device=built.device,
        model=model,
        run=build_forward_backward(model, loss_fn, batching, settings, built.batches_go_to),
        update=lambda totals: optimization.update(totals.target_tokens),
        optimizers=optimization.optimizers,
        boundaries=phase_boundaries(model, loss_fn),
        tokens_multiple=getattr(loss_fn, "num_output_chunks", 1),
        rows=_rows_of(batching.kind, built.settings),
    )


def _preferring(built: Built, reference: nn.Module) -> dict[str, FakeStep]:
    """The policy's stage, then that of the reference, though it runs first."""
    model, optimization = built.model, built.optimization
    with built.device.in_use():
        loss_fn = build_preference_loss(built.settings.config)
    batching = traced_batching(built.settings, model, PAIR)
    score = Scorer(batching=batching, device=built.batches_go_to)
    refer, train = passes_of(model, reference, loss_fn, score, built.settings)
    asked_before = built.settings.adaptive.precompute_reference
    policy = FakeStep(
        settings=built.settings,
        device=built.device,
        model=model,
        beside=(reference,) if keeps_reference(built.settings.config) else (),
        run=train,
        update=lambda totals: optimization.update(totals.sums[PAIRS]),
        optimizers=optimization.optimizers,
        boundaries=phase_boundaries(model, loss_fn),
        rows=_rows_of(batching.kind, built.settings, {KEPT: torch.zeros(2)}),
    )
    referring = FakeStep(
        settings=built.settings,
        device=built.device,
        model=reference,
        beside=() if reference is model else (model,),
        run=resharding(reference, refer),
        update=nothing,
        # before training there is no state yet
        optimizers=() if asked_before else optimization.optimizers,
        boundaries=phase_boundaries(reference, None),
        rows=_rows_of(batching.kind, built.settings),
    )
    return {POLICY: policy, REFERENCE: referring}


def _accumulates(settings: Settings) -> bool:
    """Whether a step may have several microbatches, so that gradients of those before lie beside the largest: a search
    asks for that, and under a token budget nobody knows how many there are."""
    as_configured = settings.gradient_accumulation_steps > 1
    found = settings.use_maximum_batch_size or settings.adaptive.token_budget is not None
    return as_configured or (found and not settings.optimizer_in_bwd)


def _rows_of(kind: Kind, settings: Settings, found_before: Sample | None = None) -> Rows:
    """What a FakeStep knows of its samples; `found_before`: what an earlier stage has left in each."""

    def sample_of(tokens: int) -> Sample:
        return {**kind.uniform(0, kind.length_at(tokens)), "input_pos": [0] * tokens, **(found_before or {})}

    return Rows(
        sample_of=sample_of,
        stand_in=kind.stand_in,
        padded=kind.padded,
        sequences=kind.rows,
        accumulates=_accumulates(settings),
    )
