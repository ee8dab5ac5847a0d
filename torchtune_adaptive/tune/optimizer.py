"""The optimizer, its learning-rate schedule and the update at the end of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torchtune import training

from torchtune_adaptive.checkpoints.optimizer_state import AnyOptimizer, load_state
from torchtune_adaptive.config import components
from torchtune_adaptive.config.components import COMPONENT
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.tune.clipping import clip

SummedOver: TypeAlias = int | Tensor | Mapping[str, int]
"""Target tokens, or pairs; where several models are updated at once, of each by its name."""


class Optimization:
    """One optimizer, or one for each parameter, with the config's schedule times a factor as learning rate."""

    def __init__(
        self,
        cfg: DictConfig,
        checkpointed: AnyOptimizer,
        optimizers: Sequence[torch.optim.Optimizer],
        apply: Callable[[SummedOver], float | None],
    ) -> None:
        self.checkpointed = checkpointed
        """What torchtune's checkpointing takes as the optimizer."""
        self.optimizers = optimizers
        self._cfg = cfg
        self._apply = apply
        self._factor = 1.0
        # torchtune's wrapper of several optimizers hands the rate of the first on to the others at every step
        self._scheduler: LRScheduler | None = None
        # noted before a checkpoint brings rates of its own
        self._first_rates = [float(group["lr"]) for group in self._groups()]

    def start_schedule(self, *, total_steps: int, steps_done: int, lr_factor: float) -> None:
        """`lr_factor` is what a resumed run has already multiplied its learning rate with."""
        self._factor = lr_factor
        if self._cfg.get("lr_scheduler") is None:
            return
        for group, rate in zip(self._groups(), self._first_rates, strict=True):
            # a schedule that goes on needs the rate that it began with, which not every checkpoint keeps
            group.setdefault("initial_lr", rate * lr_factor)
        length = {"num_training_steps": total_steps, "last_epoch": steps_done - 1}
        self._scheduler = components.build("lr_scheduler", self._cfg, self.optimizers[0], **length)
        if isinstance(self.checkpointed, training.OptimizerInBackwardWrapper):
            self.checkpointed.set_lr_scheduler(self._scheduler)

    def use_lr_factor(self, factor: float) -> None:
        """Multiplies the schedule's learning rate by this from the next step on."""
        ratio, self._factor = factor / self._factor, factor
        if ratio == 1:
            return
        for group in self._groups():
            group.update({key: group[key] * ratio for key in ("lr", "initial_lr") if key in group})
        if self._scheduler is not None:
            self._scheduler.base_lrs = [rate * ratio for rate in self._scheduler.base_lrs]

    def update(self, summed_over: SummedOver) -> float | None:
        """Collective where it clips: one update, from gradients that are summed over so many target tokens, or pairs;
        where several models are updated at once, of each by its name.

        Returns the gradients' norm, or None where they are used up inside the backward. Gradients that are NaN or
        infinite update nothing; the schedule moves on.
        """
        norm = self._apply(summed_over)
        if self._scheduler is not None:
            self._scheduler.step()
        return norm

    def learning_rate(self) -> float:
        return float(training.get_lr(self.checkpointed))

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]


def build_optimization(
    settings: Settings, model: nn.Module, checkpoint: Mapping[str, Any], device: torch.device
) -> Optimization:
    """The optimizer of the config, with its state where the checkpoint has one."""
    state = checkpoint.get(training.OPT_KEY)
    if state:
        _check_state(settings, state, device)
    if settings.optimizer_in_bwd:
        return _in_backward(settings.config, model, state, device)
    return one_optimizer(settings, model, state, device)


def one_optimizer(
    settings: Settings, model: nn.Module, state: Mapping[str, Any] | None, device: torch.device
) -> Optimization:
    """One optimizer for all parameters, with its state where there is one."""
    optimizer = components.build("optimizer", settings.config, list(model.parameters()))
    max_norm = None if settings.clip_grad_norm is None else float(settings.clip_grad_norm)
    optimization = Optimization(settings.config, optimizer, [optimizer], partial(_update, model, optimizer, max_norm))
    if state:
        load_state(model, optimizer, state, device)
    return optimization


def _check_state(settings: Settings, state: Mapping[str, Any], device: torch.device) -> None:
    """Refuses another optimizer's state, which torch would load without a word and never use."""
    one_state = next(iter(state.values())) if settings.optimizer_in_bwd else state
    if not isinstance(one_state, Mapping) or "state" not in one_state:
        return  # not saved that way: told by its name where it is loaded
    found = {key for values in one_state["state"].values() for key in values}
    parameter = nn.Parameter(torch.zeros(1, device=device))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = components.build("optimizer", settings.config, [parameter])
    optimizer.step()
    needed = {str(key) for key in optimizer.state[parameter]}
    if found != needed:
        name = settings.config.optimizer.get(COMPONENT)
        raise ConfigError(
            f"optimizer is {name}, which keeps {_names(needed)}, but the checkpoint's "
            f"state has {_names(found)}: resume with the optimizer of the run that saved it"
        )


def _names(keys: set[str]) -> str:
    return ", ".join(sorted(keys)) or "nothing"


def _update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    max_norm: float | None,
    summed_over: SummedOver,
) -> float:
    """One update, from gradients that are summed over target tokens, or pairs, and averaged over ranks; their norm."""
    # FSDP averages over ranks: times their number, over the step's tokens, makes it the mean over tokens.
    # A step without any has no gradients but zeros.
    ranks = dist.get_world_size()
    parts = summed_over if isinstance(summed_over, Mapping) else {"": summed_over}
    for name, count in parts.items():
        # a tensor is on the device, where nothing waits for it
        scale = ranks / count.clamp(min=1) if isinstance(count, Tensor) else torch.tensor(ranks / max(1, count))
        training.scale_grads(model.get_submodule(name), scale)
    norm = clip(model.parameters(), max_norm)
    if math.isfinite(norm):  # else the weights stay as they are, on all ranks
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def _in_backward(
    cfg: DictConfig, model: nn.Module, states: Mapping[str, Mapping[str, Any]] | None, device: torch.device
) -> Optimization:
    """One optimizer for each parameter, which steps as soon as the gradient is there (`optimizer_in_bwd`)."""
    optimizers = {p: components.build("optimizer", cfg, [p]) for p in model.parameters()}
    training.register_optim_in_bwd_hooks(model=model, optim_dict=optimizers)
    wrapper = training.create_optim_in_bwd_wrapper(model=model, optim_dict=optimizers)
    # at the end of the step the weights are updated already: only the schedule moves on
    optimization = Optimization(cfg, wrapper, list(wrapper.optim_map.values()), lambda summed_over: None)
    for name, state in (states or {}).items():
        if name not in wrapper.optim_map:
            raise ConfigError(
                f"optimizer_in_bwd is True, but the checkpoint's optimizer state ({name!r}) was not saved that way: "
                "resume with the optimizer_in_bwd of the run that saved it"
            )
        load_state(model, wrapper.optim_map[name], state, device)
    return optimization
