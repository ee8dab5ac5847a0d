"""The four models of PPO, all in memory, and its checkpoints.

Policy and value model are trained by one optimizer, as in torchtune's recipe. Each model's gradients are divided by the
tokens of its stage, so they do not depend on the other stage's microbatches. One manifest covers both models:

    epoch_0/            the policy, written by torchtune's checkpointer, and the state of the run
    epoch_0/value/      the value model, written by a second checkpointer
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import NamedTuple

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torchtune import training

from torchtune_adaptive.checkpoints.contents import Contents
from torchtune_adaptive.checkpoints.loading import build_checkpointer, load_reference, read_state, section_writing_to
from torchtune_adaptive.checkpoints.store import WEIGHTS, Checkpointer, Files, State
from torchtune_adaptive.config import components
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.rl import settings as keys
from torchtune_adaptive.tune.checked_dataset import vocabulary_of
from torchtune_adaptive.tune.distributed import Place
from torchtune_adaptive.tune.model import (
    META,
    Unfilled,
    build_frozen_model,
    build_full_model,
    build_on_device,
    disable_dropout,
)

HEAD = "output.weight"
VALUE_MODEL = "value_model"
"""Key of the value model's weights in a loaded or saved state."""
VALUE_FOLDER = "value"


class Models(NamedTuple):
    """The models of PPO."""

    policy: nn.Module
    value: nn.Module
    reference: nn.Module
    reward: nn.Module

    @property
    def trained(self) -> nn.ModuleDict:
        """The models that the optimizer updates."""
        return nn.ModuleDict({"policy": self.policy, "value": self.value})


def build_models(settings: Settings, place: Place, checkpoint: State, seed: int) -> Models:
    """Collective: build policy and value model from the checkpoint, and the others from the files of the config."""
    value = _of_classifier(settings, checkpoint[VALUE_MODEL], keys.VALUE_SECTION, keys.VALUE_FILES, seed)
    reference = load_reference(settings, keys.PPO_REFERENCE_FILES)
    models = Models(
        policy=build_full_model(settings, place, checkpoint, keys.POLICY_SECTION, keys.POLICY_FILES),
        value=build_full_model(settings, place, {training.MODEL_KEY: value}, keys.VALUE_SECTION, keys.VALUE_FILES),
        reference=build_frozen_model(settings, place, reference, keys.POLICY_SECTION, keys.PPO_REFERENCE_FILES),
        reward=build_judge(settings, place, keys.VALUE_SECTION, seed),
    )
    disable_dropout(models.trained)  # log-probabilities and values are compared
    known = [vocabulary_of(model) for model in models]
    if None not in known and min(known[1:]) < known[0]:  # type: ignore[type-var, operator]
        raise ConfigError(
            f"the vocabulary of {keys.POLICY_SECTION} has {known[0]} tokens, that of {keys.VALUE_SECTION} only "
            f"{known[1]}: value and reward model must know every token that the policy can generate"
        )
    return models


def build_judge(settings: Settings, place: Place, section: str, seed: int) -> nn.Module:
    """Collective: build the reward model of this section."""
    weights = _of_classifier(settings, load_reference(settings, keys.REWARD_FILES), section, keys.REWARD_FILES, seed)
    return build_frozen_model(settings, place, weights, section, keys.REWARD_FILES)


def _of_classifier(settings: Settings, weights: State, section: str, files: str, seed: int) -> State:
    """Return weights for a model with one output per token; a language model's head is replaced by a random one."""
    if isinstance(weights, Unfilled):
        return weights
    if HEAD not in weights:
        raise ConfigError(f"{files}: the weights have no {HEAD}; use those of a classifier")
    shape = build_on_device(META, settings.config, torch.float32, section).state_dict()[HEAD].shape
    if shape[0] != 1:
        raise ConfigError(
            f"{section} returns {shape[0]} numbers per token, but a value or a reward is one number: set num_classes: 1"
        )
    weights = {name: weight for name, weight in weights.items() if name != "output.bias"}
    if weights[HEAD].shape[0] != 1:
        drawn = torch.rand(shape, generator=torch.Generator().manual_seed(seed))  # the same on all ranks
        weights[HEAD] = ((2 * drawn - 1) / math.sqrt(shape[1])).to(weights[HEAD].dtype)
    return weights


PPO_CONTENTS = Contents("full_ppo", parts=(("policy", training.MODEL_KEY), ("value", VALUE_MODEL)))
"""Parts of a checkpoint: the trained models."""


class TwoCheckpointers:
    """Combines two checkpointers of torchtune, so that both models are in one atomic checkpoint."""

    def __init__(self, policy: Checkpointer, value: Checkpointer, staging: Path) -> None:
        self._policy, self._value, self._staging = policy, value, staging

    def load_checkpoint(self) -> State:
        """Load the policy's state and the value model's weights."""
        state = self._policy.load_checkpoint()
        return {**state, VALUE_MODEL: read_state(self._value, keys.VALUE_FILES)[training.MODEL_KEY]}

    def save_checkpoint(self, state: State, *, epoch: int, intermediate_checkpoint: bool, **options: bool) -> None:
        """Write both models, and move the value model into the folder of the policy."""
        of_policy = {key: part for key, part in state.items() if key != VALUE_MODEL}
        self._policy.save_checkpoint(of_policy, epoch=epoch, intermediate_checkpoint=intermediate_checkpoint, **options)
        of_value = {training.MODEL_KEY: state[VALUE_MODEL]}
        self._value.save_checkpoint(of_value, epoch=epoch, intermediate_checkpoint=False, **options)
        written = self._staging / VALUE_FOLDER / f"epoch_{epoch}"
        os.replace(written, self._staging / f"epoch_{epoch}" / VALUE_FOLDER)


def build_checkpointers(cfg: DictConfig, staging: Path, files: Files | None) -> TwoCheckpointers:
    """Build `checkpointer` and `value_checkpointer`; a resumed run reads the files of its checkpoint."""
    policy = build_checkpointer(cfg, staging, files)
    section = section_writing_to(cfg, keys.VALUE_FILES, staging / VALUE_FOLDER)
    if files is not None:
        folder = files.folder / VALUE_FOLDER
        found = sorted(str(path) for path in folder.glob("*") if WEIGHTS.fullmatch(path.name))
        if not found:
            raise ConfigError(f"{folder} has no weights of a value model: this is not a PPO checkpoint")
        section["checkpoint_files"] = found
    (staging / VALUE_FOLDER).mkdir(parents=True, exist_ok=True)
    value = components.build_section(keys.VALUE_FILES, OmegaConf.create(section), should_load_recipe_state=False)
    # the demo's checkpointers create their weights, which are part of the identity of a run
    for key in (keys.PPO_REFERENCE_FILES, keys.REWARD_FILES):
        frozen = OmegaConf.merge(components.require(cfg, key), {"output_dir": str(staging)})
        components.build_section(key, frozen, should_load_recipe_state=False)
    return TwoCheckpointers(policy, value, staging)
