"""PPO: its four models, their stages and checkpoints, advantages, and the figures of an update.

All models are in memory. One optimizer trains policy and value model, as in torchtune's recipe. Three things make the
result independent of the split into microbatches: advantages are whitened before, over the answers of all ranks; the
losses are sums over tokens, not means as in torchtune; and the gradients of each model are divided by the number of
tokens of its stage.

A checkpoint has one manifest for both models:

    epoch_0/            the policy, written by torchtune's checkpointer, and the state of the run
    epoch_0/value/      the value model, written by a second checkpointer
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torchtune import rlhf, training

from torchtune_adaptive.checkpoints.contents import Contents
from torchtune_adaptive.checkpoints.manager import build_checkpointer, load_reference, section_that_saves
from torchtune_adaptive.checkpoints.store import WEIGHTS, Checkpointer, Files, State
from torchtune_adaptive.config import components
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.engine.results import StepResult
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.lifecycle.distributed import Devices
from torchtune_adaptive.models.model import (
    META,
    Unfilled,
    build_frozen_model,
    build_model,
    build_on_device,
    disable_dropout,
)
from torchtune_adaptive.rl import rollouts as results
from torchtune_adaptive.rl import settings as keys
from torchtune_adaptive.rl import stages
from torchtune_adaptive.rl.generation import Generate
from torchtune_adaptive.rl.rollouts import Rollout, counts_of, results_of, store, valued_of
from torchtune_adaptive.rl.settings import PPOLoss, PPOSettings

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


def build_models(settings: Settings, devices: Devices, checkpoint: State) -> Models:
    """Collective: build policy and value model from the checkpoint, and the others from the files of the config."""
    value = _classifier_weights(settings, checkpoint[VALUE_MODEL], keys.VALUE_SECTION)
    reference = load_reference(settings, keys.REFERENCE_FILES)
    reward = _classifier_weights(settings, load_reference(settings, keys.REWARD_FILES), keys.VALUE_SECTION)
    models = Models(
        policy=build_model(settings, devices, checkpoint, keys.POLICY_SECTION, keys.POLICY_FILES),
        value=build_model(settings, devices, {training.MODEL_KEY: value}, keys.VALUE_SECTION, keys.VALUE_FILES),
        reference=build_frozen_model(settings, devices, reference, keys.POLICY_SECTION, keys.REFERENCE_FILES),
        reward=build_frozen_model(settings, devices, reward, keys.VALUE_SECTION, keys.REWARD_FILES),
    )
    disable_dropout(models.trained)  # log-probabilities and values are compared
    return models


def _classifier_weights(settings: Settings, weights: State, section: str) -> State:
    """Check that the model of this section has one output per token, and return the weights without the head's bias."""
    if isinstance(weights, Unfilled):
        return weights
    outputs = len(build_on_device(META, settings.config, torch.float32, section).state_dict()[HEAD])
    if outputs != 1:
        raise ConfigError(
            f"{section} returns {outputs} numbers per token, but a value or a reward is one number: set num_classes: 1"
        )
    return {name: weight for name, weight in weights.items() if name != "output.bias"}


PPO_CONTENTS = Contents("full_ppo", parts=(("policy", training.MODEL_KEY), ("value", VALUE_MODEL)))
"""The contents of a checkpoint: the trained models."""


class TwoCheckpointers:
    """Combines two checkpointers of torchtune, so that both models are in one atomic checkpoint."""

    def __init__(self, policy: Checkpointer, value: Checkpointer, staging: Path) -> None:
        self._policy, self._value, self._staging = policy, value, staging

    def load_checkpoint(self) -> State:
        """Load the policy with the state of the run, and the weights of the value model."""
        state = self._policy.load_checkpoint()
        return {**state, VALUE_MODEL: self._value.load_checkpoint()[training.MODEL_KEY]}

    def save_checkpoint(self, state: State, *, epoch: int, intermediate_checkpoint: bool, **options: bool) -> None:
        """Write both models, then move the value model into the folder of the policy."""
        of_policy = {key: part for key, part in state.items() if key != VALUE_MODEL}
        self._policy.save_checkpoint(of_policy, epoch=epoch, intermediate_checkpoint=intermediate_checkpoint, **options)
        of_value = {training.MODEL_KEY: state[VALUE_MODEL]}
        self._value.save_checkpoint(of_value, epoch=epoch, intermediate_checkpoint=False, **options)
        written = self._staging / VALUE_FOLDER / f"epoch_{epoch}"
        target = self._staging / f"epoch_{epoch}" / VALUE_FOLDER
        # torchtune copies all other files of `checkpoint_dir`, which may be an earlier checkpoint of PPO
        shutil.rmtree(target, ignore_errors=True)
        os.replace(written, target)


