"""A checkpoint of PPO: policy, value model, optimizer, iteration and random generators, under one manifest.

epoch_0/            the policy as torchtune's checkpointer writes it, with all that belongs to the run
epoch_0/value/      the value model as its own checkpointer writes it
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from torch import nn
from torchtune import training

from torchtune_adaptive.checkpoints.loading import build_checkpointer, read_weights, section_writing_to
from torchtune_adaptive.checkpoints.saving import Sharded
from torchtune_adaptive.checkpoints.store import WEIGHTS, Checkpointer, Files, State
from torchtune_adaptive.config import components
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.rl.settings import REFERENCE_FILES, REWARD_FILES, VALUE_FILES

VALUE_MODEL = "value_model"
"""The key of the value model's weights in what is loaded and saved."""
VALUE_FOLDER = "value"


@dataclass(frozen=True)
class PPOContents:
    """What is saved: both models that are trained."""

    recipe: str = "full_ppo"
    adapter_only: bool = False

    def sharded(self, model: nn.Module) -> Sharded:
        """Weights of both models, which are in a ModuleDict."""
        assert isinstance(model, nn.ModuleDict)
        return {training.MODEL_KEY: model["policy"].state_dict(), VALUE_MODEL: model["value"].state_dict()}

    def finished(self, gathered: State, model: nn.Module) -> State:
        return gathered


class TwoCheckpointers:
    """Two of torchtune's checkpointers as one, so that what they write becomes one checkpoint, or none."""

    def __init__(self, policy: Checkpointer, value: Checkpointer, staging: Path) -> None:
        self._policy = policy
        self._value = value
        self._staging = staging

    def load_checkpoint(self) -> State:
        state = self._policy.load_checkpoint()
        return {**state, VALUE_MODEL: read_weights(self._value, VALUE_FILES)[training.MODEL_KEY]}

    def save_checkpoint(self, state: State, *, epoch: int, intermediate_checkpoint: bool, **options: bool) -> None:
        """Writes both, and moves the value model to where the policy is."""
        of_policy = {key: part for key, part in state.items() if key != VALUE_MODEL}
        self._policy.save_checkpoint(of_policy, epoch=epoch, intermediate_checkpoint=intermediate_checkpoint, **options)
        of_value = {training.MODEL_KEY: state[VALUE_MODEL]}
        self._value.save_checkpoint(of_value, epoch=epoch, intermediate_checkpoint=False, **options)
        written = self._staging / VALUE_FOLDER / f"epoch_{epoch}"
        os.replace(written, self._staging / f"epoch_{epoch}" / VALUE_FOLDER)


def build_checkpointers(cfg: DictConfig, staging: Path, files: Files | None) -> TwoCheckpointers:
    """`checkpointer` and `value_checkpointer`, which read what the run goes on from, and write beside each other."""
    policy = build_checkpointer(cfg, staging, files)
    section = section_writing_to(cfg, VALUE_FILES, staging / VALUE_FOLDER)
    if files is not None:
        folder = files.folder / VALUE_FOLDER
        found = sorted(str(path) for path in folder.glob("*") if WEIGHTS.fullmatch(path.name))
        if not found:
            raise ConfigError(f"{folder} has no weights of a value model: this is not a PPO checkpoint")
        section["checkpoint_files"] = found
    (staging / VALUE_FOLDER).mkdir(parents=True, exist_ok=True)
    value = components.build_section(VALUE_FILES, OmegaConf.create(section), should_load_recipe_state=False)
    for key in (REFERENCE_FILES, REWARD_FILES):  # the demo's make their weights, which belong to a run's identity
        frozen = OmegaConf.merge(components.require(cfg, key), {"output_dir": str(staging)})
        components.build_section(key, frozen, should_load_recipe_state=False)
    return TwoCheckpointers(policy, value, staging)
