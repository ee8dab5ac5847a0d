"""Runs training steps on worst-case samples and measures their memory on all ranks.

Such a step is called a probe. It runs two microbatches and the update. The first microbatch is a sample of minimal
length, which leaves gradients in memory. The second one has copies of the longest sample. If a training step is a
single microbatch, the probe omits the first one. One collective combines the peaks of all ranks into a `Peak`.

The peak of each phase is nearly linear in the rows. The peak of the step is not, because another phase may have the
highest peak if there are more rows. Hooks divide the forward at the outputs of modules, and the backward at the
gradients of these outputs. They read and reset the peak on the host.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from time import perf_counter
from typing import Any, Generic, NamedTuple, Self

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter

from torchtune_adaptive.engine import fsdp
from torchtune_adaptive.engine.length_profile import Profile, SampleLengths, measure_profile
from torchtune_adaptive.engine.limits import MAX_ROWS, candidate_rows
from torchtune_adaptive.engine.memory import CudaMemory, MemorySource
from torchtune_adaptive.engine.oom import is_oom, release_memory
from torchtune_adaptive.engine.plans import Sample
from torchtune_adaptive.engine.ranks import Agreement, from_rank_0, rank
from torchtune_adaptive.engine.results import StepResult
from torchtune_adaptive.engine.search import (
    ONE_ROW_REMEDIES,
    STRATEGIES,
    Budget,
    Peak,
    SearchResult,
    one_row_error,
    search,
)
from torchtune_adaptive.engine.snapshot import restoring_state
from torchtune_adaptive.engine.step import StepRunner
from torchtune_adaptive.errors import (
    ConfigError,
    OneRowDoesNotFitError,
    Remedy,
    RunStopped,
    UnrecoverableError,
    check_choice,
    without_backward,
)
from torchtune_adaptive.formatting import count_of

_UNLIMITED_ROWS = 2
"""Probes of up to this many rows ignore the limit: errors show the peak of 1 row, and `linear` needs two probes."""


def phase_names(boundaries: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of a step's phases, in order. Each boundary is named after the part of the model before it."""
    if not boundaries:
        return ["forward and backward", "update"]
    forward = [f"{part} forward" for part in boundaries]
    backward = [f"{part} backward" for part in reversed(list(boundaries))]
    return [*forward, "loss", *backward, "update"]


