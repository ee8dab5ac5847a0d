"""Saving and loading through torchtune's checkpointers, in torchtune's format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import nn
from torchtune import training
from torchtune.modules import peft
from torchtune.training.checkpointing._checkpoint_client import CheckpointClient, TrainingProgress

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.host import components
from torchtune_adaptive.host.progress import Progress
from torchtune_adaptive.host.settings import Settings

Checkpoint = dict[str, Any]


class FullCheckpoints:
    """Checkpoints of full finetuning: whole weights, synchronous or asynchronous."""

    def __init__(self, cfg: DictConfig, settings: Settings) -> None:
        _check_paths(components.require(cfg, "checkpointer"))
        self.last: str | None = None
        self._output_dir = Path(settings.output_dir)
        self._async = settings.enable_async_checkpointing
        self._resume = settings.resume_from_checkpoint
        self._client = CheckpointClient(cfg)

    def load(self) -> Checkpoint:
        return _load(self._client.load_base_checkpoint)

    def resume(self, base: Checkpoint, model: nn.Module, optimizer: Any) -> Checkpoint:
        """Collective: the recipe state to go on with; an asynchronous checkpoint also fills model and optimizer."""
        if not self._async:
            return base
        return _load(lambda: self._client.load_distributed_checkpoint(model, optimizer))

    def save(
        self,
        epoch: int,
        model: nn.Module,
        optimizer: Any,
        progress: Progress,
        loader_state: Mapping[str, Any],
    ) -> None:
        """Collective: weights of this epoch, and all that is needed to go on unless it is the last."""
        state = TrainingProgress(dataloader_state_dict=dict(loader_state), **asdict(progress))
        self._client.save_checkpoint(model=model, optimizer=optimizer, training_progress=state, epoch=epoch)
        self.last = str(self._output_dir / f"epoch_{epoch}")


class AdapterCheckpoints:
    """Checkpoints of LoRA finetuning: the adapter alone, and merged into the base weights."""

    def __init__(self, cfg: DictConfig, settings: Settings, device: torch.device) -> None:
        _check_paths(components.require(cfg, "checkpointer"))
        self.last: str | None = None
        self._output_dir = Path(settings.output_dir)
        self._cfg_model = components.require(cfg, "model")
        self._adapter_only = settings.save_adapter_weights_only
        self._device = device
        self._resume = settings.resume_from_checkpoint
        self._checkpointer = components.build("checkpointer", cfg, should_load_recipe_state=self._resume)

    def load(self) -> Checkpoint:
        checkpoint = _load(self._checkpointer.load_checkpoint)
        if self._resume and training.ADAPTER_KEY not in checkpoint:
            raise ConfigError(
                "resume_from_checkpoint is True, but no adapter weights were found: "
                "give checkpointer.adapter_checkpoint or the output_dir of the run to go on with"
            )
        return checkpoint

    def save(
        self,
        epoch: int,
        model: nn.Module,
        optimizer: Any,
        progress: Progress,
        loader_state: Mapping[str, Any],
    ) -> None:
        """Collective: adapter and merged weights of this epoch, and what is needed to go on unless it is the last."""
        unfinished = epoch + 1 < progress.total_epochs
        first = dist.get_rank() == 0
        weights = training.gather_cpu_state_dict(
            model, first, device=self._device, adapter_weights_only=self._adapter_only
        )
        state: Checkpoint = {}
        if unfinished:
            state[training.OPT_KEY] = training.get_full_optimizer_state_dict(
                model, optimizer, first, device=self._device
            )
            state.update(progress.recipe_state())
            state[training.DATALOADER_KEY] = dict(loader_state)
        if first:
            self._write(epoch, {**self._model_state(weights), **state}, unfinished)
        dist.barrier()
        self.last = str(self._output_dir / f"epoch_{epoch}")

    def _model_state(self, weights: Checkpoint) -> Checkpoint:
        state: Checkpoint = {training.ADAPTER_CONFIG: self._adapter_config()}
        if self._adapter_only:
            return {**state, training.ADAPTER_KEY: weights}
        state[training.ADAPTER_KEY] = peft.get_adapter_state_dict(weights)
        state[training.MODEL_KEY] = peft.get_merged_lora_ckpt(
            weights, rank=self._cfg_model.lora_rank, alpha=self._cfg_model.lora_alpha
        )
        return state

    def _adapter_config(self) -> dict[str, Any]:
        """What PEFT wants to know to load the adapter."""
        model = self._cfg_model
        targets = peft.get_lora_module_names(
            list(model.lora_attn_modules), model.apply_lora_to_mlp, model.get("apply_lora_to_output", False)
        )
        return {
            "r": model.lora_rank,
            "lora_alpha": model.lora_alpha,
            "target_modules": targets,
            "peft_type": "LORA",
        }

    def _write(self, epoch: int, state: Checkpoint, unfinished: bool) -> None:
        self._checkpointer.save_checkpoint(
            state, epoch=epoch, intermediate_checkpoint=unfinished, adapter_only=self._adapter_only
        )


def _load(load: Any) -> Checkpoint:
    try:
        checkpoint: Checkpoint = load()
    except (ValueError, FileNotFoundError, OSError, RuntimeError) as error:
        raise ConfigError(f"checkpointer: loading failed: {' '.join(str(error).split())}") from error
    return checkpoint


def _check_paths(section: DictConfig) -> None:
    """torchtune's own checkpointers name neither key nor directory when a file is missing."""
    directory = section.get("checkpoint_dir")
    if directory is None:
        raise ConfigError("checkpointer.checkpoint_dir is missing: give the directory that holds the weights")
    component = str(section.get("_component_", ""))
    if component.startswith("torchtune.training.") and not Path(directory).is_dir():
        raise ConfigError(
            f"checkpointer.checkpoint_dir is {directory!r}, which is no directory: "
            "download the weights first (tune download) or correct the path"
        )
