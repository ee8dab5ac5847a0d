"""The stages of an iteration, each with a limit, a record of collectives and a place in the log of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtune.rlhf.loss import PPOLoss

from torchtune_adaptive.checkpoints.progress import SavedLimits
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.engine.governor import Change
from torchtune_adaptive.engine.limits import Limit, RowLimit
from torchtune_adaptive.engine.reports import StepResult
from torchtune_adaptive.engine.step import Recovery, SampleKind, Stages, StepRunner
from torchtune_adaptive.errors import LimitExhaustedError
from torchtune_adaptive.life.console import say
from torchtune_adaptive.rl.generation import Sampling
from torchtune_adaptive.rl.models import Models
from torchtune_adaptive.rl.passes import AnswerScorer, Ask, Generate, RolloutPass, TrainPolicy, TrainValue
from torchtune_adaptive.rl.rollouts import LOG_PROBS, REFERENCE_LOG_PROBS, SCORE, VALUES, Rollout
from torchtune_adaptive.rl.settings import PPOSettings
from torchtune_adaptive.tune.data import Tokenizer
from torchtune_adaptive.tune.finetuning import build_recovery
from torchtune_adaptive.tune.place import dtype_of
from torchtune_adaptive.tune.trainer import restore_limits

GENERATE = "generate"
SCORE_POLICY, SCORE_REFERENCE = "policy log-probabilities", "reference log-probabilities"
FIND_VALUES, FIND_REWARDS = "values", "rewards"
FORWARD = (SCORE_POLICY, SCORE_REFERENCE, FIND_VALUES, FIND_REWARDS)
TRAIN_VALUE, TRAIN_POLICY = "train value", "train policy"
STAGES = (GENERATE, *FORWARD, TRAIN_VALUE, TRAIN_POLICY)
"""All stages of an iteration, in order."""
NO_ROOM = "gathered parameters leave no room for one row; gathering layer by layer from here on (slower)"


class Ran(NamedTuple):
    """A stage of a step that counts, and what it took."""

    result: StepResult
    seconds: float


@dataclass
class Gathering:
    """Whether the policy's parameters stay gathered while a microbatch generates, or are gathered for each token."""

    model: nn.Module
    stays: bool
    reshards: bool
    """What training does after a forward."""
    gave_up: bool = False
    """Whether training has found that there is no room for them, and not a search, which the next start repeats."""

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if not self.can_end:
            yield
            return
        assert isinstance(self.model, FSDPModule)
        self.model.set_reshard_after_forward(False)
        try:
            yield
        finally:
            self.model.set_reshard_after_forward(True)

    @property
    def can_end(self) -> bool:
        return self.stays and self.reshards and isinstance(self.model, FSDPModule)

    def stand_in(self, rollout: Rollout) -> Rollout:
        """Communicates like the whole. Where parameters stay gathered, so does a single token, and with less memory:
        a rank that has no room for all of them has to keep its peers company, too."""
        least = rollout.stand_in()
        return replace(least, answer=least.answer[:1]) if self.stays else least


@dataclass(frozen=True)
class RolloutStages:
    """What runs each stage, and how that went."""

    runners: Stages[Rollout]
    gathering: Gathering
    ran: dict[str, list[Ran]] = field(default_factory=dict)
    """Runs of this iteration so far, by stage."""

    def roll_out(self, rollouts: Sequence[Rollout], iteration: int) -> None:
        """Collective: answers to the prompts, and what the models say of them."""
        self.ran.clear()
        for name in (GENERATE, *FORWARD):
            self.run(name, rollouts, iteration)

    def committing(self, *, last_checkpoint: Path | None) -> AbstractContextManager[None]:
        """Guards the update of both models."""
        return self.runners.training.committing("the optimizer step", last_checkpoint=last_checkpoint)

    def run(self, name: str, rollouts: Sequence[Rollout], iteration: int) -> StepResult:
        """Collective: one stage. Where gathered parameters leave no room for one row, they are given up."""
        began = time.perf_counter()
        try:
            result = self.runners[name].run(rollouts, step=iteration)
        except LimitExhaustedError:
            if name != GENERATE or not self.give_up_gathering():
                raise
            result = self.runners[name].run(rollouts, step=iteration)
        self.ran.setdefault(name, []).append(Ran(result, time.perf_counter() - began))
        return result

    def go_layer_by_layer(self) -> None:
        """Call it on all ranks: from now on, generating communicates otherwise."""
        say(f"{GENERATE}: {NO_ROOM}")
        self.gathering.stays = False
        self.runners[GENERATE].start_over()

    def give_up_gathering(self) -> bool:
        """Ends gathering where one row did not fit in training; False where nothing is left to end."""
        if not self.gathering.can_end:
            return False
        self.gathering.gave_up = True
        self.go_layer_by_layer()
        return True

    @property
    def asked_to_stop(self) -> bool:
        return any(ran.result.asked_to_stop for each in self.ran.values() for ran in each)

    def state_dict(self) -> SavedLimits:
        """The state for a checkpoint, the same on all ranks."""
        return self.runners.state_dict() | {"stays": not self.gathering.gave_up}

    def load_state_dict(self, saved: SavedLimits) -> None:
        if not saved.get("stays", True):
            self.give_up_gathering()
        restore_limits(self.runners, saved)


