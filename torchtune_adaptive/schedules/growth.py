"""Batch sizes that grow by epoch: what to add, and what the whole run becomes by it.

An increase function is asked before the first step of every epoch, as `function(epoch, current_batch_size)`
with epochs from 0, and returns the number to add. The whole run is simulated before training starts, so that
the learning-rate schedule knows the number of steps and a mistake shows at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torchtune_adaptive.errors import ConfigError, IncreaseError, Remedy, check_choice
from torchtune_adaptive.schedules.accumulation import Accumulation, lr_factor, split_step

Increase = Callable[[int, int], int]

BEYOND_MEMORY = ("skip", "accumulate", "error")


def double_every(epochs: int) -> Increase:
    """Twice the batch size after every `epochs` epochs."""
    _require_int("double_every", "epochs", epochs, least=1)

    def increase(epoch: int, current_batch_size: int) -> int:
        return current_batch_size if epoch > 0 and epoch % epochs == 0 else 0

    return increase


def add_every(epochs: int, amount: int) -> Increase:
    """`amount` more after every `epochs` epochs."""
    _require_int("add_every", "epochs", epochs, least=1)
    _require_int("add_every", "amount", amount)

    def increase(epoch: int, current_batch_size: int) -> int:
        return amount if epoch > 0 and epoch % epochs == 0 else 0

    return increase


def milestones(batch_sizes: Mapping[int, int]) -> Increase:
    """The batch size to have from each of these epochs on."""
    if not isinstance(batch_sizes, Mapping):
        raise IncreaseError(f"milestones: {batch_sizes!r}; allowed: {{epoch: batch size}}")
    for epoch, batch_size in batch_sizes.items():
        _require_int("milestones", "an epoch", epoch, least=0)
        _require_int("milestones", f"the batch size at epoch {epoch}", batch_size, least=1)
    targets = dict(batch_sizes)

    def increase(epoch: int, current_batch_size: int) -> int:
        reached = [start for start in targets if start <= epoch]
        return targets[max(reached)] - current_batch_size if reached else 0

    return increase


@dataclass(frozen=True)
class EpochSizes:
    """One epoch of the run as it will be, for one rank."""

    epoch: int
    batch_size: int
    microbatches: int
    microbatch_rows: int
    """Rows of the largest microbatch: `batch_size`, or less where that is more than fits."""
    samples_per_step: int
    steps: int
    lr_factor: float
    """What the learning rate is multiplied with, for the growth over the configured samples per step."""
    refused_batch_size: int | None = None
    """The batch size that was asked for and not taken, since it does not fit."""


@dataclass(frozen=True, kw_only=True)
class Outline:
    """What is fixed about a run before its batch sizes are known."""

    epochs: int
    samples_per_rank: int
    max_steps_per_epoch: int | None = None
    lr_scaling: str = "none"
    past: Sequence[EpochSizes] = ()
    """The epochs of a resumed run, as they were."""


def steady(step: Accumulation, outline: Outline) -> tuple[EpochSizes, ...]:
    """Every epoch of a run whose steps are all alike, after the past epochs of a resumed one."""
    return (
        *outline.past[: outline.epochs],
        *(
            EpochSizes(
                epoch=epoch,
                batch_size=step.rows,
                microbatches=step.microbatches,
                microbatch_rows=step.rows,
                samples_per_step=step.samples_per_step,
                steps=_steps(epoch, step.samples_per_step, outline),
                lr_factor=lr_factor(step.growth, outline.lr_scaling),
            )
            for epoch in range(len(outline.past), outline.epochs)
        ),
    )


def simulate(
    function: Increase,
    outline: Outline,
    *,
    batch_size: int,
    gradient_accumulation_steps: int,
    max_batch_size: int | None = None,
    beyond_memory: str = "skip",
) -> tuple[EpochSizes, ...]:
    """Every epoch of the run, in order.

    `max_batch_size` is what fits; an increase above it is refused (`skip`), taken with more microbatches
    (`accumulate`) or an error. The function is not asked again for the past epochs of a resumed run, so that what fits
    today does not change what was trained.
    """
    configured = batch_size * gradient_accumulation_steps
    course = list(outline.past[: outline.epochs])
    current = course[-1].batch_size if course else batch_size
    for epoch in range(len(course), outline.epochs):
        asked = _ask(function, epoch, current)
        taken = _admit(asked, current, max_batch_size, beyond_memory, epoch)
        samples = taken * gradient_accumulation_steps
        course.append(
            EpochSizes(
                epoch=epoch,
                batch_size=taken,
                **_microbatches(taken, gradient_accumulation_steps, max_batch_size),
                samples_per_step=samples,
                steps=_steps(epoch, samples, outline),
                lr_factor=lr_factor(samples / configured, outline.lr_scaling),
                refused_batch_size=None if taken == asked else asked,
            )
        )
        current = taken
    return tuple(course)


def total_steps(epochs: Sequence[EpochSizes]) -> int:
    """Optimizer steps of the whole run: what a learning-rate schedule is made for."""
    return sum(sizes.steps for sizes in epochs)


def function_name(function: Increase) -> str:
    """What an error calls the function: a built-in by its own name, not that of the closure it returned."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}".split(".<locals>")[0]


