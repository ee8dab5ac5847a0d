"""The four models of PPO, all resident: policy and value model are trained, reference and reward model are not.

One optimizer updates both that are trained, as in torchtune's recipe. Each has its own sum of gradients over its own
tokens, so neither depends on how often the other's microbatches were cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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
from torchtune_adaptive.tune.culprits import vocabulary_of
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
from torchtune_adaptive.tune.optimizer import Optimization, one_optimizer
from torchtune_adaptive.tune.place import Place, dtype_of

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


def build_models(
    settings: Settings,
    place: Place,
    checkpoint: Checkpoint,
    seed: int,
    frozen: Callable[[Settings, str], Weights] = load_reference,
) -> Models:
    """Collective: policy and value model from the checkpoint, the others from files that no run changes."""
    classifier = partial(_classifier, settings, place, seed)
    value = {training.MODEL_KEY: classifier(checkpoint[VALUE_MODEL], VALUE_FILES)}
    models = Models(
        policy=build_full_model(settings, place, checkpoint, POLICY_SECTION, POLICY_FILES),
        value=build_full_model(settings, place, value, VALUE_SECTION, VALUE_FILES),
        reference=build_frozen_model(
            settings, place, frozen(settings, REFERENCE_FILES), POLICY_SECTION, REFERENCE_FILES
        ),
        reward=build_frozen_model(
            settings, place, classifier(frozen(settings, REWARD_FILES), REWARD_FILES), VALUE_SECTION, REWARD_FILES
        ),
    )
    drop_nothing(models.trained)  # what the models say is compared
    _check_vocabularies(models)
    return models


def _classifier(settings: Settings, place: Place, seed: int, weights: Weights, files: str) -> Weights:
    """Weights for a model of one number a token. A language model's head is replaced by a new one."""
    if isinstance(weights, Unfilled):
        return weights
    if HEAD not in weights:
        raise ConfigError(f"{files}: the weights have no {HEAD}; use those of a classifier")
    model = built_on(META, settings.config, dtype_of(settings, place.device), VALUE_SECTION)
    shape = model.state_dict()[HEAD].shape
    if shape[0] != 1:
        raise ConfigError(
            f"{VALUE_SECTION} returns {shape[0]} numbers per token, but a value or a reward is one number: "
            "set num_classes: 1"
        )
    kept = {name: weight for name, weight in weights.items() if name != "output.bias"}
    if kept[HEAD].shape[0] != shape[0]:
        drawn = torch.rand(shape, generator=torch.Generator().manual_seed(seed))  # the same on all ranks
        kept[HEAD] = ((2 * drawn - 1) / math.sqrt(shape[1])).to(kept[HEAD].dtype)
    return kept


def _check_vocabularies(models: Models) -> None:
    known = [vocabulary_of(model) for model in models.everything]
    if None not in known and min(known[1:]) < known[0]:  # type: ignore[type-var, operator]
        raise ConfigError(
            f"the vocabulary of {POLICY_SECTION} has {known[0]} tokens, that of {VALUE_SECTION} only {known[1]}: value "
            "and reward model must know every token that the policy can generate"
        )


def give_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


def build_ppo_optimization(
    settings: Settings, models: Models, checkpoint: Checkpoint, device: torch.device
) -> Optimization:
    """One optimizer for both models, whose updates each have a sum of tokens of their own."""
    return one_optimizer(settings, models.trained, checkpoint.get(training.OPT_KEY), device)
