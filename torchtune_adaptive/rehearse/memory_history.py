"""Save a snapshot of torch's allocator with its history, for pytorch.org/memory_viz."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from torchtune_adaptive.rehearse.start import RankSettings


class MemoryHistory:
    """Records each allocation with its Python stack, if the settings request a snapshot."""

    def __init__(self, settings: RankSettings) -> None:
        self._file, self._several = settings.snapshot, settings.real or settings.together is not None
        if self._file:
            torch.cuda._lazy_call(self._start)

    def _start(self) -> None:
        torch.cuda.memory._record_memory_history(stacks="python")
        torch.cuda.memory._set_memory_metadata("step 1")

    def begin(self, step: int) -> None:
        """Label the allocations of a step."""
        if self._file and torch.cuda.is_initialized():
            torch.cuda.memory._set_memory_metadata(f"step {step}")

    def save(self) -> None:
        """Write the snapshot. If several ranks run, the name of the file contains the rank."""
        if self._file and torch.cuda.is_initialized():
            file, rank = Path(self._file), os.environ.get("RANK")
            numbered = self._several and rank is not None
            torch.cuda.memory._dump_snapshot(file.with_stem(f"{file.stem}_{rank}") if numbered else file)
