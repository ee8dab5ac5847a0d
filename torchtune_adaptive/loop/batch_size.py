"""Search for the largest microbatch if the config requests it, and compute the batch size of every epoch.

1. Search for the largest number of rows of the stage that trains, if the config sets `use_maximum_batch_size`, or a
   batch size that grows but no `adaptive.max_batch_size`. `engine/probes.py` runs what `engine/search.py` chooses.
2. Compute the batch size of every epoch (`schedule.py`). It grows at most to the rows found, or `max_batch_size`.
3. Search for the limits of the other stages. Under `adaptive.token_budget`, 1 is skipped, and 3 sets the limits of all
   stages: by length or, if the dataset is packed, by rows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeVar

from torchtune_adaptive.config.keys import REMEDIES, Settings, value_at
from torchtune_adaptive.data.balancing import balancer_of
from torchtune_adaptive.data.loading import Data
from torchtune_adaptive.data.samples import INDEX, Sample, TokenKind
from torchtune_adaptive.engine.length_profile import Profile
from torchtune_adaptive.engine.limits import MAX_ROWS, Limit, RowLimit, TokenLimit, longest_row
from torchtune_adaptive.engine.memory import MemorySource
from torchtune_adaptive.engine.probes import TrainingStep, find_max_batch_size, profile_memory
from torchtune_adaptive.engine.ranks import from_rank_0
from torchtune_adaptive.engine.search import SearchResult
from torchtune_adaptive.errors import ConfigError, OneRowDoesNotFitError, Remedy
from torchtune_adaptive.formatting import count_of
from torchtune_adaptive.lifecycle.console import log_rank_0
from torchtune_adaptive.loop import schedule
from torchtune_adaptive.loop.metrics import SEARCH
from torchtune_adaptive.loop.training_loop import BatchSchedule, TrainingLoop, restore_limits
from torchtune_adaptive.models.model import phase_boundaries
from torchtune_adaptive.report.tables import profile_table, search_table

SEARCH_SKIPPED = "skipped: a CPU has no memory limit to search within; set adaptive.memory_limit"
LONGEST_SAMPLE = 2**20
"""A length in tokens that no sample exceeds."""
Result = TypeVar("Result", SearchResult, Profile)


def set_batch_sizes(loop: TrainingLoop) -> None:
    """Collective: run the searches of the config, size all epochs, and set limits and schedules for the next step."""
    run, loader, stages = loop.run, loop.data.loader, loop.stages
    settings, ranks, training = run.settings, run.devices.ranks, stages.training.stage
    progress = run.progress
    run.journal.start(progress.step)
    with loop.memory_of_this_rank() as memory:
        rows_that_fit = _search_training_stage(loop, memory, schedule.whole_step_rows(settings, progress, ranks))
        increase = schedule.build_increase_function(settings.config)
        with nullcontext() if memory is None else memory.unlimited():
            sized = schedule.size_run(
                settings,
                progress,
                ranks=ranks,
                samples_per_rank=loader.samples_per_rank,
                samples_left_per_rank=loader.samples_left_per_rank(progress.samples_in_epoch),
                rows_that_fit=rows_that_fit,
                increase=increase,
            )
            # The user's increase function may read a clock or draw random numbers: use what it returned on rank 0.
            run.progress, epochs = from_rank_0(sized)
        most_samples = max(sizes.samples_per_step for sizes in epochs)
        limits = _measure_limits(loop, memory, rows_that_fit, most_samples)
        limit = limits.get(training)
        balancer = balancer_of(loop.model, settings, loop.data, limit)
        schedule.log_schedule(epochs, settings, progress, ranks, limit)
        for stage in stages:
            if stage in limits and stage != training:
                log_rank_0(f"{stage}: at most {limits[stage]} a microbatch")
    loop.schedule = BatchSchedule(
        epochs=epochs, limits=limits, balancer=balancer, looks_ahead=limit is not None and limit.by_length
    )
    loop.optimization.start_schedule(total_steps=schedule.total_steps(epochs), steps_done=run.progress.step)
    stages.use_limits(loop.schedule.limits_of(stages, epochs[run.progress.epochs_run]))
    if run.progress.limit is not None:
        restore_limits(stages, run.progress.limit)
        if (validation := loop.validation) is not None:
            validation.use_limits_of(stages)
            restore_limits(validation.stages, run.progress.limit)


def _search_training_stage(loop: TrainingLoop, memory: MemorySource | None, whole_step_rows: int | None) -> int | None:
    """Collective: search for the largest number of rows of the stage that trains; None if no search is configured."""
    settings, adaptive, data = loop.run.settings, loop.run.settings.adaptive, loop.data
    grows = settings.config.get("batch_increase_function") is not None and adaptive.max_batch_size is None
    if adaptive.token_budget is not None or not (settings.use_maximum_batch_size or grows):
        return None
    if memory is None:
        log_rank_0(f"batch search · {SEARCH_SKIPPED}")
        return None
    step = _worst_step(loop, loop.stages.training.stage)
    most_rows = data.loader.samples_per_rank
    return search_rows(loop, step, memory, most_rows=most_rows, whole_step_rows=whole_step_rows).rows


def _measure_limits(
    loop: TrainingLoop, memory: MemorySource | None, rows_that_fit: int | None, most_samples: int
) -> dict[str, Limit]:
    """Collective: return the limits that are equal in all epochs, by stage, for steps of up to `most_samples` samples.

    Under a token budget, all stages have such a limit, unless it would have to be measured on a CPU without a memory
    limit. If `rows_that_fit` comes from a search, the stages that do not train have one.
    """
    data, stages, adaptive = loop.data, loop.stages, loop.run.settings.adaptive
    *stages_without_backward, _ = stages
    limits: dict[str, Limit] = {}
    if memory is not None and rows_that_fit is not None:
        for stage in stages_without_backward:
            step = _worst_step(loop, stage)
            limits[stage] = RowLimit(search_rows(loop, step, memory, most_rows=most_samples).rows)
    if adaptive.token_budget is None:
        return limits
    if isinstance(adaptive.token_budget, int):
        rows_per_sample = data.kind.rows if data.kind.padded else 1
        limits = dict.fromkeys(stages, TokenLimit(adaptive.token_budget, rows_per_sample))
    elif memory is None:
        log_rank_0(f"token budget · {SEARCH_SKIPPED}, or adaptive.token_budget to a number")
    else:
        for stage in reversed(stages):
            step = _worst_step(loop, stage)
            if data.packed:
                limits[stage] = RowLimit(search_rows(loop, step, memory, most_rows=most_samples).rows)
            else:
                limits[stage] = profile_lengths(loop, step, memory, most_rows=most_samples).limit
    if data.packed:
        return {stage: _rows_of_packs(limit, data.kind.length_of(data.dataset[0])) for stage, limit in limits.items()}
    if limits:
        check_lengths(loop.run.settings, data, min(longest_row(limit, LONGEST_SAMPLE) for limit in limits.values()))
    return limits


def _rows_of_packs(limit: Limit, length: int) -> RowLimit:
    """Convert the limit to rows, which is possible because all rows of a packed dataset have the same `length`."""
    rows = limit.rows_at(length)
    if rows == 0:
        raise ConfigError(
            f"adaptive.token_budget is {limit}, but every packed row has {length}: "
            f"set it to {length} or more, or lower tokenizer.max_seq_len"
        )
    log_rank_0(f"token budget · the dataset is packed, all rows have {length} tokens: microbatches of {RowLimit(rows)}")
    return RowLimit(rows)


def check_lengths(settings: Settings, data: Data, longest: int, remedy: str | None = None) -> None:
    """Collective: make the dataset raise a SampleTooLargeError for samples of more than `longest` tokens.

    Each sample is checked when it is read. If the tokenizer does not truncate samples to that length, the longest
    sample is also checked now. `remedy` is the end of the error message.
    """
    kind = data.kind
    if remedy is None:
        shortest, configured = kind.longest_at(longest), value_at(settings.config, "tokenizer.max_seq_len")
        shorter = f"lower tokenizer.max_seq_len to {shortest}" if shortest else "lower tokenizer.max_seq_len"
        if isinstance(configured, int) and configured <= shortest:
            shorter = f"use a dataset that, unlike this one, truncates samples to tokenizer.max_seq_len ({configured})"
        remedy = f"; {remedies_for_long_samples(settings, shorter)}"
    data.dataset.length_limit = longest, remedy
    if data.max_seq_len is None or kind.length_at(data.max_seq_len) > longest:
        data.dataset.check_length(*data.dataset.longest())


def remedies_for_long_samples(settings: Settings, shorter: str) -> str:
    """Return the remedies for a sample that does not fit; `shorter` is the remedy that shortens samples."""
    if settings.adaptive.token_budget != "auto":
        return f"raise adaptive.token_budget, or {shorter}"
    checkpointing = f"{REMEDIES[Remedy.CHECKPOINT_ACTIVATIONS]}, " * (not settings.enable_activation_checkpointing)
    return f"{shorter}, {checkpointing}{REMEDIES[Remedy.MORE_RANKS]}, or {REMEDIES[Remedy.LARGER_BUDGET]}"


def worst_sample(data: Data, sequence_length: int | None) -> Sample:
    """Collective: return a sample of the greatest possible length in which every token is a target.

    The length is the smallest of `sequence_length`, the tokenizer's limit and the model's limit. If neither of the
    first two is set, it is the length of the longest sample in the dataset.
    """
    sample: Sample = data.dataset[0]
    if "encoder_input" in sample:
        raise ConfigError(
            "a batch search cannot measure samples with images: set use_maximum_batch_size: False, "
            "adaptive.token_budget to a number or null and, with batch_increase_function, adaptive.max_batch_size"
        )
    if data.packed:
        return {**sample, "labels": sample["tokens"].clone()}
    if sequence_length is None and data.max_seq_len is None:
        longest = data.dataset.longest()
        return {**data.kind.uniform(0, max(1, longest.length)), INDEX: longest.at}
    known = min(filter(None, (sequence_length, data.max_seq_len, data.dataset.most_tokens)))
    return data.kind.uniform(0, data.kind.length_at(known))


def _worst_step(loop: TrainingLoop, stage: str) -> TrainingStep[Sample]:
    """Collective: return the worst-case step that the probes of this stage run."""
    runner, last = loop.stages[stage], loop.stages.training
    sample = worst_sample(loop.data, loop.run.settings.adaptive.sequence_length)
    training = TrainingStep(
        runner=last,
        sample=sample,
        update=lambda result: loop.optimization.update(result.target_tokens),
        optimizers=loop.optimization.optimizers,
        boundaries=phase_boundaries(last.model, loop.loss_fn),
        cut=loop.data.kind.cut,
        shortest=loop.data.kind.length_at(2),
    )
    if runner is last:
        return training
    boundaries = phase_boundaries(runner.model, None)
    return replace(training, runner=runner, update=None, optimizers=(), boundaries=boundaries, other_stages=(training,))


def search_rows(
    loop: TrainingLoop,
    step: TrainingStep[Any],
    memory: MemorySource,
    *,
    most_rows: int,
    whole_step_rows: int | None = None,
) -> SearchResult:
    """Collective: search for the largest number of rows, up to `most_rows`, that every rank can run. Without
    `adaptive.max_batch_size`, MAX_ROWS is a bound, too, because memory may not grow with the rows."""
    adaptive = loop.run.settings.adaptive
    most_rows = min(most_rows, adaptive.max_batch_size or MAX_ROWS)
    options: dict[str, Any] = {"strategy": adaptive.search, "round_to": adaptive.round_to, "max_rows": most_rows}
    search = partial(find_max_batch_size, step, memory=memory, **options)
    kind, stage = loop.data.kind, step.runner.stage
    result = _measure(partial(search, whole_step_rows=whole_step_rows), step, kind)
    found = f"{count_of(result.rows, 'row')} of {step.length} tokens ({result.reason})"
    reason = f"batch search{' · ' * bool(stage)}{stage}: {found}"
    peak_bytes = next(probe.peak.peak_bytes for probe in result.probes if probe.rows == result.rows)
    figures = {"unit": "rows", "after": result.rows, "peak_bytes": peak_bytes}
    record_search(loop, stage, asdict(result), search_table(result, step.length, stage, kind.noun), reason, figures)
    return result


def profile_lengths(loop: TrainingLoop, step: TrainingStep[Any], memory: MemorySource, *, most_rows: int) -> Profile:
    """Collective: measure how memory depends on rows and length, for microbatches of up to `most_rows` rows."""
    kind, stage = loop.data.kind, step.runner.stage
    result = _measure(partial(profile_memory, step, memory=memory, most_rows=most_rows), step, kind)
    found = f"up to {result.constant_tokens} tokens fit at any length; at some lengths, more are predicted to fit"
    reason = f"token budget{' · ' * bool(stage)}{stage}: {found}"
    figures = {"unit": "bytes", "after": result.limit_bytes}
    record_search(loop, stage, asdict(result), profile_table(result, stage, kind.length_suffix), reason, figures)
    return result


def record_search(
    loop: TrainingLoop, stage: str, values: dict[str, Any], table: str, reason: str, figures: dict[str, Any]
) -> None:
    """Log the table of a search, and record its result in the journal."""
    log_rank_0(table)
    figures |= {"stage": stage or None, "budget_bytes": values["budget_bytes"], "result": values}
    loop.run.journal.record(SEARCH, loop.run.progress.step, reason, **figures)


def _measure(measure: Callable[..., Result], step: TrainingStep[Any], kind: TokenKind) -> Result:
    """Collective: call `measure`; add the stage and the sample to its errors."""
    log_rank_0(f"batch search{' · ' * bool(step.runner.stage)}{step.runner.stage} · measuring trial steps")
    try:
        return measure()
    except OneRowDoesNotFitError as error:
        from_dataset = isinstance(step.sample, dict) and INDEX in step.sample
        longest = f"sample {step.sample[INDEX]} of the dataset" if from_dataset else ""
        remarks = "; ".join(filter(None, (step.runner.stage, kind.length_suffix.strip(), longest)))
        error.fact += f" ({remarks})" * bool(remarks)
        raise
