"""Stages of an iteration. Each has its own microbatch limit, record of collectives, and figures in the log."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import cast

import torch.distributed as dist
from torch import nn

from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.plans import SampleKind
from torchtune_adaptive.engine.results import StepResult
from torchtune_adaptive.engine.step import Stages, StepRunner
from torchtune_adaptive.objectives.stages import OnChange, build_recovery
from torchtune_adaptive.rl.generation import Generate
from torchtune_adaptive.rl.microbatches import Score, TrainPolicy, TrainValue
from torchtune_adaptive.rl.rollouts import Rollout

GENERATE, FIND_REWARDS = "generate", "rewards"
SCORE_POLICY, SCORE_REFERENCE = "policy log-probabilities", "reference log-probabilities"
FIND_VALUES = "values"
FORWARD = (FIND_REWARDS, SCORE_POLICY, SCORE_REFERENCE, FIND_VALUES)
TRAIN_VALUE, TRAIN_POLICY = "train value", "train policy"


@dataclass(frozen=True)
class RolloutStage:
    """A stage of an iteration and its configured sizes."""

    run_microbatch: Generate | Score | TrainPolicy | TrainValue
    samples: int
    """Number of rollouts that a rank runs in this stage: per iteration or, if the stage trains, per update."""
    rows: int
    """Configured rows per microbatch."""
    trains: str | None = None
    """The name of the trained model; None for a stage without a backward."""

    @property
    def model(self) -> nn.Module:
        """The model that the stage runs."""
        return self.run_microbatch.model


class RolloutStages:
    """Runs the stages of an iteration and collects their results."""

    def __init__(self, stages: Mapping[str, RolloutStage], settings: Settings, on_change: OnChange) -> None:
        """Collective: build a step runner for each stage."""
        self.by_name = stages
        generate = cast(Generate, stages[GENERATE].run_microbatch)
        models = {id(stage.model): stage.model for stage in stages.values()}
        recovery = build_recovery(settings, on_change, *models.values())
        self.runners: Stages[Rollout] = Stages(
            {
                name: StepRunner(
                    stage.model,
                    stage.run_microbatch,
                    limit=RowLimit(min(stage.rows, stage.samples)),
                    recovery=recovery,
                    # The length of an answer is unknown before it is generated, so plan for the maximum.
                    kind=SampleKind(
                        length_of=attrgetter("padded_length" if name == GENERATE else "whole_length"),
                        filler=generate.filler if name == GENERATE else Rollout.filler,
                    ),
                    stage=name,
                )
                for name, stage in stages.items()
            }
        )
        self.results: dict[str, list[StepResult]] = {}
        """Results of the current iteration, by stage."""
        self.seconds: dict[str, float] = defaultdict(float)

    def run_stage(self, name: str, rollouts: Sequence[Rollout], iteration: int) -> StepResult:
        """Collective: run one stage."""
        began = time.perf_counter()
        result = self.runners[name].run(rollouts, step=iteration)
        self.results.setdefault(name, []).append(result)
        self.seconds[name] += time.perf_counter() - began
        return result

    @property
    def stop_requested(self) -> bool:
        """Return True if any rank was asked to stop in this iteration."""
        return any(result.stop_requested for results in self.results.values() for result in results)

    def figures(self) -> dict[str, float]:
        """Return the log's figures of each stage, and torchtune's two throughputs: of rollouts and of training."""
        ranks = dist.get_world_size()
        before = [name for name, stage in self.by_name.items() if stage.trains is None]
        training = [name for name in self.by_name if name not in before]
        figures = {
            "tokens_per_second_per_gpu_trajectory": self._rate(GENERATE, before) / ranks,
            "tokens_per_second_per_gpu_ppo": self._rate(TRAIN_POLICY, training) / ranks,
        }
        for stage, results in self.results.items():
            name = stage.replace(" ", "_")
            figures[f"{name}/tokens_per_second"] = self._rate(stage, [stage])
            figures[f"{name}/microbatches"] = sum(result.microbatches for result in results)
            figures[f"{name}/microbatch_rows"] = max(result.load.most_rows for result in results)
            figures[f"{name}/microbatch_tokens"] = max(result.load.most_tokens for result in results)
            figures[f"{name}/recoveries"] = self.runners[stage].recoveries
        return {**figures, "oom_recoveries": self.runners.recoveries}

    def _rate(self, of: str, during: Sequence[str]) -> float:
        """Return the answer tokens of the stage `of`, over all ranks, divided by the seconds of the stages `during`."""
        tokens = sum(result.target_tokens for result in self.results[of])
        return tokens / max(1e-9, sum(self.seconds[stage] for stage in during))

    def figures_of_run(self, seconds: float) -> dict[str, float]:
        """Return the figures that go only into the journal. `seconds` is the duration of the iteration."""
        tokens = sum(result.target_tokens for result in self.results[GENERATE])
        peaks = [each.memory for results in self.results.values() for each in results if each.memory is not None]
        fullest = max(peaks, key=lambda peak: peak.peak_bytes / peak.budget_bytes, default=None)
        memory = {} if fullest is None else fullest._asdict()
        return {
            "samples": self.by_name[GENERATE].samples * dist.get_world_size(),
            "target_tokens": tokens,
            "target_tokens_per_second": tokens / max(1e-9, seconds),
            **memory,
        }
