"""Runs training steps at their worst, and measures what they need on all ranks.

A probe runs one microbatch of the shortest sample, which leaves gradients behind, unless a step is one microbatch; then
one with so many copies of the longest sample, then the update. Hooks read the peak of each phase (memory/phases.py).
One collective makes the peaks of all ranks one `Peak`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from time import perf_counter
from typing import Any, Generic, NamedTuple

from torch import nn
from torch.optim import Optimizer

from torchtune_adaptive.comm.collectives import Agreement, rank
from torchtune_adaptive.errors import OneRowDoesNotFitError, Remedy, RunStopped, UnrecoverableError, without_backward
from torchtune_adaptive.memory.device import MemorySource
from torchtune_adaptive.memory.oom import fatal_where_memory_runs_out, release
from torchtune_adaptive.memory.peak import Peak
from torchtune_adaptive.memory.phases import measuring_phases, phase_names
from torchtune_adaptive.search.probe_result import Room
from torchtune_adaptive.search.refusal import NEEDS_LESS, one_row_error
from torchtune_adaptive.step.reports import StepResult
from torchtune_adaptive.step.runner import StepRunner
from torchtune_adaptive.step.samples import Sample
from torchtune_adaptive.wording import count_of

_UNLIMITED_ROWS = 2
"""Up to here a need above the limit is measured: one row tells the user what it takes, two make a line."""


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


class RankReport(NamedTuple):
    """What one rank measured in a probe."""

    room: Room
    retries: int
    seconds: float
    peaks: tuple[int, ...]
    """The peak of each phase; 0 for a phase that was not reached."""

    @property
    def missing_bytes(self) -> int:
        """What the rank needs above its budget; negative if it has some left."""
        return max(self.peaks) - self.room.budget_bytes


def agreed_peak(phases: Sequence[str], reports: Sequence[RankReport]) -> Peak:
    """One peak for all ranks, in the room of the tightest of them.

    Ranks differ in what they need and in what they have. What counts is the share of its free memory that a rank
    needs, so the largest share of any rank is what the tightest is said to need. That is within its budget if and only
    if every rank is within its own, and it grows with the rows as the needs of the ranks do.
    """
    tightest = min((report.room for report in reports), key=attrgetter("free_bytes"))
    reached = [any(column) for column in zip(*(report.peaks for report in reports), strict=True)]
    shares = [[_scaled(peak, report.room, tightest) for peak in report.peaks] for report in reports]
    return Peak(
        # a stage may have no backward, or no update
        phase_bytes={
            phase: max(column)
            for phase, column, there in zip(phases, zip(*shares, strict=True), reached, strict=True)
            if there
        },
        fits=True,
        retries=max(report.retries for report in reports),
        seconds=max(report.seconds for report in reports),
    )


def _scaled(peak_bytes: int, room: Room, tightest: Room) -> int:
    """The peak in proportion to the tightest rank's room, rounded up: a byte too many stays a byte too many."""
    above_resident = max(0, peak_bytes - room.resident_bytes)
    return tightest.resident_bytes - (-above_resident * tightest.free_bytes // room.free_bytes)


class Prober:
    """Probes one or several training steps, by name: one after another, while all keep what they keep in training."""

    def __init__(self, steps: Mapping[str, TrainingStep[Any]], memory: MemorySource) -> None:
        """Collective: on CUDA it creates the group that the ranks agree on."""
        self._steps = steps
        self._memory = memory
        self._phases = [(name, phase) for name, step in steps.items() for phase in phase_names(step.boundaries)]
        self._agreement = Agreement(4 + len(self._phases))
        self._room: Room | None = None
        self._samples = {name: step.sample for name, step in steps.items()}
        # Of the last probe, the same on every rank:
        self._reports: list[RankReport] = []
        self._failed: tuple[str, int] | None = None  # the step and the rank that ran out of memory

    def warm_up(self) -> Room:
        """Collective: brings all steps to where they are in training, with optimizer state and communication buffers.

        Returns the room of the tightest rank. Raises OneRowDoesNotFitError if not even the shortest sample is within
        the budget: a rank that ran out of memory could not keep its peers company then.
        """
        for beside in (each for step in self._steps.values() for each in step.beside):
            self._make_resident(beside)
        self._probe(1, {name: [[step.runner.kind.stand_in(step.sample)]] for name, step in self._steps.items()})
        self._room = self._reports[rank()].room
        if self._failed is None:
            if any(max(report.peaks) == 0 for report in self._reports):
                raise ValueError("a training step allocated no memory: search inside `with meter:`")
            if all(report.missing_bytes <= 0 for report in self._reports):
                return min((report.room for report in self._reports), key=attrgetter("free_bytes"))
            self._probe_rows(1)  # tells what the user needs to know
        raise self.refuse(*NEEDS_LESS)

    def _make_resident(self, step: TrainingStep[Any]) -> None:
        """Collective: runs a stage once, as small as can be."""
        with _explaining(1):
            _, failed_ranks = self._run(step, [[step.runner.kind.stand_in(step.sample)]], limited=False)
        if failed_ranks:
            raise UnrecoverableError(
                f"rank {failed_ranks[0]} ran out of memory in the smallest microbatch of another stage",
                *NEEDS_LESS,
            )

    def measure(self, rows: int, length: int | None = None, *, accumulates: bool = True) -> Peak:
        """Collective: the same peak on every rank. `length` is the worst sample's, or what that is cut to; a step that
        `accumulates` holds gradients of an earlier microbatch."""
        self._samples = {name: step.sample_of(length) for name, step in self._steps.items()}
        self._probe_rows(rows, accumulates=accumulates)
        if self._failed:
            return Peak({}, fits=False, seconds=max(report.seconds for report in self._reports))
        return agreed_peak([": ".join(filter(None, phase)) for phase in self._phases], self._reports)

    def _probe_rows(self, rows: int, *, accumulates: bool = True) -> None:
        microbatches = {name: [[sample] * rows] for name, sample in self._samples.items()}
        if accumulates:
            for name, step in self._steps.items():
                microbatches[name].insert(0, [step.runner.kind.stand_in(step.sample)])
        self._probe(rows, microbatches)

    def _probe(self, rows: int, microbatches: Mapping[str, list[list[Any]]]) -> None:
        """Collective: probes, and once more if not even one row fits, which ends a run: what was in the way may pass,
        say another process on the GPU. All ranks know that some rank failed, so all of them try again."""
        self._probe_once(rows, microbatches)
        if rows == 1 and self._failed:
            self._probe_once(rows, microbatches)

    def _probe_once(self, rows: int, microbatches: Mapping[str, list[list[Any]]]) -> None:
        """Collective: runs all steps, or as far as they fit, and exchanges what the ranks measured."""
        started, retries_before = perf_counter(), self._memory.retries
        peaks: dict[tuple[str, str], int] = {}
        self._failed = None
        for name, step in self._steps.items():
            with _explaining(rows):
                measured, failed_ranks = self._run(step, microbatches[name], limited=rows > _UNLIMITED_ROWS)
            if failed_ranks:
                self._failed = name, failed_ranks[0]
                break
            peaks.update({(name, phase): peak for phase, peak in measured.items()})
        release()
        retries = self._memory.retries - retries_before
        measured_peaks = tuple(peaks.get(phase, 0) for phase in self._phases)
        self.exchange(RankReport(self._own_room(), retries, perf_counter() - started, measured_peaks))

    def _own_room(self) -> Room:
        """The warm-up's room: other processes come and go on a GPU, but a search is for one budget."""
        if self._room is not None:
            return self._room
        self._memory.reset_peak()
        return Room(self._memory.budget_bytes, self._memory.peak_bytes)

    def exchange(self, report: RankReport) -> None:
        """Collective: one small table of numbers."""
        table = self._agreement.gather([*report.room, report.retries, report.seconds, *report.peaks])
        self._reports = [
            RankReport(Room(int(budget), int(resident)), int(retries), seconds, tuple(map(int, peaks)))
            for budget, resident, retries, seconds, *peaks in table
        ]

    def _run(
        self, step: TrainingStep[Any], microbatches: list[list[Any]], *, limited: bool
    ) -> tuple[dict[str, int], tuple[int, ...]]:
        """Collective: one step: the peak of each phase, and the ranks that ran out of memory."""
        # A step that could not go on after running out of memory must not do so while its need can be measured.
        limit = nullcontext() if limited and step.runner.recovers else self._memory.unlimited()
        with measuring_phases(self._memory, step.runner.model, step.boundaries) as meter:
            with limit:
                attempt = step.runner.attempt(microbatches)
            if attempt.result is not None and step.update is not None:
                meter.begin_update()
                # Its collectives cannot be drained, and its need does not depend on the rows: measured, not limited.
                with self._memory.unlimited():
                    step.update(attempt.result)
            if attempt.result is not None:
                meter.end_phase()
        step.runner.model.zero_grad(set_to_none=True)
        if attempt.asked_to_stop:
            raise RunStopped("stopped during the search, before the first step")
        return meter.peaks, attempt.failed_ranks

    def refuse(self, *remedies: Remedy) -> OneRowDoesNotFitError:
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
            *(remedies if runner.trains else without_backward(remedies)),
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
            Remedy.FEWER_ROWS,
            Remedy.SHORTER_SAMPLES,
            Remedy.MORE_RANKS,
        )
    )
