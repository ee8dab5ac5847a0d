"""The optimizer, learning-rate schedule, gradient clipping and update of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler
from torchtune import training

from torchtune_adaptive.checkpoints.contents import AnyOptimizer, load_optimizer_state
from torchtune_adaptive.config import components
from torchtune_adaptive.config.keys import Settings

SummedOver: TypeAlias = int | Tensor | Mapping[str, int]
"""A number of target tokens or pairs; a mapping by submodule name if several models are updated together."""


class Optimization:
    """One optimizer, or one per parameter, with the configured learning-rate schedule."""

    def __init__(
        self, settings: Settings, model: nn.Module, checkpoint: Mapping[str, Any], device: torch.device
    ) -> None:
        """Build the optimizer and restore its state from the checkpoint."""
        self._cfg, self._model = settings.config, model
        self._max_norm = None if settings.clip_grad_norm is None else float(settings.clip_grad_norm)
        # torchtune's wrapper copies the learning rate of the first optimizer to the others at every step.
        self._scheduler: LRScheduler | None = None
        self.checkpointed: AnyOptimizer
        """The optimizer in the form that torchtune saves."""
        self.optimizers: tuple[torch.optim.Optimizer, ...]
        if not settings.optimizer_in_bwd:
            optimizer = components.build("optimizer", settings.config, list(model.parameters()))
            self.checkpointed, self.optimizers = optimizer, (optimizer,)
        else:  # one optimizer per parameter, which steps as soon as the gradient is complete
            optimizers = {p: components.build("optimizer", settings.config, [p]) for p in model.parameters()}
            training.register_optim_in_bwd_hooks(model=model, optim_dict=optimizers)
            wrapper = training.create_optim_in_bwd_wrapper(model=model, optim_dict=optimizers)
            self.checkpointed, self.optimizers = wrapper, tuple(wrapper.optim_map.values())
        # Read the rates here, before a checkpoint overwrites them.
        self._first_rates = [float(group["lr"]) for group in self._groups()]
        state = checkpoint.get(training.OPT_KEY) or {}
        if isinstance(self.checkpointed, training.OptimizerInBackwardWrapper):
            for name, its_state in state.items():
                load_optimizer_state(model, self.checkpointed.optim_map[name], its_state, device)
        elif state:
            load_optimizer_state(model, self.checkpointed, state, device)

    def start_schedule(self, *, total_steps: int, steps_done: int) -> None:
        """Build the learning-rate schedule and set it to `steps_done`."""
        if self._cfg.get("lr_scheduler") is None:
            return
        for group, rate in zip(self._groups(), self._first_rates, strict=True):
            # A resumed schedule needs its initial rate, which not all checkpoints contain.
            group.setdefault("initial_lr", rate)
        length = {"num_training_steps": total_steps, "last_epoch": steps_done - 1}
        self._scheduler = components.build("lr_scheduler", self._cfg, self.optimizers[0], **length)
        if isinstance(self.checkpointed, training.OptimizerInBackwardWrapper):
            self.checkpointed.set_lr_scheduler(self._scheduler)

    def update(self, summed_over: SummedOver) -> float | None:
        """Collective: scale and clip the gradients, update the weights, and return the gradient norm.

        The gradients must be sums over the `summed_over` tokens or pairs of all ranks, divided by the number of ranks.
        If the norm is not finite, the weights stay unchanged. Returns None if the optimizer runs inside the backward.
        """
        norm = None
        if not isinstance(self.checkpointed, training.OptimizerInBackwardWrapper):
            # To get the mean over tokens, undo FSDP's division by the number of ranks, and divide by the tokens.
            # Without target tokens, all gradients are zero.
            ranks = dist.get_world_size()
            for name, count in (summed_over if isinstance(summed_over, Mapping) else {"": summed_over}).items():
                # If the count is a tensor on the device, do not wait for its value.
                scale = ranks / count.clamp(min=1) if isinstance(count, Tensor) else torch.tensor(ranks / max(1, count))
                training.scale_grads(self._model.get_submodule(name), scale)
            norm = clip(self._model, self._max_norm)
            if math.isfinite(norm):  # the same on all ranks
                self.checkpointed.step()
            self.checkpointed.zero_grad(set_to_none=True)
        if self._scheduler is not None:
            self._scheduler.step()
        return norm

    def learning_rate(self) -> float:
        """Return the current learning rate."""
        return float(training.get_lr(self.checkpointed))

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]


def clip(model: nn.Module, max_norm: float | None) -> float:
    """Collective: clip the gradients to `max_norm` and return their norm before clipping.

    Under tensor parallelism, gradients are on several meshes. torch supports only one, so combine the norms of each.
    """
    by_mesh: dict[object, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            by_mesh.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    norms = [
        nn.utils.get_total_norm([each.grad for each in group if each.grad is not None]) for group in by_mesh.values()
    ]
    if len(norms) < 2:
        norm = norms[0] if norms else torch.tensor(0.0)
    else:
        norm = torch.linalg.vector_norm(torch.stack([_full(each) for each in norms]))
    if max_norm is not None:
        for group in by_mesh.values():
            nn.utils.clip_grads_with_norm_(group, max_norm, norm, foreach=False if len(norms) > 1 else None)
    return float(_full(norm))


def _full(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
