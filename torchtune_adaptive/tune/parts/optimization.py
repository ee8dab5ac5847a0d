"""The optimizer, its learning-rate schedule and the update at the end of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler
from torchtune import training

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.tune.start import components
from torchtune_adaptive.tune.start.settings import Settings

State = Mapping[str, Any]


class Optimization(Protocol):
    """What a recipe needs of either way to update: after the backward, or inside it."""

    checkpointed: Any
    """What torchtune's checkpointing takes as the optimizer."""

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]: ...

    def start_schedule(self, *, total_steps: int, steps_done: int, lr_factor: float) -> None:
        """`lr_factor` is what a resumed run has already multiplied its learning rate with."""

    def use_lr_factor(self, factor: float) -> None:
        """From the next step on, the schedule's learning rate times this."""

    def update(self, target_tokens: int) -> float | None:
        """Collective where it clips: one update. Returns the gradient's norm if that was computed."""

    def learning_rate(self) -> float: ...


class UpdateAfterBackward:
    """One optimizer for all parameters. Gradients arrive summed over target tokens and averaged over ranks."""

    def __init__(
        self, cfg: DictConfig, settings: Settings, model: nn.Module, state: State | None, device: torch.device
    ) -> None:
        self._model = model
        self._max_norm = None if settings.clip_grad_norm is None else float(settings.clip_grad_norm)
        self._schedule = _Schedule(cfg)
        self.checkpointed = components.build("optimizer", cfg, model.parameters())
        self._schedule.watch(self.optimizers)
        if state:
            training.load_from_full_optimizer_state_dict(model, self.checkpointed, state, device)

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return [self.checkpointed]

    def start_schedule(self, *, total_steps: int, steps_done: int, lr_factor: float) -> None:
        self._schedule.start(total_steps, steps_done, lr_factor)

    def use_lr_factor(self, factor: float) -> None:
        self._schedule.use_factor(factor)

    def update(self, target_tokens: int) -> float | None:
        # FSDP averages over ranks: times their number, over the step's tokens, makes it the mean over tokens.
        # A step without any has no gradients but zeros.
        training.scale_grads(self._model, torch.tensor(dist.get_world_size() / max(1, target_tokens)))
        norm = self._clip()
        self.checkpointed.step()
        self.checkpointed.zero_grad(set_to_none=True)
        self._schedule.step()
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
        optimizers = {p: components.build("optimizer", cfg, [p]) for p in model.parameters()}
        training.register_optim_in_bwd_hooks(model=model, optim_dict=optimizers)
        self.checkpointed = training.create_optim_in_bwd_wrapper(model=model, optim_dict=optimizers)
        self._schedule = _Schedule(cfg)
        self._schedule.watch(self.optimizers)
        for name, state in (states or {}).items():
            self._restore(model, name, state, device)

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return list(self.checkpointed.optim_map.values())

    def start_schedule(self, *, total_steps: int, steps_done: int, lr_factor: float) -> None:
        self._schedule.start(total_steps, steps_done, lr_factor)
        if self._schedule.scheduler is not None:
            self.checkpointed.set_lr_scheduler(self._schedule.scheduler)

    def use_lr_factor(self, factor: float) -> None:
        self._schedule.use_factor(factor)

    def update(self, target_tokens: int) -> None:
        """The weights are updated already; only the schedule moves on."""
        self._schedule.step()

    def learning_rate(self) -> float:
        return float(training.get_lr(self.checkpointed))

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
    if state:
        _check_state(cfg, settings, state, device)
    if settings.optimizer_in_bwd:
        return UpdateInBackward(cfg, model, state, device)
    return UpdateAfterBackward(cfg, settings, model, state, device)


def _check_state(cfg: DictConfig, settings: Settings, state: State, device: torch.device) -> None:
    """Another optimizer's state would be loaded without a word, and never used."""
    one_state = next(iter(state.values())) if settings.optimizer_in_bwd else state
    if not isinstance(one_state, Mapping) or "state" not in one_state:
        return  # not saved that way: told by its name where it is loaded
    found = {key for values in one_state["state"].values() for key in values}
    parameter = nn.Parameter(torch.zeros(1, device=device))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = components.build("optimizer", cfg, [parameter])
    optimizer.step()
    needed = {str(key) for key in optimizer.state[parameter]}
    if found != needed:
        raise ConfigError(
            f"optimizer is {cfg.optimizer.get('_component_')}, which keeps {_names(needed)}, but the checkpoint's "
            f"state has {_names(found)}: resume with the optimizer of the run that saved it"
        )


def _names(keys: set[str]) -> str:
    return ", ".join(sorted(keys)) or "nothing"


class _Schedule:
    """The learning rate of one or several optimizers: the config's scheduler times a factor."""

    def __init__(self, cfg: DictConfig) -> None:
        self._cfg = cfg
        self._optimizers: Sequence[torch.optim.Optimizer] = ()
        self._factor = 1.0
        self.scheduler: LRScheduler | None = None
        """Of the first optimizer. torchtune's wrapper of several hands its rate on to the others at every step."""

    def watch(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Notes the rates to begin with; call it before a checkpoint brings rates of its own."""
        self._optimizers = optimizers
        self._first_rates = [float(group["lr"]) for group in self._groups()]

    def start(self, total_steps: int, steps_done: int, factor: float) -> None:
        self._factor = factor
        if self._cfg.get("lr_scheduler") is None:
            return
        for group, rate in zip(self._groups(), self._first_rates, strict=True):
            # a schedule that goes on needs the rate that it began with, which not every checkpoint keeps
            group.setdefault("initial_lr", rate * factor)
        length = {"num_training_steps": total_steps, "last_epoch": steps_done - 1}
        self.scheduler = components.build("lr_scheduler", self._cfg, self._optimizers[0], **length)

    def step(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()

    def use_factor(self, factor: float) -> None:
        ratio, self._factor = factor / self._factor, factor
        if ratio == 1:
            return
        for group in self._groups():
            group.update({key: group[key] * ratio for key in ("lr", "initial_lr") if key in group})
        if self.scheduler is not None:
            self.scheduler.base_lrs = [rate * ratio for rate in self.scheduler.base_lrs]

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]
