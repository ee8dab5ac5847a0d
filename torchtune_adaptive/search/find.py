"""The largest batch that training steps can take, found on all ranks together without a trace."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from torchtune_adaptive.errors import ConfigError, Remedy
from torchtune_adaptive.limits.rounding import MAX_ROWS
from torchtune_adaptive.memory.device import CudaMemory, MemorySource
from torchtune_adaptive.memory.peak import Peak
from torchtune_adaptive.memory.snapshot import leaving_no_trace
from torchtune_adaptive.rehearsal import REHEARSAL
from torchtune_adaptive.search.probe_runner import Prober, TrainingStep
from torchtune_adaptive.search.profile import Profile, SampleLengths, profile
from torchtune_adaptive.search.rows import SearchResult, search
from torchtune_adaptive.search.strategies import NEED_RECOVERY

OnProbe: TypeAlias = Callable[[int, Peak | None], object]
"""Called with the rows of a probe and None when it begins, and with what it measured when it ends."""


def find_max_batch_size(
    steps: TrainingStep[Any] | Mapping[str, TrainingStep[Any]],
    *,
    memory: MemorySource | None = None,
    strategy: str = "linear",
    round_to: str = "power_of_two",
    max_rows: int | None = None,
    samples_per_step: int | None = None,
    whole_step_rows: int | None = None,
    progress: OnProbe | None = None,
) -> SearchResult:
    """Collective: the most rows that every step can train with on every rank, the same number on all of them.

    Several steps (a policy and a critic) are given by name: each is measured while all of them keep what they keep in
    training. Call it between two training steps, when gradients are None. It leaves parameters, buffers, optimizer
    state and random generators bitwise as they were, and the device's peak reset.

    From `whole_step_rows` on a step is one microbatch, which holds no gradients of an earlier one; by default every
    step has several. `memory` is the GPU's by default; on a CPU, a MemoryMeter that is in force. The other arguments
    are those of `search`. Raises OneRowDoesNotFitError, the same on every rank.
    """
    named = _named(steps)
    with _probing(named, memory, strategy) as prober:
        options: dict[str, Any] = {
            "room": prober.warm_up(),
            "refuse": prober.refuse,
            "strategy": strategy,
            "round_to": round_to,
            "max_rows": max_rows,
            "samples_per_step": samples_per_step,
        }
        if not any(step.runner.trains for step in named.values()):
            return replace(search(partial(_measure, prober, progress, accumulates=False), **options), accumulates=False)
        if whole_step_rows is not None:
            alone = partial(_measure, prober, progress, accumulates=False)
            found = search(alone, **options, least_rows=whole_step_rows)
            if found.rows >= whole_step_rows:
                return replace(found, accumulates=False, reason=f"{found.reason}; a step is one microbatch")
        found = search(partial(_measure, prober, progress), **options)
        return replace(found, reason=f"{found.reason}; beside accumulated gradients")


def profile_memory(
    steps: TrainingStep[Any] | Mapping[str, TrainingStep[Any]],
    *,
    memory: MemorySource | None = None,
    most_rows: int = MAX_ROWS,
    shorten: bool = False,
    progress: OnProbe | None = None,
) -> Profile:
    """Collective: what microbatches of up to the steps' lengths need, over rows and length, the same on every rank.

    As `find_max_batch_size`, but every step needs a `cut`. `shorten` is that of `profile`.
    """
    named = _named(steps)
    lengths = SampleLengths(
        longest=max(step.length for step in named.values()),
        shortest=max(step.shortest for step in named.values()),
        knee=max(step.knee for step in named.values()),
        padded=all(step.runner.kind.padded for step in named.values()),
    )
    # "linear", since a profile never runs out of memory on purpose either, and so asks for no recovery.
    with _probing(named, memory, "linear") as prober:
        room = prober.warm_up()
        return profile(
            partial(_measure, prober, progress),
            room,
            lengths,
            refuse=prober.refuse,
            most_rows=most_rows,
            shorten=shorten,
        )


def _named(steps: TrainingStep[Any] | Mapping[str, TrainingStep[Any]]) -> Mapping[str, TrainingStep[Any]]:
    return steps if isinstance(steps, Mapping) else {"": steps}


@contextmanager
def _probing(steps: Mapping[str, TrainingStep[Any]], memory: MemorySource | None, strategy: str) -> Iterator[Prober]:
    """Collective: a prober that leaves nothing behind."""
    _check(steps, strategy)
    memory = CudaMemory() if memory is None else memory
    run = [*steps.values(), *(beside for step in steps.values() for beside in step.beside)]
    # Once each: stages may share a model.
    models = list({id(step.runner.model): step.runner.model for step in run}.values())
    optimizers = [optimizer for step in run for optimizer in step.optimizers]
    with leaving_no_trace(models, optimizers), REHEARSAL.trial():
        yield Prober(steps, memory)
    # Only now, since a peak restarts from what is in use: until then that was optimizer state of the probes' own.
    memory.reset_peak()


def _measure(
    prober: Prober, progress: OnProbe | None, rows: int, length: int | None = None, *, accumulates: bool = True
) -> Peak:
    """Collective: the agreed peak of a microbatch."""
    if progress is not None:
        progress(rows, None)
    peak = prober.measure(rows, length, accumulates=accumulates)
    if progress is not None:
        progress(rows, peak)
    return peak


def _check(steps: Mapping[str, TrainingStep[Any]], strategy: str) -> None:
    if not steps:
        raise ValueError("a search needs at least 1 training step, but got none")
    if strategy in NEED_RECOVERY and not all(step.runner.recovers for step in steps.values()):
        raise ConfigError(
            f"strategy {strategy!r} runs out of memory on purpose, but this step cannot be repeated afterwards",
            Remedy.MEASURING_STRATEGY,
        )
