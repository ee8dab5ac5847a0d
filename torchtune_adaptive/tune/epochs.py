"""From the config, and what fits, to the batch sizes and steps of every epoch of the run."""

from __future__ import annotations

import logging
import math
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from omegaconf import DictConfig

from torchtune_adaptive.checkpoints.progress import Progress
from torchtune_adaptive.config import components
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.engine.limits import Limit
from torchtune_adaptive.errors import ConfigError, IncreaseError
from torchtune_adaptive.report.tables import schedule_table, step_line
from torchtune_adaptive.schedules.accumulation import Accumulation, accumulate
from torchtune_adaptive.schedules.growth import EpochSizes, Increase, Outline, simulate, steady
from torchtune_adaptive.text import count_of

logger = logging.getLogger(__name__)


def size_epochs(
    settings: Settings,
    function: Increase | None,
    rows_that_fit: int | None,
    progress: Progress,
    samples_per_rank: int,
) -> tuple[EpochSizes, ...]:
    """Every epoch of the run. With a function the configured size is the start and what fits is the bound."""
    begun = () if progress.begun is None else (progress.begun,)
    outline = Outline(
        epochs=progress.total_epochs,
        samples_per_rank=samples_per_rank,
        max_steps_per_epoch=progress.max_steps_per_epoch,
        lr_scaling=settings.adaptive.lr_scaling,
        past=(*progress.past, *begun),
    )
    if function is None:
        return steady(_step(settings, rows_that_fit), outline)
    with _naming_the_key():
        return simulate(
            function,
            outline,
            batch_size=settings.batch_size,
            gradient_accumulation_steps=settings.gradient_accumulation_steps,
            max_batch_size=rows_that_fit or settings.adaptive.max_batch_size,
            beyond_memory=settings.adaptive.beyond_memory,
        )


def whole_step_rows(settings: Settings, progress: Progress) -> int | None:
    """Rows from which on a step of every epoch is one microbatch; None: it may have several whatever the rows."""
    adaptive, rows = settings.adaptive, settings.samples_per_step
    grows = settings.config.get("batch_increase_function") is not None
    if grows or adaptive.accumulation == "fixed":
        if settings.gradient_accumulation_steps > 1 or (grows and adaptive.beyond_memory == "accumulate"):
            return None
        rows = settings.batch_size if grows else 1
    return rows if progress.begun is None else max(rows, progress.begun.samples_per_step)


def check_growth(function: Increase, settings: Settings) -> None:
    """Refuses a function that no run could ask, whatever its dataset: every epoch is asked for, and has one step."""
    with _naming_the_key():
        simulate(
            function,
            Outline(epochs=settings.epochs, samples_per_rank=sys.maxsize, max_steps_per_epoch=1),
            batch_size=settings.batch_size,
            gradient_accumulation_steps=settings.gradient_accumulation_steps,
            max_batch_size=settings.adaptive.max_batch_size,
            beyond_memory=settings.adaptive.beyond_memory,
        )


def end_of_begun_epoch(
    progress: Progress, rows_that_fit: int | None, samples_left_per_rank: int, ranks: int
) -> Progress:
    """The epoch that a resumed run is in, as it ends: with the samples per step that it began with."""
    begun = progress.begun
    if begun is None:
        return progress
    steps = begun.steps
    if ranks != progress.ranks:
        steps = progress.steps_in_epoch + samples_left_per_rank // begun.samples_per_step
        steps = min(steps, progress.max_steps_per_epoch or steps)
    rows = min(begun.microbatch_rows, rows_that_fit or begun.microbatch_rows)
    microbatches = math.ceil(begun.samples_per_step / rows)
    return replace(progress, begun=replace(begun, steps=steps, microbatch_rows=rows, microbatches=microbatches))


def build_increase_function(cfg: DictConfig) -> Increase | None:
    """`batch_increase_function`: a section with a _component_, or the dotted path of a function."""
    section = cfg.get("batch_increase_function")
    if section is None:
        return None
    if isinstance(section, str):
        function: Any = _imported(section)
    else:
        with _naming_the_key():
            function = components.build("batch_increase_function", cfg)
    if not callable(function):
        raise ConfigError(f"batch_increase_function is {section!r}; it must be a callable (epoch, batch_size) -> int")
    return function  # type: ignore[no-any-return]


@contextmanager
def _naming_the_key() -> Iterator[None]:
    try:
        yield
    except IncreaseError as error:
        raise ConfigError(f"batch_increase_function: {error.fact}", *error.remedies) from error


def announce(
    epochs: Sequence[EpochSizes],
    settings: Settings,
    progress: Progress,
    ranks: int,
    limit: Limit | None,
    samples_per_rank: int,
) -> None:
    """Logs the arithmetic of the run before it starts, and what differs from the run that it resumes."""
    if dist.get_rank() != 0:
        return
    sizes = epochs[-1]
    kind_of_rank = "rank" if settings.tensor_parallel_dim == 1 else "data rank"
    before = (*progress.past, *([progress.begun] if progress.begun else []))
    if before and progress.ranks != ranks:
        was = before[-1]
        logger.info(
            "resumed on %s (before: %d): %d samples a step (before: %d)",
            count_of(ranks, kind_of_rank),
            progress.ranks,
            sizes.samples_per_step * ranks,
            was.samples_per_step * progress.ranks,
        )
    if len({each.samples_per_step for each in epochs}) > 1 or any(each.refused_batch_size for each in epochs):
        logger.info("%s", schedule_table(epochs, ranks, by_tokens=limit is not None))
        return
    growth = sizes.samples_per_step / settings.samples_per_step
    if limit is None:
        step = Accumulation(sizes.batch_size, sizes.microbatches, sizes.samples_per_step, growth)
        line = step_line(step, ranks, kind_of_rank)
    else:
        line = f"{sizes.samples_per_step * ranks} samples a step, in microbatches of at most {limit}"
    count = count_of(len(epochs), "epoch")
    logger.info("%s · %s an epoch · %s", line, count_of(sizes.steps, "step"), count)
    if settings.max_steps_per_epoch is None:
        _tell_what_is_left_out(sizes.samples_per_step, settings.samples_per_step, samples_per_rank, ranks)


def _tell_what_is_left_out(step: int, configured_step: int, samples_per_rank: int, ranks: int) -> None:
    left, configured = samples_per_rank % step, samples_per_rank % configured_step
    if left > configured:
        logger.info(
            "%d of %d samples do not fill a step and are dropped in each epoch (as configured: %d); "
            "adaptive.accumulation: keep leaves the step unchanged",
            *(each * ranks for each in (left, samples_per_rank, configured)),
        )


def _step(settings: Settings, rows_that_fit: int | None) -> Accumulation:
    """One step of a run whose batch does not grow."""
    batch_size, microbatches = settings.batch_size, settings.gradient_accumulation_steps
    if rows_that_fit is None:
        return Accumulation(batch_size, microbatches, settings.samples_per_step, growth=1.0)
    return accumulate(
        rows_that_fit,
        batch_size=batch_size,
        gradient_accumulation_steps=microbatches,
        mode=settings.adaptive.accumulation,
    )


def _imported(path: str) -> Any:
    try:
        return pkgutil.resolve_name(path)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"batch_increase_function is {path!r}, which cannot be imported ({error}): "
            "give the dotted path of a function (epoch, batch_size) -> int, or a section with a _component_"
        ) from error
