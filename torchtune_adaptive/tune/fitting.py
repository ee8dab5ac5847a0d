"""`use_maximum_batch_size`: the search before training, its record and what it shows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic

import torch.distributed as dist
from torch import nn

from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.engine.memory import MemorySource
from torchtune_adaptive.engine.probes import OnProbe, TrainingStep, find_max_batch_size, profile_memory
from torchtune_adaptive.engine.profile import Profile
from torchtune_adaptive.engine.search import Peak, SearchResult
from torchtune_adaptive.engine.step import StepRunner
from torchtune_adaptive.errors import OneRowDoesNotFitError
from torchtune_adaptive.life.console import progress_bar, say
from torchtune_adaptive.report.journal import Event
from torchtune_adaptive.report.pictures import draw_profile, draw_search
from torchtune_adaptive.report.tables import profile_table, search_table
from torchtune_adaptive.tune.data import Data
from torchtune_adaptive.tune.model import phase_boundaries
from torchtune_adaptive.tune.optimizer import Optimization
from torchtune_adaptive.tune.samples import Kind, Sample
from torchtune_adaptive.tune.search_record import (
    Result,
    fingerprint_of,
    found_before,
    profile_event,
    search_event,
    write_search,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FitRequest:
    """What has to fit, and into what."""

    settings: Settings
    memory: MemorySource | None
    """Memory that has to suffice; None on a CPU without a limit, which has room for everything."""
    worst_step: Callable[[], TrainingStep[Any]]
    """Collective: makes the step to measure."""
    data: Data
    kind: Kind
    """The data's, as this run plans it: padded or not."""
    record: Callable[[Event], None]
    """Writes an event into the record of the run."""
    whole_step_rows: int | None
    """Rows from which on a step is one microbatch; None: it may have several whatever the rows."""
    stage: str = ""
    """The stage that has to fit, where a step has several."""
    folder: str = ""
    """Where in `output_dir` the record of the search lies."""


@dataclass(frozen=True, kw_only=True)
class Measuring(Generic[Result]):
    """One kind of search: how it measures, and how its result is shown."""

    kind: type[Result]
    measure: Callable[[], Result]
    """Collective: searches, or profiles."""
    options: Mapping[str, object]
    """What the result depends on, besides config and memory."""
    table: Callable[[Result], str]
    draw: Callable[[Path, Result], Path | None]
    event: Callable[[Result], Event]


def rows_that_fit(request: FitRequest, most_samples: int | None = None) -> int | None:
    """Collective: the most rows of a microbatch, if the config asks for them or for growth up to them.

    A rank has `most_samples` to run at most, or all those of an epoch.
    """
    adaptive, most = request.settings.adaptive, most_samples or request.data.loader.samples_per_rank
    grows = request.settings.config.get("batch_increase_function") is not None
    if adaptive.token_budget is not None:  # then rows are not what fits
        return None
    if not request.settings.use_maximum_batch_size and (not grows or adaptive.max_batch_size is not None):
        return None
    if request.memory is None:
        say("batch search · skipped: a CPU has no memory limit to search within; set adaptive.memory_limit")
        return None
    return search_batch_size(request, request.memory, min(most, adaptive.max_batch_size or most))


def search_batch_size(request: FitRequest, memory: MemorySource, most_rows: int) -> int:
    """Collective: the most rows, up to `most_rows`, that every rank can train with; recorded in `output_dir`."""
    adaptive, step = request.settings.adaptive, request.worst_step()

    def measure() -> SearchResult:
        with _probe_bar() as progress:
            return find_max_batch_size(
                step,
                memory=memory,
                strategy=adaptive.search,
                round_to=adaptive.round_to,
                max_rows=most_rows,
                samples_per_step=request.settings.samples_per_step,
                whole_step_rows=request.whole_step_rows,
                progress=progress,
            )

    search = Measuring(
        kind=SearchResult,
        measure=measure,
        options={
            "strategy": adaptive.search,
            "round_to": adaptive.round_to,
            "max_rows": most_rows,
            "whole_step_rows": request.whole_step_rows,
        },
        table=partial(search_table, sequence_length=step.length, stage=request.stage, sample=request.kind.noun),
        draw=partial(draw_search, sequence_length=step.length, stage=request.stage, sample=request.kind.noun),
        event=partial(search_event, sequence_length=step.length, stage=request.stage),
    )
    return measured(request, memory, step.length, search).rows


def profile_lengths(request: FitRequest, memory: MemorySource, most_rows: int) -> Profile:
    """Collective: what microbatches need over rows and length; recorded in `output_dir`."""
    shorten, step = request.settings.adaptive.oversize != "error", request.worst_step()

    def measure() -> Profile:
        with _probe_bar() as progress:
            return profile_memory(step, memory=memory, most_rows=most_rows, shorten=shorten, progress=progress)

    search = Measuring(
        kind=Profile,
        measure=measure,
        options={"most_rows": most_rows, "shorten": shorten, "padded": step.runner.kind.padded},
        table=partial(profile_table, stage=request.stage, length_suffix=request.kind.length_suffix),
        draw=partial(draw_profile, stage=request.stage),
        event=partial(profile_event, stage=request.stage),
    )
    return measured(request, memory, step.length, search)


def measured(request: FitRequest, memory: MemorySource, length: int, search: Measuring[Result]) -> Result:
    """Collective: the result of an earlier run, or else of this search: measured, shown and recorded."""
    directory = Path(request.settings.output_dir) / request.folder
    options = {**search.options, "stage": request.stage}
    fingerprint = fingerprint_of(request.settings.config, length, memory, options)
    if request.settings.adaptive.reuse_search and (known := found_before(directory, fingerprint, search.kind)):
        event = search.event(known)
        request.record(replace(event, reason=f"{event.reason}, reused from an earlier run"))
        return known
    try:
        result = search.measure()
    except OneRowDoesNotFitError as error:
        raise error.with_remarks(request.stage, request.kind.length_suffix.strip()) from None
    if dist.get_rank() == 0:
        logger.info("%s", search.table(result))
        write_search(directory, result, length, fingerprint)
        search.draw(directory, result)
    request.record(search.event(result))
    return result


def training_step(
    runner: StepRunner[Sample], optimization: Optimization, loss_fn: nn.Module, kind: Kind, sample: Sample
) -> TrainingStep[Sample]:
    """The recipe's step, as a search runs it."""
    return TrainingStep(
        runner=runner,
        sample=sample,
        update=lambda result: optimization.update(result.target_tokens),
        optimizers=optimization.optimizers,
        boundaries=phase_boundaries(runner.model, loss_fn),
        cut=kind.cut,
    )


def forward_step(
    runner: StepRunner[Sample], kind: Kind, sample: Sample, *beside: TrainingStep[Sample]
) -> TrainingStep[Sample]:
    """A stage without a backward, as a search runs it, `beside` those that train."""
    return TrainingStep(
        runner=runner,
        sample=sample,
        update=None,
        optimizers=(),
        boundaries=phase_boundaries(runner.model, None),
        cut=kind.cut,
        beside=beside,
    )


@contextmanager
def _probe_bar() -> Iterator[OnProbe]:
    with progress_bar("batch search", None, "probes", shown=dist.get_rank() == 0) as bar:

        def on_probe(rows: int, measured: Peak | None) -> None:
            if measured is not None:
                bar.set_postfix_str(f"{rows} rows", refresh=False)
                bar.update()

        yield on_probe
