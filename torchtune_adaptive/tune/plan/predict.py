"""A recipe's own model, optimizer and step, run on tensors without data: what is allocated, and when.

The process group is a fake one of any size, of which this process is rank 0.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.memory.device import plain_tensors
from torchtune_adaptive.memory.phases import measuring_phases
from torchtune_adaptive.prediction.compilation import without_kernels
from torchtune_adaptive.prediction.recorder import Recorder, Recording
from torchtune_adaptive.prediction.shims import CUDA_WORKSPACES, HOST, META, UPLOAD, DeviceStandIn, cuda_kernels
from torchtune_adaptive.prediction.work import WorkCounter
from torchtune_adaptive.step.runner import Totals
from torchtune_adaptive.tune.parts.loss import build_loss
from torchtune_adaptive.tune.parts.memory_limit import resident_tensors
from torchtune_adaptive.tune.parts.microbatch import build_forward_backward
from torchtune_adaptive.tune.parts.model import build_full_model, build_lora_model, phase_boundaries
from torchtune_adaptive.tune.parts.optimization import Optimization, build_optimization
from torchtune_adaptive.tune.parts.process_group import mesh_of, mesh_shape
from torchtune_adaptive.tune.parts.samples import TEXT, Kind, Sample
from torchtune_adaptive.tune.plan.inputs import collate_of, is_packed, made_up_checkpoint, on_host
from torchtune_adaptive.tune.plan.shims import (
    apart_from_host,
    fake_tables,
    joined_as_on_a_gpu,
    offloading_activations,
    quantizing_at_once,
    rank_0_of,
    working_on_fakes,
)
from torchtune_adaptive.tune.start import components
from torchtune_adaptive.tune.start.settings import LoraSettings, Settings, read_full_settings, read_lora_settings


@dataclass(frozen=True)
class FakeStep:
    """A training step without data, built once and recorded for any number of rows and tokens."""

    settings: Settings
    model: nn.Module
    loss_fn: nn.Module
    optimization: Optimization
    forward_backward: Callable[[Sequence[Sample]], Totals]
    fakes: FakeTensorMode
    device_stand_in: DeviceStandIn
    kind: Kind
    padded: bool
    """Whether a microbatch is rows, and not samples one after another."""
    device: torch.device
    """Where fakes count: what is offloaded is on another."""
    on_gpu: bool

    def record(self, rows: int, tokens: int, *, counting: bool = False) -> Recording:
        """What one step allocates, beginning with what is resident; `counting`: what its kernels do, too."""
        recorder = Recorder(CUDA_WORKSPACES if self.on_gpu else {}, WorkCounter() if counting else None)
        gc.collect()
        with self.fakes, recorder, self.device_stand_in:
            recorder.count(self._resident(()))
            weights = recorder.events
            recorder.count(self._resident(self.optimization.optimizers))
            resident = {"weights": weights, "optimizer state": recorder.events}
            with measuring_phases(_Clock(recorder), self.model, phase_boundaries(self.model, self.loss_fn)) as meter:
                target_tokens = self.run_microbatches(rows, tokens)
                meter.begin_update()
                self.optimization.update(target_tokens)
                meter.end_phase()
        return recorder.recording(resident | meter.peaks)

    @property
    def host_bytes(self) -> int:
        """What is offloaded to the host between two steps, gradients included."""
        gradients = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        tensors = [*resident_tensors(self.model, self.optimization.optimizers), *gradients]
        plain = [each for tensor in tensors for each in plain_tensors(tensor) if each.device != self.device]
        return sum(each.untyped_storage().nbytes() for each in plain)

    def _resident(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[Tensor]:
        """What is on the device between two steps."""
        return [tensor for tensor in resident_tensors(self.model, optimizers) if tensor.device == self.device]

    def run_microbatches(self, rows: int, tokens: int) -> int:
        """One microbatch; where the config accumulates gradients, one of the smallest before it, which leaves some."""
        sample: Sample = {"tokens": [0] * tokens, "labels": [0] * tokens, "input_pos": [0] * tokens}
        target_tokens = 0
        if self.settings.gradient_accumulation_steps > 1:
            # eager where all else is compiled: a program of its own for this size would take longer than all others
            with torch.compiler.set_stance("force_eager"):
                target_tokens = self.forward_backward([self.kind.stand_in(sample)]).target_tokens
        return target_tokens + self.forward_backward([sample] * rows).target_tokens

    def run_first_step(self) -> None:
        """Brings everything to where it is in training: optimizer state, FSDP's streams, sharding propagation."""
        with self.fakes, self.device_stand_in, torch.compiler.set_stance("force_eager"):
            self.device_stand_in.calibrate()
            self._step(rows=1, tokens=16)

    def compile_update(self) -> None:
        """For an optimizer that compiles what it does to each parameter."""
        with self.fakes, self.device_stand_in:
            states = [each.state.values() for each in self.optimization.optimizers]
            fake_tables((value for state in states for values in state for value in values.values()), self.fakes)
            self._step(rows=1, tokens=16)

    def compile_for(self, rows: int, tokens: int) -> None:
        """Compiles anew, for any size, but as is best for this one: the order in which gradients are computed, say.

        Dynamo makes sizes variable where it meets a second one; the first is small, and other in both.
        """
        torch.compiler.reset()
        with self.fakes, self.device_stand_in:
            self._step(rows + 1, tokens=16)
            self._step(rows, tokens)

    def _step(self, rows: int, tokens: int) -> None:
        self.optimization.update(self.run_microbatches(rows, tokens))