def _ask(function: Increase, epoch: int, current: int) -> int:
    """The batch size that the function wants for this epoch; whatever it does wrong becomes an IncreaseError."""
    fact = f"{function_name(function)} at epoch {epoch}, batch size {current},"
    try:
        increase: object = function(epoch, current)
    except (Exception, SystemExit) as error:
        raise IncreaseError(f"{fact} raised {type(error).__name__}: {error}") from error
    if type(increase) is not int:
        raise IncreaseError(
            f"{fact} returned {increase!r} ({type(increase).__name__}); allowed: an int, the rows to add"
        )
    if current + increase < 1:
        raise IncreaseError(f"{fact} returned {increase}, which leaves {current + increase} rows; allowed: 1 or more")
    return current + increase


def _admit(asked: int, current: int, max_batch_size: int | None, beyond_memory: str, epoch: int) -> int:
    check_choice("beyond_memory", beyond_memory, BEYOND_MEMORY)
    # Shrinking towards what fits is never refused.
    within = max_batch_size is None or asked <= max(current, max_batch_size)
    if within or beyond_memory == "accumulate":
        return asked
    if beyond_memory == "skip":
        return current
    raise IncreaseError(
        f"epoch {epoch} requests a batch size of {asked}, but at most {max_batch_size} fit",
        Remedy.SMALLER_INCREASE,
        Remedy.OTHER_BOUND,
    )


def _microbatches(batch_size: int, gradient_accumulation_steps: int, max_batch_size: int | None) -> dict[str, int]:
    if max_batch_size is None or batch_size <= max_batch_size:
        return {"microbatches": gradient_accumulation_steps, "microbatch_rows": batch_size}
    samples = batch_size * gradient_accumulation_steps
    step = split_step(samples, max_batch_size, configured=samples)
    return {"microbatches": step.microbatches, "microbatch_rows": step.rows}


def _steps(epoch: int, samples_per_step: int, outline: Outline) -> int:
    """Steps of one epoch; the last incomplete one is dropped, as torchtune's loaders do."""
    steps = outline.samples_per_rank // samples_per_step
    if steps == 0:
        raise ConfigError(
            f"epoch {epoch}: a step takes {samples_per_step} samples, but a rank has only {outline.samples_per_rank}; "
            "lower the batch size or its increase"
        )
    return steps if outline.max_steps_per_epoch is None else min(steps, outline.max_steps_per_epoch)


def _require_int(function: str, name: str, value: object, least: int | None = None) -> None:
    if type(value) is not int or (least is not None and value < least):
        allowed = "an int" if least is None else f"an int from {least}"
        raise IncreaseError(f"{function}: {name} cannot be {value!r}; allowed: {allowed}")
