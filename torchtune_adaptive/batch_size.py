"""The largest batch that training steps can take, found on all ranks together without a trace."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torchtune_adaptive.errors import ConfigError, OneRowDoesNotFitError
from torchtune_adaptive.memory import CudaMemory, MemorySource
from torchtune_adaptive.peaks import Peak
from torchtune_adaptive.probe import Prober, TrainingStep
from torchtune_adaptive.search import SearchResult, search
from torchtune_adaptive.snapshot import leaving_no_trace

Progress: TypeAlias = Callable[[int, Peak | None], object]
"""Called with the rows of a probe and None when it begins, and with what it measured when it ends."""


def find_max_batch_size(
    steps: TrainingStep[Any] | Mapping[str, TrainingStep[Any]],
    *,
    memory: MemorySource | None = None,
    strategy: str = "linear",
    round_to: str = "power_of_two",
    max_rows: int | None = None,
    samples_per_step: int | None = None,
    progress: Progress | None = None,
) -> SearchResult:
    """Collective: the most rows that every step can train with on every rank, the same answer on all of them.

    Several steps (a policy and a critic) are given by name: each is measured while all of them keep what they keep in
    training. Call it between two training steps, when gradients are None. It leaves parameters, buffers, optimizer
    state and random generators bitwise as they were, and the device's peak reset.

    `memory` is the GPU's by default; on a CPU, a MemoryMeter that is in force. The other arguments are those of
    `search`. Raises OneRowDoesNotFitError, the same on every rank.
    """
    named = steps if isinstance(steps, Mapping) else {"": steps}
    _check(named, strategy)
    memory = CudaMemory() if memory is None else memory
    models = [step.runner.model for step in named.values()]
    optimizers = [optimizer for step in named.values() for optimizer in step.optimizers]
    with leaving_no_trace(models, optimizers):
        result = _search(
            Prober(named, memory),
            progress,
            strategy=strategy,
            round_to=round_to,
            max_rows=max_rows,
            samples_per_step=samples_per_step,
        )
    memory.reset_peak()
    return result


def _search(prober: Prober, progress: Progress | None, **options: Any) -> SearchResult:
    """Collective: `search`, with an error that also knows the rank and the length."""

    def measure(rows: int) -> Peak:
        if progress is not None:
            progress(rows, None)
        peak = prober.measure(rows)
        if progress is not None:
            progress(rows, peak)
        return peak

    budget_bytes, resident_bytes = prober.warm_up()
    try:
        return search(measure, budget_bytes, resident_bytes=resident_bytes, **options)
    except OneRowDoesNotFitError:
        raise prober.one_row_error() from None


def _check(steps: Mapping[str, TrainingStep[Any]], strategy: str) -> None:
    if not steps:
        raise ValueError("a search needs at least 1 training step, but was given none")
    if strategy != "linear" and not all(step.runner.recovers for step in steps.values()):
        raise ConfigError(
            f"adaptive.search: {strategy} runs out of memory on its way, but this step cannot be run again after that "
            "(optimizer_in_bwd, tensor parallel, or recover_from_oom: False); allowed: linear"
        )
