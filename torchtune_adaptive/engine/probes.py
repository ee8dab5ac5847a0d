"""Runs training steps at their worst, and measures what they need on all ranks.

A probe runs a microbatch of the shortest sample, which leaves gradients behind, one of so many copies of the longest
sample, and the update. The first is left out if a step is one microbatch. One collective makes the peaks of all ranks
one `Peak`.

Which phase of a step needs the most changes with the rows, so the peak of the whole step follows no line, but that of
each phase does. Hooks cut the forward at the outputs of modules, and the backward at the gradients of those outputs;
there the peak is read and reset on the host.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from time import perf_counter
from typing import Any, Generic, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_iter

from torchtune_adaptive.engine import fsdp
from torchtune_adaptive.engine.length_profile import Profile, SampleLengths, measure_profile
from torchtune_adaptive.engine.limits import MAX_ROWS, rungs_up_to
from torchtune_adaptive.engine.memory import CudaMemory, MemorySource
from torchtune_adaptive.engine.oom import fatal_where_memory_runs_out, release
from torchtune_adaptive.engine.ranks import Agreement, rank
from torchtune_adaptive.engine.results import StepResult
from torchtune_adaptive.engine.search import (
    NEED_RECOVERY,
    NEEDS_LESS,
    STRATEGIES,
    Peak,
    Room,
    SearchResult,
    one_row_error,
    search,
)
from torchtune_adaptive.engine.snapshot import leaving_no_trace
from torchtune_adaptive.engine.step import Sample, StepRunner
from torchtune_adaptive.errors import (
    ConfigError,
    OneRowDoesNotFitError,
    Remedy,
    RunStopped,
    UnrecoverableError,
    check_choice,
    without_backward,
)
from torchtune_adaptive.rehearsal_flag import REHEARSAL
from torchtune_adaptive.text import count_of

_UNLIMITED_ROWS = 2
"""Up to here a need above the limit is measured: one row tells the user what it takes, two make a line."""


def phase_names(boundaries: Mapping[str, nn.Module]) -> list[str]:
    """The phases in the order they run. A boundary bears the name of the part of the model that it ends."""
    if not boundaries:
        return ["forward and backward", "update"]
    forward = [f"{part} forward" for part in boundaries]
    backward = [f"{part} backward" for part in reversed(list(boundaries))]
    return [*forward, "loss", *backward, "update"]


class PhaseMeter:
    """Notes the peak of each phase of one step, which may have several microbatches."""

    def __init__(self, memory: MemorySource, boundaries: Mapping[str, nn.Module]) -> None:
        self.peaks: dict[str, int] = {}
        self._memory, self._names, self._phase = memory, phase_names(boundaries), 0
        memory.reset_peak()

    def begin(self, phase: int, *_: object) -> None:
        """Counts the peak since the last call for the phase that ends here."""
        name = self._names[self._phase]
        self.peaks[name] = max(self.peaks.get(name, 0), self._memory.peak_bytes)
        self._memory.reset_peak()
        self._phase = phase

    def begin_update(self) -> None:
        self.begin(len(self._names) - 1)

    def end(self) -> None:
        self.begin(self._phase)

    def at_output(self, boundary: int, module: nn.Module, args: object, output: object) -> None:
        """The forward has reached a boundary; the backward will come back to the same tensor."""
        # Activation checkpointing runs forwards again inside the backward: later phases stay what they are.
        if self._phase > boundary:
            return
        self.begin(boundary + 1)
        backward_before = len(self._names) - 2 - boundary
        for tensor in tree_iter(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self.begin, backward_before))


@contextmanager
def measuring_phases(
    memory: MemorySource, model: nn.Module, boundaries: Mapping[str, nn.Module]
) -> Iterator[PhaseMeter]:
    """Watches the boundaries, given in the order of the forward."""
    meter = PhaseMeter(memory, boundaries)
    # Before FSDP's own hook, which gathers parameters.
    handles = [model.register_forward_pre_hook(partial(meter.begin, 0), prepend=True)]
    for index, module in enumerate(boundaries.values()):
        handles.append(module.register_forward_hook(partial(meter.at_output, index)))
    try:
        yield meter
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True, kw_only=True)
class TrainingStep(Generic[Sample]):
    """One training step, as a search runs it."""

    runner: StepRunner[Sample]
    sample: Sample
    """The worst case: as long as samples get, every token a target."""
    cut: Callable[[Sample, int], Sample] | None = None
    """The sample as one of so many tokens; what a profile over several lengths measures."""
    shortest: int = 2
    """Tokens of the shortest sample that a profile asks of it."""
    knee: int = 0
    """The length up to which what it cuts grows in another way than from there on; 0: it grows in one."""
    update: Callable[[StepResult], object] | None
    """Collective: what follows the backward: scales and clips gradients, steps the optimizers. Not the schedule.
    None: nothing does."""
    optimizers: Sequence[Optimizer]
    boundaries: Mapping[str, nn.Module] = field(default_factory=dict)
    """Modules whose outputs cut the step into phases, in the order of the forward, each under the name of the part
    that it ends: {"layers": final_norm, "head and loss": loss}. Without them a search may take more probes."""
    beside: "Sequence[TrainingStep[Any]]" = ()
    """Other stages, which are not measured with this one, but keep in training what they keep: optimizer state, say."""

    @property
    def length(self) -> int:
        return self.runner.kind.length_of(self.sample)

    def sample_of(self, length: int | None) -> Sample:
        """The worst sample of so many tokens."""
        if length is None or length == self.length:
            return self.sample
        if self.cut is None:
            raise ValueError("a profile measures several lengths: set `cut` of TrainingStep")
        return self.cut(self.sample, length)

    @property
    def smallest(self) -> list[Sample]:
        """The microbatch that needs the least."""
        return [self.runner.kind.stand_in(self.sample)]


class ProbeReport(NamedTuple):
    """What one rank measured in a probe."""

    room: Room
    retries: int
    seconds: float
    peaks: tuple[int, ...]
    """The peak of each phase; 0 for a phase that was not reached."""
    fullness: float = 0.0

    @property
    def missing_bytes(self) -> int:
        """What the rank needs above its budget; negative if it has some left."""
        return max(self.peaks) - self.room.budget_bytes


def agreed_peak(phases: Sequence[str], reports: Sequence[ProbeReport]) -> Peak:
    """One peak for all ranks, in the room of the tightest of them.

    Ranks differ in what they need and in what they have. What counts is the share of its free memory that a rank
    needs. The result is the largest of these shares, in bytes of the rank that has least: within that one's budget if
    and only if every rank is within its own. It grows with the rows as the needs of the ranks do.
    """
    tightest = min((report.room for report in reports), key=attrgetter("free_bytes"))

    def in_tightest(peak_bytes: int, room: Room) -> int:
        # rounded up: a byte too many stays a byte too many
        above_resident = max(0, peak_bytes - room.resident_bytes)
        return tightest.resident_bytes - (-above_resident * tightest.free_bytes // room.free_bytes)

    return Peak(
        phase_bytes={
            phase: max(in_tightest(report.peaks[index], report.room) for report in reports)
            for index, phase in enumerate(phases)
            if any(report.peaks[index] for report in reports)  # a stage may have no backward, or no update
        },
        fits=True,
        retries=max(report.retries for report in reports),
        fullness=max(report.fullness for report in reports),
        seconds=max(report.seconds for report in reports),
    )


OnProbe: TypeAlias = Callable[[int, Peak | None], object]
"""Called with the rows of a probe and None when it begins, and with what it measured when it ends."""


class Prober:
    """Probes one or several training steps, by name: one after another, while all keep what they keep in training."""

    def __init__(
        self, steps: Mapping[str, TrainingStep[Any]], memory: MemorySource, progress: OnProbe = lambda *_: None
    ) -> None:
        """Collective: on CUDA it creates the group that the ranks agree on."""
        self._steps, self._memory, self._progress = steps, memory, progress
        self._phases = [(name, phase) for name, step in steps.items() for phase in phase_names(step.boundaries)]
        self._agreement = Agreement(5 + len(self._phases))
        self._room: Room | None = None
        self._samples = {name: step.sample for name, step in steps.items()}
        # Of the last probe, the same on every rank:
        self._reports: list[ProbeReport] = []
        self._failed: tuple[str, int] | None = None  # the step and the rank that ran out of memory

    def warm_up(self) -> Room:
        """Collective: brings all steps to where they are in training, with optimizer state and communication buffers.

        Returns the room of the tightest rank. Raises OneRowDoesNotFitError if not even the shortest sample is within
        the budget: a rank that ran out of memory could not keep its peers company then.
        """
        for beside in (each for step in self._steps.values() for each in step.beside):
            with _explaining(1):
                _, failed = self._run(beside, [beside.smallest], limited=False)
            if failed:
                raise UnrecoverableError(
                    f"rank {failed[0]} ran out of memory in the smallest microbatch of another stage", *NEEDS_LESS
                )
        self._probe(1, {name: [step.smallest] for name, step in self._steps.items()})
        self._room = self._reports[rank()].room
        if self._failed is None:
            if any(max(report.peaks) == 0 for report in self._reports):
                raise ValueError("a training step allocated no memory: search inside `with meter:`")
            if all(report.missing_bytes <= 0 for report in self._reports):
                return min((report.room for report in self._reports), key=attrgetter("free_bytes"))
            self._probe_rows(1)  # tells what the user needs to know
        raise self.refuse()

    def measure(self, rows: int, length: int | None = None, *, accumulates: bool = True) -> Peak:
        """Collective: the same peak on every rank. `length` is the worst sample's, or what that is cut to; a step that
        `accumulates` holds gradients of an earlier microbatch."""
        self._progress(rows, None)
        self._samples = {name: step.sample_of(length) for name, step in self._steps.items()}
        self._probe_rows(rows, accumulates=accumulates)
        if self._failed:
            peak = Peak({}, fits=False, seconds=max(report.seconds for report in self._reports))
        else:
            peak = agreed_peak([": ".join(filter(None, phase)) for phase in self._phases], self._reports)
        self._progress(rows, peak)
        return peak

    def _probe_rows(self, rows: int, *, accumulates: bool = True) -> None:
        """Collective: probes so many rows of the worst samples."""
        microbatches = {
            name: [*([step.smallest] if accumulates else []), [self._samples[name]] * rows]
            for name, step in self._steps.items()
        }
        self._probe(rows, microbatches)

    def _probe(self, rows: int, microbatches: Mapping[str, list[list[Any]]]) -> None:
        """Collective: runs all steps, or as far as they fit, and exchanges what the ranks measured.

        If not even one row fits, which ends a run, it tries once more: what was in the way may pass, say another
        process on the GPU. All ranks know that some rank failed, so all of them try again.
        """
        for _ in range(2 if rows == 1 else 1):
            started, retries_before = perf_counter(), self._memory.retries
            peaks: dict[tuple[str, str], int] = {}
            self._failed = None
            for name, step in self._steps.items():
                with _explaining(rows):
                    measured, failed = self._run(step, microbatches[name], limited=rows > _UNLIMITED_ROWS)
                if failed:
                    self._failed = name, failed[0]
                    break
                peaks.update({(name, phase): peak for phase, peak in measured.items()})
            retries, fullness = self._memory.retries - retries_before, self._memory.fullness
            release()
            # The warm-up's room: other processes come and go on a GPU, but a search is for one budget.
            if (room := self._room) is None:
                self._memory.reset_peak()
                room = Room(self._memory.budget_bytes, self._memory.peak_bytes)
            measured_peaks = tuple(peaks.get(phase, 0) for phase in self._phases)
            self.exchange(ProbeReport(room, retries, perf_counter() - started, measured_peaks, fullness))
            if self._failed is None:
                return

    def exchange(self, report: ProbeReport) -> None:
        """Collective: one small table of numbers."""
        table = self._agreement.gather([*report.room, report.retries, report.seconds, report.fullness, *report.peaks])
        self._reports = [
            ProbeReport(Room(int(budget), int(resident)), int(retries), seconds, tuple(map(int, peaks)), fullness)
            for budget, resident, retries, seconds, fullness, *peaks in table
        ]

    def _run(
        self, step: TrainingStep[Any], microbatches: list[list[Any]], *, limited: bool
    ) -> tuple[dict[str, int], list[int]]:
        """Collective: one step: the peak of each phase, and the ranks that ran out of memory."""
        # A step that could not go on after running out of memory must not do so while its need can be measured.
        enforced = nullcontext() if limited and step.runner.recovers else self._memory.unlimited()
        with measuring_phases(self._memory, step.runner.model, step.boundaries) as meter:
            with enforced:
                result, reports = step.runner.attempt(microbatches)
            if result is not None and step.update is not None:
                meter.begin_update()
                # Its collectives cannot be drained, and its need does not depend on the rows: measured, not limited.
                with self._memory.unlimited():
                    step.update(result)
            if result is not None:
                meter.end()
        step.runner.model.zero_grad(set_to_none=True)
        if reports.asked_to_stop:
            raise RunStopped("stopped during the search, before the first step")
        return meter.peaks, [*reports.failed]

    def refuse(self) -> OneRowDoesNotFitError:
        """What the last probe, of one row, needed and did not have; the same on every rank."""
        if self._failed is not None:
            name, where = self._failed
            need_bytes = None
        else:
            where = max(range(len(self._reports)), key=lambda index: self._reports[index].missing_bytes)
            need_bytes = max(self._reports[where].peaks)
            name = self._phases[self._reports[where].peaks.index(need_bytes)][0]
        runner = self._steps[name].runner
        return one_row_error(
            *(without_backward(NEEDS_LESS) if runner.trains is False else NEEDS_LESS),
            length=runner.kind.length_of(self._samples[name]),
            need_bytes=need_bytes,
            budget_bytes=self._reports[where].room.budget_bytes,
            rank=where,
            of=name,
        )


def _explaining(rows: int) -> AbstractContextManager[None]:
    """Says what it means if a step runs out of memory where no limit stopped it."""
    return fatal_where_memory_runs_out(
        lambda _: UnrecoverableError(
            f"rank {rank()} ran out of memory while measuring {count_of(rows, 'row')}, in the update or in a step that "
            "cannot be repeated, so the search cannot continue",
            Remedy.FEWER_ROWS if rows > 1 else Remedy.LESS_STATE,
            Remedy.SHORTER_SAMPLES,
            Remedy.MORE_RANKS,
        )
    )


@contextmanager
def _probing(
    steps: TrainingStep[Any] | Mapping[str, TrainingStep[Any]], memory: MemorySource | None, progress: OnProbe | None
) -> Iterator[tuple[Mapping[str, TrainingStep[Any]], Prober]]:
    """Collective: the steps by name, and a prober of them that leaves nothing behind."""
    named = steps if isinstance(steps, Mapping) else {"": steps}
    if not named:
        raise ValueError("a search needs at least 1 training step, but got none")
    if memory is None and not torch.cuda.is_available():
        raise ConfigError("there is no GPU whose memory is measured; pass memory, a MemoryMeter that is in force")
    memory = CudaMemory() if memory is None else memory
    run = [*named.values(), *(beside for step in named.values() for beside in step.beside)]
    # Once each: stages may share a model.
    models = list({id(step.runner.model): step.runner.model for step in run}.values())
    optimizers = [optimizer for step in run for optimizer in step.optimizers]
    for model in models:
        if isinstance(model, fsdp.FSDPModule):  # an evaluation leaves parameters gathered, in storages that will go
            fsdp.prepare(model)
    with leaving_no_trace(models, optimizers), REHEARSAL.trial():
        yield named, Prober(named, memory, progress or (lambda *_: None))
    # Only now, since a peak restarts from what is in use: until then that was optimizer state of the probes' own.
    memory.reset_peak()


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

    With `whole_step_rows`, the rows from which on a step is one microbatch, it first searches without gradients of an
    earlier microbatch, and again with them if it finds fewer. By default every step has several. `memory` is the GPU's
    by default; on a CPU, a MemoryMeter that is in force. The other arguments are those of `search`. Raises
    OneRowDoesNotFitError, the same on every rank.
    """
    check_choice("strategy", strategy, STRATEGIES)
    rungs_up_to(max_rows, round_to, samples_per_step)
    with _probing(steps, memory, progress) as (named, prober):
        if strategy in NEED_RECOVERY and not all(step.runner.recovers for step in named.values()):
            raise ConfigError(
                f"strategy {strategy!r} runs out of memory on purpose, but this step cannot be repeated afterwards",
                Remedy.MEASURING_STRATEGY,
            )
        search_rows = partial(
            search,
            room=prober.warm_up(),
            refuse=prober.refuse,
            strategy=strategy,
            round_to=round_to,
            max_rows=max_rows,
            samples_per_step=samples_per_step,
        )
        alone = partial(prober.measure, accumulates=False)
        if not any(step.runner.trains for step in named.values()):
            return replace(search_rows(alone), accumulates=False)
        if whole_step_rows is not None:
            result = search_rows(alone, least_rows=whole_step_rows)
            if result.rows >= whole_step_rows:
                return replace(result, accumulates=False, reason=f"{result.reason}; a step is one microbatch")
        result = search_rows(prober.measure)
        return replace(result, reason=f"{result.reason}; with accumulated gradients in memory")


def profile_memory(
    steps: TrainingStep[Any] | Mapping[str, TrainingStep[Any]],
    *,
    memory: MemorySource | None = None,
    most_rows: int = MAX_ROWS,
    progress: OnProbe | None = None,
) -> Profile:
    """Collective: what microbatches of up to the steps' lengths need, over rows and length, the same on every rank.

    As `find_max_batch_size`, but every step needs a `cut`.
    """
    with _probing(steps, memory, progress) as (named, prober):
        lengths = SampleLengths(
            longest=max(step.length for step in named.values()),
            shortest=max(step.shortest for step in named.values()),
            knee=max(step.knee for step in named.values()),
            padded=all(step.runner.kind.padded for step in named.values()),
        )
        room = prober.warm_up()
        return measure_profile(prober.measure, room, lengths, refuse=prober.refuse, most_rows=most_rows)
