"""Output of a run: progress bar, metric logger, journal and profiler. Also detects runs that do not learn.

The journal consists of two files: `adaptive_steps.jsonl` has the logged steps, `adaptive_events.jsonl` has all other
events. Lines are only appended. A resumed run repeats the steps since its checkpoint, so these steps have several
lines. The last one counts.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torchtune import training

from torchtune_adaptive.atomic_files import reason
from torchtune_adaptive.checkpoints.progress import EpochSizes
from torchtune_adaptive.config import components
from torchtune_adaptive.config.components import COMPONENT
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.engine.limit_policy import Change
from torchtune_adaptive.engine.limits import Limit
from torchtune_adaptive.engine.memory import MemorySource
from torchtune_adaptive.engine.results import StepResult
from torchtune_adaptive.formatting import format_bytes
from torchtune_adaptive.lifecycle.console import progress_bar

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

PROFILER = "torchtune.training.setup_torch_profiler"
EVENTS_FILE = "adaptive_events.jsonl"
STEPS_FILE = "adaptive_steps.jsonl"

START = "start"
SEARCH = "search"
EPOCH = "epoch"
VALIDATION = "validation"
"""Kinds of event, in addition to those of `limit_policy.Change`."""


class Journal:
    """Appends lines to the files of the journal, on the rank that has a directory, rank 0.

    No method raises an error, because a failed write must not end the run. Only the first failure is logged. Each later
    line is tried, because a full disk may have space again.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._incomplete = False

    def start(self, steps_done: int) -> None:
        """Record that training starts after `steps_done` steps. Readers ignore later steps in lines before this one."""
        reason = f"training starts after step {steps_done}" if steps_done else "training starts"
        self.record(START, steps_done, reason)
        if self._directory is not None and os.path.isfile(self._directory / STEPS_FILE):
            self._append(STEPS_FILE, {"kind": START, "step": steps_done})

    def event(self, change: Change) -> None:
        """Append a change of the limit."""
        self.record(**asdict(change))

    def record(self, kind: str, step: int, reason: str, **figures: object) -> None:
        """Append an event that has happened in or after this step, with its log line. Figures that a Change also has
        mean the same. Those that are None are omitted."""
        known = {name: value for name, value in figures.items() if value is not None}
        self._append(EVENTS_FILE, {"kind": kind, "step": step, "reason": reason, **known})

    def step(self, step: int, metrics: Mapping[str, object]) -> None:
        """Append the metrics of a step."""
        self._append(STEPS_FILE, {"step": step, **metrics})

    def _append(self, name: str, record: Mapping[str, object]) -> None:
        if self._directory is None:
            return
        try:
            # without NaN and infinity, which JSON does not have
            values = {
                key: value for key, value in record.items() if not isinstance(value, float) or math.isfinite(value)
            }
            _append_line(self._directory / name, json.dumps({"time": round(time.time(), 3), **values}))
        except Exception as error:  # noqa: BLE001 - a metric may have any type, and a disk may fail in any way
            if not self._incomplete:
                line = "the record of this run is incomplete: %s: %s; training continues"
                logger.warning(line, self._directory / name, reason(error))
            self._incomplete = True


def _append_line(path: Path, line: str) -> None:
    """Append a line with a single write, so that a crash cannot damage earlier lines. Raises OSError."""
    # Opens the file for every line, because it may have been deleted.
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        ends_within_a_line = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        content = b"\n" * ends_within_a_line + f"{line}\n".encode()
        if os.write(descriptor, content) < len(content):
            raise OSError("the line was only partly written")
    finally:
        os.close(descriptor)


def record_epoch(journal: Journal, epoch: int, limits: Mapping[str, Limit], step: int) -> None:
    """Record the limit of each stage when an epoch begins or resumes after this step."""
    for stage, limit in limits.items():
        reason = f"epoch {epoch}{', ' * bool(stage)}{stage}: microbatches of at most {limit}"
        journal.record(EPOCH, step, reason, stage=stage or None, unit=limit.unit, after=limit.size)


