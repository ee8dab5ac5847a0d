"""Before the first step: what fits, and what every epoch of a run will be.

1. The stage that trains is searched for the most rows, where the config asks for that.
2. All epochs get their sizes; a batch that grows does so up to those rows.
3. Under a token budget, each stage gets a limit by length, from the config or a profile.
4. The other stages are searched.

What was measured is recorded in `output_dir`, and a later run under the same circumstances takes it from there.
"""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.atomic_files import keep_file, read_json
from torchtune_adaptive.config.keys import MOST_TOKENS, Settings, on_gpu, value_at
from torchtune_adaptive.config.remedies import KEYS
from torchtune_adaptive.engine.limits import Limit, RowLimit, Surface, TokenLimit, longest_row
from torchtune_adaptive.engine.memory import MemorySource
from torchtune_adaptive.engine.probes import TrainingStep, find_max_batch_size, profile_memory
from torchtune_adaptive.engine.profile import Profile
from torchtune_adaptive.engine.ranks import Agreement, from_rank_0
from torchtune_adaptive.engine.search import Peak, Probe, SearchResult
from torchtune_adaptive.errors import ConfigError, OneRowDoesNotFitError, Remedy
from torchtune_adaptive.life.console import progress_bar, say
from torchtune_adaptive.report.journal import SEARCH, Event
from torchtune_adaptive.report.tables import profile_table, search_table
from torchtune_adaptive.text import count_of
from torchtune_adaptive.tune import schedule
from torchtune_adaptive.tune.data import Data
from torchtune_adaptive.tune.dealing import dealer_of
from torchtune_adaptive.tune.model import phase_boundaries
from torchtune_adaptive.tune.preference import KEPT, POLICY, REFERENCE
from torchtune_adaptive.tune.samples import INDEX, Sample
from torchtune_adaptive.tune.trainer import Course, Run, Trainer, restore_limits

logger = logging.getLogger(__name__)

SEARCH_FILE = "batch_search.json"
FOLDERS = {REFERENCE: "reference"}
"""Where the record of a stage's search lies in `output_dir`, if not at its top."""
SKIPPED = "skipped: a CPU has no memory limit to search within; set adaptive.memory_limit"
LONGEST_SAMPLE = 2**20
"""The longest sample that is compared with a limit."""
LOOKED_AT = 64
"""Samples, spread over the dataset, that are looked at for the median length."""
CUDA_BUDGET_GRAIN = 2**28
"""Free memory of a GPU differs by a few MiB from start to start: budgets this close count as the same."""
DEPENDS_ON = (
    "model",
    "policy_model",
    "reward_and_value_model",
    "reward_model",
    "optimizer",
    "loss",
    "dtype",
    "compile",
    "enable_activation_checkpointing",
    "enable_activation_offloading",
    "ac_mode",
    "ac_option",
    "optimizer_in_bwd",
    "clip_grad_norm",
    "custom_sharded_layers",
    "fsdp_cpu_offload",
    "fsdp_reshard_after_forward",
    "data_parallel_replicate_dim",
    "data_parallel_shard_dim",
    "tensor_parallel_dim",
    "max_generated_tokens",
    "temperature",
    "top_k",
)
"""Keys of the config that change what a microbatch needs."""

Result = TypeVar("Result", SearchResult, Profile)


