"""Saving and loading through torchtune's checkpointers, in torchtune's format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.checkpoint.state_dict_loader import load
from torchtune import training
from torchtune.modules import peft
from torchtune.training.checkpointing._checkpoint_client import CheckpointClient, TrainingProgress
from torchtune.training.memory import OptimizerInBackwardWrapper

from torchtune_adaptive.errors import AdaptiveError, ConfigError
from torchtune_adaptive.tune.run.progress import ADAPTIVE_KEY, Progress
from torchtune_adaptive.tune.start import components
from torchtune_adaptive.tune.start.settings import LoraSettings, Settings

Checkpoint = dict[str, Any]

HOW_TO_RESUME = (
    "; to resume, checkpointer.output_dir must be that of an unfinished run, and checkpointer.checkpoint_files are "
    "relative to it, for example [epoch_0/model-00001-of-00001.bin]"
)


class FullCheckpoints:
    """Checkpoints of full finetuning: whole weights, synchronous or asynchronous."""

    def __init__(self, cfg: DictConfig, settings: Settings) -> None:
        """Collective: creates the group that checkpoints are saved on beside training."""
        section = components.require(cfg, "checkpointer")
        _check_paths(section, settings)
        self.last: str | None = None
        self._output_dir = Path(settings.output_dir)
        self._async = settings.enable_async_checkpointing
        self._resume = settings.resume_from_checkpoint
        self._client = CheckpointClient(cfg)
        if self._async:
            self._client._dcp_checkpointer = _background_checkpointer(section, settings)

    def load(self) -> Checkpoint:
        """The weights to start from; when resuming, those that the run to go on with has saved, and its state."""
        resumes_here = self._resume and not self._async
        return _load(self._client.load_base_checkpoint, HOW_TO_RESUME if resumes_here else "")

    def resume(self, base: Checkpoint, model: nn.Module, optimizer: Any) -> Checkpoint:
        """Collective: the recipe state to go on with; an asynchronous checkpoint also fills model and optimizer."""
        if not self._async:
            return base
        if isinstance(optimizer, OptimizerInBackwardWrapper):
            # torchtune does this for one optimizer only: what has no state yet is not loaded
            for one_of_many in optimizer.optim_map.values():
                _init_optim_state(one_of_many)
        checkpoint = _load(lambda: self._client.load_distributed_checkpoint(model, optimizer))
        return {**checkpoint, **_load(lambda: _adaptive_state(self._output_dir))}

    def save(
        self,
        epoch: int,
        model: nn.Module,
        optimizer: Any,
        progress: Progress,
        loader_state: Mapping[str, Any],
    ) -> None:
        """Collective: weights of this epoch, and all that is needed to go on unless it is the last."""
        state = _TrainingProgress(progress, loader_state)
        self._client.save_checkpoint(model=model, optimizer=optimizer, training_progress=state, epoch=epoch)
        self.last = str(self._output_dir / f"epoch_{epoch}")


class _TrainingProgress(TrainingProgress):
    """Our progress, as torchtune's checkpoint client takes it."""

    def __init__(self, progress: Progress, loader_state: Mapping[str, Any]) -> None:
        super().__init__(
            seed=progress.seed,
            epochs_run=progress.epochs_run,
            total_epochs=progress.total_epochs,
            max_steps_per_epoch=progress.max_steps_per_epoch,
            dataloader_state_dict=dict(loader_state),
        )
        self._progress = progress

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **self._progress.recipe_state()}


def _adaptive_state(output_dir: Path) -> Checkpoint:
    """What the newest asynchronous checkpoint knows besides torchtune's keys, if it is one of ours."""
    complete = [path.parent for path in output_dir.glob("dist_epoch_*/.metadata")]
    newest = max(complete, key=lambda path: int(path.name.rpartition("_")[2]))
    reader = FileSystemReader(newest)
    state: Checkpoint = {ADAPTIVE_KEY: ""}
    if ADAPTIVE_KEY not in reader.read_metadata().state_dict_metadata:
        return {}
    load(state, storage_reader=reader)
    return state


class AdapterCheckpoints:
    """Checkpoints of LoRA finetuning: the adapter alone, and merged into the base weights."""

    def __init__(self, cfg: DictConfig, settings: Settings, lora: LoraSettings, device: torch.device) -> None:
        _check_paths(components.require(cfg, "checkpointer"), settings)
        self.last: str | None = None
        self._output_dir = Path(settings.output_dir)
        self._lora = lora
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
            weights, rank=self._lora.lora_rank, alpha=self._lora.lora_alpha
        )
        return state

    def _adapter_config(self) -> dict[str, Any]:
        """What PEFT wants to know to load the adapter."""
        lora = self._lora
        targets = peft.get_lora_module_names(
            list(lora.lora_attn_modules), lora.apply_lora_to_mlp, lora.apply_lora_to_output
        )
        return {
            "r": lora.lora_rank,
            "lora_alpha": lora.lora_alpha,
            "target_modules": targets,
            "peft_type": "LORA",
        }

    def _write(self, epoch: int, state: Checkpoint, unfinished: bool) -> None:
        self._checkpointer.save_checkpoint(
            state, epoch=epoch, intermediate_checkpoint=unfinished, adapter_only=self._adapter_only
        )


def _background_checkpointer(section: DictConfig, settings: Settings) -> training.DistributedCheckpointer:
    """Collective: saves in a thread, whose collectives would meet training's if both used one group."""
    return training.DistributedCheckpointer(
        checkpoint_dir=section.checkpoint_dir,
        output_dir=section.get("output_dir", settings.output_dir),
        process_group=dist.new_group(backend="gloo"),
    )


def _load(load: Callable[[], Checkpoint], remedy: str = "") -> Checkpoint:
    try:
        return load()
    except AdaptiveError:
        raise
    except Exception as error:
        raise ConfigError(f"checkpointer: loading failed: {components.reason(error)}{remedy}") from error


def _check_paths(section: DictConfig, settings: Settings) -> None:
    """torchtune's own checkpointers name neither key nor directory when a file is missing."""
    directory, output_dir = section.get("checkpoint_dir"), section.get("output_dir", settings.output_dir)
    if not isinstance(directory, str):
        raise ConfigError(f"checkpointer.checkpoint_dir is {directory!r}: give the directory that holds the weights")
    component = str(section.get("_component_", ""))
    if component.startswith("torchtune.training.") and not Path(directory).is_dir():
        raise ConfigError(
            f"checkpointer.checkpoint_dir is {directory!r}, which is no directory: "
            "download the weights first (tune download) or correct the path"
        )
    if settings.resume_from_checkpoint and not list(Path(output_dir).glob("*epoch_*")):
        raise ConfigError(
            f"resume_from_checkpoint is True and checkpointer.output_dir is {output_dir!r}, where no epoch was saved: "
            "give the output_dir of the run to go on with"
        )
    try:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output_dir is {output_dir!r}, which cannot be written to: {error.strerror}") from error
