"""What all recipes do around a step: where a run begins, its epochs, what is logged and saved, and its end."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig
from torch import nn

from torchtune_adaptive.checkpoints.loading import build_checkpointer
from torchtune_adaptive.checkpoints.progress import GIVEN, EpochSizes, Progress, SavedLimits, start_progress
from torchtune_adaptive.checkpoints.resuming import StepsOnRanks, find_start
from torchtune_adaptive.checkpoints.saving import Checkpoints, Contents
from torchtune_adaptive.checkpoints.store import Checkpointer, Files, State
from torchtune_adaptive.config.keys import AUTO, Settings
from torchtune_adaptive.engine.limits import Limit, RowLimit
from torchtune_adaptive.engine.memory import MemorySource
from torchtune_adaptive.engine.meter import memory_within, resident_tensors
from torchtune_adaptive.engine.ranks import from_rank_0, rank, world_size
from torchtune_adaptive.engine.reports import StepResult
from torchtune_adaptive.engine.step import Stages
from torchtune_adaptive.life.console import say
from torchtune_adaptive.report.journal import Journal
from torchtune_adaptive.text import count_of, size_for_rank
from torchtune_adaptive.tune.checked_dataset import longest_taken, vocabulary_of
from torchtune_adaptive.tune.data import Data, StepLoader
from torchtune_adaptive.tune.dealing import Dealer, FullestRank
from torchtune_adaptive.tune.distributed import join, leave, prepare, start_clean
from torchtune_adaptive.tune.fingerprint import check_same_data
from torchtune_adaptive.tune.metrics import NO_CAUSE, Cause, LossWatch, Metrics, NoiseWatch, StepProfiler, record_epoch
from torchtune_adaptive.tune.optimizer import Optimization
from torchtune_adaptive.tune.samples import Sample
from torchtune_adaptive.tune.schedule import log_left_out

Samples = tuple[list[Sample], list[Sample] | None]


class Run:
    """A run before it has a model: its place among the ranks, where it starts, its checkpoints and its record."""

    def __init__(
        self,
        settings: Settings,
        contents: Contents,
        *,
        steps: StepsOnRanks | None = None,
        build: Callable[[DictConfig, Path, Files | None], Checkpointer] = build_checkpointer,
    ) -> None:
        """Collective: joins the other ranks, and finds where to start."""
        self.settings = settings
        self.place = join(settings)
        self._start = find_start(settings, contents.recipe, steps=steps)
        self.checkpoints = Checkpoints(settings, self._start, contents, self.place.device, build)
        self.progress = start_progress(settings, self.place.ranks)
        prepare(settings)
        self.journal = Journal(Path(settings.output_dir) if rank() == 0 else None)
        self.metrics = Metrics(settings, self.place.device, self.journal)

    def resume(
        self, checkpoint: State, model: nn.Module, optimization: Optimization, told: Mapping[str, str] = GIVEN
    ) -> None:
        """Collective: continues what a checkpoint has begun; a fresh run has nothing to continue."""
        if self._start.resumes:
            state = self.checkpoints.resume(checkpoint, model, optimization.checkpointed)
            self.progress = self.progress.resumed(state, told)

    def close(self) -> None:
        """Lets other runs into the output directory, and leaves the group."""
        self._start.release()
        leave()


@dataclass(frozen=True, kw_only=True)
class BatchSchedule:
    """A run as it will be: its epochs, and what happens to their samples before a step."""

    epochs: tuple[EpochSizes, ...]
    limits: Mapping[str, Limit] = field(default_factory=dict)
    """The limits of stages that have one for the whole run; the others take the rows of each epoch."""
    dealer: Dealer | FullestRank | None = None
    """Deals the samples of each step to the ranks; None: they stay where they were read."""
    looks_ahead: bool = False
    """Whether a step is told the samples of the next one."""
    resize: Callable[[Progress, int], EpochSizes] | None = None
    """Returns the size of the coming epoch, or of the rest of this one, for the samples left; None: all as planned."""
    resize_every: int | None = None
    """Samples of an epoch, on all ranks, after which that happens; None: only where an epoch begins."""

    def resizes_between(self, before: int, after: int) -> bool:
        """Whether that is due within an epoch, after the step between these samples."""
        return self.resize_every is not None and after // self.resize_every > before // self.resize_every

    def limits_of(self, stages: Stages[Any], sizes: EpochSizes) -> dict[str, Limit]:
        return {stage: self.limits.get(stage, RowLimit(sizes.microbatch_rows)) for stage in stages}

    def steps(self, loader: StepLoader[Sample], sizes: EpochSizes, progress: Progress) -> Iterator[Samples]:
        """Collective: the samples of the steps that are left of an epoch."""
        samples: Iterator[list[Sample]] = loader.epoch(
            sizes.epoch,
            samples_per_step=sizes.samples_per_step,
            steps=sizes.steps - progress.steps_in_epoch,
            samples_done=progress.samples_in_epoch,
        )
        if self.dealer is not None:
            samples = self.dealer.deal(samples)
        if self.looks_ahead:
            return pairwise(chain(samples, [None]))  # type: ignore[list-item]
        return ((each, None) for each in samples)


class Step(NamedTuple):
    number: int
    samples: list[Sample]
    upcoming: list[Sample] | None
    """This rank's samples of the next step, where they are planned ahead."""


