"""What a run shows: a progress bar, and the metric logger that the config names. Only rank 0 shows anything."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torchtune import training

from torchtune_adaptive.atomic_files import keep_file, reason
from torchtune_adaptive.checkpoints.progress import EpochSizes
from torchtune_adaptive.checkpoints.resuming import checkpoint_directory
from torchtune_adaptive.config import components
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.engine.memory import MemorySource
from torchtune_adaptive.engine.reports import StepResult
from torchtune_adaptive.life.console import progress_bar
from torchtune_adaptive.life.this_run import THIS_RUN, Doing
from torchtune_adaptive.tune.run_journal import RunJournal

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

CONFIG = "torchtune_config.yaml"
"""Name that torchtune gives to the config it logs."""


class _Trend(NamedTuple):
    """The first and last value of what is shown of the training, and the step of the first."""

    figure: str
    since_step: int
    first: float
    last: float

    def __str__(self) -> str:
        return f"{self.figure} {self.first:.4f} -> {self.last:.4f}"


class Metrics:
    """Logs each step under torchtune's names and keeps the progress bar of the epoch."""

    def __init__(self, settings: Settings, device: torch.device, journal: RunJournal) -> None:
        self._shown = dist.get_rank() == 0
        self._every = settings.log_every_n_steps
        self._sharing_ranks = settings.tensor_parallel_dim
        """Ranks that run the same samples together, so that sums over ranks count each sample this often."""
        self._journal = journal
        self._memory: MemorySource | None = None
        self._memory_of = device if settings.log_peak_memory_stats and device.type != "cpu" else None
        self._step_began = time.perf_counter()
        self._trend: _Trend | None = None
        self._skipped = 0
        self._checkpoints_in = checkpoint_directory(settings)
        self._logger_failed = False
        if self._shown:
            self._logger = components.build("metric_logger", settings.config)
            self._logger.log_config(settings.config)
            keep_config(settings)

    def watch(self, memory: MemorySource | None) -> None:
        """Logs the peak of this memory, which starts anew at every logged step."""
        self._memory = memory

    def epoch(
        self, sizes: EpochSizes, steps: Iterable[Item], steps_done: int = 0, called: str = "steps"
    ) -> Iterator[Item]:
        """The steps left of an epoch, with a progress bar around them, where they are `called` that."""
        self._sizes = sizes
        what = f"epoch {sizes.epoch}"
        with progress_bar(what, sizes.steps, called, done=steps_done, shown=self._shown, at_once=True) as self._bar:
            self._step_began = time.perf_counter()
            yield from steps

    def log_step(
        self,
        step: int,
        result: StepResult,
        recoveries: int,
        *,
        learning_rate: float,
        grad_norm: float | None,
        samples: float | None = None,
        more: Mapping[str, float] | None = None,
    ) -> float:
        """Logs a step and returns its loss: the mean over target tokens, or over so many samples. `more` are figures
        of a step that has several stages. Reading them waits for the GPU."""
        loss = float(result.loss_sum) / max(1, result.target_tokens if samples is None else samples)
        now = time.perf_counter()
        tokens_per_second, self._step_began = result.target_tokens / (now - self._step_began), now
        norm = {} if grad_norm is None else {"grad_norm": grad_norm}
        self._skipped += grad_norm is not None and not math.isfinite(grad_norm)
        figures = {"loss": loss, "lr": learning_rate, **_load(result, tokens_per_second), **norm}
        memory = {} if result.memory is None else result.memory._asdict()
        sharing = self._sharing_ranks
        run = {
            "samples": self._sizes.samples_per_step * dist.get_world_size() // sharing,
            "target_tokens": result.target_tokens // sharing,
            "target_tokens_per_second": tokens_per_second / sharing,
            **memory,
        }
        self._show(step, "loss", loss, decimals=4)
        self._log(
            step, {**figures, **(more or {}), "oom_recoveries": recoveries, "skipped_updates": self._skipped}, run
        )
        return loss

    def log_iteration(self, step: int, figures: Mapping[str, float], run: Mapping[str, float]) -> None:
        """Logs an iteration of several steps: `run` are figures that only the record has."""
        self._show(step, "reward", figures["scores"], decimals=3)
        self._log(step, figures, run)

    def _show(self, step: int, figure: str, value: float, *, decimals: int) -> None:
        if self._shown:
            self._trend = self._trend._replace(last=value) if self._trend else _Trend(figure, step, value, value)
            self._bar.set_postfix_str(f"{figure} {value:.{decimals}f}", refresh=False)
            self._bar.update()

    def _log(self, step: int, figures: Mapping[str, float], run: Mapping[str, object]) -> None:
        """Logs to the config's logger and to the record of the run, which does not depend on what that logger keeps."""
        if step % self._every != 0:
            return
        if self._shown:
            self._to_logger({**figures, **self._peak_memory()}, step)
            self._journal.step(step, {**figures, **run})
        if self._memory is not None:
            self._memory.reset_peak()

    def _to_logger(self, figures: Mapping[str, float], step: int) -> None:
        """Logs to the config's logger. A full disk must not end the run here: the next checkpoint says it better."""
        try:
            self._logger.log_dict(figures, step=step)
        except OSError as error:
            if not self._logger_failed:
                logger.warning("the metric logger failed at step %d: %s; training continues", step, reason(error))
            self._logger_failed = True

    def close(self) -> None:
        if not self._shown:
            return
        if self._trend:
            what = "trained" if THIS_RUN.doing is Doing.LAST_SAVE else "so far"
            since = "" if self._trend.since_step == 1 else f" from step {self._trend.since_step}"
            logger.info("%s%s: %s, checkpoints in %s", what, since, self._trend, self._checkpoints_in)
        with suppress(OSError):
            self._logger.close()

    def _peak_memory(self) -> Mapping[str, float]:
        if self._memory_of is None:
            return {}
        stats: Mapping[str, float] = training.get_memory_stats(device=self._memory_of)
        return stats


def keep_config(settings: Settings) -> None:
    """The whole config as it runs, where torchtune's own loggers put it; others would not."""
    path = Path(settings.output_dir) / CONFIG
    text = OmegaConf.to_yaml(settings.config, resolve=True)
    if keep_file(path, text.encode(), "the config of this run is not saved"):
        logger.info("config: %s", path)


def _load(result: StepResult, tokens_per_second: float) -> dict[str, float]:
    """The figures of what a step was made of, and how fast it was."""
    return {
        "tokens_per_second_per_gpu": tokens_per_second / dist.get_world_size(),
        "microbatches": result.microbatches,
        "microbatch_rows": result.load.most_rows,
        "microbatch_tokens": result.load.most_tokens,
        "padding_fraction": 1 - result.load.tokens / result.load.padded_tokens,
        "rank_imbalance": result.imbalance,
        "allocator_retries": result.retries,
    }
