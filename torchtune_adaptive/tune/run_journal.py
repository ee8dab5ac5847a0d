"""The record of a run in its `output_dir`, kept by rank 0: its events, its logged steps, and a picture of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from torchtune_adaptive.checkpoints.progress import EpochSizes, Progress
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.engine.governor import Change
from torchtune_adaptive.engine.limits import Limit
from torchtune_adaptive.report.journal import EPOCH, SCHEDULE, START, Event, Journal, read_timeline
from torchtune_adaptive.report.pictures import draw_run


class RunJournal:
    """Keeps the record on rank 0; on other ranks it does nothing."""

    def __init__(self, settings: Settings) -> None:
        self._directory = Path(settings.output_dir)
        self._journal = Journal(self._directory) if dist.get_rank() == 0 else None
        self._steps_before = 0
        self._started = False

    def event(self, event: Event | Change) -> None:
        if self._journal is not None:
            self._journal.event(event)

    def step(self, step: int, figures: Mapping[str, object]) -> None:
        if self._journal is not None:
            self._journal.step(step, figures)

    def start(self, steps_done: int) -> None:
        """Opens the record at a step, once. What it holds of later steps, of a run that ended early, does not count."""
        if self._started:
            return
        self._started = True
        how = f"training starts after step {steps_done}" if steps_done else "training starts"
        if self._journal is not None:
            self._journal.start(Event(kind=START, step=steps_done, reason=how))
        self._steps_before = steps_done

    def search(self, event: Event) -> None:
        """Records a search. It does not know the steps that the run has taken; the journal does."""
        self.event(replace(event, step=self._steps_before))

    def epoch(self, sizes: EpochSizes, limits: Mapping[str, Limit], progress: Progress, ranks: int) -> None:
        """Records the limit of each stage with which an epoch begins, or goes on; a single stage is named ""."""
        for stage, limit in limits.items():
            self.limit(limit, progress.step, stage, f"epoch {sizes.epoch}")
        self._schedule(sizes, progress, ranks)

    def limit(self, limit: Limit, step: int, stage: str, when: str) -> None:
        """Records the limit that a stage has from here on."""
        reason = f"{', '.join(filter(None, (when, stage)))}: microbatches of at most {limit}"
        event = Event(kind=EPOCH, step=step, stage=stage or None, reason=reason, unit=limit.unit, after=limit.size)
        self.event(event)

    def _schedule(self, sizes: EpochSizes, progress: Progress, ranks: int) -> None:
        """Records the start of an epoch whose steps have more or fewer samples than those of the epoch before."""
        past, step = progress.past, progress.step
        if progress.steps_in_epoch or not past or past[-1].samples_per_step == sizes.samples_per_step:
            return
        before, after = past[-1].samples_per_step * ranks, sizes.samples_per_step * ranks
        reason = f"epoch {sizes.epoch}: batch size {past[-1].batch_size} -> {sizes.batch_size}, samples a step {after}"
        self.event(Event(kind=SCHEDULE, step=step, reason=reason, unit="samples", before=before, after=after))

    def close(self) -> None:
        """Draws the picture, once training has ended."""
        if self._journal is not None:
            draw_run(self._directory, read_timeline(self._directory))