def build_checkpointers(cfg: DictConfig, staging: Path, files: Files | None) -> TwoCheckpointers:
    """Build `checkpointer` and `value_checkpointer`, which read the files of the config or, to resume, `files`."""
    policy = build_checkpointer(cfg, staging, files)
    section = section_that_saves(cfg, keys.VALUE_FILES, staging / VALUE_FOLDER)
    if files is not None:
        folder = files.folder / VALUE_FOLDER
        found = sorted(str(path) for path in folder.glob("*") if WEIGHTS.fullmatch(path.name))
        if not found:
            raise ConfigError(f"{folder} has no weights of a value model: resume from a PPO checkpoint")
        section["checkpoint_files"] = found
    (staging / VALUE_FOLDER).mkdir(parents=True, exist_ok=True)
    value = components.build_section(keys.VALUE_FILES, OmegaConf.create(section), should_load_recipe_state=False)
    # Building the demo's checkpointers creates their weight files, which a resumed run compares.
    for key in (keys.REFERENCE_FILES, keys.REWARD_FILES):
        frozen = OmegaConf.merge(components.require(cfg, key), {"output_dir": str(staging)})
        components.build_section(key, frozen, should_load_recipe_state=False)
    return TwoCheckpointers(policy, value, staging)


def add_advantages(rollouts: Sequence[Rollout], ppo: PPOSettings) -> dict[str, float]:
    """Add advantages and returns to the rollouts of all ranks. Return figures for the log."""
    counts = counts_of(rollouts)
    valued, last = valued_of(counts), counts.sum(1) - 1
    scores, reference = results_of(rollouts, results.SCORE), results_of(rollouts, results.REFERENCE_LOG_PROBS)
    penalised = rlhf.get_reward_penalty_mask(~counts, last, ppo.penalise_no_eos, ppo.min_response_length)
    scores = torch.where(penalised, ppo.reward_penalty, scores)
    log_probs, values = results_of(rollouts, results.LOG_PROBS), results_of(rollouts, results.VALUES)
    rewards, kl, kl_rewards = rlhf.get_rewards_ppo(scores, log_probs, reference, ppo.kl_coeff, valued.sum(1) - 1)
    if ppo.whiten_rewards:
        rewards = rlhf.whiten(rewards, valued) * valued
    advantages, returns = rlhf.estimate_advantages(values, rewards, ppo.gamma, ppo.lmbda, masks=counts)
    store(rollouts, results.ADVANTAGES, advantages)
    store(rollouts, results.RETURNS, returns)
    score, kl_reward = float(scores.mean()), float(kl_rewards.sum(1).mean())
    return {
        "scores": score,
        "num_stop_tokens": float((~counts.all(1)).sum()),  # answers that end early, as torchtune counts them
        "rlhf_reward": score + kl_reward,
        "kl": float(kl.sum(1).mean()),
        "kl_reward": kl_reward,
        "response_lengths": float(last.float().mean()),
    }


def figures_of_update(value: StepResult, policy: StepResult, loss: PPOLoss) -> dict[str, float]:
    """Return torchtune's figures of an update, which are means over the tokens of all ranks. Waits for the GPU."""
    mean = {name: float(value) / max(1, policy.target_tokens) for name, value in policy.sums.items()}
    of_policy = float(policy.loss_sum) / max(1, policy.target_tokens)
    of_value = float(value.loss_sum) / max(1, value.target_tokens)
    return {
        "loss": of_policy + loss.value_coeff * of_value,
        "policy_loss": of_policy,
        "value_loss": of_value,
        "clipfrac": mean["clipped"],
        "ratios": mean["ratios"],
        "approx_policy_kl": 0.5 * mean["squares"],
        "entropy": -mean["log_probs"],
    }


def ppo_stages(
    models: Models, generate: Generate, ppo: PPOSettings, device: torch.device
) -> dict[str, stages.RolloutStage]:
    """Return the stages of PPO, in order."""
    (policy, value, reference, reward), loss = models, ppo.loss
    scorer = stages.AnswerScorer(device=device, temperature=ppo.temperature)
    before = partial(stages.RolloutStage, samples=ppo.batch_size, rows=ppo.forward_batch_size)
    rows = ppo.ppo_batch_size // ppo.gradient_accumulation_steps
    training = partial(stages.RolloutStage, samples=ppo.ppo_batch_size, rows=rows)

    def score(model: nn.Module, compute: Callable[..., Tensor], name: str) -> stages.RolloutStage:
        return before(model, partial(stages.compute, compute, model, name))

    train_value = partial(stages.train_value, value, scorer, loss.value_clip_range, loss.value_coeff)
    train_policy = partial(stages.train_policy, policy, scorer, loss.epsilon)
    return {
        stages.GENERATE: before(policy, generate),
        stages.FIND_REWARDS: score(reward, scorer.scores, results.SCORE),
        stages.SCORE_POLICY: score(policy, scorer.log_probs, results.LOG_PROBS),
        stages.SCORE_REFERENCE: score(reference, scorer.log_probs, results.REFERENCE_LOG_PROBS),
        stages.FIND_VALUES: score(value, scorer.values, results.VALUES),
        stages.TRAIN_VALUE: training(value, train_value, trains="value"),
        stages.TRAIN_POLICY: training(policy, train_policy, trains="policy"),
    }