class PhaseMeter:
    """Context manager around a step. It measures the peak of each phase, over all microbatches. `boundaries` are
    modules in the order of the forward. The output of each ends a phase."""

    def __init__(self, memory: MemorySource, model: nn.Module, boundaries: Mapping[str, nn.Module]) -> None:
        self.peaks: dict[str, int] = {}
        self._memory, self._model, self._boundaries = memory, model, boundaries
        self._names, self._phase = phase_names(boundaries), 0

    def __enter__(self) -> Self:
        self._memory.reset_peak()
        # `prepend` runs the hook before that of FSDP, which gathers parameters.
        self._handles = [self._model.register_forward_pre_hook(partial(self.begin, 0), prepend=True)]
        for index, module in enumerate(self._boundaries.values()):
            self._handles.append(module.register_forward_hook(partial(self._at_output, index)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def begin(self, phase: int, *_: object) -> None:
        """Assign the peak since the last call to the current phase, and begin another one."""
        name = self._names[self._phase]
        self.peaks[name] = max(self.peaks.get(name, 0), self._memory.peak_bytes)
        self._memory.reset_peak()
        self._phase = phase

    def end(self) -> None:
        """End the last phase."""
        self.begin(self._phase)

    def _at_output(self, boundary: int, module: nn.Module, args: object, output: object) -> None:
        """Begin the next phase of the forward, and add hooks that begin the corresponding phase of the backward."""
        # activation checkpointing repeats forwards inside the backward, which must not change the phase
        if self._phase > boundary:
            return
        self.begin(boundary + 1)
        backward_phase = len(self._names) - 2 - boundary
        for tensor in tree_iter(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self.begin, backward_phase))


@dataclass(frozen=True, kw_only=True)
class TrainingStep(Generic[Sample]):
    """Describes a training step, so that a search can run it."""

    runner: StepRunner[Sample]
    sample: Sample
    """The worst case: a sample of the greatest length, all of whose tokens are targets."""
    cut: Callable[[Sample, int], Sample] | None = None
    """Shortens the sample to a number of tokens. Makes probes faster. `profile_memory` requires it."""
    shortest: int = 2
    """The smallest number of tokens to which `cut` may shorten the sample."""
    knee: int = 0
    """The length beyond which tokens need a different amount of memory; 0 if there is none."""
    update: Callable[[StepResult], object] | None
    """Collective: scales and clips the gradients and calls the optimizers, but not the scheduler of the learning rate.
    It changes weights only by the optimizers. None if the step has no update."""
    optimizers: Sequence[Optimizer]
    boundaries: Mapping[str, nn.Module] = field(default_factory=dict)
    """Modules whose outputs divide the step into phases, in the order of the forward. A key names the part of the model
    before the output: {"layers": final_norm, "head and loss": loss}. Without them, a search may need more probes."""
    other_stages: "Sequence[TrainingStep[Any]]" = ()
    """Steps of other stages. They are not measured, but run once, so that their optimizer state is in memory."""

    @property
    def length(self) -> int:
        """Number of tokens of the sample."""
        return self.runner.kind.length_of(self.sample)

    def sample_of(self, length: int | None) -> Sample:
        """Return the sample, shortened to this number of tokens."""
        if length is None or length == self.length:
            return self.sample
        if self.cut is None:
            raise ValueError("a profile measures several lengths: set `cut` of TrainingStep")
        return self.cut(self.sample, length)

    @property
    def smallest(self) -> list[Sample]:
        """A microbatch of one sample, as short as `cut` allows."""
        return [self.sample if self.cut is None else self.cut(self.sample, self.shortest)]


class ProbeReport(NamedTuple):
    """Measurements of one rank in a probe."""

    budget: Budget
    retries: int
    seconds: float
    peaks: tuple[int, ...]
    """The peak of each phase; 0 if the phase was not reached."""
    fullness: float = 0.0

    @property
    def excess_bytes(self) -> int:
        """The peak minus the budget."""
        return max(self.peaks) - self.budget.total_bytes


def agreed_peak(phases: Sequence[str], reports: Sequence[ProbeReport]) -> Peak:
    """Return one peak for all ranks, to be compared with the budget of the tightest rank (with the least free memory).

    Free memory is the budget minus resident memory. The share of a rank is the part of its free memory that its
    peak uses. The result is the tightest rank's resident memory, plus its free memory times the largest share of
    any rank. So it is within that rank's budget if and only if every rank is within its own. Like each rank's peak,
    it is a maximum of affine functions of the rows.
    """
    tightest = min((report.budget for report in reports), key=attrgetter("free_bytes"))

    def in_tightest(peak_bytes: int, budget: Budget) -> int:
        # rounded up, so that a peak one byte above its budget stays above
        above_resident = max(0, peak_bytes - budget.resident_bytes)
        return tightest.resident_bytes - (-above_resident * tightest.free_bytes // budget.free_bytes)

    return Peak(
        phase_bytes={
            phase: max(in_tightest(report.peaks[index], report.budget) for report in reports)
            for index, phase in enumerate(phases)
            if any(report.peaks[index] for report in reports)  # a stage may have no backward or no update
        },
        fits=True,
        retries=max(report.retries for report in reports),
        fullness=max(report.fullness for report in reports),
        seconds=max(report.seconds for report in reports),
    )


class Prober:
    """Runs probes of a training step, with the models and optimizers of all its stages in memory."""

    def __init__(self, step: TrainingStep[Any], memory: MemorySource) -> None:
        """Collective, because it creates an Agreement."""
        self._step, self._memory = step, memory
        self._phases, self._sample = phase_names(step.boundaries), step.sample
        self._agreement = Agreement(5 + len(self._phases))
        self._budget: Budget | None = None
        # Results of the last probe, equal on all ranks:
        self._reports: list[ProbeReport] = []
        self._failed: int | None = None  # the lowest rank that ran out of memory

    def warm_up(self) -> Budget:
        """Collective: run all stages once, so that optimizer state and communication buffers are in memory.

        Returns the budget of the rank with the least free memory. Raises OneRowDoesNotFitError if the shortest sample
        exceeds the budget of any rank. Such a rank could not drain a failed probe either.
        """
        for other in self._step.other_stages:
            with _explaining_errors(1):
                _, failed = self._run(other, [other.smallest], limited=False)
            if failed:
                raise UnrecoverableError(
                    f"rank {failed[0]} ran out of memory in a microbatch of one short sample, in a stage other than "
                    "the one that is measured",
                    *ONE_ROW_REMEDIES,
                )
        self._probe(1, [self._step.smallest])
        self._budget = self._reports[rank()].budget
        if self._failed is None:
            if any(max(report.peaks) == 0 for report in self._reports):
                raise ValueError("a training step allocated no memory: search inside the meter's `with meter:`")
            if all(report.excess_bytes <= 0 for report in self._reports):
                return min((report.budget for report in self._reports), key=attrgetter("free_bytes"))
            self._probe(1, [self._step.smallest, [self._sample]])  # measures the numbers for the error message
        raise self.no_fit_error()

    def measure(self, rows: int, length: int | None = None, *, accumulates: bool = True) -> Peak:
        """Collective: measure a microbatch of rows of this length, by default the length of the sample. If
        `accumulates`, the gradients of an earlier microbatch are in memory."""
        self._sample = self._step.sample_of(length)
        self._probe(rows, [*([self._step.smallest] if accumulates else []), [self._sample] * rows])
        if self._failed is None:
            return agreed_peak(self._phases, self._reports)
        return Peak({}, fits=False, seconds=max(report.seconds for report in self._reports))

    def _probe(self, rows: int, microbatches: list[list[Any]]) -> None:
        """Collective: run the step, and gather the measurements of all ranks in `self._reports`.

        If a single row fails, which would end the run, all ranks try it once more: the cause may be temporary, for
        example another process on the GPU.
        """
        for _ in range(2 if rows == 1 else 1):
            started, retries_before = perf_counter(), self._memory.retries
            with _explaining_errors(rows):
                peaks, failed = self._run(self._step, microbatches, limited=rows > _UNLIMITED_ROWS)
            self._failed = failed[0] if failed else None
            retries, fullness = self._memory.retries - retries_before, self._memory.fullness
            release_memory()
            # The budget is read only once, in the warm-up, because the free memory of a GPU may change in a search.
            if (budget := self._budget) is None:
                self._memory.reset_peak()
                budget = Budget(self._memory.budget_bytes, self._memory.peak_bytes)
            measured_peaks = tuple(peaks.get(phase, 0) for phase in self._phases)
            self.exchange(ProbeReport(budget, retries, perf_counter() - started, measured_peaks, fullness))
            if self._failed is None:
                return

    def exchange(self, report: ProbeReport) -> None:
        """Collective: gather the reports of all ranks."""
        table = self._agreement.gather([*report.budget, report.retries, report.seconds, report.fullness, *report.peaks])
        self._reports = [
            ProbeReport(Budget(int(budget), int(resident)), int(retries), seconds, tuple(map(int, peaks)), fullness)
            for budget, resident, retries, seconds, fullness, *peaks in table
        ]

    def _run(
        self, step: TrainingStep[Any], microbatches: list[list[Any]], *, limited: bool
    ) -> tuple[dict[str, int], list[int]]:
        """Collective: run one step; return the peak of each phase and the ranks that ran out of memory."""
        # If the step cannot be repeated, exceeding the limit would end the run, so the peak is measured without limit.
        memory_limit = nullcontext() if limited and step.runner.recovers else self._memory.unlimited()
        with PhaseMeter(self._memory, step.runner.model, step.boundaries) as meter:
            with memory_limit:
                result, reports = step.runner.attempt(microbatches)
            if result is not None and step.update is not None:
                meter.begin(len(phase_names(step.boundaries)) - 1)
                # The collectives of the update cannot be drained, and its memory does not depend on the rows.
                with self._memory.unlimited():
                    step.update(result)
            if result is not None:
                meter.end()
        step.runner.model.zero_grad(set_to_none=True)
        if reports.stop_requested:
            raise RunStopped("stopped during the search, before the first step")
        return meter.peaks, [*reports.failed]

    def no_fit_error(self) -> OneRowDoesNotFitError:
        """Return the error to raise if the last probe had one row and was not accepted; equal on all ranks."""
        failed_rank, need_bytes, runner = self._failed, None, self._step.runner
        if failed_rank is None:
            failed_rank = max(range(len(self._reports)), key=lambda index: self._reports[index].excess_bytes)
            need_bytes = max(self._reports[failed_rank].peaks)
        return one_row_error(
            *(without_backward(ONE_ROW_REMEDIES) if runner.trains is False else ONE_ROW_REMEDIES),
            length=runner.kind.length_of(self._sample),
            need_bytes=need_bytes,
            budget_bytes=self._reports[failed_rank].budget.total_bytes,
            rank=failed_rank,
        )


@contextmanager
def _explaining_errors(rows: int) -> Iterator[None]:
    """Replace an out-of-memory error in a part of a probe that cannot be repeated; note the rows in other errors."""
    try:
        yield
    except Exception as error:
        if not is_oom(error):
            error.add_note(f"(raised while the batch size search measured a microbatch of {count_of(rows, 'row')})")
            raise
        raise UnrecoverableError(
            f"rank {rank()} ran out of memory while measuring {count_of(rows, 'row')}, in the update or in a step that "
            "cannot be repeated, so the search cannot continue",
            Remedy.FEWER_ROWS if rows > 1 else Remedy.LESS_STATE,
            Remedy.SHORTER_SAMPLES,
            Remedy.MORE_RANKS,
        ) from error


@contextmanager
def probing(step: TrainingStep[Any], memory: MemorySource | None) -> Iterator[tuple[Prober, Budget]]:
    """Collective: yield a Prober after its warm-up, and the budget; at the end, restore models and optimizers."""
    if memory is None and not torch.cuda.is_available():
        raise ConfigError("there is no GPU whose memory could be measured; pass an open MemoryMeter as `memory`")
    memory = CudaMemory() if memory is None else memory
    models = list({id(each.runner.model): each.runner.model for each in (step, *step.other_stages)}.values())
    optimizers = [optimizer for each in (step, *step.other_stages) for optimizer in each.optimizers]
    for model in models:
        if isinstance(model, fsdp.FSDPModule):  # reshards parameters that an evaluation has left gathered
            fsdp.prepare(model)
    with restoring_state(models, optimizers):
        prober = Prober(step, memory)
        yield prober, prober.warm_up()
    # after `restoring_state`, which frees the probes' optimizer state, so that the peak does not include it
    memory.reset_peak()


def find_max_batch_size(
    step: TrainingStep[Any],
    *,
    memory: MemorySource | None = None,
    strategy: str = "linear",
    round_to: str = "power_of_two",
    max_rows: int | None = None,
    whole_step_rows: int | None = None,
) -> SearchResult:
    """Collective: find the most rows per microbatch with which every rank can train. The result is equal on all ranks.

    Call this between two training steps, when gradients are None. It restores parameters, buffers, optimizer state and
    random generators bitwise, and resets the peak of the device. Raises OneRowDoesNotFitError on all ranks if one row
    does not fit.

    Args:
        step: the training step to measure.
        memory: by default, that of the current GPU. On a CPU, pass an open MemoryMeter.
        strategy: "linear" predicts from few probes; "binary" doubles and bisects; "decrease" halves from `max_rows`.
        round_to: "power_of_two" rounds the result down; "none" does not.
        max_rows: the most rows that are measured.
        whole_step_rows: the rows of a whole training step. A first search then runs without accumulated gradients. If
            it finds that many rows, each step is a single microbatch, and the search is complete. If it finds fewer, a
            second search runs with accumulated gradients in memory. None: only the second search runs.
    """
    check_choice("strategy", strategy, STRATEGIES)
    candidate_rows(max_rows, round_to)
    if strategy != "linear" and not step.runner.recovers:
        raise ConfigError(
            f"strategy {strategy!r} runs out of memory on purpose, but this step cannot be repeated after that",
            Remedy.MEASURING_STRATEGY,
        )
    with probing(step, memory) as (prober, budget):
        search_rows = partial(
            search,
            budget=budget,
            no_fit_error=prober.no_fit_error,
            strategy=strategy,
            round_to=round_to,
            max_rows=max_rows,
        )
        without_gradients = partial(prober.measure, accumulates=False)
        if not step.runner.trains:
            return replace(search_rows(without_gradients), accumulates=False)
        if whole_step_rows is not None:
            result = search_rows(without_gradients, least_rows=whole_step_rows)
            if result.rows >= whole_step_rows:
                return replace(result, accumulates=False, reason=f"{result.reason}; a step is one microbatch")
        result = search_rows(prober.measure)
        return replace(result, reason=f"{result.reason}; with accumulated gradients in memory")


def profile_memory(
    step: TrainingStep[Any],
    *,
    memory: MemorySource | None = None,
    most_rows: int = MAX_ROWS,
) -> Profile:
    """Collective: measure how memory depends on the rows and their length, up to the length of the step's sample.

    Arguments and side effects are as for `find_max_batch_size`. `step.cut` is required. `most_rows` is an upper bound.
    """
    lengths = SampleLengths(step.length, step.shortest, step.knee, step.runner.kind.padded)
    with probing(step, memory) as (prober, budget):
        agree = _disable_current_modes()(from_rank_0)  # a full MemoryMeter would refuse the message
        measure = partial(measure_profile, no_fit_error=prober.no_fit_error, most_rows=most_rows, agree=agree)
        return measure(prober.measure, budget, lengths)
