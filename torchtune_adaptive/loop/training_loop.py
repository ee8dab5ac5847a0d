"""The parts of a run that all recipes share: start, resuming, the loop over epochs, logging, saving and the end."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig
from torch import nn
from torchtune import training

from torchtune_adaptive.checkpoints.contents import Contents
from torchtune_adaptive.checkpoints.manager import CheckpointManager, build_checkpointer
from torchtune_adaptive.checkpoints.progress import EpochSizes, Progress, SavedLimits
from torchtune_adaptive.checkpoints.resuming import (
    SIZES,
    StepsOnRanks,
    find_start,
    multiplies_batch_size,
    with_samples_per_step,
)
from torchtune_adaptive.checkpoints.store import Checkpointer, Files, State
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.data.balancing import Balancer
from torchtune_adaptive.data.loading import Data, StepLoader, max_seq_len_of, with_equal_tiles
from torchtune_adaptive.data.samples import Sample
from torchtune_adaptive.engine.limits import Limit, RowLimit
from torchtune_adaptive.engine.memory import MemorySource, memory_within, resident_tensors
from torchtune_adaptive.engine.ranks import rank, world_size
from torchtune_adaptive.engine.results import StepResult
from torchtune_adaptive.engine.step import Stages
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.formatting import size_for_rank
from torchtune_adaptive.lifecycle.console import log_rank_0
from torchtune_adaptive.lifecycle.distributed import free_setup_memory, join, leave
from torchtune_adaptive.loop.metrics import Journal, Metrics, StepProfiler, record_epoch
from torchtune_adaptive.models.optimizer import Optimization
from torchtune_adaptive.objectives.validation import Validation

StepSamples = tuple[list[Sample], list[Sample] | None]
"""The samples of a step on this rank, and those of the next step if the schedule looks ahead."""


class Run:
    """The parts of a run that exist before its model: devices, start position, checkpoints, journal and metrics."""

    def __init__(
        self,
        settings: Settings,
        contents: Contents,
        *,
        steps: StepsOnRanks | None = None,
        build: Callable[[DictConfig, Path, Files | None], Checkpointer] = build_checkpointer,
    ) -> None:
        """Collective: join the process group and find the checkpoint to start from."""
        self.contents, self.devices = contents, join(settings)
        ranks = self.devices.ranks
        self._start = find_start(settings, contents.recipe, ranks=ranks, steps=steps)
        configured, settings = settings, with_samples_per_step(settings, self._start.samples_per_step, ranks)
        self.settings = settings
        for key in () if settings.use_maximum_batch_size else SIZES:  # a search sets and logs them itself
            if (now := getattr(settings, key)) != (before := getattr(configured, key)):
                log_rank_0(
                    f"{key} is {now} instead of {before}: a step keeps its {self._start.samples_per_step} samples"
                )
        self.journal = Journal(Path(settings.output_dir) if rank() == 0 else None)
        self.checkpoints = CheckpointManager(settings, self._start, contents, self.devices.device, build)
        self.progress = Progress(
            seed=training.set_seed(seed=settings.seed, debug_mode=settings.cudnn_deterministic_mode),
            total_epochs=settings.epochs,
            max_steps_per_epoch=settings.max_steps_per_epoch,
            ranks=ranks,
        )
        if settings.fsdp_cpu_offload:  # the optimizer runs on the CPU
            training.set_torch_num_threads()
        self.metrics = Metrics(settings, self.devices.device, self.journal)

    def resume(self, checkpoint: State) -> None:
        """Restore the progress if the run resumes from a checkpoint."""
        if self._start.files is not None:
            self.progress = self.progress.resumed(checkpoint)

    def close(self) -> None:
        """Unlock the output directory and leave the process group."""
        self._start.release()
        leave()


@dataclass(frozen=True, kw_only=True)
class BatchSchedule:
    """The sizes of all epochs, the limits of microbatches, and how samples reach the ranks."""

    epochs: tuple[EpochSizes, ...]
    limits: Mapping[str, Limit] = field(default_factory=dict)
    """Limits that hold for the whole run, by stage. Other stages are limited to `microbatch_rows` of the epoch."""
    balancer: Balancer | None = None
    """Distributes the samples of each step over the ranks; None: each rank trains on the samples it reads."""
    looks_ahead: bool = False
    """If True, a step also gets the samples of the next step, whose microbatches can then be planned early."""

    def limits_of(self, stages: Stages[Any], sizes: EpochSizes) -> dict[str, Limit]:
        """Return the limit of every stage in an epoch with these sizes."""
        return {stage: self.limits.get(stage, RowLimit(sizes.microbatch_rows)) for stage in stages}

    def steps(self, loader: StepLoader, sizes: EpochSizes, progress: Progress) -> Iterator[StepSamples]:
        """Collective: yield the samples of each remaining step of an epoch, and those of the next if it looks ahead."""
        samples: Iterator[list[Sample]] = loader.epoch(
            sizes.epoch,
            samples_per_step=sizes.samples_per_step,
            steps=sizes.steps - progress.steps_in_epoch,
            samples_done=progress.samples_in_epoch,
        )
        if self.balancer is not None:
            samples = self.balancer.balanced(samples)
        rows = sizes.samples_per_step if self.looks_ahead else sizes.microbatch_rows
        samples = (with_equal_tiles(each, rows) for each in samples)
        if self.looks_ahead:
            return pairwise(chain(samples, [None]))  # type: ignore[list-item]
        return ((each, None) for each in samples)


class Step(NamedTuple):
    """The number of a step and its samples on this rank."""

    number: int
    samples: list[Sample]
    upcoming: list[Sample] | None
    """Samples of the next step on this rank, if the schedule looks ahead."""


class TrainingLoop:
    """Runs the epochs of `schedule`, and logs and saves between steps."""

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
        validation: Validation | None = None,
    ) -> None:
        """Collective: check the data. Set `schedule` before `training`, as `tune.batch_size` and `rl.iterations` do.

        With `loss_fn`, probes treat the end of the loss as a boundary between phases.
        """
        self.run, self.model, self.data, self.optimization, self.stages = run, model, data, optimization, stages
        self.loss_fn, self.validation = loss_fn, validation
        samples, progress, fault = len(data.dataset), run.progress, None
        kept = () if multiplies_batch_size(run.settings) else progress.epochs_started[-1:]
        per_step = sum(sizes.samples_per_step for sizes in kept) * progress.ranks
        if progress.steps_in_epoch and samples != progress.dataset_samples:
            fault = f"had {progress.dataset_samples} when the checkpoint was saved, within an epoch"
        elif data.loader.samples_per_rank * run.devices.ranks < per_step:
            fault = f"a step takes {per_step}"
        if fault is not None:
            raise ConfigError(
                f"cannot resume: the dataset has {samples} samples, but {fault}; restore the dataset, or start a new "
                "run with another output_dir"
            )
        run.progress = replace(run.progress, dataset_samples=samples)
        trained = stages.training.model
        data.dataset.most_tokens = max_seq_len_of([trained])
        self._profiler = StepProfiler(run.settings.config, run.devices.device)
        self._stopping = self._room_checked = False

    def memory_of_this_rank(self) -> AbstractContextManager[MemorySource | None]:
        """Return a context that limits and measures this rank's memory, including that of all models and optimizers."""
        models = nn.ModuleList(self.stages.training.recovery.models)
        resident = resident_tensors(models, self.optimization.optimizers)
        limit, limits = None, self.run.settings.adaptive.memory_limit
        if limits is not None:
            limit = size_for_rank(limits, rank(), world_size(), "adaptive.memory_limit")
        return memory_within(limit, self.run.devices.device, resident)

    @contextmanager
    def training(self, unit: str = "steps") -> Iterator[Iterator[Step]]:
        """Collective: yield the remaining steps of the run. Memory is limited and measured within the context."""
        free_setup_memory(self.run.devices.device)
        self._profiler.start()
        with self.memory_of_this_rank() as memory:
            self.stages.measure_memory(memory)
            if self.validation is not None:
                self.validation.stages.measure_memory(memory)
            self.run.metrics.memory = memory
            with closing(self._steps(unit)) as steps:  # closes the progress bar before an error is printed
                yield steps
        self._profiler.stop()

    def _steps(self, unit: str) -> Generator[Step]:
        run = self.run
        while run.progress.epochs_run < len(self.schedule.epochs):
            sizes = self._sizes = self.schedule.epochs[run.progress.epochs_run]
            self.stages.use_limits(self.schedule.limits_of(self.stages, sizes))
            record_epoch(run.journal, sizes.epoch, self.stages.limits, run.progress.step)
            self._validate_if_due()  # the run may have been stopped before a validation that was due
            with run.checkpoints.continue_random_state(run.progress):
                steps = self.schedule.steps(self.data.loader, sizes, run.progress)
            for samples, upcoming in run.metrics.epoch(sizes, steps, run.progress.steps_in_epoch, unit):
                yield Step(run.progress.step + 1, samples, upcoming)
            run.progress = run.progress.after_epoch(sizes)
            self.save()
            run.checkpoints.stop_if_asked(run.progress, self._stopping)

    def finish_step(
        self,
        result: StepResult,
        grad_norm: float | None,
        *,
        samples: float | None = None,
        more: Mapping[str, float] | None = None,
    ) -> None:
        """Collective: log and count a step, and save if due. The loss is a mean over target tokens or `samples`."""
        figures = {"lr": self.optimization.learning_rate(), **(more or {}), "oom_recoveries": self.stages.recoveries}
        self.run.metrics.log_step(self.run.progress.step + 1, result, grad_norm, samples, figures)
        self.advance(stop_requested=result.stop_requested)

    def advance(self, *, stop_requested: bool) -> None:
        """Collective: count a logged step, validate and save a checkpoint if due, and end the run after a signal."""
        run = self.run
        run.progress = run.progress.after_step(self._sizes, run.devices.ranks)
        self._profiler.step()
        if not self._room_checked:
            self._room_checked = True
            run.checkpoints.warn_without_room(self.model, self.optimization.optimizers)
        self._stopping = stop_requested
        self._validate_if_due()
        if run.checkpoints.is_due(run.progress, self._stopping):
            self.save()
            run.checkpoints.stop_if_asked(run.progress, self._stopping)

    def _validate_if_due(self) -> None:
        """Collective: validate if it is due.

        A run that is asked to stop does not validate; when it is resumed, it validates before its first step.
        """
        run, validation = self.run, self.validation
        if validation is None or self._stopping or not validation.is_due(run.progress):
            return
        validation.use_limits_of(self.stages)
        figures = validation.run(run.progress.step, self._sizes.samples_per_step)
        if figures is None:
            self._stopping = True
            return
        run.progress = replace(run.progress, validated_step=run.progress.step)
        run.metrics.log_validation(run.progress.step, figures)

    def save(self) -> None:
        """Collective: save a checkpoint of the current position."""
        own = {} if self.validation is None else self.validation.stages.state_dict()
        progress = replace(self.run.progress, limit={**self.stages.state_dict(), **own})
        loader_state = self.data.loader.state_dict()
        self.run.checkpoints.save(progress, self.model, self.optimization.checkpointed, loader_state)

    def close(self) -> None:
        """Collective: log the end of the run, and leave the process group."""
        self.run.checkpoints.close()
        self.stages.training.close()
        self.run.metrics.close()
        self.run.close()


def restore_limits(stages: Stages[Any], saved: SavedLimits) -> None:
    """Restore the limits of a checkpoint, by stage, and log those that differ from the current ones."""
    for stage in (name for name in saved if name in stages):
        runner, before = stages[stage], stages[stage].limit
        runner.load_state_dict(saved[stage])
        if runner.limit != before:
            log_rank_0(
                f"{stage}{' · ' * bool(stage)}in microbatches of at most {runner.limit} (restored from the checkpoint)"
            )