class _Clock:
    """Counts events in place of bytes, so that the peak of a phase is where it ends."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    @property
    def peak_bytes(self) -> int:
        return self._recorder.events

    def reset_peak(self) -> None:
        pass


@contextmanager
def fake_step(cfg: DictConfig, world_size: int) -> Iterator[FakeStep]:
    """The step of the recipe that this config is for."""
    settings, lora = read_settings(cfg)
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
        step = _build(settings, lora, _mesh_of(settings, world_size), on_gpu=on_gpu(settings))
        step.run_first_step()
        if compiles_itself(cfg):
            step.compile_update()
        yield step


def _mesh_of(settings: Settings, world_size: int) -> DeviceMesh:
    if mesh_shape(settings, world_size).replicas > 1:
        return mesh_of(HOST, settings)
    # without a dimension for tensor parallelism, which would be a group of one for each rank
    return init_device_mesh(HOST.type, (world_size,), mesh_dim_names=("dp",))


def read_settings(cfg: DictConfig) -> tuple[Settings, LoraSettings | None]:
    """Settings of the recipe that this config is for, if its step can be traced."""
    lora = None
    if cfg.get("ref_checkpointer") is not None or "rlhf" in str(OmegaConf.select(cfg, "loss._component_")):
        raise ConfigError(
            "the config is one of preference training, whose steps have two stages, which a prediction does not cover "
            "yet: measure on the device, with use_maximum_batch_size: True"
        )
    if is_lora(cfg):
        settings, lora = read_lora_settings(cfg)
    else:
        settings = read_full_settings(cfg)
    for key, value, allowed in (
        ("tensor_parallel_dim", settings.tensor_parallel_dim, 1),
        ("dataset.packed on a CPU", settings.device.startswith("cpu") and is_packed(cfg), False),
    ):
        if value != allowed:
            raise ConfigError(f"{key} is {value}, which a prediction does not cover: allowed is {allowed}")
    return settings, lora


def on_gpu(settings: Settings) -> bool:
    return not settings.device.startswith("cpu")


def is_lora(cfg: DictConfig) -> bool:
    return "lora_attn_modules" in components.require(cfg, "model")


def compiles_itself(cfg: DictConfig) -> bool:
    """Whether the optimizer is one that compiles its update, whatever `compile` says."""
    return str(components.require(cfg, "optimizer").get("_component_")).startswith("torchao.optim.")


def _check_model(model: nn.Module) -> None:
    """Refuses models that cannot be traced; on the meta device, before anything takes time."""
    if any(hasattr(model, part) for part in ("encoder", "encoders")):
        raise ConfigError(
            "model has an encoder for images: what they need differs from sample to sample, which a prediction does "
            "not cover; measure on the device"
        )


def _device_of(settings: Settings) -> torch.device:
    """What stands for the device: another than the host where some tensors are offloaded to that."""
    return UPLOAD if settings.fsdp_cpu_offload else HOST


def _build(settings: Settings, lora: LoraSettings | None, mesh: DeviceMesh, *, on_gpu: bool) -> FakeStep:
    """In the recipes' order."""
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    device_stand_in = DeviceStandIn(host_is_device=not on_gpu, offloads=settings.fsdp_cpu_offload)
    device = _device_of(settings)
    with fakes, device_stand_in:
        checkpoint = made_up_checkpoint(settings)
        model = _build_model(settings, lora, device, mesh, checkpoint)
        optimization = build_optimization(settings, model, {}, HOST)
        loss_fn = build_loss(settings, model)
    if settings.compile:
        fake_tables(model.parameters(), fakes)
    collate, padded = collate_of(settings, model, loss_fn)
    kind = replace(TEXT, ignored_label=cast(int, loss_fn.ignore_index), padded=padded)
    return FakeStep(
        settings=settings,
        model=model,
        loss_fn=loss_fn,
        optimization=optimization,
        forward_backward=build_forward_backward(
            model, loss_fn, on_host(collate), kind, settings, UPLOAD if on_gpu else HOST
        ),
        fakes=fakes,
        device_stand_in=device_stand_in,
        device=device,
        on_gpu=on_gpu,
        kind=kind,
        padded=padded,
    )


def _build_model(
    settings: Settings,
    lora: LoraSettings | None,
    device: torch.device,
    mesh: DeviceMesh,
    checkpoint: dict[str, Any],
) -> nn.Module:
    if lora is None:
        return build_full_model(settings, device, mesh, checkpoint)
    return build_lora_model(settings, lora, device, mesh, checkpoint)