class Trainer:
    """Takes a run through the epochs of its `schedule`: what is watched, logged and saved around its steps."""

    schedule: BatchSchedule

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        data: Data,
        optimization: Optimization,
        stages: Stages[Any],
        *,
        loss_fn: nn.Module | None = None,
        limits: Callable[[], SavedLimits] | None = None,
        weights: str = "checkpointer.checkpoint_files",
    ) -> None:
        """A search tells the phases of a step apart by `loss_fn`. A checkpoint keeps the stages' limits as `limits`
        returns them. An error about NaN weights names the files of the key `weights`."""
        self.run, self.model, self.data, self.optimization, self.stages = run, model, data, optimization, stages
        self.loss_fn = loss_fn
        # weights alone may continue on other data, where the config names them and no epoch is under way
        if run.settings.resume_from_checkpoint == AUTO or run.progress.steps_in_epoch:
            check_same_data(data.dataset, data.fingerprint, run.progress.dataset_fingerprint)
        run.progress = replace(run.progress, dataset_fingerprint=data.fingerprint)
        trained = stages.training.model
        data.dataset.vocabulary, data.dataset.most_tokens = vocabulary_of(trained), longest_taken([trained])
        self._limits = limits or stages.state_dict
        self._losses = LossWatch(run.settings.adaptive.max_skipped_steps, weights)
        self._profiler = StepProfiler(run.settings.config, run.place.device)
        self._noise = NoiseWatch(run.progress.noise, run.settings.adaptive.measure_noise)
        stages.training.measure_noise(run.settings.adaptive.measure_noise or 0)
        self._stopping = False

    def memory_of_this_rank(self) -> AbstractContextManager[MemorySource | None]:
        """The memory that this rank may use, which the models of all stages and the optimizers live in."""
        models = nn.ModuleList(self.stages.training.recovery.models)
        resident = resident_tensors(models, self.optimization.optimizers)
        limit, limits = None, self.run.settings.adaptive.memory_limit
        if limits is not None:
            limit = size_for_rank(limits, rank(), world_size(), "adaptive.memory_limit")
        return memory_within(limit, self.run.place.device, resident)

    @contextmanager
    def training(self, called: str = "steps") -> Iterator[Iterator[Step]]:
        """Collective: yields the steps that are left of the run; while it is open, memory is limited and measured."""
        start_clean(self.run.place.device)
        self._profiler.start()
        with self.memory_of_this_rank() as memory:
            self.stages.watch(memory)
            self.run.metrics.watch(memory)
            with closing(self._steps(called)) as steps:  # the progress bar too: its last line is not to follow an error
                yield steps
        self._profiler.stop()

    def _steps(self, called: str) -> Generator[Step]:
        run = self.run
        while run.progress.epochs_run < len(self.schedule.epochs):
            self._resize_where_due()
            sizes = self._sizes = self.schedule.epochs[run.progress.epochs_run]
            self.stages.use_limits(self.schedule.limits_of(self.stages, sizes))
            record_epoch(run.journal, sizes, self.stages.limits, run.progress, run.place.ranks)
            growth = sizes.samples_per_step / run.settings.samples_per_step
            self.optimization.use_lr_factor(sizes.lr_factor, stride=1 if self.schedule.resize is None else growth)
            with run.checkpoints.going_on_to_draw(run.progress):
                steps = self.schedule.steps(self.data.loader, sizes, run.progress)
            for samples, upcoming in run.metrics.epoch(sizes, steps, run.progress.steps_in_epoch, called):
                done = run.progress.samples_in_epoch
                resizes = self.schedule.resizes_between(done, done + sizes.samples_per_step * run.place.ranks)
                yield Step(run.progress.step + 1, samples, None if resizes else upcoming)
                if resizes and run.progress.steps_in_epoch < sizes.steps:
                    break
            else:
                log_left_out(sizes, run.settings, run.progress, self.data.loader)
                run.progress = run.progress.after_epoch(sizes)
                self._losses.worth_saving(run.progress.step, ends_epoch=True)
                self.save()
                run.checkpoints.end_if_asked(run.progress, self._stopping)

    def _resize_where_due(self) -> None:
        """Collective: sizes what follows by what was measured."""
        if self.schedule.resize is None:
            return
        progress, epochs = replace(self.run.progress, noise=self._noise.state()), list(self.schedule.epochs)
        ranks, done, now = progress.ranks, progress.samples_in_epoch, progress.epochs_run
        before = (progress.epochs_begun or (epochs[now],))[-1]
        if done and not self.schedule.resizes_between(done - before.samples_per_step * ranks, done):
            return
        left = self.data.loader.samples_left_per_rank(done)
        # as on rank 0, since a function of the user's may draw, or read a clock
        following = epochs[now] = from_rank_0(self.schedule.resize(progress, left))
        self.schedule = replace(self.schedule, epochs=tuple(epochs))
        where = f"epoch {following.epoch}" + f" after {count_of(progress.steps_in_epoch, 'step')}" * (done > 0)
        if following.samples_per_step != before.samples_per_step:
            after = following.samples_per_step
            rate = f", learning rate × {following.lr_factor:.3g}" * (following.lr_factor != before.lr_factor)
            say(f"{where}: {after * ranks} samples a step (before: {before.samples_per_step * ranks}){rate}")
        elif following.refused_batch_size not in (None, before.refused_batch_size):
            say(
                f"{where}: batch size {following.batch_size} stays; {following.refused_batch_size} is more than fits, "
                "adaptive.max_batch_size or the samples of an epoch allow"
            )

    def done(
        self,
        result: StepResult,
        grad_norm: float | None,
        *,
        samples: float | None = None,
        more: Mapping[str, float] | None = None,
    ) -> None:
        """Collective: logs a step and does what is due. The loss is a mean over target tokens, or over `samples`."""
        figures = {"lr": self.optimization.learning_rate(), **(more or {}), "oom_recoveries": self.stages.recoveries}
        figures |= self._noise.figures(result, grad_norm, samples)
        loss = self.run.metrics.log_step(self.run.progress.step + 1, result, grad_norm, samples, figures)
        self.logged(loss, result.target_tokens, grad_norm, asked_to_stop=result.asked_to_stop)

    def logged(
        self,
        loss: float,
        target_tokens: int,
        grad_norm: float | None,
        *,
        asked_to_stop: bool,
        cause: Cause = NO_CAUSE,
    ) -> None:
        """Collective: after a step that is in the log. Counts it, saves where that is due, and may end the run."""
        run = self.run
        run.progress = run.progress.after_step(self._sizes, run.place.ranks, target_tokens, loss)
        self._losses.record(run.progress.step, loss, target_tokens, grad_norm, cause)
        self._profiler.step()
        self._stopping = asked_to_stop
        if run.checkpoints.due(run.progress, asked_to_stop):
            if self._losses.worth_saving(run.progress.step, ends_epoch=False):
                self.save()
            run.checkpoints.end_if_asked(run.progress, asked_to_stop)

    def save(self) -> None:
        """Collective: all that is needed to go on from here."""
        progress = replace(self.run.progress, limit=self._limits(), noise=self._noise.state())
        loader_state = self.data.loader.state_dict()
        self.run.checkpoints.save(progress, self.model, self.optimization.checkpointed, loader_state)

    def close(self) -> None:
        """Collective: finishes what is being written, draws the picture of the run, and leaves."""
        self.run.checkpoints.close()
        self.stages.training.close()
        self._noise.close()
        self.run.metrics.close()
        self.run.close()


def restore_limits(stages: Stages[Any], saved: SavedLimits) -> None:
    """Restores a checkpoint's limits, by stage; says so where one differs from what was just found or configured."""
    for stage in (name for name in saved if name in stages):
        runner, found = stages[stage], stages[stage].limit
        runner.load_state_dict(saved[stage])
        if runner.limit != found:
            say(f"{stage}{' · ' * bool(stage)}in microbatches of at most {runner.limit} (restored from the checkpoint)")
