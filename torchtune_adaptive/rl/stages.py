"""The stages of an iteration, each with a limit, a record of collectives and a place in the log of its own."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import cast

from torch import nn

from torchtune_adaptive.checkpoints.progress import SavedLimits
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.engine.governor import Change
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.reports import StepResult
from torchtune_adaptive.engine.step import SampleKind, Stages, StepRunner
from torchtune_adaptive.errors import LimitExhaustedError
from torchtune_adaptive.life.console import say
from torchtune_adaptive.rl.passes import Generate, RolloutPass
from torchtune_adaptive.rl.rollouts import Rollout
from torchtune_adaptive.tune.finetuning import build_recovery
from torchtune_adaptive.tune.trainer import restore_limits

GENERATE = "generate"
SCORE_POLICY, SCORE_REFERENCE = "policy log-probabilities", "reference log-probabilities"
FIND_VALUES, FIND_REWARDS = "values", "rewards"
FORWARD = (SCORE_POLICY, SCORE_REFERENCE, FIND_VALUES, FIND_REWARDS)
TRAIN_VALUE, TRAIN_POLICY = "train value", "train policy"
STAGES = (GENERATE, *FORWARD, TRAIN_VALUE, TRAIN_POLICY)
"""All stages of an iteration of PPO, in order."""


@dataclass(frozen=True, kw_only=True)
class RolloutStage:
    """What a stage runs."""

    model: nn.Module
    run: RolloutPass
    samples: int
    """Samples of a rank."""
    rows: int
    """Rows of a microbatch, as the config says."""
    trains: str | None = None
    """The name under which its model is updated, empty where it is all that is trained; None without a backward."""


class RolloutStages:
    """Runs each stage of an iteration, and remembers how that went."""

    def __init__(
        self, stages: Mapping[str, RolloutStage], settings: Settings, on_change: Callable[[Change], object]
    ) -> None:
        """Collective."""
        self.stages = stages
        self.policy = cast(Generate, stages[GENERATE].run)
        models = {id(stage.model): stage.model for stage in stages.values()}
        recovery = build_recovery(settings, on_change, *models.values())
        self.runners: Stages[Rollout] = Stages(
            {
                name: StepRunner(
                    stage.model,
                    stage.run,
                    limit=RowLimit(min(stage.rows, stage.samples)),
                    recovery=recovery,
                    # answers come to be while they are generated, so lengths there go by what may be
                    kind=SampleKind(
                        length_of=attrgetter("most_length" if name == GENERATE else "whole_length"),
                        stand_in=self.policy.stand_in if name == GENERATE else Rollout.stand_in,
                        filler=Rollout.filler,
                    ),
                    stage=name,
                )
                for name, stage in stages.items()
            }
        )
        self.results: dict[str, list[StepResult]] = {}
        """Results of this iteration so far, by stage."""
        self.seconds: dict[str, float] = defaultdict(float)
        self._gave_up_gathering = False  # in training, and not in a search, which the next start repeats

    @property
    def before_training(self) -> list[str]:
        return [name for name, stage in self.stages.items() if stage.trains is None]

    def begin_iteration(self) -> None:
        self.results.clear()
        self.seconds.clear()

    def run(self, name: str, rollouts: Sequence[Rollout], iteration: int) -> StepResult:
        """Collective: one stage. Where gathered parameters leave no room for one row, they are given up."""
        began = time.perf_counter()
        try:
            result = self.runners[name].run(rollouts, step=iteration)
        except LimitExhaustedError:
            if name != GENERATE or not self.policy.gathers:
                raise
            self._gave_up_gathering = True
            self.go_layer_by_layer()
            result = self.runners[name].run(rollouts, step=iteration)
        self.results.setdefault(name, []).append(result)
        self.seconds[name] += time.perf_counter() - began
        return result

    def committing(self, *, last_checkpoint: Path | None) -> AbstractContextManager[None]:
        """Guards the update of all models."""
        return self.runners.training.committing("the optimizer step", last_checkpoint=last_checkpoint)

    def go_layer_by_layer(self) -> None:
        """Call it on all ranks: from now on, generating communicates otherwise."""
        say(
            f"{GENERATE}: gathered parameters leave no room for one row; gathering layer by layer from here on (slower)"
        )
        self.policy.stays = False
        self.runners[GENERATE].start_over()

    @property
    def asked_to_stop(self) -> bool:
        return any(result.asked_to_stop for results in self.results.values() for result in results)

    def state_dict(self) -> SavedLimits:
        """The state for a checkpoint, the same on all ranks."""
        return self.runners.state_dict() | {"stays": not self._gave_up_gathering}

    def load_state_dict(self, saved: SavedLimits) -> None:
        if not saved.get("stays", True) and self.policy.gathers:
            self._gave_up_gathering = True
            self.go_layer_by_layer()
        restore_limits(self.runners, saved)
