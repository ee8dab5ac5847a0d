"""The four models of PPO, all resident: policy and value model are trained, reference and reward model are not.

One optimizer updates both that are trained, as in torchtune's recipe. Each has its own sum of gradients over its own
tokens, so neither depends on how often the other's microbatches were cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torchtune import training

from torchtune_adaptive.checkpoints.loading import load_reference
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.rl.checkpoints import VALUE_MODEL
from torchtune_adaptive.rl.settings import (
    POLICY_FILES,
    POLICY_SECTION,
    REFERENCE_FILES,
    REWARD_FILES,
    VALUE_FILES,
    VALUE_SECTION,
)
from torchtune_adaptive.tune.bad_samples import vocabulary_of
from torchtune_adaptive.tune.model import (
    META,
    Checkpoint,
    Unfilled,
    Weights,
    build_frozen_model,
    build_full_model,
    built_on,
    drop_nothing,
)
from torchtune_adaptive.tune.place import Place

HEAD = "output.weight"


@dataclass(frozen=True)
class Models:
    policy: nn.Module
    value: nn.Module
    reference: nn.Module
    reward: nn.Module

    @property
    def trained(self) -> nn.ModuleDict:
        """The models that are updated and saved, as one module."""
        return nn.ModuleDict({"policy": self.policy, "value": self.value})

    @property
    def everything(self) -> tuple[nn.Module, ...]:
        return self.policy, self.value, self.reference, self.reward


def build_models(settings: Settings, place: Place, checkpoint: Checkpoint, seed: int) -> Models:
    """Collective: policy and value model from the checkpoint, the others from files that no run changes."""
    value = _classifier_weights(settings, checkpoint[VALUE_MODEL], VALUE_FILES, seed)
    reward = _classifier_weights(settings, load_reference(settings, REWARD_FILES), REWARD_FILES, seed)
    reference = load_reference(settings, REFERENCE_FILES)
    models = Models(
        policy=build_full_model(settings, place, checkpoint, POLICY_SECTION, POLICY_FILES),
        value=build_full_model(settings, place, {training.MODEL_KEY: value}, VALUE_SECTION, VALUE_FILES),
        reference=build_frozen_model(settings, place, reference, POLICY_SECTION, REFERENCE_FILES),
        reward=build_frozen_model(settings, place, reward, VALUE_SECTION, REWARD_FILES),
    )
    drop_nothing(models.trained)  # log-probabilities and values are compared
    known = [vocabulary_of(model) for model in models.everything]
    if None not in known and min(known[1:]) < known[0]:  # type: ignore[type-var, operator]
        raise ConfigError(
            f"the vocabulary of {POLICY_SECTION} has {known[0]} tokens, that of {VALUE_SECTION} only {known[1]}: value "
            "and reward model must know every token that the policy can generate"
        )
    return models


def _classifier_weights(settings: Settings, weights: Weights, files: str, seed: int) -> Weights:
    """Weights for a model of one number a token. A language model's head is replaced by a new one."""
    if isinstance(weights, Unfilled):
        return weights
    if HEAD not in weights:
        raise ConfigError(f"{files}: the weights have no {HEAD}; use those of a classifier")
    shape = built_on(META, settings.config, torch.float32, VALUE_SECTION).state_dict()[HEAD].shape
    if shape[0] != 1:
        raise ConfigError(
            f"{VALUE_SECTION} returns {shape[0]} numbers per token, but a value or a reward is one number: "
            "set num_classes: 1"
        )
    weights = {name: weight for name, weight in weights.items() if name != "output.bias"}
    if weights[HEAD].shape[0] != 1:
        drawn = torch.rand(shape, generator=torch.Generator().manual_seed(seed))  # the same on all ranks
        weights[HEAD] = ((2 * drawn - 1) / math.sqrt(shape[1])).to(weights[HEAD].dtype)
    return weights
