"""Iterations of PPO: their schedule, rollouts with scores, updates, and the log."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from torchtune_adaptive.checkpoints.progress import EpochSizes
from torchtune_adaptive.data.samples import Sample
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.formatting import count_of
from torchtune_adaptive.lifecycle.console import log_rank_0
from torchtune_adaptive.loop.training_loop import BatchSchedule, Run, TrainingLoop, restore_limits
from torchtune_adaptive.models.optimizer import Optimization, SummedOver
from torchtune_adaptive.rl.limits import LimitFinder
from torchtune_adaptive.rl.rollouts import Rollout, build_prompts, gather_rollouts, rollouts_of
from torchtune_adaptive.rl.settings import PPOSettings
from torchtune_adaptive.rl.stages import RolloutStage, RolloutStages


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
        self.stages = RolloutStages(stages, settings, run.journal.event)
        self.loop = TrainingLoop(run, model, self.data, optimization, self.stages.runners)
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
            limits = LimitFinder(self.loop, self.stages, rl).find(memory)
        self.stages.runners.use_limits(limits)
        self.loop.schedule = BatchSchedule(epochs=epochs, limits=limits)
        self.optimization.start_schedule(total_steps=rl.updates * total, steps_done=rl.updates * progress.step)
        if progress.limit is not None:
            restore_limits(self.stages.runners, progress.limit)

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
        self.stages.results.clear()
        self.stages.seconds.clear()
        own = rollouts_of(prompts, iteration, self._rl.max_generated_tokens)
        for name, stage in self.stages.by_name.items():
            if stage.trains is None:
                self.stages.run_stage(name, own, iteration)
        return gather_rollouts(own)

    def update(self, summed_over: SummedOver, figures: Mapping[str, float]) -> None:
        """Collective: divide the gradients by `summed_over`, and update the weights. `figures` go into the log."""
        training = self.stages.runners.training
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
        logged |= {"lr": self.optimization.learning_rate(), **self.stages.figures()}
        recorded = self.stages.figures_of_run(time.perf_counter() - self._began)
        self.run.metrics.log(iteration, f"reward {logged['scores']:.4f}", logged, recorded)
        self.loop.advance(stop_requested=self.stages.stop_requested)
