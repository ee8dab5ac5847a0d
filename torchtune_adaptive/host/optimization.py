"""The optimizer, its learning-rate schedule and the update at the end of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler
from torchtune import training

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.host import components
from torchtune_adaptive.host.settings import Settings

State = Mapping[str, Any]


class Optimization(Protocol):
    """What a recipe needs of either way to update: after the backward, or inside it."""

    checkpointed: Any
    """What torchtune's checkpointing takes as the optimizer."""

    def start_schedule(self, *, total_steps: int, steps_done: int) -> None: ...

    def update(self, target_tokens: int) -> float | None:
        """Collective where it clips: one update. Returns the gradient's norm if that was computed."""

    def learning_rate(self) -> float: ...


class UpdateAfterBackward:
    """One optimizer for all parameters. Gradients arrive summed over target tokens and averaged over ranks."""

    def __init__(
        self, cfg: DictConfig, settings: Settings, model: nn.Module, state: State | None, device: torch.device
    ) -> None:
        self._cfg = cfg
        self._model = model
        self._max_norm = None if settings.clip_grad_norm is None else float(settings.clip_grad_norm)
        self._scheduler: LRScheduler | None = None
        self.checkpointed = components.build("optimizer", cfg, model.parameters())
        self._first_rates = _learning_rates(self.checkpointed)
        if state:
            training.load_from_full_optimizer_state_dict(model, self.checkpointed, state, device)

    def start_schedule(self, *, total_steps: int, steps_done: int) -> None:
        _keep_first_rates(self.checkpointed, self._first_rates)
        self._scheduler = _build_scheduler(self._cfg, self.checkpointed, total_steps, steps_done)

    def update(self, target_tokens: int) -> float | None:
        # FSDP averages over ranks: times their number, over the step's tokens, makes it the mean over tokens
        training.scale_grads(self._model, torch.tensor(dist.get_world_size() / target_tokens))
        norm = self._clip()
        self.checkpointed.step()
        self.checkpointed.zero_grad(set_to_none=True)
        if self._scheduler is not None:
            self._scheduler.step()
        return norm

    def learning_rate(self) -> float:
        return float(training.get_lr(self.checkpointed))

    def _clip(self) -> float | None:
        if self._max_norm is None:
            return None
        norm = nn.utils.clip_grad_norm_(self._model.parameters(), max_norm=self._max_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


class UpdateInBackward:
    """One optimizer for each parameter, which steps as soon as the gradient is there (`optimizer_in_bwd`)."""

    def __init__(
        self, cfg: DictConfig, model: nn.Module, states: Mapping[str, State] | None, device: torch.device
    ) -> None:
        self._cfg = cfg
        optimizers = {p: components.build("optimizer", cfg, [p]) for p in model.parameters()}
        training.register_optim_in_bwd_hooks(model=model, optim_dict=optimizers)
        self.checkpointed = training.create_optim_in_bwd_wrapper(model=model, optim_dict=optimizers)
        self._first_rates = _learning_rates(self._first())
        self._scheduler: LRScheduler | None = None
        for name, state in (states or {}).items():
            self._restore(model, name, state, device)

    def start_schedule(self, *, total_steps: int, steps_done: int) -> None:
        _keep_first_rates(self._first(), self._first_rates)
        self._scheduler = _build_scheduler(self._cfg, self._first(), total_steps, steps_done)
        if self._scheduler is not None:
            self.checkpointed.set_lr_scheduler(self._scheduler)

    def update(self, target_tokens: int) -> None:
        """The weights are updated already; only the schedule moves on."""
        if self._scheduler is not None:
            self._scheduler.step()

    def learning_rate(self) -> float:
        return float(training.get_lr(self.checkpointed))

    def _first(self) -> torch.optim.Optimizer:
        """The optimizer whose schedule the others follow."""
        first: torch.optim.Optimizer = next(iter(self.checkpointed.optim_map.values()))
        return first

    def _restore(self, model: nn.Module, name: str, state: State, device: torch.device) -> None:
        if name not in self.checkpointed.optim_map:
            raise ConfigError(
                f"optimizer_in_bwd is True, but the checkpoint's optimizer state ({name!r}) was not saved that way: "
                "resume with the optimizer_in_bwd of the run that saved it"
            )
        optimizer = self.checkpointed.optim_map[name]
        training.load_from_full_optimizer_state_dict(model, optimizer, state, device)


def build_optimization(
    cfg: DictConfig, settings: Settings, model: nn.Module, checkpoint: State, device: torch.device
) -> Optimization:
    """The optimizer of the config, with its state where the checkpoint has one."""
    state = checkpoint.get(training.OPT_KEY)
    if settings.optimizer_in_bwd:
        return UpdateInBackward(cfg, model, state, device)
    return UpdateAfterBackward(cfg, settings, model, state, device)


def _learning_rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def _keep_first_rates(optimizer: torch.optim.Optimizer, rates: list[float]) -> None:
    """A schedule that goes on needs the rates that it began with, which not every checkpoint keeps."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group.setdefault("initial_lr", rate)


def _build_scheduler(
    cfg: DictConfig, optimizer: torch.optim.Optimizer, total_steps: int, steps_done: int
) -> LRScheduler | None:
    if cfg.get("lr_scheduler") is None:
        return None
    scheduler: LRScheduler = components.build(
        "lr_scheduler", cfg, optimizer, num_training_steps=total_steps, last_epoch=steps_done - 1
    )
    return scheduler