class Metrics:
    """Logs each step under torchtune's names and updates the progress bar. Only rank 0 has output."""

    def __init__(self, settings: Settings, device: torch.device, journal: Journal) -> None:
        self._shown = dist.get_rank() == 0
        self._settings, self._device, self._journal = settings, device, journal
        self.memory: MemorySource | None = None
        """The peak of this memory is logged with every logged step, and then reset."""
        self._step_began = time.perf_counter()
        self._skipped = 0
        self._logger_failed = False
        if self._shown:
            self._logger = components.build("metric_logger", settings.config)
            self._logger.log_config(settings.config)  # torchtune's loggers also save it in output_dir

    def epoch(self, sizes: EpochSizes, steps: Iterable[Item], done: int = 0, unit: str = "steps") -> Iterator[Item]:
        """Yield the steps of an epoch and show their progress."""
        self._samples_per_step = sizes.samples_per_step
        what = f"epoch {sizes.epoch}"
        with progress_bar(what, sizes.steps, unit, done=done, shown=self._shown, at_once=True) as self._bar:
            self._step_began = time.perf_counter()
            yield from steps

    def log_step(
        self, step: int, result: StepResult, grad_norm: float | None, samples: float | None, more: Mapping[str, float]
    ) -> None:
        """Log a step with its loss, a mean over target tokens or over `samples`. Waits for the GPU."""
        loss = float(result.loss_sum) / max(1, result.target_tokens if samples is None else samples)
        if self._shown and not result.target_tokens:
            logger.warning("step %d: no token counts in the loss: is all text masked, or max_seq_len too small?", step)
        now, ranks = time.perf_counter(), dist.get_world_size()
        tokens_per_second, self._step_began = result.target_tokens / (now - self._step_began), now
        skipped = self._skipped + (grad_norm is not None and not math.isfinite(grad_norm))
        figures = {
            "loss": loss,
            **more,
            "tokens_per_second_per_gpu": tokens_per_second / ranks,
            "microbatches": result.microbatches,
            "microbatch_rows": result.load.most_rows,
            "microbatch_tokens": result.load.most_tokens,
            "padding_fraction": 1 - result.load.tokens / result.load.padded_tokens,
            "rank_imbalance": result.imbalance,
            "allocator_retries": result.retries,
            **({} if grad_norm is None else {"grad_norm": grad_norm}),
            "skipped_updates": skipped,
        }
        # Tensor-parallel ranks train the same samples, so a sum over ranks counts each sample several times.
        sharing = self._settings.tensor_parallel_dim
        run = {
            "samples": self._samples_per_step * ranks // sharing,
            "target_tokens": result.target_tokens // sharing,
            "target_tokens_per_second": tokens_per_second / sharing,
            **({} if result.memory is None else result.memory._asdict()),
        }
        self.log(step, f"loss {loss:.4f}", figures, run)

    def log(self, step: int, headline: str, figures: Mapping[str, float], run: Mapping[str, object]) -> None:
        """Log figures to the metric logger and to the journal, and those of `run` only to the journal."""
        before, self._skipped = self._skipped, int(figures["skipped_updates"])
        if self._shown:
            if self._skipped > before:
                logger.warning("step %d: the gradient norm is not finite; the weights are not updated", step)
            self._bar.set_postfix_str(", ".join((headline, *self._pace(figures, run))), refresh=False)
            self._bar.update()
        if step % self._settings.log_every_n_steps != 0:
            return
        if self._shown:
            on_device = self._settings.log_peak_memory_stats and self._device.type != "cpu"
            peaks = training.get_memory_stats(device=self._device) if on_device else {}
            self._log_dict(step, {**figures, **peaks})
            self._journal.step(step, {**figures, **run})
        if self.memory is not None:
            self.memory.reset_peak()

    def _pace(self, figures: Mapping[str, float], run: Mapping[str, Any]) -> Iterator[str]:
        """Yield speed, padding and memory."""
        yield f"{run['target_tokens_per_second']:,.0f} tokens/s"
        if "padding_fraction" in figures:
            yield f"{100 * figures['padding_fraction']:.0f} % padding"
        if "peak_bytes" in run:
            yield f"{format_bytes(run['peak_bytes'])} of {format_bytes(run['budget_bytes'])}"

    def log_validation(self, step: int, figures: Mapping[str, float]) -> None:
        """Log a validation after this step, and exclude its time and memory from the next step."""
        self._step_began = time.perf_counter()
        if self.memory is not None:
            self.memory.reset_peak()
        if self._shown:
            values = ", ".join(f"{name} {value:.4f}" for name, value in figures.items())
            line = f"step {step}: {values}"
            logger.info("%s", line)
            if not math.isfinite(figures["val_loss"]):
                logger.warning("step %d: the validation loss is not finite; check the samples of dataset_val", step)
            self._log_dict(step, figures)
            self._journal.record(VALIDATION, step, line, val_loss=figures["val_loss"])

    def _log_dict(self, step: int, figures: Mapping[str, Any]) -> None:
        try:
            self._logger.log_dict(figures, step=step)
        except OSError as error:  # if the disk is full, saving the next checkpoint raises a better error
            if not self._logger_failed:
                logger.warning("the metric logger failed at step %d: %s; training continues", step, reason(error))
            self._logger_failed = True

    def close(self) -> None:
        """Close the metric logger."""
        if self._shown:
            with suppress(OSError):
                self._logger.close()


class StepProfiler:
    """Runs the configured profiler, and records CUDA's memory history during the profiler's active steps."""

    def __init__(self, cfg: DictConfig, device: torch.device) -> None:
        self._steps, self._recorded = 0, range(0)
        self._profiler: Any = training.DummyProfiler()
        if cfg.get("profiler") is None or not components.require(cfg, "profiler").get("enabled"):
            return
        with_component = cast(DictConfig, OmegaConf.merge({"profiler": {COMPONENT: PROFILER}}, cfg))
        self._profiler, chosen = components.build("profiler", with_component)
        if device.type == "cuda" and dist.get_rank() == 0 and chosen.get("profile_memory"):
            first = chosen["wait_steps"] + chosen["warmup_steps"]
            self._recorded = range(first, first + chosen["active_steps"])

    def start(self) -> None:
        """Start the profiler."""
        self._profiler.start()
        self._switch_recording()

    def step(self) -> None:
        """End a step."""
        self._steps += 1
        self._switch_recording()
        self._profiler.step()

    def stop(self) -> None:
        """Stop the profiler."""
        self._profiler.stop()

    def _switch_recording(self) -> None:
        if self._recorded and self._steps == self._recorded.start:
            torch.cuda.memory._record_memory_history()
        elif self._recorded and self._steps == self._recorded.stop:
            torch.cuda.memory._record_memory_history(enabled=None)
