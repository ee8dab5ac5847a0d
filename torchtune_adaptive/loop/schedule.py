"""The batch size of every epoch: how it grows, how it is split into microbatches, and how it is logged.

The config's increase function returns the number of rows to add to the batch size before an epoch. It is called for all
epochs before training starts, because the learning-rate schedule needs the number of steps, and so that errors of the
function appear at once.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from omegaconf import DictConfig

from torchtune_adaptive.checkpoints.progress import EpochSizes, Progress
from torchtune_adaptive.checkpoints.resuming import multiplies_batch_size
from torchtune_adaptive.config import components
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.engine.limits import Limit
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.formatting import count_of, in_columns
from torchtune_adaptive.lifecycle.console import log_rank_0

KEY = "batch_increase_function"
Increase = Callable[[int, int], int]


def double_every(epochs: int) -> Increase:
    """Double the batch size every `epochs` epochs."""
    return lambda epoch, current: current if epoch > 0 and epoch % epochs == 0 else 0


def build_increase_function(cfg: DictConfig) -> Increase | None:
    """Build `batch_increase_function`: a section with a _component_, or the dotted path of a function."""
    section = cfg.get(KEY)
    if section is None:
        return None
    function: Increase = components.imported(KEY, section) if isinstance(section, str) else components.build(KEY, cfg)
    return function


def size_run(
    settings: Settings,
    progress: Progress,
    *,
    ranks: int,
    samples_per_rank: int,
    samples_left_per_rank: int,
    rows_that_fit: int | None = None,
    increase: Increase | None = None,
) -> tuple[Progress, tuple[EpochSizes, ...]]:
    """Return the progress and the sizes of all epochs of a run that continues from `progress` on `ranks` ranks.

    `samples_left_per_rank` belongs to the epoch in progress. `rows_that_fit` is the result of the search. Unless the
    batch size grows or accumulation is fixed, later epochs have the samples per step of the latest one.
    """
    kept, started = None, progress.epochs_started
    if started and not multiplies_batch_size(settings):
        kept = started[-1].samples_per_step * progress.ranks // ranks
    if progress.current_epoch is not None:
        rest = _rest_of_epoch(progress, progress.current_epoch, rows_that_fit, samples_left_per_rank, ranks)
        progress = replace(progress, current_epoch=rest)
    options: dict[str, Any] = {"rows_that_fit": rows_that_fit, "increase": increase, "kept": kept}
    epochs = size_epochs(settings, progress, samples_per_rank, **options)
    return replace(progress, ranks=ranks), epochs


def _rest_of_epoch(
    progress: Progress, sizes: EpochSizes, rows_that_fit: int | None, samples_left_per_rank: int, ranks: int
) -> EpochSizes:
    """Return the sizes of the epoch in progress, which keeps its samples per step."""
    steps, samples = sizes.steps, sizes.samples_per_step
    if ranks != progress.ranks:
        samples = samples * progress.ranks // ranks
        steps = progress.steps_in_epoch + samples_left_per_rank // samples
        steps = min(steps, progress.max_steps_per_epoch or steps)
    rows = min(sizes.microbatch_rows, rows_that_fit or sizes.microbatch_rows, samples)
    microbatches = math.ceil(samples / rows)
    return replace(sizes, steps=steps, samples_per_step=samples, microbatch_rows=rows, microbatches=microbatches)


def size_epochs(
    settings: Settings,
    progress: Progress,
    samples_per_rank: int,
    *,
    rows_that_fit: int | None = None,
    increase: Increase | None = None,
    kept: int | None = None,
) -> tuple[EpochSizes, ...]:
    """Compute the sizes of all epochs in order; epochs that have begun keep theirs.

    With an increase function, the batch size starts at the configured one and grows up to a bound: `rows_that_fit`,
    or `adaptive.max_batch_size` without a search. Otherwise, a step has `kept` samples per rank, if that is given.
    """
    epochs = [*progress.epochs_started][: progress.total_epochs]
    for epoch in range(len(epochs), progress.total_epochs):
        current = epochs[-1].batch_size if epochs else settings.batch_size
        if increase is None:
            sizes = steady_sizes(settings, epoch, rows_that_fit, kept)
        else:
            sizes = grown_sizes(settings, epoch, current, _requested_size(increase, epoch, current), rows_that_fit)
        if settings.optimizer_in_bwd and sizes.microbatches > 1:
            raise ConfigError(
                f"optimizer_in_bwd updates weights in every backward, but the {sizes.samples_per_step} samples of a "
                f"step need {sizes.microbatches} microbatches of at most {sizes.microbatch_rows} rows; start a new run "
                f"with batch_size={sizes.microbatch_rows}, or with optimizer_in_bwd=False"
            )
        steps = samples_per_rank // sizes.samples_per_step
        if steps == 0:
            raise ConfigError(
                f"epoch {epoch}: a step takes {sizes.samples_per_step} samples per rank, but a rank has only "
                f"{samples_per_rank}; lower adaptive.max_batch_size, gradient_accumulation_steps, or the increase"
            )
        epochs.append(replace(sizes, steps=min(steps, progress.max_steps_per_epoch or steps)))
    return tuple(epochs)


def grown_sizes(settings: Settings, epoch: int, current: int, requested: int, rows_that_fit: int | None) -> EpochSizes:
    """Return the sizes of an epoch with the requested batch size; if it exceeds the bound, with the current one."""
    most = rows_that_fit or settings.adaptive.max_batch_size or sys.maxsize
    # A batch size below the current one is accepted even if it exceeds the bound.
    batch_size = requested if requested <= max(current, most) else current
    sizes = _sizes(epoch, batch_size * settings.gradient_accumulation_steps, min(batch_size, most))
    return replace(sizes, batch_size=batch_size, refused_batch_size=None if batch_size == requested else requested)


def steady_sizes(settings: Settings, epoch: int, rows_that_fit: int | None, kept: int | None = None) -> EpochSizes:
    """Return the sizes of an epoch without an increase function: with `kept` samples per step or, if that is None, by
    `adaptive.accumulation`.

    - `rebalance` keeps the configured samples per step, unless a single microbatch holds more.
    - `fixed` keeps `gradient_accumulation_steps`, so more rows in a microbatch mean more samples per step.
    - `keep` never changes the samples per step.
    """
    samples, rows = settings.samples_per_step, rows_that_fit or settings.batch_size
    if kept is not None:
        samples = kept
    elif settings.adaptive.accumulation == "fixed":
        samples = rows * settings.gradient_accumulation_steps
    elif settings.adaptive.accumulation == "rebalance":
        samples = max(rows, samples)
    return _sizes(epoch, samples, rows)


def _sizes(epoch: int, samples: int, most_rows: int) -> EpochSizes:
    """Split the samples of a step evenly into the fewest microbatches. The caller sets the number of steps."""
    microbatches = math.ceil(samples / most_rows)
    rows = math.ceil(samples / microbatches)
    return EpochSizes(epoch, rows, microbatches, microbatch_rows=rows, samples_per_step=samples, steps=0)


def _requested_size(increase: Increase, epoch: int, current: int) -> int:
    """Call the increase function and return the new batch size. Raise ConfigError if the result is invalid."""
    fact = f"{KEY}, at epoch {epoch} and batch size {current},"
    allowed = "a function (epoch, batch_size) -> rows to add"
    try:
        more: object = increase(epoch, current)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{fact} raised {components.in_a_line(error)}; allowed: {allowed}, or a section with its _component_"
        ) from error
    if type(more) is not int or current + more < 1:
        raise ConfigError(f"{fact} returned {more!r}; it must return an int, and the batch size must stay above 0")
    return current + more


def total_steps(epochs: Sequence[EpochSizes]) -> int:
    """Return the number of steps in these epochs."""
    return sum(sizes.steps for sizes in epochs)


def whole_step_rows(settings: Settings, progress: Progress, ranks: int) -> int | None:
    """Return the fewest rows with which a step is one microbatch; None if a step always has several microbatches.

    With `accumulation: fixed`, a step has `gradient_accumulation_steps` microbatches of any size."""
    rows, latest = settings.samples_per_step, progress.epochs_started[-1:]
    if multiplies_batch_size(settings):
        if settings.gradient_accumulation_steps > 1:
            return None
        rows = settings.batch_size if settings.config.get(KEY) is not None else 1
        latest = latest if progress.current_epoch else ()
    return max([rows, *(sizes.samples_per_step * progress.ranks // ranks for sizes in latest)])


def log_schedule(
    epochs: Sequence[EpochSizes], settings: Settings, progress: Progress, ranks: int, limit: Limit | None
) -> None:
    """Log the sizes before training. If the number of ranks has changed, log the checkpoint's samples per step too."""
    sizes, before = epochs[-1], progress.epochs_started
    ahead = epochs[len(progress.past) :]  # sizes are per rank, and earlier epochs may have run on other ranks
    per_step = sizes.samples_per_step * ranks
    kind_of_rank = "rank" if settings.tensor_parallel_dim == 1 else "data rank"
    if before and progress.ranks != ranks:
        was = before[-1].samples_per_step * progress.ranks
        on = f"{count_of(ranks, kind_of_rank)} (before: {progress.ranks})"
        log_rank_0(f"resumed on {on}: {ahead[0].samples_per_step * ranks} samples a step (before: {was})")
    if len({each.samples_per_step for each in ahead}) > 1 or any(each.refused_batch_size for each in ahead):
        log_rank_0(schedule_table(ahead, ranks, by_tokens=limit is not None))
        return
    if limit is None:
        line = step_line(sizes, settings.samples_per_step, ranks, kind_of_rank)
    else:
        line = f"{per_step} samples a step, in microbatches of at most {limit}"
    log_rank_0(f"{line} · {count_of(sizes.steps, 'step')} an epoch · {count_of(len(epochs), 'epoch')}")


