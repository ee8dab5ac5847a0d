"""Iterations of PPO: their schedule, rollouts with scores, updates, and the log."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from torchtune_adaptive.checkpoints.progress import EpochSizes
from torchtune_adaptive.data.samples import Sample
from torchtune_adaptive.engine.ranks import from_all_ranks
from torchtune_adaptive.engine.results import StepResult
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.formatting import count_of
from torchtune_adaptive.lifecycle.console import log_rank_0
from torchtune_adaptive.loop.training_loop import BatchSchedule, Run, TrainingLoop, restore_limits
from torchtune_adaptive.models.optimizer import Optimization, SummedOver
from torchtune_adaptive.rl.limits import LimitFinder
from torchtune_adaptive.rl.rollouts import Rollout, build_prompts, rollouts_of
from torchtune_adaptive.rl.settings import PPOSettings
from torchtune_adaptive.rl.stages import GENERATE, TRAIN_POLICY, RolloutStage, build_runners


class Iterations:
    """Runs iterations: generates and scores answers, applies updates, and logs the means of an iteration."""

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        optimization: Optimization,
        tokenizer: Any,
        stages: Mapping[str, RolloutStage],
        rl: PPOSettings,
    ) -> None:
        """Collective: build the data; find or restore limits and schedules."""
        settings, self.run, self.optimization, self._rl = run.settings, run, optimization, rl
        self.data = build_prompts(settings, tokenizer, run.devices.mesh)
        self._stages, self.runners = stages, build_runners(stages, settings, run.journal.event)
        self.loop = TrainingLoop(run, model, self.data, optimization, self.runners)
        self._results: dict[str, list[StepResult]] = defaultdict(list)
        """Results of the current iteration, by stage."""
        self.seconds: dict[str, float] = defaultdict(float)
        self._updates: list[dict[str, float]] = []
        self._skipped, self._began = 0, 0.0
        self._start_schedules()

    def _start_schedules(self) -> None:
        """Collective: size the epochs, find or restore the limits, and start the learning-rate schedule."""
        run, rl, progress = self.run, self._rl, self.run.progress
        total = rl.iterations(run.devices.ranks)
        epochs = self._size_epochs(total)
        run.progress = replace(progress, total_epochs=len(epochs), ranks=run.devices.ranks)
        run.journal.start(progress.step)
        with self.loop.memory_of_this_rank() as memory:
            limits = LimitFinder(self.loop, self._stages, rl).find(memory)
        self.runners.use_limits(limits)
        self.loop.schedule = BatchSchedule(epochs=epochs, limits=limits)
        self.optimization.start_schedule(total_steps=rl.updates * total, steps_done=rl.updates * progress.step)
        if progress.limit is not None:
            restore_limits(self.runners, progress.limit)

    def _size_epochs(self, total: int) -> tuple[EpochSizes, ...]:
        """Return the sizes of all epochs of a run of `total` iterations: past, current and remaining ones."""
        ranks, rl, progress = self.run.devices.ranks, self._rl, self.run.progress
        if progress.step and progress.ranks != ranks:
            saved_on = count_of(progress.ranks, "rank")
            raise ConfigError(
                f"the checkpoint was saved on {saved_on}, but there are {ranks} now: batch_size is per rank, so "
                f"an iteration would have other samples; resume on {saved_on}"
            )
        size, left = rl.batch_size, total - progress.step
        per_epoch, epochs = self.data.loader.samples_per_rank // size, list(progress.past)
        if progress.current_epoch is not None:
            steps = min(per_epoch, progress.steps_in_epoch + left)
            epochs.append(replace(progress.current_epoch, steps=steps))
            left -= steps - progress.steps_in_epoch
        while left > 0:
            steps = min(per_epoch, left)
            # Record one microbatch per step; the schedule contains the actual limit of each stage.
            epochs.append(EpochSizes(len(epochs), size, 1, size, size, steps))
            left -= steps
        answers = f"{rl.batch_size * ranks} answers, {count_of(rl.updates, 'update')}"
        log_rank_0(f"{count_of(total, 'iteration')} of {answers} each · {count_of(len(epochs), 'epoch')} of prompts")
        return tuple(epochs)

    def generate_and_score(self, prompts: Sequence[Sample], iteration: int) -> list[Rollout]:
        """Collective: run all stages without a backward, and return the rollouts of all ranks, sorted by number."""
        self._began = time.perf_counter()
        self._results.clear()
        self.seconds.clear()
        own = rollouts_of(prompts, iteration, self._rl.max_generated_tokens)
        for name, stage in self._stages.items():
            if stage.trains is None:
                self.run_stage(name, own, iteration)
        by_rank = from_all_ranks(own)
        return sorted((rollout for rollouts in by_rank for rollout in rollouts), key=lambda rollout: rollout.number)

    def run_stage(self, name: str, rollouts: Sequence[Rollout], iteration: int) -> StepResult:
        """Collective: run one stage."""
        began = time.perf_counter()
        result = self.runners[name].run(rollouts, step=iteration)
        self._results[name].append(result)
        self.seconds[name] += time.perf_counter() - began
        return result

    def update(self, summed_over: SummedOver, figures: Mapping[str, float]) -> None:
        """Collective: divide the gradients by `summed_over`, and update the weights. `figures` go into the log."""
        training = self.runners.training
        with training.committing("the optimizer step", last_checkpoint=self.run.checkpoints.last):
            grad_norm = self.optimization.update(summed_over)
        assert grad_norm is not None  # optimizer_in_bwd is not supported
        self._skipped += not math.isfinite(grad_norm)
        self._updates.append({**figures, "grad_norm": grad_norm})

    def finish(self, iteration: int, figures: Mapping[str, float]) -> None:
        """Collective: log the iteration with the means over its updates, then save or stop the run if due."""
        updates, self._updates = self._updates, []
        means = {name: sum(update[name] for update in updates) / len(updates) for name in updates[0]}
        logged = {**figures, **means, "skipped_updates": self._skipped}
        logged |= {"lr": self.optimization.learning_rate(), **self._figures()}
        recorded = self._figures_of_run(time.perf_counter() - self._began)
        self.run.metrics.log(iteration, f"reward {logged['scores']:.4f}", logged, recorded)
        stop_requested = any(result.stop_requested for results in self._results.values() for result in results)
        self.loop.advance(stop_requested=stop_requested)

    def _figures(self) -> dict[str, float]:
        """Return the log's figures of each stage, and torchtune's two throughputs: of rollouts and of training."""
        ranks = dist.get_world_size()
        before = [name for name, stage in self._stages.items() if stage.trains is None]
        training = [name for name in self._stages if name not in before]
        figures = {
            "tokens_per_second_per_gpu_trajectory": self._rate(GENERATE, before) / ranks,
            "tokens_per_second_per_gpu_ppo": self._rate(TRAIN_POLICY, training) / ranks,
        }
        for stage, results in self._results.items():
            name = stage.replace(" ", "_")
            figures[f"{name}/tokens_per_second"] = self._rate(stage, [stage])
            figures[f"{name}/microbatches"] = sum(result.microbatches for result in results)
            figures[f"{name}/microbatch_rows"] = max(result.load.most_rows for result in results)
            figures[f"{name}/microbatch_tokens"] = max(result.load.most_tokens for result in results)
            figures[f"{name}/recoveries"] = self.runners[stage].recoveries
        return {**figures, "oom_recoveries": self.runners.recoveries}

    def _rate(self, of: str, during: Sequence[str]) -> float:
        """Return the answer tokens of the stage `of`, over all ranks, divided by the seconds of the stages `during`."""
        tokens = sum(result.target_tokens for result in self._results[of])
        return tokens / max(1e-9, sum(self.seconds[stage] for stage in during))

    def _figures_of_run(self, seconds: float) -> dict[str, float]:
        """Return the figures that go only into the journal. `seconds` is the duration of the iteration."""
        tokens = sum(result.target_tokens for result in self._results[GENERATE])
        peaks = [each.memory for results in self._results.values() for each in results if each.memory is not None]
        fullest = max(peaks, key=lambda peak: peak.peak_bytes / peak.budget_bytes, default=None)
        memory = {} if fullest is None else fullest._asdict()
        return {
            "samples": self._stages[GENERATE].samples * dist.get_world_size(),
            "target_tokens": tokens,
            "target_tokens_per_second": tokens / max(1e-9, seconds),
            **memory,
        }