def configured_limits(ppo: PPOSettings) -> dict[str, Limit]:
    """What the config says of each stage, which nobody has measured."""
    forward, train = ppo.forward_batch_size, ppo.ppo_batch_size // ppo.gradient_accumulation_steps
    rows = {name: train if name in (TRAIN_VALUE, TRAIN_POLICY) else forward for name in STAGES}
    return {name: RowLimit(min(count, samples_of_stage(name, ppo))) for name, count in rows.items()}


def samples_of_stage(stage: str, ppo: PPOSettings) -> int:
    """The samples that a rank has in a stage."""
    return ppo.ppo_batch_size if stage in (TRAIN_VALUE, TRAIN_POLICY) else ppo.batch_size


def build_stages(
    models: Models,
    loss: PPOLoss,
    sampling: Sampling,
    settings: Settings,
    ppo: PPOSettings,
    device: torch.device,
    on_change: Callable[[Change], object],
) -> RolloutStages:
    """Collective: what runs each stage."""
    gathering = Gathering(models.policy, stays=True, reshards=settings.fsdp_reshard_after_forward)
    passes = passes_of(models, loss, sampling, settings, device, gathering)
    recovery = build_recovery(settings, on_change, *models.everything)
    return RolloutStages(_runners(passes, configured_limits(ppo), gathering, recovery), gathering)


def passes_of(
    models: Models,
    loss: PPOLoss,
    sampling: Sampling,
    settings: Settings,
    device: torch.device,
    gathering: Gathering,
) -> dict[str, tuple[nn.Module, RolloutPass]]:
    """The model of each stage, and what it does with a microbatch."""
    score = AnswerScorer(device=device, temperature=sampling.temperature)
    generate = Generate(
        model=cast(Any, models.policy),
        device=device,
        dtype=dtype_of(settings, device),
        sampling=sampling,
        gathered=gathering,
    )
    return {
        GENERATE: (models.policy, generate),
        SCORE_POLICY: (models.policy, Ask(model=models.policy, ask=score.log_probs, name=LOG_PROBS)),
        SCORE_REFERENCE: (models.reference, Ask(model=models.reference, ask=score.log_probs, name=REFERENCE_LOG_PROBS)),
        FIND_VALUES: (models.value, Ask(model=models.value, ask=score.values, name=VALUES)),
        FIND_REWARDS: (models.reward, Ask(model=models.reward, ask=score.scores, name=SCORE)),
        TRAIN_VALUE: (models.value, TrainValue(model=models.value, score=score, loss=loss)),
        TRAIN_POLICY: (models.policy, TrainPolicy(model=models.policy, score=score, loss=loss)),
    }


def _runners(
    passes: Mapping[str, tuple[nn.Module, RolloutPass]],
    limits: Mapping[str, Limit],
    gathering: Gathering,
    recovery: Recovery,
) -> Stages[Rollout]:
    runners = {
        name: StepRunner(
            model,
            run,
            limit=limits[name],
            recovery=recovery,
            # answers come to be while they are generated, so lengths there go by what may be
            kind=SampleKind(
                length_of=attrgetter("most_length" if name == GENERATE else "whole_length"),
                stand_in=gathering.stand_in if name == GENERATE else Rollout.stand_in,
                filler=Rollout.filler,
            ),
            stage=name,
        )
        for name, (model, run) in passes.items()
    }
    return Stages(runners)


def sampling_of(tokenizer: Tokenizer, ppo: PPOSettings, seed: int) -> Sampling:
    """As the config says; its stop tokens, else the tokenizer's."""
    return Sampling(
        temperature=ppo.temperature,
        top_k=ppo.top_k,
        pad_id=tokenizer.pad_id,
        stop_tokens=ppo.stop_token_ids or tuple(getattr(tokenizer, "stop_tokens", ())),
        seed=seed,
    )