def step_line(sizes: EpochSizes, configured: int, ranks: int, kind_of_rank: str = "rank") -> str:
    """Return a line with the product of rows, microbatches and ranks that makes up the samples of a step."""
    even = sizes.microbatch_rows * sizes.microbatches == sizes.samples_per_step
    rows = "at most " * (not even) + count_of(sizes.microbatch_rows, "row")
    product = f"{rows} × {count_of(sizes.microbatches, 'microbatch', 'microbatches')} × {count_of(ranks, kind_of_rank)}"
    compared = "as configured" if sizes.samples_per_step == configured else f"configured: {configured * ranks}"
    return f"{product} {'=' if even else 'for'} {sizes.samples_per_step * ranks} samples a step ({compared})"


def schedule_table(epochs: Sequence[EpochSizes], ranks: int, *, by_tokens: bool = False) -> str:
    """Return a table of the epochs; consecutive epochs with equal sizes share a line."""
    lines = [("epoch", "batch size", "rows × microbatches", "samples a step", "steps", "")]
    for _, alike in groupby(epochs, key=lambda sizes: {**vars(sizes), "epoch": None}):
        sizes, *others = alike
        refused = sizes.refused_batch_size
        line = (
            f"{sizes.epoch}-{others[-1].epoch}" if others else f"{sizes.epoch}",
            f"{sizes.batch_size}",
            "by tokens" if by_tokens else f"{sizes.microbatch_rows} × {sizes.microbatches}",
            f"{sizes.samples_per_step * ranks}",
            f"{sizes.steps}",
            "" if refused is None else f"<- {refused} requested, above the bound",
        )
        lines.append(line)
    count = f"{count_of(len(epochs), 'epoch')} · {count_of(total_steps(epochs), 'step')}"
    return f"batch schedule · {count}\n{in_columns(lines)}"