def plan_course(trainer: Trainer) -> None:
    """Collective: searches where the config asks for it, sizes every epoch, and sets schedules to where the run is."""
    run, data, stages = trainer.run, trainer.data, trainer.stages
    settings, ranks = run.settings, run.place.ranks
    *earlier, training = stages
    before = replace(run.progress, dataset_samples=len(data.dataset))
    if before.begun is not None and run.progress.dataset_samples not in (None, before.dataset_samples):
        raise ConfigError(
            f"dataset has {before.dataset_samples} samples, but had {run.progress.dataset_samples} when the "
            "checkpoint was saved in the middle of an epoch, so that epoch cannot be resumed: restore the dataset, "
            "or resume from an earlier epoch"
        )
    run.journal.start(before.step)
    with trainer.memory_of_this_rank() as memory:
        whole_step_rows = schedule.whole_step_rows(settings, before)
        rows_that_fit = rows_if_asked_for(trainer, memory, training, whole_step_rows=whole_step_rows)
        left = data.loader.samples_left_per_rank(before.samples_in_epoch)
        progress = schedule.end_of_begun_epoch(before, rows_that_fit, left, ranks)
        increase, samples = schedule.build_increase_function(settings.config), data.loader.samples_per_rank
        with nullcontext() if memory is None else memory.unlimited():
            # as on rank 0, since a function of the user's may draw, or read a clock
            epochs = from_rank_0(
                schedule.size_epochs(settings, progress, samples, rows_that_fit=rows_that_fit, increase=increase)
            )
        most_samples = max(sizes.samples_per_step for sizes in epochs)
        limits = limits_by_length(trainer, memory, most_samples)
        if rows_that_fit is not None:
            searched = {
                stage: rows_if_asked_for(trainer, memory, stage, most_samples=most_samples) for stage in earlier
            }
            limits |= {stage: RowLimit(most) for stage, most in searched.items() if most is not None}
        limit = limits.get(training)
        dealer = dealer_of(trainer.model, settings, data, limit)
        schedule.announce(epochs, settings, before, ranks, limit, samples)
        for stage in earlier:
            if stage in limits:
                say(f"{stage}: at most {limits[stage]} a microbatch")
        run.checkpoints.remove_overwritten()
    resize = None
    if schedule.asks_what_was_measured(increase):
        resize = partial(schedule.size_by_what_was_measured, settings, increase=increase, rows_that_fit=rows_that_fit)
    trainer.course = Course(
        epochs=epochs,
        limits=limits,
        dealer=dealer,
        looks_ahead=limit is not None and limit.by_length,
        resize=resize,
        resize_every=settings.adaptive.increase_every,
    )
    # torchtune's own checkpoints do not count steps
    step = schedule.total_steps(epochs[: progress.epochs_run]) + progress.steps_in_epoch
    latest = progress.begun or (progress.past[-1] if progress.past else None)
    whole, done, factor = schedule.total_steps(epochs), float(step), latest.lr_factor if latest else 1.0
    if resize is not None:
        # how many steps there will be is not known: the schedule counts them as configured
        of_an_epoch = min(samples // settings.samples_per_step, progress.max_steps_per_epoch or samples)
        whole, done = progress.total_epochs * of_an_epoch, progress.samples / (settings.samples_per_step * ranks)
    trainer.optimization.start_schedule(
        total_steps=whole, steps_done=done, lr_factor=factor, strides=resize is not None
    )
    stages.use_limits(trainer.course.limits_of(stages, epochs[progress.epochs_run]))
    if progress.limit is not None:
        restore_limits(stages, progress.limit)
    run.progress = replace(progress, step=step, ranks=ranks)


def rows_if_asked_for(
    trainer: Trainer,
    memory: MemorySource | None,
    stage: str,
    *,
    most_samples: int | None = None,
    whole_step_rows: int | None = None,
) -> int | None:
    """Collective: the most rows of a microbatch, if the config asks for them or for growth up to them.

    Rows are searched up to `most_samples`, by default a rank's samples of an epoch. `whole_step_rows` is as in
    `find_max_batch_size`."""
    settings, adaptive = trainer.run.settings, trainer.run.settings.adaptive
    grows = settings.config.get("batch_increase_function") is not None and adaptive.max_batch_size is None
    if adaptive.token_budget is not None or not (settings.use_maximum_batch_size or grows):
        return None
    if memory is None:
        say(f"batch search · {SKIPPED}")
        return None
    most = most_samples or trainer.data.loader.samples_per_rank
    step = _worst_step(trainer, stage)
    most, folder = min(most, adaptive.max_batch_size or most), FOLDERS.get(stage, "")
    found = search_rows(trainer, step, memory, most_rows=most, whole_step_rows=whole_step_rows, folder=folder)
    if found.rows < settings.samples_per_step and stage == trainer.stages.training.stage:
        _tell_of_short_samples(trainer.data, step.length)
    return found.rows


def _tell_of_short_samples(data: Data, measured: int) -> None:
    dataset = data.dataset
    lengths = [data.kind.length_of(dataset[at]) for at in range(0, len(dataset), -(-len(dataset) // LOOKED_AT))]
    median = statistics.median_low(lengths)
    if not data.packed and 2 * median <= measured:
        say(
            f"the median sample has {median} tokens{data.kind.length_suffix}, but rows were measured with {measured}: "
            "adaptive.token_budget=auto use_maximum_batch_size=False would run more samples at once"
        )


def limits_by_length(trainer: Trainer, memory: MemorySource | None, most_rows: int) -> dict[str, Limit]:
    """Collective: for each stage the token budget of the config, or what was measured for it, for steps of up to
    `most_rows` samples; none without a budget, or where nothing can be measured."""
    data, stages, budget = trainer.data, trainer.stages, trainer.run.settings.adaptive.token_budget
    limits: dict[str, Limit] = {}
    if isinstance(budget, int):
        limits = dict.fromkeys(stages, TokenLimit(budget, data.kind.padded_rows))
    elif budget is not None and memory is None:
        say(f"token budget · {SKIPPED}, or the budget to a number")
    elif budget is not None and memory is not None:
        for stage in reversed(stages):
            step, folder = _worst_step(trainer, stage), FOLDERS.get(stage, "")
            if data.packed:
                found = search_rows(trainer, step, memory, most_rows=most_rows, folder=folder)
                limits[stage] = RowLimit(found.rows)
            else:
                limits[stage] = profile_lengths(trainer, step, memory, most_rows=most_rows, folder=folder).limit
    if data.packed:
        return {stage: _rows_of_packs(limit, data.kind.length_of(data.dataset[0])) for stage, limit in limits.items()}
    if limits:
        check_lengths(trainer.run.settings, data, min(longest_row(limit, LONGEST_SAMPLE) for limit in limits.values()))
    return limits


def _rows_of_packs(limit: Limit, length: int) -> RowLimit:
    """Packed rows, all of one length: as many as fit, in the order of the data, with nothing to gain from sorting."""
    rows = limit.rows_at(length)
    if rows == 0:
        raise ConfigError(
            f"adaptive.token_budget is {limit}, but every packed row has {length}: "
            f"set it to {length} or more, or lower tokenizer.max_seq_len"
        )
    say(f"token budget · the dataset is packed, all rows have {length} tokens: microbatches of {RowLimit(rows)}")
    return RowLimit(rows)


def check_lengths(settings: Settings, data: Data, longest: int, remedy: str | None = None) -> None:
    """Collective: refuses samples for which a microbatch has no room: before training if the tokenizer does not cut
    samples to that length, and whenever one is read. `remedy`: by default the ways to make room."""
    kind = data.kind
    if remedy is None:
        shortest, configured = kind.longest_at(longest), value_at(settings.config, "tokenizer.max_seq_len")
        shorter = f"lower tokenizer.max_seq_len to {shortest}" if shortest else "lower tokenizer.max_seq_len"
        if isinstance(configured, int) and configured <= shortest:
            shorter = f"use a dataset that, unlike this one, truncates samples to tokenizer.max_seq_len ({configured})"
        remedy = f"; {ways_to_make_room(settings, shorter)}"
    data.dataset.room = longest, remedy
    if data.max_seq_len is None or kind.length_at(data.max_seq_len) > longest:
        data.dataset.check_room(*data.dataset.longest())


def ways_to_make_room(settings: Settings, shorter: str) -> str:
    if settings.adaptive.token_budget != "auto":
        return f"raise adaptive.token_budget, or {shorter}"
    # then it is memory that says how many tokens fit
    checkpointing = f"{KEYS[Remedy.CHECKPOINT_ACTIVATIONS]}, " * (not settings.enable_activation_checkpointing)
    return f"{shorter}, {checkpointing}{KEYS[Remedy.MORE_RANKS]}, or {KEYS[Remedy.LARGER_BUDGET]}"


def worst_sample(data: Data, sequence_length: int | None) -> Sample:
    """Collective: a sample of targets only, as long as samples get: of the configured length and the tokenizer's the
    shorter, else as long as the longest there is. Never longer than the model takes."""
    sample: Sample = data.dataset[0]
    if "encoder_input" in sample:
        raise ConfigError(
            "use_maximum_batch_size is True, or adaptive.token_budget is auto, but the dataset has images: their "
            "memory differs from sample to sample, so there is no worst case to measure; set batch_size yourself"
        )
    if data.packed:
        return {**sample, "labels": sample["tokens"].clone()}
    tokens = sample[data.kind.sequences[0].tokens]
    token = int(tokens[0]) if len(tokens) else 0
    if sequence_length is None and data.max_seq_len is None:
        longest = data.dataset.longest()
        return {**data.kind.uniform(token, max(1, longest.length)), INDEX: longest.at}
    known = min(filter(None, (sequence_length, data.max_seq_len, data.dataset.most_tokens)))
    if known > MOST_TOKENS:
        raise ConfigError(
            f"tokenizer.max_seq_len is {known}, which no model supports: lower it, or set it to null and set "
            "adaptive.sequence_length"
        )
    return data.kind.uniform(token, data.kind.length_at(known))


def _worst_step(trainer: Trainer, stage: str) -> TrainingStep[Sample]:
    """Collective: the step that a search of this stage measures."""
    runner, last = trainer.stages[stage], trainer.stages.training
    sample = worst_sample(trainer.data, trainer.run.settings.adaptive.sequence_length)
    if last.stage == POLICY:
        sample = {**sample, KEPT: torch.zeros(2)}
    training = TrainingStep(
        runner=last,
        sample=sample,
        update=lambda result: trainer.optimization.update(result.target_tokens),
        optimizers=trainer.optimization.optimizers,
        boundaries=phase_boundaries(last.model, trainer.loss_fn),
        cut=trainer.data.kind.cut,
    )
    if runner is last:
        return training
    boundaries = phase_boundaries(runner.model, None)
    return replace(training, runner=runner, update=None, optimizers=(), boundaries=boundaries, beside=(training,))


def search_rows(
    trainer: Trainer,
    step: TrainingStep[Any],
    memory: MemorySource,
    *,
    most_rows: int,
    whole_step_rows: int | None = None,
    folder: str = "",
) -> SearchResult:
    """Collective: the most rows, up to `most_rows`, that every rank can train with, recorded in this folder of
    `output_dir`."""
    adaptive, samples = trainer.run.settings.adaptive, trainer.run.settings.samples_per_step
    options: dict[str, Any] = {"strategy": adaptive.search, "round_to": adaptive.round_to}
    options |= {"max_rows": most_rows, "whole_step_rows": whole_step_rows}
    search = partial(find_max_batch_size, step, memory=memory, samples_per_step=samples, **options)
    result, reused = _measured(trainer, step, memory, folder, options, search, SearchResult)
    found = f"{count_of(result.rows, 'row')} of {step.length} tokens ({result.reason}){reused}"
    _tell(trainer.run, step, "batch search", found, result, unit="rows", after=result.rows, peak_bytes=peak_of(result))
    return result


def peak_of(result: SearchResult) -> int | None:
    return next(probe.peak.peak_bytes for probe in result.probes if probe.rows == result.rows)


def profile_lengths(
    trainer: Trainer, step: TrainingStep[Any], memory: MemorySource, *, most_rows: int, folder: str = ""
) -> Profile:
    """Collective: what microbatches of up to `most_rows` rows need over rows and length, recorded as a search is."""
    measure = partial(profile_memory, step, memory=memory, most_rows=most_rows)
    options = {"most_rows": most_rows, "padded": step.runner.kind.padded}
    result, reused = _measured(trainer, step, memory, folder, options, measure, Profile)
    found = f"up to {result.constant_tokens} tokens fit at any length, more where the fitted surfaces allow{reused}"
    _tell(trainer.run, step, "token budget", found, result, unit="bytes", after=result.limit_bytes)
    return result


def _tell(
    run: Run, step: TrainingStep[Any], what: str, found: str, result: SearchResult | Profile, **figures: Any
) -> None:
    stage, done, budget_bytes = step.runner.stage, run.progress.step, result.budget_bytes
    reason = f"{what}{' · ' * bool(stage)}{stage}: {found}"
    run.journal.event(
        Event(kind=SEARCH, step=done, stage=stage or None, reason=reason, budget_bytes=budget_bytes, **figures)
    )


def _measured(
    trainer: Trainer,
    step: TrainingStep[Any],
    memory: MemorySource,
    folder: str,
    options: Mapping[str, object],
    measure: Callable[..., Result],
    taken: type[Result],
) -> tuple[Result, str]:
    """Collective: what an earlier run has found under the same circumstances, with a remark that says so, or what
    `measure` finds now, shown and recorded; an error says of which stage, length and sample a row does not fit."""
    settings, kind, stage = trainer.run.settings, trainer.data.kind, step.runner.stage
    directory, fingerprint = Path(settings.output_dir) / folder, fingerprint_of(settings.config, step, memory, options)
    with memory.unlimited():  # a rank that has no room for a message says so where a row is tried
        result = from_rank_0(read_record(directory, fingerprint, taken) if dist.get_rank() == 0 else None)
    if result is not None:
        return result, ", reused from an earlier run"
    with progress_bar("batch search", None, "probes", shown=dist.get_rank() == 0) as bar:

        def on_probe(rows: int, measured: Peak | None) -> None:
            if measured is not None:
                bar.set_postfix_str(f"{rows} rows", refresh=False)
                bar.update()

        try:
            result = measure(progress=on_probe)
        except OneRowDoesNotFitError as error:
            scanned = isinstance(step.sample, dict) and INDEX in step.sample
            longest = f"sample {step.sample[INDEX]} of the dataset" if scanned else ""
            raise error.with_remarks(stage, kind.length_suffix.strip(), longest) from None
    if dist.get_rank() == 0:
        if isinstance(result, SearchResult):
            logger.info("%s", search_table(result, step.length, stage, kind.noun))
        else:
            logger.info("%s", profile_table(result, stage, kind.length_suffix))
        write_record(directory, fingerprint, step.length, result)
    return result, ""


def fingerprint_of(
    cfg: DictConfig, step: TrainingStep[Any], memory: MemorySource, options: Mapping[str, object]
) -> dict[str, object]:
    """Collective: everything that the result of a search depends on."""
    # an Agreement allocates nothing, and a rank may have no memory left
    budgets = [int(budget) for (budget,) in Agreement(1).gather([memory.budget_bytes])]
    given = OmegaConf.create({key: cfg.get(key) for key in DEPENDS_ON})
    return {
        **OmegaConf.to_container(given, resolve=True),  # type: ignore[dict-item]
        **options,
        "stage": step.runner.stage,
        "sequence_length": step.length,
        "world_size": dist.get_world_size(),
        "device": torch.get_device_module(cfg.device).get_device_name() if on_gpu(cfg) else "cpu",
        "torch": torch.__version__,
        "budgets": [budget // CUDA_BUDGET_GRAIN for budget in budgets] if on_gpu(cfg) else budgets,
    }


def write_record(directory: Path, fingerprint: Mapping[str, Any], length: int, result: SearchResult | Profile) -> None:
    record = {"fingerprint": fingerprint, "sequence_length": length, "result": asdict(result)}
    keep_file(directory / SEARCH_FILE, f"{json.dumps(record, indent=2)}\n".encode(), "the next run will search again")


def read_record(directory: Path, fingerprint: Mapping[str, Any], taken: type[Result]) -> Result | None:
    """The result of an earlier search with this fingerprint."""
    path = directory / SEARCH_FILE
    try:
        record = read_json(path)
        # The fingerprint first: it says whether the rest is of this kind.
        if record is None or record["fingerprint"] != json.loads(json.dumps(fingerprint)):
            return None
        result = record["result"]
        probes, surfaces = ("probes", "lines") if taken is SearchResult else ("points", "surfaces")
        result[probes] = tuple(Probe(**{**each, "peak": Peak(**each["peak"])}) for each in result[probes])
        result[surfaces] = {name: Surface(**each) for name, each in result[surfaces].items()}
        found = taken(**result)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        flaw = f"missing key {error}" if isinstance(error, KeyError) else error
        logger.warning("%s is not a valid search record (%s); searching again", path, flaw)
    else:
        logger.info("batch search · reused from %s; delete it to search again", path)
        return found
    return None
